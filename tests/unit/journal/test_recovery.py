"""Crashes, torn tails and bad disks: what was acknowledged is served, or the damage is told; never a wrong row."""

from __future__ import annotations

import random
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from crc32c import crc32c

from tests.unit.journal.support import SMALL, crash, fill, opened, rows, segments, served
from towline.errors import JournalDamaged, JournalError
from towline.journal.frames import FrameHeader, FrameKind, encode_frame, intact_at
from towline.journal.recovery import read_state
from towline.version import version


def session_of(directory: Path) -> Mapping[str, Any]:
    state = read_state(directory)
    return {} if state is None else state.session


def layout(path: Path) -> list[tuple[int, FrameHeader]]:
    """Return position and header of every frame of a segment."""
    memory, position, frames = memoryview(path.read_bytes()), 0, []
    while header := intact_at(memory, position, len(memory)):
        frames.append((position, header))
        position += header.size
    return frames


def abandoned(directory: Path) -> Path:
    """Make a journal with a sealed segment and a last one with every kind of frame; return the last one's path."""
    journal = opened(directory)
    fill(journal, 6, group=3)
    journal.close()
    journal = opened(directory)
    journal.count(received=3)
    fill(journal, 1)
    journal.set_session({"a": 1})
    journal.commit("spark", 2)
    fill(journal, 4, group=2)
    journal.count(received=4)
    journal.commit("spark", 3)
    fill(journal, 3, group=3)
    crash(journal)
    return segments(directory)[-1]


def files_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in segments(directory)}


def put_back(files: dict[str, bytes], directory: Path) -> None:
    """Make the segments what they were."""
    for path in segments(directory):
        path.unlink()
    for name, content in files.items():
        (directory / name).write_bytes(content)


def test_the_last_segment_cut_at_every_byte(memory_path: Path) -> None:
    last = abandoned(memory_path / "whole")
    content, frames = last.read_bytes(), layout(last)
    files, copy = files_of(last.parent), memory_path / "cut"
    copy.mkdir()
    borders = {position + at for position, _ in frames[1:] for at in (-1, 0, 1, 47, 48, 49)}
    for size in sorted({*range(0, len(content), 13), *borders, *range(len(content) - 64, len(content))}):
        put_back(files, copy)
        (copy / last.name).write_bytes(content[:size])
        whole = [header for position, header in frames if position + header.size <= size]
        good = sum(header.size for header in whole)
        if not whole:  # the snapshot was durable before the segment had a name
            for opening in (opened, read_state):
                with pytest.raises(JournalDamaged, match=r"snapshot.*TL-J05"):
                    opening(copy)
            continue
        told = session_of(copy)
        assert (copy / last.name).stat().st_size == size  # nothing was cut
        with opened(copy) as journal:
            assert session_of(copy) == told == journal.session  # and who has it open is in nobody's way
            assert journal.end == whole[-1].end
            cut = f"cut {size - good:,} bytes of an unfinished write at byte {good:,}" if size > good else ""
            assert cut in journal.repair_note
            assert bool(cut) == bool(journal.repair_note)
            if size - good in {0, 1, 48}:  # the same rows between two borders
                journal.append(rows(journal.end, 2))
                served(journal)


def test_the_session_of_a_journal_is_read_beside_who_has_it_open(tmp_path: Path) -> None:
    """From the newest segment alone, which has all that was before; a place that is none has no session."""
    assert session_of(tmp_path / "none") == session_of(Path(__file__)) == {}
    with opened(tmp_path, SMALL) as journal:
        assert session_of(tmp_path) == {}
        journal.set_session({"a": 1})
        fill(journal, 200)
        assert len(segments(tmp_path)) > 2
        segments(tmp_path)[0].write_bytes(b"spoilt")
        assert session_of(tmp_path) == {"a": 1}
        journal.set_session({"a": 2})
        fill(journal, 2)
        assert session_of(tmp_path) == {"a": 2}
        journal.set_session({})
        assert session_of(tmp_path) == {}


def test_flipped_bits_of_the_last_segment(memory_path: Path) -> None:
    last = abandoned(memory_path)
    content, frames, files = last.read_bytes(), layout(last), files_of(memory_path)
    headers = [position + at for position, _ in (frames[3], frames[-1]) for at in range(48)]
    bits = {(position, position * 5 % 8) for position in (*range(0, len(content), 23), *headers)}
    for position, bit in sorted(bits):
        flipped = bytearray(content)
        flipped[position] ^= 1 << bit
        last.write_bytes(flipped)
        at = max(number for number, (start, _) in enumerate(frames) if start <= position)
        if at < len(frames) - 1:  # what lies before rows is durable
            for opening in (opened, read_state):
                with pytest.raises(JournalError, match=rf"{last.name}.*\[TL-J0[59]\]"):
                    opening(memory_path)
            assert last.read_bytes() == flipped  # nothing was changed
            continue
        with opened(memory_path) as journal:
            assert f": cut {len(content) - frames[at][0]:,} bytes" in journal.repair_note
            assert journal.end == frames[at][1].first_offset
            if position % 64 == 0:
                served(journal)
        put_back(files, memory_path)


