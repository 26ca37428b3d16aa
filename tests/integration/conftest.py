"""A real gateway process for tests of every room: started, hurt and read back."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

import pytest
from paho.mqtt import client as paho
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from tests.conftest import NewMosquitto
from tests.engines.forked import ForkedProcess, fork_gateway
from tests.helpers import commit, wait_until
from towline import Client
from towline.bridge.config.file import load
from towline.gateway.client import GatewayClient
from towline.gateway.launch import find_running
from towline.gateway.settings import GatewaySettings
from towline.journal import Journal
from towline.schema import ROW_SCHEMA
from towline_prove.devstack import Mosquitto

#: Settings of a Mosquitto that keeps what it acknowledges, and drops nothing.
KEEPING = {"max_queued_messages": "0", "persistence": "true", "autosave_interval": "1", "autosave_on_changes": "true"}


@pytest.fixture
def broker(new_mosquitto: NewMosquitto) -> Mosquitto:
    """A Mosquitto that drops nothing; it keeps nothing over its end, as by default."""
    return new_mosquitto(max_queued_messages="0")


def towline_command(*arguments: object, check: bool = False, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    """Run `towline` with these arguments to its end; what it said."""
    command = [sys.executable, "-m", "towline", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=check, timeout=timeout)


class Gateway:
    """One gateway process and its client."""

    process: ForkedProcess

    def __init__(self, settings: GatewaySettings) -> None:
        self.settings = settings
        self._client: GatewayClient | None = None
        self.log = settings.state_dir.parent / "gateway.log"

    def spawn(self, drain_s: float | None = None, prepare: Callable[[], None] | None = None) -> ForkedProcess:
        self.process = fork_gateway(self.settings, self.log, drain_s=drain_s, prepare=prepare)
        return self.process

    def start(self, drain_s: float | None = None) -> GatewayClient:
        process = self.spawn(drain_s)
        self._client = wait_until(lambda: find_running(self.settings.state_dir), what="the gateway's endpoint")
        assert process.poll() is None
        return self._client

    def connect(self, **wanted: Any) -> Self:
        """Start it, and wait until its session is online and its status shows all of `wanted`."""
        self.start()
        self.until(state="online", **wanted)
        return self

    def fail(self, *codes: int) -> str:
        """Start it, expect it to end by itself with an error, and return the last line of its log."""
        assert self.spawn().wait(15) in (codes or range(1, 256))
        return self.log.read_text().splitlines()[-1]

    @property
    def client(self) -> GatewayClient:
        assert self._client is not None
        return self._client

    def status(self) -> dict[str, Any]:
        return dict(self.client.status())

    def until(self, timeout: float = 60, **wanted: object) -> dict[str, Any]:
        """Wait until the status shows all of `wanted`."""

        last: dict[str, Any] = {}

        def shown() -> bool:
            last.update(self.status())
            return all(last.get(key) == value for key, value in wanted.items())

        try:
            wait_until(shown, timeout, f"a status with {wanted}")
        except AssertionError as error:
            error.add_note(f"the last status: {last}")
            raise
        return last

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)
        if self._client is not None:
            self._client.close()
            self._client = None
        return self.process.wait(60)

    def commit(self) -> None:
        """Commit everything that is in the journal, as a query does."""
        commit(self.client, "spark", int(self.status()["end"]))

    def seen(self) -> list[int]:
        """The numbers in the journal of the running gateway."""
        status = self.status()
        batches = self.client.read(status["journal"], status["first"], status["end"])
        return [int(payload) for batch in batches for payload in batch.column("payload").to_pylist()]

    def rows(self) -> list[dict[str, Any]]:
        """All rows, read from the disk after the process has ended."""
        journal = Journal.open(self.settings.inbox_dir, schema=ROW_SCHEMA)
        try:
            return [row for batch in journal.read(journal.first_offset, journal.end) for row in batch.to_pylist()]
        finally:
            journal.close()


@pytest.fixture
def made_gateways() -> Iterator[list[Gateway]]:
    """Gateways that are ended after the test."""
    gateways: list[Gateway] = []
    yield gateways
    for gateway in gateways:
        if hasattr(gateway, "process") and gateway.process.poll() is None:
            gateway.stop(signal.SIGKILL)


class NewGateway(Protocol):
    def __call__(
        self, broker: Mosquitto | str, name: str = "plant-7", *, qos: int = 1, **settings: object
    ) -> Gateway: ...


@pytest.fixture
def new_gateway(tmp_path: Path, made_gateways: list[Gateway]) -> NewGateway:
    """Make gateways that take t/# in with a QoS and the guarantee that goes with it, or what their settings say."""

    def make(broker: Mosquitto | str, name: str = "plant-7", *, qos: int = 1, **settings: object) -> Gateway:
        given = {
            "name": name,
            "state_dir": tmp_path / "state" / name,
            "brokers": broker if isinstance(broker, str) else broker.uri,
            "subscriptions": [{"pattern": "t/#", "qos": qos}],
            "guarantee": "exactly_once" if qos == 2 else "at_least_once",
            "owner_pid": os.getpid(),
            "connect_timeout_s": 5,
            **settings,
        }
        (tmp_path / "state").mkdir(exist_ok=True)
        made_gateways.append(gateway := Gateway(GatewaySettings.model_validate(given)))
        return gateway

    return make


