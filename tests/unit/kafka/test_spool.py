"""Rows wait in memory, then on disk, and come back as they were; their sum does not know their order."""

from __future__ import annotations

import errno
import random
from typing import Any

import pyarrow as pa
import pytest
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

from towline.errors import KafkaError
from towline.kafka.delivery import Spool, checksum
from towline.kafka.options import SinkSettings

cells = st.one_of(st.none(), st.binary(max_size=5))
rows = st.lists(st.tuples(cells, cells), max_size=30)


def batch(pairs: list[tuple[bytes | None, bytes | None]]) -> Any:
    keys, values = [key for key, _ in pairs], [value for _, value in pairs]
    return pa.record_batch({"key": pa.array(keys, pa.binary()), "value": pa.array(values, pa.binary())})


@settings(deadline=None)  # files
@given(rows, st.integers(0, 400), st.integers(1, 7))
def test_rows_come_back_in_order_any_number_of_times(
    pairs: list[tuple[bytes | None, bytes | None]], memory: int, size: int
) -> None:
    batches = [batch(pairs[at : at + size]) for at in range(0, len(pairs), size)]
    with Spool(memory, 1 << 20) as spool:
        spool.fill(iter(batches))
        assert spool.rows == len(pairs)
        assert spool.memory_bytes <= memory
        for _ in range(2):
            assert [b.to_pydict() for b in spool] == [b.to_pydict() for b in batches]


@given(rows, st.randoms(use_true_random=False), st.integers(1, 7))
def test_the_sum_knows_neither_order_nor_batches(
    pairs: list[tuple[bytes | None, bytes | None]], shuffled: random.Random, size: int
) -> None:
    other = pairs.copy()
    shuffled.shuffle(other)
    with Spool(1 << 20, 0) as spool:
        spool.fill(batch(other[at : at + size]) for at in range(0, len(other), size))
        assert (spool.rows, spool.crc()) == (len(pairs), checksum(batch(pairs)) % 2**64)


@given(rows)
def test_the_sum_is_of_each_key_and_then_its_value(pairs: list[tuple[bytes | None, bytes | None]]) -> None:
    """As it is in markers that were written by other versions."""
    assert checksum(batch(pairs)) == sum(crc32c(value or b"", crc32c(key or b"")) for key, value in pairs)
    values = batch(pairs).select(["value"])
    assert checksum(values) == sum(crc32c(value or b"") for _, value in pairs)


def test_the_sum_knows_other_rows() -> None:
    base = checksum(batch([(b"k", b"v"), (b"l", b"w")]))
    for other in ([(b"k", b"w"), (b"l", b"v")], [(b"k", b"v")], [(b"k", b"v"), (b"l", b"w"), (b"l", b"w")]):
        assert checksum(batch(list(other))) != base
    elsewhere = [batch([(b"k", b"v")]).append_column("topic", pa.array([topic])) for topic in ("a", "b")]
    assert checksum(elsewhere[0]) != checksum(elsewhere[1])


def test_strings_count_as_their_bytes() -> None:
    text = pa.record_batch({"value": pa.array(["ä", "b"])})
    assert checksum(text) == checksum(pa.record_batch({"value": pa.array(["ä".encode(), b"b"])}))


def test_a_full_spool_names_its_remedy() -> None:
    settings = SinkSettings.parse({"kafka.bootstrap.servers": "h:1", "spoolMemoryBytes": "0", "spoolDiskBytes": "100"})
    spool = Spool(settings.spool_memory, settings.spool_disk)
    with spool, pytest.raises(KafkaError, match="more than 100 bytes") as caught:
        spool.fill([batch([(None, b"x" * 1000)])])
    assert caught.value.code == "TL-K23"
    assert "spoolDiskBytes" in caught.value.remedy


def test_a_planned_batch_of_any_size_is_spooled_if_the_disk_holds_it() -> None:
    """Nothing shrinks it, so a limit that nobody set must not stop the line for ever."""
    assert SinkSettings.parse({"kafka.bootstrap.servers": "h:1"}).spool_disk is None
    large = batch([(None, b"x" * 1000)] * 10)
    with Spool(0, None) as spool:
        spool.fill([large, large])
        assert spool.rows == 20
        assert sum(b.num_rows for b in spool) == 20


def test_a_full_disk_names_the_ways_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with Spool(0, None) as spool:
        monkeypatch.setattr(spool, "_write", full)
        with pytest.raises(KafkaError, match=r"No space left.*TMPDIR.*max_bytes_per_trigger.*TL-K23"):
            spool.fill([batch([(None, b"x")])])
