"""The columns of the sink: from rows as people have them to rows of the outbox."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from towline.errors import ConfigError
from towline.schema import MESSAGE_SCHEMA
from towline.sinks import check_columns, lower_case

__all__ = ["ACCEPTED", "SinkColumns"]

#: Column → its types in Spark's words (``DataType.simpleString``), the first is the one a message offers.
ACCEPTED: Final[Mapping[str, tuple[str, ...]]] = {
    "payload": ("binary", "string"),
    "topic": ("string",),
    "qos": ("tinyint", "smallint", "int", "bigint"),
    "retain": ("boolean",),
    "content_type": ("string",),
    "payload_is_utf8": ("boolean",),
    "response_topic": ("string",),
    "correlation_data": ("binary", "string"),
    "user_properties": ("array<struct<key:string,value:string>>",),
    "message_expiry_seconds": ("bigint", "int", "smallint", "tinyint"),
}
#: Columns of the source that say nothing about a message to be sent; they may stay.
_IGNORED: Final = frozenset({"duplicate", "subscription_ids", "received_at", "gateway", "offset"})
_WHERE: Final = 'format("mqtt")'


@dataclass(frozen=True, slots=True)
class SinkColumns:
    """Which columns there are, and what stands in for those that are not.

    Attributes:
        present: Columns that are sent.
        topic: Of rows without one; None for none.
        qos: Of rows without one.
        retain: Of rows without one.
        levels: QoS that the guarantee allows.
    """

    present: frozenset[str]
    topic: str | None
    qos: int
    retain: bool
    levels: tuple[int, ...]

    @classmethod
    def bind(
        cls, schema: Mapping[str, str], *, topic: str | None, qos: int, retain: bool, levels: tuple[int, ...]
    ) -> SinkColumns:
        """Check a schema against the contract of the sink.

        Args:
            schema: As `column_types` has it.
            topic: The option ``topic``.
            qos: The option ``qos``.
            retain: The option ``retain``.
            levels: QoS that the guarantee allows.

        Raises:
            ConfigError: TL-C48 for a column that is missing, unknown or of another type.
        """
        sent = {name: kind for name, kind in schema.items() if name not in _IGNORED}
        check_columns(_WHERE, "MQTT", sent, ACCEPTED, topic)
        return cls(frozenset(schema) & ACCEPTED.keys(), topic, qos, retain, levels)

    def rows(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Turn rows into rows of `MESSAGE_SCHEMA`.

        Raises:
            ConfigError: TL-C12, a row's QoS contradicts the guarantee.
        """
        named = lower_case(batch)
        rows = pa.RecordBatch.from_arrays(
            [self._column(named, field) for field in MESSAGE_SCHEMA], schema=MESSAGE_SCHEMA
        )
        if "qos" in self.present:
            self._check_levels(rows.column("qos"))
        return rows

    def _column(self, batch: pa.RecordBatch, field: pa.Field) -> Any:
        instead = {"topic": self.topic, "qos": self.qos, "retain": self.retain}.get(field.name)
        if field.name not in self.present:
            return pa.repeat(pa.scalar(instead, field.type), batch.num_rows)
        column = batch.column(field.name)
        if field.name == "qos":
            column = _within_a_byte(column)
        column = column.cast(field.type)
        return column if instead is None else column.fill_null(pa.scalar(instead, field.type))

    def _check_levels(self, column: Any) -> None:
        strange = [level for level in column.unique().to_pylist() if level not in self.levels]
        if strange:
            wanted = " or ".join(map(str, self.levels))
            raise ConfigError(
                "TL-C12",
                f'{_WHERE} column "qos"',
                f"a row has QoS {strange[0]}, the guarantee publishes with {wanted}",
                "Change the row, or the option guarantee. Nothing of this batch was sent beyond what is in the outbox.",
            )


def _within_a_byte(column: Any) -> Any:
    """Numbers that are no QoS, as one number that is none either and fits."""
    fine = pc.or_(pc.is_null(column), pc.is_in(column, pa.array([0, 1, 2], column.type)))
    return pc.if_else(fine, column, pa.scalar(127, column.type))
