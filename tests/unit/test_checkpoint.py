"""Spark's checkpoint made durable, as Spark 4.3 writes it on a local disk."""

from __future__ import annotations

import errno
import json
import os
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from towline import checkpoint
from towline.checkpoint import Checkpoint
from towline.errors import JournalDamaged, JournalError

OFFSETS = 'v1\n{{"batchWatermarkMs":0}}\n{{"offset":{0}}}'
COMMIT = 'v1\n{"nextBatchWatermarkMs":0}'


def put(path: Path, text: str) -> None:
    """Write a file and its checksums as Hadoop does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = text.encode()
    path.write_bytes(content)
    sums = b"".join(
        zlib.crc32(content[at : at + 512]).to_bytes(4, "big")  # Hadoop's DataChecksum.Type.CRC32
        for at in range(0, len(content), 512)
    )
    path.with_name(f".{path.name}.crc").write_bytes(b"crc\0" + (512).to_bytes(4, "big") + sums)


class Spark:
    """Writes a checkpoint as the query's thread does."""

    def __init__(self, path: Path) -> None:
        self.path = path
        put(path / "metadata", json.dumps({"id": str(path)}))
        (path / "offsets").mkdir()
        (path / "commits").mkdir()

    def plan(self, batch: int) -> None:
        put(self.path / "offsets" / str(batch), OFFSETS.format(batch))

    def commit(self, batch: int) -> None:
        put(self.path / "commits" / str(batch), COMMIT)

    def run(self, *batches: int) -> None:
        for batch in batches:
            self.plan(batch)
            self.commit(batch)

    def names(self, log: str) -> list[str]:
        return sorted(path.name for path in (self.path / log).iterdir())


