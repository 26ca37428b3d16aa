"""What lines say in Spark SQL, as columns beside those of their messages or records; no Python in the row path.

A message of an uplink is asked by the SQL of the route that takes it, and by no other. What a row becomes is not
Spark's to say: the columns go with it to the task that writes (`towline.bridge.routes`, `towline.bridge.messages`).
"""

from __future__ import annotations

import re
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from towline.bridge.config.tables import Sql
from towline.bridge.messages import COLUMNS, KINDS, NOTICE, RENDERED_SCHEMA, TEXT, lasting, message_table, own
from towline.bridge.patterns import Template, literal
from towline.bridge.routes import DEDUPE, HEADER_MAP, REJECT, ROUTE, WHERE, Route
from towline.errors import ConfigError
from towline.schema import EVENT_TIME, ROW_SCHEMA

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pyspark.sql import Column, DataFrame

    from towline.bridge.config.tables import DownlinkSection, FailureNotice


def _cast(text: str, kind: str) -> str:
    """SQL of a user, which may end with a comment."""
    return f"CAST((\n{text}\n) AS {kind})"


_NO_TEXT: Final = "CAST(NULL AS STRING)"


def _verdict(sql: str | None, kind: str, otherwise: str) -> str:
    """What ``where`` or ``reject`` says, in a struct: that is null only where finding it out raises (see `_tried`)."""
    return f"named_struct('said', {otherwise if sql is None else _cast(sql, kind)})"


def _tried(column: Column) -> Column:
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


# -- of the routes of an uplink ---------------------------------------------------------------------------------------

#: Whether a message was taken in whole; nobody who writes a condition or a key is asked about another
#: (`towline.mqtt.stubs`). No payload of MQTT is null.
_WHOLE: Final = "payload IS NOT NULL"
#: What makes two messages the same: topic, key, and for those without a key the offset, which no other has. The topic,
#: because a device may write any key: on its own topics, which the broker guards, it can only drop its own [I13].
REPEATED: Final = ("topic", DEDUPE, "towline_unique")
#: The key of the record, or its MQTT topic: what tells which of several writers has a message.
_WRITER: Final = "towline_writer"


