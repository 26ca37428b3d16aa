"""The bytes of a frame, and sets of numbers that fill up from below: what is written is read, and nothing else is."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from towline.errors import JournalError
from towline.journal import frames
from towline.journal.frames import FrameKind, encode_frame, intact_at, intact_frames_after
from towline.journal.ranges import Ranges

CONTENT = st.binary(max_size=200)
FIELDS = st.fixed_dictionaries(
    {
        "epoch": st.integers(0, 2**32 - 1),
        "first_offset": st.integers(0, 2**63),
        "durable_bytes": st.integers(0, 2**63),
        "rows": st.integers(0, 2**32 - 1),
        "section": CONTENT,
        "payload": CONTENT,
    }
)


def joined(*encoded: frames.EncodedFrame) -> memoryview:
    return memoryview(b"".join(bytes(buffer) for one in encoded for buffer in one.buffers))


@given(st.sampled_from(FrameKind), FIELDS)
def test_round_trip(kind: FrameKind, fields: dict[str, object]) -> None:
    encoded = encode_frame(kind, **fields)  # type: ignore[arg-type]
    memory = joined(encoded)
    assert len(memory) == encoded.size
    assert encoded.size % 8 == 0
    header = intact_at(memory, 0, len(memory))
    assert header is not None
    assert header.size == encoded.size
    assert (header.kind, header.epoch, header.rows) == (kind, fields["epoch"], fields["rows"])
    assert (header.first_offset, header.durable_bytes) == (fields["first_offset"], fields["durable_bytes"])
    assert frames.section_at(memory, 0, header) == fields["section"]
    start = frames.payload_at(0, header)
    assert start % 8 == 0
    assert memory[start : start + header.payload_bytes] == fields["payload"]


@given(st.binary(max_size=400), st.integers(0, 7))
def test_frames_behind_bad_bytes_are_found(noise: bytes, into: int) -> None:
    first = encode_frame(FrameKind.CHANGES, epoch=1, first_offset=5, durable_bytes=8, payload=b"watermark")
    second = encode_frame(FrameKind.CHANGES, epoch=1, first_offset=5, durable_bytes=16, rows=1, payload=b"y" * 500)
    lead = noise + bytes(-len(noise) % 8) + bytes(8)
    memory = memoryview(lead + bytes(joined(first, second)))
    frames = list(intact_frames_after(memory, min(into, len(lead) - 8), len(memory)))
    assert [position for position, _ in frames] == [len(lead), len(lead) + first.size]
    assert [header.durable_bytes for _, header in frames] == [8, 16]


@pytest.mark.parametrize("shift", range(1, 8))
def test_a_frame_is_found_behind_what_looks_like_one_out_of_line(shift: int) -> None:
    """Frames begin at multiples of 8; a payload may have the magic anywhere."""
    frame = encode_frame(FrameKind.CHANGES, epoch=1, first_offset=5, durable_bytes=16, rows=1, payload=b"y")
    noise = (bytes(shift) + frames.MAGIC + bytes(8 - shift) + frames.MAGIC * 3).ljust(64, b".")
    memory = memoryview(bytes(8) + noise + bytes(joined(frame)))
    assert [position for position, _ in intact_frames_after(memory, 0, len(memory))] == [72]


def test_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "_MAX_PAYLOAD_BYTES", 100)
    with pytest.raises(JournalError, match=r"a batch of 101 bytes is too large for one frame.*TL-J08"):
        encode_frame(FrameKind.CHANGES, epoch=1, first_offset=0, durable_bytes=0, rows=1, payload=b"x" * 101)


TOP = 30
NUMBERS = st.sets(st.integers(0, TOP - 1))


def ranges_of(watermark: int, numbers: set[int]) -> tuple[Ranges, set[int]]:
    ranges = Ranges(watermark)
    for number in numbers:
        ranges.add(number)
    return ranges, numbers | set(range(watermark))


@given(st.integers(0, TOP), NUMBERS, st.integers(0, TOP), st.integers(0, TOP))
def test_what_is_missing_is_what_is_not_there(watermark: int, numbers: set[int], start: int, end: int) -> None:
    ranges, model = ranges_of(watermark, numbers)
    missing = ranges.missing(start, end)
    assert [n for s, e in missing for n in range(s, e)] == [n for n in range(start, end) if n not in model]
    assert all(s < e for s, e in missing)
    assert ranges.end == max(model, default=-1) + 1


@given(st.integers(0, TOP), NUMBERS, st.integers(0, TOP))
def test_a_number_touches_where_it_makes_no_further_range(watermark: int, numbers: set[int], number: int) -> None:
    ranges, _ = ranges_of(watermark, numbers)
    before = ranges.range_count
    touches = ranges.is_adjacent(number)
    ranges.add(number)
    assert touches == (ranges.range_count <= before)


@given(st.integers(0, TOP), NUMBERS, st.integers(0, TOP), NUMBERS)
def test_two_sets_become_one_and_a_copy_stays_as_it_was(
    watermark: int, numbers: set[int], others_watermark: int, others: set[int]
) -> None:
    ranges, model = ranges_of(watermark, numbers)
    more, more_model = ranges_of(others_watermark, others)
    copy = ranges.copy()
    ranges.unite(more)
    assert {n for n in range(TOP) if n in ranges} == {n for n in model | more_model if n < TOP}
    assert {n for n in range(TOP) if n in copy} == {n for n in model if n < TOP}
    assert {n for n in range(TOP) if n in more} == {n for n in more_model if n < TOP}


@given(st.lists(st.tuples(st.integers(0, TOP), st.integers(0, 8)), max_size=40), st.integers(0, TOP))
def test_ranges_are_a_set(added: list[tuple[int, int]], watermark: int) -> None:
    ranges, model = Ranges(watermark), set(range(watermark))
    for start, length in [*added, *added[::3]]:  # a second time changes nothing
        ranges.add(start, start + length)
        model |= set(range(start, start + length))
    assert {n for start, end in ranges.ranges for n in range(start, end)} == model
    assert all(lower[1] < upper[0] for lower, upper in pairwise(ranges.ranges))
    assert ranges.watermark not in model
    assert ranges.count() == len(model)
    assert Ranges(ranges.watermark, ranges.ranges_above()).ranges == ranges.ranges
