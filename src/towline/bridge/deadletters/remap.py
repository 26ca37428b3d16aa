"""Dead letters through the routes again: what they would become with the bridge file as it is now.

Spark is started only for lines whose routes say something in SQL.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from towline.bridge.config.model import Line
from towline.bridge.routes import RouteOutcome, route_table, to_json
from towline.bridge.uplink.sink import RecordColumns, Routing
from towline.bridge.uplink.statements import Statements, of_schema
from towline.kafka.deadletters import DeadLetter, Reason
from towline.kafka.properties import TRACE_CONTEXT, user_property
from towline.schema import ROW_SCHEMA

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from towline.bridge.config.model import AnyLine

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
#: Largest numbers of the columns; what is larger was not written by a gateway.
_QOS, _EXPIRY, _SUBSCRIPTION, _MOMENT, _OFFSET = 2, 0xFFFFFFFF, 268_435_455, 1 << 57, (1 << 63) - 1
_DECIMAL: Final = re.compile(rb"[0-9]{1,19}")
#: Letters that are not the message: no route can make of them what it was.
_NOT_WHOLE: Final = {
    Reason.PACKET_TOO_LARGE: "too large for the gateway's max_packet_bytes; its publisher has to send it again",
    Reason.TOO_MANY_PROPERTIES: "more than 1,000 properties; its value is the MQTT packet, for a program of yours",
}


@dataclass(frozen=True, slots=True)
class Remapped:
    """The fate of one dead letter; with neither record nor reason a ``where`` leaves it out now.

    Attributes:
        record: Arguments of ``produce``: topic, value, key, partition, None, None, timestamp in ms, headers.
        why: Why it is still dead; "" for others.
    """

    record: tuple[Any, ...] | None = None
    why: str = ""


def row_of(dead_letter: DeadLetter) -> dict[str, Any] | None:
    """The source's row that a dead letter was; None if it is not from MQTT, or its properties were not kept."""
    headers = [one for one in dead_letter.headers if one[0].startswith("mqtt.") or one[0] in TRACE_CONTEXT]
    known: Mapping[str, bytes | None] = dict(reversed(headers))
    topic = _text(known.get("mqtt.topic"))
    if topic is None:
        return None
    users = [{"key": key, "value": _text(value)} for name, value in headers if (key := user_property(name)) is not None]
    form = _text(known.get("mqtt.payload-format"))
    return {
        "topic": topic,
        "payload": dead_letter.value,
        "qos": _number(known.get("mqtt.qos"), _QOS),
        "retain": known.get("mqtt.retain") == b"true",
        "duplicate": known.get("mqtt.duplicate") == b"true",
        "content_type": _text(known.get("mqtt.content-type")),
        "payload_is_utf8": None if form is None else form == "1",
        "response_topic": _text(known.get("mqtt.response-topic")),
        "correlation_data": known.get("mqtt.correlation-data"),
        "user_properties": users or None,
        "message_expiry_seconds": _number(known.get("mqtt.message-expiry"), _EXPIRY),
        "subscription_ids": [
            number
            for name, value in headers
            if name == "mqtt.subscription-id" and (number := _number(value, _SUBSCRIPTION)) is not None
        ]
        or None,
        "received_at": _EPOCH + timedelta(microseconds=_number(known.get("mqtt.received-at"), _MOMENT) or 0),
        "gateway": _text(known.get("mqtt.gateway")),
        "offset": _number(known.get("mqtt.offset"), _OFFSET),
    }


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("utf-8", "replace")


def _number(value: bytes | None, most: int) -> int | None:
    number = int(value) if value is not None and _DECIMAL.fullmatch(value) else None
    return number if number is None or number <= most else None


class Mapper:
    """Maps the dead letters of one line; those of a downlink go back to Kafka, where the line takes them once more.

    Args:
        line: Its routes.
        spark: Makes the session that evaluates their SQL; called at most once, and only where there is some.
    """

    def __init__(self, line: AnyLine, spark: Callable[[], SparkSession]) -> None:
        routes = line.routes if isinstance(line, Line) else ()
        self._maps = isinstance(line, Line)
        self._statements = Statements(routes)
        self._routing = Routing(to_json(routes), self._statements.values)
        self._spark = spark

    def outcomes(self, dead_letters: Sequence[DeadLetter]) -> list[Remapped]:
        """The fate of each, in order."""
        rows = {
            index: row
            for index, dead_letter in enumerate(dead_letters)
            if self._maps and dead_letter.reason not in _NOT_WHOLE and (row := row_of(dead_letter)) is not None
        }
        mapped = dict(zip(rows, self._mapped([*rows.values()]), strict=True))
        return [mapped.get(index) or _not_mapped(dead_letter) for index, dead_letter in enumerate(dead_letters)]

    def _mapped(self, rows: list[dict[str, Any]]) -> Iterator[Remapped]:
        if not rows:
            return
        batch = pa.RecordBatch.from_pylist(rows, schema=ROW_SCHEMA)
        if self._statements.needed:
            batch = self._evaluated(self._routing.added(batch))
        rendered = route_table(self._routing.routes).render(batch)
        records = RecordColumns().rows(rendered.records, any_topic=True).records
        for code, refusal, record in zip(*map(pa.Array.to_pylist, rendered[1:]), records, strict=True):
            outcome = RouteOutcome(code)
            if outcome.reason:
                yield Remapped(why=outcome.detail or f"it is refused: {refusal}")
            elif outcome in (RouteOutcome.RECORD, RouteOutcome.FALLBACK):
                yield Remapped(record)
            else:
                yield Remapped()

    def _evaluated(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Rows with what Spark says of them."""
        frame = self._spark().createDataFrame(pa.Table.from_batches([rows]))
        (batch,) = self._statements.applied(frame, tolerant=True).toArrow().combine_chunks().to_batches()
        return of_schema(batch)


def _not_mapped(dead_letter: DeadLetter) -> Remapped:
    why = _NOT_WHOLE.get(dead_letter.reason)
    return _as_it_was(dead_letter) if why is None else Remapped(why=why)


def _as_it_was(dead_letter: DeadLetter) -> Remapped:
    """A record that was mapped well and could not be written; what was wrong with it is left to Kafka."""
    if dead_letter.topic is None:
        return Remapped(why="it names no topic")
    partition = -1 if dead_letter.partition is None or dead_letter.reason is Reason.PARTITION else dead_letter.partition
    moment = 0 if dead_letter.timestamp is None or dead_letter.reason is Reason.TIMESTAMP else dead_letter.timestamp
    headers = list(dead_letter.headers) or None
    return Remapped((dead_letter.topic, dead_letter.value, dead_letter.key, partition, None, None, moment, headers))
