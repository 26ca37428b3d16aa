"""Replay marks and remapping of dead letters: nothing that a device writes is a mark."""

from __future__ import annotations

import time
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn
from unittest.mock import Mock

import pytest

from tests.unit.bridge.test_config import GOOD, read
from tests.unit.bridge.test_downlink_file import GOOD as DOWN
from tests.unit.bridge.test_downlink_file import the_line
from towline.bridge import deadletters
from towline.bridge.config.model import Bridge
from towline.bridge.lines.identity import Identity
from towline.errors import KafkaError
from towline.kafka.deadletters import ChunkAssembler, DeadLetter, Header, Reason, to_records


def mark(value: bytes) -> deadletters.TopicRecord:
    return deadletters.TopicRecord(3, 9, 0, None, b"", [(deadletters.REPLAY_MARK, value)])


@pytest.mark.parametrize(
    ("marks", "replayed"),
    [
        ([b'{"v":1,"offsets":[[1,3],[9,9]]}'], [1, 2, 3]),
        ([b'{"offsets":[[-5,1000000000000000000000],[7,3]]}'], [*range(9)]),  # below the mark
        ([b'{"offsets":[[5,5],[1,2]]}', b'{"offsets":[[2,4],[7,7]]}'], [1, 2, 3, 4, 5, 7]),
        ([b"", b"\xff", b"1", b"{}", b'{"offsets":[1]}', b'{"offsets":[["a","b"]]}', b"[" * 100_000], []),
        ([b'{"offsets":[[1.5,2]]}'], []),
    ],
)
def test_a_mark_names_letters_before_it(
    monkeypatch: pytest.MonkeyPatch, marks: list[bytes], replayed: list[int]
) -> None:
    monkeypatch.setattr(deadletters.DeadLetterTopic, "read_records", lambda *_: iter(map(mark, marks)))
    topic = deadletters.DeadLetterTopic({}, "dead", {})
    topic._read_marks({3: 12})
    assert sum(map(len, topic._replayed_ranges.values())) <= 3, "a huge range is not expanded"
    entries = [deadletters.StoredLetter(partition, offset, 0, letter()) for partition in (2, 3) for offset in range(12)]
    assert [(entry.partition, entry.offset) for entry in entries if topic._is_replayed(entry)] == [
        (3, offset) for offset in replayed
    ]


def test_the_marks_of_letters() -> None:
    entries = [deadletters.StoredLetter(p, o, 0, letter()) for p, o in ((1, 5), (0, 1), (0, 3), (0, 2), (0, 9))]
    assert list(deadletters._marks(entries)) == [
        (0, b'{"v":1,"offsets":[[1,3],[9,9]]}'),
        (1, b'{"v":1,"offsets":[[5,5]]}'),
    ]


def test_a_header_of_a_device_is_no_mark() -> None:
    forged = (deadletters.REPLAY_MARK, b'{"v":1,"offsets":[[0,1000000]]}')
    dead = DeadLetter(Reason.UNMAPPED, None, None, b"x", (forged, ("a", b"b")))
    (stored,) = to_records(dead, 4096)
    assert deadletters._replayed_by_mark(deadletters.TopicRecord(3, 9, 0, *stored)) == []
    assert ChunkAssembler().add(*stored) == dead
    assert deadletters._replayed_by_mark(deadletters.TopicRecord(3, 9, 0, b"k", b"v", [forged])) == []


