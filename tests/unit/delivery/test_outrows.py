"""From any row of the outbox to a packet or a reason: nothing a column can hold raises [I15]."""

from __future__ import annotations

import contextlib
from functools import partial
from unittest.mock import Mock

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mqtt5 import ConnAckPacket, Packet, PubCompPacket, PublishPacket, PubRelPacket

from tests.unit.delivery.test_outbound import outbox_rows
from tests.unit.mqtt.sessions import only_sent, sent
from towline.delivery import outrows
from towline.delivery.outrows import OutgoingMessage, build_message, outgoing_messages
from towline.mqtt import checks
from towline.mqtt.codec import encode
from towline.mqtt.events import PublishAcknowledged
from towline.mqtt.message import MAX_EXPIRY_S, OutboundMessage
from towline.mqtt.outbound import Outbound, Phase
from towline.schema import OUTBOX_SCHEMA

_INT64 = st.integers(-(2**63), 2**63 - 1)
#: Arrow does not look whether a string is UTF-8, so text is drawn as bytes.
_TEXT = st.one_of(
    st.none(),
    st.sampled_from([b"", b"a", b"a/b", b"a/+", b"#", b"\0", b"a\x01", b"\xff\xfe", b"\xed\xa0\x80", b"x" * 70_000]),
    st.binary(max_size=8),
    st.text(max_size=8).map(lambda text: text.encode("utf-8", "surrogatepass")),
)
_BINARY = st.one_of(st.none(), st.binary(max_size=20), st.just(bytes(65_536)))
_PAIR = st.one_of(st.none(), st.tuples(_TEXT, _TEXT))


def text(value: bytes | None) -> pa.Array:
    return pa.array([value], pa.binary()).view(pa.string())


def pairs(values: list[tuple[bytes | None, bytes | None] | None] | None) -> pa.Array:
    found = values or []
    structs = pa.StructArray.from_arrays(
        [pa.array([p and p[at] for p in found], pa.binary()).view(pa.string()) for at in (0, 1)],
        fields=list(OUTBOX_SCHEMA.field("user_properties").type.value_type),
        mask=pa.array([p is None for p in found], pa.bool_()),
    )
    offsets = pa.array([None if values is None else 0, len(found)], pa.int32())
    return pa.ListArray.from_arrays(offsets, structs, type=OUTBOX_SCHEMA.field("user_properties").type)


_COLUMNS: dict[str, st.SearchStrategy[pa.Array]] = {
    "topic": _TEXT.map(text),
    "payload": _BINARY.map(lambda value: pa.array([value], pa.binary())),
    "qos": st.one_of(st.none(), st.integers(-128, 127), st.integers(0, 2)).map(lambda v: pa.array([v], pa.int8())),
    "retain": st.one_of(st.none(), st.booleans()).map(lambda value: pa.array([value], pa.bool_())),
    "content_type": _TEXT.map(text),
    "payload_is_utf8": st.one_of(st.none(), st.booleans()).map(lambda value: pa.array([value], pa.bool_())),
    "response_topic": _TEXT.map(text),
    "correlation_data": _BINARY.map(lambda value: pa.array([value], pa.binary())),
    "user_properties": st.one_of(st.none(), st.lists(_PAIR, max_size=3)).map(pairs),
    "message_expiry_seconds": st.one_of(st.none(), _INT64).map(lambda value: pa.array([value], pa.int64())),
    "arrived_at": st.one_of(st.none(), _INT64).map(lambda value: pa.array([value], pa.timestamp("us", "UTC"))),
    "arrived_boottime_us": st.one_of(st.none(), _INT64).map(lambda value: pa.array([value], pa.int64())),
    "arrived_boot": st.one_of(st.none(), _INT64).map(lambda value: pa.array([value], pa.int64())),
}


@st.composite
def batches(draw: st.DrawFn) -> pa.RecordBatch:
    rows = [
        pa.RecordBatch.from_arrays([draw(_COLUMNS[name]) for name in OUTBOX_SCHEMA.names], schema=OUTBOX_SCHEMA)
        for _ in range(draw(st.integers(1, 3)))
    ]
    return pa.concat_batches(rows)


