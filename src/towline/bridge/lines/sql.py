"""Spark SQL of lines, as additional columns of messages or records; no Python in the row path.

A message of an uplink is evaluated only by the SQL of the route that takes it. Spark does not decide on a row: the
columns go with it to the writing task (`towline.bridge.routes`, `towline.bridge.messages`).
"""

from __future__ import annotations

import re
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from towline.bridge.config.tables import Sql
from towline.bridge.messages import (
    KAFKA_COLUMNS,
    NOTICE_PREFIX,
    RENDERED_SCHEMA,
    SQL_TYPES,
    TEXT_PREFIX,
    internal,
    kept_columns,
    message_table,
)
from towline.bridge.patterns import Template, sql_literal
from towline.bridge.routes import DEDUPE, HEADER_MAP, REJECT, ROUTE, WHERE, Route
from towline.schema import EVENT_TIME, ROW_SCHEMA

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from pyspark.sql import DataFrame

    from towline.bridge.config.tables import DownlinkTable, FailureNotice


def _cast_sql(text: str, sql_type: str) -> str:
    """Cast SQL of a user, which may end with a comment."""
    return f"CAST((\n{text}\n) AS {sql_type})"


_NULL_TEXT: Final = "CAST(NULL AS STRING)"


def _verdict_sql(sql: str | None, sql_type: str, default_sql: str) -> str:
    """Wrap ``where`` or ``reject`` in a struct that is null only if the SQL raises (see `_with_columns`)."""
    return f"named_struct('said', {default_sql if sql is None else _cast_sql(sql, sql_type)})"


def _with_columns(frame: DataFrame, columns: Iterable[tuple[str, str]]) -> DataFrame:
    """Add columns with their SQL, null where it raises: one message must not stop all that follow.

    Spark has this expression for its ``try_`` functions and no name for it in SQL.
    """
    from pyspark.sql import Column, SparkSession  # noqa: PLC0415 - only the driver has it
    from pyspark.sql import functions as F  # noqa: N812, PLC0415 - Spark's own custom

    jvm: Any = SparkSession.active()._jvm  # noqa: SLF001 - there is no public way
    packages = jvm.org.apache.spark.sql
    convert = packages.classic.ExpressionUtils
    for name, text in columns:
        expression = convert.expression(F.expr(text)._jc)  # noqa: SLF001 - see above
        frame = frame.withColumn(name, Column(convert.column(packages.catalyst.expressions.TryEval(expression))))
    return frame


# -- of the routes of an uplink ---------------------------------------------------------------------------------------

#: Whether a message is not truncated (`towline.mqtt.truncated`): only such ones are evaluated by conditions and keys.
#: No payload of MQTT is null.
_NOT_TRUNCATED: Final = "payload IS NOT NULL"
#: Columns that identify a repeat: topic, key, and without a key the unique offset. The topic, since a device may write
#: any key: on its own topics, which the broker guards, it can only drop its own messages [I13].
DEDUPE_COLUMNS: Final = ("topic", DEDUPE, "towline_unique")
#: The key of the record, or its MQTT topic: it selects the writer of a message.
_WRITER_COLUMN: Final = "towline_writer"


