"""What a downlink says in Spark SQL, as columns beside those of its records.

What a record becomes is not Spark's to say: the columns go with it to the task that writes (`towline.bridge.messages`).
It is rendered before that, in a task of its own, only where Spark has to know what became of it: where several writers
have a part of the MQTT topics each, and where a failure notice says in SQL why a record was refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from towline.bridge.config.tables import DownlinkSection, FailureNotice, Sql
from towline.bridge.lines.sql import asked, refusal, tried
from towline.bridge.messages import COLUMNS, KINDS, NOTICE, RENDERED_SCHEMA, TEXT, lasting, message_table, own
from towline.bridge.routes import REJECT, WHERE
from towline.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pyspark.sql import DataFrame

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
        transform: Of the user, before everything else.
        parallelism: Parts of the result; more than one are split by MQTT topic.

    Raises:
        ConfigError: TL-C76 when the transform does not keep the columns.
    """
    from pyspark.sql import functions as F  # noqa: N812, PLC0415 - Spark's own custom; and only the driver has it

    frame = frame.select(*COLUMNS).observe(COUNTER, F.expr("count(1)").alias("rows"))
    if transform is not None:
        frame = _transformed(frame, transform, section)
    for name, text in _columns(section):
        frame = frame.withColumn(name, tried(F.expr(text)))
    notice = dict(_notice_columns(section.failure_notice))
    if parallelism > 1 or notice:
        frame = _rendered(frame, messages, section)
    for name, text in notice.items():
        frame = frame.withColumn(name, tried(F.expr(text)))
    typed = [name for name in section.fields if name in frame.columns]
    return (frame.coalesce(1) if parallelism == 1 else frame.repartition(parallelism, own("topic"))).drop(*typed)


def _columns(section: DownlinkSection) -> Iterator[tuple[str, str]]:
    """Columns and their SQL, in order."""
    yield from ((name, f"(\n{text}\n)") for name, text in section.fields.items())
    named = {name for template in section.templates for name in template.fields}
    yield from ((own(TEXT + name), f"CAST({name} AS STRING)") for name in section.fields if name in named)
    for name, said in section.spoken().items():
        if isinstance(said, Sql):
            yield own(name), f"CAST((\n{said.sql}\n) AS {KINDS.get(name, 'STRING')})"
    if section.reject is not None:
        yield REJECT, refusal(section.reject)
    if section.where is not None:
        yield WHERE, asked(section.where)


def _notice_columns(notice: FailureNotice | None) -> Iterator[tuple[str, str]]:
    for name, value in notice.spoken().items() if notice else ():
        if isinstance(value, Sql):
            yield own(NOTICE + name), f"CAST((\n{value.sql}\n) AS STRING)"
    if notice and notice.where is not None:
        yield own(NOTICE + "where"), f"CAST((\n{notice.where}\n) AS BOOLEAN)"


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
