"""Checkpoint directory of a Spark query: reading its logs and making them durable.

    offsets/N   offset log: written before batch N runs, the range of each source in the batch
    commits/N   commit log: written after batch N, the batch is complete
    metadata    the query's id, written once
    sources/    start offsets of Spark's Kafka source
    state/      state of a stateful query after each batch, written by its tasks (``dedupe``)

Spark itself never calls fsync on a local disk. A batch whose records are in Kafka must never be forgotten, and rows
whose batch is not surely in the commit log must never be removed [I5]. So `sync` is called before the tasks of a batch
(offsets/N) and before the inbox is truncated (commits/N).

On object stores and HDFS all functions here do nothing: a stored object is durable, and a closed file of HDFS is at
every replica. Such a checkpoint can't be read here either, so readers (`offsets_hash` and others) return None or empty.
On a cluster the driver alone writes it, except state/, which every executor must reach.
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

#: What a sink keeps beside Spark's own files (`towline.spark.sink_note`).
SINK_TOTALS: Final = "towline.totals"

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
_SYNCED_FILES: dict[Path, dict[str, object]] = {}
#: Where a checkpoint is that no file system of this machine has: nothing can be there.
_NOT_LOCAL: Final = Path(os.devnull, "elsewhere")


def kafka_offsets_in(values: Iterable[Any]) -> dict[str, dict[str, int]]:
    """Return the offsets of Spark's Kafka sources among source offsets, by topic and partition."""
    offsets: dict[str, dict[str, int]] = {}
    for value in values:
        if isinstance(value, dict) and "gateways" not in value and all(isinstance(v, dict) for v in value.values()):
            offsets |= value
    return offsets


