"""WebSocket framing against wsproto's own server side, cut at every place."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wsproto import ConnectionType, WSConnection
from wsproto.events import (
    AcceptConnection,
    BytesMessage,
    CloseConnection,
    Event,
    Ping,
    Pong,
    Request,
    TextMessage,
)

from towline.errors import Unreachable
from towline.net.connecting import WebSocketFraming
from towline.net.endpoint import Endpoint

WHERE = Endpoint.parse("ws://broker:9001/mqtt")


class Server:
    """The other side."""

    def __init__(self, framing: WebSocketFraming) -> None:
        self._web = WSConnection(ConnectionType.SERVER)
        self.request = self.takes(framing.opening_request())[0]

    def takes(self, data: bytes) -> list[Event]:
        self._web.receive_data(data)
        return list(self._web.events())

    def says(self, *events: Event) -> bytes:
        return b"".join(bytes(self._web.send(event)) for event in events)


def opened() -> tuple[WebSocketFraming, Server]:
    framing = WebSocketFraming(WHERE)
    server = Server(framing)
    framing.receive(server.says(AcceptConnection(subprotocol="mqtt")))
    assert framing.open
    return framing, server


def taken(framing: WebSocketFraming, pieces: Iterable[bytes]) -> tuple[bytes, bytes]:
    """All that the pieces amount to: bytes of MQTT, and answers."""
    data, answers = b"", b""
    for piece in pieces:
        more, answer = framing.receive(piece)
        data, answers = data + more, answers + answer
    return data, answers


def refusal(framing: WebSocketFraming, answer: bytes) -> Unreachable:
    with pytest.raises(Unreachable) as refused:
        framing.receive(answer)
    assert not framing.open
    assert (refused.value.code, refused.value.location) == ("TL-M14", str(WHERE))
    return refused.value


def test_the_request_names_host_path_and_subprotocol() -> None:
    """[MQTT-6.0.0-3], [MQTT-6.0.0-3 of 3.1.1]."""
    request = Server(WebSocketFraming(WHERE)).request
    assert isinstance(request, Request)
    assert (request.host, request.target, request.subprotocols) == ("broker:9001", "/mqtt", ["mqtt"])


@pytest.mark.parametrize("status", [404, 301, 200, 401, 502])
def test_a_refusal_by_status(status: int) -> None:
    error = refusal(WebSocketFraming(WHERE), b"HTTP/1.1 %d Whatever it says\r\nContent-Length: 0\r\n\r\n" % status)
    assert error.problem == f"the server answers HTTP {status} instead of opening a WebSocket"
    assert 'Is "/mqtt" the right path' in error.remedy


@pytest.mark.parametrize(
    ("answer", "what"),
    [
        (b"\x20\x02\x00\x00" * 30 + b"\r\n\r\n", "the server opens no WebSocket (Bad HTTP message)"),
        (b"", "the server opens no WebSocket (Bad HTTP message)"),
        (
            b"HTTP/1.1 101 Switching\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\n",
            "the server opens no WebSocket (Bad accept token)",
        ),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 200_000, "opens no WebSocket (Bad HTTP message)"),
    ],
)
def test_an_answer_that_is_none(answer: bytes, what: str) -> None:
    framing = WebSocketFraming(WHERE)
    framing.opening_request()
    error = refusal(framing, answer)
    assert what in error.problem
    assert error.remedy.startswith("Is this port a WebSocket listener?")


def test_another_subprotocol_is_refused() -> None:
    """[MQTT-6.0.0-4]."""
    framing = WebSocketFraming(WHERE)
    error = refusal(framing, Server(framing).says(AcceptConnection()))
    assert 'not with the subprotocol "mqtt" [MQTT-6.0.0-4]' in error.problem


@given(
    messages=st.lists(st.binary(max_size=300), max_size=6),
    cut=st.integers(1, 400),
    chunk=st.integers(1, 200),
    ping=st.binary(max_size=125),
)
def test_packets_and_frames_have_nothing_to_do_with_each_other(
    messages: list[bytes], cut: int, chunk: int, ping: bytes
) -> None:
    """[MQTT-6.0.0-2], [MQTT-6.0.0-2 of 3.1.1]: frames in fragments, pings between them, reads that end anywhere."""
    framing, server = opened()
    wire = b""
    for message in messages:
        parts = [message[n : n + chunk] for n in range(0, len(message), chunk)] or [b""]
        for number, part in enumerate(parts):
            wire += server.says(Ping(payload=ping))
            wire += server.says(BytesMessage(data=part, message_finished=number == len(parts) - 1))
    data, answers = taken(framing, (wire[n : n + cut] for n in range(0, len(wire), cut)))
    assert data == b"".join(messages)
    assert framing.end_reason is None
    pongs = server.takes(answers)
    assert all(isinstance(pong, Pong) and bytes(pong.payload) == ping for pong in pongs)
    assert len(pongs) == wire.count(server.says(Ping(payload=ping))) or not ping


@pytest.mark.parametrize("size", [0, 1, 125, 126, 65_535, 65_536, 1_000_000])
def test_what_we_send_is_one_masked_binary_frame(size: int) -> None:
    """[MQTT-6.0.0-1], [MQTT-6.0.0-1 of 3.1.1]; RFC 6455 section 5.3."""
    framing, server = opened()
    frame = framing.encode(BytesMessage(data=b"\x30" * size))
    assert frame[0] == 0x82
    assert frame[1] & 0x80, "masked"
    events = server.takes(frame)
    assert all(isinstance(event, BytesMessage) for event in events)
    assert b"".join(bytes(e.data) for e in events if isinstance(e, BytesMessage)) == b"\x30" * size


def test_a_text_frame_ends_it() -> None:
    """[MQTT-6.0.0-1], [MQTT-6.0.0-1 of 3.1.1]."""
    framing, server = opened()
    events = (BytesMessage(data=b"good"), TextMessage(data="bad"), BytesMessage(data=b"late"))
    data, answer = framing.receive(server.says(*events))
    assert (data, framing.end_reason) == (b"good", "the server sent a text frame [MQTT-6.0.0-1]")
    (close,) = server.takes(answer)
    assert isinstance(close, CloseConnection)
    assert close.code == 1003
    assert framing.receive(b"more") == (b"", b"")
    assert framing.end_reason == "the server sent a text frame [MQTT-6.0.0-1]", "and stays ended"


def test_a_close_is_answered_and_told() -> None:
    framing, server = opened()
    _, answer = framing.receive(server.says(CloseConnection(code=1001, reason="see you\x00")))
    assert framing.end_reason == "the WebSocket was closed (1001 see you\\x00)"
    assert [type(event) for event in server.takes(answer)] == [CloseConnection]
    assert framing.encode(BytesMessage(data=b"late")) == b""
    assert framing.encode(CloseConnection(code=1000)) == b"", "said once"


@pytest.mark.parametrize(
    "wire",
    [b"\x83\x00", b"\xc2\x01x", b"\x82\x81abcdx", b"\x80\x00", b"\x09\x00", b"\x89\x7e\x00\x7e", b"\x88\x01x"],
)
def test_a_frame_that_can_not_be_ends_it(wire: bytes) -> None:
    """Reserved opcode or bit, masked, a continuation of nothing, a control frame cut, too long or with half a code."""
    framing, _ = opened()
    framing.receive(wire)
    assert framing.end_reason is not None
    assert framing.end_reason.startswith("the WebSocket was closed (1002")


@given(st.binary(max_size=200), st.integers(1, 50))
def test_no_bytes_raise(wire: bytes, cut: int) -> None:
    framing, _ = opened()
    taken(framing, (wire[n : n + cut] for n in range(0, len(wire), cut)))
    fresh = WebSocketFraming(WHERE)
    fresh.opening_request()
    with contextlib.suppress(Unreachable):
        fresh.receive(wire)
