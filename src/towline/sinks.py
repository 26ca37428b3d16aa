"""What the sinks share: the task that writes, and its columns; for one that does not fit, the SQL that makes it fit.

Names of columns are compared without case, as Spark compares them. The SQL goes by what Spark 4 casts with ANSI on, its
default: only text has a CAST to binary.
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
_SCALARS: Final = ("tinyint", "smallint", "int", "bigint", "float", "double", "decimal", "string", "void")
_NESTED: Final = ("struct", "map", "array", "variant")


@dataclass(frozen=True)
class Task:
    """Who writes.

    Attributes:
        attempt: 0 for the first attempt of a task.
        batch: Batch id of the stream; None in a batch query.
        query: Streaming query id; None in a batch query.
        run: Id of this run of the query; None in a batch query, or if unknown.
    """

    partition: int
    attempt: int = 0
    batch: int | None = None
    query: str | None = None
    run: str | None = None


def check_append(where: str, *, overwrite: bool) -> None:
    """Refuse ``mode("overwrite")``.

    Raises:
        ConfigError: TL-C49, in the sink `where`.
    """
    if overwrite:
        what = 'mode("overwrite") is not possible, a topic can only be appended to'
        raise ConfigError("TL-C49", where, what, 'Use mode("append").')


def column_types(fields: Sequence[Any], where: str) -> dict[str, str]:
    """Types of a ``StructType``'s fields in Spark's words, by name in lower case.

    Raises:
        ConfigError: TL-C48, two columns of one name in the sink `where`.
    """
    types = {field.name.lower(): field.dataType.simpleString() for field in fields}
    if len(types) < len(fields):
        raise ConfigError(
            "TL-C48", where, f"two of the columns {', '.join(types)} have one name", "Select one of them."
        )
    return types


def lower_case(batch: RecordBatch) -> RecordBatch:
    """A batch with the names of `column_types`."""
    names = [name.lower() for name in batch.schema.names]
    return batch if names == batch.schema.names else batch.rename_columns(names)


def check_columns(
    where: str, system: str, types: Mapping[str, str], accepted: Mapping[str, tuple[str, ...]], topic: str | None
) -> None:
    """Hold columns against those that a sink takes.

    Args:
        where: The sink, as an error names it.
        system: Where its rows go.
        types: As `column_types` has them.
        accepted: Column -> its types, the first is the one a message offers. The first column has to be there.
        topic: The option ``topic``; without it ``topic`` has to be there too.

    Raises:
        ConfigError: TL-C48 for a column that is missing, unknown or of another type.
    """
    for name, kind in types.items():
        if name not in accepted:
            do = f"{system} takes {', '.join(accepted)}; leave others out with select()."
            raise ConfigError("TL-C48", where, f'unknown column "{name}"', do)
        if kind not in accepted[name]:
            what = f'column "{name}" is {kind}, {system} takes {" or ".join(accepted[name])}'
            raise ConfigError("TL-C48", where, what, _advice(name, kind, accepted[name]))
    if (body := next(iter(accepted))) not in types:
        do = f"Select it, binary or string; there are: {', '.join(types) or 'none'}."
        raise ConfigError("TL-C48", where, f'column "{body}" is missing', do)
    if topic is None and "topic" not in types:
        raise ConfigError("TL-C48", where, "no topic", 'Set option("topic", ...) or select a string column "topic".')


def _advice(name: str, kind: str, wanted: tuple[str, ...]) -> str:
    target, made = wanted[0], ""
    if "string" in wanted:
        made = f"to_json({name})" if kind.startswith(_NESTED) else f"CAST({name} AS string)"
    elif target.startswith("array"):
        made = _pairs(name, kind, target)
    elif kind.partition("(")[0] in (*_SCALARS, *(("date", "timestamp_ntz") if target == "timestamp" else ("boolean",))):
        made = f"CAST({name} AS {target})"
    return f"Write it as: {made} AS {name}." if made else f"Select it as {target}, or leave it out."


def _pairs(name: str, kind: str, wanted: str) -> str:
    """Names and values from a map, or from structs of two fields; what is no text becomes text first."""
    if not re.match(r"map<|void|array<struct<[^:]*:[^:]*:[^:]*$", kind):
        return ""
    of_map, value = kind.startswith("map<"), "binary" if "binary" in wanted else "string"
    shape = "map<string,{}>" if of_map else "array<struct<key:string,value:{}>>"
    direct = kind.endswith((",string>", ",binary>") if of_map else (":string>>", ":binary>>"))
    made = name
    for step in (value,) if direct else dict.fromkeys(("string", value)):
        made = f"CAST({made} AS {shape.format(step)})"
    return f"map_entries({made})" if of_map else made
