"""What exactly once costs: our sink against itself at least once and against Spark's own Kafka sink, in one session.

The rows come from Spark's ``rate-micro-batch`` source, one partition, the same rows for every subject; ``noop`` shows
what the source alone costs. A subject is measured from the end of one batch to the end of another, so no start is in
any figure, and another one begins each round: a machine that others use too is never equally busy.
"""

from __future__ import annotations

import os
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql import SparkSession

import towline
from benchmarks.rig import Meter, Outcome, machine, wait
from towline.spark.java import spark_kafka_jars
from towline_prove import processes
from towline_prove.devstack.kafka import Kafka

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery

#: Batches before the first that counts: Spark compiles, Python workers start, Kafka makes its transaction log.
WARM_UP = 4
EXACTLY, AT_LEAST, OWN, TUNED, NOOP = "exactly_once", "at_least_once", "Spark's own", "Spark's own, tuned", "noop"
#: What our sink sets as well: larger batches and a little patience.
_TUNING = {"kafka.linger.ms": "20", "kafka.batch.size": "1000000"}


@dataclass(frozen=True)
class Shape:
    """What the rows are like.

    Attributes:
        name: For people.
        size: Bytes of a value.
        headers: How many; small ones.
        rows: Rows of a micro-batch.
        aim: Least ratio to Spark's own sink; None where none is set.
    """

    name: str
    size: int
    headers: int
    rows: int
    aim: float | None = None

    def of(self, spark: SparkSession) -> DataFrame:
        """The endless stream of them."""
        source = (
            spark.readStream.format("rate-micro-batch").option("rowsPerBatch", self.rows).option("numPartitions", 1)
        )
        headers = [f"named_struct('key', 'header{n}', 'value', CAST('{n}' AS BINARY))" for n in range(self.headers)]
        number = "CAST(value AS STRING)"
        columns = [
            "CAST(concat('device', CAST(value % 1000 AS STRING)) AS BINARY) AS key",
            f"CAST(concat({number}, repeat('x', {self.size} - length({number}))) AS BINARY) AS value",
            *([f"array({', '.join(headers)}) AS headers"] if headers else []),
        ]
        return source.load().selectExpr(*columns)


SHAPES = (
    Shape("1 KB", 1024, 0, 50_000, 0.7),
    Shape("150 B", 150, 0, 200_000),
    Shape("150 B, 3 headers", 150, 3, 200_000),
)


@dataclass
class Bench:
    """A Spark session and a Kafka, shared by all subjects.

    Attributes:
        spark: The session.
        kafka: The broker.
        directory: Checkpoints go below it.
    """

    spark: SparkSession
    kafka: Kafka
    directory: Path
    _count: int = field(default=0, init=False)

    def start(self, subject: str, shape: Shape) -> StreamingQuery:
        """Start a query of a subject, with a checkpoint and a topic of its own."""
        self._count += 1
        topic = f"t{self._count}"
        limits = {"retention.bytes": str(200 << 20), "segment.bytes": str(50 << 20)}  # the disk is not what is measured
        self.kafka.create_topics({topic: 1}, config=limits)
        kind, options = self._sink(subject, topic, shape)
        writer = shape.of(self.spark).writeStream.format(kind).options(**options)
        return writer.option("checkpointLocation", str(self.directory / topic)).start()

    def _sink(self, subject: str, topic: str, shape: Shape) -> tuple[str, dict[str, str]]:
        if subject == NOOP:
            return NOOP, {}
        common = {"kafka.bootstrap.servers": self.kafka.bootstrap, "topic": topic}
        if subject in (OWN, TUNED):
            more = {"includeHeaders": str(bool(shape.headers)).lower()}
            return "kafka", {**common, **more, **(_TUNING if subject == TUNED else {})}
        return "kafka_transactional", {**common, "guarantee": subject}

    def meter(self) -> Meter:
        """CPU clocks of the JVM, of the Python processes below it, and of Kafka."""
        jvm = self.jvm
        return Meter(
            {
                "jvm": lambda: [jvm],
                "python": lambda: [pid for pid in processes.process_tree(jvm) if pid != jvm],
                "kafka": lambda: [self.kafka.pid or 0],
            }
        )

    @property
    def jvm(self) -> int:
        """Spark's process."""
        gateway: Any = self.spark.sparkContext._gateway  # noqa: SLF001 - there is no public way
        return int(gateway.proc.pid)

    def measure(self, subject: str, shape: Shape, batches: int) -> Outcome:
        """Run a subject over some batches, after its warm-up."""
        meter = self.meter()
        query = self.start(subject, shape)
        try:
            first = self._reach(query, WARM_UP)
            meter.start()
            began = time.monotonic()
            last = self._reach(query, first + batches)
            seconds = time.monotonic() - began
            meter.stop()
        finally:
            query.stop()
        return Outcome(subject, (last - first) * shape.rows, seconds, meter.used, ["jvm", "python"])

    def _reach(self, query: StreamingQuery, batch: int) -> int:
        """Wait for the progress of a batch; its number."""

        def newest() -> int:
            if query.exception() is not None:
                raise SystemExit(str(query.exception()))
            progress: Any = query.lastProgress
            return -1 if progress is None else int(progress["batchId"])

        wait(lambda: newest() >= batch, f"batch {batch}", pause=0.005)
        return newest()


