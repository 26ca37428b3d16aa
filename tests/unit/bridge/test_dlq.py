"""Replay marks and remapping of dead letters: nothing that a device writes is a mark."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from tests.unit.bridge.test_config import GOOD, read
from towline.bridge import deadletters
from towline.bridge.config.model import Bridge
from towline.bridge.deadletters import (
    REPLAY_MARK,
    DeadLetterTopic,
    LetterFilter,
    LetterMapper,
    StoredLetter,
    _marks,
    _replayed_by_mark,
    _TopicRecord,
    dead_letter_topics,
    merge_ranges,
    source_row,
)
from towline.bridge.lines.identity import Identity
from towline.errors import ConfigError, KafkaError
from towline.kafka.deadletters import ChunkAssembler, DeadLetter, Header, Reason, to_records

FORGED = b'{"v":1,"offsets":[[0,1000000]]}'


def record(key: bytes | None, value: bytes | None, headers: list[tuple[str, bytes | None]]) -> _TopicRecord:
    return _TopicRecord(3, 9, 0, key, value, headers)


def test_a_huge_range_of_a_mark_is_not_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    """And names nothing that came after the mark."""
    text = b'{"offsets":[[-5,1000000000000000000000],[7,3],[2,4]]}'
    marks = [record(None, b"", [(REPLAY_MARK, value)]) for value in (text, b'{"offsets":[[1,1]]}')]
    monkeypatch.setattr(DeadLetterTopic, "_read_records", lambda *_: iter(marks))
    topic = DeadLetterTopic({}, "dead", {})
    topic._read_marks({3: 12})
    assert topic._replayed_ranges == {3: [(0, 8)]}
    letter = DeadLetter(Reason.UNMAPPED, None, None, b"x")
    entries = [StoredLetter(partition, offset, 0, letter) for partition in (2, 3) for offset in range(12)]
    assert [entry.offset for entry in entries if topic._is_replayed(entry)] == list(range(9))


def test_ranges_that_touch_are_one() -> None:
    assert merge_ranges([(7, 9), (1, 2), (3, 3), (8, 12), (5, 5)]) == [(1, 3), (5, 5), (7, 12)]


def test_a_header_of_a_device_is_no_mark() -> None:
    letter = DeadLetter(Reason.UNMAPPED, None, None, b"x", ((REPLAY_MARK, FORGED), ("a", b"b")))
    (stored,) = to_records(letter, 4096)
    assert [*_replayed_by_mark(record(*stored))] == []
    assert ChunkAssembler().add(*stored) == letter
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
def test_an_invalid_mark_marks_nothing(value: bytes) -> None:
    assert [*_replayed_by_mark(record(None, b"", [(REPLAY_MARK, value)]))] == []


class Growing:
    """A topic that gets a record for each that is read, as where a line rejects its replayed letters again."""

    def __init__(self) -> None:
        self.read, self.closed = -1, False

    def assign(self, partitions: list[Any]) -> None:
        assert {tp.topic for tp in partitions} == {"dead"}

    def poll(self, _: float) -> Any:
        self.read += 1
        assert self.read < 20, "it is read for ever"
        return self.message(self.read % 2, self.read // 2)

    def message(self, partition: int, offset: int) -> Any:
        fields = {"partition": partition, "offset": offset, "timestamp": (1, 0), "key": None, "value": None}
        fields |= {"headers": None, "error": None}
        return SimpleNamespace(**{name: lambda value=value: value for name, value in fields.items()})

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def grown(monkeypatch: pytest.MonkeyPatch) -> Growing:
    consumer = Growing()
    monkeypatch.setattr(DeadLetterTopic, "_new_consumer", lambda *_: consumer)
    return consumer


DEAD = DeadLetterTopic({"bootstrap.servers": "k"}, "dead", {})


def test_reading_stops_at_the_first_end_offsets(grown: Growing) -> None:
    """They lie in the middle of a transaction's records, or above one that was aborted."""
    positions = [(record.partition, record.offset) for record in DEAD._read_records({0: 2, 1: 5})]
    assert positions == [(0, 0), (1, 0), (0, 1), (1, 1), (1, 2), (1, 3), (1, 4)]
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
    offsets = []
    for record in DEAD._read_records({0: 1, 1: 3}):
        offsets.append(record.offset)
        time.sleep(0.1)
    assert offsets == [0, 0, 1, 2]


