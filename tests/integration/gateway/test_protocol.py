"""What the gateway speaks to a broker that knows an older version of MQTT alone."""

from __future__ import annotations

import pytest

from tests.integration.conftest import NewGateway
from tests.integration.net.scripted import Line, Scripted


def new_line(line: Line) -> None:
    """The gateway says 3.1.1, which the broker answers."""
    assert line.sock.recv(1000)[8] == 4
    line.sock.sendall(b"\x20\x02\x00\x00")
    subscribe = line.sock.recv(1000)
    line.sock.sendall(b"\x90\x03" + subscribe[2:4] + b"\x01")
    line.sock.recv(1000)


@pytest.mark.parametrize(
    "refusal",
    [
        b"\x20\x02\x00\x01",
        b"\x20\x03\x00\x01\x00",  # Moquette 0.17, taken from it: the return code of 3.1.1 in the form of the CONNECT
    ],
)
def test_auto_finds_the_version_the_broker_speaks(new_gateway: NewGateway, refusal: bytes) -> None:
    def refused(line: Line) -> None:
        assert line.sock.recv(1000)[8] == 5
        line.sock.sendall(refusal)

    with Scripted(refused, new_line) as server:
        gateway = new_gateway(server.uri, protocol="auto").connect(protocol="3.1.1")
        gateway.stop()