class Checkpoint:
    """Checkpoint directory of one streaming query.

    Args:
        location: As the query's ``checkpointLocation`` has it: a path, or a URI such as ``file:/ck``, ``hdfs://...``.
    """

    def __init__(self, location: str) -> None:
        self._location = location

    @property
    def _path(self) -> Path:
        """Local directory; computed each time, since the query may create it at any moment."""
        match = _SCHEME.match(self._location)
        if match is None:  # of Hadoop's ``fs.defaultFS``: local when it exists here
            there = bool(self._location) and Path(self._location).is_dir()
            return Path(self._location).absolute() if there else _NOT_LOCAL
        if match[1].lower() != "file":
            return _NOT_LOCAL
        return Path(re.sub(r"^//[^/]*(?=/)", "", match[2])).absolute()  # Hadoop's paths have no percent encoding

    def last_planned_batch(self) -> int | None:
        """Return the newest batch in the offset log; None if there is none, or the checkpoint is not local."""
        return max(self._batches(_OFFSETS), default=None)

    def last_committed_batch(self) -> int | None:
        """Return the newest batch in the commit log; None if there is none, or the checkpoint is not local."""
        return max(self._batches(_COMMITS), default=None)

    def planned_batches(self) -> list[int]:
        """Return the batches that the offset log still has, in order; empty if the checkpoint is not local."""
        return self._batches(_OFFSETS)

    def committed_at(self, batch: int) -> float | None:
        """Return when a batch was committed at the latest, in seconds since 1970; None if that is unknown."""
        with contextlib.suppress(OSError):  # a start writes the newest entries again (`sync`), so it may be later
            return (self._path / _COMMITS / str(batch)).stat().st_mtime
        return None

    @property
    def all_committed(self) -> bool:
        """True if every planned batch is committed."""
        return self.last_planned_batch() == self.last_committed_batch()

    def has_commit(self, batch: int) -> bool:
        """Return True if the commit log still has this batch; False if the checkpoint is not local."""
        return (self._path / _COMMITS / str(batch)).exists()

    def offsets_hash(self, batch: int) -> str | None:
        """Return the SHA-256 of a batch's entry in the offset log, in hex; None if it can't be read.

        Spark writes an entry once and reads it back for a replay. So a batch of one checkpoint always has the same
        hash, and the same batch number in a restored older checkpoint has another one.
        """
        content = self._read_file(_OFFSETS, str(batch))
        return None if content is None else hashlib.sha256(content).hexdigest()

    @property
    def query_id(self) -> str:
        """Id of the query that owns the checkpoint; "" if unknown."""
        try:
            return str(json.loads(self._read_file(_METADATA) or b"")["id"])
        except (ValueError, KeyError, TypeError):
            return ""

    @property
    def location_id(self) -> str:
        """Id of a checkpoint on another file system, equal for all spellings of its URI; "" for a local one."""
        uri = urlsplit(self._location)
        if not _SCHEME.match(self._location) or uri.scheme == "file":
            return ""
        path = re.sub("/+", "/", uri.path).rstrip("/")
        return hashlib.sha256(f"{uri.scheme}://{uri.netloc.lower()}{path}".encode()).hexdigest()[:32]

    def offsets(self, batch: int | None) -> list[Any]:
        """Return the offset of each source in a batch, as JSON values; empty if the entry can't be read."""
        return [value for value in self._entry(batch)[2:] if value is not None]

    def kafka_start_offsets(self) -> Any:
        """Return the start offsets of Spark's Kafka source, a JSON value; None if they can't be read."""
        content = self._read_file(_SOURCES, "0", "0") or b""
        with contextlib.suppress(ValueError):
            # A zero byte, the version and the offsets (KafkaSourceInitialOffsetWriter).
            return json.loads(content.lstrip(b"\0").partition(b"\n")[2])
        return None

    def kafka_offsets(self, batch: int | None) -> dict[str, dict[str, int]]:
        """Return the end offsets of a batch of Spark's Kafka sources, by topic and partition; empty if unreadable.

        Without a batch, the start offsets of the query.
        """
        return kafka_offsets_in([self.kafka_start_offsets()] if batch is None else self.offsets(batch))

    def _entry(self, batch: int | None) -> list[Any]:
        return _parse_log_entry(self._read_file(_OFFSETS, str(batch)) or b"")

    def ends_at(self, offset: object, *, committed: bool) -> bool:
        """Return True if the newest batch ends at this source offset; False if that can't be read.

        Args:
            offset: End offset of a source, a JSON value.
            committed: Newest batch of the commit log, else of the offset log.
        """
        return offset in self.offsets(self.last_committed_batch() if committed else self.last_planned_batch())

    def watermark_ms(self, offset: object) -> int | None:
        """Return the event-time watermark of the newest batch, in ms since 1970; None unless it ends at this offset."""
        if not self.ends_at(offset, committed=False):
            return None
        with contextlib.suppress(ValueError, KeyError, IndexError, TypeError):
            return int(self._entry(self.last_planned_batch())[1]["batchWatermarkMs"])
        return None

    def newest_offsets(self) -> list[Any]:
        """Return the offset of each source in the newest planned batch, as JSON values; empty if there is none.

        An entry that a power failure tore belongs to a batch that never ran: the batch before it counts.
        """
        for batch in reversed(self._batches(_OFFSETS)):
            if not _is_torn(self._path / _OFFSETS / str(batch)) and (offsets := self.offsets(batch)):
                return offsets
        return []

    def read_note(self, name: str) -> str | None:
        """Return the text last written with `write_note`; None if there is none, or the checkpoint is not local.

        Raises:
            OSError: The file can't be read.
        """
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return (self._path / name).read_text(encoding="utf-8")
        return None

    def write_note(self, name: str, text: str, *, sync: bool = True) -> None:
        """Write a file beside Spark's own; does nothing if the checkpoint is not local.

        Without `sync` a power failure may leave an empty file.

        Raises:
            JournalError: TL-J20, the disk failed or is full.
        """
        path = self._path
        if path == _NOT_LOCAL:
            return
        with self._map_disk_errors():
            if sync:
                files.replace_durably(path / name, text)
            else:
                files.replace(path / name, text, sync=False)

    def sync(self) -> None:
        """Make both logs durable; files that this process has synced already cost nothing.

        Raises:
            ConfigError: TL-J23, the directory belongs to another user.
            JournalError: TL-J20, the disk failed or is full: the batch must not run, the inbox must not be truncated.
        """
        path = self._path
        if path == _NOT_LOCAL:
            return
        with self._map_disk_errors():
            synced_files = _SYNCED_FILES.pop(path, {})
            if synced_files.get(_METADATA) != (metadata := _read_or_empty(path / _METADATA)):
                check_owner(path)
                _rewrite(path / _METADATA)
                for directory in (path, *path.parents):  # Spark may have made any of them just now
                    with contextlib.suppress(PermissionError):  # one that we can't even list is none that we made
                        files.sync_path(directory)
                synced_files = {_METADATA: metadata}
            self._sync_log(_OFFSETS, synced_files)
            if self.last_committed_batch() != synced_files.get(_COMMITS):
                self.sync_state()
            self._sync_log(_COMMITS, synced_files)
            if (totals_version := files.file_version(path / SINK_TOTALS)) != synced_files.get(SINK_TOTALS, ()):
                _sync_file(path / SINK_TOTALS)
                files.sync_path(path)
                synced_files[SINK_TOTALS] = totals_version
            _SYNCED_FILES[path] = synced_files

    @property
    def offset_log_version(self) -> str:
        """Version line of the newest offset log entry, as Spark writes it (``v1``); "" if there is none."""
        content = self._read_file(_OFFSETS, str(self.last_planned_batch())) or b""
        return content.partition(b"\n")[0].decode(errors="replace")

    @property
    def has_state(self) -> bool:
        """True if the checkpoint holds state of a stateful query; False if it is not local."""
        with contextlib.suppress(OSError):
            return any((self._path / _STATE).iterdir())
        return False

    def sync_state(self) -> None:
        """Make the state of a stateful query durable; does nothing for other queries.

        Call it between the tasks of a batch and its entry in the commit log: a query whose commit log is ahead of its
        state does not start. The tasks write hundreds of small files, so their file system is synced as a whole.

        Raises:
            JournalError: TL-J20, the disk did not take it: the batch must not be committed.
        """
        if self.has_state:
            with self._map_disk_errors():
                _sync_file_system(self._path)

    def repair(self) -> list[str]:
        """Remove the newest log entries that a power failure tore.

        Call it before the query starts, with no other query running. `sync` comes before the tasks of a batch, so a
        torn entry of the offset log is a batch that never ran, and a torn entry of the commit log is a batch that runs
        again. Spark would refuse to start with either.

        Returns:
            A log line for each removed entry.

        Raises:
            JournalDamaged: TL-J21, a torn entry was durable before; nothing was changed.
        """
        torn_entries = self._torn_entries()
        for path in torn_entries:
            for file in (path, _checksum_file(path)):
                with contextlib.suppress(FileNotFoundError):
                    file.unlink()
        for directory in {path.parent for path in torn_entries}:
            files.sync_path(directory)
        return [f"{path}: removed, a power failure had torn it" for path in torn_entries]

    # -- helpers ---------------------------------------------------------------------------------------------------

    def _read_file(self, *names: str) -> bytes | None:
        """Return a file's content; None if it is missing or unreadable, or the checkpoint is not local."""
        with contextlib.suppress(OSError):
            return self._path.joinpath(*names).read_bytes()
        return None

    def _batches(self, log: str) -> list[int]:
        with contextlib.suppress(OSError):
            return sorted(int(entry.name) for entry in (self._path / log).iterdir() if entry.name.isdecimal())
        return []

    def _entries(self, log: str) -> list[Path]:
        return [self._path / log / str(batch) for batch in reversed(self._batches(log))]

    @contextlib.contextmanager
    def _map_disk_errors(self) -> Iterator[None]:
        """Raise an OSError of the disk as TL-J20."""
        try:
            yield
        except OSError as error:
            raise JournalError(
                "TL-J20",
                error.filename or self._location,
                f"Spark's checkpoint can't be made durable ({error.strerror}), so a power failure could undo a batch",
                "The batch is not done and nothing was removed. Check this disk, then start the query again.",
            ) from error

    def _sync_log(self, log: str, synced_files: dict[str, object]) -> None:
        batches, synced_batch, directory = self._batches(log), synced_files.get(log), self._path / log
        if not batches or batches[-1] == synced_batch:
            return
        if not isinstance(synced_batch, int):
            for batch in batches[-_READ_AT_START:]:
                _rewrite(directory / str(batch))
        else:
            for batch in [batch for batch in batches if batch > synced_batch]:
                _sync_file(directory / str(batch))
                _sync_file(_checksum_file(directory / str(batch)))
        files.sync_path(directory)
        synced_files[log] = batches[-1]

    def _torn_entries(self) -> list[Path]:
        """Return the torn log entries to remove, newest first."""
        metadata = self._path / _METADATA
        offsets, commits = (self._entries(log) for log in (_OFFSETS, _COMMITS))
        if offsets and _is_torn(metadata):
            if commits:
                raise _damaged_entry(metadata, commits[0].name)
            return [*offsets, metadata]
        torn_entries = [*takewhile(_is_torn, commits)]
        committed_batch = commits[len(torn_entries)].name if len(torn_entries) < len(commits) else "-1"
        for entry in takewhile(_is_torn, offsets):
            if int(entry.name) <= int(committed_batch):
                raise _damaged_entry(entry, committed_batch)
            torn_entries.append(entry)
        return torn_entries


