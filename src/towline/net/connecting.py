"""Connections to a broker: open byte streams that never block, the same few verbs whatever lies beneath.

A connection is opened within one time limit: socket, proxy, TLS and WebSocket, one on the other. Sockets are connected
without blocking: TCP with all addresses of a name, or a Unix socket. A proxy, HTTP CONNECT or SOCKS5 by `python-socks`,
looks the broker's name up, so it works where this machine's DNS knows nothing of the outside. What it gets to see is
the broker's name and, unless the broker is reached by TLS, everything.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import wait
from itertools import chain, zip_longest
from typing import Any, Final, TypeAlias, TypeVar

from towline.errors import BrokerError, ConfigError, Unreachable
from towline.net.endpoint import Endpoint, Proxy, http_status, plain
from towline.net.tls import Tls, certificate_problem, tls_problem
from towline.net.websocket import Framing
from towline.threads import later

T = TypeVar("T")

#: Most bytes taken in one read: a chunk of some ten thousand small messages.
READ_BYTES: Final = 1 << 20
#: How often a wait asks whether it should be given up, in seconds.
_STEP: Final = 0.1


class Patience:
    """The time left for a connection.

    Args:
        timeout_s: Seconds from now.
        cancelled: Asked while waiting, at least every 0.1 s; True ends the wait.
    """

    def __init__(self, timeout_s: float, cancelled: Callable[[], bool] = lambda: False) -> None:
        self._timeout_s = timeout_s
        self._end = time.monotonic() + timeout_s
        self._cancelled = cancelled

    def left(self) -> float:
        """Seconds left, more than 0.

        Raises:
            TimeoutError: None are left, or the wait was given up.
        """
        if self._cancelled():
            raise TimeoutError("given up")
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"no answer within {self._timeout_s:g} s")
        return left

    def step(self, longest: float = _STEP) -> float:
        """Seconds to wait before looking around again, at most `longest`.

        Raises:
            TimeoutError: As `left`.
        """
        return min(self.left(), longest, _STEP)

    def wait(self, descriptor: int, *, write: bool = False) -> None:
        """Return when a descriptor can be read, or written.

        Raises:
            TimeoutError: As `left`.
        """
        poller = select.poll()
        poller.register(descriptor, select.POLLOUT if write else select.POLLIN)
        while not poller.poll(self.step() * 1000):
            pass

    def call(self, call: Callable[[], T], discard: Callable[[T], None] = lambda _result: None) -> T:
        """Run a call that may block for long, such as a look-up in the DNS, and wait for it no longer than we may.

        Args:
            call: Runs in a thread of its own, which is left behind when the time is over.
            discard: Gets the result that came too late.

        Raises:
            TimeoutError: As `left`.
            BaseException: Whatever `call` raises.
        """
        running = later(call, "towline-connect")
        try:
            while not wait([running], self.step()).done:
                pass
        except TimeoutError:
            running.add_done_callback(lambda late: None if late.exception() else discard(late.result()))
            raise
        return running.result()


class Transport:
    """An open connection: a connected socket, TCP, Unix or TLS, and WebSocket frames on it where they are wanted.

    Args:
        sock: Connected and non-blocking, its handshake done.
        where: Begins an error.
        tls: The settings of an encrypted one.
        framing: Of a WebSocket, to be opened (`open`); None for plain MQTT.

    Attributes:
        problem: Why the line broke, when more is known than that it did.
    """

    def __init__(self, sock: socket.socket, where: str, tls: Tls | None = None, framing: Framing | None = None) -> None:
        self._sock = sock
        self._where = where
        self._tls = tls
        self._framing = framing
        #: Bytes of MQTT that came along with the answer that opened the WebSocket.
        self._early = b""
        self._out = bytearray()
        #: Where reads land: one object of this size a read would have the heap grow and shrink each time.
        self._in = bytearray(READ_BYTES)
        #: Linux takes this back by itself after a while, so it is asked for again and again.
        self._at_once = sock.family != socket.AF_UNIX and hasattr(socket, "TCP_QUICKACK")
        #: TLS wants to send before it can read on (RFC 8446 section 4.6.3).
        self._stuck = False
        self.problem: BrokerError | None = None

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
        waits = isinstance(self._sock, ssl.SSLSocket) and self._sock.pending() > 0
        return waits or bool(self._early) or self.problem is not None

    def open(self, patience: Patience) -> None:
        """Open the WebSocket, if it is one; call it first.

        Raises:
            Unreachable: TL-M14, the server does not open it.
            OSError: There is no answer in time.
        """
        if self._framing is None:
            return
        self._out += self._framing.opening()
        while not self._framing.open:
            self.flush()
            data = self.read()
            if data:
                self._early = data
            elif data is not None:
                if self.problem:
                    raise self.problem
                self._framing.take(b"")
            elif not self._framing.open:
                patience.wait(self.fileno(), write=self.unsent > 0)

    def read(self) -> bytes | None:
        """Bytes that have arrived, None when there are none, ``b""`` when the peer has closed or the line broke."""
        if self._early or self.problem:
            early, self._early = self._early, b""
            return early
        data = self._read_plain() if self._tls is None else self._read_records(self._tls)
        if data and self._at_once:
            self._confirm()
        return data if self._framing is None or not data else self._unframed(self._framing, data)

    def _unframed(self, framing: Framing, data: bytes) -> bytes | None:
        taken, answer = framing.take(data)
        self._out += answer
        self.flush()
        if framing.ended is not None:
            self.problem = Unreachable("TL-M14", self._where, framing.ended, "Trying again.")
        return taken or (b"" if self.problem else None)

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
            self.problem = tls_problem(error, tls, self._where)
        except OSError:
            pass
        return b"".join(records)

    def write(self, data: bytes) -> bool:
        """Send what the system takes now and keep the rest for `flush`; False when the line broke."""
        self._out += data if self._framing is None else self._framing.frame(data)
        return self.flush()

    def flush(self) -> bool:
        """Send more of what was kept; False when the line broke."""
        while self._out:
            try:
                sent = self._sock.send(self._out)
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return True
            except OSError:
                if self._tls is not None and self.problem is None:
                    self._read_records(self._tls)  # the alert that says why may have arrived
                return False
            del self._out[:sent]
        return True

    def drain(self, timeout_s: float) -> bool:
        """Send all that was kept, waiting up to `timeout_s` seconds; False when it could not."""
        patience = Patience(timeout_s)
        with contextlib.suppress(TimeoutError):
            while self.flush() and self._out:
                patience.wait(self._sock.fileno(), write=True)
        return not self._out

    def close(self) -> None:
        """Close; never raises."""
        if self._framing is not None:
            self._out += self._framing.closing()
            self.flush()
        if isinstance(self._sock, ssl.SSLSocket) and not self._out:
            with contextlib.suppress(OSError, ValueError):
                self._sock.unwrap()  # sends close_notify and does not wait for the peer's
        with contextlib.suppress(OSError):
            self._sock.close()


#: An attempt that has not succeeded after this many seconds gets company (RFC 8305 section 5).
STAGGER: Final = 0.25
#: Receive buffer asked of the system, in bytes: two chunks.
RECEIVE_BUFFER: Final = 2 << 20
#: Probes of the system's own keep alive that may go unanswered, half a keep alive all together.
_PROBES: Final = 3
#: Seconds that Linux takes for its pauses at most.
_LONGEST_PROBE: Final = 32767
#: What to do about a proxy's answer.
_ADVICE: Final = {
    403: "Ask who runs the proxy to allow this host and port.",
    407: "Set a user in the proxy's URI and proxy_password_file.",
}
#: Reasons told when no address answers.
_REASONS_SHOWN: Final = 3


def connect(
    endpoint: Endpoint,
    *,
    tls: Tls | None = None,
    proxy: Proxy | None = None,
    source_address: str | None = None,
    timeout_s: float = 10.0,
    keep_alive_s: int = 60,
    cancelled: Callable[[], bool] = lambda: False,
    headers: Sequence[tuple[str, str]] = (),
    query: str = "",
) -> Transport:
    """Open a connection; its answer never blocks.

    Args:
        endpoint: The broker.
        tls: How to encrypt where the endpoint is ``mqtts`` or ``wss``; None for the defaults.
        proxy: The way there; None for the straight one.
        source_address: Address of this machine that the connection comes from; None for the system's choice.
        timeout_s: Seconds for all of it, the look-up of the name and all its addresses too.
        keep_alive_s: A peer that answers nothing on the TCP level for 1.5 times as long is given up; from 1.
        cancelled: Asked while waiting; True gives up at once.
        headers: Further ones of the request that opens a WebSocket.
        query: Of that request, in place of the endpoint's.

    Raises:
        Unreachable: With the reason: TL-M01 no connection, TL-M02 no TLS, TL-M07 the broker's certificate, TL-M09
            ours, TL-M14 no WebSocket, TL-M15 the proxy.
        ConfigError: The files under tls (TL-C30) or the proxy's password (TL-C31) can't be used, or python-socks
            is missing (TL-C34).
    """
    patience = Patience(timeout_s, cancelled)
    where = str(endpoint)
    security = (tls or Tls()) if endpoint.tls else None
    context = security.context() if security else None  # its files first: what is wrong there, no broker mends
    if proxy:
        sock = connect_through(proxy, endpoint, patience, source_address)
    else:
        sock = _connected(endpoint, source_address, patience)
    if endpoint.scheme != "unix":
        _tune(sock, keep_alive_s)
    if security and context:
        sock = handshake(sock, security, context, endpoint.host, where, patience)
    transport = Transport(sock, where, security, Framing(endpoint, headers, query) if endpoint.websocket else None)
    try:
        transport.open(patience)
    except BaseException as error:
        transport.close()
        if not isinstance(error, OSError):
            raise
        what, advice = f"no answer to the WebSocket's opening ({error})", "Is this port a WebSocket listener?"
        raise Unreachable("TL-M14", where, what, advice) from error
    return transport


def connect_through(
    proxy: Proxy, endpoint: Endpoint, patience: Patience, source_address: str | None = None
) -> socket.socket:
    """A non-blocking socket that leads to the broker.

    Raises:
        Unreachable: The proxy is not there (TL-M01), or does not let us through (TL-M15).
        ConfigError: Its password can't be read or carried (TL-C31), or python-socks is not installed (TL-C34).
    """
    try:
        import python_socks  # noqa: PLC0415  # optional: towline[proxy]
        from python_socks.sync import Proxy as Connector  # noqa: PLC0415
    except ImportError:
        what, advice = "a proxy needs the package python-socks", 'Run: pip install "towline[proxy]"'
        raise ConfigError("TL-C34", str(proxy), what, advice) from None
    http = proxy.scheme == "http"
    kind = python_socks.ProxyType.HTTP if http else python_socks.ProxyType.SOCKS5
    connector = Connector(kind, proxy.host, proxy.port, proxy.username or "", proxy.password(), rdns=True)
    own: dict[str, Any] = {"timeout": patience.left(), "local_addr": (source_address, 0) if source_address else None}
    try:
        sock = patience.call(lambda: connector.connect(endpoint.host, endpoint.port, **own), lambda late: late.close())
    except UnicodeError:  # it would carry the password
        what = "the proxy's user or password has characters that can't be carried"
        raise ConfigError("TL-C31", str(proxy), what, "Use ASCII.") from None
    except python_socks.ProxyConnectionError as error:
        reason = plain(error.__cause__ or error)
        where, advice = f"{endpoint} through {proxy}", "Is the proxy up, and the port right?"
        raise Unreachable("TL-M01", where, f"no connection ({reason})", advice) from None
    except (python_socks.ProxyError, OSError) as error:
        said, code = plain(error), getattr(error, "error_code", None) or 0
        if http and isinstance(error, python_socks.ProxyError):  # never its own words
            said = f"HTTP {http_status(code)}" if code else "no answer in HTTP"
        code = 407 if "authentication" in said else code
        what = f"the proxy {proxy} did not let us through: {said}"
        raise Unreachable(
            "TL-M15", str(endpoint), what, _ADVICE.get(code, "Does the proxy reach the broker?")
        ) from None
    sock.setblocking(False)
    return sock


#: Family of an answer of the resolver, and the address.
Address: TypeAlias = tuple[int, Any]


def interleaved(addresses: Iterable[Address]) -> list[Address]:
    """The resolver's order with the families taking turns, its first one first (RFC 8305 section 4)."""
    families: dict[int, list[Address]] = {}
    for address in dict.fromkeys(addresses):
        families.setdefault(address[0], []).append(address)
    return [a for a in chain.from_iterable(zip_longest(*families.values())) if a is not None]


