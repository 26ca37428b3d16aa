"""Connections to a broker: open byte streams that never block, the same few verbs whatever lies beneath.

A connection is opened step by step, look-up, socket or proxy, TLS, WebSocket, on a thread of its own, which is left
behind when the time for all of it is over: a resolver can't be interrupted. What an error means is the step's to say.
A proxy, HTTP CONNECT or SOCKS5 by `python-socks`, looks the broker's name up, so it works where this machine's DNS
knows nothing of the outside. What it gets to see is the broker's name and, unless the broker is reached by TLS,
everything.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import select
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import partial
from itertools import chain, zip_longest
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

from wsproto import ConnectionType, WSConnection
from wsproto import events as web
from wsproto.frame_protocol import CloseReason
from wsproto.utilities import LocalProtocolError, RemoteProtocolError

from towline.errors import BrokerError, ConfigError, TowlineError, Unreachable
from towline.net.endpoint import Endpoint, Proxy, http_status, other_port, plain
from towline.net.tls import Tls, certificate_problem, tls_problem
from towline.text import printable
from towline.threads import later

if TYPE_CHECKING:
    from towline.net.settings import ConnectionSettings

T = TypeVar("T")

#: Most bytes taken in one read: a chunk of some ten thousand small messages.
READ_BYTES: Final = 1 << 20
#: How often a wait asks whether it should be given up, in seconds.
_STEP: Final = 0.1
#: Seconds after which an attempt that nobody waits for any more ends; who waits says first that the time is over.
_LEFT_BEHIND_S: Final = 5.0
#: [MQTT-6.0.0-3], [MQTT-6.0.0-4].
SUBPROTOCOL: Final = "mqtt"
#: Bytes of the peer's own words that are shown.
_WORDS_SHOWN: Final = 100
#: A header's name [RFC 9110 section 5.6.2], and a value without control characters.
_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE: Final = re.compile(r"[\t\x20-\x7e\xa0-\xff]*")
#: What the request says by itself.
_OURS: Final = ("host", "upgrade", "connection")


def within(
    timeout_s: float,
    cancelled: Callable[[], bool],
    call: Callable[[], T],
    discard: Callable[[T], object] = lambda _result: None,
) -> T:
    """Run a call that may block for long, such as a look-up in the DNS, and wait for it no longer than we may.

    Args:
        timeout_s: Longest wait in seconds.
        cancelled: Asked at least every 0.1 s; True ends the wait.
        call: Runs on a thread of its own, which is left behind when the wait is over.
        discard: Gets the result that came too late.

    Raises:
        TimeoutError: No result in time, or the wait was given up.
        BaseException: Whatever `call` raises.
    """
    if cancelled():
        raise TimeoutError("given up")
    end = time.monotonic() + timeout_s
    running = _running(call)
    while True:
        given_up, left = cancelled(), end - time.monotonic()
        if given_up or left <= 0:
            _discarded(running, discard)
            raise TimeoutError("given up" if given_up else f"no answer within {timeout_s:g} s")
        if wait([running], min(left, _STEP)).done:
            return running.result()


def _running(call: Callable[[], T]) -> Future[T]:
    """A call on a thread of its own, or here where there is none to be had: at a limit, or as CPython 3.12 exits."""
    try:
        return later(call, "towline-connect")
    except RuntimeError:
        done = Future[T]()
        try:
            done.set_result(call())
        except Exception as error:  # noqa: BLE001 - raised where the result is asked for
            done.set_exception(error)
        return done


def _discarded(running: Future[T], discard: Callable[[T], object]) -> None:
    running.add_done_callback(lambda late: None if late.exception() else discard(late.result()))


def header_problem(name: str, value: str) -> str | None:
    """Say why a request can't have a header, or None; never with its value, which may be a secret."""
    if not _NAME.fullmatch(name):
        return f'"{name}" is no name of an HTTP header'
    if name.lower() in _OURS or name.lower().startswith("sec-websocket-"):
        return f'the header "{name}" is part of the WebSocket request itself'
    return None if _VALUE.fullmatch(value) else f'the value of the header "{name}" has characters HTTP does not take'


