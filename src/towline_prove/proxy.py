"""A TCP proxy that forwards, hangs, refuses, or cuts a connection in the middle of a packet.

``hang`` is not ``refuse``: a server that accepts and never answers is where peers lose data.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self

from towline_prove.devstack.ports import LOOPBACK

if TYPE_CHECKING:
    from collections.abc import Coroutine

_CHUNK = 1 << 16
_ANSWER_S = 5.0


class FaultProxy:
    """A loopback proxy in front of one server, in a thread of its own; a context manager.

    Args:
        port: The server's port on loopback.
        listen: Port to listen on; 0 picks a free one, which then stays.
    """

    def __init__(self, port: int, *, listen: int = 0) -> None:
        self._target = port
        #: Takes connections; None while they are refused.
        self._listener: socket.socket | None = None
        self._links: set[asyncio.Task[None]] = set()
        self._budget: int | None = None
        self.port = listen
        self.connections = 0

    def __enter__(self) -> Self:
        self._loop = asyncio.new_event_loop()
        self._flowing = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()
        self.forward()
        return self

    def __exit__(self, *_: object) -> None:
        self.refuse()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_ANSWER_S)
        self._loop.close()

    def forward(self) -> None:
        """Pass bytes on again; connections held by `hang` go on where they stopped."""
        self._do(self._listen(flowing=True))

    def hang(self) -> None:
        """Keep everything open and pass nothing on."""
        self._do(self._listen(flowing=False))

    def refuse(self) -> None:
        """Close every connection and refuse new ones."""
        self._do(self._close())

    def cut(self) -> None:
        """Close all connections now; new ones are welcome."""
        self._do(self._cut())

    def cut_after(self, count: int) -> None:
        """Pass this many more bytes from the server, then close all connections: in the middle of a packet."""
        self._budget = count

    def _do(self, change: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(change, self._loop).result(_ANSWER_S)

    async def _listen(self, *, flowing: bool) -> None:
        if flowing:
            self._flowing.set()
        else:
            self._flowing.clear()
        if self._listener is None:
            self._listener = socket.create_server((LOOPBACK, self.port), backlog=64)
            self._listener.setblocking(False)
            self.port = self._listener.getsockname()[1]
            self._loop.add_reader(self._listener, self._accept, self._listener)

    async def _close(self) -> None:
        if self._listener is not None:
            self._loop.remove_reader(self._listener)
            self._listener.close()
            self._listener = None
        await self._cut()

    async def _cut(self) -> None:
        links = set(self._links)
        for link in links:
            link.cancel()
        if links:
            await asyncio.wait(links)

    def _accept(self, listener: socket.socket) -> None:
        """Take a connection, as a link that can be cut from its first moment on."""
        with suppress(BlockingIOError):
            client, _ = listener.accept()
            client.setblocking(False)
            self.connections += 1
            link = self._loop.create_task(self._serve(client))
            self._links.add(link)
            link.add_done_callback(self._links.discard)
            link.add_done_callback(lambda link: client.close() if link.cancelled() else None)  # before its first step

    async def _serve(self, taken: socket.socket) -> None:
        """One client, until it or its server ends; one that came while nothing flows has no server yet."""
        to_client: asyncio.StreamWriter | None = None
        to_server: asyncio.StreamWriter | None = None
        try:
            await self._flowing.wait()
            client, to_client = await asyncio.open_connection(sock=taken)
            server, to_server = await asyncio.open_connection(LOOPBACK, self._target)
            async with asyncio.TaskGroup() as both:
                both.create_task(self._pass_on(client, to_server))
                both.create_task(self._pass_on(server, to_client, limited=True))
        except* OSError:
            pass  # one side has ended, or there is no server
        except* asyncio.CancelledError:
            pass  # cut
        finally:
            (to_client or taken).close()
            if to_server is not None:
                to_server.transport.abort()

    async def _pass_on(
        self, source: asyncio.StreamReader, target: asyncio.StreamWriter, *, limited: bool = False
    ) -> None:
        while data := await source.read(_CHUNK):
            await self._flowing.wait()
            if limited and self._budget is not None:
                data = data[: self._budget]
                self._budget -= len(data)
            target.write(data)
            if limited and self._budget == 0:
                self._budget = None
                for link in self._links:
                    link.cancel()
            await target.drain()
        raise ConnectionResetError("closed by one side")
