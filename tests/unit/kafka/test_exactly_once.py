"""A batch in one transaction with its marker: written once, or skipped, or refused, whatever Kafka answers [I9]."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.bridge.noted import planned
from tests.unit.kafka import memory as kafka
from tests.unit.kafka.memory import FULL, Failure, Killed, MemoryKafka, Written, kafka_in_memory, numbers
from towline.errors import KafkaError
from towline.kafka import recordcheck
from towline.kafka.delivery import BatchOrigin, DeliveryResult, ExactlyOnce, batch_origin
from towline.kafka.markers import NO_BATCH, Marker, MarkerStep, MarkerTotals, TaskRefusal
from towline.kafka.markerstore import MarkerStore
from towline.sinks import Task

MARKERS = "towline.s.markers"


def sink(origin: BatchOrigin | None = None, **options: str) -> ExactlyOnce:
    of = kafka.settings(**options)
    return ExactlyOnce(of, kafka.columns(of), origin or BatchOrigin())


def write(one: ExactlyOnce, batch: int, *values: int, partition: int = 0, run: str = "r") -> DeliveryResult:
    return one.deliver(Task(partition, batch=batch, query="q", run=run), numbers(*values))


def marker(partition: int = 0) -> Marker | None:
    return MarkerStore(kafka.settings(), "s").read_marker(partition)


def mark(memory: MemoryKafka, given: Marker, partition: int = 0) -> None:
    """A marker that is there already."""
    memory.log[MARKERS, partition].append(Written(MARKERS, partition, b"s/%d" % partition, given.to_json()))


# -- whatever happens --

#: What may become of each call: it succeeds, or one of these.
FATES: Mapping[str, list[Failure | BaseException]] = {
    "list_topics": [kafka.TRANSPORT, Killed()],
    "init_transactions": [kafka.TIMED_OUT, Failure(kafka.TIMED_OUT, done=True), kafka.UNKNOWN, Killed()],
    "get_watermark_offsets": [kafka.TIMED_OUT, kafka.TRANSPORT, Killed()],
    "fetch": [kafka.TRANSPORT, Killed()],
    "begin_transaction": [kafka.UNKNOWN, kafka.FENCED, Killed()],
    "produce": [kafka.STATE, kafka.FATAL, kafka.DEAD, FULL, Killed()],
    "commit_transaction": [
        *(kafka.INCONSISTENT, kafka.FENCED, kafka.TIMED_OUT, kafka.UNKNOWN, SystemError("no reason"), Killed()),
        *(Failure(one, done=True) for one in (kafka.TIMED_OUT, kafka.UNKNOWN, SystemError("no reason"), Killed())),
        *(Failure(one, late=True) for one in (kafka.UNKNOWN, Killed())),
    ],
    "abort_transaction": [kafka.TIMED_OUT, Killed()],
}
PASSING = {"TL-K01", "TL-K07", "TL-K19", "TL-K20", "TL-K21"}


def live(fates: Mapping[str, list[Failure | BaseException | None]]) -> None:
    """Spark as it is: a batch runs again until it succeeds, in another process if need be."""
    with kafka_in_memory() as memory:
        memory.topics["t"] = 1
        for call, chosen in fates.items():
            memory.fail(call, *chosen)
        for batch, rows in enumerate((range(5), range(0), range(5, 10))):
            done = None
            while done is None:
                try:
                    done = write(sink(), batch, *rows)
                except Killed:
                    memory.new_process()
                except KafkaError as error:
                    assert error.code in PASSING, error  # noqa: PT017 - most lives have none
            assert done.rows == len(rows)
        assert memory.committed("t") == [b"%d" % value for value in range(10)]
        memory.decide.clear()
        last = marker()
        assert last is not None
        assert (last.batch, last.totals) == (2, MarkerTotals(10, 0))


@pytest.mark.parametrize("after", range(3))
@pytest.mark.parametrize("call", FATES)
def test_whatever_becomes_of_a_call_every_row_is_there_once(call: str, after: int) -> None:
    for fate in FATES[call]:
        live({call: [*[None] * after, fate]})


@given(st.fixed_dictionaries({call: st.lists(st.sampled_from([None, *of]), max_size=8) for call, of in FATES.items()}))
def test_whatever_becomes_of_all_calls_every_row_is_there_once(
    fates: dict[str, list[Failure | BaseException | None]],
) -> None:
    live(fates)


def test_a_batch_gets_three_producers_and_then_spark_decides(memory: MemoryKafka) -> None:
    memory.fail("commit_transaction", *[kafka.INCONSISTENT] * 3)
    with pytest.raises(KafkaError, match="TL-K20") as caught:
        write(sink(), 0, 1)
    assert type(caught.value) is KafkaError, "Spark's text names the class"
    assert [producer.id for producer in memory.producers] == ["towline.s.0"] * 3
    assert memory.calls.count("describe_configs") == 6, "limits of the topic, and of that of the markers, for each"
    memory.fail("commit_transaction", *[kafka.INCONSISTENT] * 2)
    assert write(sink(), 0, 1).rows == 1
    assert memory.calls.count("describe_configs") == 10, "they are read again after a refusal alone"
    assert memory.committed("t") == [b"1"]


def test_the_limits_of_topics_are_cached_and_a_missing_topic_is_not(memory: MemoryKafka) -> None:
    of = kafka.settings()

    def looked() -> tuple[list[str], int]:
        before = memory.calls.count("describe_configs")
        return sorted(recordcheck.topic_limits(of, ["t", "u"])), memory.calls.count("describe_configs") - before

    assert looked() == (["t"], 1)
    memory.topics["u"] = 1
    assert looked() == (["t", "u"], 1)
    memory.now += 299
    recordcheck.forget_limits(replace(of, servers="elsewhere"))
    assert looked() == (["t", "u"], 0)
    memory.now += 2
    del memory.topics["t"]
    assert looked() == (["u"], 1), "an old answer would let records pass to a topic that is gone"
    recordcheck.forget_limits(of)
    assert looked() == (["u"], 1)


def test_an_interrupt_ends_the_transaction(memory: MemoryKafka, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it is: one that is open holds up every reader."""

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Marker, "with_totals_after", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write(sink(), 0, 1)
    assert memory.calls[-3:] == ["abort_transaction", "purge", "flush"]


