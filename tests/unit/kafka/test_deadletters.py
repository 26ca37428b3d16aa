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
    """One that was not written to its end, and then again, counts from its first chunk."""
    collector = ChunkAssembler()
    written = to_records(letter, LIMIT)
    assert all(record_bytes(*record) <= LIMIT for record in written)
    read = [collector.add(*record) for record in (*written[:-1], *written)]
    assert read[:-1] == [None] * (2 * len(written) - 2)
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
        [(PREFIX + "reason", b"partition"), (PREFIX + "chunk", b"id 2/3")],  # retention took the first of them away
        *(
            [(PREFIX + "reason", b"unrouted"), (PREFIX + "partition", n), (PREFIX + "headers", b"0")]
            for n in BAD_NUMBERS
        ),
    ],
)
def test_other_records_are_no_letters(headers: list[Header] | None) -> None:
    collector = ChunkAssembler()
    with pytest.raises(ValueError, match=r"no dead letter|chunk 2 of dead letter id does not follow chunk 0"):
        collector.add(b"", b"", headers)
    assert not collector.incomplete


def test_a_blob_cut_anywhere_is_noticed_or_shorter() -> None:
    blob = pack(b"key", None, [("a", None), ("b", b"12")])
    assert unpack(blob) == (b"key", None, (("a", None), ("b", b"12")))
    for end in range(len(blob)):
        try:
            _, _, headers = unpack(blob[:end])
        except ValueError:
            continue
        assert len(headers) < 2