class RouteSql:
    """SQL of a line's routes.

    Args:
        routes: The routes, in order.
        dedupe_window: Minimum time for which dedupe keys are remembered; None to keep repeats.
        parallelism: Writers of a batch.
    """

    def __init__(self, routes: Sequence[Route], dedupe_window: str | None = None, parallelism: int = 1) -> None:
        self._routes, self._window, self._parallelism = tuple(routes), dedupe_window, parallelism

    @property
    def needs_spark(self) -> bool:
        """Whether the rows have to pass Spark; else the writing task fetches them."""
        return self._window is not None or any(route.sql_texts for route in self._routes)

    @cached_property
    def value_columns(self) -> dict[str, str]:
        """Columns that the source has to add, each with the wildcard or message field that it has as text."""
        texts = " ".join(text for route in self._routes for text in route.sql_texts).lower()
        words = set(re.findall(r"\w+", texts))
        names = dict.fromkeys(name for route in self._routes for name in route.pattern.wildcards)
        columns = {name.lower(): name for name in names if name.lower() in words}
        for template in self._key_templates():
            columns |= {_value_column(name): name for name in template.fields if name not in self._field_names}
        return columns

    @cached_property
    def _field_names(self) -> dict[str, None]:
        """Names of the routes' fields, each after the fields that it may use."""
        return dict.fromkeys(name for route in self._routes for name, _ in route.fields)

    def _key_templates(self) -> list[Template]:
        """Return the templates that Spark itself renders."""
        dedupe = [route.dedupe for route in self._routes if self._window and isinstance(route.dedupe, Template)]
        keys = [route.key for route in self._routes if self._parallelism > 1 and route.key is not None]
        return [*dedupe, *keys]

    def with_sql_columns(self, frame: DataFrame) -> DataFrame:
        """Add the columns of the routes' SQL to rows of the source with `ROUTE` and `value_columns`."""
        return _with_columns(frame, self._column_sql().items())

    def _column_sql(self) -> dict[str, str]:
        columns = {name: self._case_sql(partial(_field_sql, name)) for name in self._field_names}
        if any(route.reject is not None for route in self._routes):
            columns[REJECT] = self._case_sql(lambda route: _verdict_sql(route.reject, "STRING", _NULL_TEXT))
        if any(route.where is not None for route in self._routes):
            columns[WHERE] = self._case_sql(lambda route: _verdict_sql(route.where, "BOOLEAN", "true"))
        if any(route.header_map is not None for route in self._routes):
            columns[HEADER_MAP] = self._case_sql(_header_map_sql)
        if self._window is not None:
            columns[DEDUPE] = self._case_sql(self._dedupe_sql)
        return columns

    def _case_sql(self, sql_of: Callable[[Route], str]) -> str:
        """Return a ``CASE`` on the route of a message."""
        arms: dict[str, list[int]] = {}
        for number, route in enumerate(self._routes):
            arms.setdefault(sql_of(route), []).append(number)
        cases = " ".join(
            f"WHEN {ROUTE} IN ({', '.join(map(str, numbers))}) AND {_NOT_TRUNCATED} THEN {text}"
            for text, numbers in arms.items()
        )
        return f"CASE {cases} END"

    def _dedupe_sql(self, route: Route) -> str:
        if isinstance(route.dedupe, Template):
            return self._template_sql(route.dedupe)
        return _NULL_TEXT if route.dedupe is None else _cast_sql(route.dedupe, "STRING")

    def _template_sql(self, template: Template) -> str:
        """Return a template as SQL, null if a field is."""
        field_names, parts = self._field_names, list[str]()
        for i, part in enumerate(template.parts):
            if i % 2:
                parts.append(f"CAST({part} AS STRING)" if part in field_names else _value_column(part))
            elif part:
                parts.append(sql_literal(part))
        return "''" if not parts else parts[0] if len(parts) == 1 else f"concat({', '.join(parts)})"

    def writer_frame(self, frame: DataFrame) -> DataFrame:
        """Return the rows for the writing tasks: SQL evaluated, repeats dropped, one partition per writer.

        Where repeats are dropped `frame` has `EVENT_TIME` too.
        """
        from pyspark.sql import functions as F  # noqa: N812, PLC0415 - see `_with_columns`

        frame = self.with_sql_columns(frame)
        if self._window is not None:
            frame = frame.withColumn(DEDUPE_COLUMNS[-1], F.expr(f"CASE WHEN {DEDUPE} IS NULL THEN offset END"))
            frame = frame.withWatermark(EVENT_TIME, self._window).dropDuplicatesWithinWatermark(list(DEDUPE_COLUMNS))
        if self._parallelism > 1:
            key = self._case_sql(lambda route: _NULL_TEXT if route.key is None else self._template_sql(route.key))
            frame = frame.withColumn(_WRITER_COLUMN, F.expr(f"coalesce({key}, topic)"))
            frame = frame.repartition(self._parallelism, _WRITER_COLUMN)
        else:
            frame = frame.coalesce(1)
        fields = dict.fromkeys(name for route in self._routes for name in route.rendered_fields)
        verdicts = [name for name in (REJECT, WHERE, DEDUPE, HEADER_MAP) if name in frame.columns]
        return frame.select(*ROW_SCHEMA.names, *verdicts, *(F.col(name).cast("string").alias(name) for name in fields))


def _value_column(name: str) -> str:
    """Return the column of a wildcard or message field that a template names."""
    return f"towline_value_{name.encode().hex()}"