@pytest.fixture
def spark(tmp_path: Path) -> Spark:
    return Spark(tmp_path / "above" / "a%20ck")  # Hadoop's Path takes percent signs as they are


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The paths of every fsync, in order; a process that has synced nothing yet."""
    monkeypatch.setattr(checkpoint, "_SYNCED_FILES", {})
    seen: list[Path] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        seen.append(Path(f"/proc/self/fd/{descriptor}").readlink())
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    return seen


def failing(monkeypatch: pytest.MonkeyPatch, fails: Callable[[Path], bool]) -> None:
    def fsync(descriptor: int) -> None:
        if fails(Path(f"/proc/self/fd/{descriptor}").readlink()):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fsync)


# -- where it is -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["{}", "file:{}", "file://{}", "FILE://localhost{}"])
def test_a_path_of_this_machine_is_local(spark: Spark, form: str) -> None:
    spark.run(0, 1)
    assert Checkpoint(form.format(spark.path)).last_committed_batch() == 1


@pytest.mark.parametrize("location", ["hdfs://n/ck", "s3a://b/ck", "dbfs:/ck", "/not/there", ""])
def test_elsewhere_everything_is_a_no_op(location: str) -> None:
    found = Checkpoint(location)
    found.sync()
    assert (found.last_planned_batch(), found.last_committed_batch(), found.has_state) == (None, None, False)
    found.write_note("x", "y")
    found.sync_state()
    assert (found.read_note("x"), found.has_commit(0), found.newest_offsets()) == (None, False, [])
    assert (found.offsets_hash(0), found.repair()) == (None, [])


# -- what it says ----------------------------------------------------------------------------------------------------


def test_the_hash_tells_batches_apart_and_stays(spark: Spark) -> None:
    spark.run(0)
    spark.plan(1)
    found = Checkpoint(str(spark.path))
    before = [found.offsets_hash(batch) for batch in range(3)]
    found.sync()
    assert before == [found.offsets_hash(batch) for batch in range(3)]
    assert len(set(before)) == 3


# -- syncing ---------------------------------------------------------------------------------------------------------


def test_a_process_that_starts_trusts_nothing(spark: Spark, synced: list[Path]) -> None:
    """The kernel reports a failed sync once: entries that were there are written anew, and every directory synced."""
    spark.run(0, 1)
    spark.plan(2)
    old = {path: path.stat().st_ino for path in spark.path.rglob("*") if path.is_file()}
    content = {path: path.read_bytes() for path in old}
    Checkpoint(str(spark.path)).sync()
    again = {path.relative_to(spark.path).as_posix() for path, inode in old.items() if path.stat().st_ino != inode}
    assert again == {
        *("metadata", ".metadata.crc"),
        *("offsets/1", "offsets/.1.crc", "offsets/2", "offsets/.2.crc"),
        *("commits/0", "commits/.0.crc", "commits/1", "commits/.1.crc"),
    }
    assert {path: path.read_bytes() for path in content} == content
    assert {spark.path / "offsets", spark.path / "commits", spark.path, *spark.path.parents} <= set(synced)
    assert set(spark.path.rglob("*")) == {*old, spark.path / "offsets", spark.path / "commits"}


def test_each_batch_syncs_its_new_entries_and_nothing_else(spark: Spark, synced: list[Path]) -> None:
    spark.run(0)
    Checkpoint(str(spark.path)).sync()
    put(spark.path / "metadata", json.dumps({"id": "made again, another one"}))
    synced.clear()
    Checkpoint(str(spark.path)).sync()
    assert spark.path / "offsets" in synced
    synced.clear()
    Checkpoint(str(spark.path)).sync()
    assert synced == []
    spark.plan(1)
    Checkpoint(str(spark.path)).sync()
    offsets, commits = spark.path / "offsets", spark.path / "commits"
    assert synced == [offsets / "1", offsets / ".1.crc", offsets]
    synced.clear()
    spark.commit(1)
    spark.run(2)
    Checkpoint(str(spark.path)).sync()
    assert synced == [
        *(offsets / "2", offsets / ".2.crc", offsets),
        *(commits / "1", commits / ".1.crc", commits / "2", commits / ".2.crc", commits),
    ]


def test_state_is_synced_before_the_commit_that_needs_it(
    spark: Spark, synced: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "_sync_file_system", lambda _: synced.append(Path("all")))
    spark.run(0)
    Checkpoint(str(spark.path)).sync()
    Checkpoint(str(spark.path)).sync_state()
    assert Path("all") not in synced  # there is none
    (spark.path / "state" / "0" / "0").mkdir(parents=True)
    spark.run(1)
    synced.clear()
    Checkpoint(str(spark.path)).sync()
    assert synced.index(Path("all")) < synced.index(spark.path / "commits" / "1")
    synced.clear()
    Checkpoint(str(spark.path)).sync_state()
    assert synced == [Path("all")]


def test_a_file_system_that_fails_to_sync(spark: Spark, monkeypatch: pytest.MonkeyPatch) -> None:
    (spark.path / "state" / "0").mkdir(parents=True)
    Checkpoint(str(spark.path)).sync_state()

    def broken(path: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    monkeypatch.setattr(checkpoint, "_sync_file_system", broken)
    with pytest.raises(JournalError, match="TL-J20"):
        Checkpoint(str(spark.path)).sync_state()


@pytest.mark.parametrize("which", ["offsets", "commits", "1", "a%20ck", "above"])
def test_a_failed_sync_is_told_and_not_believed_later(
    spark: Spark, synced: list[Path], monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    spark.run(0)
    if which == "1":
        Checkpoint(str(spark.path)).sync()
        spark.plan(1)
    with monkeypatch.context() as broken:
        failing(broken, lambda path: path.name == which)
        with pytest.raises(JournalError, match=r"can't be made durable \(Input/output error\).*\[TL-J20\]"):
            Checkpoint(str(spark.path)).sync()
    synced.clear()
    inodes = {path: path.stat().st_ino for path in spark.path.glob("offsets/[0-9]")}
    Checkpoint(str(spark.path)).sync()
    assert synced
    assert all(path.stat().st_ino != inode for path, inode in inodes.items())


# -- after a power failure -------------------------------------------------------------------------------------------

TEARS: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "half": lambda content: content[: len(content) // 2],
    "no last line": lambda content: content.rpartition(b"\n")[0],
    "zeros": lambda content: bytes(len(content)),
    "other bytes": lambda content: content.replace(b"0", b"1"),
}


def tear(path: Path, how: str) -> None:
    """Leave of a file what a power failure may leave."""
    if how in TEARS:
        path.write_bytes(TEARS[how](path.read_bytes()))
    else:
        path.with_name(f".{path.name}.crc").write_bytes(b"")


@pytest.mark.parametrize("how", [*TEARS, "empty checksums"])
def test_torn_newest_entries_go(spark: Spark, how: str) -> None:
    """The batch never ran, or runs again: Spark reads the entry before."""
    spark.run(0, 1)
    spark.run(2)
    tear(spark.path / "offsets" / "2", how)
    tear(spark.path / "commits" / "2", how)
    told = Checkpoint(str(spark.path)).repair()
    assert [line.split(":")[0] for line in told] == [str(spark.path / log / "2") for log in ("commits", "offsets")]
    assert spark.names("offsets") == spark.names("commits") == [".0.crc", ".1.crc", "0", "1"]


@pytest.mark.parametrize("offset", ["5", '"a"', "[1]"])
def test_an_offset_of_another_source_is_any_json(spark: Spark, offset: str) -> None:
    """A query may read more than MQTT; Spark's rate source has plain numbers, for example."""
    spark.run(0)
    put(spark.path / "offsets" / "1", OFFSETS.format(1) + f"\n{offset}")
    assert Checkpoint(str(spark.path)).repair() == []


