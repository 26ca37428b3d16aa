"""Expressions of Spark SQL that lines of both directions are made of: constants, templates, conditions, headers.

Plain expressions, no Python in the row path.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from towline.bridge.config.sqltext import literal

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pyspark.sql import Column, DataFrame, Observation

    from towline.bridge.patterns import Template

__all__ = [
    "EACH_ONCE",
    "HEADER_TYPE",
    "NO_HEADERS",
    "NO_TEXT",
    "DeadLetterTarget",
    "concatenated",
    "condition",
    "header",
    "literal",
    "observed",
    "refusal",
    "template",
    "tried",
]

#: Type of a record's headers.
HEADER_TYPE: Final = "array<struct<key: string, value: binary>>"
NO_HEADERS: Final = f"CAST(array() AS {HEADER_TYPE})"
NO_TEXT: Final = "CAST(NULL AS STRING)"


@dataclass(frozen=True, slots=True)
class DeadLetterTarget:
    """Where rows go that can't be mapped.

    Attributes:
        topic: The dead-letter topic.
        source: Who signs them: the line's sink id, because two bridges with one dead-letter topic may have lines of one
            name.
    """

    topic: str
    source: str


def template(parsed: Template, field: Callable[[str], str]) -> str:
    """The text of a template as a SQL string, null when a field is.

    Args:
        parsed: The template.
        field: SQL of the text behind a field's name.
    """
    parts = [literal(part) if i % 2 == 0 else field(part) for i, part in enumerate(parsed.parts) if i % 2 or part]
    return concatenated(parts) if parts else "''"


def concatenated(parts: list[str]) -> str:
    """Strings or arrays, one after the other."""
    return parts[0] if len(parts) == 1 else f"concat({', '.join(parts)})"


def header(name: str, value: str) -> str:
    """A Kafka header, of a name and a value in SQL."""
    return f"named_struct('key', {name}, 'value', CAST({value} AS BINARY))"


def condition(where: str | None) -> str:
    """The user's condition on lines of its own, so that a comment at its end ends there; false for null."""
    return "true" if where is None else f"coalesce((\n{where}\n), false)"


def refusal(reject: str | None) -> str:
    """Why a row is refused, in a struct: that is null only where finding it out raises (see `tried`)."""
    why = NO_TEXT if reject is None else f"CAST((\n{reject}\n) AS STRING)"
    return f"named_struct('why', {why})"


#: The setting of a session that `observed` needs: Spark's default, which [spark.conf] must not change.
EACH_ONCE: Final[Mapping[str, str]] = {"spark.sql.legacy.observeMetricsAggregateAllAttempts": "false"}


def observed(frame: DataFrame, counter: str | Observation, counts: Mapping[str, str]) -> DataFrame:
    """The same rows, counted on their way: each once, however often its task was run.

    Spark 4.3 takes of each task the last attempt that ended well (`CollectMetricsExec.collectedMetricsRow`,
    `LastAttemptAggregatingAccumulator`); `EACH_ONCE` is the setting. One thing it does not see: a last attempt without
    any row sends no count, and the one before it stands. So no source of ours gives a task fewer rows when it is run
    again (TL-G62).

    Args:
        frame: The rows.
        counter: A name among the query's observed metrics, or an observation of a batch read.
        counts: What is counted: name → SQL aggregate.
    """
    from pyspark.sql import functions as F  # noqa: N812, PLC0415 - Spark's own custom; and only the driver has it

    return frame.observe(counter, *(F.expr(aggregate).alias(name) for name, aggregate in counts.items()))


def tried(column: Column) -> Column:
    """The same, null where it raises: one message that breaks a condition must not stop all that follow.

    Spark has this expression for its ``try_`` functions and no name for it in SQL.
    """
    from pyspark.sql import Column as NewColumn  # noqa: PLC0415 - see `observed`
    from pyspark.sql import SparkSession  # noqa: PLC0415

    jvm: Any = SparkSession.active()._jvm  # noqa: SLF001 - there is no public way
    packages = jvm.org.apache.spark.sql
    convert = packages.classic.ExpressionUtils
    inner = convert.expression(column._jc)  # noqa: SLF001 - see above
    return NewColumn(convert.column(packages.catalyst.expressions.TryEval(inner)))
