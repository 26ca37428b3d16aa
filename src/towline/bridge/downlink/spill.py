"""Record batches that are needed in another order than they came: in memory while they are few, else in a mapped file.

The file has no name and vanishes with the process; its pages are the kernel's to take back.
"""

from __future__ import annotations

import contextlib
import tempfile
from typing import TYPE_CHECKING, Any, Final, Self

import pyarrow as pa

from towline.errors import KafkaError

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Spill"]

#: Bytes kept in memory unless told otherwise.
_MEMORY: Final = 64 << 20


class Spill:
    """Takes batches; a context manager, and what it gave out must not outlive it.

    Args:
        memory: Bytes kept in memory; beyond it all go to a file below ``TMPDIR``.
    """

    def __init__(self, memory: int = _MEMORY) -> None:
        self._memory = memory
        self._closing = contextlib.ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    def kept(self, batches: Iterable[Any]) -> list[Any]:
        """The same batches, to be read in any order.

        Raises:
            KafkaError: TL-K23, the disk is full.
        """
        waiting: list[Any] = []
        size = 0
        coming = iter(batches)
        for batch in coming:
            waiting.append(batch)
            size += batch.nbytes
            if size > self._memory:
                return self._mapped(waiting, coming)
        return waiting

    def _mapped(self, waiting: list[Any], coming: Iterable[Any]) -> list[Any]:
        file = self._closing.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 - it is one
        try:
            with pa.ipc.new_file(file, waiting[0].schema) as writer:
                while waiting:
                    writer.write_batch(waiting.pop(0))
                for batch in coming:
                    writer.write_batch(batch)
            file.flush()
        except OSError as error:
            raise _no_room(error) from None
        reader = pa.ipc.open_file(self._closing.enter_context(pa.memory_map(f"/proc/self/fd/{file.fileno()}")))
        return [reader.get_batch(index) for index in range(reader.num_record_batches)]


def _no_room(error: OSError) -> KafkaError:
    return KafkaError(
        "TL-K23",
        "downlink",
        f"the rows of a batch do not fit on the disk of {tempfile.gettempdir()} ({error.strerror or error})",
        "Free it, and the batch goes on by itself; TMPDIR names another one.",
    )
