"""A TCP proxy that forwards, hangs, refuses, or cuts a connection in the middle of a packet.

``hang`` is not ``refuse``: a server that accepts and never answers is where peers lose data.
"""

from __future__ import annotations

import selectors
import socket
import threading
from contextlib import suppress
from enum import StrEnum
from typing import Self

__all__ = ["FaultProxy", "Mode"]

_CHUNK = 1 << 16
_LOOPBACK = "127.0.0.1"


class Mode(StrEnum):
    """What the proxy does now.

    FORWARD passes bytes on; HANG accepts connections, keeps the old ones open and passes nothing; REFUSE closes
    everything and does not listen.
    """

    FORWARD = "forward"
    HANG = "hang"
    REFUSE = "refuse"


class _Pair:
    """One client and its connection to the server; bytes that the other side does not take yet wait here."""

    def __init__(self, client: socket.socket, server: socket.socket | None) -> None:
        self.client = client
        self.server = server
        self.waiting = {client: bytearray()}
        if server is not None:
            self.waiting[server] = bytearray()

    def other(self, sock: socket.socket) -> socket.socket | None:
        return self.server if sock is self.client else self.client

    def close(self) -> None:
        for sock in self.waiting:
            sock.close()


class FaultProxy:
    """A loopback proxy in front of one server, in a thread of its own; a context manager.

    Args:
        port: The server's port on loopback.
        listen: Port to listen on; 0 picks a free one, which then stays.
    """

    def __init__(self, port: int, *, listen: int = 0) -> None:
        self._target = (_LOOPBACK, port)
        self._listener: socket.socket | None = None
        self._pairs: dict[socket.socket, _Pair] = {}
        self._lock = threading.Lock()
        self._wanted = self._mode = Mode.FORWARD
        self._cut = False
        self._budget: int | None = None
        self._ended = False
        self._settled = threading.Event()
        self.port = listen
        self.connections = 0
        self.forwarded = 0
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)

    @property
    def mode(self) -> Mode:
        """The mode that is in force."""
        return self._mode

    def __enter__(self) -> Self:
        self._selector = selectors.DefaultSelector()
        self._wake_in, self._wake_out = socket.socketpair()
        self._listen()
        self._selector.register(self._wake_in, selectors.EVENT_READ)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._tell(ended=True)
        self._thread.join(5)
        for pair in set(self._pairs.values()):
            pair.close()
        if self._listener is not None:
            self._listener.close()
        self._selector.close()
        self._wake_in.close()
        self._wake_out.close()

    def forward(self) -> None:
        """Pass bytes on again; connections held by `hang` go on where they stopped."""
        self._tell(mode=Mode.FORWARD)

    def hang(self) -> None:
        """Keep everything open and pass nothing on."""
        self._tell(mode=Mode.HANG)

    def refuse(self) -> None:
        """Close every connection and refuse new ones."""
        self._tell(mode=Mode.REFUSE)

    def cut(self) -> None:
        """Close all connections now; new ones are welcome."""
        self._tell(cut=True)

    def cut_after(self, count: int) -> None:
        """Pass this many more bytes from the server, then close all connections: in the middle of a packet."""
        self._tell(budget=count)

    def _tell(
        self, *, mode: Mode | None = None, cut: bool = False, budget: int | None = None, ended: bool = False
    ) -> None:
        with self._lock:
            self._wanted = mode or self._wanted
            self._cut = self._cut or cut
            self._budget = budget if budget is not None else self._budget
            self._ended = ended
            self._settled.clear()
        self._wake_out.send(b"!")
        self._settled.wait(5)

    def _listen(self) -> None:
        listener = socket.create_server((_LOOPBACK, self.port), backlog=64)
        listener.setblocking(False)
        self.port = listener.getsockname()[1]
        self._listener = listener
        self._selector.register(listener, selectors.EVENT_READ)

    def _run(self) -> None:
        while True:
            for key, mask in self._selector.select(0.5):
                sock = key.fileobj
                if sock is self._wake_in:
                    self._wake_in.recv(64)
                elif sock is self._listener:
                    self._accept()
                elif isinstance(sock, socket.socket) and sock in self._pairs:
                    self._serve(self._pairs[sock], sock, mask)
            if not self._obey():
                return

    def _obey(self) -> bool:
        """Take up what was asked; False when it is over."""
        with self._lock:
            wanted, cut, self._cut = self._wanted, self._cut, False
        if cut or wanted is Mode.REFUSE:
            self._close_all()
        if wanted is not self._mode:
            self._change(wanted)
        self._settled.set()
        return not self._ended

    def _change(self, wanted: Mode) -> None:
        if wanted is Mode.REFUSE and self._listener is not None:
            self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = None
        elif wanted is not Mode.REFUSE and self._listener is None:
            self._listen()
        self._mode = wanted
        for pair in list(self._pairs.values()):
            if pair.server is None and wanted is Mode.FORWARD:
                self._drop(pair)  # accepted while hanging: the client will try again
            else:
                self._watch(pair)

    def _accept(self) -> None:
        assert self._listener is not None
        with suppress(OSError):
            client, _ = self._listener.accept()
            self.connections += 1
            self._adopt(client)

    def _adopt(self, client: socket.socket) -> None:
        server = None
        if self._mode is Mode.FORWARD:
            try:
                server = socket.create_connection(self._target, timeout=5)
            except OSError:
                client.close()
                return
        pair = _Pair(client, server)
        for sock in pair.waiting:
            sock.settimeout(0)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._pairs[sock] = pair
        self._watch(pair)

    def _watch(self, pair: _Pair) -> None:
        for sock, out in pair.waiting.items():
            other = pair.other(sock)
            events = 0
            if self._mode is Mode.FORWARD and other is not None:
                full = len(pair.waiting[other]) > _CHUNK
                events = (0 if full else selectors.EVENT_READ) | (selectors.EVENT_WRITE if out else 0)
            registered = sock in self._selector.get_map()
            if events and registered:
                self._selector.modify(sock, events)
            elif events:
                self._selector.register(sock, events)
            elif registered:
                self._selector.unregister(sock)

    def _serve(self, pair: _Pair, sock: socket.socket, mask: int) -> None:
        try:
            if mask & selectors.EVENT_READ:
                self._pass_on(pair, sock)
            for target, out in pair.waiting.items():
                if out:
                    with suppress(BlockingIOError):
                        del out[: target.send(out)]
        except OSError:
            self._drop(pair)
        else:
            if sock in self._pairs:
                self._watch(pair)

    def _pass_on(self, pair: _Pair, sock: socket.socket) -> None:
        data = sock.recv(_CHUNK)
        other = pair.other(sock)
        if not data or other is None:
            raise ConnectionResetError("closed by one side")
        if sock is pair.server and self._budget is not None:
            data = data[: self._budget]
            self._budget -= len(data)
        self.forwarded += len(data)
        pair.waiting[other] += data
        if self._budget == 0:
            self._budget = None
            other.settimeout(1)
            other.sendall(pair.waiting[other])
            self._close_all()

    def _drop(self, pair: _Pair) -> None:
        for sock in pair.waiting:
            if self._pairs.pop(sock, None) is not None and sock in self._selector.get_map():
                self._selector.unregister(sock)
        pair.close()

    def _close_all(self) -> None:
        for pair in list(self._pairs.values()):
            self._drop(pair)
