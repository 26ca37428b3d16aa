"""What Spark keeps in a query's checkpoint, and making it durable: Spark itself never calls fsync on a local disk.

    offsets/N   written before batch N runs: what it holds
    commits/N   written after batch N: it is done
    metadata    the query's id, written once
    sources/    where Spark's Kafka source began
    state/      what a stateful query remembers after each batch, written by its tasks (``dedupe``)

A batch whose records are in Kafka must never be forgotten, and rows whose batch is not surely in the commit log must
never be removed [I5]. So `sync` is called before the tasks of a batch (offsets/N) and before the inbox is cut
(commits/N).

On object stores and HDFS everything here does nothing: an object that was stored is durable, and a file of HDFS that
was closed is at every replica. Nor can it be read there, so what looks at the checkpoint (`offsets_hash` and others)
finds none. With a cluster the driver alone writes it, but for state/, which each executor must see.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import re
import zlib
from collections.abc import Iterable, Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from towline import files
from towline.errors import JournalDamaged, JournalError
from towline.files import check_owner

#: What a sink keeps beside Spark's own files (`towline.spark.tally`).
SINK_NOTE: Final = "towline.totals"

_OFFSETS: Final = "offsets"
_COMMITS: Final = "commits"
_METADATA: Final = "metadata"
_STATE: Final = "state"
_SOURCES: Final = "sources"

#: A query that starts again reads the two newest entries of the offset log (MicroBatchExecution.populateStartOffsets).
_READ_AT_START: Final = 2

#: A location with the name of a file system.
_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(.*)", re.DOTALL)

#: ``crc\0`` and the bytes per checksum, then one CRC-32 per chunk (org.apache.hadoop.fs.ChecksumFileSystem).
_CRC_HEAD: Final = b"crc\0"


#: What this process has made durable, by directory: the content of ``metadata`` (a checkpoint that was removed and made
#: again is another one), the newest batch of each log, and the version of the sink's note, which each batch replaces.
#: `Checkpoint` objects come and go with every batch, the process stays.
_SYNCED: dict[Path, dict[str, object]] = {}
#: Where a checkpoint is that no file system of this machine has: nothing can be there.
_ELSEWHERE: Final = Path(os.devnull, "elsewhere")


def kafka_offsets_in(values: Iterable[Any]) -> dict[str, dict[str, int]]:
    """Offsets by topic and partition, of those source offsets that are of Spark's Kafka source."""
    found: dict[str, dict[str, int]] = {}
    for value in values:
        if isinstance(value, dict) and "gateways" not in value and all(isinstance(one, dict) for one in value.values()):
            found |= value
    return found


