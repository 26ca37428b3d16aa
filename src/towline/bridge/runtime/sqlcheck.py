"""Check of the SQL expressions of a bridge file by a Spark session.

Each expression is parsed alone, so that an incomplete one is not completed by its surroundings. It may use the
columns of its table only, and an error names the line of its key in the file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from towline.bridge.config.document import Document, FileErrors, KeyPath
from towline.bridge.config.model import Bridge, Downlink, Uplink
from towline.bridge.config.tables import sql_texts
from towline.bridge.messages import SQL_TYPES
from towline.bridge.patterns import Pattern
from towline.schema import SPARK_SCHEMA
from towline.validation import SettingsModel

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: Columns of Spark's Kafka source (`towline.bridge.messages.KAFKA_COLUMNS`).
_KAFKA_SCHEMA: Final = (
    "key binary, value binary, topic string, partition int, offset bigint, timestamp timestamp, "
    "headers array<struct<key: string, value: binary>>"
)
#: Result types of keys whose expression is not text.
_RESULT_TYPES: Final = {**SQL_TYPES, "header_map": "MAP<STRING, STRING>"}
_IDENTIFIER: Final = re.compile(r"\w+")
#: Error class in front of Spark's text, and SQLSTATE and position behind it.
_ERROR_MARKS: Final = re.compile(r"^\[[A-Z0-9_.]+\] |\.? ?SQLSTATE: .*")


def check_sql(bridge: Bridge, spark: SparkSession) -> dict[str, FileErrors]:
    """Return the SQL errors of each line (TL-C74)."""
    from py4j.protocol import Py4JJavaError  # noqa: PLC0415 - loads Spark
    from pyspark.errors import PySparkException  # noqa: PLC0415
    from pyspark.logger import PySparkLogger  # noqa: PLC0415
    from pyspark.sql import functions as F  # noqa: N812, PLC0415 - as Spark's documentation has it

    for kind in ("SQL", "DataFrame"):  # they log whole expressions, with values of environment variables [I12]
        PySparkLogger.getLogger(f"{kind}QueryContextLogger").disabled = True
    document, errors = Document.reread(bridge.file, bridge.file), dict[str, FileErrors]()
    for line, table, expressions in _expressions(bridge):
        frame = spark.createDataFrame([], SPARK_SCHEMA if isinstance(line, Uplink) else _KAFKA_SCHEMA)
        for name in _wildcards(line, table):
            frame = frame.withColumn(name, F.lit(""))
        for path, text in expressions:
            try:
                column = F.expr(text)
                if path[0] == "fields":
                    frame = frame.withColumn(str(path[1]), column)
                else:
                    context = frame.withColumn("fault", F.lit("")) if path[0] == "failure_notice" else frame
                    kind = _RESULT_TYPES.get(str(path[0]), "STRING")
                    context.where(column if path[-1] == "where" else column.cast(kind).isNotNull())
            except (PySparkException, Py4JJavaError) as error:
                # Some errors of the analyzer have no PySpark class; their text may quote a variable's value [I12].
                spark_text = str(error)
                if isinstance(error, Py4JJavaError):
                    spark_text = f"Spark can't analyze it ({error.java_exception.getClass().getSimpleName()})"
                key_path = (*document.table_path(line.kind, line.name), *table, *path)
                hidden = {*_IDENTIFIER.findall(text)} - {*_IDENTIFIER.findall(str(document.value(key_path)))}
                spark_text = _IDENTIFIER.sub(lambda match: "…" if match[0] in hidden else match[0], spark_text)  # noqa: B023
                key = ".".join(map(str, path)).removesuffix(".sql")
                problem = f"{key}: {_ERROR_MARKS.sub('', ' '.join(spark_text.split()))[:300]}"
                errors.setdefault(line.name, FileErrors(document)).add("TL-C74", key_path, problem, "Correct it.")
                if path[0] == "fields":
                    break  # later fields may depend on it
    return errors


def _wildcards(line: Uplink | Downlink, table: KeyPath) -> tuple[str, ...]:
    """Return the names of wildcards that the SQL of a table may use."""
    if not isinstance(line, Uplink):
        return ()
    routes = [line.route[int(table[1])]] if table else line.route
    return tuple(dict.fromkeys(name for route in routes for name in Pattern.parse(route.from_).wildcards))


def _expressions(bridge: Bridge) -> Iterator[tuple[Uplink | Downlink, KeyPath, list[tuple[KeyPath, str]]]]:
    """Yield line, table and SQL expressions of each table, with their keys, fields first.

    Routes with equal expressions over equal columns, such as those of a profile, are yielded once.
    """
    for line in bridge.lines:
        known_expressions: set[str] = set()
        tables: list[tuple[KeyPath, SettingsModel]] = [((), line)]
        if isinstance(line, Uplink):
            tables += ((("route", number), route) for number, route in enumerate(line.route))
        for table, section in tables:
            expressions = sorted(sql_texts(section), key=lambda entry: entry[0][0] != "fields")
            if expressions and (fingerprint := repr((_wildcards(line, table), expressions))) not in known_expressions:
                known_expressions.add(fingerprint)
                yield line, table, expressions
