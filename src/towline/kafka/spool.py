"""Rows of a task, kept until the transaction opens: in memory first, then in a file without a name.

The clock of ``transaction.timeout.ms`` starts with the first record of a transaction, and an open transaction holds
back every read_committed consumer. So upstream finishes first; a slow query never has an open transaction.
"""

from __future__ import annotations

import contextlib
import tempfile
from typing import TYPE_CHECKING, Any, Final, Self

import pyarrow as pa
import pyarrow.compute as pc
from crc32c import crc32c

from towline.errors import KafkaError
from towline.kafka.options import FORMAT

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

#: The checksum is a sum of 32-bit checksums, kept in 64 bits.
_MODULUS: Final = 1 << 64


def checksum(batch: Any) -> int:
    """Sum of the rows' checksums, each a CRC32C over topic, key and then value; null counts as empty.

    Other columns are left out: the sum tells whether a replay brings other messages, and has to be cheap
    (some 0.3 us a row). So they are joined in C: one object and one call a row instead of three.
    """
    parts = [_bytes(batch.column(name)) for name in ("topic", "key", "value") if name in batch.schema.names]
    joined = parts[0] if len(parts) == 1 else pc.binary_join_element_wise(*parts, pa.scalar(b"", pa.large_binary()))
    return sum(map(crc32c, joined.to_pylist())) % _MODULUS


def _bytes(column: Any) -> Any:
    # Large: key and value of a batch together may be more than the 2 GiB that 32-bit offsets can tell.
    binary = column.cast(pa.large_binary())
    return binary.fill_null(b"") if binary.null_count else binary


class Spool:
    """Arrow batches of one task, to be read any number of times; a context manager.

    Args:
        memory: Bytes kept in memory; what comes after goes to the disk.
        disk: Bytes taken on the disk at most; None for what it holds. A batch that is planned does not shrink, so a
            limit that it exceeds stops the query until the limit is raised.
    """

    def __init__(self, memory: int, disk: int | None) -> None:
        self._memory = memory
        self._disk = disk
        self._kept: list[Any] = []
        self._file: Any = None
        self._writer: Any = None
        #: Rows taken.
        self.rows = 0
        #: Bytes in memory and on the disk; in_memory <= memory, on_disk <= disk.
        self.in_memory = self.on_disk = 0

    @property
    def size(self) -> int:
        """Bytes of all rows."""
        return self.in_memory + self.on_disk

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._kept.clear()
        for closing in (self._writer, self._file):
            if closing is not None:
                with contextlib.suppress(OSError):  # what was not written is not wanted any more
                    closing.close()

    def fill(self, batches: Iterable[Any]) -> None:
        """Take all batches; upstream has finished when this returns.

        Raises:
            KafkaError: TL-K23, the disk is full or the limit is reached.
        """
        for batch in batches:
            self.rows += batch.num_rows
            if self._file is None and self.in_memory + batch.nbytes <= self._memory:
                self._kept.append(batch)
                self.in_memory += batch.nbytes
                continue
            self.on_disk += batch.nbytes
            if self._disk is not None and self.on_disk > self._disk:
                why = f"a batch needs more than {self._disk:,} bytes there"
                raise full(why, "Raise spoolDiskBytes, or leave it out")
            try:
                self._write(batch)
            except OSError as problem:
                why = problem.strerror or str(problem)
                raise full(why, "Free that disk, or name a directory on a larger one in TMPDIR") from None
        if self._writer is not None:
            self._writer.close()
            self._writer = None
            self._file.flush()

    def crc(self) -> int:
        """The sum over all rows of their `checksum`, modulo 2**64: the same for the same rows in any order.

        It costs 0.3 us a row and is taken when it is asked for: most batches are never compared.
        """
        return sum(map(checksum, self)) % _MODULUS

    def _write(self, batch: Any) -> None:
        if self._file is None:
            # Spark's workers have their temporary directory in TMPDIR; the file vanishes with the process.
            self._file = tempfile.TemporaryFile(prefix="towline-")  # noqa: SIM115 - closed by __exit__
            self._writer = pa.ipc.new_stream(self._file, batch.schema)
        self._writer.write_batch(batch)

    def __iter__(self) -> Iterator[Any]:
        """The batches in their order; those of the file are mapped, their pages are the kernel's to take back."""
        yield from self._kept
        if self._file is not None:
            yield from pa.ipc.open_stream(pa.memory_map(f"/proc/self/fd/{self._file.fileno()}"))


def full(why: str, do: str) -> KafkaError:
    """TL-K23: the rows of a batch find no room on the disk; `do` says what makes room."""
    what = f"the rows of a batch do not fit into the spool on {tempfile.gettempdir()}: {why}"
    later = "Later ones do, with maxBytesPerTrigger (max_bytes_per_trigger in a bridge file) or maxOffsetsPerTrigger."
    return KafkaError("TL-K23", FORMAT, what, f"{do}: a batch that is planned does not shrink. {later}")
