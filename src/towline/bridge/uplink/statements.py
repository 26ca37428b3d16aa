"""What the routes of a line say in Spark SQL, as columns beside those of their messages.

A message is asked by the SQL of the route that takes it, and by no other. What it becomes is not Spark's to say: the
columns go with the rows to the task that writes (`towline.bridge.routes`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from towline.bridge.lines.query import NO_TEXT, asked, refusal, template, tried
from towline.bridge.patterns import Template
from towline.bridge.routes import DEDUPE, HEADER_MAP, REJECT, ROUTE, WHERE, Route
from towline.schema import EVENT_TIME, ROW_SCHEMA

if TYPE_CHECKING:
    from pyarrow import RecordBatch
    from pyspark.sql import DataFrame

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
        self._routes = tuple(routes)
        self._within = within
        self._parallelism = parallelism

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
        """Rows of the source with what the routes' SQL says of them.

        Args:
            frame: Columns of the ``mqtt`` source, `ROUTE` and `values`.
            tolerant: Whether a message on which SQL raises an error is null there; else it ends the batch.
        """
        from pyspark.sql import functions as F  # noqa: N812, PLC0415 - Spark's own custom; and only the driver has it

        for name, text in self._columns().items():
            column = F.expr(text)
            frame = frame.withColumn(name, tried(column) if tolerant else column)
        return frame

    def _columns(self) -> dict[str, str]:
        columns = {name: self._switch(partial(_field, name)) for name in self._own}
        if any(route.reject is not None for route in self._routes):
            columns[REJECT] = self._switch(lambda route: refusal(route.reject))
        if any(route.where is not None for route in self._routes):
            columns[WHERE] = self._switch(lambda route: asked(route.where))
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
        return NO_TEXT if route.dedupe is None else f"CAST((\n{route.dedupe}\n) AS STRING)"

    def _text(self, said: Template) -> str:
        """The text of a template as SQL, null when a field is."""
        return template(said, lambda name: f"CAST({name} AS STRING)" if name in self._own else _column(name))

    def applied(self, frame: DataFrame, *, tolerant: bool) -> DataFrame:
        """The rows as the task that writes takes them: evaluated, repeats dropped, in as many parts as writers.

        Args:
            frame: As for `evaluated`, and `EVENT_TIME` where repeats are dropped.
            tolerant: As for `evaluated`.
        """
        from pyspark.sql import functions as F  # noqa: N812, PLC0415 - see `evaluated`

        frame = self.evaluated(frame, tolerant=tolerant)
        if self._within is not None:
            frame = frame.withColumn(REPEATED[-1], F.expr(f"CASE WHEN {DEDUPE} IS NULL THEN offset END"))
            frame = frame.withWatermark(EVENT_TIME, self._within).dropDuplicatesWithinWatermark(list(REPEATED))
        if self._parallelism > 1:
            key = self._switch(lambda route: NO_TEXT if route.key is None else self._text(route.key))
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
    made = f"map_filter(CAST((\n{route.header_map}\n) AS MAP<STRING, STRING>), (name, value) -> {chosen})"
    return "NULL" if route.header_map is None else f"map_entries({made})"


def of_schema(batch: RecordBatch) -> RecordBatch:
    """A batch of Spark's with the types of `ROW_SCHEMA`: its session may name the time zone otherwise."""
    fields = [ROW_SCHEMA.field(one.name) if one.name in ROW_SCHEMA.names else one for one in batch.schema]
    schema = pa.schema(fields)
    return batch if batch.schema == schema else batch.cast(schema)