def growing(monkeypatch: pytest.MonkeyPatch) -> deadletters.DeadLetterTopic:
    """A topic that gets a record for each that is read, as where a line rejects its replayed letters again.

    Offset 3 is that of a transaction's end.
    """
    empty = dict.fromkeys(("key", "value", "headers", "error"))
    values = (
        {"partition": n % 2, "offset": n // 2 + (n > 5), "timestamp": (1, 0), "topic": "dead", **empty} for n in count()
    )
    records = (SimpleNamespace(**{name: lambda value=value: value for name, value in one.items()}) for one in values)
    consumer = Mock(poll=lambda _: next(records))
    monkeypatch.setattr(deadletters.DeadLetterTopic, "_new_consumer", lambda *_: consumer)
    return deadletters.DeadLetterTopic({"bootstrap.servers": "k"}, "dead", {})


def test_reading_stops_at_the_first_end_offsets(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the caller is; and a partition that stands still is noticed beside a growing one."""
    monkeypatch.setattr(deadletters, "_ANSWER_TIMEOUT_S", 0.05)
    positions = []
    for record in growing(monkeypatch).read_records({0: 2, 1: 4}):
        positions.append((record.partition, record.offset))
        time.sleep(0.06)
    assert positions == [(0, 0), (1, 0), (0, 1), (1, 1), (1, 2)]
    with pytest.raises(KafkaError, match="can't be read to its end"):
        list(growing(monkeypatch).read_records({2: 1}))


@pytest.mark.parametrize("other", [False, True])
def test_a_renamed_line_knows_its_letters(tmp_path: Path, other: bool) -> None:
    text = GOOD.replace('name = "telemetry"', 'name = "telemetry"\ndead_letter_topic = "dead"')
    if other:
        head, _, line_text = text.partition("[[uplink]]")
        before = line_text.replace('"telemetry"', '"before"', 1)
        text = f"{head}[[uplink]]{before}\n[[uplink]]{line_text}"
    bridge = read(text, tmp_path)
    line = bridge.line("telemetry")
    Identity("telemetry", f"{bridge.name}.before.2", 2).save(line.gateway.state_dir)
    (letters,) = deadletters.dead_letter_topics(bridge)
    assert letters.lines[f"{bridge.name}.before.2"] is letters.lines["telemetry"] is line
    assert letters.lines["before"].name == ("before" if other else "telemetry")
    foreign = DeadLetter(Reason.UNROUTED, None, None, None, source="other")
    assert not letters._matches(deadletters.StoredLetter(0, 0, 0, foreign), None, None)


# -- remapping; the SQL of a ``where`` is tested on a real Spark --

MQTT: tuple[Header, ...] = (("mqtt.topic", b"telemetry/d1/x"), ("mqtt.received-at", b"1767225600000001"))


def no_spark() -> NoReturn:
    raise AssertionError("no route has a where")


def mapper(directory: Path, route: str = "") -> deadletters.LetterMapper:
    bridge: Bridge = read(GOOD + route, directory)
    return deadletters.LetterMapper(bridge.uplinks[0], no_spark)


def letter(
    reason: Reason = Reason.TOPIC_ILLEGAL, headers: tuple[Header, ...] = MQTT, topic: str | None = "x"
) -> DeadLetter:
    return DeadLetter(reason, topic, b"k", b"payload", headers, partition=9, timestamp=5, source="telemetry")


def test_a_record_that_kafka_refused_is_replayed_unchanged(tmp_path: Path) -> None:
    reasons = (Reason.TOO_LARGE, Reason.PARTITION, Reason.TIMESTAMP)
    results = mapper(tmp_path).remap([letter(reason, (("h", None),)) for reason in reasons])
    assert results == [
        ("x", b"payload", b"k", 9, None, None, 5, [("h", None)]),
        ("x", b"payload", b"k", -1, None, None, 5, [("h", None)]),
        ("x", b"payload", b"k", 9, None, None, 0, [("h", None)]),
    ]


@pytest.mark.parametrize("header", ["h", "mqtt.topic"])
def test_a_letter_of_a_downlink_is_replayed_to_its_source_partition(tmp_path: Path, header: str) -> None:
    """Also one whose record had come from MQTT: no route of an uplink is asked."""
    letter = DeadLetter(Reason.TOPIC_ABSENT, "commands", b"k", b"v", ((header, b"1"),), 3, 17, "why", "commands")
    (outcome,) = deadletters.LetterMapper(the_line(DOWN, tmp_path), no_spark).remap([letter])
    assert outcome == ("commands", b"v", b"k", 3, None, None, 17, [(header, b"1")])


def test_truncated_messages_are_never_replayed(tmp_path: Path) -> None:
    """Its value is no payload; and a ``where`` is not asked about it."""
    truncated = [letter(Reason.PACKET_TOO_LARGE), letter(Reason.TOO_MANY_PROPERTIES)]
    results = mapper(tmp_path, 'where = "true"\n').remap(truncated)
    assert ["max_packet_bytes" in str(results[0]), "MQTT packet" in str(results[1])] == [True, True]
    assert all(isinstance(result, str) for result in results)


@pytest.mark.parametrize("value", [b"9" * 30, b"9" * 5000, b"-1", b"\xff", "١".encode(), b"", None])
def test_no_number_of_a_letter_ends_a_replay(tmp_path: Path, value: bytes | None) -> None:
    """Whoever may write to the topic may write any."""
    numbers = ("qos", "message-expiry", "subscription-id", "received-at", "offset")
    forged = (MQTT[0], *((f"mqtt.{name}", value) for name in numbers))
    (result,) = mapper(tmp_path, 'key = "{mqtt.qos}-{mqtt.offset}"\n').remap([letter(headers=forged)])
    assert isinstance(result, tuple)
    row = deadletters.source_row(letter(headers=forged))
    assert row is not None
    assert (row["qos"], row["offset"]) == (None, None)
