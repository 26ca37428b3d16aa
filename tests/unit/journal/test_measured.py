"""What a journal says of its own work: syncs, bytes, and the room that is left."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from tests.unit.journal.support import ROOMY, SMALL, fill, opened
from towline.journal import Disk
from towline.timing import Histogram


class SmallDisk(Disk):
    def free(self, directory: Path) -> int:
        assert directory.is_dir()
        return 5 << 20


def test_each_sync_of_rows_is_timed(tmp_path: Path) -> None:
    with opened(tmp_path) as journal:
        before = Histogram.from_json(journal.disk_status()["syncs"]).count
        fill(journal, 30, group=3)
        told = journal.disk_status()
        assert Histogram.from_json(told["syncs"]).count == before + 10
        assert told["syncs"]["seconds"] > 0


def test_bytes_are_counted_over_segments_and_those_that_wait_alone(tmp_path: Path) -> None:
    with opened(tmp_path, SMALL) as journal:
        fill(journal, 400, group=4, size=100)
        all_of_it = journal.disk_status()
        assert all_of_it["bytes_written"] > 400 * 100
        assert all_of_it["bytes_waiting"] <= all_of_it["bytes_on_disk"]
        journal.commit("spark", 200)
        half = journal.disk_status()
        assert 0.4 < half["bytes_waiting"] / all_of_it["bytes_waiting"] < 0.6
        assert half["bytes_written"] >= all_of_it["bytes_written"]  # what was removed since is counted too
        journal.commit("spark", 400)
        assert journal.disk_status()["bytes_waiting"] == 0


def test_the_room_that_is_left_is_that_of_the_nearest_limit(tmp_path: Path) -> None:
    disk = SmallDisk()
    with opened(tmp_path / "disk", dataclasses.replace(ROOMY, min_free_bytes=1 << 20), disk) as journal:
        assert journal.disk_status()["room_left"] == 4 << 20
    with opened(tmp_path / "own", dataclasses.replace(ROOMY, max_bytes=2 << 20), disk) as journal:
        assert journal.disk_status()["room_left"] == (2 << 20) - journal.bytes_on_disk
    with opened(tmp_path / "full", dataclasses.replace(ROOMY, min_free_bytes=6 << 20), disk) as journal:
        assert journal.disk_status()["room_left"] == 0
