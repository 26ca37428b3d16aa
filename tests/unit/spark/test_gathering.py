"""Rows that tasks leave for the driver: all of them, in their order, wherever they lie."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from towline.errors import KafkaError
from towline.sinks import Task
from towline.spark import kafka_sink
from towline.spark.kafka_sink import KafkaTaskRows, TaskRowDirectory

LARGE = 1 << 20


@pytest.fixture(autouse=True)
def _own_temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def batch(*values: bytes) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"value": pa.array(values, pa.binary())})


TASK = Task(2, batch=3, query="q", run="r")


def values(left: KafkaTaskRows) -> list[bytes]:
    travelled: KafkaTaskRows = pickle.loads(pickle.dumps(left))  # noqa: S301 - our own bytes
    return [value for one in travelled.batches() for value in one.column("value").to_pylist()]


@given(st.lists(st.lists(st.integers(0, LARGE), max_size=4), max_size=4), st.booleans())
def test_rows_come_back_as_they_were_left(sizes: list[list[int]], shared: bool) -> None:
    place = TaskRowDirectory.for_batch("/ck", 3) if shared else TaskRowDirectory()
    rows = [[b"%d" % number * (size // 4) for number, size in enumerate(part)] for part in sizes]
    left = place.store_rows(TASK, (batch(*part) for part in rows))
    assert (left.partition, left.batch, left.query, left.run) == (2, 3, "q", "r")
    assert values(left) == [value for part in rows for value in part]
    assert left.rows == sum(map(len, rows))
    assert bool(left.file) == (shared and bool(rows)), "what both can see travels by no answer"
    assert bool(left.content) == (bool(rows) and not shared)
    place.remove_files([left])
    assert not left.file or not Path(left.file).exists()


def test_both_writers_of_a_batch_find_one_place_and_the_next_batch_cleans_it() -> None:
    first = TaskRowDirectory.for_batch("/ck", 3)
    left = first.store_rows(TASK, [batch(b"x" * (2 * LARGE))])
    assert TaskRowDirectory.for_batch("/ck", 3) == first
    other = TaskRowDirectory.for_batch("/other", 4)
    kept = other.store_rows(TASK, [batch(b"y" * (2 * LARGE))])
    assert values(left)
    TaskRowDirectory.for_batch("/ck", 4)
    with pytest.raises(KafkaError, match="TL-K65"):
        values(left)
    assert values(kept)


def test_half_a_file_is_not_taken_for_a_whole_one() -> None:
    left = TaskRowDirectory.for_batch("/ck", 0).store_rows(TASK, [batch(b"x" * (2 * LARGE))])
    with Path(left.file).open("r+b") as file:
        file.truncate(left.file_size - 1)
    with pytest.raises(KafkaError, match="TL-K65"):
        values(left)


def test_a_second_attempt_leaves_its_own() -> None:
    place = TaskRowDirectory.for_batch("/ck", 0)
    one, two = (place.store_rows(TASK, [batch(text * (2 * LARGE))]) for text in (b"a", b"b"))
    assert one.file != two.file
    assert values(one)[0][:1] == b"a"
    assert values(two)[0][:1] == b"b"


def test_a_limit_on_what_comes_with_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kafka_sink, "MAX_ANSWER_BYTES", 1000)

    def rows() -> Iterator[pa.RecordBatch]:
        while True:
            yield batch(b"x" * 100)

    with pytest.raises(KafkaError, match="TL-K66"):
        TaskRowDirectory().store_rows(TASK, rows())


def test_a_directory_that_others_can_write_to_is_not_used(tmp_path: Path) -> None:
    place = TaskRowDirectory.for_batch("/ck", 0)
    assert place.directory
    Path(place.directory).parent.chmod(0o777)
    assert not TaskRowDirectory.for_batch("/ck", 0).directory
    assert Path(place.directory).is_relative_to(tmp_path)
