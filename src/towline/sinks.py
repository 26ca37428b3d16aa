"""Common code of the sinks: the writing task, column types, and SQL that converts a column of another type.

Column names are compared without case, as in Spark. The SQL follows Spark 4's casts with ANSI on, its default: only
text has a CAST to binary.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from towline.errors import ConfigError

if TYPE_CHECKING:
    from pyarrow import RecordBatch

#: What has a CAST to numbers, booleans and timestamps.
_SCALAR_TYPES: Final = ("tinyint", "smallint", "int", "bigint", "float", "double", "decimal", "string", "void")
_NESTED_TYPES: Final = ("struct", "map", "array", "variant")


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
    target, expression = accepted_types[0], ""
    if "string" in accepted_types:
        expression = f"to_json({name})" if column_type.startswith(_NESTED_TYPES) else f"CAST({name} AS string)"
    elif target.startswith("array"):
        expression = _property_expression(name, column_type, target)
    elif column_type.partition("(")[0] in (
        *_SCALAR_TYPES,
        *(("date", "timestamp_ntz") if target == "timestamp" else ("boolean",)),
    ):
        expression = f"CAST({name} AS {target})"
    return f"Write it as: {expression} AS {name}." if expression else f"Select it as {target}, or leave it out."


def _property_expression(name: str, column_type: str, target_type: str) -> str:
    """Return SQL that converts a map, or structs of two fields, to the property type; "" if it can't."""
    if not re.match(r"map<|void|array<struct<[^:]*:[^:]*:[^:]*$", column_type):
        return ""
    is_map, value_type = column_type.startswith("map<"), "binary" if "binary" in target_type else "string"
    type_template = "map<string,{}>" if is_map else "array<struct<key:string,value:{}>>"
    casts_directly = column_type.endswith((",string>", ",binary>") if is_map else (":string>>", ":binary>>"))
    expression = name
    for step_type in (value_type,) if casts_directly else dict.fromkeys(("string", value_type)):
        expression = f"CAST({expression} AS {type_template.format(step_type)})"
    return f"map_entries({expression})" if is_map else expression
