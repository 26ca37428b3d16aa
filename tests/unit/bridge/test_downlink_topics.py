"""Check of a downlink's Kafka topics: deleted, recreated, or on a broker without topic ids.

Kafka's answers are fakes; `tests/integration/bridge/test_downlink_topics.py` asks a real one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest
from confluent_kafka import Uuid
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.bridge.noted import planned
from tests.unit.bridge.test_downlink_file import GOOD, read
from towline.bridge.config.model import Bridge, Downlink
from towline.bridge.downlink.query import DownlinkQuery
from towline.bridge.lines.identity import Identity
from towline.checkpoint import Checkpoint
from towline.errors import KafkaError
from towline.kafka.admin import KafkaAdmin, recreated_topics, saved_topic_ids

PATTERN = GOOD.replace('from = "commands"', "from = { pattern = '^t\\.' }")
GO_ON = PATTERN + 'on_data_loss = "go_on"\n'
#: End offsets of batch 0, which is committed, and of batch 1; whether batch 1 is committed; the bridge file; the first
#: offset that Kafka still has of t.a; the error about the deleted topic t.b, with batches of at most 100 records.
CASES = [
    # all of it was delivered: it stood still, or the batch had room for more
    ({"t.a": 1, "t.b": 5}, {"t.a": 9, "t.b": 5}, True, PATTERN, 0, ""),
    ({"t.a": 1, "t.b": 5}, {"t.a": 9, "t.b": 50}, True, PATTERN, 0, ""),
    ({"t.a": 1, "t.b": 5}, {"t.a": 200, "t.b": 5}, True, PATTERN, 0, ""),
    # the batch was full: there was more of it, or there may have been
    ({"t.a": 1, "t.b": 5}, {"t.a": 50, "t.b": 55}, True, PATTERN, 0, 'topic "t.b" behind offset 55'),
    # planned without it, as Spark does when it is deleted, and never run
    ({"t.a": 1, "t.b": 5}, {"t.a": 9}, False, PATTERN, 0, ""),
    ({"t.a": 50, "t.b": 55}, {"t.a": 60}, False, PATTERN, 0, 'topic "t.b" behind offset 55'),
    # and Kafka has deleted records of the other: Spark does not stop at a loss in that one batch
    ({"t.a": 1, "t.b": 5}, {"t.a": 9}, False, PATTERN, 4, 'offsets 1 to 3 of topic "t.a", partition 0'),
    # planned with records of it, or with none
    ({"t.a": 1, "t.b": 5}, {"t.a": 9, "t.b": 8}, False, PATTERN, 0, 'offsets 5 to 7 of topic "t.b", partition 0'),
    ({"t.a": 1, "t.b": 5}, {"t.a": 9, "t.b": 8}, False, GO_ON, 0, "Spark would wait for a deleted topic"),
    ({"t.a": 1}, {"t.a": 9, "t.b": 0}, False, PATTERN, 0, ""),
    ({"t.a": 50, "t.b": 55}, {"t.a": 60}, False, GO_ON, 0, ""),
    # deleted before the first batch
    ({}, {"t.b": 5}, None, PATTERN, 0, 'topic "t.b" behind offset 5, where it had, or may have had, more records'),
]


def ends(offsets: dict[str, int]) -> dict[str, dict[str, int]]:
    return {name: {"0": offset} for name, offset in offsets.items()}


def kafka_has(monkeypatch: pytest.MonkeyPatch, first: int = 0, /, **ids: str) -> None:
    """Topics, by their ids, of one partition with records from `first` on; no answer where there are none."""
    topics = {name.replace("_", "."): topic_id for name, topic_id in ids.items()}

    def topic_ids(_: KafkaAdmin, names: Iterable[str]) -> dict[str, str]:
        if not topics:
            raise KafkaError("TL-K01", "k", "no answer")
        return {name: topics[name] for name in names if name in topics}

    monkeypatch.setattr(KafkaAdmin, "info", lambda _: SimpleNamespace(topics=dict.fromkeys(topics, 1)))
    monkeypatch.setattr(KafkaAdmin, "topic_ids", topic_ids)
    monkeypatch.setattr(KafkaAdmin, "first_offsets", lambda *_: {0: first})


def check(bridge: Bridge) -> tuple[bool, tuple[str, ...]]:
    """Whether topics are not read any more, and the remarks."""
    (line,) = bridge.downlinks
    query = DownlinkQuery(bridge, line)
    _, has_removed_topics = query._check_topics(Checkpoint(str(line.checkpoint)), 100)
    return has_removed_topics, query.remarks


def begin(line: Downlink, offsets: dict[str, int]) -> None:
    """Write the offsets at which a query begins."""
    initial = line.checkpoint / "sources" / "0" / "0"
    initial.parent.mkdir(parents=True)
    initial.write_text("\0v1\n" + json.dumps(ends(offsets)))


@pytest.mark.parametrize(("first", "second", "done", "file", "oldest", "lost"), CASES)
def test_a_deleted_topic_stops_a_line_only_where_records_were_unread(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    first: dict[str, int],
    second: dict[str, int],
    done: bool | None,
    file: str,
    oldest: int,
    lost: str,
) -> None:
    bridge = read(file, tmp_path)
    (line,) = bridge.downlinks
    if done is None:
        begin(line, second)
    else:
        planned(line.checkpoint, 0, ends(first))
        planned(line.checkpoint, 1, ends(second), done=done)
    kafka_has(monkeypatch, oldest, t_a="A", other="O")
    if lost:
        with pytest.raises(KafkaError, match=r"TL-B06") as caught:
            check(bridge)
        assert lost in str(caught.value)
        assert f"towline reset {bridge.file} commands" in caught.value.remedy
        return
    has_removed_topics, (remark,) = check(bridge)
    assert has_removed_topics
    assert ("was deleted from Kafka; all of its known records were delivered" in remark) is (file is PATTERN)


def test_a_missing_configured_topic_is_an_error_and_a_removed_one_a_remark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bridge = read(GOOD.replace('"commands"\ntopic', '["commands", "more"]\ntopic'), tmp_path)
    planned(bridge.downlinks[0].checkpoint, 0, ends({"commands": 1, "former": 5}))
    kafka_has(monkeypatch, commands="A", former="B")
    with pytest.raises(KafkaError, match=r"reads more, and Kafka has no such topic. Create it.*TL-B03"):
        check(bridge)
    kafka_has(monkeypatch, commands="A", former="B", more="")
    removed, unknown = check(bridge)[1]
    assert removed == 'topic "former", read up to offset 5, is not read any more'
    assert unknown.startswith("topic ids unknown (more): this Kafka gives none")


def test_topic_ids_are_saved_before_the_first_offset_and_need_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With "latest" the first offset is one of the topic that was there then."""
    bridge = read(GOOD, tmp_path)
    kafka_has(monkeypatch)
    with pytest.raises(KafkaError, match="TL-K01"):
        check(bridge)
    kafka_has(monkeypatch, commands="A")
    check(bridge)
    begin(bridge.downlinks[0], {"commands": 5})
    kafka_has(monkeypatch, commands="B")
    with pytest.raises(KafkaError, match=r"its id was A, and is B\): offset 5 of partition 0.*TL-B06"):
        check(bridge)
    kafka_has(monkeypatch)
    assert check(bridge) == (False, ())