class Framing:
    """MQTT in WebSocket frames (MQTT 5.0 and 3.1.1 section 6), the client's side, as a machine without a socket.

    Bytes of the connection go in, bytes of MQTT and answers for the peer come out. Ping and close are answered here;
    text frames end the connection [MQTT-6.0.0-1]. A frame is handed on as it arrives, so nothing is collected: packets
    may span frames and frames may hold many packets [MQTT-6.0.0-2], and the MQTT decoder's limit holds for both.

    Args:
        endpoint: Whose host and path are asked for.
        headers: Further ones of the request (`header_problem`).
        query: In place of the endpoint's.

    Attributes:
        open: The server has opened it.
        ended: Why nothing more will come, in words; None while something may.
    """

    def __init__(self, endpoint: Endpoint, headers: Sequence[tuple[str, str]] = (), query: str = "") -> None:
        self._endpoint = endpoint
        self._target = endpoint.path + (f"?{query}" if (query := query or endpoint.query) else "")
        self._headers = [(name.encode("ascii"), value.encode("latin-1")) for name, value in headers]
        self._web = WSConnection(ConnectionType.CLIENT)
        self.ended: str | None = None
        self.open = False

    def opening(self) -> bytes:
        """The request that opens the WebSocket; send it first."""
        host, protocols = self._endpoint.authority, [SUBPROTOCOL]
        request = web.Request(host=host, target=self._target, subprotocols=protocols, extra_headers=self._headers)
        return self._web.send(request)

    def refusal(self, what: str, do: str = "") -> Unreachable:
        """TL-M14, with the doubts that a port of another kind leaves."""
        where = str(self._endpoint)
        doubt = f"Is this port a WebSocket listener?{'' if self._endpoint.tls else other_port(where)}"
        return Unreachable("TL-M14", where, what, do or doubt)

    def _rejected(self, status: int) -> Unreachable:
        do = f'Is "{self._endpoint.path}" the right path?'
        if status in {401, 403}:
            do = "What stands before the broker wants a login; Towline has none for it."
        elif status == 426 or status >= 500:
            do = "Is the broker behind it up, and does it take WebSockets?"
        return self.refusal(f"the server answers HTTP {http_status(status)} instead of opening a WebSocket", do)

    def take(self, data: bytes) -> tuple[bytes, bytes]:
        """Take received bytes, ``b""`` for a closed connection; the server's answer to `opening` comes first.

        Returns:
            Bytes of MQTT, and bytes to send to the peer: pongs, an answered close.

        Raises:
            Unreachable: TL-M14, the server does not open the WebSocket.
        """
        if self.ended is not None:
            return b"", b""
        if not data and not self.open:
            raise self.refusal("the server closed instead of answering")
        parts: list[bytes] = []
        answer = bytearray()
        try:
            self._web.receive_data(data)
            for event in self._web.events():
                if isinstance(event, web.BytesMessage):
                    parts.append(bytes(event.data))
                else:
                    answer += self._control(event)
                if isinstance(event, web.TextMessage | web.CloseConnection):
                    break  # nothing behind it counts
        except RemoteProtocolError as error:  # of the answer: once it is open, wsproto closes it instead
            said = printable(str(error), _WORDS_SHOWN)
            foreign = error.__context__ is not None  # of h11, which reads the answer
            what = "does not answer in HTTP" if foreign else f"answers, but opens no WebSocket ({said})"
            raise self.refusal(f"the server {what}") from None
        return b"".join(parts), bytes(answer)

    def _control(self, event: web.Event) -> bytes:
        if isinstance(event, web.AcceptConnection):
            if event.subprotocol != SUBPROTOCOL:
                what = 'the server opens a WebSocket, but not with the subprotocol "mqtt" [MQTT-6.0.0-4]'
                raise self.refusal(what, f'Is "{self._endpoint.path}" the path of MQTT?')
            self.open = True
        if isinstance(event, web.RejectConnection):
            raise self._rejected(event.status_code)
        if isinstance(event, web.Ping):
            return self._web.send(event.response())
        if isinstance(event, web.TextMessage):
            self.ended = "the server sent a text frame [MQTT-6.0.0-1]"
            return self.closing(CloseReason.UNSUPPORTED_DATA)
        if isinstance(event, web.CloseConnection):
            self.ended = _closed(event)
            return self.closing(CloseReason.NORMAL_CLOSURE)
        return b""

    def frame(self, data: bytes) -> bytes:
        """One binary frame with these bytes [MQTT-6.0.0-1]."""
        return self._said(web.BytesMessage(data=data))

    def closing(self, code: int = CloseReason.NORMAL_CLOSURE) -> bytes:
        """A close frame."""
        return self._said(web.CloseConnection(code=code))

    def _said(self, event: web.Event) -> bytes:
        """As bytes; none once the WebSocket is closed."""
        try:
            return self._web.send(event)
        except LocalProtocolError:
            return b""


