"""``format("mqtt")`` under a real Spark, reading a real gateway service on a real journal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import AnalysisException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

import towline
from tests.helpers import wait_until
from tests.integration.spark.collecting import Collected
from tests.unit.gateway.serving import Served, rows
from towline.schema import ROW_SCHEMA

#: Seconds for what takes Spark two on a quiet machine: tests of other rooms may run beside.
LONG = 150

Start = Callable[..., StreamingQuery]


def load(spark: SparkSession, server: Served, **options: object) -> DataFrame:
    """Read a stream that knows its checkpoint, the one that `start` gives a query unless told otherwise."""
    return (
        spark.readStream.format("mqtt")
        .option("gateway", str(server.state_dir))
        .option("checkpointLocation", str(server.state_dir.parent / "ck"))
        .options(**{key: str(value) for key, value in options.items()})
        .load()
    )


@pytest.fixture
def start(spark: SparkSession, tmp_path: Path) -> Iterator[Start]:
    """Starts a query into a function; it is stopped after the test."""
    queries: list[StreamingQuery] = []

    def run(frame: DataFrame, sink: Callable[[DataFrame, int], None], checkpoint: str = "ck", **trigger: Any) -> Any:
        writer = frame.writeStream.foreachBatch(sink).option("checkpointLocation", str(tmp_path / checkpoint))
        queries.append(begun(writer.trigger(**trigger) if trigger else writer))
        return queries[-1]

    yield run
    for query in queries:
        query.stop()


def begun(writer: DataStreamWriter) -> StreamingQuery:
    """Start a query. Spark gives a new Python process ten seconds, a constant: a busy machine may need more tries."""
    for _ in range(5):
        query = writer.start()
        wait_until(partial(initialized, query), LONG)
        if "failed to connect back" not in str(query.exception()):
            break
    return query


def initialized(query: StreamingQuery) -> bool:
    return not query.isActive or not str(query.status["message"]).startswith("Initializing")


def committed(server: Served, end: int) -> bool:
    return server.journal.consumers.get("default") == end


def until(query: StreamingQuery, condition: Callable[[], object]) -> None:
    """Wait for a condition while the query lives."""
    wait_until(lambda: condition() or not query.isActive, LONG)
    assert query.isActive, query.exception()


def finished(query: StreamingQuery) -> None:
    assert query.awaitTermination(LONG)


def failure(query: StreamingQuery) -> str:
    """Why a query ended."""
    with pytest.raises(StreamingQueryException) as caught:
        query.awaitTermination(LONG)
    return str(caught.value)


def as_bytes(table: pa.Table) -> bytes:
    """A table's rows as bytes, whatever the sizes of its chunks."""
    sink = pa.BufferOutputStream()
    whole = table.combine_chunks()
    with pa.ipc.new_stream(sink, whole.schema) as writer:
        writer.write_table(whole)
    return bytes(sink.getvalue().to_pybytes())


# -- rows ------------------------------------------------------------------------------------------------------------


def test_every_row_arrives_as_it_was_journaled(spark: SparkSession, server: Served, start: Start) -> None:
    server.add(700)
    server.add(300)
    sink = Collected()
    frame = load(spark, server, maxMessagesPerTrigger=400)
    assert to_arrow_schema(frame.schema, timezone="UTC").equals(ROW_SCHEMA)
    finished(start(frame, sink, availableNow=True))
    assert sink.sizes == [400, 400, 200]
    assert server.journal.consumers["default"] == 1000, "the last batch is committed too"
    got = pa.concat_tables(sink.tables.values()).cast(ROW_SCHEMA)
    assert got.to_pylist() == rows(0, 1000).to_pylist()


def test_reading_twice_gives_the_same(spark: SparkSession, server: Served, start: Start) -> None:
    """Two actions in foreachBatch, and a union of a frame with itself, read every range twice [I4]."""
    server.add(50)
    seen: list[tuple[int, int]] = []

    def sink(frame: DataFrame, _batch: int) -> None:
        seen.append((frame.count(), frame.select("offset").distinct().count()))

    frame = load(spark, server)
    finished(start(frame.union(frame), sink, availableNow=True))
    assert (100, 50) in seen


def test_a_batch_read_takes_a_range(spark: SparkSession, server: Served) -> None:
    server.add(50)
    frame = (
        spark.read.format("mqtt")
        .option("gateway", server.location)
        .option("startingOffset", 10)
        .option("endingOffset", 20)
        .load()
    )
    assert frame.orderBy("offset").toArrow().cast(ROW_SCHEMA).to_pylist() == rows(10, 10).to_pylist()
    assert dict(server.journal.consumers) == {}


# -- the watermark ---------------------------------------------------------------------------------------------------


def test_nothing_is_committed_before_the_batch_is(spark: SparkSession, server: Served, start: Start) -> None:
    server.add(10)
    seen: list[int] = []

    def sink(_frame: DataFrame, _batch: int) -> None:
        seen.append(server.journal.consumers["default"])

    query = start(load(spark, server, maxMessagesPerTrigger=5), sink)
    until(query, partial(committed, server, 10))
    assert seen == [0, 5]