class Checkpoint:
    """The checkpoint directory of one streaming query.

    Args:
        location: As the query's ``checkpointLocation`` has it: a path, or a URI such as ``file:/ck``, ``hdfs://...``.
    """

    def __init__(self, location: str) -> None:
        self._location = location

    @property
    def _path(self) -> Path:
        """The directory, where Spark leaves it unsynced; asked each time: the query may make it in a moment.

        A path without a scheme belongs to Hadoop's ``fs.defaultFS``; it is on this machine when it is there. Hadoop's
        paths know no percent signs, so nothing is decoded.
        """
        match = _SCHEME.match(self._location)
        if match is None:
            there = bool(self._location) and Path(self._location).is_dir()
            return Path(self._location).absolute() if there else _ELSEWHERE
        if match[1].lower() != "file":
            return _ELSEWHERE
        return Path(re.sub(r"^//[^/]*(?=/)", "", match[2])).absolute()

    def last_offsets_batch(self) -> int | None:
        """The newest batch in the offset log; None when there is none, or the checkpoint is not local."""
        return max(self._batches(_OFFSETS), default=None)

    def last_commit_batch(self) -> int | None:
        """The newest batch in the commit log; None when there is none, or the checkpoint is not local."""
        return max(self._batches(_COMMITS), default=None)

    def committed(self, batch: int) -> bool:
        """Whether a batch is in the commit log, which has the newest ones; False where the checkpoint is not local."""
        return (self._path / _COMMITS / str(batch)).exists()

    def offsets_hash(self, batch: int) -> str | None:
        """SHA-256, as hex digits, of what the offset log says about a batch; None where that can't be read.

        Spark writes an entry once and reads it back for a replay, so the same batch of the same checkpoint always has
        the same hash, and the same number in a restored older checkpoint another one.
        """
        content = self._file(_OFFSETS, str(batch))
        return None if content is None else hashlib.sha256(content).hexdigest()

    @property
    def query(self) -> str:
        """Id of the query that it belongs to; "" where there is none."""
        try:
            return str(json.loads(self._file(_METADATA) or b"")["id"])
        except (ValueError, KeyError, TypeError):
            return ""

    @property
    def place(self) -> str:
        """A name for where it is, the same for each way to write that, if it is on another file system; else ""."""
        uri = urlsplit(self._location)
        if not _SCHEME.match(self._location) or uri.scheme == "file":
            return ""
        path = re.sub("/+", "/", uri.path).rstrip("/")
        return hashlib.sha256(f"{uri.scheme}://{uri.netloc.lower()}{path}".encode()).hexdigest()[:32]

    def offsets(self, batch: int | None) -> list[Any]:
        """What the offset log says of each source in a batch, as JSON values; empty where that can't be read."""
        return [value for value in self._entry(batch)[2:] if value is not None]

    def first_offsets(self) -> Any:
        """Where a query of Spark's Kafka source began, a JSON value; None where that can't be read."""
        content = self._file(_SOURCES, "0", "0") or b""
        with contextlib.suppress(ValueError):
            # A zero byte, the version and the offsets (KafkaSourceInitialOffsetWriter).
            return json.loads(content.lstrip(b"\0").partition(b"\n")[2])
        return None

    def _entry(self, batch: int | None) -> list[Any]:
        return _lines(self._file(_OFFSETS, str(batch)) or b"")

    def ends_at(self, offset: object, *, done: bool) -> bool:
        """Whether its newest batch, of the commit log if `done`, else of the offset log, ends at this source offset.

        False where that can't be read.
        """
        return offset in self.offsets(self.last_commit_batch() if done else self.last_offsets_batch())

    def watermark_ms(self, offset: object) -> int | None:
        """The watermark of the newest batch, if that ends at this source offset, in ms since 1970; else None."""
        if not self.ends_at(offset, done=False):
            return None
        with contextlib.suppress(ValueError, KeyError, IndexError, TypeError):
            return int(self._entry(self.last_offsets_batch())[1]["batchWatermarkMs"])
        return None

    def newest_offsets(self) -> list[Any]:
        """What the newest batch that was planned says of each source, as JSON values; empty where there is none.

        A newest entry that a power failure tore is a batch that never ran: the one before it counts.
        """
        for batch in reversed(self._batches(_OFFSETS)):
            if not _is_torn(self._path / _OFFSETS / str(batch)) and (offsets := self.offsets(batch)):
                return offsets
        return []

    def note(self, name: str) -> str | None:
        """What `keep_note` was given last under a name; None for nothing, and where the checkpoint is not local.

        Raises:
            OSError: The file can't be read.
        """
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return (self._path / name).read_text(encoding="utf-8")
        return None

    def keep_note(self, name: str, text: str, *, synced: bool = True) -> None:
        """Keep a file beside Spark's own; nothing where the checkpoint is not local.

        If not `synced`, a power failure may leave an empty file.

        Raises:
            JournalError: TL-J20, the disk did not take it.
        """
        path = self._path
        if path == _ELSEWHERE:
            return
        with self._durable():
            if synced:
                files.replace_durably(path / name, text)
            else:
                files.replace(path / name, text, synced=False)

    def sync(self) -> None:
        """Make all that Spark has written of both logs durable; what this process synced before costs nothing.

        Raises:
            ConfigError: TL-J23, it belongs to another user.
            JournalError: TL-J20, the disk did not take it: the batch must not run, the inbox must not be cut.
        """
        path = self._path
        if path == _ELSEWHERE:
            return
        with self._durable():
            synced = _SYNCED.pop(path, {})
            if synced.get(_METADATA) != (metadata := _content(path / _METADATA)):
                check_owner(path)
                _rewrite(path / _METADATA)
                for directory in (path, *path.parents):  # Spark may have made any of them just now
                    with contextlib.suppress(PermissionError):  # one that we can't even list is none that we made
                        files.sync_directory(directory)
                synced = {_METADATA: metadata}
            self._sync_log(_OFFSETS, synced)
            if self.last_commit_batch() != synced.get(_COMMITS):
                self.sync_state()
            self._sync_log(_COMMITS, synced)
            if (note := files.version(path / SINK_NOTE)) != synced.get(SINK_NOTE, ()):
                _sync_file(path / SINK_NOTE)
                files.sync_directory(path)
                synced[SINK_NOTE] = note
            _SYNCED[path] = synced

    @property
    def form(self) -> str:
        """First line of the newest entry of the offset log, its version as Spark writes it; "" where there is none."""
        content = self._file(_OFFSETS, str(self.last_offsets_batch())) or b""
        return content.partition(b"\n")[0].decode(errors="replace")

    @property
    def stateful(self) -> bool:
        """Whether it holds the state of a stateful query; False where the checkpoint is not local."""
        with contextlib.suppress(OSError):
            return any((self._path / _STATE).iterdir())
        return False

    def sync_state(self) -> None:
        """Make the state of a stateful query durable; nothing to do for others.

        Call it between the tasks of a batch and its entry in the commit log: a query whose commit log is ahead of its
        state does not start. The tasks write hundreds of small files, so their file system is synced as a whole.

        Raises:
            JournalError: TL-J20, the disk did not take it: the batch must not be committed.
        """
        if self.stateful:
            with self._durable():
                _sync_file_system(self._path)

    def mend(self) -> list[str]:
        """Remove newest entries that a power failure tore; call it before the query starts, with no other one running.

        `sync` comes before the tasks of a batch, so a torn entry of the offset log is a batch that never ran, and one
        of the commit log is a batch that runs again. Spark would refuse to start with either.

        Returns:
            A line for each entry removed.

        Raises:
            JournalDamaged: TL-J21, an entry is torn that was durable; nothing was changed.
        """
        torn = self._torn()
        for path in torn:
            for name in (path, _checksums(path)):
                with contextlib.suppress(FileNotFoundError):
                    name.unlink()
        for directory in {path.parent for path in torn}:
            files.sync_directory(directory)
        return [f"{path}: removed, a power failure had torn it" for path in torn]

    # -- helpers ---------------------------------------------------------------------------------------------------

    def _file(self, *names: str) -> bytes | None:
        """Of a file; None where there is none, it can't be read, or the checkpoint is not local."""
        with contextlib.suppress(OSError):
            return self._path.joinpath(*names).read_bytes()
        return None

    def _batches(self, log: str) -> list[int]:
        with contextlib.suppress(OSError):
            return sorted(int(entry.name) for entry in (self._path / log).iterdir() if entry.name.isdecimal())
        return []

    @contextlib.contextmanager
    def _durable(self) -> Iterator[None]:
        """Whatever the disk does not take is TL-J20."""
        try:
            yield
        except OSError as error:
            raise JournalError(
                "TL-J20",
                error.filename or self._location,
                f"Spark's checkpoint can't be made durable ({error.strerror}), so a power failure could undo a batch",
                "The batch is not done and nothing was removed. Check this disk, then start the query again.",
            ) from error

    def _sync_log(self, log: str, synced: dict[str, object]) -> None:
        batches, before, directory = self._batches(log), synced.get(log), self._path / log
        if not batches or batches[-1] == before:
            return
        if not isinstance(before, int):
            for batch in batches[-_READ_AT_START:]:
                _rewrite(directory / str(batch))
        else:
            for batch in [batch for batch in batches if batch > before]:
                _sync_file(directory / str(batch))
                _sync_file(_checksums(directory / str(batch)))
        files.sync_directory(directory)
        synced[log] = batches[-1]

    def _torn(self) -> list[Path]:
        """The entries to remove, newest first."""
        metadata = self._path / _METADATA
        offsets, commits = (
            [self._path / log / str(batch) for batch in reversed(self._batches(log))] for log in (_OFFSETS, _COMMITS)
        )
        if offsets and _is_torn(metadata):
            if commits:
                raise _damaged(metadata, commits[0].name)
            return [*offsets, metadata]
        torn = [*takewhile(_is_torn, commits)]
        done = commits[len(torn)].name if len(torn) < len(commits) else "-1"
        for entry in takewhile(_is_torn, offsets):
            if int(entry.name) <= int(done):
                raise _damaged(entry, done)
            torn.append(entry)
        return torn


