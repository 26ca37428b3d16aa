"""A row as a Kafka record, and back; pure.

    key     compact JSON: the row's number in its journal as ``number``, and each column but the payload that is not
            null under its own name; bytes in base64, a time as microseconds since 1970
    value   the payload; null where the row has none

So Spark rebuilds the columns with ``from_json`` alone (`towline.bridge.uplink.landed`), and no header, which costs
twice what a key does, has to be made and parsed for each message.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import pyarrow as pa

from towline.errors import JournalDamaged
from towline.schema import ROW_SCHEMA

__all__ = [
    "NUMBER",
    "PAYLOAD",
    "TOO_LARGE",
    "LandingRecord",
    "key_at",
    "number_at",
    "number_of",
    "rows_of",
    "to_records",
]

#: Name of the row's number in the key, and the column that is the value.
NUMBER: Final = "number"
PAYLOAD: Final = "payload"
#: Why a row is there without its payload: the value of ``towline-reason``, as of `towline.mqtt.stubs`.
TOO_LARGE: Final = "record_too_large"
#: Columns that a row without its payload keeps: what is short, or its place.
_KEPT: Final = frozenset({"topic", "qos", "retain", "duplicate", "received_at", "gateway", "offset", NUMBER})

_encode: Final = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode


class LandingRecord(NamedTuple):
    """Key and value of a row's record."""

    key: bytes
    value: bytes | None

    @property
    def size(self) -> int:
        """Bytes of both."""
        return len(self.key) + len(self.value or b"")


def to_records(batch: Any, first: int, limit: int) -> tuple[list[LandingRecord], int]:
    """The records of some rows, in order.

    Args:
        batch: A record batch.
        first: Number of its first row.
        limit: Most bytes of a record. A larger row of `ROW_SCHEMA` comes without its payload and its properties, with
            its size and digest as those of a stub; of another schema it is as it is, for the caller to refuse.

    Returns:
        Them, and how many came without their payload.
    """
    names, columns = _columns(batch)
    payloads = _payloads(batch)
    records, aside = [], 0
    for index, values in enumerate(zip(*columns, strict=True) if columns else [()] * batch.num_rows):
        said = {name: value for name, value in zip(names, values, strict=True) if value is not None}
        row = {NUMBER: first + index, **said}
        record = LandingRecord(_encode(row).encode(), payloads[index])
        if record.size > limit and batch.schema.equals(ROW_SCHEMA):
            record, aside = _without_payload(row, record), aside + 1
        records.append(record)
    return records, aside


def _without_payload(row: Mapping[str, Any], whole: LandingRecord) -> LandingRecord:
    facts = {
        "towline-reason": TOO_LARGE,
        "towline-size": str(whole.size),
        "towline-sha256": hashlib.sha256(whole.value or b"").hexdigest(),
    }
    kept: dict[str, Any] = {name: value for name, value in row.items() if name in _KEPT}
    kept["user_properties"] = [{"key": name, "value": value} for name, value in facts.items()]
    return LandingRecord(_encode(kept).encode(), None)


def _columns(batch: Any) -> tuple[list[str], list[list[Any]]]:
    """Names and JSON values of the columns that have any."""
    names, columns = [], []
    for field, column in zip(batch.schema, batch.columns, strict=True):
        if field.name != PAYLOAD and column.null_count < batch.num_rows:
            names.append(field.name)
            columns.append(_out(field.type)(column))
    return names, columns


def _payloads(batch: Any) -> list[bytes | None]:
    at = batch.schema.get_field_index(PAYLOAD)
    payloads: list[bytes | None] = [None] * batch.num_rows if at < 0 else batch.column(at).to_pylist()
    return payloads


def _plain(column: Any) -> list[Any]:
    values: list[Any] = column.to_pylist()
    return values


def _bytes(column: Any) -> list[Any]:
    return [None if value is None else base64.b64encode(value).decode("ascii") for value in column.to_pylist()]


def _moments(column: Any) -> list[Any]:
    return _plain(column.view(pa.int64()))


def _out(kind: Any) -> Callable[[Any], list[Any]]:
    if pa.types.is_binary(kind):
        return _bytes
    return _moments if pa.types.is_timestamp(kind) else _plain


def number_of(key: bytes) -> int:
    """The number of the row whose record has this key.

    Raises:
        ValueError: It is the key of something else.
    """
    return int(_row(key)[NUMBER])


def _row(key: bytes) -> Mapping[str, Any]:
    row = json.loads(key)
    if not isinstance(row, dict) or not isinstance(row.get(NUMBER), int):
        raise ValueError("is not the key of a row")  # noqa: TRY004 - of what is inside, not of an argument
    return row


def key_at(where: str, offset: int, key: bytes | None) -> Mapping[str, Any]:
    """The row but for its payload, as a record's key has it that was read at an offset of the landing partition.

    Raises:
        JournalDamaged: TL-J05, it is no row.
    """
    try:
        return _row(key or b"")
    except ValueError as error:
        what = f"the record at offset {offset:,} is no row: something else writes here"
        do = "Let nobody else write to this topic. Nothing was changed."
        raise JournalDamaged("TL-J05", where, what, do) from error


def number_at(where: str, offset: int, key: bytes | None) -> int:
    """As `key_at`, its number."""
    return int(key_at(where, offset, key)[NUMBER])


def rows_of(records: Iterable[tuple[bytes, bytes | None]], schema: Any) -> Any:
    """The rows of some records as one record batch of the schema they were made from.

    Raises:
        ValueError: A key is none of ours.
    """
    keys, values = [], []
    for key, value in records:
        keys.append(json.loads(key))
        values.append(value)
    columns = [
        pa.array(values, field.type) if field.name == PAYLOAD else _in([row.get(field.name) for row in keys], field)
        for field in schema
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _in(values: Sequence[Any], field: Any) -> Any:
    if pa.types.is_binary(field.type):
        return pa.array([None if value is None else base64.b64decode(value) for value in values], field.type)
    if pa.types.is_timestamp(field.type):
        return pa.array(values, pa.int64()).cast(field.type)
    return pa.array(values, field.type)