def _addresses(endpoint: Endpoint, source: str | None, patience: Patience) -> list[Address]:
    host, port = endpoint.host, endpoint.port
    family = socket.AF_UNSPEC if source is None else socket.AF_INET6 if ":" in source else socket.AF_INET
    try:
        answers = patience.call(lambda: socket.getaddrinfo(host, port, family, socket.SOCK_STREAM))
    except (OSError, UnicodeError) as error:
        reason = plain(error) if isinstance(error, OSError) else "not a host name"
        like = f" that fits source_address {source}" if source else ""
        what = f'no address for "{host}"{like} ({reason})'
        do = "Check the broker's host, and the DNS of this machine."
        raise Unreachable("TL-M01", str(endpoint), what, do) from error
    return interleaved((family, where) for family, _, _, _, where in answers)


def _connected(endpoint: Endpoint, source: str | None, patience: Patience) -> socket.socket:
    """Connect to a Unix socket, or to the first address of a name that answers."""
    unix, failures = endpoint.scheme == "unix", list[OSError]()
    addresses = [(socket.AF_UNIX, endpoint.path)] if unix else _addresses(endpoint, source, patience)
    try:
        return _first_connected(addresses, source, patience, failures)
    except OSError as error:
        many = f" to any of {len(addresses)} addresses" if len(addresses) > 1 else ""
        many += f" from {source}" if source else ""
        reasons = "; ".join([*dict.fromkeys(map(plain, [*failures, error]))][:_REASONS_SHOWN])
        advice = f"Is the broker up, and {'may we open its socket' if unix else 'the port right'}?"
        raise Unreachable("TL-M01", str(endpoint), f"no connection{many} ({reasons})", advice) from error


