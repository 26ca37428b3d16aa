"""TCP proxy that forwards, hangs, refuses, or cuts a connection in the middle of a packet.

``hang`` is not ``refuse``: a server that accepts and never answers is where peers lose data.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self

from towline_prove.devstack.process import LOOPBACK

if TYPE_CHECKING:
    from collections.abc import Coroutine

_CHUNK_BYTES = 1 << 16
_LOOP_TIMEOUT_S = 5.0


class FaultProxy:
    """Loopback proxy before a server, in a thread of its own; a context manager. `listen_port` 0 picks a free one."""

    def __init__(self, server_port: int, *, listen_port: int = 0) -> None:
        self._server_port = server_port
        #: Takes connections; None while they are refused.
        self._listener: socket.socket | None = None
        self._links: set[asyncio.Task[None]] = set()
        self._bytes_until_cut: int | None = None
        self.port = listen_port
        self.connections = 0

    def __enter__(self) -> Self:
        self._loop = asyncio.new_event_loop()
        self._forwarding = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()
        self.forward()
        return self

    def __exit__(self, *_: object) -> None:
        self.refuse()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_LOOP_TIMEOUT_S)
        self._loop.close()

    def forward(self) -> None:
        """Forward bytes again; connections held by `hang` continue where they stopped."""
        self._run_on_loop(self._listen(forwarding=True))

    def hang(self) -> None:
        """Keep all connections open and forward nothing."""
        self._run_on_loop(self._listen(forwarding=False))

    def refuse(self) -> None:
        """Close all connections and refuse new ones."""
        self._run_on_loop(self._close())

    def cut_after(self, count: int) -> None:
        """Forward this many more bytes from the server, then close all connections: in the middle of a packet."""
        self._bytes_until_cut = count

    def _run_on_loop(self, coroutine: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(_LOOP_TIMEOUT_S)

    async def _listen(self, *, forwarding: bool) -> None:
        if forwarding:
            self._forwarding.set()
        else:
            self._forwarding.clear()
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
        await self._cut_links()

    async def _cut_links(self) -> None:
        links = set(self._links)
        for link in links:
            link.cancel()
        if links:
            await asyncio.wait(links)

    def _accept(self, listener: socket.socket) -> None:
        """Accept a connection as a task that can be cut from its first moment on."""
        with suppress(BlockingIOError):
            client, _ = listener.accept()
            client.setblocking(False)
            self.connections += 1
            link = self._loop.create_task(self._serve(client))
            self._links.add(link)
            link.add_done_callback(self._links.discard)
            link.add_done_callback(lambda link: client.close() if link.cancelled() else None)  # before its first step

    async def _serve(self, client_socket: socket.socket) -> None:
        """Relay one client until it or its server ends; while the proxy hangs, it has no server connection yet."""
        to_client: asyncio.StreamWriter | None = None
        to_server: asyncio.StreamWriter | None = None
        try:
            await self._forwarding.wait()
            client, to_client = await asyncio.open_connection(sock=client_socket)
            server, to_server = await asyncio.open_connection(LOOPBACK, self._server_port)
            async with asyncio.TaskGroup() as relays:
                relays.create_task(self._relay(client, to_server))
                relays.create_task(self._relay(server, to_client, from_server=True))
        except* OSError:
            pass  # one side has ended, or there is no server
        except* asyncio.CancelledError:
            pass  # cut
        finally:
            (to_client or client_socket).close()
            if to_server is not None:
                to_server.transport.abort()

    async def _relay(
        self, source: asyncio.StreamReader, target: asyncio.StreamWriter, *, from_server: bool = False
    ) -> None:
        while data := await source.read(_CHUNK_BYTES):
            await self._forwarding.wait()
            if from_server and self._bytes_until_cut is not None:
                data = data[: self._bytes_until_cut]
                self._bytes_until_cut -= len(data)
            target.write(data)
            if from_server and self._bytes_until_cut == 0:
                self._bytes_until_cut = None
                for link in self._links:
                    link.cancel()
            await target.drain()
        raise ConnectionResetError("closed by one side")