def test_random_flips_in_sealed_segments_are_never_served(memory_path: Path) -> None:
    journal = opened(memory_path / "whole", SMALL)
    for group in (1, 9, 30, 2, 60, 3) * 3:
        fill(journal, group, group=group)
    journal.close()
    sealed = segments(memory_path / "whole")[:-1]
    assert len(sealed) >= 3
    chance = random.Random(11)
    for _ in range(60):
        path = chance.choice(sealed)
        content = bytearray(path.read_bytes())
        at = chance.randrange(len(content))
        content[at] ^= 1 << chance.randrange(8)
        before, first = path.read_bytes(), int(path.name[:20])
        path.write_bytes(content)
        with pytest.raises(JournalError) as caught, opened(memory_path / "whole", SMALL) as journal:  # noqa: PT012
            assert len(served(journal, 0, first)) == first  # what is before the damage
            served(journal)
        assert caught.value.code in {"TL-J05", "TL-J09"}
        assert path.name in str(caught.value)
        path.write_bytes(before)


def sealed(directory: Path) -> list[Path]:
    """The segments of a journal that was closed."""
    with opened(directory, SMALL) as journal:
        fill(journal, 200, group=10)
    return segments(directory)


@pytest.mark.parametrize("which", ["front", "middle"])
def test_a_missing_segment_is_damage(tmp_path: Path, which: str) -> None:
    sealed(tmp_path)[0 if which == "front" else 2].unlink()
    with pytest.raises(JournalDamaged, match=r"the segments with rows 0 to \d+ are missing.*TL-J05"):
        opened(tmp_path, SMALL)


def test_segments_that_come_back_after_their_removal_are_removed_again(tmp_path: Path) -> None:
    journal = opened(tmp_path, SMALL)
    fill(journal, 200, group=10)
    kept = {path: path.read_bytes() for path in segments(tmp_path)[:3]}
    journal.commit("spark", 200)
    journal.close()
    for path in [*kept][:2]:  # the third stays away: a hole, as after a power failure
        path.write_bytes(kept[path])
    unfinished = segments(tmp_path)[-1].with_suffix(".tmp")
    unfinished.write_bytes(b"half a segment")
    with opened(tmp_path, SMALL) as journal:
        assert not any(path.exists() for path in (*kept, unfinished))
        served(journal)


def frame_bytes(kind: int, first_offset: int = 0, *, flags: int = 0, **content: Any) -> bytes:
    """Return a frame, also of a kind or with flags that only another version writes."""
    frame = encode_frame(FrameKind(2), epoch=1, first_offset=first_offset, durable_bytes=0, **content)
    data = bytearray(b"".join(map(bytes, frame.buffers)))
    data[5:7] = kind, flags
    data[44:48] = crc32c(data[48:], crc32c(data[:44])).to_bytes(4, "little")
    return bytes(data)


def expect_unchanged(directory: Path, content: bytes, error: str) -> None:
    last = segments(directory)[-1]
    last.write_bytes(content)
    with pytest.raises(JournalError, match=error):
        opened(directory)
    assert last.read_bytes() == content


UNKNOWN = "which this Towline doesn't know.*TL-J09"


@pytest.mark.parametrize(
    ("frame", "error"),
    [
        (frame_bytes(0, 3, payload=b"?"), f"has a frame of kind 0, .*{UNKNOWN}"),
        (frame_bytes(77, 3, payload=b"?"), f"has a frame of kind 77, .*{UNKNOWN}"),
        (frame_bytes(2, 3, payload=b"{}", flags=1), f"kind 2, flags 1, {UNKNOWN}"),
        (
            frame_bytes(2, 3, rows=1, section=b'{"ids":[1]}', payload=rows(3, 1).serialize()),
            f"has a frame with ids, {UNKNOWN}",
        ),
        (frame_bytes(2, 3, section=b"{"), "has a frame whose content is not JSON.*TL-J09"),
        (frame_bytes(2, 3, section=b"[]"), "is not a JSON object.*TL-J09"),
        (frame_bytes(2, 5, payload=b"{}"), "rows 3 to 5 are missing between two frames.*TL-J05"),
        (
            frame_bytes(2, 3, section=b'{"consumers":{"spark":4},"floor":0}'),
            "rows were committed that are not there; the last one is 3.*TL-J05",
        ),
    ],
)
def test_a_last_frame_that_this_version_does_not_write_is_an_error(tmp_path: Path, frame: bytes, error: str) -> None:
    journal = opened(tmp_path)
    fill(journal, 3)
    crash(journal)
    expect_unchanged(tmp_path, segments(tmp_path)[-1].read_bytes() + frame, error)