class Statements:
    """The SQL of a line's routes.

    Args:
        routes: The arms, in order.
        within: How long keys are remembered at least, by which repeats are dropped; None to keep them.
        parallelism: Writers of a batch.
    """

    def __init__(self, routes: Sequence[Route], within: str | None = None, parallelism: int = 1) -> None:
        self._routes, self._within, self._parallelism = tuple(routes), within, parallelism

    @property
    def needed(self) -> bool:
        """Whether the rows have to pass Spark; else the task that writes can fetch them."""
        return self._within is not None or any(route.sql for route in self._routes)

    @cached_property
    def values(self) -> dict[str, str]:
        """Columns that the source has to add, and the wildcard or field of a message that each has as text."""
        texts = " ".join(text for route in self._routes for text in route.sql).lower()
        words = set(re.findall(r"\w+", texts))
        names = dict.fromkeys(name for route in self._routes for name in route.pattern.names)
        columns = {name.lower(): name for name in names if name.lower() in words}
        for one in self._keys():
            columns |= {_column(name): name for name in one.fields if name not in self._own}
        return columns

    @cached_property
    def _own(self) -> dict[str, None]:
        """The fields that routes give to messages, in an order in which each finds those before it."""
        return dict.fromkeys(name for route in self._routes for name, _ in route.fields)

    def _keys(self) -> list[Template]:
        """The templates that Spark itself has to render."""
        dedupe = [route.dedupe for route in self._routes if self._within and isinstance(route.dedupe, Template)]
        keys = [route.key for route in self._routes if self._parallelism > 1 and route.key is not None]
        return [*dedupe, *keys]

    def evaluated(self, frame: DataFrame, *, tolerant: bool) -> DataFrame:
        """Rows of the source, with `ROUTE` and `values`, and what the routes' SQL says of them.

        `tolerant` has a message on which SQL raises an error be null there; else it ends the batch.
        """
        from pyspark.sql import functions as F  # noqa: N812, PLC0415 - Spark's own custom; and only the driver has it

        for name, text in self._columns().items():
            column = F.expr(text)
            frame = frame.withColumn(name, _tried(column) if tolerant else column)
        return frame

    def _columns(self) -> dict[str, str]:
        columns = {name: self._switch(partial(_field, name)) for name in self._own}
        if any(route.reject is not None for route in self._routes):
            columns[REJECT] = self._switch(lambda route: _verdict(route.reject, "STRING", _NO_TEXT))
        if any(route.where is not None for route in self._routes):
            columns[WHERE] = self._switch(lambda route: _verdict(route.where, "BOOLEAN", "true"))
        if any(route.header_map is not None for route in self._routes):
            columns[HEADER_MAP] = self._switch(_headers)
        if self._within is not None:
            columns[DEDUPE] = self._switch(self._dedupe)
        return columns

    def _switch(self, arm: Callable[[Route], str]) -> str:
        """``CASE`` on the route of a message."""
        arms: dict[str, list[int]] = {}
        for number, route in enumerate(self._routes):
            arms.setdefault(arm(route), []).append(number)
        cases = " ".join(
            f"WHEN {ROUTE} IN ({', '.join(map(str, numbers))}) AND {_WHOLE} THEN {text}"
            for text, numbers in arms.items()
        )
        return f"CASE {cases} END"

    def _dedupe(self, route: Route) -> str:
        if isinstance(route.dedupe, Template):
            return self._text(route.dedupe)
        return _NO_TEXT if route.dedupe is None else _cast(route.dedupe, "STRING")

    def _text(self, said: Template) -> str:
        """The text of a template as SQL, null when a field is."""
        own, parts = self._own, list[str]()
        for i, part in enumerate(said.parts):
            if i % 2:
                parts.append(f"CAST({part} AS STRING)" if part in own else _column(part))
            elif part:
                parts.append(literal(part))
        return "''" if not parts else parts[0] if len(parts) == 1 else f"concat({', '.join(parts)})"

    def applied(self, frame: DataFrame, *, tolerant: bool) -> DataFrame:
        """The rows as the task that writes takes them: evaluated, repeats dropped, in as many parts as writers.

        Where repeats are dropped `frame` has `EVENT_TIME` too.
        """
        from pyspark.sql import functions as F  # noqa: N812, PLC0415 - see `evaluated`

        frame = self.evaluated(frame, tolerant=tolerant)
        if self._within is not None:
            frame = frame.withColumn(REPEATED[-1], F.expr(f"CASE WHEN {DEDUPE} IS NULL THEN offset END"))
            frame = frame.withWatermark(EVENT_TIME, self._within).dropDuplicatesWithinWatermark(list(REPEATED))
        if self._parallelism > 1:
            key = self._switch(lambda route: _NO_TEXT if route.key is None else self._text(route.key))
            frame = frame.withColumn(_WRITER, F.expr(f"coalesce({key}, topic)"))
            frame = frame.repartition(self._parallelism, _WRITER)
        else:
            frame = frame.coalesce(1)
        made = dict.fromkeys(name for route in self._routes for name in route.rendered_fields)
        verdicts = [name for name in (REJECT, WHERE, DEDUPE, HEADER_MAP) if name in frame.columns]
        return frame.select(*ROW_SCHEMA.names, *verdicts, *(F.col(name).cast("string").alias(name) for name in made))


def _column(name: str) -> str:
    """The column of a wildcard or field of a message that a template names."""
    return f"towline_value_{name.encode().hex()}"


def _field(name: str, route: Route) -> str:
    sql = dict(route.fields).get(name)
    return "NULL" if sql is None else f"(\n{sql}\n)"


def _headers(route: Route) -> str:
    """Further headers, as entries; a header of Towline's own is none that SQL may write."""
    chosen = "value IS NOT NULL AND NOT startswith(name, 'mqtt.') AND NOT startswith(name, 'towline.')"
    if route.header_map is None:
        return "NULL"
    return f"map_entries(map_filter({_cast(route.header_map, 'MAP<STRING, STRING>')}, (name, value) -> {chosen}))"


# -- of a downlink -----------------------------------------------------------------------------------------------------

#: Name of the observed metrics in a query's progress.
COUNTER: Final = "towline"