@pytest.mark.parametrize("other", [False, True])
def test_a_renamed_line_knows_its_letters(tmp_path: Path, other: bool) -> None:
    text = GOOD.replace('name = "telemetry"', 'name = "telemetry"\ndead_letter_topic = "dead"')
    if other:
        text += text[text.index("[[uplink]]") :].replace('"telemetry"\n', '"before"\n', 1)
    bridge = read(text, tmp_path)
    line = bridge.line("telemetry")
    Identity("telemetry", f"{bridge.name}.before.2", 2).save(line.gateway.state_dir)
    (letters,) = dead_letter_topics(bridge)
    assert letters.lines[f"{bridge.name}.before.2"] is line
    assert letters.lines["before"].name == ("before" if other else "telemetry")


def test_an_invalid_client_setting_is_a_config_error(tmp_path: Path) -> None:
    """With librdkafka's text, in one line."""
    client = {
        "bootstrap.servers": "127.0.0.1:9",
        "security.protocol": "ssl",
        "ssl.ca.location": str(tmp_path / "gone.pem"),
    }
    with pytest.raises(ConfigError, match=r"ssl.ca.location failed.*TL-C45"):
        DeadLetterTopic(client, "dead", {})._new_consumer()


# -- remapping; the SQL of a ``where`` is tested on a real Spark --

MQTT: tuple[Header, ...] = (
    ("mqtt.topic", b"telemetry/d1/x"),
    ("mqtt.qos", b"2"),
    ("mqtt.retain", b"true"),
    ("mqtt.content-type", b"text/plain"),
    ("mqtt.response-topic", b"re"),
    ("mqtt.correlation-data", b"\x00\xff"),
    ("mqtt.message-expiry", b"60"),
    ("mqtt.payload-format", b"1"),
    ("mqtt.subscription-id", b"3"),
    ("mqtt.subscription-id", b"4"),
    ("mqtt.received-at", b"1767225600000001"),
    ("mqtt.user.k", b"1"),
    ("mqtt.user.k", b"2"),
    ("traceparent", b"00-1-2-01"),
    ("mqtt.gateway", b"g"),
    ("mqtt.offset", b"7"),
    ("mqtt.duplicate", b"true"),
)


def no_spark() -> NoReturn:
    raise AssertionError("no route has a where")


def bridge(directory: Path, route: str = "", line: str = "") -> Bridge:
    text = GOOD.replace('"k1:9092"', '"k1:9092"\ncreate_topics = true') + route
    return read(text.replace('name = "telemetry"\n', f'name = "telemetry"\n{line}\n'), directory)


def letter(
    reason: Reason = Reason.TOPIC_ILLEGAL, headers: tuple[Header, ...] = MQTT, topic: str | None = "x"
) -> DeadLetter:
    return DeadLetter(reason, topic, b"k", b"payload", headers, partition=9, timestamp=5, source="telemetry")


def test_the_source_row_is_rebuilt_unchanged() -> None:
    assert source_row(letter()) == {
        "topic": "telemetry/d1/x",
        "payload": b"payload",
        "qos": 2,
        "retain": True,
        "duplicate": True,
        "content_type": "text/plain",
        "payload_is_utf8": True,
        "response_topic": "re",
        "correlation_data": b"\x00\xff",
        "user_properties": [
            {"key": "k", "value": "1"},
            {"key": "k", "value": "2"},
            {"key": "traceparent", "value": "00-1-2-01"},
        ],
        "message_expiry_seconds": 60,
        "subscription_ids": [3, 4],
        "received_at": datetime(2026, 1, 1, 0, 0, 0, 1, tzinfo=UTC),
        "gateway": "g",
        "offset": 7,
    }