# -- what the marker says --


def test_markers_continue_the_totals_of_the_last_one(memory: MemoryKafka) -> None:
    origin = BatchOrigin(newest_batch=1, hashes={0: "h0", 1: "h1"})
    first = write(sink(), 0, 1, 2, 3)
    assert first.marker_step == MarkerStep(None, MarkerTotals(3, 0))
    second = write(sink(origin), 1, 4, 5)
    assert second.marker_step == MarkerStep(MarkerTotals(3, 0), MarkerTotals(5, 0))
    assert (second.rows, second.bytes, second.was_skipped) == (2, 2, False)
    assert marker() == Marker(1, 1, rows=2, crc=None, writer="q", offsets="h1", total_rows=5)
    assert write(sink(origin), 1, 4, 5) == replace(second, bytes=0, was_skipped=True)
    with pytest.raises(KafkaError, match="TL-K15"):
        write(sink(BatchOrigin(newest_batch=1, hashes={1: "of other offsets"})), 1, 4, 5)


@pytest.mark.parametrize(
    ("hashes", "options", "compared"),
    [
        ({}, {}, True),  # two copies of a checkpoint may have run on with other batches of one number
        ({0: "h"}, {}, False),
        ({0: "h"}, {"parallelism": "2"}, True),
        ({0: "h"}, {"parallelism": "2", "verifyOnSkip": "false"}, False),
        ({0: "h"}, {"verifyOnSkip": "true"}, True),
        ({}, {"verifyOnSkip": "false"}, False),
    ],
)
def test_the_rows_of_a_skipped_batch_are_compared(
    memory: MemoryKafka, hashes: Mapping[int, str], options: dict[str, str], compared: bool
) -> None:
    one = sink(BatchOrigin(hashes=hashes), **options)
    write(one, 0, 1, 2)
    found = marker()
    assert found is not None
    assert (found.crc is not None) == compared
    assert write(one, 0, 2, 1).was_skipped, "the order is not compared"
    for other in ((1, 3), (1,)):
        if compared:
            with pytest.raises(KafkaError, match=f"brings other rows .*: {len(other)} rows.*TL-K16"):
                write(one, 0, *other)
        else:
            assert write(one, 0, *other).rows == 2
    assert memory.committed("t") == [b"1", b"2"]