def apply(
    frame: DataFrame,
    section: DownlinkSection,
    messages: str,
    transform: Callable[[DataFrame], DataFrame] | None = None,
    *,
    parallelism: int = 1,
) -> DataFrame:
    """Records of Spark's Kafka source as the task that writes takes them.

    They are counted in ``rows`` of `COUNTER`, each once, however often its task was run: Spark 4.3 takes of each task
    the last attempt that ended well (`CollectMetricsExec.collectedMetricsRow`).

    Args:
        frame: Records, with headers.
        section: What the line says.
        messages: The same as `towline.bridge.messages.message_table` takes it.
        transform: Of the user, before everything else; it keeps the columns, or raises ConfigError TL-C76.
        parallelism: Parts of the result; more than one are split by MQTT topic.
    """
    from pyspark.sql import functions as F  # noqa: N812, PLC0415 - Spark's own custom; and only the driver has it

    frame = frame.select(*COLUMNS).observe(COUNTER, F.expr("count(1)").alias("rows"))
    if transform is not None:
        frame = _transformed(frame, transform, section)
    for name, text in _columns(section):
        frame = frame.withColumn(name, _tried(F.expr(text)))
    notice = dict(_notice_columns(section.failure_notice))
    if parallelism > 1 or notice:
        frame = _rendered(frame, messages, section)
    for name, text in notice.items():
        frame = frame.withColumn(name, _tried(F.expr(text)))
    typed = [name for name in section.fields if name in frame.columns]
    return (frame.coalesce(1) if parallelism == 1 else frame.repartition(parallelism, own("topic"))).drop(*typed)


def _columns(section: DownlinkSection) -> Iterator[tuple[str, str]]:
    """Columns and their SQL, in order."""
    yield from ((name, f"(\n{text}\n)") for name, text in section.fields.items())
    named = {name for template in section.templates for name in template.fields}
    yield from ((own(TEXT + name), f"CAST({name} AS STRING)") for name in section.fields if name in named)
    for name, said in section.spoken().items():
        if isinstance(said, Sql):
            yield own(name), _cast(said.sql, KINDS.get(name, "STRING"))
    if section.reject is not None:
        yield REJECT, _verdict(section.reject, "STRING", _NO_TEXT)
    if section.where is not None:
        yield WHERE, _verdict(section.where, "BOOLEAN", "true")


def _notice_columns(notice: FailureNotice | None) -> Iterator[tuple[str, str]]:
    for name, value in notice.spoken().items() if notice else ():
        if isinstance(value, Sql):
            yield own(NOTICE + name), _cast(value.sql, "BOOLEAN" if name == "where" else "STRING")


def _rendered(frame: DataFrame, messages: str, section: DownlinkSection) -> DataFrame:
    """What becomes of the records, in a task of Python's; the fields as the notice's SQL names them stay beside it."""
    from pyspark.sql import functions as F  # noqa: N812, PLC0415 - see `apply`
    from pyspark.sql.pandas.types import from_arrow_schema  # noqa: PLC0415
    from pyspark.sql.types import StructField, StructType  # noqa: PLC0415

    given = frame.select(*(name for name in frame.columns if name not in section.fields))
    kept = [StructField(name, given.schema[name].dataType) for name in lasting(given.columns)]
    kind = StructType([*kept, *from_arrow_schema(RENDERED_SCHEMA).fields])

    def made(rows: pa.Array) -> pa.Array:
        return message_table(messages).rendered(pa.RecordBatch.from_struct_array(rows)).to_struct_array()

    functions: Any = F  # arrow_udf is not in their list of names
    column = functions.arrow_udf(made, kind)(F.struct(*given.columns)).alias("made")
    return frame.select(*section.fields, column).select("made.*", *section.fields)


def _transformed(frame: DataFrame, transform: Callable[[DataFrame], DataFrame], section: DownlinkSection) -> DataFrame:
    transformed = transform(frame)
    before, after = dict(frame.dtypes), dict(getattr(transformed, "dtypes", ()))
    wrong = [name for name in COLUMNS if after.get(name) != before[name]]
    if wrong:
        what = f'transform "{section.transform}" does not keep the column {wrong[0]} ({before[wrong[0]]})'
        raise ConfigError("TL-C76", f'line "{section.name}"', what, "Return a DataFrame with the columns it was given.")
    return transformed.select(*COLUMNS)