def _first_connected(
    addresses: Sequence[Address], source: str | None, patience: Patience, failures: list[OSError]
) -> socket.socket:
    """The socket that is connected first; a slow attempt gets company after `STAGGER` seconds.

    The errors of those before the last go to `failures`.

    Raises:
        OSError: All have failed (the last failure), or the time is over.
    """
    waiting, next_at = deque(addresses), 0.0
    running: dict[int, socket.socket] = {}
    try:
        while True:
            while waiting and (not running or time.monotonic() >= next_at):
                try:
                    sock = _begun(waiting.popleft(), source, patience)
                except OSError as error:
                    failures.append(error)
                else:
                    running[sock.fileno()], next_at = sock, time.monotonic() + STAGGER
            if not running:
                raise failures.pop()
            poller = select.poll()
            for descriptor in running:
                poller.register(descriptor, select.POLLOUT)
            pause = max(0.0, next_at - time.monotonic()) if waiting else 1.0
            for descriptor, _ in poller.poll(patience.step(pause) * 1000):
                sock = running.pop(descriptor)
                if not (code := sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)):
                    return sock
                sock.close()
                failures.append(OSError(code, os.strerror(code)))
    finally:
        for sock in running.values():
            sock.close()


def _begun(address: Address, source: str | None, patience: Patience) -> socket.socket:
    sock = socket.socket(address[0], socket.SOCK_STREAM)  # fails where there is no IPv6
    with contextlib.ExitStack() as undo:
        undo.callback(sock.close)
        sock.setblocking(False)
        if source is not None:
            sock.bind((source, 0))
        while (code := sock.connect_ex(address[1])) == errno.EAGAIN:
            time.sleep(patience.step(0.02))  # unix(7): the listener's queue is full; there is nothing to poll for
        if code not in (0, errno.EINPROGRESS):
            raise OSError(code, os.strerror(code))
        undo.pop_all()
    return sock