def test_a_batch_marked_as_written_by_hand_is_skipped_without_a_comparison(memory: MemoryKafka) -> None:
    write(sink(), 0, 1, 2)
    MarkerStore(kafka.settings(), "s").reset(5)
    done = write(sink(), 5, 9)
    assert (done.was_skipped, done.has_manual_marker, done.rows) == (True, True, 0)
    assert done.marker_step == MarkerStep(None, MarkerTotals(2, 0)), "nobody counted what was written by hand"
    assert write(sink(), 6, 3).marker_step == MarkerStep(None, MarkerTotals(3, 0))
    assert write(sink(), 7, 4).marker_step == MarkerStep(MarkerTotals(3, 0), MarkerTotals(4, 0))
    assert memory.committed("t") == [b"1", b"2", b"3", b"4"]


def test_dead_letters_are_counted_in_the_marker_and_of_a_skipped_batch(memory: MemoryKafka) -> None:
    memory.topics["dlq"] = 1
    one = sink(deadLetterTopic="dlq", kafka__message__max__bytes="20000")
    write(one, 0, 7)
    for was_skipped in (False, True):
        done = one.deliver(Task(0, batch=1, query="q"), [kafka.values(b"1", b"x" * 30_000, b"2")])
        assert (done.rows, done.dead_lettered, done.was_skipped) == (2, 1, was_skipped)
        assert done.marker_step == MarkerStep(MarkerTotals(1, 0), MarkerTotals(4, 1))
    assert memory.committed("t") == [b"7", b"1", b"2"]
    assert len(memory.committed("dlq")) > 1, "in parts"


def test_a_checkpoint_that_is_further_than_the_batch_is_another_querys(memory: MemoryKafka) -> None:
    with pytest.raises(KafkaError, match=r"runs batch 3, but the newest batch .* is 4.*TL-K24"):
        write(sink(BatchOrigin(newest_batch=4)), 3, 1)
    assert memory.calls == []
    assert write(sink(BatchOrigin(newest_batch=0)), 0, 1).rows == 1


# -- a task too many --


@pytest.mark.parametrize(
    ("before", "batch", "code", "left"),
    [
        (None, 0, "TL-K17", Marker(NO_BATCH, 1, writer="q", refused=TaskRefusal(0, "r", 2))),
        (Marker(6, 1, 4, None, "q"), 7, "TL-K17", Marker(6, 1, 4, None, "q", refused=TaskRefusal(7, "r", 2))),
        (Marker(7, 1, 4, None, "q"), 7, "TL-K18", Marker(7, 1, 4, None, "q", refused=TaskRefusal(7, "r", 2))),
        (Marker(9, 1, 4, None, "q"), 7, "TL-K12", Marker(9, 1, 4, None, "q")),
        (Marker(7, 1, 4, None, "other"), 7, "TL-K13", Marker(7, 1, 4, None, "other")),
    ],
)
def test_a_task_beyond_the_parallelism_marks_the_batch_as_refused(
    memory: MemoryKafka, before: Marker | None, batch: int, code: str, left: Marker
) -> None:
    """What partition 0 writes of this batch must never be taken for all of it; a marker that stops anyway stays."""
    if before is not None:
        mark(memory, before)
    with pytest.raises(KafkaError, match=code):
        write(sink(), batch, 1, partition=2)
    assert {producer.id for producer in memory.producers} == {"towline.s.0"}, "whoever writes there now is fenced"
    assert marker() == left
    with pytest.raises(KafkaError, match=code):
        write(sink(), batch, 1)
    assert memory.committed("t") == []