def _closed(event: web.CloseConnection) -> str:
    name = event.code.name.lower().replace("_", " ") if isinstance(event.code, CloseReason) else ""
    details = ", ".join(filter(None, (f"{int(event.code)}", name, printable(event.reason or "", _WORDS_SHOWN))))
    return f"the WebSocket was closed ({details})"


class Transport:
    """An open connection: a connected socket, TCP, Unix or TLS, and WebSocket frames on it where they are wanted.

    Args:
        sock: Connected and non-blocking, its handshake done.
        where: Begins an error.
        tls: The settings of an encrypted one.
        framing: Of an open WebSocket; None for plain MQTT.
        early: Bytes of MQTT that came along with the answer that opened the WebSocket.

    Attributes:
        problem: Why the line broke, when more is known than that it did.
    """

    def __init__(
        self,
        sock: socket.socket,
        where: str,
        tls: Tls | None = None,
        framing: Framing | None = None,
        early: bytes = b"",
    ) -> None:
        self._sock = sock
        self._where = where
        self._tls = tls
        self._framing = framing
        self._early = early
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
        try:
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
        except OSError:
            return  # the connection has ended, as the next read tells

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
        end = time.monotonic() + timeout_s
        poller = select.poll()
        poller.register(self._sock, select.POLLOUT)
        while self.flush() and self._out and (left := end - time.monotonic()) > 0:
            poller.poll(left * 1000)
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
    settings: ConnectionSettings,
    *,
    keep_alive_s: int = 60,
    cancelled: Callable[[], bool] = lambda: False,
    headers: Sequence[tuple[str, str]] = (),
    query: str = "",
) -> Transport:
    """Open a connection, within ``connect_timeout_s`` with the look-up of the name and all its addresses.

    Args:
        endpoint: The broker.
        settings: How to get there.
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
    tls, proxy, timeout_s = settings.tls if endpoint.tls else None, settings.way, settings.connect_timeout_s
    context = tls.context() if tls else None  # its files first: what is wrong there, no broker mends
    framing = Framing(endpoint, headers, query) if endpoint.websocket else None
    way = _Way(endpoint, settings.source_address, timeout_s + _LEFT_BEHIND_S)

    def opened() -> Transport:
        with contextlib.ExitStack() as undo:
            sock = undo.enter_context(way.proxied(proxy) if proxy else way.straight())
            sock.settimeout(way.left_s())
            if endpoint.scheme != "unix":
                _tune(sock, keep_alive_s)
            if tls and context:
                sock = way.encrypted(undo, sock, tls, context)
            early = way.framed(sock, framing, tls) if framing else b""
            sock.setblocking(False)
            undo.pop_all()
        return Transport(sock, str(endpoint), tls, framing, early)

    try:
        return within(timeout_s, cancelled, opened, Transport.close)
    except (OSError, ValueError) as error:
        raise way.problem(error) from None  # that of a proxy may carry its password


#: Family of an answer of the resolver, and the address.
Address: TypeAlias = tuple[int, Any]


class _Way:
    """The steps of one connection; each blocks, and says first what an error means from then on (`problem`).

    All but the look-up of a name, and what a proxy says, end `timeout_s` seconds after it was made.
    """

    def __init__(self, endpoint: Endpoint, source: str | None, timeout_s: float) -> None:
        self._endpoint = endpoint
        self._where = str(endpoint)
        self._source = source
        self._ends = time.monotonic() + timeout_s
        #: Of single addresses.
        self._failures: list[BaseException] = []
        self.problem: Callable[[Exception], TowlineError] = self._no_address

    def left_s(self) -> float:
        """Seconds that are left, more than none."""
        return max(0.01, self._ends - time.monotonic())

    def straight(self) -> socket.socket:
        """Connect to a Unix socket, or to the first address of a name that answers."""
        endpoint, source = self._endpoint, self._source
        addresses: list[Address] = [(socket.AF_UNIX, endpoint.path)]
        if endpoint.scheme != "unix":
            family = socket.AF_UNSPEC if source is None else socket.AF_INET6 if ":" in source else socket.AF_INET
            answers = socket.getaddrinfo(endpoint.host, endpoint.port, family, socket.SOCK_STREAM)
            addresses = interleaved((family, where) for family, _, _, _, where in answers)
        self.problem = partial(self._not_connected, len(addresses))
        return self._first_connected(addresses)

    def _no_address(self, error: Exception) -> TowlineError:
        reason = plain(error) if isinstance(error, OSError) else "not a host name"
        like = f" that fits source_address {self._source}" if self._source else ""
        what = f'no address for "{self._endpoint.host}"{like} ({reason})'
        return Unreachable("TL-M01", self._where, what, "Check the broker's host, and the DNS of this machine.")

    def _not_connected(self, addresses: int, error: Exception) -> TowlineError:
        many = f" to any of {addresses} addresses" if addresses > 1 else ""
        many += f" from {self._source}" if self._source else ""
        reasons = "; ".join([*dict.fromkeys(map(plain, [*self._failures, error]))][:_REASONS_SHOWN])
        right = "may we open its socket" if self._endpoint.scheme == "unix" else "the port right"
        return Unreachable("TL-M01", self._where, f"no connection{many} ({reasons})", f"Is the broker up, and {right}?")

    def _first_connected(self, addresses: Iterable[Address]) -> socket.socket:
        """The socket that is connected first; a slow attempt gets company after `STAGGER` seconds."""
        waiting, running = deque(addresses), set[Future[socket.socket]]()
        while waiting or running:
            if waiting:
                running.add(_running(partial(_connected, *waiting.popleft(), self._source, self.left_s())))
                if time.monotonic() > self._ends:
                    waiting.clear()
            done, running = wait(running, STAGGER if waiting else None, FIRST_COMPLETED)
            for ended in done:
                if error := ended.exception():
                    self._failures.append(error)
                    continue
                for late in running | done - {ended}:
                    _discarded(late, socket.socket.close)
                return ended.result()
        raise self._failures.pop()

    def proxied(self, proxy: Proxy) -> socket.socket:
        """Connect by a proxy.

        Raises:
            ConfigError: Its password can't be read (TL-C31), or python-socks is not installed (TL-C34).
        """
        try:
            import python_socks  # noqa: PLC0415  # optional: towline[proxy]
            from python_socks.sync import Proxy as Connector  # noqa: PLC0415
        except ImportError:
            what, advice = "a proxy needs the package python-socks", 'Run: pip install "towline[proxy]"'
            raise ConfigError("TL-C34", str(proxy), what, advice) from None
        http = proxy.scheme == "http"

        def problem(error: Exception) -> TowlineError:
            if isinstance(error, UnicodeError):
                what = "the proxy's user or password has characters that can't be carried"
                return ConfigError("TL-C31", str(proxy), what, "Use ASCII.")
            if isinstance(error, python_socks.ProxyConnectionError):
                what, where = f"no connection ({plain(error.__cause__ or error)})", f"{self._where} through {proxy}"
                return Unreachable("TL-M01", where, what, "Is the proxy up, and the port right?")
            said, code = plain(error), getattr(error, "error_code", None) or 0
            if http and isinstance(error, python_socks.ProxyError):  # never its own words
                said = f"HTTP {http_status(code)}" if code else "no answer in HTTP"
            advice = _ADVICE.get(407 if "authentication" in said else code, "Does the proxy reach the broker?")
            return Unreachable("TL-M15", self._where, f"the proxy {proxy} did not let us through: {said}", advice)

        self.problem = problem
        kind = python_socks.ProxyType.HTTP if http else python_socks.ProxyType.SOCKS5
        connector = Connector(kind, proxy.host, proxy.port, proxy.username or "", proxy.password(), rdns=True)
        own: dict[str, Any] = {"timeout": self.left_s(), "local_addr": (self._source, 0) if self._source else None}
        try:
            return connector.connect(self._endpoint.host, self._endpoint.port, **own)
        except python_socks.ProxyError as error:  # no OSError
            raise problem(error) from None

    def encrypted(
        self, undo: contextlib.ExitStack, sock: socket.socket, tls: Tls, context: ssl.SSLContext
    ) -> socket.socket:
        """Encrypt a connection; `undo` closes it.

        Raises:
            Unreachable: TL-M07, the broker's certificate is not accepted.
            ConfigError: TL-C30, the server name is none.
        """
        self.problem = partial(tls_problem, tls=tls, where=self._where)
        name = tls.server_name or self._endpoint.host
        try:
            wrapped = context.wrap_socket(sock, server_hostname=name, do_handshake_on_connect=False)
            undo.enter_context(wrapped).do_handshake()
        except ssl.SSLCertVerificationError as error:
            shown = _shown_certificate(wrapped)
            what, advice = certificate_problem(error.verify_code, error.verify_message, name, shown)
            raise Unreachable("TL-M07", self._where, what, advice) from error
        except ValueError:  # an ill-formed name; UnicodeError is one
            what = f'"{name}" can\'t be the name of a server'
            raise ConfigError("TL-C30", self._where, what, "Set tls.server_name.") from None
        return wrapped

    def framed(self, sock: socket.socket, framing: Framing, tls: Tls | None) -> bytes:
        """Open a WebSocket; bytes of MQTT that came along with the answer.

        Raises:
            Unreachable: TL-M14, the server does not open it.
        """

        def problem(error: Exception) -> TowlineError:
            if tls and isinstance(error, ssl.SSLError):
                return tls_problem(error, tls, self._where)
            return framing.refusal(f"no answer to the WebSocket's opening ({plain(error)})")

        self.problem = problem
        sock.sendall(framing.opening())
        early = b""
        while not framing.open:
            sock.settimeout(self.left_s())
            early, answer = framing.take(sock.recv(READ_BYTES))
            sock.sendall(answer)
        if framing.ended is not None:
            raise framing.refusal(framing.ended, "Trying again.")
        return early


def interleaved(addresses: Iterable[Address]) -> list[Address]:
    """The resolver's order with the families taking turns, its first one first (RFC 8305 section 4)."""
    families: dict[int, list[Address]] = {}
    for address in dict.fromkeys(addresses):
        families.setdefault(address[0], []).append(address)
    return [a for a in chain.from_iterable(zip_longest(*families.values())) if a is not None]


def _connected(family: int, address: Any, source: str | None, timeout_s: float) -> socket.socket:
    end = time.monotonic() + timeout_s
    sock = socket.socket(family, socket.SOCK_STREAM)  # fails where there is no IPv6
    with contextlib.ExitStack() as undo:
        undo.callback(sock.close)
        sock.settimeout(timeout_s)
        if source is not None:
            sock.bind((source, 0))
        while (code := sock.connect_ex(address)) == errno.EAGAIN and time.monotonic() < end:
            time.sleep(0.02)  # unix(7): the listener's queue is full; there is nothing to poll for
        if code:
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


def _shown_certificate(wrapped: socket.socket) -> Mapping[str, Any]:
    """The certificate that was refused, as `getpeercert` shows an accepted one; empty when it can't be had.

    Before Python 3.13 the chain of a failed handshake is reachable only beneath the public class.
    """
    with contextlib.suppress(Exception):
        info = wrapped._sslobj.get_unverified_chain()[0].get_info()  # type: ignore[attr-defined]  # noqa: SLF001
        if isinstance(info, dict):
            return info
    return {}
