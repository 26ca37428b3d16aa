"""What a dead letter becomes with the bridge file as it is now; the SQL of a ``where`` is tested on a real Spark."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, NoReturn

import pytest

from tests.unit.bridge.test_config import GOOD, read
from towline.bridge.deadletters import LetterFilter, LetterMapper, StoredLetter, _marks, dead_letter_topics, source_row
from towline.kafka.deadletters import DeadLetter, Header, Reason

if TYPE_CHECKING:
    from pathlib import Path

    from towline.bridge.config.model import Bridge

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


def test_a_row_comes_back_as_it_was() -> None:
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
    (made,) = LetterMapper(line, no_spark).remap([letter()])
    assert made.record is not None
    assert made.reason == ""
    assert made.record[:4] == ("telemetry", b"payload", b"d1", -1)
    assert made.record[6] == 1767225600000
    assert ("mqtt.correlation-data", b"\x00\xff") in made.record[7]
    assert [name for name, _ in made.record[7] if name == "mqtt.user.k"] == ["mqtt.user.k"] * 2


def test_letters_that_still_can_not_be_mapped_stay(tmp_path: Path) -> None:
    (line,) = bridge(tmp_path, 'key = "{mqtt.user.none}"\nkey_required = true\n').uplinks
    elsewhere = (("mqtt.topic", b"nobody"),)
    made = LetterMapper(line, no_spark).remap([letter(), letter(headers=elsewhere), letter(headers=(), topic=None)])
    assert [(one.record, one.reason) for one in made] == [
        (None, "the message lacks what its key or its dedupe key is made of"),
        (None, "no route takes this topic"),
        (None, "it names no topic"),
    ]


def test_a_record_that_kafka_refused_goes_as_it_was(tmp_path: Path) -> None:
    (line,) = bridge(tmp_path).uplinks
    reasons = (Reason.TOO_LARGE, Reason.PARTITION, Reason.TIMESTAMP)
    made = LetterMapper(line, no_spark).remap([letter(reason, (("h", None),)) for reason in reasons])
    assert [one.record for one in made] == [
        ("x", b"payload", b"k", 9, None, None, 5, [("h", None)]),
        ("x", b"payload", b"k", -1, None, None, 5, [("h", None)]),
        ("x", b"payload", b"k", 9, None, None, 0, [("h", None)]),
    ]


def test_letters_belong_to_the_line_that_signed_them(tmp_path: Path) -> None:
    (shelf,) = dead_letter_topics(bridge(tmp_path))
    assert shelf.topic == "plant-7.dead-letters"
    assert set(shelf.lines) == {"telemetry", "plant-7.telemetry"}
    assert shelf.line_of(letter()) is shelf.lines["telemetry"]
    assert not shelf._matches(
        StoredLetter(0, 0, 0, DeadLetter(Reason.UNROUTED, None, None, None, source="other")), LetterFilter()
    )


HUGE = b"9" * 30


@pytest.mark.parametrize("value", [HUGE, b"9" * 5000, b"-1", b"\xff", "١".encode(), b"", None])
def test_no_number_of_a_letter_ends_a_replay(tmp_path: Path, value: bytes | None) -> None:
    """Whoever may write to the topic may write any."""
    (line,) = bridge(tmp_path, 'key = "{mqtt.qos}-{mqtt.offset}"\n').uplinks
    numbers = ("qos", "message-expiry", "subscription-id", "received-at", "offset")
    forged = (("mqtt.topic", b"telemetry/d1/x"), *((f"mqtt.{name}", value) for name in numbers))
    (made,) = LetterMapper(line, no_spark).remap([letter(headers=forged)])
    assert (made.record is None) == bool(made.reason)
    row = source_row(letter(headers=forged))
    assert row is not None
    assert all(row[name] is None or row[name] < 2**63 for name in ("qos", "offset"))


def test_marks_name_offsets_in_ranges() -> None:
    entries = [StoredLetter(p, o, 0, letter()) for p, o in ((1, 5), (0, 1), (0, 2), (0, 3), (0, 9))]
    assert list(_marks(entries)) == [(0, b'{"v":1,"offsets":[[1,3],[9,9]]}'), (1, b'{"v":1,"offsets":[[5,5]]}')]


def test_truncated_messages_are_never_replayed(tmp_path: Path) -> None:
    """Its value is no payload; and a ``where`` is not asked about it."""
    (line,) = bridge(tmp_path, 'where = "true"\n').uplinks
    made = LetterMapper(line, no_spark).remap([letter(Reason.PACKET_TOO_LARGE), letter(Reason.TOO_MANY_PROPERTIES)])
    assert [one.record for one in made] == [None, None]
    assert "max_packet_bytes" in made[0].reason
    assert "MQTT packet" in made[1].reason
