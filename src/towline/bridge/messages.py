"""Messages of a downlink over Arrow columns: what a Kafka record becomes, as `towline.bridge.routes` for the other way.

Topic, payload and properties of a message are each a template, a column that Spark has made of the user's SQL, or what
the record's headers say.

Every text is UTF-8 or nothing: a key or header with other bytes is null where a template names it, and what would be
lost by it makes the record a dead letter. So does whatever MQTT can't carry. Nothing here raises on a record.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache, reduce
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from towline.bridge.patterns import Template, payload_path
from towline.bridge.properties import HEADERS, user_property
from towline.bridge.routes import (
    FAULT,
    OUTCOME,
    RECORD_SCHEMA,
    REJECT,
    WHERE,
    JsonFields,
    RenderedColumns,
    RowOutcome,
    Values,
    faults,
    first_case,
    first_named,
    running_sums,
    utf8_text,
    verdicts,
    whole_text,
)
from towline.schema import MESSAGE_SCHEMA

#: Columns of Spark's Kafka source, and those that say where a record stands.
COLUMNS: Final = ("key", "value", "topic", "partition", "offset", "timestamp", "headers")
PLACE: Final = ("topic", "partition", "offset")
#: Fields of a record that a template may name beside key, value and headers, and the column behind each.
FIELDS: Final = {f"kafka.{name}": name for name in (*PLACE, "timestamp")}
#: What begins the path of a field of a JSON value.
DOCUMENT: Final = "value"
#: What a line may say of its messages.
VALUES: Final = ("topic", "payload", "retain", "expiry", "content_type", "response_topic", "correlation_data")
#: Types of Spark's of those that are no text.
KINDS: Final = {"retain": "BOOLEAN", "expiry": "BIGINT", "correlation_data": "BINARY", "payload": "BINARY"}
#: Begins the columns of what a notice says in SQL, and of the line's fields as texts.
NOTICE, TEXT = "notice_", "text_"
#: Headers the way up writes that are no user properties; the last three stand in dead letters only.
_OURS: Final = frozenset({*HEADERS, "mqtt.gateway", "mqtt.offset", "mqtt.duplicate"})
#: What goes on of a record only where it is refused.
_OF_LETTERS: Final = ("key", "value", "timestamp", "headers")
#: Longest text or binary property, and longest topic [MQTT 5 section 1.5.4].
_LONGEST: Final = 65535
#: Longest Message Expiry Interval, in seconds [MQTT 5 section 3.3.2.3.3].
_LONGEST_EXPIRY: Final = 0xFFFFFFFF
_SECONDS: Final = re.compile(r"\s*([+-]?[0-9]{1,99})\s*", re.ASCII)
#: What no topic of a message has [MQTT-3.3.2-2, MQTT-4.7.3-1], and no text [MQTT-1.5.4-2].
_WILD, _NUL = r"^$|[+#\x{0}]", r"\x{0}"
#: Characters that a string should not have, and at which a receiver may end the connection [MQTT 5 section 1.5.4].
_PLANES: Final = "".join(rf"\x{{{plane:X}FFFE}}\x{{{plane:X}FFFF}}" for plane in range(17))
_CONTROLS: Final = rf"[\x{{1}}-\x{{1F}}\x{{7F}}-\x{{9F}}\x{{FDD0}}-\x{{FDEF}}{_PLANES}]"


def record_column(name: str, fields: Collection[str]) -> str | None:
    """The column behind a field that a template may name; None for another name."""
    if name in ("key", "value") or name in fields:
        return name
    if name.startswith("header.") and name != "header.":
        return "headers"
    return DOCUMENT if payload_path(name, DOCUMENT) else FIELDS.get(name)


def own(name: str) -> str:
    """A column of ours: what a record has may have the same name."""
    return f"__{name}"


def lasting(names: Iterable[str]) -> list[str]:
    """The columns of records that are there after `MessageTable.rendered` as before."""
    return [name for name in names if name not in (REJECT, WHERE, *map(own, VALUES))]


_SENT: Final = tuple(field for field in MESSAGE_SCHEMA if field.name != "qos")
#: What `MessageTable.rendered` adds to the columns of a record.
RENDERED_SCHEMA: Final = pa.schema(
    [*(field.with_name(own(field.name)) for field in _SENT), (OUTCOME, pa.int8()), (FAULT, pa.string())]
)
#: A refused record, or what Kafka is told of it.
LETTER_SCHEMA: Final = pa.schema(
    [
        *(RECORD_SCHEMA.field(name) for name in ("topic", "key", "value", "headers", "timestamp", OUTCOME, FAULT)),
        ("partition", pa.int32()),
    ]
)


@dataclass(frozen=True)
class LetterColumns(RenderedColumns):
    """Batches of `LETTER_SCHEMA`."""

    topic: str | None = None
    present: frozenset[str] = frozenset(("topic", "key", "value", "headers", "timestamp", "partition"))


class MessageTable:
    """What the records of a line become.

    Args:
        written: Plain values; of what is said (`VALUES`, ``notice``) a template, a constant, null for nothing, or an
            empty table for a column that Spark has made of SQL. ``limit`` is the largest packet that the broker takes
            in bytes, 0 for no limit.
    """

    def __init__(self, written: Mapping[str, Any]) -> None:
        self.said = _read(written["values"])
        self.properties, self.send_controls = written["properties"], written["send_controls"]
        self.line, self.qos, self.limit = written["line"], written["qos"], written["limit"]
        self._notice = _read(written["notice"])
        copied: list[str] = written["copied"]
        self._exact = {name for name in copied if not name.endswith("*")}
        self._begins = tuple(name[:-1] for name in copied if name.endswith("*"))

    def rendered(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Records with what becomes of them, in `RENDERED_SCHEMA`; a batch goes a long way, so what has no use is null.

        Args:
            rows: `COLUMNS`, and what Spark has made of the line's SQL: `REJECT`, `WHERE`, and `own` columns.
        """
        made = _Messages(self, rows)
        columns, outcomes, refusals = made.columns(), *made.outcomes()
        columns[own("payload")] = _only(columns[own("payload")], pc.equal(outcomes, int(RowOutcome.RENDERED)))
        columns |= {OUTCOME: outcomes, FAULT: whole_text(faults(outcomes, refusals, self.limit))}
        keep, bad = lasting(rows.schema.names), pc.greater(outcomes, int(RowOutcome.FALLBACK))
        record = [_only(rows.column(n), bad) if n in _OF_LETTERS else rows.column(n) for n in keep]
        return pa.RecordBatch.from_arrays([*record, *columns.values()], names=[*keep, *columns])

    def dead_letters(self, rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """Refused records, and what Kafka is told of them, in `LETTER_SCHEMA`.

        Args:
            rows: Of `rendered`, each refused; with what Spark has made of the SQL of the notice.
        """
        yield rows.select(LETTER_SCHEMA.names).cast(LETTER_SCHEMA)
        if self._notice and (notices := self._notices(rows)):
            yield pa.RecordBatch.from_pylist(notices, schema=LETTER_SCHEMA)

    def _notices(self, rows: pa.RecordBatch) -> list[dict[str, Any]]:
        view = _Records(rows, self._notice, NOTICE)
        said = {name: view.said(name) for name in self._notice}
        topics, wanted = whole_text(said.pop("topic")).to_pylist(), said.pop("where").to_pylist()
        texts = {name: column.cast(pa.binary()).to_pylist() for name, column in said.items()}
        keys, values, headers = texts.pop("key"), texts.pop("payload"), rows.column("headers").to_pylist()
        notices = []
        for at in range(view.size):
            if topics[at] is None or (self._notice["where"] is not None and not wanted[at]):
                continue
            made = [{"key": bytes.fromhex(name[7:]).decode(), "value": one[at]} for name, one in texts.items()]
            made = [one for one in made if one["value"] is not None]
            made += [
                one for one in headers[at] or () if one["key"] in self._exact or one["key"].startswith(self._begins)
            ]
            value = b"" if self._notice["payload"] is None else values[at]
            notices.append({"topic": topics[at], "key": keys[at], "value": value, "headers": made, OUTCOME: 0})
        return notices


@lru_cache(maxsize=4)
def message_table(text: str) -> MessageTable:
    """The table of a line, of JSON; a process runs tasks of several lines, one after the other."""
    return MessageTable(json.loads(text))


def _read(written: Mapping[str, Any]) -> dict[str, Any]:
    return {name: Template.read(v) if isinstance(v, str) else v for name, v in written.items()}


def _only(column: pa.Array, mask: pa.Array) -> pa.Array:
    """A column in the rows of a mask, null in others."""
    ends = pc.min_max(mask).as_py()
    if not ends["max"]:
        return pa.nulls(len(column), column.type)
    return column if ends["min"] else column.take(pc.if_else(mask, pa.array(range(len(column)), pa.int64()), None))


class _Records(Values):
    """The fields of records, and what is said over them; its columns of SQL have a prefix."""

    def __init__(self, rows: pa.RecordBatch, said: Mapping[str, Any], prefix: str = "") -> None:
        super().__init__(rows.num_rows)
        self._rows, self._said, self._prefix = rows, said, prefix

    def _value(self, name: str) -> pa.Array:
        if name in ("key", "value"):
            return utf8_text(self._rows.column(name))
        if name == "kafka.timestamp":  # as Spark writes it in UTC
            moments = self._rows.column("timestamp").cast(pa.timestamp("us")).cast(pa.string())
            return pc.replace_substring_regex(moments, r"\.?0*$", "")
        if name in FIELDS:
            return self._rows.column(FIELDS[name]).cast(pa.string())
        if name.startswith("header."):
            return utf8_text(self.header(name.removeprefix("header.")))
        return self.document.fields[name] if payload_path(name, DOCUMENT) else self._rows.column(own(TEXT + name))

    def header(self, name: str) -> pa.Array:
        """The bytes of the first header of a name, null where there is none."""
        return first_named(self._rows.column("headers"), name)

    @cached_property
    def document(self) -> JsonFields:
        """The fields of JSON values that are named."""
        templates = (one for one in self._said.values() if isinstance(one, Template))
        return JsonFields(self._rows.column("value"), templates, DOCUMENT)

    def said(self, name: str) -> pa.Array:
        """What is said; null where nothing is."""
        value = self._said[name]
        if isinstance(value, Template):
            return self.text(value)
        if isinstance(value, bool | int):
            return self.constant(value, pa.bool_() if isinstance(value, bool) else pa.int64())
        return self.constant(None, pa.binary()) if value is None else self._rows.column(own(self._prefix + name))


class _Messages(_Records):
    """The messages of one batch."""

    def __init__(self, table: MessageTable, rows: pa.RecordBatch) -> None:
        super().__init__(rows, table.said)
        self._table = table
        self._raw = {name: self._or_header(name) for name in ("topic", "content_type", "response_topic")}
        self._clean = {name: utf8_text(column) for name, column in self._raw.items()}
        self._correlation = self._or_header("correlation_data").cast(pa.binary())
        said = table.said["payload"] is not None
        self._payload = self.said("payload").cast(pa.binary()) if said else rows.column("value")
        self._users = _Users(rows.column("headers"), table.properties)
        self._expiry = self._seconds()

    def _or_header(self, name: str) -> pa.Array:
        """What is said, or what the header of the way up says where nothing is."""
        if self._said[name] is not None or self._table.properties == "none":
            return self.said(name)
        return self.header("mqtt." + {"expiry": "message-expiry"}.get(name, name.replace("_", "-")))

    def columns(self) -> dict[str, pa.Array]:
        """Those of the messages."""
        form = pc.equal(self.header("mqtt.payload-format"), b"1")
        if self._said["payload"] is not None or self._table.properties == "none":
            form = self.constant(None, pa.bool_())
        made = {
            **self._clean,
            "payload": self._payload,
            "retain": self._retain(),
            "payload_is_utf8": form,
            "correlation_data": self._correlation,
            "user_properties": self._users.lists,
            "message_expiry_seconds": self._expiry,
        }
        return {own(field.name): made[field.name].cast(field.type) for field in _SENT}

    def _retain(self) -> pa.Array:
        column = self._or_header("retain")
        return (column if pa.types.is_boolean(column.type) else pc.equal(column, b"true")).fill_null(False)

    def _seconds(self) -> pa.Array:
        column = self._or_header("expiry")
        if not pa.types.is_integer(column.type):
            column = pa.array(map(_whole, utf8_text(column).to_pylist()), pa.int64())
        return pc.min_element_wise(pc.max_element_wise(column, 0, skip_nulls=False), _LONGEST_EXPIRY, skip_nulls=False)

    def outcomes(self) -> tuple[pa.Array, pa.Array]:
        """Codes of `RowOutcome`, the first reason that holds; and what ``reject`` says."""
        asked, refusals = verdicts(self._rows)
        return first_case([*asked, *self._faults()], self.constant(int(RowOutcome.RENDERED), pa.int8())), refusals

    def _faults(self) -> Iterator[tuple[pa.Array, Any]]:
        """Why a record can't be a message: rows, and an outcome."""
        table, users, clean = self._table, self._users, self._clean
        yield JsonFields.case(self.document.outcomes)
        broken = {name: pc.and_(raw.is_valid(), clean[name].is_null()) for name, raw in self._raw.items()}
        yield self._raw["topic"].is_null(), RowOutcome.TOPIC_ABSENT
        yield pc.or_(broken["topic"], _bad(clean["topic"], _WILD)), RowOutcome.MQTT_TOPIC
        if table.properties != "none":
            yield users.any_of(lambda column: column.is_null()), RowOutcome.HEADER_NO_TEXT
        for name in ("content_type", "response_topic"):
            if table.said[name] is None:
                yield broken[name], RowOutcome.HEADER_NO_TEXT
        yield pc.or_(broken["response_topic"], _bad(clean["response_topic"], _WILD)), RowOutcome.RESPONSE_TOPIC
        yield pc.or_(broken["content_type"], _bad(clean["content_type"], _NUL)), RowOutcome.PROPERTY
        yield users.any_of(lambda column: _bad(column, _NUL)), RowOutcome.PROPERTY
        yield pc.greater(_bytes(self._correlation), _LONGEST), RowOutcome.PROPERTY
        if not table.send_controls:
            for column in clean.values():
                yield _has(column, _CONTROLS), RowOutcome.CONTROLS
            yield users.any_of(lambda column: _has(column, _CONTROLS)), RowOutcome.CONTROLS
        if table.limit:
            yield pc.greater(self.packet_size(), table.limit), RowOutcome.TOO_LARGE

    def packet_size(self) -> pa.Array:
        """Bytes of each PUBLISH, a few too many: room for the longest lengths and a topic alias [MQTT 5, 3.3]."""
        texts = (self._clean["content_type"], self._clean["response_topic"], self._correlation)
        parts = [*map(_bytes, (*texts, self._clean["topic"], self._payload)), self._users.sizes]
        parts += [pc.multiply(column.is_valid().cast(pa.int64()), 3) for column in texts]
        parts.append(pc.multiply(self._expiry.is_valid().cast(pa.int64()), 5))
        lengths = 1 + 4 + 2 + 4  # of the packet, the topic and the properties, behind the first byte
        return pc.add(reduce(pc.add, parts), lengths + (2 if self._table.qos else 0) + 2 + 3)


class _Users:
    """The user properties of records: those the way up has written, and with ``all`` every other header.

    Trace context comes in headers of its own names, whoever wrote them; a header without value is an empty property.

    Attributes:
        lists: Of each record; null where it has no headers.
        sizes: Bytes of each list in a packet.
    """

    def __init__(self, headers: pa.Array, properties: str) -> None:
        self._size = len(headers)
        pairs, lengths = headers.flatten(), headers.value_lengths().fill_null(0).cast(pa.int64())
        coded = pairs.field("key").dictionary_encode()
        names = [_user_name(key, properties) for key in coded.dictionary.cast(pa.binary()).to_pylist()]
        travels = pa.array([travel for travel, _ in names], pa.bool_()).take(coded.indices)
        self._rows = pc.list_parent_indices(headers).filter(travels)
        self._names = pa.array([name for _, name in names], pa.string()).take(coded.indices).filter(travels)
        self._values = utf8_text(pairs.field("value").filter(travels).fill_null(b""))
        ends = running_sums(travels).take(running_sums(lengths))
        none = pc.equal(lengths, 0) if properties != "none" else pa.repeat(pa.scalar(value=True), self._size)
        structs = pa.StructArray.from_arrays([self._names, self._values], ["key", "value"])
        self.lists = pa.ListArray.from_arrays(ends.cast(pa.int32()), structs, mask=none)
        sums = running_sums(pc.add(pc.add(_bytes(self._names), _bytes(self._values)), 5)).take(ends)
        self.sizes = pc.subtract(sums[1:], sums[:-1])

    def any_of(self, test: Callable[[pa.Array], pa.Array]) -> pa.Array:
        """In which records a test holds for a name or a value."""
        rows = self._rows.filter(pc.or_(test(self._names), test(self._values)))
        return pc.is_in(pa.array(range(self._size), rows.type), value_set=rows)


def _user_name(key: bytes, properties: str) -> tuple[bool, str | None]:
    """Whether a header becomes a user property, and the name of that; None where that is no text."""
    header = key.decode(errors="replace")
    written = user_property(header)
    others = properties == "all" and header not in _OURS and not header.startswith("towline.")
    name = header if written is None else written
    return properties != "none" and (written is not None or others), name if header.encode() == key else None


def _bytes(column: pa.Array) -> pa.Array:
    return pc.binary_length(column).fill_null(0).cast(pa.int64())


def _has(column: pa.Array, pattern: str) -> pa.Array:
    return pc.match_substring_regex(column, pattern).fill_null(False)


def _bad(column: pa.Array, pattern: str) -> pa.Array:
    """Whether a text has what MQTT can't carry, or is too long."""
    return pc.or_(pc.greater(_bytes(column), _LONGEST), _has(column, pattern))


def _whole(text: str | None) -> int | None:
    """A whole number of 64 bits."""
    number = _SECONDS.fullmatch(text) if text else None
    return int(number[1]) if number and -(1 << 63) <= int(number[1]) < 1 << 63 else None