def _field_sql(name: str, route: Route) -> str:
    sql = dict(route.fields).get(name)
    return "NULL" if sql is None else f"(\n{sql}\n)"


def _header_map_sql(route: Route) -> str:
    """Return the SQL of a route's ``header_map`` as entries, without headers that only Towline writes."""
    test = "value IS NOT NULL AND NOT startswith(name, 'mqtt.') AND NOT startswith(name, 'towline.')"
    if route.header_map is None:
        return "NULL"
    return f"map_entries(map_filter({_cast_sql(route.header_map, 'MAP<STRING, STRING>')}, (name, value) -> {test}))"


# -- of a downlink -----------------------------------------------------------------------------------------------------

#: Name of the observed metrics in a query's progress.
ROW_METRICS: Final = "towline"


def apply_downlink_sql(frame: DataFrame, section: DownlinkTable, message_config: str) -> DataFrame:
    """Return records of Spark's Kafka source for the writing tasks; several tasks are split by MQTT topic.

    They are counted in ``rows`` of `ROW_METRICS`, each once, however often its task ran: Spark 4.3 takes of each task
    the last successful attempt (`CollectMetricsExec.collectedMetricsRow`). `message_config` is JSON for
    `towline.bridge.messages.message_table`.
    """
    from pyspark.sql import functions as F  # noqa: N812, PLC0415 - see `_with_columns`

    frame = frame.select(*KAFKA_COLUMNS).observe(ROW_METRICS, F.expr("count(1)").alias("rows"))
    frame = _with_columns(frame, _sql_columns(section))
    notice, parallelism = dict(_notice_columns(section.failure_notice)), section.parallelism
    if parallelism > 1 or notice:
        frame = _with_rendered(frame, message_config, section)
    frame = _with_columns(frame, notice.items())
    fields = [name for name in section.fields if name in frame.columns]
    return (frame.coalesce(1) if parallelism == 1 else frame.repartition(parallelism, internal("topic"))).drop(*fields)


def _sql_columns(section: DownlinkTable) -> Iterator[tuple[str, str]]:
    """Yield columns and their SQL, in order."""
    yield from ((name, f"(\n{text}\n)") for name, text in section.fields.items())
    used = {name for template in section.templates for name in template.fields}
    yield from ((internal(TEXT_PREFIX + name), f"CAST({name} AS STRING)") for name in section.fields if name in used)
    for name, expression in section.expressions().items():
        if isinstance(expression, Sql):
            yield internal(name), _cast_sql(expression.sql, SQL_TYPES.get(name, "STRING"))
    if section.reject is not None:
        yield REJECT, _verdict_sql(section.reject, "STRING", _NULL_TEXT)
    if section.where is not None:
        yield WHERE, _verdict_sql(section.where, "BOOLEAN", "true")


def _notice_columns(notice: FailureNotice | None) -> Iterator[tuple[str, str]]:
    for name, value in notice.expressions().items() if notice else ():
        if isinstance(value, Sql):
            yield (internal(NOTICE_PREFIX + name), _cast_sql(value.sql, "BOOLEAN" if name == "where" else "STRING"))


def _with_rendered(frame: DataFrame, message_config: str, section: DownlinkTable) -> DataFrame:
    """Render the messages in a Python task, beside the fields that the notice's SQL names."""
    from pyspark.sql import functions as F  # noqa: N812, PLC0415 - see `_with_columns`
    from pyspark.sql.pandas.types import from_arrow_schema  # noqa: PLC0415
    from pyspark.sql.types import StructField, StructType  # noqa: PLC0415

    inputs = frame.select(*(name for name in frame.columns if name not in section.fields))
    kept_fields = [StructField(name, inputs.schema[name].dataType) for name in kept_columns(inputs.columns)]
    result_type = StructType([*kept_fields, *from_arrow_schema(RENDERED_SCHEMA).fields])

    def render(rows: pa.Array) -> pa.Array:
        return message_table(message_config).render(pa.RecordBatch.from_struct_array(rows)).to_struct_array()

    functions: Any = F  # arrow_udf is missing in the stubs
    column = functions.arrow_udf(render, result_type)(F.struct(*inputs.columns)).alias("made")
    return frame.select(*section.fields, column).select("made.*", *section.fields)