def test_an_entry_without_checksums_is_judged_by_its_form(spark: Spark) -> None:
    spark.run(0, 1)
    for path in spark.path.rglob("*.crc"):
        path.unlink()
    (spark.path / "offsets" / "2").write_text('v1\n{"batchWatermarkMs":0}')
    assert len(Checkpoint(str(spark.path)).repair()) == 1


def test_a_durable_entry_that_is_torn_is_damage(spark: Spark) -> None:
    spark.run(0, 1)
    tear(spark.path / "offsets" / "1", "half")
    with pytest.raises(JournalDamaged, match=r"though batch 1 is done.*\[TL-J21\]"):
        Checkpoint(str(spark.path)).repair()
    assert spark.names("offsets") == [".0.crc", ".1.crc", "0", "1"]


def test_torn_metadata_of_a_query_that_never_ran(spark: Spark) -> None:
    spark.plan(0)
    tear(spark.path / "metadata", "empty")
    assert len(Checkpoint(str(spark.path)).repair()) == 2
    assert sorted(path.name for path in spark.path.iterdir()) == ["commits", "offsets"]
    assert spark.names("offsets") == []


def test_torn_metadata_of_a_query_that_ran_is_damage(spark: Spark) -> None:
    spark.run(0)
    (spark.path / "metadata").unlink()
    with pytest.raises(JournalDamaged, match="batch 0 is done"):
        Checkpoint(str(spark.path)).repair()


def test_it_knows_the_place_where_its_query_is(spark: Spark) -> None:
    found = Checkpoint(str(spark.path))
    assert not found.ends_at({"offset": 0}, committed=True)
    spark.run(0, 1)
    spark.plan(2)
    assert [n for n in range(4) if found.ends_at({"offset": n}, committed=True)] == [1]
    assert [n for n in range(4) if found.ends_at({"offset": n}, committed=False)] == [2]


def test_a_line_of_the_offset_log_ends_at_a_line_feed_alone(tmp_path: Path) -> None:
    """A topic or a name in it may hold other separators, which Spark writes as they are."""
    offset = {"t\u2028\x85": {"0": 5}}
    (tmp_path / "offsets").mkdir()
    entry = "v1\n{}\n" + json.dumps(offset, ensure_ascii=False)
    (tmp_path / "offsets" / "0").write_text(entry, encoding="utf-8")
    checkpoint = Checkpoint(str(tmp_path))
    assert checkpoint.offsets(0) == checkpoint.newest_offsets() == [offset]
    assert checkpoint.ends_at(offset, committed=False)


def test_when_a_batch_was_committed(spark: Spark) -> None:
    """A file's time is that of the commit, or later."""
    spark.run(3, 4)
    spark.plan(5)
    os.utime(spark.path / "commits" / "4", (0, 1_700_000_000.5))
    found = Checkpoint(str(spark.path))
    assert (found.planned_batches(), Checkpoint("s3://b/ck").planned_batches()) == ([3, 4, 5], [])
    assert (found.committed_at(4), found.committed_at(5), found.committed_at(6)) == (1_700_000_000.5, None, None)
