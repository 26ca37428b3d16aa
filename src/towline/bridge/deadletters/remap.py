"""Dead letters through the routes again: what they would become with the bridge file as it is now.

The statement of the rules in Python (`towline.bridge.config.routes`) maps them, which the bridge's SQL is tested
against; Spark is started only for lines whose routes have a ``where``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from towline.bridge.config.model import Line
from towline.bridge.config.routes import Route, first_match
from towline.kafka.deadletters import DeadLetter, Reason
from towline.kafka.properties import TRACE_CONTEXT, user_property

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from towline.bridge.config.model import AnyLine

__all__ = ["Mapper", "RemapFate", "Remapped", "Returner", "mapper_of", "row_of"]

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_INDEX: Final = "__index"
#: Largest numbers of the columns; what is larger was not written by a gateway.
_QOS, _EXPIRY, _SUBSCRIPTION, _MOMENT, _OFFSET = 2, 0xFFFFFFFF, 268_435_455, 1 << 57, (1 << 63) - 1
_DECIMAL: Final = re.compile(rb"[0-9]{1,19}")
#: The answers of a route without SQL.
_WANTED: Final[Mapping[str, Any]] = {"wanted": True, "refusal": {"why": None}}
#: Letters that are not the message: no route can make of them what it was.
_NOT_WHOLE: Final = {
    Reason.PACKET_TOO_LARGE: "too large for the gateway's max_packet_bytes; its publisher has to send it again",
    Reason.TOO_MANY_PROPERTIES: "more than 1,000 properties; its value is the MQTT packet, for a program of yours",
}


class RemapFate(StrEnum):
    """What a dead letter becomes."""

    #: A record of its topic.
    MENDED = "mended"
    #: Nothing: a ``where`` leaves it out now.
    FILTERED = "filtered"
    #: Still a dead letter.
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class Remapped:
    """The fate of one dead letter.

    Attributes:
        fate: What it becomes.
        record: Arguments of ``produce``: topic, value, key, partition, None, None, timestamp in ms, headers.
        why: Why it is still dead.
    """

    fate: RemapFate
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


def mapper_of(line: AnyLine, spark: Callable[[], SparkSession]) -> Mapper | Returner:
    """What carries on the dead letters of a line."""
    return Mapper(line, spark) if isinstance(line, Line) else Returner()


class Returner:
    """Puts the dead letters of a downlink back where they came from: the line takes them from Kafka once more."""

    def outcomes(self, dead_letters: Sequence[DeadLetter]) -> list[Remapped]:
        """The fate of each, in order."""
        return [_as_it_was(dead_letter) for dead_letter in dead_letters]


class Mapper:
    """Maps the dead letters of one line.

    Args:
        line: Its routes.
        spark: Makes the session a ``where`` is evaluated in; called at most once, and only for one.
    """

    def __init__(self, line: Line, spark: Callable[[], SparkSession]) -> None:
        self._routes = line.routes
        self._spark = spark

    def outcomes(self, dead_letters: Sequence[DeadLetter]) -> list[Remapped]:
        """The fate of each, in order."""
        rows = [None if dead_letter.reason in _NOT_WHOLE else row_of(dead_letter) for dead_letter in dead_letters]
        taken = [None if row is None else first_match(self._routes, row["topic"]) for row in rows]
        answers = self._answers(rows, taken)
        return [
            self._outcome(dead_letter, row, route, answers.get(index, _WANTED))
            for index, (dead_letter, row, route) in enumerate(zip(dead_letters, rows, taken, strict=True))
        ]

    def _outcome(
        self, dead_letter: DeadLetter, row: Mapping[str, Any] | None, taken: int | None, answer: Mapping[str, Any]
    ) -> Remapped:
        if dead_letter.reason in _NOT_WHOLE:
            return Remapped(RemapFate.DEAD, why=_NOT_WHOLE[dead_letter.reason])
        if row is None:
            return _as_it_was(dead_letter)
        if taken is None:
            return Remapped(RemapFate.DEAD, why="no route takes its topic")
        route = self._routes[taken]
        return _judged(answer) or _mapped(route, {**row, **{name: answer.get(name) for name in route.said_fields}})

    def _answers(
        self, rows: Sequence[dict[str, Any] | None], taken: Sequence[int | None]
    ) -> dict[int, Mapping[str, Any]]:
        """By index what the SQL of its route says of a row: its fields, ``wanted`` and ``refusal``."""
        found: dict[int, Mapping[str, Any]] = {}
        for number, route in enumerate(self._routes):
            mine = {index: row for index, row in enumerate(rows) if taken[index] == number and row is not None}
            if mine and (route.where is not None or route.reject is not None or route.fields):
                found |= _asked(self._spark(), route, mine)
        return found


def _judged(answer: Mapping[str, Any]) -> Remapped | None:
    """What ``where`` and ``reject`` make of a row; None where they let it pass."""
    wanted, refusal = answer["wanted"], answer["refusal"]
    if wanted is None or (wanted and refusal is None):
        return Remapped(RemapFate.DEAD, why=f"its {'where' if wanted is None else 'reject'} raises an error")
    if not wanted:
        return Remapped(RemapFate.FILTERED)
    return Remapped(RemapFate.DEAD, why=f"it is refused: {refusal['why']}") if refusal["why"] is not None else None


def _mapped(route: Route, row: Mapping[str, Any]) -> Remapped:
    record = route.record(row)
    assert record is not None, "the route takes the topic"
    if record["topic"] is None:
        return Remapped(RemapFate.DEAD, why="its Kafka topic is not legal, not allowed or reserved")
    if route.key_required and record["key"] is None:
        return Remapped(RemapFate.DEAD, why="it has no key")
    moment = (row["received_at"] - _EPOCH) // timedelta(milliseconds=1)
    return Remapped(
        RemapFate.MENDED,
        (record["topic"], record["value"], record["key"], -1, None, None, moment, record["headers"]),
    )


def _as_it_was(dead_letter: DeadLetter) -> Remapped:
    """A record that was mapped well and could not be written; what was wrong with it is left to Kafka."""
    if dead_letter.topic is None:
        return Remapped(RemapFate.DEAD, why="it names no topic")
    partition = -1 if dead_letter.partition is None or dead_letter.reason is Reason.PARTITION else dead_letter.partition
    moment = 0 if dead_letter.timestamp is None or dead_letter.reason is Reason.TIMESTAMP else dead_letter.timestamp
    headers = list(dead_letter.headers) or None
    return Remapped(
        RemapFate.MENDED,
        (dead_letter.topic, dead_letter.value, dead_letter.key, partition, None, None, moment, headers),
    )


def _asked(spark: SparkSession, route: Route, rows: Mapping[int, dict[str, Any]]) -> dict[int, Mapping[str, Any]]:
    from pyspark.sql import functions as F  # noqa: N812, PLC0415 - Spark's own custom, and only where it is needed

    from towline.bridge.lines.sql import condition, refusal, tried  # noqa: PLC0415 - see above
    from towline.schema import SPARK_SCHEMA  # noqa: PLC0415 - see above

    names = list(next(iter(rows.values())))
    made = [(index, *(row[name] for name in names)) for index, row in rows.items()]
    frame = spark.createDataFrame(made, f"{_INDEX} long, {SPARK_SCHEMA}")
    for name, text in route.fields:
        frame = frame.withColumn(name, tried(F.expr(text)))
    wanted, refused = tried(F.expr(condition(route.where))), tried(F.expr(refusal(route.reject)))
    fields = (F.col(name).cast("string").alias(name) for name in route.said_fields)
    asked = frame.select(_INDEX, wanted.alias("wanted"), refused.alias("refusal"), *fields)
    return {row[_INDEX]: row.asDict() for row in asked.collect()}
