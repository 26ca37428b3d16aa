"""Nothing of a dead letter is lost: not a byte, not the order of its headers, not null against empty."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from towline.kafka.deadletters import (
    PREFIX,
    ChunkAssembler,
    DeadLetter,
    Header,
    Reason,
    pack,
    record_bytes,
    to_records,
    unpack,
)

LIMIT = 4096
names = st.one_of(st.text(max_size=10), st.sampled_from([PREFIX + "reason", PREFIX + "headers", PREFIX + "chunk"]))
payloads = st.one_of(st.none(), st.binary(max_size=20), st.binary(min_size=3000, max_size=9000))
original: st.SearchStrategy[list[Header]] = st.lists(st.tuples(names, st.one_of(st.none(), st.binary(max_size=20))))
line = st.text(st.characters(categories=["L", "N"]), max_size=20)
letters = st.builds(
    DeadLetter,
    reason=st.sampled_from(Reason),
    topic=st.one_of(st.none(), line),
    key=payloads,
    value=payloads,
    headers=original.map(tuple),
    partition=st.one_of(st.none(), st.integers(-(2**31), 2**31 - 1)),
    timestamp=st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1)),
    detail=line,
    source=line,
)


@given(letters)
def test_a_letter_comes_back_as_it_was_whatever_its_size(letter: DeadLetter) -> None:
    collector = ChunkAssembler()
    written = to_records(letter, LIMIT)
    assert all(record_bytes(*record) <= LIMIT for record in written)
    read = [collector.add(*record) for record in written]
    assert read[:-1] == [None] * (len(written) - 1)
    assert read[-1] == letter
    assert not collector.incomplete


def test_a_letter_that_fits_is_readable_by_any_tool() -> None:
    with pytest.raises(ValueError, match="no room"):
        to_records(DeadLetter(Reason.TOO_LARGE, "t", b"", b"x" * 1000), 300)
    letter = DeadLetter(Reason.PARTITION, "t", b"k", b"v", (("a", b"1"), ("a", None)), 7, 1000, "no\npartition 7", "s")
    assert to_records(letter, LIMIT) == [
        (
            b"k",
            b"v",
            [
                ("towline.dlq.reason", b"partition"),
                ("towline.dlq.detail", b"no partition 7"),
                ("towline.dlq.topic", b"t"),
                ("towline.dlq.partition", b"7"),
                ("towline.dlq.timestamp", b"1000"),
                ("towline.dlq.source", b"s"),
                ("towline.dlq.headers", b"2"),
                ("a", b"1"),
                ("a", None),
            ],
        )
    ]


def test_a_letter_written_again_counts_from_its_first_chunk() -> None:
    letter = DeadLetter(Reason.TOO_LARGE, "t", None, b"x" * 10_000)
    written = to_records(letter, LIMIT)
    collector = ChunkAssembler()
    for record in (written[0], *written[:-1]):
        assert collector.add(*record) is None
    assert collector.add(*written[-1]) == letter


BAD_NUMBERS = [b"9" * 19, b"9" * 5000, b"x"]


@pytest.mark.parametrize(
    "headers",
    [
        None,
        [("a", b"1")],
        [(PREFIX + "reason", b"mood"), (PREFIX + "headers", b"0")],
        [(PREFIX + "reason", b"partition")],
        [(PREFIX + "reason", b"partition"), (PREFIX + "headers", b"9")],
        [(PREFIX + "reason", b"partition"), (PREFIX + "headers", b"x")],
        [(PREFIX + "reason", b"partition"), (PREFIX + "chunk", b"id 3/2")],
        *(
            [(PREFIX + "reason", b"unrouted"), (PREFIX + "partition", n), (PREFIX + "headers", b"0")]
            for n in BAD_NUMBERS
        ),
    ],
)
def test_other_records_are_no_letters(headers: list[Header] | None) -> None:
    with pytest.raises(ValueError, match="no dead letter"):
        ChunkAssembler().add(b"", b"", headers)


def test_a_blob_cut_anywhere_is_noticed_or_shorter() -> None:
    blob = pack(b"key", None, [("a", b"1"), ("b", None)])
    assert unpack(blob) == (b"key", None, (("a", b"1"), ("b", None)))
    for end in range(len(blob)):
        try:
            _, _, headers = unpack(blob[:end])
        except ValueError:
            continue
        assert len(headers) < 2


def test_chunks_without_the_first_one_are_dropped() -> None:
    """Retention took the first of them away."""
    collector = ChunkAssembler()
    _, *rest = to_records(DeadLetter(Reason.TOO_LARGE, "t", b"k", b"v" * 20_000), 4096)
    for record in rest:
        with pytest.raises(ValueError, match="does not follow"):
            collector.add(*record)
    assert collector.incomplete == {}
