"""How many bytes a range of rows is, by which gateways share the limit of a batch."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.journal.support import SMALL, fill, opened
from towline.errors import JournalError


def test_a_size_is_what_locate_takes(tmp_path: Path) -> None:
    """Parts of a range are together its size, and what `locate` gives for a number of bytes is not larger."""
    with opened(tmp_path, SMALL) as journal:
        for group in (1, 1, 30, 2, 9, 1, 64, 5):
            fill(journal, group, group=group)
        for start in range(113):
            assert journal.range_bytes(start, start) == 0
            for most in (100, 1000, 5000, 1 << 30):
                end = journal.find_range_end(start, max_bytes=most)
                assert journal.range_bytes(start, end) <= most or end == start + 1
                middle = (start + end) // 2
                parts = journal.range_bytes(start, middle) + journal.range_bytes(middle, end)
                assert parts == pytest.approx(journal.range_bytes(start, end), abs=1)
        assert 0 < journal.range_bytes(0, 113) <= journal.bytes_on_disk
        with pytest.raises(JournalError, match="TL-J07"):
            journal.range_bytes(0, 114)
