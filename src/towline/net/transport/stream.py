"""Open byte streams to a broker, never blocking: the same few verbs whatever lies beneath."""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import time
from typing import Final

from towline.errors import BrokerError, Unreachable
from towline.net.transport.patience import Patience
from towline.net.transport.tls import Tls, tls_problem
from towline.net.transport.websocket import Framing

#: Most bytes taken in one read: a chunk of some ten thousand small messages.
READ_BYTES: Final = 1 << 20


class Transport:
    """An open connection: a connected socket, TCP, Unix or TLS.

    Args:
        sock: Connected and non-blocking, its handshake done.
        where: Begins an error.
        tls: The settings of an encrypted one.
    """

    def __init__(self, sock: socket.socket, where: str, tls: Tls | None = None) -> None:
        self._sock = sock
        self._where = where
        self._tls = tls
        self._out = bytearray()
        #: Where reads land: one object of this size a read would have the heap grow and shrink each time.
        self._in = bytearray(READ_BYTES)
        #: Linux takes this back by itself after a while, so it is asked for again and again.
        self._at_once = sock.family != socket.AF_UNIX and hasattr(socket, "TCP_QUICKACK")
        #: TLS wants to send before it can read on (RFC 8446 section 4.6.3).
        self._stuck = False
        self._problem: BrokerError | None = None

    def fileno(self) -> int:
        """The descriptor, for a selector."""
        return self._sock.fileno()

    @property
    def unsent(self) -> int:
        """Bytes written and not yet taken by the system; while there are any, wait for writability too."""
        return len(self._out) or int(self._stuck)

    @property
    def decrypted(self) -> bool:
        """Something waits inside, where no selector sees it: read before you wait."""
        return isinstance(self._sock, ssl.SSLSocket) and self._sock.pending() > 0

    @property
    def problem(self) -> BrokerError | None:
        """Why the line broke, when more is known than that it did."""
        return self._problem

    def read(self) -> bytes | None:
        """Bytes that have arrived, None when there are none, ``b""`` when the peer has closed or the line broke."""
        data = self._read_plain() if self._tls is None else self._read_records(self._tls)
        if data and self._at_once:
            self._confirm()
        return data

    def _read_plain(self) -> bytes | None:
        try:
            size = self._sock.recv_into(self._in)
        except BlockingIOError:
            return None
        except OSError:
            return b""
        return bytes(memoryview(self._in)[:size])

    def _confirm(self) -> None:
        """Have TCP confirm what has arrived now, not with our next packet or in 40 ms.

        A broker that does not set TCP_NODELAY, as Mosquitto by default, sends no second small packet before (RFC 896).
        """
        with contextlib.suppress(OSError):
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)

    def _read_records(self, tls: Tls) -> bytes | None:
        """TLS gives one record of at most 16 KiB a call; a chunk is all that are here."""
        records: list[bytes] = []
        size = 0
        self._stuck = False
        try:
            while size < READ_BYTES and (record := self._sock.recv(READ_BYTES - size)):
                records.append(record)
                size += len(record)
        except ssl.SSLWantReadError:
            return b"".join(records) or None
        except ssl.SSLWantWriteError:
            self._stuck = True
            return b"".join(records) or None
        except ssl.SSLError as error:
            self._problem = tls_problem(error, tls, self._where)
        except OSError:
            pass
        return b"".join(records)

    def write(self, data: bytes) -> bool:
        """Send what the system takes now and keep the rest for `flush`; False when the line broke."""
        self._out += data
        return self.flush()

    def flush(self) -> bool:
        """Send more of what was kept; False when the line broke."""
        while self._out:
            try:
                sent = self._sock.send(self._out)
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return True
            except OSError:
                if self._tls is not None and self._problem is None:
                    self._read_records(self._tls)  # the alert that says why may have arrived
                return False
            del self._out[:sent]
        return True

    def drain(self, timeout_s: float) -> bool:
        """Send all that was kept, waiting up to `timeout_s` seconds; False when it could not."""
        end = time.monotonic() + timeout_s
        poller = select.poll()
        poller.register(self._sock.fileno(), select.POLLOUT)
        while self.flush() and self._out:
            left = end - time.monotonic()
            if left <= 0:
                return False
            poller.poll(left * 1000)
        return not self._out

    def close(self) -> None:
        """Close; never raises."""
        if isinstance(self._sock, ssl.SSLSocket) and not self._out:
            with contextlib.suppress(OSError, ValueError):
                self._sock.unwrap()  # sends close_notify and does not wait for the peer's
        with contextlib.suppress(OSError):
            self._sock.close()


class WebSocketTransport(Transport):
    """A connection whose bytes of MQTT travel in WebSocket frames.

    Args:
        sock: As of `Transport`.
        where: Begins an error.
        tls: As of `Transport`.
        framing: To be opened.
    """

    def __init__(self, sock: socket.socket, where: str, tls: Tls | None, framing: Framing) -> None:
        super().__init__(sock, where, tls)
        self._framing = framing
        #: Bytes of MQTT that came along with the answer that opened the WebSocket.
        self._early = b""

    def open(self, patience: Patience) -> None:
        """Open the WebSocket; call it first.

        Raises:
            Unreachable: TL-M14, the server does not open it.
            OSError: There is no answer in time.
        """
        super().write(self._framing.opening())
        while not self._framing.open:
            while (data := super().read()) is None:
                patience.wait(self.fileno(), write=self.unsent > 0)
                self.flush()
            if not data and self.problem:
                raise self.problem
            self._early = self._take(data) or b""

    @property
    def decrypted(self) -> bool:
        """See `Transport`."""
        return super().decrypted or bool(self._early) or self._framing.ended is not None

    @property
    def problem(self) -> BrokerError | None:
        """See `Transport`."""
        if self._framing.ended is not None:
            return Unreachable("TL-M14", self._where, self._framing.ended, "Trying again.")
        return super().problem

    def read(self) -> bytes | None:
        """See `Transport`."""
        early, self._early = self._early, b""
        if early or self._framing.ended is not None:
            return early
        data = super().read()
        return self._take(data) if data else data

    def _take(self, data: bytes) -> bytes | None:
        taken, answer = self._framing.take(data)
        if answer:
            super().write(answer)
        return taken or (b"" if self._framing.ended is not None else None)

    def write(self, data: bytes) -> bool:
        """See `Transport`."""
        return super().write(self._framing.frame(data))

    def close(self) -> None:
        """See `Transport`."""
        if goodbye := self._framing.closing():
            super().write(goodbye)
        super().close()
