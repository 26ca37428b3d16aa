"""Downlink messages as Arrow columns: Kafka records to MQTT messages, as `towline.bridge.routes` for uplinks.

Topic, payload and properties of a message each come from a template, from a column that Spark computed by the user's
SQL, or from the record's headers.

Every text is valid UTF-8 or null. A key or header with other bytes is null where a template names it; if the message
would lose it, the record becomes a dead letter, as does whatever MQTT can't carry. No record raises an exception here.
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
    FieldTexts,
    JsonFields,
    RenderedColumns,
    RowOutcome,
    fault_texts,
    first_case,
    first_value_of,
    running_sums,
    sql_verdicts,
    utf8_text,
)
from towline.schema import MESSAGE_SCHEMA

#: Columns of Spark's Kafka source, and the columns of a record's position.
KAFKA_COLUMNS: Final = ("key", "value", "topic", "partition", "offset", "timestamp", "headers")
POSITION_COLUMNS: Final = ("topic", "partition", "offset")
#: Fields of a record that a template may name beside key, value and headers, and the column behind each.
FIELDS: Final = {f"kafka.{name}": name for name in (*POSITION_COLUMNS, "timestamp")}
#: Beginning of the path of a field in a JSON value.
VALUE_ROOT: Final = "value"
#: Fields of a message that a line may set.
MESSAGE_FIELDS: Final = ("topic", "payload", "retain", "expiry", "content_type", "response_topic", "correlation_data")
#: Spark types of the fields that are no text.
SQL_TYPES: Final = {"retain": "BOOLEAN", "expiry": "BIGINT", "correlation_data": "BINARY", "payload": "BINARY"}
#: Prefixes of columns: SQL of a notice, and fields of the line as text.
NOTICE_PREFIX, TEXT_PREFIX = "notice_", "text_"
#: Headers that an uplink writes and that are no user properties; the last three are in dead letters only.
_TOWLINE_HEADERS: Final = frozenset({*HEADERS, "mqtt.gateway", "mqtt.offset", "mqtt.duplicate"})
#: Columns of a record that are kept only if it is refused.
_DEAD_LETTER_COLUMNS: Final = ("key", "value", "timestamp", "headers")
#: Maximum length of a text, binary property or topic [MQTT 5 section 1.5.4].
_MAX_LENGTH: Final = 65535
#: Maximum Message Expiry Interval, in seconds [MQTT 5 section 3.3.2.3.3].
_MAX_EXPIRY_S: Final = 0xFFFFFFFF
_INTEGER: Final = re.compile(r"\s*([+-]?[0-9]{1,99})\s*", re.ASCII)
#: Illegal in the topic of a message [MQTT-3.3.2-2, MQTT-4.7.3-1], and in any text [MQTT-1.5.4-2].
_INVALID_TOPIC, _NULL_CHARACTER = r"^$|[+#\x{0}]", r"\x{0}"
#: Characters that a string should not have, and at which a receiver may end the connection [MQTT 5 section 1.5.4].
_PLANE_NONCHARACTERS: Final = "".join(rf"\x{{{plane:X}FFFE}}\x{{{plane:X}FFFF}}" for plane in range(17))
_CONTROL_CHARACTERS: Final = rf"[\x{{1}}-\x{{1F}}\x{{7F}}-\x{{9F}}\x{{FDD0}}-\x{{FDEF}}{_PLANE_NONCHARACTERS}]"


def record_column(name: str, fields: Collection[str]) -> str | None:
    """Return the column of a template's field; None for an unknown name."""
    if name in ("key", "value") or name in fields:
        return name
    if name.startswith("header.") and name != "header.":
        return "headers"
    return VALUE_ROOT if payload_path(name, VALUE_ROOT) else FIELDS.get(name)


def internal(name: str) -> str:
    """Return the name of an internal column; the record may have a column of the plain name."""
    return f"__{name}"