def fate(message: OutgoingMessage, version: int, now: float, *, restored: bool) -> int | None:
    """The reason a message is refused for here, None for one that leaves, and leaves again."""
    if isinstance(message.content_or_reason, int):
        return message.content_or_reason
    expires = None if message.expiry_us is None else now + (message.arrived_at.wall_us + message.expiry_us) / 1e6
    outbound = Outbound(partial(encode, version=version))
    if restored and message.content_or_reason.qos:
        outbound.restore(7, message.number, message.content_or_reason, Phase.PUBLISHED, expires)
    else:
        outbound.publish(message.number, message.content_or_reason, expires)
    refused: int | None = None
    packets: list[Packet] = []
    for _ in range(2):
        outbound.start_connection(ConnAckPacket(session_present=True), 10, resumed=True)
        actions = list(outbound.actions(now))
        packets = sent(actions, version)
        for one in packets:
            if isinstance(one, PubRelPacket):  # given up: its id is freed first
                actions += [*outbound.take_ack(PubCompPacket(one.packet_id)), *outbound.actions()]
        for action in actions:
            if isinstance(action, PublishAcknowledged) and action.reason:
                refused = action.reason
        if refused is not None:
            assert outbound.idle
            return refused
        if not message.content_or_reason.qos:
            break
        outbound.end_connection()
    assert packets
    return None


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(batches(), st.sampled_from([5, 4]), st.booleans(), st.booleans())
def test_every_row_is_sent_or_has_a_reason(rows: pa.RecordBatch, version: int, restored: bool, marked: bool) -> None:
    mark = (lambda _number, _content: [("towline-n", "1")]) if marked else None
    found = list(outgoing_messages(rows, 5, mark))
    assert [message.number for message in found] == list(range(5, 5 + rows.num_rows))
    for message in found:
        reason = fate(message, version, 1e6, restored=restored)
        assert reason is None or 0x80 <= reason <= 0xFF


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("qos", 0, None),
        ("qos", 3, 0x9B),
        ("qos", -128, 0x9B),
        ("topic", "", 0x90),
        ("topic", "a/#", 0x90),
        ("topic", "a" * 70_000, 0x90),
        ("topic", "a\0", 0x90),
        ("content_type", "a\0", 0x90),
        ("content_type", "x" * 70_000, 0x99),
        ("correlation_data", bytes(65_536), 0x99),
        ("user_properties", [None], 0x99),
        ("user_properties", [{"key": None, "value": None}], None),
        ("user_properties", [{"key": "k", "value": "v"}] * 100_000, None),
        ("message_expiry_seconds", 2**63 - 1, None),
        ("message_expiry_seconds", -(2**63), None),
    ],
)
def test_an_extreme_value(field: str, value: object, reason: int | None) -> None:
    (message,) = outgoing_messages(outbox_rows({"topic": "d", "payload": b"x", "qos": 2, field: value}), 0)
    assert fate(message, 5, 0.0, restored=False) == reason
    assert message.expiry_us in (None, 0, MAX_EXPIRY_S * 1_000_000), "the longest that MQTT has"


@pytest.mark.parametrize(("field", "reason"), [("topic", 0x90), ("content_type", 0x99)])
def test_text_that_is_no_utf8_is_refused_with_the_reason_of_its_field(field: str, reason: int) -> None:
    rows = outbox_rows({"topic": "d", "payload": b"x", "qos": 1})
    rows = rows.set_column(rows.schema.get_field_index(field), field, text(b"\xff\xfe"))
    (message,) = outgoing_messages(rows, 0)
    assert message.content_or_reason == reason


@pytest.mark.parametrize("is_utf8", [True, False, None])
def test_a_message_has_the_properties_of_its_row(is_utf8: bool | None) -> None:
    row = {"topic": "d", "payload": b"x", "qos": 1, "retain": True, "payload_is_utf8": is_utf8, "content_type": "c"}
    row |= {"response_topic": "r", "correlation_data": b"i", "user_properties": [{"key": "k", "value": "v"}]}
    (message,) = outgoing_messages(outbox_rows(row | {"message_expiry_seconds": 7}), 0)
    assert isinstance(message.content_or_reason, OutboundMessage)
    outbound = Outbound(partial(encode, version=5))
    outbound.publish(0, message.content_or_reason, None)
    outbound.start_connection(ConnAckPacket(), 10, resumed=False)
    packet = only_sent(outbound.actions(0.0), PublishPacket)
    assert (packet.topic, packet.payload, int(packet.qos), packet.retain) == ("d", b"x", 1, True)
    assert (packet.payload_format_indicator, packet.message_expiry_interval) == (int(bool(is_utf8)), 7)
    assert (packet.content_type, packet.response_topic, packet.correlation_data) == ("c", "r", b"i")
    assert packet.user_properties == [("k", "v")]


def test_the_size_of_a_message_is_not_its_payload_alone() -> None:
    """What is handed over at once is bounded by it."""
    pairs = [{"key": "k" * 10, "value": "v" * 10}] * 1000
    row = {"topic": "t" * 100, "payload": b"p", "correlation_data": bytes(50), "user_properties": pairs}
    (message,) = outgoing_messages(outbox_rows(row), 0)
    assert message.size >= 1000 * 20 + 151


class PanicException(BaseException):  # as pyo3 calls it
    """What a panic looks like."""


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (PanicException(), 0x99),
        (AttributeError(), 0x99),
        (checks.PacketTooLarge("more than 268,435,455 bytes"), 0x95),
        (KeyboardInterrupt(), None),
        (MemoryError(), None),
    ],
)
def test_whatever_a_constructor_raises_is_a_reason_unless_it_is_not_the_rows_fault(
    error: BaseException, reason: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outrows, "OutboundMessage", Mock(side_effect=error))
    with contextlib.nullcontext() if reason else pytest.raises(type(error)):
        assert build_message("t", b"", 1, retain=False) == reason
