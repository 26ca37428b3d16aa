"""Several servers that are started and stopped together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Sequence

    from towline_prove.devstack.server import Server

__all__ = ["Together"]


class Together(ABC):
    """Servers of one purpose; a context manager too."""

    @property
    @abstractmethod
    def servers(self) -> Sequence[Server]:
        """All of them."""

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> Self:
        """Start all at the same time; when one fails, what this call has started is stopped again.

        Raises:
            SetupError: As `Server.start`.
        """
        before = [server.running for server in self.servers]
        with ThreadPoolExecutor(len(self.servers)) as pool:
            starts = [pool.submit(server.start) for server in self.servers]
        failed = [start.exception() for start in starts]
        for server, ran, error in zip(self.servers, before, failed, strict=True):
            if any(failed) and not ran and not error:
                server.stop()
        for error in failed:
            if error:
                raise error
        return self

    def stop(self) -> None:
        """Stop all; data and ports stay."""
        with ThreadPoolExecutor(len(self.servers)) as pool:
            stops = [pool.submit(server.stop) for server in self.servers]
        for stop in stops:
            stop.result()