class NewMembers(Protocol):
    def __call__(self, broker: Mosquitto, uplink: str) -> dict[str, Gateway]: ...


@pytest.fixture
def new_members(tmp_path: Path, made_gateways: list[Gateway]) -> NewMembers:
    """Make the gateways of the only line of a bridge file, by member: what `towline gateway --member` would run."""

    def make(broker: Mosquitto, uplink: str) -> dict[str, Gateway]:
        text = f'name = "b"\nstate_dir = "state"\nmqtt = {{ brokers = "{broker.uri}" }}\n'
        text += 'kafka = { bootstrap_servers = "k:9092" }\n[[uplink]]\nname = "line"\n' + uplink
        (tmp_path / "bridge.toml").write_text(text)
        (line,) = load(tmp_path / "bridge.toml").uplinks
        made = {}
        for settings in line.members:
            assert settings.share is not None
            made[settings.share.member] = gateway = Gateway(settings.model_copy(update={"owner_pid": os.getpid()}))
            gateway.log = tmp_path / f"{settings.name}.log"
        made_gateways.extend(made.values())
        return made

    return make


def publish(broker: Mosquitto, numbers: range, topic: str = "t/1", *, qos: int = 1) -> None:
    """Publish numbered messages and return when the broker has acknowledged them.

    Each time as another client: one that takes over from itself loses the QoS 0 messages Mosquitto has not read yet.
    """
    with Client(broker.uri, client_id=f"test-{uuid.uuid4().hex}") as client:
        for result in [client.publish(topic, b"%d" % number, qos=qos) for number in numbers]:
            result.result(60)


def payloads(gateway: Gateway) -> list[int]:
    return [int(row["payload"]) for row in gateway.rows()]


class Message(NamedTuple):
    topic: str
    payload: bytes
    packet_id: int
    user_properties: list[tuple[str, str]]


class Ear:
    """A foreign QoS 2 subscriber with a persistent session: each message once, as long as it lives."""

    def __init__(self, broker: Mosquitto, pattern: str = "#") -> None:
        self.messages: list[Message] = []
        subscribed = threading.Event()
        self.client = paho.Client(CallbackAPIVersion.VERSION2, client_id="ear", protocol=paho.MQTTv5)
        self.client.on_message = self._on_message
        self.client.on_subscribe = lambda *_: subscribed.set()
        self.client.reconnect_delay_set(1, 1)
        keep = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]
        keep.SessionExpiryInterval = 3600
        self.client.connect("127.0.0.1", broker.port, clean_start=False, properties=keep)
        self.client.subscribe(pattern, 2)
        self.client.loop_start()
        assert subscribed.wait(60)

    def _on_message(self, _client: Any, _data: Any, message: Any) -> None:
        pairs = getattr(message.properties, "UserProperty", [])
        self.messages.append(Message(message.topic, message.payload, message.mid, pairs))

    def until(self, count: int, timeout: float = 60) -> None:
        """Wait for so many different messages."""
        wait_until(lambda: len(set(self.numbers())) >= count, timeout, f"{count} messages")

    def numbers(self) -> list[int]:
        return [int(m.payload) for m in self.messages]

    def close(self) -> None:
        self.client.disconnect()
        self.client.loop_stop()


@pytest.fixture
def ear(broker: Mosquitto) -> Iterator[Ear]:
    """At the broker of the test, on all topics."""
    with contextlib.closing(Ear(broker)) as listening:
        yield listening


def outbox(gateway: Gateway) -> dict[str, Any]:
    account: dict[str, Any] = gateway.status()["outbox"]
    assert account["accepted"] == sum(account[k] for k in ("queued", "in_flight", "delivered", "expired", "refused"))
    return account
