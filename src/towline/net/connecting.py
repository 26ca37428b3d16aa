"""Non-blocking byte streams to a broker: TCP, Unix socket, TLS, WebSocket and proxies behind one class.

A connection is opened step by step (DNS, socket or proxy, TLS, WebSocket) on its own thread, because a resolver cannot
be interrupted. The thread is abandoned at the timeout. Each step says what its errors mean. A proxy (HTTP CONNECT or
SOCKS5, by `python-socks`) resolves the broker's name, so the local DNS need not know it. The proxy sees the broker's
name and, without TLS, all bytes.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

from wsproto import ConnectionType, WSConnection
from wsproto import events as web
from wsproto.frame_protocol import CloseReason
from wsproto.utilities import LocalProtocolError, RemoteProtocolError

from towline.errors import BrokerError, ConfigError, TowlineError, Unreachable
from towline.net.endpoint import Endpoint, Proxy, Tls, error_text, tls_error, tls_port_hint
from towline.providers import read_secret
from towline.text import printable
from towline.threads import call_in_thread

if TYPE_CHECKING:
    from towline.net.settings import ConnectionSettings

T = TypeVar("T")

#: Largest read in bytes: a chunk of some ten thousand small messages.
READ_BYTES: Final = 1 << 20
#: Interval in seconds at which a wait checks for cancellation.
_CANCEL_POLL_S: Final = 0.1
#: Further seconds after which an abandoned attempt ends; its caller has reported the timeout before.
_ABANDONED_ATTEMPT_S: Final = 5.0
#: WebSocket subprotocol [MQTT-6.0.0-3], [MQTT-6.0.0-4].
SUBPROTOCOL: Final = "mqtt"
#: Characters of the peer's text shown in an error.
_SHOWN_TEXT_BYTES: Final = 100


def call_with_timeout(
    timeout_s: float,
    cancelled: Callable[[], bool],
    call: Callable[[], T],
    discard_result: Callable[[T], object] = lambda _result: None,
) -> T:
    """Run a blocking call, such as a DNS lookup, with a timeout and a cancellation check.

    Args:
        timeout_s: Longest wait in seconds.
        cancelled: Polled at least every 0.1 s; True ends the wait.
        call: Runs on its own thread, which is abandoned at the end of the wait.
        discard_result: Called with a result that comes too late.

    Raises:
        TimeoutError: No result in time, or cancelled.
        BaseException: Any error of `call`.
    """
    deadline = time.monotonic() + timeout_s
    future = _start_call(call)
    while True:
        was_cancelled, remaining_s = cancelled(), deadline - time.monotonic()
        if was_cancelled or remaining_s <= 0:
            _discard_late_result(future, discard_result)
            raise TimeoutError("cancelled" if was_cancelled else f"no answer within {timeout_s:g} s")
        if wait([future], min(remaining_s, _CANCEL_POLL_S)).done:
            return future.result()


def _start_call(call: Callable[[], T]) -> Future[T]:
    """Run a call on a new thread; on this thread if none can be started (thread limit, exit of CPython 3.12)."""
    try:
        return call_in_thread(call, "towline-connect")
    except RuntimeError:
        future = Future[T]()
        try:
            future.set_result(call())
        except Exception as error:  # noqa: BLE001 - raised by Future.result
            future.set_exception(error)
        return future


def _discard_late_result(future: Future[T], discard: Callable[[T], object]) -> None:
    future.add_done_callback(lambda ended: None if ended.exception() else discard(ended.result()))


class WebSocketFraming:
    """MQTT in WebSocket frames, client side, without a socket (MQTT 5.0 and 3.1.1 section 6).

    Bytes of the connection go in; MQTT bytes and replies for the peer come out. Ping and close frames are answered
    here; a text frame ends the connection [MQTT-6.0.0-1]. Payload is passed on as it arrives: packets may span frames,
    and a frame may hold many packets [MQTT-6.0.0-2]. The size limit of the MQTT decoder holds for both.

    Args:
        endpoint: Host and path of the request.
        headers: Further request headers.
        query: Query of the request; it may be a secret.

    Attributes:
        open: The server has opened the WebSocket.
        end_reason: Reason for the end of the stream; None while it is open.
    """

    def __init__(self, endpoint: Endpoint, headers: Sequence[tuple[str, str]] = (), query: str = "") -> None:
        self._endpoint = endpoint
        self._target = f"{endpoint.path}?{query}" if query else endpoint.path
        self._headers = [(name.encode("ascii"), value.encode("latin-1")) for name, value in headers]
        self._websocket = WSConnection(ConnectionType.CLIENT)
        self.end_reason: str | None = None
        self.open = False

    def opening_request(self) -> bytes:
        """Return the HTTP request that opens the WebSocket; send it first."""
        host, protocols = self._endpoint.authority, [SUBPROTOCOL]
        request = web.Request(host=host, target=self._target, subprotocols=protocols, extra_headers=self._headers)
        return self._websocket.send(request)

    def websocket_error(self, problem: str, remedy: str = "") -> Unreachable:
        """Return TL-M14; by default its remedy asks for the kind of the port."""
        location = str(self._endpoint)
        question = f"Is this port a WebSocket listener?{'' if self._endpoint.tls else tls_port_hint(location)}"
        return Unreachable("TL-M14", location, problem, remedy or question)

    def receive(self, data: bytes) -> tuple[bytes, bytes]:
        """Process received bytes, ``b""`` for a closed connection; the reply to `opening_request` comes first.

        Returns:
            MQTT bytes, and bytes to send to the peer: pongs, the reply to a close frame.

        Raises:
            Unreachable: TL-M14, the server does not open the WebSocket.
        """
        if self.end_reason is not None:
            return b"", b""
        payloads: list[bytes] = []
        reply = bytearray()
        try:
            self._websocket.receive_data(data)
            for event in self._websocket.events():
                if isinstance(event, web.BytesMessage):
                    payloads.append(bytes(event.data))
                else:
                    reply += self._handle_control(event)
                if isinstance(event, web.TextMessage | web.CloseConnection):
                    break  # frames behind it are ignored
        except RemoteProtocolError as error:  # in the opening response: later, wsproto closes the WebSocket instead
            detail = printable(str(error), _SHOWN_TEXT_BYTES)
            raise self.websocket_error(f"the server opens no WebSocket ({detail})") from None
        return b"".join(payloads), bytes(reply)

    def _handle_control(self, event: web.Event) -> bytes:
        if isinstance(event, web.AcceptConnection):
            if event.subprotocol != SUBPROTOCOL:
                problem = 'the server opens a WebSocket, but not with the subprotocol "mqtt" [MQTT-6.0.0-4]'
                raise self.websocket_error(problem, f'Is "{self._endpoint.path}" the path of MQTT?')
            self.open = True
        if isinstance(event, web.RejectConnection):
            problem = f"the server answers HTTP {event.status_code} instead of opening a WebSocket"
            remedy = f'Is "{self._endpoint.path}" the right path, and websocket_headers_file a login that it needs?'
            raise self.websocket_error(problem, remedy)
        if isinstance(event, web.Ping):
            return self._websocket.send(event.response())
        if isinstance(event, web.TextMessage):
            self.end_reason = "the server sent a text frame [MQTT-6.0.0-1]"
            return self.encode(web.CloseConnection(code=CloseReason.UNSUPPORTED_DATA))
        if isinstance(event, web.CloseConnection):
            reason = printable(event.reason or "", _SHOWN_TEXT_BYTES)
            self.end_reason = f"the WebSocket was closed ({' '.join(filter(None, (f'{int(event.code)}', reason)))})"
            return self.encode(web.CloseConnection(code=CloseReason.NORMAL_CLOSURE))
        return b""

    def encode(self, event: web.Event) -> bytes:
        """Encode a frame: MQTT is sent in binary ones [MQTT-6.0.0-1]; empty once the WebSocket is closed."""
        with contextlib.suppress(LocalProtocolError):
            return self._websocket.send(event)
        return b""


class Transport:
    """Open connection: a TCP, Unix or TLS socket, optionally with WebSocket frames.

    Args:
        sock: Connected non-blocking socket, handshake done.
        location: Endpoint as errors show it.
        tls: TLS settings of an encrypted connection.
        framing: WebSocket framing; None for plain MQTT.

    Attributes:
        error: Cause of the connection loss, if more is known than the loss itself.
    """

    def __init__(
        self,
        sock: socket.socket,
        location: str,
        tls: Tls | None = None,
        framing: WebSocketFraming | None = None,
    ) -> None:
        self._sock = sock
        self._location = location
        self._tls = tls
        self._framing = framing
        self._send_buffer = bytearray()
        #: Reused read buffer: a new object of this size per read would grow and shrink the heap each time.
        self._read_buffer = bytearray(READ_BYTES)
        #: Linux resets TCP_QUICKACK after a while, so it is set after each read.
        self._quick_ack = sock.family != socket.AF_UNIX and hasattr(socket, "TCP_QUICKACK")
        #: TLS must send before it can read on (RFC 8446 section 4.6.3).
        self._tls_wants_write = False
        self.error: BrokerError | None = None

    def fileno(self) -> int:
        """Return the file descriptor, for a selector."""
        return self._sock.fileno()

    @property
    def unsent_bytes(self) -> int:
        """Bytes written but not yet accepted by the system; while there are any, poll for writability too."""
        return len(self._send_buffer) or int(self._tls_wants_write)

    @property
    def has_buffered_input(self) -> bool:
        """Whether input is buffered here, where no selector sees it: read before polling."""
        tls_pending = isinstance(self._sock, ssl.SSLSocket) and self._sock.pending() > 0
        return tls_pending or self.error is not None

    def read(self) -> bytes | None:
        """Return received bytes; None if there are none, ``b""`` after the end of the connection."""
        if self.error:
            return b""
        data = self._read_plain() if self._tls is None else self._read_tls_records(self._tls)
        if data and self._quick_ack:
            self._request_quick_ack()
        return data if self._framing is None or not data else self._read_websocket(self._framing, data)

    def _read_websocket(self, framing: WebSocketFraming, data: bytes) -> bytes | None:
        payload, reply = framing.receive(data)
        self._send_buffer += reply
        self.flush()
        if framing.end_reason is not None:
            self.error = Unreachable("TL-M14", self._location, framing.end_reason, "Trying again.")
        return payload or (b"" if self.error else None)

    def _read_plain(self) -> bytes | None:
        try:
            size = self._sock.recv_into(self._read_buffer)
        except BlockingIOError:
            return None
        except OSError:
            return b""
        return bytes(memoryview(self._read_buffer)[:size])

    def _request_quick_ack(self) -> None:
        """Make TCP acknowledge now: a broker without TCP_NODELAY sends no second small packet before (RFC 896)."""
        try:
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
        except OSError:
            return  # the connection has ended; the next read reports it

    def _read_tls_records(self, tls: Tls) -> bytes | None:
        """Read all available TLS records; one call of ssl returns one record of at most 16 KiB."""
        records: list[bytes] = []
        size = 0
        self._tls_wants_write = False
        try:
            while size < READ_BYTES and (record := self._sock.recv(READ_BYTES - size)):
                records.append(record)
                size += len(record)
        except ssl.SSLWantReadError:
            return b"".join(records) or None
        except ssl.SSLWantWriteError:
            self._tls_wants_write = True
            return b"".join(records) or None
        except ssl.SSLError as error:
            self.error = tls_error(error, tls, self._location)
        except OSError:
            pass
        return b"".join(records)

    def write(self, data: bytes) -> bool:
        """Send bytes and buffer the rest for `flush`; return False after a connection loss."""
        self._send_buffer += data if self._framing is None else self._framing.encode(web.BytesMessage(data=data))
        return self.flush()

    def flush(self) -> bool:
        """Send buffered bytes; return False after a connection loss."""
        while self._send_buffer:
            try:
                sent_bytes = self._sock.send(self._send_buffer)
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return True
            except OSError:
                if self._tls is not None and self.error is None:
                    self._read_tls_records(self._tls)  # the peer's alert may have arrived
                return False
            del self._send_buffer[:sent_bytes]
        return True

    def drain(self, timeout_s: float) -> bool:
        """Send all buffered bytes, waiting up to `timeout_s` seconds; return False if some remain."""
        deadline = time.monotonic() + timeout_s
        poller = select.poll()
        poller.register(self._sock, select.POLLOUT)
        while self.flush() and self._send_buffer and (remaining_s := deadline - time.monotonic()) > 0:
            poller.poll(remaining_s * 1000)
        return not self._send_buffer

    def close(self) -> None:
        """Close the connection; never raises."""
        if self._framing is not None:
            self._send_buffer += self._framing.encode(web.CloseConnection(code=CloseReason.NORMAL_CLOSURE))
            self.flush()
        if isinstance(self._sock, ssl.SSLSocket) and not self._send_buffer:
            with contextlib.suppress(OSError, ValueError):
                self._sock.unwrap()  # sends close_notify and does not wait for the peer's
        with contextlib.suppress(OSError):
            self._sock.close()


#: Seconds after which a further address is tried in parallel (RFC 8305 section 5).
ATTEMPT_STAGGER_S: Final = 0.25
#: Size of the socket's receive buffer in bytes: two chunks.
RECEIVE_BUFFER: Final = 2 << 20
#: Unanswered TCP keep-alive probes, half an MQTT keep alive in total.
_KEEPALIVE_PROBES: Final = 3
#: Largest interval in seconds that Linux accepts.
_MAX_KEEPALIVE_S: Final = 32767


def connect(
    endpoint: Endpoint,
    settings: ConnectionSettings,
    *,
    keep_alive_s: int = 60,
    cancelled: Callable[[], bool] = lambda: False,
    headers: Sequence[tuple[str, str]] = (),
    query: str = "",
) -> Transport:
    """Open a connection within ``connect_timeout_s``, including the DNS lookup and all addresses of the name.

    Args:
        endpoint: Broker endpoint.
        settings: Connection settings.
        keep_alive_s: A peer without TCP acknowledgements for 1.5 times this long is dropped; from 1.
        cancelled: Polled while connecting; True ends the attempt.
        headers: Further headers of the WebSocket request.
        query: Query of that request.

    Raises:
        Unreachable: TL-M01 no connection, TL-M02 TLS failed, TL-M07 the broker's certificate, TL-M09 the client's
            certificate, TL-M14 WebSocket, TL-M15 proxy.
        ConfigError: Unusable TLS files (TL-C30) or proxy password (TL-C31); python-socks is missing (TL-C34).
    """
    tls, proxy, timeout_s = settings.tls if endpoint.tls else None, settings.proxy_endpoint, settings.connect_timeout_s
    context = tls.context() if tls else None  # before connecting: errors in its files are permanent
    framing = WebSocketFraming(endpoint, headers, query) if endpoint.scheme in {"ws", "wss"} else None
    attempt = _ConnectionAttempt(endpoint, timeout_s + _ABANDONED_ATTEMPT_S)

    def open_transport() -> Transport:
        with contextlib.ExitStack() as cleanup:
            sock = cleanup.enter_context(attempt.connect_through_proxy(proxy) if proxy else attempt.connect_directly())
            sock.settimeout(attempt.remaining_s())
            if endpoint.scheme != "unix":
                _set_socket_options(sock, keep_alive_s)
            if tls and context:
                sock = attempt.start_tls(cleanup, sock, tls, context)
            if framing:
                attempt.open_websocket(sock, framing, tls)
            sock.setblocking(False)
            cleanup.pop_all()
        return Transport(sock, str(endpoint), tls, framing)

    try:
        return call_with_timeout(timeout_s, cancelled, open_transport, Transport.close)
    except (OSError, ValueError) as error:
        raise attempt.translate_error(error) from None  # the error of a proxy may contain its password


#: Address family and address, as the resolver returns them.
Address: TypeAlias = tuple[int, Any]


class _ConnectionAttempt:
    """Steps of one connection attempt; each blocks and first sets the meaning of its errors (`translate_error`)."""

    def __init__(self, endpoint: Endpoint, timeout_s: float) -> None:
        self._endpoint = endpoint
        self._location = str(endpoint)
        self._deadline = time.monotonic() + timeout_s
        #: Errors of single addresses.
        self._failures: list[BaseException] = []
        self.translate_error: Callable[[Exception], TowlineError] = self._resolve_error

    def remaining_s(self) -> float:
        """Return the remaining seconds, always above 0."""
        return max(0.01, self._deadline - time.monotonic())

    def connect_directly(self) -> socket.socket:
        """Connect to a Unix socket, or to the first address of a host that answers."""
        endpoint = self._endpoint
        addresses: list[Address] = [(socket.AF_UNIX, endpoint.path)]
        if endpoint.scheme != "unix":
            answers = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
            addresses = [(family, address) for family, _, _, _, address in answers]
        self.translate_error = partial(self._connect_error, len(addresses))
        return self._connect_to_first(addresses)

    def _resolve_error(self, error: Exception) -> TowlineError:
        reason = error_text(error) if isinstance(error, OSError) else "not a host name"
        problem = f'no address for "{self._endpoint.host}" ({reason})'
        return Unreachable("TL-M01", self._location, problem, "Check the broker's host, and the DNS of this machine.")

    def _connect_error(self, address_count: int, error: Exception) -> TowlineError:
        target = f" to any of {address_count} addresses" if address_count > 1 else ""
        reasons = "; ".join(dict.fromkeys(map(error_text, [*self._failures, error])))
        cause = "its socket accessible" if self._endpoint.scheme == "unix" else "the port right"
        problem = f"no connection{target} ({reasons})"
        return Unreachable("TL-M01", self._location, problem, f"Is the broker up, and {cause}?")

    def _connect_to_first(self, addresses: Iterable[Address]) -> socket.socket:
        """Return the first connected socket; a further attempt starts every `ATTEMPT_STAGGER_S` seconds."""
        untried, attempts = deque(addresses), set[Future[socket.socket]]()
        while untried or attempts:
            if untried:
                attempts.add(_start_call(partial(_connect_socket, *untried.popleft(), self.remaining_s())))
                if time.monotonic() > self._deadline:
                    untried.clear()
            finished_attempts, attempts = wait(attempts, ATTEMPT_STAGGER_S if untried else None, FIRST_COMPLETED)
            for attempt in finished_attempts:
                if error := attempt.exception():
                    self._failures.append(error)
                    continue
                for other_attempt in attempts | finished_attempts - {attempt}:
                    _discard_late_result(other_attempt, socket.socket.close)
                return attempt.result()
        raise self._failures.pop()

    def connect_through_proxy(self, proxy: Proxy) -> socket.socket:
        """Connect through a proxy; raises TL-C31 for its password, TL-C34 without python-socks."""
        try:
            import python_socks  # noqa: PLC0415  # optional: towline[proxy]
            from python_socks.sync import Proxy as Connector  # noqa: PLC0415
        except ImportError:
            problem, remedy = "a proxy needs the package python-socks", 'Run: pip install "towline[proxy]"'
            raise ConfigError("TL-C34", str(proxy), problem, remedy) from None
        http = proxy.scheme == "http"

        def translate_error(error: Exception) -> TowlineError:
            if isinstance(error, UnicodeError):
                problem = "the proxy's user or password has characters that can't be sent"
                return ConfigError("TL-C31", str(proxy), problem, "Use ASCII.")
            if isinstance(error, python_socks.ProxyConnectionError):
                problem = f"no connection ({error_text(error.__cause__ or error)})"
                location = f"{self._location} through {proxy}"
                return Unreachable("TL-M01", location, problem, "Is the proxy up, and the port right?")
            detail, code = error_text(error), getattr(error, "error_code", None) or 0
            if http and isinstance(error, python_socks.ProxyError):  # never the proxy's own text
                detail = f"HTTP {code}" if code else "no answer in HTTP"
            remedy = "Does it reach and allow this host and port, and are its user and proxy_password_file right?"
            return Unreachable("TL-M15", self._location, f"the proxy {proxy} refused the connection: {detail}", remedy)

        self.translate_error = translate_error
        proxy_type = python_socks.ProxyType.HTTP if http else python_socks.ProxyType.SOCKS5
        file = proxy.password_file
        password = read_secret("proxy_password_file", file, bytes.decode) if file else ""
        connector = Connector(proxy_type, proxy.host, proxy.port, proxy.username or "", password, rdns=True)
        try:
            return connector.connect(self._endpoint.host, self._endpoint.port, timeout=self.remaining_s())
        except python_socks.ProxyError as error:  # not an OSError
            raise translate_error(error) from None

    def start_tls(
        self, undo: contextlib.ExitStack, sock: socket.socket, tls: Tls, context: ssl.SSLContext
    ) -> socket.socket:
        """Start TLS on a socket; `undo` closes the TLS socket."""
        self.translate_error = partial(tls_error, tls=tls, location=self._location)
        name = tls.server_name or self._endpoint.host
        tls_socket = context.wrap_socket(sock, server_hostname=name, do_handshake_on_connect=False)
        undo.enter_context(tls_socket).do_handshake()
        return tls_socket

    def open_websocket(self, sock: socket.socket, framing: WebSocketFraming, tls: Tls | None) -> None:
        """Open a WebSocket; raises TL-M14 if the server does not, or sends MQTT before CONNECT."""

        def translate_error(error: Exception) -> TowlineError:
            if tls and isinstance(error, ssl.SSLError):
                return tls_error(error, tls, self._location)
            return framing.websocket_error(f"no answer to the WebSocket's opening ({error_text(error)})")

        self.translate_error = translate_error
        sock.sendall(framing.opening_request())
        data = b""
        while not framing.open:
            sock.settimeout(self.remaining_s())
            data, reply = framing.receive(sock.recv(READ_BYTES))
            sock.sendall(reply)
        if problem := framing.end_reason or ("the server sends MQTT before CONNECT" if data else ""):
            raise framing.websocket_error(problem, "Trying again.")


def _connect_socket(family: int, address: Any, timeout_s: float) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)  # fails without IPv6
    with contextlib.ExitStack() as cleanup:
        cleanup.callback(sock.close)
        sock.settimeout(timeout_s)
        sock.connect(address)
        cleanup.pop_all()
    return sock


def _set_socket_options(sock: socket.socket, keep_alive_s: int) -> None:
    """Set TCP_NODELAY, the receive buffer and TCP keep-alive, which needs no PINGREQ to detect a dead peer."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER)
    if hasattr(socket, "TCP_USER_TIMEOUT") and keep_alive_s:
        # Detects a half-open connection while nothing is read: PINGREQs stay unacknowledged.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(keep_alive_s * 1500))
    probe_interval_s = max(1, keep_alive_s // (2 * _KEEPALIVE_PROBES))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {"TCP_KEEPIDLE": keep_alive_s, "TCP_KEEPINTVL": probe_interval_s, "TCP_KEEPCNT": _KEEPALIVE_PROBES}
    for name, value in options.items():
        if value and hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), min(value, _MAX_KEEPALIVE_S))
