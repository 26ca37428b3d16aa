"""A gateway that leaves its line: killed at each step of it, stopped on the way, and before a broker that hesitates."""

from __future__ import annotations

import contextlib
import socket
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from mqtt5 import ConnAckPacket, ConnectPacket

from tests.engines.dying import die_at
from tests.helpers import commit, read_all, wait_until
from tests.integration.conftest import Gateway, NewGateway, publish
from towline.errors import GatewayError
from towline.gateway.client import GatewayClient
from towline.gateway.identity import read_client_sessions
from towline.gateway.launch import find_running
from towline.mqtt.events import PacketsReceived
from towline_prove.devstack import Mosquitto

ONCE: dict[str, Any] = {"qos": 2, "receive_maximum": 10}
WAITING = 60
#: Seconds without a message that end a session here.
IDLE = 1.5

#: Places of a drain between two effects, in their order: which call is the last one before the kill, or the first that
#: is not made, and which of its calls that is.
STEPS: dict[str, tuple[str, str, str]] = {
    "nothing is asked of the broker": ("towline.gateway.pump:Pump.run", "before", "any"),
    "UNSUBSCRIBE was made, and has not left": ("towline.mqtt.session:Subscriptions.pending_changes", "after", "any"),
    "UNSUBACK has come, and was not looked at": ("towline.mqtt.session:Session.handle", "before", "unsuback"),
    "UNSUBACK was looked at, and not written down": ("towline.mqtt.session:Session.handle", "after", "unsuback"),
    "some of it is taken": ("towline.journal.journal:Journal.append", "after", "rows"),
    "all is taken": ("towline.gateway.sessions:Drain._is_session_empty", "after", "true"),
    "all is committed": ("towline.gateway.pump:Pump._end_drained_session", "before", "any"),
    "CONNECT with Clean Start has left": ("towline.mqtt.session:Session.handle", "before", "clean"),
    "the session is ended, and nobody knows": ("towline.journal.journal:Journal.set_session", "before", "empty"),
    "the journal knows that it is ended": ("towline.journal.journal:Journal.set_session", "after", "empty"),
    "all is written down": ("towline.gateway.pump:record_session_end", "after", "any"),
}
#: Up to here the filters are subscribed when the gateway is gone.
SUBSCRIBED = [*STEPS][:2]


def _is_due(which: str, args: tuple[Any, ...], answer: object) -> bool:
    event = args[1] if len(args) > 1 else None
    kinds = {type(item).__name__ for item in event.items} if isinstance(event, PacketsReceived) else set()
    due: dict[str, Callable[[], bool]] = {
        "any": lambda: True,
        "rows": lambda: args[1].num_rows > 0,
        "true": lambda: answer is True,
        "empty": lambda: args[1] == {},
        "unsuback": lambda: "UnsubAckPacket" in kinds,
        "clean": lambda: "ConnAckPacket" in kinds and args[0].config.clean_start,
    }
    return due[which]()


def die_at_step(step: str) -> None:
    """In the gateway's process: have it killed at a step."""
    place, when, which = STEPS[step]
    die_at(place, when, partial(_is_due, which))


def has_session(broker: Mosquitto, client_id: str) -> bool:
    """Whether the broker has a session of this client id; afterwards it has none."""
    with socket.create_connection(("127.0.0.1", broker.port), 5) as connection:
        connection.sendall(ConnectPacket(client_id, clean_start=False, session_expiry_interval=0).write())
        (connack,) = read_all(connection.recv(4096))
        assert isinstance(connack, ConnAckPacket)
        return connack.session_present


def let_end(gateways: Iterable[Gateway], seen: dict[str, list[int]]) -> None:
    """Read and commit whatever comes into their journals, as queries do, until each gateway has ended."""

    def all_ended() -> bool:
        living = [one for one in gateways if one.process.poll() is None]
        for one in living:
            with contextlib.suppress(GatewayError):
                client = find_running(one.settings.state_dir)
                if client is not None:
                    with client:
                        seen[one.settings.name] += carried_on(client)
        return not living

    wait_until(all_ended, 90, "the end of all gateways")


def carried_on(client: GatewayClient) -> list[int]:
    """The numbers of the rows that were not committed, which are now."""
    status = client.status()
    journal, end = status["journal"], status["end"]
    rows = client.read(journal, status["consumers"].get("spark", status["first"]), end)
    numbers = [int(payload) for batch in rows for payload in batch.column("payload").to_pylist()]
    commit(client, "spark", end)
    return numbers


def sessions(gateway: Gateway) -> list[tuple[str, str]]:
    return [(one.client_id, one.how) for one in read_client_sessions(gateway.settings.state_dir)]


def test_a_kill_at_any_step_loses_nothing_and_strands_nothing(mosquitto: Mosquitto, new_gateway: NewGateway) -> None:
    """All of them side by side: what waits at the broker, QoS 2, is in the journal once, and no session is left."""
    gateways: dict[str, Gateway] = {}
    seen: dict[str, list[int]] = defaultdict(list)
    for number, step in enumerate(STEPS):
        filters = [{"pattern": f"{number}/#", "qos": 2}]
        gateways[step] = gateway = new_gateway(mosquitto, f"g{number}", subscriptions=filters, **ONCE)
        gateway.log = gateway.log.with_name(f"gateway-{number}.log")
        gateway.spawn()
    for gateway in gateways.values():
        wait_until(lambda: read_client_sessions(gateway.settings.state_dir), what="a session")  # noqa: B023 - waited for here
        gateway.stop()
    for number in range(len(STEPS)):
        publish(mosquitto, range(WAITING), f"{number}/1", qos=2)
    for step, gateway in gateways.items():
        gateway.spawn(IDLE, partial(die_at_step, step))
    let_end(gateways.values(), seen)
    assert {step: one.process.poll() for step, one in gateways.items()} == dict.fromkeys(STEPS, -9)
    for number in range(len(STEPS)):
        publish(mosquitto, range(WAITING, WAITING + 1), f"{number}/1", qos=2)
    for gateway in gateways.values():
        gateway.spawn(IDLE)
    let_end(gateways.values(), seen)
    for step, gateway in gateways.items():
        assert gateway.process.poll() == 0, (step, gateway.log.read_text())
        assert not has_session(mosquitto, gateway.settings.name), step
        assert sessions(gateway) == [(gateway.settings.name, "drained")], step
        late = [WAITING] if step in SUBSCRIBED else []
        assert seen[gateway.settings.name] == [*range(WAITING), *late], step


def test_a_gateway_that_is_stopped_in_its_drain_takes_part_again(mosquitto: Mosquitto, new_gateway: NewGateway) -> None:
    gateway = new_gateway(mosquitto, **ONCE).connect()
    gateway.stop()
    gateway.start(60.0)
    gateway.until(drain="taking what the broker holds")
    publish(mosquitto, range(10), qos=2)
    assert gateway.stop() == 1
    assert "TL-G58" in gateway.log.read_text().splitlines()[-1]
    gateway.connect(drain=None)
    publish(mosquitto, range(10, 20), qos=2)
    gateway.until(journaled=10)
    assert gateway.seen() == [*range(10, 20)], "what came while it had no filter is not its own"
