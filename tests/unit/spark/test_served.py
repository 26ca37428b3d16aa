"""At most once and at least once on one line: batches are served again, whatever was interrupted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.streaming.datasource import ReadMaxRows

from tests.unit.gateway.serving import Served, mixed_rows
from tests.unit.spark.reading import ALL, table
from towline.guarantee import POLICIES, Guarantee
from towline.schema import ROW_SCHEMA
from towline.spark.reader import MqttStreamReader, ReadPlan
from towline.spark.served import unrepeated


def pieces(whole: pa.RecordBatch, start: int, end: int, size: int) -> Iterator[pa.RecordBatch]:
    """A range as a gateway gives it: in as many batches as it likes."""
    for first in range(start, end, size):
        yield whole.slice(first, min(size, end - first))


@given(
    messages=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=40),
    ends=st.lists(st.integers(1, 40), max_size=4),
    crashes=st.lists(st.integers(0, 40), max_size=6),
    size=st.integers(1, 7),
    guarantee=st.sampled_from(Guarantee),
)
def test_any_batch_replayed_at_any_crash_point(
    messages: list[tuple[int, int]], ends: list[int], crashes: list[int], size: int, guarantee: Guarantee
) -> None:
    """Each attempt at a batch hands rows to Kafka until it crashes; the last one of a batch does not crash."""
    whole, once_below = mixed_rows(messages), POLICIES[guarantee].once_below
    cuts = sorted({0, *(end for end in ends if end < len(messages)), len(messages)})
    handed: list[int] = []
    left, given_up = list(crashes), 0
    for start, end in pairwise(cuts):
        fresh = start
        while True:
            served = unrepeated(pieces(whole, start, end, size), once_below, fresh)
            numbers = [number for batch in served for number in batch.column("offset").to_pylist()]
            fresh = end
            if not left:
                break
            handed += numbers[: left.pop()]
        handed += numbers
        given_up += end - start - len(numbers)
    times = Counter(handed)
    for number, (_, qos) in enumerate(messages):
        assert times[number] <= 1 if qos < once_below else times[number] >= 1
    firsts = list(dict.fromkeys(handed))
    for device in range(3):
        of_device = [number for number in firsts if messages[number][0] == device]
        assert of_device == sorted(of_device), "the order of a device"
    # What the batches that were committed did not show is what Spark's counts miss of the offsets.
    repeated = [number for number, (_, qos) in enumerate(messages) if qos < once_below]
    assert given_up <= len(repeated)
    assert given_up == 0 or once_below > 0


def test_rows_of_several_frames_keep_their_order_and_their_columns() -> None:
    whole = mixed_rows([(0, n % 2) for n in range(20)])
    batches = list(unrepeated(pieces(whole, 0, 20, 3), 1, 10))
    kept = pa.Table.from_batches(batches, ROW_SCHEMA)
    assert kept.column("offset").to_pylist() == [1, 3, 5, 7, 9, *range(10, 20)]
    assert kept.equals(pa.Table.from_batches([whole.take(kept.column("offset").combine_chunks())]))
    assert all(batch.num_rows for batch in batches)


@pytest.fixture
def mixed(server: Served) -> pa.RecordBatch:
    """30 rows of three devices; every third is of QoS 0."""
    whole = mixed_rows([(n % 4, int(n % 3 > 0)) for n in range(30)])
    server.journal.append(whole)
    return whole


def by_qos(plan: ReadPlan, repeated_below: int = 0) -> MqttStreamReader:
    once_below = POLICIES[Guarantee.BY_QOS].once_below
    return MqttStreamReader(replace(plan, once_below=once_below, repeated_below=repeated_below))


def test_an_interrupted_batch_comes_again_without_its_rows_of_qos_0(mixed: pa.RecordBatch, plan: ReadPlan) -> None:
    first = by_qos(plan)
    start = first.initialOffset()
    end = first.latestOffset(start, ReadMaxRows(15))
    assert table(first, start, end).num_rows == 15
    first.stop()
    for _ in range(2):  # as often as it is interrupted
        again = by_qos(plan)
        kept = table(again, start, end)
        again.stop()
        assert kept.equals(pa.Table.from_batches([mixed.slice(0, 15).filter(pc.equal(mixed.slice(0, 15)["qos"], 1))]))
    again = by_qos(plan)
    assert table(again, start, end).num_rows == 10
    later = again.latestOffset(end, ALL)
    assert table(again, end, later).equals(pa.Table.from_batches([mixed.slice(15)])), "what is new comes whole"
    again.stop()


@pytest.mark.usefixtures("mixed")
def test_what_another_checkpoint_has_handed_out_is_not_new(plan: ReadPlan) -> None:
    made = by_qos(plan, repeated_below=12)
    start = made.initialOffset()
    end = made.latestOffset(start, ALL)
    kept = table(made, start, end)
    made.stop()
    assert kept.filter(pc.equal(kept["qos"], 0)).column("offset").to_pylist() == [12, 15, 18, 21, 24, 27]
    assert kept.num_rows == 26
