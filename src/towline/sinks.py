"""Common code of the sinks: the writing task, and column types. Column names are compared without case, as in Spark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from towline.errors import ConfigError

if TYPE_CHECKING:
    from pyarrow import RecordBatch


@dataclass(frozen=True)
class Task:
    """Spark task that writes to a sink.

    Attributes:
        partition: Partition id of the task.
        attempt: Attempt number; 0 for the first.
        batch: Batch id of the stream; None in a batch query.
        query: Streaming query id; None in a batch query.
        run: Run id of the query; None in a batch query, or if unknown.
    """

    partition: int
    attempt: int = 0
    batch: int | None = None
    query: str | None = None
    run: str | None = None


def check_append(location: str, *, overwrite: bool) -> None:
    """Refuse ``mode("overwrite")``.

    Raises:
        ConfigError: TL-C49 for the sink at `location`.
    """
    if overwrite:
        problem = 'mode("overwrite") is not possible, a topic can only be appended to'
        raise ConfigError("TL-C49", location, problem, 'Use mode("append").')


def column_types(fields: Sequence[Any], location: str) -> dict[str, str]:
    """Return the Spark SQL type of each field of a ``StructType``, by lower-case name.

    Raises:
        ConfigError: TL-C48 for the sink at `location`, two columns have the same name.
    """
    types = {field.name.lower(): field.dataType.simpleString() for field in fields}
    if len(types) < len(fields):
        problem = f"two of the columns {', '.join(types)} have one name"
        raise ConfigError("TL-C48", location, problem, "Select one of them.")
    return types


def with_lower_case_names(batch: RecordBatch) -> RecordBatch:
    """Return a record batch with its column names in lower case."""
    names = [name.lower() for name in batch.schema.names]
    return batch if names == batch.schema.names else batch.rename_columns(names)


def check_columns(
    location: str, system: str, types: Mapping[str, str], accepted: Mapping[str, tuple[str, ...]], topic: str | None
) -> None:
    """Check the columns of a DataFrame against those that a sink accepts.

    Args:
        location: Name of the sink in error texts.
        system: Name of the system that the sink writes to.
        types: Column types from `column_types`.
        accepted: Accepted types by column, preferred type first. The first column is required.
        topic: Option ``topic``; without it a column ``topic`` is required.

    Raises:
        ConfigError: TL-C48 for a missing or unknown column, or one of another type.
    """
    for name, column_type in types.items():
        if name not in accepted:
            remedy = f"{system} takes {', '.join(accepted)}; leave others out with select()."
            raise ConfigError("TL-C48", location, f'unknown column "{name}"', remedy)
        if column_type not in accepted[name]:
            problem = f'column "{name}" is {column_type}, {system} takes {" or ".join(accepted[name])}'
            raise ConfigError("TL-C48", location, problem, _conversion_hint(name, column_type, accepted[name]))
    if (body_column := next(iter(accepted))) not in types:
        remedy = f"Select it, binary or string; there are: {', '.join(types) or 'none'}."
        raise ConfigError("TL-C48", location, f'column "{body_column}" is missing', remedy)
    if topic is None and "topic" not in types:
        raise ConfigError("TL-C48", location, "no topic", 'Set option("topic", ...) or select a string column "topic".')


def _conversion_hint(name: str, column_type: str, accepted_types: tuple[str, ...]) -> str:
    if "string" not in accepted_types:
        return f"Select it as {accepted_types[0]}, or leave it out."
    is_nested = column_type.startswith(("struct", "map", "array", "variant"))
    return f"Write it as: {f'to_json({name})' if is_nested else f'CAST({name} AS string)'} AS {name}."
