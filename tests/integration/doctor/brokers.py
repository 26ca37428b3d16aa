"""Bridges in front of brokers, as the doctor's tests need them: sound ones, and with one fault each."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from tests.unit.doctor.bridges import DOWN, UP, UP_2, bridge_of
from towline.bridge.config.model import Bridge
from towline.doctor.broker.examiner import examine_broker
from towline.doctor.broker.load import measured
from towline.doctor.case import Case
from towline.doctor.findings import Finding, Standing
from towline_prove.devstack import Mosquitto

__all__ = ["DOWN", "KEEPING", "UP", "UP_2", "Planted", "bridge_of", "examined", "lets_more_in", "wrong"]

#: Mosquitto as it keeps what it acknowledges.
KEEPING = {
    "persistence": "true",
    "autosave_on_changes": "true",
    "autosave_interval": "1",
    "max_queued_messages": "0",
}


@dataclass(frozen=True)
class Planted:
    """A fault.

    Attributes:
        code: Of the row that has to find it, and of no other.
        settings: Of Mosquitto, beside `KEEPING`.
        verdict: How bad it is.
        told: Stands in that row.
        lines: Of the bridge.
        mqtt: More of the table ``[mqtt]``.
        rate: Messages a second, as told with ``--rate``; None for unknown.
        conf: ``mosquitto.conf`` may be read.
        probes: Messages queued to find the limit.
    """

    code: str
    settings: Mapping[str, str] = field(default_factory=dict)
    verdict: Standing = Standing.BROKEN
    told: str = ""
    lines: str = UP
    mqtt: str = ""
    rate: float | None = 200.0
    conf: bool = True
    probes: int = 60


def examined(
    bridge: Bridge,
    broker: Mosquitto | None = None,
    *,
    rate: float | None = 200.0,
    probes: int = 60,
    seconds: float = 0.5,
) -> list[Finding]:
    """What the doctor finds; with the broker's configuration where one is given."""
    conf = None if broker is None else broker.directory / "mosquitto.conf"
    return list(
        examine_broker(measured(Case(bridge, rate=rate, seconds=seconds, mosquitto_conf=conf, probe_messages=probes)))
    )


def wrong(found: list[Finding]) -> list[tuple[str, Standing]]:
    """The rows that do not leave a shell with 0."""
    return [(one.code, one.verdict) for one in found if one.verdict not in {Standing.HOLDS, Standing.LIMITED}]


@contextlib.contextmanager
def lets_more_in(port: int, asked: int, given: int) -> Iterator[int]:
    """A way to a broker on which it is told a larger Receive Maximum than the client asks for.

    What a client sees then is a broker that breaks it, as Mosquitto before 2.0.13 does.
    """
    name = b"\x21"
    before, after = (name + number.to_bytes(2, "big") for number in (asked, given))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(30)
        ends: list[socket.socket] = []
        threads: list[threading.Thread] = []

        def pump(source: socket.socket, sink: socket.socket, *, first: bool) -> None:
            with contextlib.suppress(OSError):
                while data := source.recv(1 << 16):
                    sink.sendall(data.replace(before, after) if first else data)
                    first = False
            with contextlib.suppress(OSError):
                sink.shutdown(socket.SHUT_WR)

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    client, _ = listener.accept()
                    server = socket.create_connection(("127.0.0.1", port))
                    ends.extend((client, server))
                    for source, sink, first in ((client, server, True), (server, client, False)):
                        threads.append(
                            threading.Thread(target=pump, args=(source, sink), kwargs={"first": first}, daemon=True)
                        )
                        threads[-1].start()

        serving = threading.Thread(target=serve, daemon=True)
        serving.start()
        try:
            yield listener.getsockname()[1]
        finally:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            serving.join()
            for end in ends:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
                end.close()
            for thread in threads:
                thread.join()
