"""The same options of a connection on each face: a gateway (Spark, bridge file), `Client` and `Publisher`."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from paho.mqtt.subscribeoptions import SubscribeOptions

from tests.conftest import NewMosquitto
from tests.helpers import present, wait_until
from tests.integration.conftest import NewGateway
from tests.integration.devices import listening
from tests.integration.net.ways import Relay, exactly
from towline import Client, ClientSettings, Publisher, WillSettings
from towline_prove.devstack.process import free_port

HEADERS = {"X-Tenant": "plant 7", "Authorization": "Bearer s3cret"}
WILL: dict[str, Any] = {
    "topic": "will/{}",
    "payload": "gone",
    "qos": 1,
    "retain": True,
    "expiry_s": 600,
    "content_type": "text/plain",
    "response_topic": "answers",
    "correlation_data": "c1",
    "user_properties": [("a", "1"), ("a", "2")],
}
#: Connects under a name, with further options, to a URI.
Face = Callable[[str, str], contextlib.AbstractContextManager[object]]


class Overheard(Relay):
    """A relay that keeps what a client says first, and can cut the line."""

    said = b""

    def meet(self, client: socket.socket) -> socket.socket | None:
        while not self.said.endswith(b"\r\n\r\n"):
            self.said += exactly(client, 1)
        broker = present(super().meet(client))
        broker.sendall(self.said)
        return broker


def will_of(name: str) -> WillSettings:
    return WillSettings(**{**WILL, "topic": WILL["topic"].format(name)})


@pytest.fixture
def faces(new_gateway: NewGateway, tmp_path: Path) -> dict[str, Face]:
    files: dict[str, Any] = {"websocket_headers_file": tmp_path / "headers", "websocket_query_file": tmp_path / "query"}
    files["websocket_headers_file"].write_text("".join(f"{header}: {value}\n" for header, value in HEADERS.items()))
    files["websocket_query_file"].write_text("sig=s3cret")

    def client_settings(name: str) -> ClientSettings:
        return ClientSettings(will=will_of(name), **files)

    @contextlib.contextmanager
    def gateway(uri: str, name: str) -> Iterator[object]:
        will = {**WILL, "topic": WILL["topic"].format(name)}
        running = new_gateway(uri, name, will=will, **files)
        running.start()
        assert running.until(state="online")["broker"].endswith("/mqtt")
        yield running
        assert "s3cret" not in running.log.read_text()

    def client(uri: str, name: str) -> contextlib.AbstractContextManager[object]:
        return Client(uri, client_id=name, settings=client_settings(name))

    @contextlib.contextmanager
    def publisher(uri: str, name: str) -> Iterator[object]:
        with Publisher(uri, state_dir=tmp_path / name, settings=client_settings(name)) as made:
            made.publish("hello", b"").at_broker.result(60)
            yield made

    return {"gateway": gateway, "client": client, "publisher": publisher}


def test_will_and_websocket_headers(new_mosquitto: NewMosquitto, faces: dict[str, Face]) -> None:
    """What a foreign client gets of each Will, and what a foreign server reads of each request."""
    port = free_port()
    broker = new_mosquitto(listener=f"{port} 127.0.0.1", protocol="websockets")
    as_published = SubscribeOptions(qos=1, retainAsPublished=True)
    with listening(broker.port, ("will/#", as_published)) as (_, heard), contextlib.ExitStack() as stack:
        relays = {name: Overheard(("127.0.0.1", port)) for name in faces}
        for name, face in faces.items():
            with relays[name] as relay:
                stack.enter_context(face(f"ws://{relay.address}/mqtt", name))
        wait_until(lambda: len({message.topic for message in heard}) == len(faces), 60, "the wills")
    wills: dict[str, Any] = {message.topic: message for message in heard}
    for name, relay in relays.items():
        assert relay.said.startswith(b"GET /mqtt?sig=s3cret HTTP/1.1\r\n"), name
        for header, value in HEADERS.items():
            assert f"{header}: {value}\r\n".lower() in relay.said.decode().lower(), name
        will = wills[f"will/{name}"]
        assert (will.payload, will.qos, will.retain) == (b"gone", 1, True)
        said = will.properties
        assert (said.ContentType, said.ResponseTopic, said.CorrelationData) == ("text/plain", "answers", b"c1")
        assert (said.UserProperty, said.PayloadFormatIndicator) == ([("a", "1"), ("a", "2")], 1)
        assert 0 < said.MessageExpiryInterval <= WILL["expiry_s"]