@contextmanager
def bench() -> Iterator[Bench]:
    """Start a Kafka and a Spark session with Towline's settings and Spark's own Kafka sink."""
    with tempfile.TemporaryDirectory(prefix="towline-bench-") as name, Kafka(Path(name) / "kafka") as kafka:
        jars = ",".join(map(str, spark_kafka_jars()))
        conf = {
            **towline.spark_conf(),
            "spark.sql.execution.arrow.maxBytesPerBatch": "2147483647",  # as a bridge has it: docs/exactly-once.md
            "spark.jars": jars,
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.driver.host": "127.0.0.1",
            "spark.sql.warehouse.dir": str(Path(name) / "warehouse"),
            "spark.log.level": "ERROR",
        }
        builder = SparkSession.builder.master("local[2]").appName("towline benchmark")
        for key, value in conf.items():
            builder = builder.config(key, value)
        spark = builder.getOrCreate()
        towline.register(spark)
        try:
            yield Bench(spark, kafka, Path(name) / "checkpoints")
        finally:
            spark.stop()


def sinks(rounds: int, batches: int, shapes: Sequence[Shape] = SHAPES) -> None:
    """All subjects with all shapes of rows; ratios are those of the medians."""
    with bench() as benchmark:
        for subject in (EXACTLY, OWN):  # a cold JVM makes the first figures three times what the others are
            benchmark.measure(subject, shapes[0], 2)
        version = benchmark.kafka.version
        print(f"exactly once: rows from a Spark source, one partition, into Kafka {version}\n  {machine()}")
        for shape in shapes:
            print(f"\n  {shape.name}, {shape.rows:,} rows a batch, {batches} batches, {rounds} rounds; {_load()}")
            outcomes: dict[str, list[Outcome]] = {}
            for number in range(rounds):
                subjects = [NOOP, EXACTLY, AT_LEAST, OWN, TUNED]
                for subject in subjects[number:] + subjects[:number]:
                    outcomes.setdefault(subject, []).append(benchmark.measure(subject, shape, batches))
            report(outcomes, shape)


def report(outcomes: Mapping[str, list[Outcome]], shape: Shape) -> None:
    """One line a subject, its median run; then the ratios."""
    middle = {subject: _median(runs) for subject, runs in outcomes.items()}
    for outcome in middle.values():
        print(outcome.line(), flush=True)
    aim = f"   (aim {shape.aim})" if shape.aim else ""
    for subject in (EXACTLY, AT_LEAST):
        ratios = [f"{middle[subject].rate / middle[rival].rate:.2f}" for rival in (OWN, TUNED)]
        print(f"    {subject} : Spark's own {ratios[0]}, tuned {ratios[1]}{aim}")
    print(f"    exactly_once : at_least_once {middle[EXACTLY].rate / middle[AT_LEAST].rate:.2f}", flush=True)


def _median(runs: Sequence[Outcome]) -> Outcome:
    return sorted(runs, key=lambda outcome: outcome.rate)[len(runs) // 2]


def _load() -> str:
    return f"load {os.getloadavg()[0]:.1f}"


def run(*, quick: bool = False) -> None:
    """The sinks with every shape of rows."""
    shapes = [replace(shape, rows=shape.rows // 10) for shape in SHAPES] if quick else SHAPES
    sinks(rounds=1 if quick else 3, batches=3 if quick else 12, shapes=shapes)
    print()
