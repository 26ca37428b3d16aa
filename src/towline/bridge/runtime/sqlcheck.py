"""The SQL of a bridge file, judged by a Spark session: each expression by itself, over the columns that it may name.

Half a condition must not be completed by what surrounds it, and a mistake is told with the line of its key.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from towline.bridge.config.document import Document, KeyPath, Mistakes
from towline.bridge.config.model import Bridge, DownLine, Line
from towline.bridge.config.tables import said_in_sql
from towline.bridge.messages import KINDS
from towline.bridge.patterns import Pattern
from towline.bridge.profiles import graft
from towline.schema import SPARK_SCHEMA
from towline.validation import SettingsModel

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["judge", "says_sql"]

#: Columns of Spark's Kafka source (`towline.bridge.messages.COLUMNS`).
_KAFKA_SCHEMA: Final = (
    "key binary, value binary, topic string, partition int, offset bigint, timestamp timestamp, "
    "headers array<struct<key: string, value: binary>>"
)
#: What values are cast to, where they are no text.
_KINDS: Final = {**KINDS, "header_map": "MAP<STRING, STRING>"}
_WORD: Final = re.compile(r"\w+")
#: Spark's name for an error, and what it says of the place in the expression.
_MARKS: Final = re.compile(r"^\[[A-Z0-9_.]+\] |\.? ?SQLSTATE: .*")


def judge(bridge: Bridge, spark: SparkSession, shown: Path | None = None) -> dict[str, Mistakes]:
    """The mistakes in every expression of a bridge (TL-C74), by line.

    Args:
        bridge: What the file says.
        spark: A session of the bridge.
        shown: The file as the user wrote it; its whole path by default.
    """
    from py4j.protocol import Py4JJavaError  # noqa: PLC0415 - towline check does without Spark
    from pyspark.errors import PySparkException  # noqa: PLC0415
    from pyspark.logger import PySparkLogger  # noqa: PLC0415
    from pyspark.sql import functions as F  # noqa: N812, PLC0415 - Spark's own custom

    for kind in ("SQL", "DataFrame"):  # they would log an expression whole, with the values of variables in it [I12]
        PySparkLogger.getLogger(f"{kind}QueryContextLogger").disabled = True
    document, wrong = Document.again(bridge.file, shown or bridge.file), dict[str, Mistakes]()
    graft(document, bridge.file.parent)
    for line, table, said in _expressions(bridge):
        frame = spark.createDataFrame([], SPARK_SCHEMA if isinstance(line, Line) else _KAFKA_SCHEMA)
        for name in _wildcards(line, table):
            frame = frame.withColumn(name, F.lit(""))
        for path, text in said:
            try:
                found = F.expr(text)
                if path[0] == "fields":
                    frame = frame.withColumn(str(path[1]), found)
                else:
                    before = frame.withColumn("fault", F.lit("")) if path[0] == "failure_notice" else frame
                    kind = _KINDS.get(str(path[0]), "STRING")
                    before.where(found if path[-1] == "where" else found.cast(kind).isNotNull())
            except (PySparkException, Py4JJavaError) as error:
                # PySpark has no class for some errors of the analyzer; their text may quote a variable's value [I12].
                java = error.java_exception.getClass().getSimpleName() if isinstance(error, Py4JJavaError) else None
                said_by_spark = str(error) if java is None else f"Spark has no answer to it ({java})"
                place = (*document.table(line.kind, line.name), *table, *path)
                own = {*_WORD.findall(text)} - {*_WORD.findall(str(document.value(place)))}  # of variables [I12]
                said_by_spark = _WORD.sub(lambda word: "…" if word[0] in own else word[0], said_by_spark)  # noqa: B023
                key = ".".join(map(str, path)).removesuffix(".sql")
                what = f"{key}: {_MARKS.sub('', ' '.join(said_by_spark.split()))[:300]}"
                wrong.setdefault(line.name, Mistakes(document)).add("TL-C74", place, what, "Correct it.")
                if path[0] == "fields":
                    break  # what is made of a mistake is not another one
    return wrong


def _wildcards(line: Line | DownLine, table: KeyPath) -> tuple[str, ...]:
    """Those that the SQL of a table may name."""
    if not isinstance(line, Line):
        return ()
    routes = [line.route[int(table[1])]] if table else line.route
    return tuple(dict.fromkeys(name for one in routes for name in Pattern.parse(one.from_).names))


def says_sql(bridge: Bridge) -> bool:
    """Whether a line of the bridge says something in SQL."""
    return any(True for _ in _expressions(bridge))


def _expressions(bridge: Bridge) -> Iterator[tuple[Line | DownLine, KeyPath, list[tuple[KeyPath, str]]]]:
    """Of each table of a line its place in that, and what it says in SQL with its keys, fields first.

    Routes that say the same of the same columns, as those of a profile do, are one.
    """
    for line in bridge.lines:
        expressions: set[str] = set()
        tables: list[tuple[KeyPath, SettingsModel]] = [((), line)]
        if isinstance(line, Line):
            tables += ((("route", number), one) for number, one in enumerate(line.route))
        for table, section in tables:
            said = sorted(said_in_sql(section), key=lambda one: one[0][0] != "fields")
            if said and (words := repr((_wildcards(line, table), said))) not in expressions:
                expressions.add(words)
                yield line, table, said
