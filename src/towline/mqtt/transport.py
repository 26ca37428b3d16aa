"""A byte stream to one broker: TCP or TLS, never blocking once it is open.

`connect` waits (bounded, and giving up when asked to); everything after it returns at once. Errors of the system and of
OpenSSL become `Unreachable` with a sentence.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from towline.errors import ConfigError, Unreachable

__all__ = ["Tls", "Transport", "connect"]

#: Most bytes taken in one read: a gulp of some ten thousand small messages.
READ_BYTES = 1 << 20
#: How often a waiting `connect` asks whether it should give up, in seconds.
_PATIENCE = 0.1


@dataclass(frozen=True, slots=True)
class Tls:
    """How to verify the broker and to show who we are.

    Attributes:
        ca_file: Trusted certificates; None for the system's.
        cert_file: Our certificate chain, with `key_file`, for a broker that asks for one.
        key_file: Its private key.
        server_name: The name the certificate must carry, and sent as SNI; None for the host of the URI.
        insecure: Verify nothing; shown wherever the connection is.
    """

    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None
    server_name: str | None = None
    insecure: bool = False

    def context(self) -> ssl.SSLContext:
        """The OpenSSL settings: TLS 1.2 or newer, verification on.

        Raises:
            ConfigError: A file is missing or holds no certificate or key (TL-C30).
        """
        try:
            context = ssl.create_default_context(cafile=str(self.ca_file) if self.ca_file else None)
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            if self.cert_file:
                context.load_cert_chain(self.cert_file, self.key_file)
        except (OSError, ssl.SSLError) as error:
            files = ", ".join(str(f) for f in (self.ca_file, self.cert_file, self.key_file) if f)
            raise ConfigError(
                "TL-C30", files, f"not readable as PEM ({_plain(error)})", "Check the files under tls."
            ) from error
        if self.insecure:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context


class Transport:
    """An open connection.

    Args:
        sock: Connected and non-blocking.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._out = bytearray()

    def fileno(self) -> int:
        """The descriptor, for a selector."""
        return self._sock.fileno()

    @property
    def unsent(self) -> int:
        """Bytes written and not yet taken by the system."""
        return len(self._out)

    @property
    def decrypted(self) -> bool:
        """Bytes wait inside TLS, where no selector sees them."""
        return isinstance(self._sock, ssl.SSLSocket) and self._sock.pending() > 0

    def read(self) -> bytes | None:
        """Bytes that have arrived, None when there are none, ``b""`` when the peer has closed or the line broke."""
        try:
            return self._sock.recv(READ_BYTES)
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return None
        except OSError:
            return b""

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
                return False
            del self._out[:sent]
        return True

    def drain(self, timeout_s: float) -> bool:
        """Send all that was kept, waiting up to `timeout_s` seconds; False when it could not."""
        end = time.monotonic() + timeout_s
        while self.flush() and self._out:
            left = end - time.monotonic()
            if left <= 0:
                return False
            select.select([], [self._sock], [], left)
        return not self._out

    def close(self) -> None:
        """Close; never raises."""
        with contextlib.suppress(OSError):
            self._sock.close()


def connect(
    host: str,
    port: int,
    *,
    tls: Tls | None = None,
    timeout_s: float = 10.0,
    keep_alive_s: int = 60,
    cancelled: Callable[[], bool] = lambda: False,
) -> Transport:
    """Open a connection.

    Args:
        host: Name or address; every address of a name is tried in the resolver's order.
        port: TCP port.
        tls: Encrypt with these settings; None for plain TCP.
        timeout_s: Seconds for all of it.
        keep_alive_s: A peer that acknowledges nothing on the TCP level for 1.5 times as long is given up.
        cancelled: Asked while waiting; True gives up at once.

    Raises:
        Unreachable: With the reason (TL-M01 no connection, TL-M07 certificate, TL-M02 TLS).
        ConfigError: The files under tls can't be used.
    """
    where = f"{'mqtts' if tls else 'mqtt'}://{host}:{port}"
    end = time.monotonic() + timeout_s
    context = tls.context() if tls else None
    sock = _connect_tcp(host, port, where, end, cancelled)
    try:
        _tune(sock, keep_alive_s)
        if tls and context:
            sock = _handshake(sock, context, tls.server_name or host, where, end, cancelled)
    except BaseException:
        sock.close()
        raise
    return Transport(sock)


def _connect_tcp(host: str, port: int, where: str, end: float, cancelled: Callable[[], bool]) -> socket.socket:
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise Unreachable("TL-M01", where, f"no address for this name ({_plain(error)})", "Check the host.") from error
    problem: OSError = TimeoutError("no answer")
    for family, kind, protocol, _name, address in addresses:
        sock = socket.socket(family, kind, protocol)
        sock.setblocking(False)
        try:
            with contextlib.suppress(BlockingIOError):
                sock.connect(address)
            _wait(sock, end, cancelled, write=True)
            code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if not code:
                return sock
            problem = OSError(code, os.strerror(code))
        except OSError as error:
            problem = error
        sock.close()
    raise Unreachable(
        "TL-M01", where, f"no connection ({_plain(problem)})", "Is the broker up, and the port right?"
    ) from problem


def _handshake(
    sock: socket.socket, context: ssl.SSLContext, name: str, where: str, end: float, cancelled: Callable[[], bool]
) -> ssl.SSLSocket:
    wrapped = context.wrap_socket(sock, server_hostname=name, do_handshake_on_connect=False)
    try:
        while True:
            try:
                wrapped.do_handshake()
            except ssl.SSLWantReadError:
                _wait(wrapped, end, cancelled, write=False)
            except ssl.SSLWantWriteError:
                _wait(wrapped, end, cancelled, write=True)
            else:
                return wrapped
    except ssl.SSLCertVerificationError as error:
        wrapped.close()
        what = f"the server's certificate is not accepted: {error.verify_message}"
        raise Unreachable("TL-M07", where, what, "Set tls.ca_file or tls.server_name to match it.") from error
    except OSError as error:
        wrapped.close()
        raise Unreachable("TL-M02", where, f"no TLS ({_plain(error)})", "Is this port a TLS listener?") from error


def _wait(sock: socket.socket, end: float, cancelled: Callable[[], bool], *, write: bool) -> None:
    while True:
        left = end - time.monotonic()
        if left <= 0:
            raise TimeoutError("no answer in time")
        if cancelled():
            raise TimeoutError("given up")
        step = min(left, _PATIENCE)
        if any(select.select([] if write else [sock], [sock] if write else [], [], step)):
            return


def _tune(sock: socket.socket, keep_alive_s: int) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2 * READ_BYTES)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        # Finds a half-open line also while nothing is read: our pings then go unacknowledged.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(keep_alive_s * 1500))


def _plain(error: BaseException) -> str:
    """The system's words for an error, without its number and our paths."""
    reason = getattr(error, "strerror", None) or getattr(error, "reason", None) or str(error)
    return str(reason).strip().lower().replace("_", " ")