READS = r"reads format 3\. Open it .*TL-J09"


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"", "is only 0 bytes long.*TL-J05"),
        (b"x" * 500, "which was durable, is damaged.*TL-J05"),
        (frame_bytes(2, payload=b"{}"), "starts with a frame of kind 2 instead of a snapshot.*TL-J09"),
        (frame_bytes(1, payload=b"{"), "has a frame whose content is not JSON.*TL-J09"),
        (frame_bytes(1, payload=b"[]"), "is not a JSON object.*TL-J09"),
        (frame_bytes(1, payload=b'{"format":1}'), f"format 1, of Towline before 0.2.0rc1; this one, .*, {READS}"),
        (frame_bytes(1, payload=b'{"format":4,"towline":"0.9.1"}'), f"format 4, of Towline 0.9.1; .*, {READS}"),
        *(
            (
                b"TWLJ" + bytes([other]).ljust(60, b"x"),
                rf"frames of version {other}; this Towline, {version()}, reads version 1\. Open it .*TL-J09",
            )
            for other in (0, 2)
        ),
    ],
)
def test_a_segment_without_a_snapshot_of_this_version_is_an_error(tmp_path: Path, content: bytes, error: str) -> None:
    opened(tmp_path).close()
    expect_unchanged(tmp_path, content, error)


def test_fewer_rows_than_the_next_segment_says_are_never_served(tmp_path: Path) -> None:
    """The file has its size and every frame of it is whole; but the last one is another."""
    path = sealed(tmp_path)[1]
    position, header = layout(path)[-1]
    with opened(tmp_path, SMALL) as journal:
        for kind in (77, 2):
            other = frame_bytes(kind, header.first_offset, payload=bytes(header.size - 48))
            path.write_bytes(path.read_bytes()[:position] + other)
            if kind == 77:
                with pytest.raises(JournalError, match=r"a frame of kind 77, which this Towline doesn't know.*TL-J09"):
                    served(journal, header.first_offset - 1, header.end)
        lost = rf"rows {header.first_offset:,} to {header.end:,} are missing at its end.*TL-J05"
        with pytest.raises(JournalDamaged, match=lost):
            served(journal, header.first_offset - 1, header.end)
        with pytest.raises(JournalDamaged, match=rf"row {header.first_offset:,} is missing in its frames.*TL-J05"):
            served(journal, header.first_offset, header.end)
        path.write_bytes(path.read_bytes()[:position])
        with pytest.raises(JournalDamaged, match=r"is shorter than its [\d,]+ durable bytes.*TL-J05"):
            served(journal, header.first_offset - 1, header.end)


def test_a_segment_of_another_journal_is_an_error(tmp_path: Path) -> None:
    ours, theirs = sealed(tmp_path / "a"), sealed(tmp_path / "b")
    shutil.copy(theirs[1], ours[1])
    with pytest.raises(JournalError, match=r"belongs to journal \w{12}, the next one to \w{12}.*TL-J09"):
        opened(tmp_path / "a", SMALL)


@pytest.mark.parametrize("newest", ["of the same number", "that begins before the one below it"])
def test_segments_of_two_histories_are_an_error(tmp_path: Path, newest: str) -> None:
    """A copy went on beside the original, and somebody put files of both together."""
    opened(tmp_path / "a", SMALL).close()
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    for name, size in (("a", 20), ("b", 1000)):
        with opened(tmp_path / name, SMALL) as journal:
            fill(journal, 60, size=size)
    ours, theirs = ([*segments(tmp_path / name)] for name in ("a", "b"))
    added = theirs[3] if newest == "of the same number" else theirs[4]
    for path in ours[4:]:
        path.unlink()
    assert int(added.name[:20]) < int(ours[3].name[:20])
    shutil.copy(added, tmp_path / "a")
    with pytest.raises(JournalError, match=r"can't both belong to one journal.*TL-J09"):
        opened(tmp_path / "a", SMALL)


def test_a_segment_under_a_wrong_name_is_an_error(tmp_path: Path) -> None:
    opened(tmp_path).close()
    segments(tmp_path)[0].rename(tmp_path / f"{5:020d}-{1:010d}.seg")
    with pytest.raises(JournalError, match=r"holds segment 1 from row 0, which is not its name.*TL-J09"):
        opened(tmp_path)


def test_watermarks_that_were_never_durable_may_be_cut_though_later_ones_are_whole(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    fill(journal, 5)
    for upto in (1, 2, 3):
        journal.commit("spark", upto)
    crash(journal)
    last = segments(tmp_path)[-1]
    watermarks = [(position, header) for position, header in layout(last) if position and not header.rows]
    content = bytearray(last.read_bytes())
    at, header = watermarks[1]
    content[at : at + header.size] = bytes(header.size)  # the disk wrote the third watermark, but not the second
    last.write_bytes(content)
    with opened(tmp_path) as journal:
        assert journal.end == 5
        assert journal.consumers == {"spark": 1}


def test_a_shortened_sealed_segment_is_damage(tmp_path: Path) -> None:
    path = sealed(tmp_path)[1]
    frame = layout(path)[-1][0]
    path.write_bytes(path.read_bytes()[:frame])  # at a frame's border: only the next snapshot can tell
    with pytest.raises(JournalDamaged, match=rf"is {frame:,} bytes long, but [\d,]+ were durable"):
        opened(tmp_path, SMALL)