def _damaged_entry(path: Path, committed_batch: str) -> JournalDamaged:
    return JournalDamaged(
        "TL-J21",
        str(path),
        f"this part of the checkpoint no longer reads as Spark wrote it, though batch {committed_batch} is done",
        "Restore the checkpoint together with the gateway's state directory, or start with a new checkpoint directory: "
        "what waits in the inbox is then carried again.",
    )


def _checksum_file(path: Path) -> Path:
    return path.with_name(f".{path.name}.crc")


def _read_or_empty(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""


def _is_torn(path: Path) -> bool:
    """Return True if a checkpoint file is incomplete, by its checksum file or its format."""
    try:
        content, sums = path.read_bytes(), _read_or_empty(_checksum_file(path))
        if _checksum_file(path).exists() and sums != _checksum_content(content, sums):
            return True
        if path.name == _METADATA:
            return not isinstance(json.loads(content), dict)
    except (OSError, ValueError):
        return True
    return len(_parse_log_entry(content)) < (3 if path.parent.name == _OFFSETS else 2)


def _parse_log_entry(content: bytes) -> list[Any]:
    """Parse a log entry: version, query facts, then an offset of each source (None for ``-``); [] if it is torn."""
    # Not `splitlines`: a JSON string may hold other separators of lines.
    version, *lines = content.decode(errors="replace").split("\n")
    with contextlib.suppress(ValueError):
        if re.fullmatch(r"v\d+", version):
            return [version, *(None if line == "-" else json.loads(line) for line in lines)]
    return []


def _checksum_content(content: bytes, sums: bytes) -> bytes:
    """Return the checksum file of `content`, with the chunk size that the checksum file `sums` names."""
    size = int.from_bytes(sums[4:8], "big") or 512
    chunks = [content[at : at + size] for at in range(0, len(content), size)]
    return _CRC_HEAD + size.to_bytes(4, "big") + b"".join(zlib.crc32(chunk).to_bytes(4, "big") for chunk in chunks)


def _rewrite(path: Path) -> None:
    """Write a file and its checksum file again under the same name, and sync them: an earlier sync may have failed."""
    # The kernel reports that once, keeps the pages, and answers later syncs with "ok" [I6].
    for file in (path, _checksum_file(path)):
        try:
            content, mode = file.read_bytes(), file.stat().st_mode & 0o7777
        except FileNotFoundError:
            continue
        files.replace(file, content, mode=mode)


def _sync_file(path: Path) -> None:
    """Make a file's content durable; does nothing if Spark has removed the file."""
    with contextlib.suppress(FileNotFoundError):
        files.sync_path(path)


def _sync_file_system(path: Path) -> None:
    """Sync the whole file system of a directory; reports errors since Linux 5.8 (syncfs(2))."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(descriptor):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))
    finally:
        os.close(descriptor)