def kept_columns(columns: Iterable[str]) -> list[str]:
    """Return the columns of records that `MessageTable.render` keeps."""
    return [name for name in columns if name not in (REJECT, WHERE, *map(internal, MESSAGE_FIELDS))]


_SENT_FIELDS: Final = tuple(field for field in MESSAGE_SCHEMA if field.name != "qos")
#: Columns that `MessageTable.render` adds to a record.
RENDERED_SCHEMA: Final = pa.schema(
    [*(field.with_name(internal(field.name)) for field in _SENT_FIELDS), (OUTCOME, pa.int8()), (FAULT, pa.string())]
)
#: A refused record, or the failure notice on it.
DEAD_LETTER_SCHEMA: Final = pa.schema(
    [
        *(RECORD_SCHEMA.field(name) for name in ("topic", "key", "value", "headers", "timestamp", OUTCOME, FAULT)),
        ("partition", pa.int32()),
    ]
)


@dataclass(frozen=True)
class DeadLetterColumns(RenderedColumns):
    """Dead letters of a downlink: batches of `DEAD_LETTER_SCHEMA`."""

    topic: str | None = None
    written_columns: frozenset[str] = frozenset(("topic", "key", "value", "headers", "timestamp", "partition"))


class MessageTable:
    """Mapping of a line's records to messages.

    Args:
        config: JSON values. An expression (of `MESSAGE_FIELDS`, ``notice``) is a template, a constant, null for none,
            or an empty table for a column that Spark has computed by SQL. ``limit`` is the broker's maximum packet size
            in bytes, 0 for no limit.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.expressions = _parse_templates(config["values"])
        self.properties, self.send_controls = config["properties"], config["send_controls"]
        self.line, self.qos, self.packet_limit = config["line"], config["qos"], config["limit"]
        self._notice = _parse_templates(config["notice"])
        copied: list[str] = config["copied"]
        self._copied_names = {name for name in copied if not name.endswith("*")}
        self._copied_prefixes = tuple(name[:-1] for name in copied if name.endswith("*"))

    def render(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Return records with their messages or faults, in `RENDERED_SCHEMA`; unused cells are null, for small batches.

        Args:
            rows: `KAFKA_COLUMNS`, and the columns of the line's SQL: `REJECT`, `WHERE`, and `internal` ones.
        """
        messages = _MessageColumns(self, rows)
        columns, outcomes, refusals = messages.columns(), *messages.outcomes()
        payload = internal("payload")
        columns[payload] = _masked(columns[payload], pc.equal(outcomes, int(RowOutcome.RENDERED)))
        columns |= {OUTCOME: outcomes, FAULT: fault_texts(outcomes, refusals, self.packet_limit)}
        names, is_refused = kept_columns(rows.schema.names), pc.greater(outcomes, int(RowOutcome.RENDERED))
        record = [_masked(rows.column(n), is_refused) if n in _DEAD_LETTER_COLUMNS else rows.column(n) for n in names]
        return pa.RecordBatch.from_arrays([*record, *columns.values()], names=[*names, *columns])

    def dead_letters(self, rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """Yield refused records, and the failure notices on them, in `DEAD_LETTER_SCHEMA`.

        Args:
            rows: Refused rows of `render`, with the columns of the notice's SQL.
        """
        yield rows.select(DEAD_LETTER_SCHEMA.names).cast(DEAD_LETTER_SCHEMA)
        if self._notice and (notices := self._notices(rows)):
            yield pa.RecordBatch.from_pylist(notices, schema=DEAD_LETTER_SCHEMA)

    def _notices(self, rows: pa.RecordBatch) -> list[dict[str, Any]]:
        record_fields = _RecordFields(rows, self._notice, NOTICE_PREFIX)
        evaluated = {name: record_fields.evaluate(name) for name in self._notice}
        topics, where_column = (
            utf8_text(evaluated.pop("topic"), lossy=True).to_pylist(),
            evaluated.pop("where").to_pylist(),
        )
        texts = {name: column.cast(pa.binary()).to_pylist() for name, column in evaluated.items()}
        keys, values, headers = texts.pop("key"), texts.pop("payload"), rows.column("headers").to_pylist()
        notices = []
        for row in range(record_fields.size):
            if topics[row] is None or (self._notice["where"] is not None and not where_column[row]):
                continue
            pairs = [{"key": bytes.fromhex(name[7:]).decode(), "value": cells[row]} for name, cells in texts.items()]
            pairs = [header for header in pairs if header["value"] is not None]
            pairs += [
                header
                for header in headers[row] or ()
                if header["key"] in self._copied_names or header["key"].startswith(self._copied_prefixes)
            ]
            value = b"" if self._notice["payload"] is None else values[row]
            notices.append({"topic": topics[row], "key": keys[row], "value": value, "headers": pairs, OUTCOME: 0})
        return notices


@lru_cache(maxsize=4)
def message_table(config_json: str) -> MessageTable:
    """Return the table of a line's JSON configuration; cached, since a process runs tasks of several lines in turn."""
    return MessageTable(json.loads(config_json))


def _parse_templates(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: Template.parse(value) if isinstance(value, str) else value for name, value in values.items()}


def _masked(column: pa.Array, mask: pa.Array) -> pa.Array:
    """Return a column with null in the rows outside a mask."""
    bounds = pc.min_max(mask).as_py()
    if not bounds["max"]:
        return pa.nulls(len(column), column.type)
    return column if bounds["min"] else column.take(pc.if_else(mask, pa.array(range(len(column)), pa.int64()), None))


class _RecordFields(FieldTexts):
    """Fields of records, and the expressions over them; SQL columns of the expressions have a prefix."""

    def __init__(self, rows: pa.RecordBatch, expressions: Mapping[str, Any], prefix: str = "") -> None:
        super().__init__(rows.num_rows)
        self._rows, self._expressions, self._prefix = rows, expressions, prefix

    def _make_text(self, name: str) -> pa.Array:
        if name in ("key", "value"):
            return utf8_text(self._rows.column(name))
        if name == "kafka.timestamp":  # as Spark writes it in UTC
            times = self._rows.column("timestamp").cast(pa.timestamp("us")).cast(pa.string())
            return pc.replace_substring_regex(times, r"\.?0*$", "")
        if name in FIELDS:
            return self._rows.column(FIELDS[name]).cast(pa.string())
        if name.startswith("header."):
            return utf8_text(self.header(name.removeprefix("header.")))
        if payload_path(name, VALUE_ROOT):
            return self.json_fields.fields[name]
        return self._rows.column(internal(TEXT_PREFIX + name))

    def header(self, name: str) -> pa.Array:
        """Return the value of the first header of a name as bytes, null where there is none."""
        return first_value_of(self._rows.column("headers"), name)

    @cached_property
    def json_fields(self) -> JsonFields:
        """JSON fields of the values that templates name."""
        templates = (template for template in self._expressions.values() if isinstance(template, Template))
        return JsonFields(self._rows.column("value"), templates, VALUE_ROOT)

    def evaluate(self, name: str) -> pa.Array:
        """Return the column of a named expression; null if there is none."""
        value = self._expressions[name]
        if isinstance(value, Template):
            return self.template_text(value)
        if isinstance(value, bool | int):
            return self.constant(value, pa.bool_() if isinstance(value, bool) else pa.int64())
        return self.constant(None, pa.binary()) if value is None else self._rows.column(internal(self._prefix + name))


class _MessageColumns(_RecordFields):
    """Message columns of one batch of records."""

    def __init__(self, table: MessageTable, rows: pa.RecordBatch) -> None:
        super().__init__(rows, table.expressions)
        self._table = table
        self._raw_columns = {name: self._field_or_header(name) for name in ("topic", "content_type", "response_topic")}
        self._utf8_columns = {name: utf8_text(column) for name, column in self._raw_columns.items()}
        self._correlation = self._field_or_header("correlation_data").cast(pa.binary())
        has_payload = table.expressions["payload"] is not None
        self._payload = self.evaluate("payload").cast(pa.binary()) if has_payload else rows.column("value")
        self._users = _UserProperties(rows.column("headers"), table.properties)
        self._expiry = self._expiry_seconds()

    def _field_or_header(self, name: str) -> pa.Array:
        """Return the column of a field's expression; without one, of the header that an uplink writes for it."""
        if self._expressions[name] is not None or self._table.properties == "none":
            return self.evaluate(name)
        return self.header("mqtt." + {"expiry": "message-expiry"}.get(name, name.replace("_", "-")))

    def columns(self) -> dict[str, pa.Array]:
        """Return the message columns."""
        utf8_flags = pc.equal(self.header("mqtt.payload-format"), b"1")
        if self._expressions["payload"] is not None or self._table.properties == "none":
            utf8_flags = self.constant(None, pa.bool_())
        columns = {
            **self._utf8_columns,
            "payload": self._payload,
            "retain": self._retain(),
            "payload_is_utf8": utf8_flags,
            "correlation_data": self._correlation,
            "user_properties": self._users.property_lists,
            "message_expiry_seconds": self._expiry,
        }
        return {internal(field.name): columns[field.name].cast(field.type) for field in _SENT_FIELDS}

    def _retain(self) -> pa.Array:
        column = self._field_or_header("retain")
        return (column if pa.types.is_boolean(column.type) else pc.equal(column, b"true")).fill_null(False)

    def _expiry_seconds(self) -> pa.Array:
        column = self._field_or_header("expiry")
        if not pa.types.is_integer(column.type):
            column = pa.array(map(_parse_int64, utf8_text(column).to_pylist()), pa.int64())
        return pc.min_element_wise(pc.max_element_wise(column, 0, skip_nulls=False), _MAX_EXPIRY_S, skip_nulls=False)

    def outcomes(self) -> tuple[pa.Array, pa.Array]:
        """Return `RowOutcome` codes, each of the first reason that applies, and the texts of ``reject``."""
        cases, refusals = sql_verdicts(self._rows)
        return first_case([*cases, *self._fault_cases()], self.constant(int(RowOutcome.RENDERED), pa.int8())), refusals

    def _fault_cases(self) -> Iterator[tuple[pa.Array, Any]]:
        """Yield cases for which a record can't become a message: a row mask, and the outcome."""
        table, users, utf8 = self._table, self._users, self._utf8_columns
        yield JsonFields.fault_case(self.json_fields.outcomes)
        not_utf8 = {name: pc.and_(raw.is_valid(), utf8[name].is_null()) for name, raw in self._raw_columns.items()}
        yield self._raw_columns["topic"].is_null(), RowOutcome.TOPIC_ABSENT
        yield pc.or_(not_utf8["topic"], _is_illegal(utf8["topic"], _INVALID_TOPIC)), RowOutcome.MQTT_TOPIC
        for name, illegal in (("response_topic", _INVALID_TOPIC), ("content_type", _NULL_CHARACTER)):
            yield pc.or_(not_utf8[name], _is_illegal(utf8[name], illegal)), RowOutcome.PROPERTY
        yield users.matches_any(lambda c: pc.or_(c.is_null(), _is_illegal(c, _NULL_CHARACTER))), RowOutcome.PROPERTY
        yield pc.greater(_byte_lengths(self._correlation), _MAX_LENGTH), RowOutcome.PROPERTY
        if not table.send_controls:
            for column in utf8.values():
                yield _matches_regex(column, _CONTROL_CHARACTERS), RowOutcome.CONTROLS
            yield (users.matches_any(lambda column: _matches_regex(column, _CONTROL_CHARACTERS)), RowOutcome.CONTROLS)
        if table.packet_limit:
            yield pc.greater(self.packet_size(), table.packet_limit), RowOutcome.TOO_LARGE

    def packet_size(self) -> pa.Array:
        """Return an upper bound for the bytes of each PUBLISH, with maximum lengths and a topic alias [MQTT 5, 3.3]."""
        texts = (self._utf8_columns["content_type"], self._utf8_columns["response_topic"], self._correlation)
        parts = [*map(_byte_lengths, (*texts, self._utf8_columns["topic"], self._payload)), self._users.packet_bytes]
        parts += [pc.multiply(column.is_valid().cast(pa.int64()), 3) for column in texts]
        parts.append(pc.multiply(self._expiry.is_valid().cast(pa.int64()), 5))
        lengths = 1 + 4 + 2 + 4  # of the packet, the topic and the properties, behind the first byte
        return pc.add(reduce(pc.add, parts), lengths + (2 if self._table.qos else 0) + 2 + 3)


class _UserProperties:
    """User properties of records: those written by an uplink, and with ``all`` every other header."""

    def __init__(self, headers: pa.Array, properties: str) -> None:
        self._record_count = len(headers)
        pairs, lengths = headers.flatten(), headers.value_lengths().fill_null(0).cast(pa.int64())
        codes = pairs.field("key").dictionary_encode()
        names = [_user_property_name(key, properties) for key in codes.dictionary.cast(pa.binary()).to_pylist()]
        is_sent = pa.array([sent for sent, _ in names], pa.bool_()).take(codes.indices)
        self._rows = pc.list_parent_indices(headers).filter(is_sent)
        self._names = pa.array([name for _, name in names], pa.string()).take(codes.indices).filter(is_sent)
        self._values = utf8_text(pairs.field("value").filter(is_sent).fill_null(b""))
        list_ends = running_sums(is_sent).take(running_sums(lengths))
        nulls = pc.equal(lengths, 0) if properties != "none" else pa.repeat(pa.scalar(value=True), self._record_count)
        structs = pa.StructArray.from_arrays([self._names, self._values], ["key", "value"])
        #: Properties of each record; null where it has no headers.
        self.property_lists = pa.ListArray.from_arrays(list_ends.cast(pa.int32()), structs, mask=nulls)
        sums = running_sums(pc.add(pc.add(_byte_lengths(self._names), _byte_lengths(self._values)), 5)).take(list_ends)
        #: Bytes of each list in a packet.
        self.packet_bytes = pc.subtract(sums[1:], sums[:-1])

    def matches_any(self, test: Callable[[pa.Array], pa.Array]) -> pa.Array:
        """Return a mask of the records for which a test is true for a name or a value."""
        rows = self._rows.filter(pc.or_(test(self._names), test(self._values)))
        return pc.is_in(pa.array(range(self._record_count), rows.type), value_set=rows)


def _user_property_name(key: bytes, properties: str) -> tuple[bool, str | None]:
    """Return whether a header becomes a user property, and the property's name; None if that is no UTF-8."""
    header = key.decode(errors="replace")
    property_name = user_property(header)
    is_copied = properties == "all" and header not in _TOWLINE_HEADERS and not header.startswith("towline.")
    name = header if property_name is None else property_name
    return properties != "none" and (property_name is not None or is_copied), name if header.encode() == key else None


def _byte_lengths(column: pa.Array) -> pa.Array:
    return pc.binary_length(column).fill_null(0).cast(pa.int64())


def _matches_regex(column: pa.Array, pattern: str) -> pa.Array:
    return pc.match_substring_regex(column, pattern).fill_null(False)


def _is_illegal(column: pa.Array, pattern: str) -> pa.Array:
    """Return a mask of texts that are too long for MQTT or match an illegal pattern."""
    return pc.or_(pc.greater(_byte_lengths(column), _MAX_LENGTH), _matches_regex(column, pattern))


def _parse_int64(text: str | None) -> int | None:
    """Parse a signed 64-bit integer; None for another text."""
    number = _INTEGER.fullmatch(text) if text else None
    return int(number[1]) if number and -(1 << 63) <= int(number[1]) < 1 << 63 else None
