"""MQTT in WebSocket frames (MQTT 5.0 and 3.1.1 section 6), as a machine without a socket.

Bytes of the connection go in, bytes of MQTT and answers for the peer come out. Ping and close are answered here;
text frames end the connection [MQTT-6.0.0-1]. A frame is handed on as it arrives, so nothing is collected: packets may
span frames and frames may hold many packets [MQTT-6.0.0-2], and the MQTT decoder's limit holds for both.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from wsproto import ConnectionType, WSConnection
from wsproto.events import (
    AcceptConnection,
    BytesMessage,
    CloseConnection,
    Event,
    Ping,
    RejectConnection,
    Request,
    TextMessage,
)
from wsproto.frame_protocol import CloseReason
from wsproto.utilities import LocalProtocolError, RemoteProtocolError

from towline.errors import Unreachable
from towline.net.endpoint import Endpoint, http_status, other_port
from towline.text import printable

#: [MQTT-6.0.0-3], [MQTT-6.0.0-4].
SUBPROTOCOL: Final = "mqtt"
#: Bytes of the peer's own words that are shown.
_WORDS_SHOWN: Final = 100


#: A header's name [RFC 9110 section 5.6.2], and a value without control characters.
_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE: Final = re.compile(r"[\t\x20-\x7e\xa0-\xff]*")
#: What the request says by itself.
_OURS: Final = ("host", "upgrade", "connection")


def header_problem(name: str, value: str) -> str | None:
    """Say why a request can't have a header, or None; never with its value, which may be a secret."""
    if not _NAME.fullmatch(name):
        return f'"{name}" is no name of an HTTP header'
    if name.lower() in _OURS or name.lower().startswith("sec-websocket-"):
        return f'the header "{name}" is part of the WebSocket request itself'
    return None if _VALUE.fullmatch(value) else f'the value of the header "{name}" has characters HTTP does not take'


class Framing:
    """The client's side of one WebSocket.

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
        request = Request(host=host, target=self._target, subprotocols=protocols, extra_headers=self._headers)
        return self._web.send(request)

    def _refusal(self, what: str, do: str = "") -> Unreachable:
        where = str(self._endpoint)
        doubt = f"Is this port a WebSocket listener?{'' if self._endpoint.tls else other_port(where)}"
        return Unreachable("TL-M14", where, what, do or doubt)

    def _rejected(self, status: int) -> Unreachable:
        do = f'Is "{self._endpoint.path}" the right path?'
        if status in {401, 403}:
            do = "What stands before the broker wants a login; Towline has none for it."
        elif status == 426 or status >= 500:
            do = "Is the broker behind it up, and does it take WebSockets?"
        return self._refusal(f"the server answers HTTP {http_status(status)} instead of opening a WebSocket", do)

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
            raise self._refusal("the server closed instead of answering")
        parts: list[bytes] = []
        answer = bytearray()
        try:
            self._web.receive_data(data)
            for event in self._web.events():
                if isinstance(event, BytesMessage):
                    parts.append(bytes(event.data))
                else:
                    answer += self._control(event)
                if isinstance(event, TextMessage | CloseConnection):
                    break  # nothing behind it counts
        except RemoteProtocolError as error:  # of the answer: once it is open, wsproto closes it instead
            said = printable(str(error), _WORDS_SHOWN)
            foreign = error.__context__ is not None  # of h11, which reads the answer
            what = "does not answer in HTTP" if foreign else f"answers, but opens no WebSocket ({said})"
            raise self._refusal(f"the server {what}") from None
        return b"".join(parts), bytes(answer)

    def _control(self, event: Event) -> bytes:
        if isinstance(event, AcceptConnection):
            if event.subprotocol != SUBPROTOCOL:
                what = 'the server opens a WebSocket, but not with the subprotocol "mqtt" [MQTT-6.0.0-4]'
                raise self._refusal(what, f'Is "{self._endpoint.path}" the path of MQTT?')
            self.open = True
        if isinstance(event, RejectConnection):
            raise self._rejected(event.status_code)
        if isinstance(event, Ping):
            return self._web.send(event.response())
        if isinstance(event, TextMessage):
            self.ended = "the server sent a text frame [MQTT-6.0.0-1]"
            return self.closing(CloseReason.UNSUPPORTED_DATA)
        if isinstance(event, CloseConnection):
            self.ended = _closed(event)
            return self.closing(CloseReason.NORMAL_CLOSURE)
        return b""

    def frame(self, data: bytes) -> bytes:
        """One binary frame with these bytes [MQTT-6.0.0-1]; nothing once the WebSocket is closed."""
        try:
            return self._web.send(BytesMessage(data=data))
        except LocalProtocolError:
            return b""

    def closing(self, code: int = CloseReason.NORMAL_CLOSURE) -> bytes:
        """A close frame; nothing when one was sent before."""
        try:
            return self._web.send(CloseConnection(code=code))
        except LocalProtocolError:
            return b""


def _closed(event: CloseConnection) -> str:
    name = event.code.name.lower().replace("_", " ") if isinstance(event.code, CloseReason) else ""
    details = ", ".join(filter(None, (f"{int(event.code)}", name, printable(event.reason or "", _WORDS_SHOWN))))
    return f"the WebSocket was closed ({details})"