# -- around it --


def clocks(memory: MemoryKafka) -> list[str]:
    return [producer.config["transaction.timeout.ms"] for producer in memory.producers]


def test_a_large_batch_gets_more_time_unless_the_cluster_allows_no_more(memory: MemoryKafka) -> None:
    one = sink(deliveryTimeout="2")
    rows = [kafka.values(b"x" * 900_000) for _ in range(10)]
    one.deliver(Task(0, batch=0, query="q"), rows)
    assert clocks(memory) == ["2000", "5218"]
    memory.fail("init_transactions", None, kafka.raised("INVALID_TRANSACTION_TIMEOUT"))
    assert one.deliver(Task(0, batch=1, query="q"), rows).rows == 10
    assert clocks(memory)[2:] == ["2000", "5218", "2609"]
    memory.fail("init_transactions", None, *[kafka.TIMED_OUT] * 100)
    with pytest.raises(KafkaError, match="TL-K01"):
        one.deliver(Task(0, batch=2, query="q"), rows)
    assert len(memory.producers) == 7, "one that had no answer is not tried with less time"


def test_a_batch_that_was_too_slow_gets_the_time_that_its_rate_asks_for(memory: MemoryKafka) -> None:
    memory.rate = 5.0
    assert write(sink(deliveryTimeout="4"), 0, *range(100)).rows == 100
    assert memory.committed("t") == [b"%d" % number for number in range(100)]
    assert clocks(memory)[0] == "4000"
    assert int(clocks(memory)[-1]) > 20_000
    assert memory.calls.count("abort_transaction") == 1
    write(sink(BatchOrigin(rate=10.0), deliveryTimeout="4"), 1, *range(100))
    assert memory.calls.count("abort_transaction") == 1, "a rate that is known needs no try"


def test_limits_learned_from_a_refusal_are_used_from_then_on(memory: MemoryKafka) -> None:
    """Two transactions tell which records it are; the one after is the batch."""
    memory.topics["dlq"] = 1
    memory.refuses = lambda record: kafka.UNFIT if record.topic == "t" and record.key is None else None
    one = sink(deadLetterTopic="dlq")
    done = write(one, 0, *range(10))
    assert (done.rows, done.dead_lettered) == (0, 10)
    assert memory.calls.count("abort_transaction") == 2
    assert write(one, 1, *range(10)).dead_lettered == 10
    assert memory.calls.count("abort_transaction") == 2
    memory.now += 3601
    assert write(one, 2, *range(10)).dead_lettered == 10
    assert memory.calls.count("abort_transaction") == 4, "it is looked at again"


def test_a_lowered_limit_is_read_again_and_not_learned(memory: MemoryKafka) -> None:
    """What is learned makes all requests to the topic small, for an hour."""
    memory.topics["dlq"] = 1
    one = sink(deadLetterTopic="dlq")
    write(one, 0, 1)
    memory.configs["t"] = {"max.message.bytes": "100"}
    memory.refuses = lambda record: kafka.REFUSED if record.topic == "t" else None
    assert write(one, 1, 2).dead_lettered == 1
    assert memory.calls.count("abort_transaction") == 1
    assert not recordcheck._learned_limits


def test_a_refusal_without_a_limit_to_learn_stops_the_line(memory: MemoryKafka) -> None:
    memory.topics["dlq"] = 1
    memory.refuses = lambda record: kafka.UNFIT if record.topic == "t" else None
    of = kafka.settings(deadLetterTopic="dlq")
    batch = pa.record_batch({"key": pa.array([b"k"]), "value": pa.array([b"v"])})
    with pytest.raises(KafkaError, match="TL-K20"):
        ExactlyOnce(of, kafka.columns(of, "key")).deliver(Task(0, batch=0, query="q"), [batch])
    assert memory.calls.count("abort_transaction") == 2
    assert (memory.committed("t"), memory.committed("dlq")) == ([], [])