def _tune(sock: socket.socket, keep_alive_s: int) -> None:
    """Send at once, read much, and give up a peer that acknowledges nothing for 1.5 times the keep alive.

    The system asks a silent peer itself, so that it is given up also while the session sends no PINGREQ.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER)
    if hasattr(socket, "TCP_USER_TIMEOUT") and keep_alive_s:
        # Finds a half-open line also while nothing is read: our pings then go unacknowledged.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(keep_alive_s * 1500))
    probe = max(1, keep_alive_s // (2 * _PROBES))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", keep_alive_s), ("TCP_KEEPINTVL", probe), ("TCP_KEEPCNT", _PROBES)):
        if value and hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), min(value, _LONGEST_PROBE))


def handshake(
    sock: socket.socket, tls: Tls, context: ssl.SSLContext, host: str, where: str, patience: Patience
) -> ssl.SSLSocket:
    """Encrypt a connected socket; it is closed when that fails.

    Args:
        sock: Non-blocking.
        tls: The settings.
        context: Made of them.
        host: Name or address in the broker's URI, for verification and SNI unless `tls` names another.
        where: Begins the error.
        patience: The time there is.

    Raises:
        Unreachable: The broker's certificate is not accepted (TL-M07), ours is not (TL-M09), or TLS fails (TL-M02).
        ConfigError: The server name is none (TL-C30).
    """
    name = tls.server_name or host
    try:
        sock = wrapped = context.wrap_socket(sock, server_hostname=name, do_handshake_on_connect=False)
        _shake(wrapped, patience)
    except BaseException as error:
        shown = _shown_certificate(sock) if isinstance(error, ssl.SSLCertVerificationError) else {}
        sock.close()
        if isinstance(error, ssl.SSLCertVerificationError):
            what, advice = certificate_problem(error.verify_code, error.verify_message, name, shown)
            raise Unreachable("TL-M07", where, what, advice) from error
        if isinstance(error, OSError):
            raise tls_problem(error, tls, where) from error
        if isinstance(error, ValueError):  # an ill-formed name; UnicodeError is one
            what = f'"{name}" can\'t be the name of a server'
            raise ConfigError("TL-C30", where, what, "Set tls.server_name.") from None
        raise
    return wrapped


def _shake(wrapped: ssl.SSLSocket, patience: Patience) -> None:
    while True:
        try:
            wrapped.do_handshake()
        except ssl.SSLWantReadError:
            patience.wait(wrapped.fileno())
        except ssl.SSLWantWriteError:
            patience.wait(wrapped.fileno(), write=True)
        else:
            return


def _shown_certificate(wrapped: socket.socket) -> Mapping[str, Any]:
    """The certificate that was refused, as `getpeercert` shows an accepted one; empty when it can't be had.

    Before Python 3.13 the chain of a failed handshake is reachable only beneath the public class.
    """
    with contextlib.suppress(Exception):
        info = wrapped._sslobj.get_unverified_chain()[0].get_info()  # type: ignore[attr-defined]  # noqa: SLF001
        if isinstance(info, dict):
            return info
    return {}
