"""A gateway that leaves its line: killed at each step of it, taken back, and away for good."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import signal
import socket
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
from mqtt5 import ConnAckPacket, ConnectPacket

from tests.helpers import read_all, wait_until
from tests.integration.gateway.conftest import Gateway, NewGateway, publish
from towline.errors import ConfigError, GatewayError
from towline.gateway.client import GatewayClient
from towline.gateway.clients import read_clients
from towline.gateway.launch import discover
from towline.mqtt.events import Received
from towline_prove.devstack import Mosquitto

ONCE: dict[str, Any] = {"guarantee": "exactly_once", "receive_maximum": 10}
WAITING = 60

#: Places of a drain between two effects, in their order: which call is the last one before the kill, or the first that
#: is not made, and which of its calls that is.
STEPS: dict[str, tuple[str, str, str]] = {
    "asked, not written down": ("towline.gateway.process:enter", "before", "any"),
    "written down, not asked of the broker": ("towline.mqtt.subscriptions:Subscriptions.ask", "after", "any"),
    "UNSUBACK has come, and was not looked at": ("towline.mqtt.session:Session.handle", "before", "unsuback"),
    "UNSUBACK was looked at, and not written down": ("towline.mqtt.session:Session.handle", "after", "unsuback"),
    "some of it is taken": ("towline.journal.journal:Journal.append", "after", "rows"),
    "all is taken": ("towline.gateway.draining:Stillness.look", "after", "true"),
    "all is committed": ("towline.gateway.leaving:Departure._left", "before", "any"),
    "CONNECT with Clean Start has left": ("towline.mqtt.session:Session.handle", "before", "clean"),
    "the session is ended, and not written down": ("towline.gateway.draining:Drain.done", "before", "any"),
    "half of it is written down": ("towline.journal.journal:Journal.set_session", "after", "empty"),
    "all is written down, but for people": ("towline.gateway.leaving:end_client", "before", "any"),
}
FIRST, LAST = next(iter(STEPS)), [*STEPS][-1]
#: Up to here the filters are subscribed when the gateway is gone.
SUBSCRIBED = [*STEPS][:2]


def _is_due(which: str, args: tuple[Any, ...], answer: object) -> bool:
    event = args[1] if len(args) > 1 else None
    kinds = {type(item).__name__ for item in event.items} if isinstance(event, Received) else set()
    due: dict[str, Callable[[], bool]] = {
        "any": lambda: True,
        "rows": lambda: args[1].num_rows > 0,
        "true": lambda: answer is True,
        "empty": lambda: args[1] == {},
        "unsuback": lambda: "UnsubAckPacket" in kinds,
        "clean": lambda: "ConnAckPacket" in kinds and args[0].config.clean_start,
    }
    return due[which]()


def die_at(step: str) -> None:
    """In the gateway's process: have it killed at a step."""
    place, when, which = STEPS[step]
    module, _, path = place.partition(":")
    owner: Any = importlib.import_module(module)
    *outer, name = path.split(".")
    for one in outer:
        owner = getattr(owner, one)
    inner = getattr(owner, name)

    @functools.wraps(inner)
    def deadly(*args: Any, **named: Any) -> Any:
        if when == "before" and _is_due(which, args, None):
            os.kill(os.getpid(), signal.SIGKILL)
        answer = inner(*args, **named)
        if when == "after" and _is_due(which, args, answer):
            os.kill(os.getpid(), signal.SIGKILL)
        return answer

    setattr(owner, name, deadly)


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
        living = [one for one in gateways if one.process is not None and one.process.poll() is None]
        for one in living:
            with contextlib.suppress(GatewayError):
                client = discover(one.settings.state_dir)
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
    client.commit("spark", end, journal=journal)
    return numbers


def sessions(gateway: Gateway) -> list[tuple[str, str]]:
    return [(one.client_id, one.how) for one in read_clients(gateway.settings.state_dir)]


