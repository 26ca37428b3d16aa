"""Expressions of Spark SQL that lines of both directions are made of: templates, verdicts, what raises.

Plain expressions, no Python in the row path.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from towline.bridge.patterns import literal

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pyspark.sql import Column

    from towline.bridge.patterns import Template

NO_TEXT: Final = "CAST(NULL AS STRING)"
#: The setting of a session without which ``observe`` counts the rows of all attempts of a task: Spark's default, which
#: [spark.conf] must not change.
EACH_ONCE: Final[Mapping[str, str]] = {"spark.sql.legacy.observeMetricsAggregateAllAttempts": "false"}


def template(parsed: Template, field: Callable[[str], str]) -> str:
    """The text of a template as a SQL string, null when a field is.

    Args:
        parsed: The template.
        field: SQL of the text behind a field's name.
    """
    parts = [literal(part) if i % 2 == 0 else field(part) for i, part in enumerate(parsed.parts) if i % 2 or part]
    return "''" if not parts else parts[0] if len(parts) == 1 else f"concat({', '.join(parts)})"


def asked(where: str | None) -> str:
    """Whether a row is wanted, in a struct: that is null only where finding it out raises (see `tried`)."""
    wanted = "true" if where is None else f"CAST((\n{where}\n) AS BOOLEAN)"
    return f"named_struct('wanted', {wanted})"


def refusal(reject: str | None) -> str:
    """Why a row is refused, in a struct: that is null only where finding it out raises (see `tried`)."""
    why = NO_TEXT if reject is None else f"CAST((\n{reject}\n) AS STRING)"
    return f"named_struct('why', {why})"


def tried(column: Column) -> Column:
    """The same, null where it raises: one message that breaks a condition must not stop all that follow.

    Spark has this expression for its ``try_`` functions and no name for it in SQL.
    """
    from pyspark.sql import Column as NewColumn  # noqa: PLC0415 - only the driver has it
    from pyspark.sql import SparkSession  # noqa: PLC0415

    jvm: Any = SparkSession.active()._jvm  # noqa: SLF001 - there is no public way
    packages = jvm.org.apache.spark.sql
    convert = packages.classic.ExpressionUtils
    inner = convert.expression(column._jc)  # noqa: SLF001 - see above
    return NewColumn(convert.column(packages.catalyst.expressions.TryEval(inner)))