def _damaged(path: Path, done: str) -> JournalDamaged:
    return JournalDamaged(
        "TL-J21",
        str(path),
        f"this part of the checkpoint no longer reads as Spark wrote it, though batch {done} is done",
        "Restore the checkpoint together with the gateway's state directory, or start with a new checkpoint directory: "
        "what waits in the inbox is then carried again.",
    )


def _checksums(path: Path) -> Path:
    return path.with_name(f".{path.name}.crc")


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""


def _is_torn(path: Path) -> bool:
    """Whether a file of the checkpoint is not all there: as its checksums say, or in its form."""
    try:
        content, sums = path.read_bytes(), _content(_checksums(path))
        if _checksums(path).exists() and sums != _summed(content, sums):
            return True
        if path.name == _METADATA:
            return not isinstance(json.loads(content), dict)
    except (OSError, ValueError):
        return True
    return len(_lines(content)) < (3 if path.parent.name == _OFFSETS else 2)


def _lines(content: bytes) -> list[Any]:
    """An entry of a log: version, the query's facts, in the offset log one value a source (None for ``-``); or []."""
    # Not `splitlines`: a JSON string may hold other separators of lines.
    version, *lines = content.decode(errors="replace").split("\n")
    with contextlib.suppress(ValueError):
        if re.fullmatch(r"v\d+", version):
            return [version, *(None if line == "-" else json.loads(line) for line in lines)]
    return []


