"""Rows of a batch, left by its tasks for the driver: so one transaction holds a batch of any number of partitions.

A transaction of Kafka belongs to one producer, and a producer to one process. A plan that ends in several tasks would
need ``coalesce(1)``, and with it all work since the last shuffle in one task. Here each task leaves its rows, and the
driver writes them in the order of the partitions before Spark's entry in the commit log. Small ones, and those of a
task on another machine, come with the task's answer; larger ones in a file, where both see the same files.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
import tempfile
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from towline.errors import KafkaError
from towline.kafka.options import FORMAT
from towline.kafka.spool import full

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["ANSWER_BYTES", "Left", "RowsForDriver"]

#: Bytes of rows that come with a task's answer although there is a file system that both see.
INLINE_BYTES: Final = 1 << 20
#: Most bytes of rows in one answer: Java's arrays end at 2 GiB, and Spark copies an answer several times.
ANSWER_BYTES: Final = 512 << 20
_PRIVATE: Final = 0o700


@dataclass(frozen=True)
class Left:
    """What one task left.

    Attributes:
        rows: How many rows.
        size: Bytes of the Arrow stream.
        content: The stream itself; None where it is in a file.
        file: Its path; "" where it is not in a file.
    """

    rows: int
    size: int
    content: bytes | None
    file: str = ""

    def batches(self) -> Iterator[Any]:
        """The rows, as ``pyarrow.RecordBatch``es.

        Raises:
            KafkaError: TL-K65, the file is not there, or not whole.
        """
        if self.content is not None:
            yield from _stream(pa.py_buffer(self.content))
            return
        try:
            mapped = pa.memory_map(self.file)
        except OSError as problem:
            raise _gone(self.file, problem.strerror or str(problem)) from None
        with mapped:
            if mapped.size() != self.size:
                raise _gone(self.file, f"it has {mapped.size():,} bytes and not {self.size:,}")
            yield from _stream(mapped)

    def remove(self) -> None:
        """Remove the file, if it is one; never raises."""
        if self.file:
            with contextlib.suppress(OSError):
                Path(self.file).unlink()


@dataclass(frozen=True)
class RowsForDriver:
    """Where the tasks of one batch leave their rows; made on the driver, travels to the tasks.

    Attributes:
        directory: Of this batch, made by the driver; "" where it could make none.
        disk: Bytes of rows that a task leaves there at most; None for what it holds.
    """

    directory: str = ""
    disk: int | None = None

    @classmethod
    def beside(cls, location: str, batch: int | None, disk: int | None) -> RowsForDriver:
        """A place for the batch of a query; what other batches of it left is removed.

        Spark makes one writer for the tasks of a batch and another one for its commit, so the same batch may ask twice.

        Args:
            location: The query's checkpoint: it runs one batch at a time.
            batch: Which one is about to run; None if unknown, and nothing is removed.
            disk: See the attribute.
        """
        root = Path(tempfile.gettempdir()) / f"towline-rows-{os.geteuid()}"
        query = root / hashlib.sha256(location.encode()).hexdigest()[:16]
        try:
            root.mkdir(_PRIVATE, exist_ok=True)
            if not _is_private(root):
                return cls(disk=disk)
            query.mkdir(_PRIVATE, exist_ok=True)
            directory = query / ("unknown" if batch is None else str(batch))
            for other in query.iterdir() if batch is not None else ():
                if other != directory:
                    shutil.rmtree(other, ignore_errors=True)
            directory.mkdir(_PRIVATE, exist_ok=True)
        except OSError:
            return cls(disk=disk)  # rows come with the answers
        return cls(str(directory), disk)

    def leave(self, batches: Iterable[Any]) -> Left:
        """Take all rows of a task.

        Raises:
            KafkaError: TL-K23, the disk is full or the limit is reached; TL-K66, too many for an answer.
        """
        out, rows = _Growing(self), 0
        try:
            for batch in batches:
                rows += batch.num_rows
                out.write(batch)
            return out.end(rows)
        except OSError as problem:
            why = problem.strerror or str(problem)
            raise full(why, "Free that disk, or name a directory on a larger one in TMPDIR") from None
        finally:
            out.close()

    def leave_empty(self) -> None:
        """Take the directory away again when nothing lies in it; never raises."""
        with contextlib.suppress(OSError):
            if self.directory:
                Path(self.directory).rmdir()
                Path(self.directory).parent.rmdir()


class _Growing:
    """An Arrow stream in memory, and from `INLINE_BYTES` on in a file where the driver sees it."""

    def __init__(self, place: RowsForDriver) -> None:
        self._place = place
        self._shared = bool(place.directory) and Path(place.directory).is_dir()
        self._sink: Any = pa.BufferOutputStream()
        self._writer: Any = None
        #: Path of the file; "" while the rows are in memory.
        self._file = ""

    def write(self, batch: Any) -> None:
        if self._writer is None:
            self._writer = pa.ipc.new_stream(self._sink, batch.schema)
        self._writer.write_batch(batch)
        size = self._sink.tell()
        if not self._file and self._shared and size > INLINE_BYTES:
            self._to_file(batch.schema)
        elif not self._file and size > ANSWER_BYTES:
            raise _too_many(size)
        if self._file and self._place.disk is not None and size > self._place.disk:
            least = f"a task needs more than {self._place.disk:,} bytes there"
            raise full(least, "Raise spoolDiskBytes, or leave it out")

    def _to_file(self, schema: Any) -> None:
        """Go on in a file; the name is this attempt's own, a second attempt of the task may be at work."""
        self._writer.close()
        kept = self._sink.getvalue()
        self._file = str(Path(self._place.directory) / uuid.uuid4().hex)
        self._sink = pa.OSFile(self._file, "wb")
        self._writer = pa.ipc.new_stream(self._sink, schema)
        for batch in pa.ipc.open_stream(kept):
            self._writer.write_batch(batch)

    def end(self, rows: int) -> Left:
        if self._writer is not None:
            self._writer.close()
        if not self._file:
            content: bytes = self._sink.getvalue().to_pybytes()
            return Left(rows, len(content), content)
        size = self._sink.tell()
        self._sink.close()
        return Left(rows, size, None, self._file)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._sink.close()


def _stream(source: Any) -> Iterator[Any]:
    if source.size if isinstance(source, pa.Buffer) else source.size():
        yield from pa.ipc.open_stream(source)


def _is_private(directory: Path) -> bool:
    """Whether nobody else could have put it there, or can write into it: a temporary directory is everybody's."""
    found = directory.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077


def _gone(file: str, why: str) -> KafkaError:
    what = f"the rows that a task left for the driver in {file} can not be read: {why}"
    do = "Does something clear that directory, or a second query use this checkpoint? The batch runs again."
    return KafkaError("TL-K65", FORMAT, what, do)


def _too_many(size: int) -> KafkaError:
    what = f"a task has {size >> 20:,} MiB of rows for the driver, which is on another machine"
    do = "Make batches smaller (maxOffsetsPerTrigger), or set parallelism=1 and put .coalesce(1) before writeStream."
    return KafkaError("TL-K66", FORMAT, what, do)