def test_a_transaction_that_may_take_no_longer_stops_with_rate_and_setting(memory: MemoryKafka) -> None:
    memory.rate, memory.configs["1"] = 1.0, {"transaction.max.timeout.ms": "4000"}
    too_slow = r"too slow: 5 of 190 bytes in 4 s, 1 bytes/s.*transaction\.max\.timeout.*TL-K28"
    with pytest.raises(KafkaError, match=too_slow):
        write(sink(deliveryTimeout="4"), 0, *range(100))
    assert memory.committed("t") == []


def test_a_stopping_query_fences_its_producers_within_a_time_limit(memory: MemoryKafka) -> None:
    one = sink(parallelism="3")
    one.fence("q")
    assert [producer.id for producer in memory.producers] == ["towline.s.0", "towline.s.1", "towline.s.2"]
    assert memory.calls.count("purge") == 3
    memory.fail("init_transactions", *[kafka.TIMED_OUT] * 100)
    before = memory.now
    one.fence("q")
    assert memory.now - before < 4
    nameless = ExactlyOnce(replace(one.settings, sink_id=None, parallelism=1), one.columns)
    nameless.fence(None)
    assert len(memory.producers) == 4
    nameless.fence("q9")
    assert memory.producers[-1].id == "towline.q9.0"


# -- on the driver, before the tasks of a batch --


@pytest.mark.parametrize(
    ("markers", "codes"),
    [
        ([3, None], ["TL-K11", "TL-K10"]),
        ([5, 4], [None, None]),
    ],
)
def test_markers_that_were_lost_stop_the_batch_behind_the_commit_log(
    memory: MemoryKafka, tmp_path: Path, markers: list[int | None], codes: list[str | None]
) -> None:
    """A batch in the log is in Kafka for certain: its marker, or the next one, is there, or nothing is written."""
    memory.topics[MARKERS], memory.configs[MARKERS] = 2, {"cleanup.policy": "compact"}
    for partition, batch in enumerate(markers):
        if batch is not None:
            mark(memory, Marker(batch, 2, writer="q"), partition)
    for batch in (4, 5):
        planned(tmp_path, batch, {}, done=batch == 4)
    origin = batch_origin(kafka.settings(parallelism="2"), str(tmp_path))
    assert (origin.newest_batch, sorted(origin.hashes)) == (5, [4, 5])
    for partition, code in enumerate(codes):
        with pytest.raises(KafkaError, match=code) if code else contextlib.nullcontext():
            write(sink(origin, parallelism="2", verifyOnSkip="false"), 5, 1, partition=partition)
    assert bool(memory.committed("t")) is (codes == [None, None])


@pytest.mark.parametrize(("rows", "code"), [((0, 7), "TL-K13"), ((7, 0), "TL-K13"), ((0, 0), None)])
def test_markers_of_another_query_stop_a_first_batch_before_a_part_of_it_is_written(
    memory: MemoryKafka, tmp_path: Path, rows: tuple[int, int], code: str | None
) -> None:
    """One partition may have carried nothing, and another one rows; where none has, they stand in nobody's way."""
    memory.topics[MARKERS], memory.configs[MARKERS] = 2, {"cleanup.policy": "compact"}
    for partition, total in enumerate(rows):
        mark(memory, Marker(3, 2, writer="gone", total_rows=total), partition)
    planned(tmp_path, 0, {}, done=False)
    of = kafka.settings(parallelism="2")
    with pytest.raises(KafkaError, match=code) if code else contextlib.nullcontext():
        assert batch_origin(of, str(tmp_path)).newest_batch == 0


def test_markers_are_not_checked_without_a_committed_batch(memory: MemoryKafka, tmp_path: Path) -> None:
    assert batch_origin(kafka.settings(), str(tmp_path)) == BatchOrigin()
    planned(tmp_path, 5, {}, done=False)
    assert batch_origin(kafka.settings(), str(tmp_path)).newest_batch == 5
    assert memory.calls == []