def _summed(content: bytes, sums: bytes) -> bytes:
    """The checksum file that `content` would have, with the chunk size that `sums` names."""
    size = int.from_bytes(sums[4:8], "big") or 512
    chunks = [content[at : at + size] for at in range(0, len(content), size)]
    return _CRC_HEAD + size.to_bytes(4, "big") + b"".join(zlib.crc32(chunk).to_bytes(4, "big") for chunk in chunks)


def _rewrite(path: Path) -> None:
    """Write a file and its checksums anew, synced, under the same name.

    A process that starts can't know whether a sync failed before: the kernel reports that once, keeps the pages, and
    answers later syncs with "ok" [I6]. So what was there already is not synced, but written again.
    """
    for one in (path, _checksums(path)):
        try:
            content, mode = one.read_bytes(), one.stat().st_mode & 0o7777
        except FileNotFoundError:
            continue
        files.replace(one, content, mode=mode)


def _sync_file(path: Path) -> None:
    """Make a file's content durable; one that Spark has removed meanwhile needs it no more."""
    with contextlib.suppress(FileNotFoundError):
        files.sync_file(path)


def _sync_file_system(path: Path) -> None:
    """Make everything on the file system of a directory durable; reports errors since Linux 5.8 (syncfs(2))."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(descriptor):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))
    finally:
        os.close(descriptor)
