"""Bridges in front of real brokers, and a way to one on which it seems to break its window."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
from collections.abc import Iterator

from tests.integration.net.ways import LOOPBACK, Relay
from towline.bridge.config.model import Bridge
from towline.doctor import examine_brokers
from towline.doctor.inputs import Inputs
from towline.doctor.table import Finding, Verdict
from towline_prove.devstack import Mosquitto

#: Mosquitto as it keeps what it acknowledges.
KEEPING = {
    "persistence": "true",
    "autosave_on_changes": "true",
    "autosave_interval": "1",
    "max_queued_messages": "0",
}


def examined(
    bridge: Bridge,
    broker: Mosquitto | None = None,
    *,
    rate: float | None = 200.0,
    probes: int = 60,
    seconds: float = 0.5,
) -> list[Finding]:
    """What is found about the brokers; with the broker's configuration where one is given."""
    conf = None if broker is None else broker.directory / "mosquitto.conf"
    return examine_brokers(Inputs(bridge, rate, seconds, conf, probe_messages=probes))


def wrong(found: list[Finding]) -> set[tuple[str, Verdict]]:
    """The rows that do not leave a shell with 0."""
    return {(one.code, one.verdict) for one in found if one.verdict not in {Verdict.HOLDS, Verdict.LIMITED}}


class _Refuses(socketserver.BaseRequestHandler):
    """What Moquette 0.17 says to a CONNECT of MQTT 5 (taken from it): return code 1 of 3.1.1 in the form of 5."""

    def handle(self) -> None:
        self.request.recv(1000)
        self.request.sendall(b"\x20\x03\x00\x01\x00")


@contextlib.contextmanager
def knows_only_3_1_1() -> Iterator[int]:
    """The port of a broker that takes no CONNECT of MQTT 5."""
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), _Refuses) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join(60)


class _WiderWindow(Relay):
    """A relay that raises the Receive Maximum of a CONNECT.

    A client then sees a broker that exceeds it, as Mosquitto before 2.0.13 does.
    """

    def __init__(self, port: int, asked: int, given: int) -> None:
        super().__init__((LOOPBACK, port))
        self._before, self._after = (b"\x21" + number.to_bytes(2, "big") for number in (asked, given))

    def meet(self, client: socket.socket) -> socket.socket | None:
        connect = client.recv(1 << 16)
        broker = super().meet(client)
        assert broker is not None
        broker.sendall(connect.replace(self._before, self._after))
        return broker


@contextlib.contextmanager
def lets_more_in(port: int, asked: int, given: int) -> Iterator[int]:
    """The port of a relay to a broker that sees a larger Receive Maximum than the client asked for."""
    with _WiderWindow(port, asked, given) as relay:
        yield relay.port