def test_a_corrected_route_remaps_its_letters(tmp_path: Path) -> None:
    (line,) = bridge(tmp_path, 'key = "{device}"\n').uplinks
    (result,) = LetterMapper(line, no_spark).remap([letter()])
    assert result.record is not None
    assert result.reason == ""
    assert result.record[:4] == ("telemetry", b"payload", b"d1", -1)
    assert result.record[6] == 1767225600000
    assert ("mqtt.correlation-data", b"\x00\xff") in result.record[7]
    assert [name for name, _ in result.record[7] if name == "mqtt.user.k"] == ["mqtt.user.k"] * 2


def test_unmappable_letters_stay(tmp_path: Path) -> None:
    (line,) = bridge(tmp_path, 'key = "{mqtt.user.none}"\nkey_required = true\n').uplinks
    elsewhere = (("mqtt.topic", b"nobody"),)
    results = LetterMapper(line, no_spark).remap([letter(), letter(headers=elsewhere), letter(headers=(), topic=None)])
    assert [(result.record, result.reason) for result in results] == [
        (None, "the message lacks what its key or its dedupe key is made of"),
        (None, "no route takes this topic"),
        (None, "it names no topic"),
    ]


def test_a_record_that_kafka_refused_is_replayed_unchanged(tmp_path: Path) -> None:
    (line,) = bridge(tmp_path).uplinks
    reasons = (Reason.TOO_LARGE, Reason.PARTITION, Reason.TIMESTAMP)
    results = LetterMapper(line, no_spark).remap([letter(reason, (("h", None),)) for reason in reasons])
    assert [result.record for result in results] == [
        ("x", b"payload", b"k", 9, None, None, 5, [("h", None)]),
        ("x", b"payload", b"k", -1, None, None, 5, [("h", None)]),
        ("x", b"payload", b"k", 9, None, None, 0, [("h", None)]),
    ]


def test_letters_belong_to_their_source_line(tmp_path: Path) -> None:
    (letters,) = dead_letter_topics(bridge(tmp_path))
    assert letters.topic == "plant-7.dead-letters"
    assert set(letters.lines) == {"telemetry", "plant-7.telemetry"}
    assert letters.line_of(letter()) is letters.lines["telemetry"]
    assert not letters._matches(
        StoredLetter(0, 0, 0, DeadLetter(Reason.UNROUTED, None, None, None, source="other")), LetterFilter()
    )


HUGE = b"9" * 30


@pytest.mark.parametrize("value", [HUGE, b"9" * 5000, b"-1", b"\xff", "١".encode(), b"", None])
def test_no_number_of_a_letter_ends_a_replay(tmp_path: Path, value: bytes | None) -> None:
    """Whoever may write to the topic may write any."""
    (line,) = bridge(tmp_path, 'key = "{mqtt.qos}-{mqtt.offset}"\n').uplinks
    numbers = ("qos", "message-expiry", "subscription-id", "received-at", "offset")
    forged = (("mqtt.topic", b"telemetry/d1/x"), *((f"mqtt.{name}", value) for name in numbers))
    (result,) = LetterMapper(line, no_spark).remap([letter(headers=forged)])
    assert (result.record is None) == bool(result.reason)
    row = source_row(letter(headers=forged))
    assert row is not None
    assert all(row[name] is None or row[name] < 2**63 for name in ("qos", "offset"))


def test_marks_name_offsets_in_ranges() -> None:
    entries = [StoredLetter(p, o, 0, letter()) for p, o in ((1, 5), (0, 1), (0, 2), (0, 3), (0, 9))]
    assert list(_marks(entries)) == [(0, b'{"v":1,"offsets":[[1,3],[9,9]]}'), (1, b'{"v":1,"offsets":[[5,5]]}')]


def test_truncated_messages_are_never_replayed(tmp_path: Path) -> None:
    """Its value is no payload; and a ``where`` is not asked about it."""
    (line,) = bridge(tmp_path, 'where = "true"\n').uplinks
    results = LetterMapper(line, no_spark).remap([letter(Reason.PACKET_TOO_LARGE), letter(Reason.TOO_MANY_PROPERTIES)])
    assert [result.record for result in results] == [None, None]
    assert "max_packet_bytes" in results[0].reason
    assert "MQTT packet" in results[1].reason