# -- restart ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("guarantee", "first_again"), [("at_least_once", 100), ("at_most_once", 200)])
def test_a_restart_serves_exactly_the_interrupted_batch_or_nothing_of_it(
    spark: SparkSession, server: Served, start: Start, guarantee: str, first_again: int
) -> None:
    server.add(250)
    frame = load(spark, server, maxMessagesPerTrigger=100, guarantee=guarantee)
    first, second = Collected(1), Collected()
    assert "the sink fails" in failure(start(frame, first))
    assert server.journal.consumers["default"] == 100
    server.add(40)
    finished(start(frame, second, availableNow=True))
    again = first.tables[1].slice(first_again - 100)
    assert as_bytes(second.tables[1]) == as_bytes(again)
    assert second.offsets == list(range(first_again, 290))


# -- consumers -------------------------------------------------------------------------------------------------------


def test_a_second_query_of_the_same_consumer_is_refused(spark: SparkSession, server: Served, start: Start) -> None:
    server.add(10)
    sink = Collected()
    first = start(load(spark, server), sink)
    until(first, lambda: len(sink.offsets) == 10)
    line = failure(start(load(spark, server), Collected(), checkpoint="other"))
    assert 'reads as consumer "default" since' in line
    assert 'Give each query an option "consumer" of its own' in line
    assert "[TL-G03]" in line
    assert first.isActive


def test_a_stopped_query_makes_way_at_once(spark: SparkSession, server: Served, start: Start) -> None:
    """SIGTERM reaches the runner in a long poll; it gives its lease back instead of just dying."""
    server.add(10)
    sink = Collected()
    query = start(load(spark, server), sink)
    until(query, lambda: server.service._long_poll.waiters == 1)
    query.stop()
    wait_until(lambda: not server.service._leases._leases, LONG, what="the lease to come back")
    finished(start(load(spark, server), Collected(), availableNow=True))


# -- mistakes --------------------------------------------------------------------------------------------------------


def test_a_mistake_shows_at_load(spark: SparkSession) -> None:
    with pytest.raises(AnalysisException) as caught:
        spark.readStream.format("mqtt").options(password="hunter2").load()
    told = str(caught.value).splitlines()[0]
    assert told.startswith("[PYTHON_DATA_SOURCE_ERROR] Failed to create Python data source instance: towline.errors.")
    assert "Write it to a file of mode 0600 and give its path as passwordFile.   [TL-C22]" in told
    assert "hunter2" not in str(caught.value)


def test_a_table_has_the_columns_and_its_reader_the_options(spark: SparkSession, server: Served, start: Start) -> None:
    """The catalogue adds properties to the options, and hands none of either to a Python source that reads."""
    server.add(20)
    given = {"gateway": str(server.state_dir), "checkpointLocation": str(server.state_dir.parent / "ck")}
    options = ", ".join(f"{name} '{text}'" for name, text in given.items())
    spark.sql(f"CREATE TABLE received USING mqtt OPTIONS ({options}) COMMENT 'c' TBLPROPERTIES ('quality' = 'gold')")
    try:
        comments = {row.col_name: row.comment for row in spark.sql("DESCRIBE received").collect()}
        assert [*comments] == ROW_SCHEMA.names
        assert all(comments.values())
        sink = Collected()
        finished(start(spark.readStream.options(**given).table("received"), sink, availableNow=True))
        assert sink.offsets == list(range(20))
        assert "Of a table too: spark.readStream.options(...).table(NAME)." in failure(
            start(spark.readStream.table("received"), Collected(), checkpoint="other")
        )
    finally:
        spark.sql("DROP TABLE received")


def test_both_formats_register_without_replacing_what_spark_finds(
    spark: SparkSession, server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark would warn at every load, and twice: "replaced a statically registered data source"."""
    fresh = spark.newSession()
    monkeypatch.setattr(type(fresh.dataSource), "register", lambda *_: pytest.fail("registered again"))
    towline.register(fresh)
    towline.register(fresh)
    assert load(fresh, server).schema.names == ROW_SCHEMA.names


# -- power loss ------------------------------------------------------------------------------------------------------


def test_a_query_starts_by_itself_from_a_torn_checkpoint(
    spark: SparkSession, server: Served, start: Start, tmp_path: Path
) -> None:
    """Names survived a power failure, contents did not: Spark alone refuses to read them."""
    checkpoint = tmp_path / "ck"
    server.add(20)
    finished(start(load(spark, server), Collected(), availableNow=True))
    assert server.journal.consumers["default"] == 20
    newest = max(int(path.name) for path in (checkpoint / "commits").iterdir() if path.name.isdecimal())
    for log in ("offsets", "commits"):
        (checkpoint / log / str(newest + 1)).write_bytes(b"")
        (checkpoint / log / f".{newest + 1}.crc").write_bytes(b"")
    server.add(10)
    sink = Collected()
    finished(start(load(spark, server), sink, availableNow=True))
    assert sink.offsets == list(range(20, 30))
    assert server.journal.consumers["default"] == 30