@pytest.mark.parametrize(
    ("source", "start", "wanted"),
    [
        ('["commands", "more"]', "", {"commands": {"0": -2, "1": -2}, "more": {"0": 3, "1": -2}}),
        ('["commands", "more"]', '"latest"', {"commands": {"0": -1, "1": -1}, "more": {"0": 3, "1": -2}}),
        ('["commands", "new"]', '{ commands = { "0" = 7 } }', {"commands": {"0": 7, "1": -2}, "new": {"0": -2}}),
        ('{ pattern = ".*" }', "", {"commands": {"0": -2, "1": -2}, "more": {"0": 3, "1": -2}, "new": {"0": -2}}),
    ],
)
def test_a_reset_line_reads_every_partition_and_a_recreated_topic_from_starting_offsets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, start: str, wanted: dict[str, dict[str, int]]
) -> None:
    """Both ways out of TL-B06; the other topics go on where they stood, a new partition at its beginning."""
    setting = f"starting_offsets = {start}\n" if start else ""
    bridge = read(GOOD.replace('from = "commands"', f"from = {source}") + setting, tmp_path)
    query = DownlinkQuery(bridge, bridge.downlinks[0])
    topics = {"commands": 2, "more": 2, "new": 1, "__consumer_offsets": 50}
    monkeypatch.setattr(KafkaAdmin, "info", lambda _: SimpleNamespace(topics=topics))
    offsets, ids = ends({"commands": 12, "more": 3, "gone": 3}), {"commands": "A", "more": "M"}
    identity = Identity("commands", "s", offsets=offsets, topic_ids=ids)
    assert json.loads(query._starting_offsets(identity, {"commands": "B", "more": "M"})) == wanted


_IDS = st.dictionaries(st.sampled_from("abc"), st.sampled_from(["", "1", "2"]))


@given(_IDS, _IDS)
def test_an_unknown_topic_id_is_no_change(kept: dict[str, str], now: dict[str, str]) -> None:
    both = {name for name in kept.keys() & now.keys() if kept[name] and now[name]}
    assert recreated_topics(kept, now) == sorted(name for name in both if kept[name] != now[name])


def test_a_broker_without_topic_ids_and_a_torn_file_give_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kafka before 2.8 has no topic ids, and librdkafka shows 0 for that."""
    described = {name: SimpleNamespace(topic_id=Uuid(0, number)) for number, name in enumerate(["old", "new"])}
    monkeypatch.setattr(KafkaAdmin, "describe_topics", lambda *_: described)
    assert KafkaAdmin("k:9092").topic_ids(["old", "new"]) == {"old": "", "new": "AAAAAAAAAAAAAAAAAAAAAQ"}
    (tmp_path / "towline.topics").write_text("{")
    assert saved_topic_ids(Checkpoint(str(tmp_path))) == {}
