"""The SQL of a bridge file, judged by a Spark session: each expression by itself, over the columns that it may name.

Half a condition must not be completed by what surrounds it, and a mistake is told with the line of its key.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from towline.bridge.config.downlink import Sql
from towline.bridge.config.file import discreet
from towline.bridge.config.mistakes import Mistakes
from towline.bridge.config.model import Bridge, Dedupe, Line, Section
from towline.bridge.config.places import Document, KeyPath
from towline.schema import SPARK_SCHEMA

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["judge", "says_sql"]

#: Columns of Spark's Kafka source (`towline.bridge.downlink.sql.COLUMNS`).
_KAFKA_SCHEMA: Final = (
    "key binary, value binary, topic string, partition int, offset bigint, timestamp timestamp, "
    "headers array<struct<key: string, value: binary>>"
)
#: What values of a downlink are cast to, where they are no text.
_KINDS: Final = {"retain": "BOOLEAN", "expiry": "BIGINT", "correlation_data": "BINARY", "payload": "BINARY"}
#: Spark's name for an error, and what it says of the place in the expression.
_MARKS: Final = re.compile(r"^\[[A-Z0-9_.]+\] |\.? ?SQLSTATE: .*")
_AGAIN: Final = "gives another value each time: a batch that a crash interrupted may come out otherwise"


def judge(bridge: Bridge, spark: SparkSession, shown: Path | None = None) -> tuple[dict[str, Mistakes], list[str]]:
    """Look at every expression of a bridge.

    Args:
        bridge: What the file says.
        spark: A session of the bridge.
        shown: The file as the user wrote it; its whole path by default.

    Returns:
        The mistakes (TL-C74) by line, and warnings.
    """
    from pyspark.errors import PySparkException  # noqa: PLC0415 - towline check does without Spark
    from pyspark.logger import PySparkLogger  # noqa: PLC0415
    from pyspark.sql import functions as F  # noqa: N812, PLC0415 - Spark's own custom

    for kind in ("SQL", "DataFrame"):  # they would log an expression whole, with the values of variables in it [I12]
        PySparkLogger.getLogger(f"{kind}QueryContextLogger").disabled = True
    document, warnings = Document.again(bridge.file, shown or bridge.file), list[str]()
    wrong: dict[str, Mistakes] = {}
    for line in bridge.lines:
        for table, said in _expressions(line, document):
            frame = spark.createDataFrame([], SPARK_SCHEMA if isinstance(line, Line) else _KAFKA_SCHEMA)
            for path, text in said:
                key, name = ".".join(map(str, path[len(table) :])).removesuffix(".sql"), str(path[-1])
                notice = "failure_notice" in path
                before = frame.withColumn("fault", F.lit("")) if notice else frame
                try:
                    found = F.expr(text)
                    if "fields" in path:
                        after = frame = before.withColumn(name, found)
                    else:
                        kind = _KINDS.get(str(path[-2]), "BINARY" if notice else "STRING")
                        after = before.where(found if name == "where" else found.cast(kind).isNotNull())
                    if _gives_the_same(before) and not _gives_the_same(after):
                        warnings.append(f'line "{line.name}": {key} {_AGAIN}.')
                except PySparkException as error:
                    subject = f'{line.kind} "{line.name}"' + (f" route {int(table[3]) + 1}" if table[3:] else "")
                    what = f"{key}: {_MARKS.sub('', ' '.join(str(error).split()))[:300]}"
                    wrong.setdefault(line.name, discreet(document)).add("TL-C74", path, subject, what, "Correct it.")
                    if "fields" in path:
                        break  # what is made of a mistake is not another one
    return wrong, warnings


def _gives_the_same(frame: DataFrame) -> bool:
    """Whether a row gives the same again."""
    plan: Any = frame._jdf.queryExecution().analyzed()  # noqa: SLF001 - there is no public way
    return bool(plan.deterministic())


def says_sql(bridge: Bridge) -> bool:
    """Whether a line of the bridge says something in SQL."""
    return any(True for line in bridge.lines for _ in _expressions(line, Document("", bridge.file)))


def _expressions(line: Any, document: Document) -> Iterator[tuple[KeyPath, list[tuple[KeyPath, str]]]]:
    """The tables of a line that hold SQL, and key path and text of each expression, fields first.

    A line that was reloaded alone stands where the file has it.
    """
    table: KeyPath = (line.kind, document.number(line.kind, line.name) or 0)
    sections = [((*table, "route", number), one) for number, one in enumerate(getattr(line, "sections", ()))]
    for path, section in [(table, getattr(line, "section", line)), *sections]:
        fields = [((*path, "fields", name), text) for name, text in getattr(section, "fields", {}).items()]
        if said := [*fields, *_said(section, path)]:
            yield path, said


def _said(value: object, path: KeyPath) -> Iterator[tuple[KeyPath, str]]:
    """Key path and text of all that a table, or a value, says in SQL."""
    if isinstance(value, Sql):
        yield (*path, "sql"), value.sql
    elif isinstance(value, Dedupe):
        yield from [((*path, "key"), value.key)] if "{" not in value.key else []
    elif isinstance(value, Section | dict):
        for name, one in value.items() if isinstance(value, dict) else value:
            here = (*path, name)
            sql = name in ("where", "reject") and isinstance(value, Section) and one is not None
            yield from [(here, one)] if sql else _said(one, here)