def test_a_kill_at_any_step_loses_nothing_and_strands_nothing(mosquitto: Mosquitto, new_gateway: NewGateway) -> None:
    """All of them side by side: what waits at the broker, QoS 2, is in the journal once, and no session is left."""
    gateways: dict[str, Gateway] = {}
    seen: dict[str, list[int]] = defaultdict(list)
    for number, step in enumerate(STEPS):
        filters = [{"filter": f"{number}/#", "qos": 2}]
        gateways[step] = gateway = new_gateway(mosquitto, f"g{number}", subscriptions=filters, **ONCE)
        gateway.log = gateway.log.with_name(f"gateway-{number}.log")
        gateway.spawn()
    for gateway in gateways.values():
        wait_until(lambda: read_clients(gateway.settings.state_dir), what="a session")  # noqa: B023 - waited for here
        gateway.stop()
    for number in range(len(STEPS)):
        publish(mosquitto, range(WAITING), f"{number}/1", qos=2)
    for step, gateway in gateways.items():
        gateway.spawn("drain", partial(die_at, step))
    let_end(gateways.values(), seen)
    assert {step: one.process.poll() for step, one in gateways.items() if one.process} == dict.fromkeys(STEPS, -9)
    for number in range(len(STEPS)):
        publish(mosquitto, range(WAITING, WAITING + 1), f"{number}/1", qos=2)
    for step, gateway in gateways.items():
        gateway.spawn("drain" if step == FIRST else "go-on")
    let_end(gateways.values(), seen)
    for step, gateway in gateways.items():
        assert gateway.process is not None
        assert gateway.process.poll() == (1 if step == LAST else 0), (step, gateway.log.read_text())
        assert not has_session(mosquitto, gateway.settings.name), step
        assert sessions(gateway) == [(gateway.settings.name, "drained")], step
        late = [WAITING] if step in SUBSCRIBED else []
        assert seen[gateway.settings.name] == [*range(WAITING), *late], step


def test_a_drain_is_taken_back_and_ends_only_when_all_is_committed(
    mosquitto: Mosquitto, new_gateway: NewGateway
) -> None:
    gateway = new_gateway(mosquitto, subscriptions=[{"filter": "t/#", "qos": 2}], **ONCE)
    client = gateway.start()
    gateway.until(state="online")
    publish(mosquitto, range(50), qos=2)
    gateway.until(journaled=50)

    client.drain()
    wait_until(
        lambda: (gateway.status()["drain"] or {}).get("step") == "waiting for commits", what="commits to wait for"
    )
    publish(mosquitto, range(50, 60), qos=2)
    client.drain(begin=False)
    gateway.until(state="online", drain=None)
    publish(mosquitto, range(60, 70), qos=2)
    gateway.until(journaled=60)
    assert gateway.seen() == [*range(50), *range(60, 70)], "what came while it did not take part is not its own"
    assert gateway.status()["connects"] == 1, "all of it on one connection"

    client.drain()
    wait_until(
        lambda: (gateway.status()["drain"] or {}).get("step") == "waiting for commits", what="commits to wait for"
    )
    gateway.stop(signal.SIGTERM)
    gateway.start()  # it goes on with its drain
    wait_until(
        lambda: (gateway.status()["drain"] or {}).get("step") == "waiting for commits", what="commits to wait for"
    )
    gateway.commit()
    assert gateway.process is not None
    assert gateway.process.wait(30) == 0
    assert not has_session(mosquitto, "plant-7")

    assert "TL-G55" in gateway.fail()
    gateway.start("join")
    gateway.until(state="online", drain=None)
    publish(mosquitto, range(70, 75), qos=2)
    gateway.until(journaled=65)
    gateway.stop()
    gateway.start()
    gateway.until(state="online", journaled=65)


def test_what_cant_be_drained_says_so(mosquitto: Mosquitto, new_gateway: NewGateway) -> None:
    """Of two brokers, each with a session, only the one in use would be emptied."""
    twice = new_gateway(f"{mosquitto.uri},{mosquitto.uri.replace('127.0.0.1', 'localhost')}")
    client = twice.start()
    with pytest.raises(ConfigError, match="TL-G57"):
        client.drain()
    assert twice.status()["drain"] is None
    twice.stop()
    assert "TL-G57" in twice.fail("drain")
