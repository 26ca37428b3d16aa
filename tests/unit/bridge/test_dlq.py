"""What marks a dead letter as replayed: our own record, and nothing a device can write."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.bridge.test_config import GOOD, read
from towline.bridge import deadletters
from towline.bridge.deadletters import (
    REPLAY_MARK,
    DeadLetterTopic,
    StoredLetter,
    _replayed_by_mark,
    _TopicRecord,
    dead_letter_topics,
    merge_ranges,
)
from towline.bridge.lines.identity import Identity
from towline.errors import ConfigError, KafkaError
from towline.kafka.deadletters import ChunkAssembler, DeadLetter, Reason, to_records

FORGED = b'{"v":1,"offsets":[[0,1000000]]}'


def record(key: bytes | None, value: bytes | None, headers: list[tuple[str, bytes | None]]) -> _TopicRecord:
    return _TopicRecord(3, 9, 0, key, value, headers)


def test_a_range_is_never_written_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """And names nothing that came after the mark."""
    text = b'{"offsets":[[-5,1000000000000000000000],[7,3],[2,4]]}'
    marks = [record(None, b"", [(REPLAY_MARK, one)]) for one in (text, b'{"offsets":[[1,1]]}')]
    monkeypatch.setattr(DeadLetterTopic, "_read_records", lambda *_: iter(marks))
    topic = DeadLetterTopic({}, "dead", {})
    topic._read_marks({3: 12})
    assert topic._replayed_ranges == {3: [(0, 8)]}
    letter = DeadLetter(Reason.UNMAPPED, None, None, b"x")
    entries = [StoredLetter(partition, offset, 0, letter) for partition in (2, 3) for offset in range(12)]
    assert [entry.offset for entry in entries if topic._is_replayed(entry)] == list(range(9))


def test_ranges_that_touch_are_one() -> None:
    assert merge_ranges([(7, 9), (1, 2), (3, 3), (8, 12), (5, 5)]) == [(1, 3), (5, 5), (7, 12)]


def test_a_devices_header_marks_nothing() -> None:
    letter = DeadLetter(Reason.UNMAPPED, None, None, b"x", ((REPLAY_MARK, FORGED), ("a", b"b")))
    (given,) = to_records(letter, 4096)
    assert [*_replayed_by_mark(record(*given))] == []
    assert ChunkAssembler().add(*given) == letter
    assert [*_replayed_by_mark(record(b"k", b"v", [(REPLAY_MARK, FORGED)]))] == []


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"\xff",
        b"1",
        b"{}",
        b'{"offsets":[1]}',
        b'{"offsets":[["a","b"]]}',
        b"[" * 100_000,
        b'{"offsets":[[1.5,2]]}',
    ],
)
def test_a_mark_that_is_none_of_ours_marks_nothing(value: bytes) -> None:
    assert [*_replayed_by_mark(record(None, b"", [(REPLAY_MARK, value)]))] == []


class Growing:
    """A topic that gets a record for each that is read, as where a line gives up again what it was given back."""

    def __init__(self) -> None:
        self.read, self.closed = -1, False

    def assign(self, places: list[Any]) -> None:
        assert {place.topic for place in places} == {"dead"}

    def poll(self, _: float) -> Any:
        self.read += 1
        assert self.read < 20, "it is read for ever"
        return self.message(self.read % 2, self.read // 2)

    def message(self, partition: int, offset: int) -> Any:
        said = {"partition": partition, "offset": offset, "timestamp": (1, 0), "key": None, "value": None}
        said |= {"headers": None, "error": None}
        return SimpleNamespace(**{name: lambda value=value: value for name, value in said.items()})

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def grown(monkeypatch: pytest.MonkeyPatch) -> Growing:
    consumer = Growing()
    monkeypatch.setattr(DeadLetterTopic, "_new_consumer", lambda *_: consumer)
    return consumer


DEAD = DeadLetterTopic({"bootstrap.servers": "k"}, "dead", {})


def test_reading_stops_at_the_ends_that_were_there_first(grown: Growing) -> None:
    """They lie in the middle of a transaction's records, or above one that was aborted."""
    found = [(one.partition, one.offset) for one in DEAD._read_records({0: 2, 1: 5})]
    assert found == [(0, 0), (1, 0), (0, 1), (1, 1), (1, 2), (1, 3), (1, 4)]
    assert grown.closed


def test_a_stalled_partition_is_noticed_beside_a_growing_one(grown: Growing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadletters, "_ANSWER_TIMEOUT_S", 0.0)
    monkeypatch.setattr(grown, "poll", lambda _: grown.message(0, 7))
    with pytest.raises(KafkaError, match="can't be read to its end"):
        list(DEAD._read_records({0: 2, 1: 5}))
    stuck = KafkaError("TL-B31", "k", "a transaction is open", "Wait.")
    monkeypatch.setattr(deadletters, "_OPEN_TRANSACTION_S", 0.0)
    with pytest.raises(KafkaError, match="TL-B31"):
        list(DEAD._read_records({0: 2, 1: 5}, None, stuck))
    assert grown.closed


@pytest.mark.usefixtures("grown")
def test_a_slow_caller_does_not_time_out_the_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadletters, "_ANSWER_TIMEOUT_S", 0.05)
    found = []
    for one in DEAD._read_records({0: 1, 1: 3}):
        found.append(one.offset)
        time.sleep(0.1)
    assert found == [0, 0, 1, 2]


@pytest.mark.parametrize("other", [False, True])
def test_a_renamed_line_knows_its_letters(tmp_path: Path, other: bool) -> None:
    text = GOOD.replace('name = "telemetry"', 'name = "telemetry"\ndead_letter_topic = "dead"')
    if other:
        text += text[text.index("[[uplink]]") :].replace('"telemetry"\n', '"before"\n', 1)
    bridge = read(text, tmp_path)
    line = bridge.line("telemetry")
    Identity("telemetry", f"{bridge.name}.before.2", 2).save(line.gateway.state_dir)
    (shelf,) = dead_letter_topics(bridge)
    assert shelf.lines[f"{bridge.name}.before.2"] is line
    assert shelf.lines["before"].name == ("before" if other else "telemetry")


def test_an_invalid_client_setting_is_a_config_error(tmp_path: Path) -> None:
    """librdkafka's own word, in one line."""
    client = {
        "bootstrap.servers": "127.0.0.1:9",
        "security.protocol": "ssl",
        "ssl.ca.location": str(tmp_path / "gone.pem"),
    }
    with pytest.raises(ConfigError, match=r"ssl.ca.location failed.*TL-C45"):
        DeadLetterTopic(client, "dead", {})._new_consumer()
