"""``examples/hono.toml`` on real brokers: each kind of message, seen by a Kafka client and an MQTT client.

The bridge runs once for all tests of the file; what each looks at was sent at the beginning.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer
from paho.mqtt import client as paho
from paho.mqtt.enums import CallbackAPIVersion

from tests.helpers import produce_all, wait_until
from tests.integration.bridge.conftest import ended
from tests.integration.bridge.running import PATIENCE, Running
from towline_prove.devstack import Kafka, Mosquitto

pytestmark = pytest.mark.spark

EXAMPLE = Path(__file__).parents[3] / "examples" / "hono.toml"
TENANT, DEVICE = "plant-7", "press-1"
TOPICS = [f"hono.{kind}.{TENANT}" for kind in ("telemetry", "event", "command_response")]
EMPTY = "application/vnd.eclipse-hono-empty-notification"
FAILURE = "application/vnd.eclipse-hono-delivery-failure-notification+json"
METADATA = "delivery-failure-notification-metadata.trace"

#: name → topic, payload, QoS of what the device publishes.
SENT: dict[str, tuple[str, bytes, int]] = {
    "telemetry at most once": (f"telemetry/{TENANT}/{DEVICE}", b"t0", 0),
    "telemetry at least once": (f"telemetry/{TENANT}/{DEVICE}", b"t1", 1),
    "event": (f"event/{TENANT}/{DEVICE}", b"e0", 1),
    "event with a time to live": (f"event/{TENANT}/{DEVICE}/?hono-ttl=60", b"e2", 1),
    "empty notification": (f"event/{TENANT}/{DEVICE}/?content-type={EMPTY}&hono-ttd=-1", b"", 1),
    "refused: event with QoS 0": (f"event/{TENANT}/{DEVICE}/?correlation-id=c1&on-error=ignore", b"", 0),
    "refused: nothing and no content type": (f"telemetry/{TENANT}/{DEVICE}", b"", 1),
    "refused: another tenant": (f"t/other/{DEVICE}", b"x", 1),
    "refused: no status": (f"command/{TENANT}/{DEVICE}/res/203abc/ok", b"", 1),
}
#: Events without a time to live of their own get the tenant's cap.
CAP = "3600000"
#: name → topic, key and headers of the record; "creation-time" is in all of them.
CARRIED: dict[str, tuple[str, dict[str, str]]] = {
    "telemetry at most once": ("telemetry", {"qos": "0", "content-type": "application/json"}),
    "telemetry at least once": ("telemetry", {"qos": "1", "content-type": "application/json"}),
    "event": ("event", {"qos": "1", "content-type": "application/json", "ttl": CAP}),
    "event with a time to live": ("event", {"qos": "1", "content-type": "application/json", "ttl": "60000"}),
    "empty notification": ("event", {"qos": "1", "content-type": EMPTY, "ttl": CAP, "ttd": "-1"}),
}
REFUSED = {
    "refused: event with QoS 0": ("event/c1/400", "Only QoS 1 supported for event messages"),
    "refused: nothing and no content type": ("telemetry/-1/400", "Content-Type null does not match payload"),
    "refused: no status": ("command-response/-1/400", "invalid status code"),
}
#: name → headers of a command.
COMMANDS: dict[str, dict[str, str]] = {
    "one-way": {"device_id": DEVICE, "subject": "blink", "content-type": "text/plain"},
    "request": {"device_id": DEVICE, "subject": "get/level", "response-required": "true", "correlation-id": "q-1"},
    "without subject": {"device_id": DEVICE, "response-required": "true", "correlation-id": "q-2", METADATA: "7"},
    "nobody waits": {"device_id": DEVICE},
}


@dataclass
class World:
    """What a device and an application have seen.

    Attributes:
        bridge: As a user runs it.
        records: By value and topic, what the application has read: key, headers.
        order: Values of the topics, as they stand in Kafka.
        at_device: Topic and payload of all that came to the device.
    """

    bridge: Running
    records: list[tuple[Any, ...]] = field(default_factory=list)
    at_device: list[tuple[str, bytes]] = field(default_factory=list)

    def record(self, kind: str, value: bytes) -> tuple[bytes, dict[str, str]]:
        """Key and headers of the only record of a topic with a value."""
        topic = f"hono.{kind}.{TENANT}"
        ((key, headers),) = [(k, h) for t, k, v, h in self.records if (t, v) == (topic, value)]
        return key, {name: text.decode() for name, text in headers.items()}


def respond(client: paho.Client, world: World, message: paho.MQTTMessage) -> None:
    """What a device does: it answers each request under the id that it was given."""
    world.at_device.append((message.topic, bytes(message.payload)))
    endpoint, tenant, device, kind, request, *_ = message.topic.split("/")
    if (endpoint, kind) == ("command", "req") and request:
        client.publish(f"command/{tenant}/{device}/res/{request}/200/?content-type=text/x", b"level 5", qos=1)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, kafka: Kafka) -> Iterator[World]:
    place = tmp_path_factory.mktemp("hono")
    with (
        Mosquitto(place / "mosquitto") as broker,
        pytest.MonkeyPatch.context() as environ,
        ended(Running(place, EXAMPLE)) as bridge,
    ):
        for name, value in {"STATE": place / "state", "MQTT": broker.uri, "KAFKA": kafka.bootstrap}.items():
            environ.setenv(f"TOWLINE_{name}", str(value))
        bridge.start()
        seen = World(bridge)
        device = paho.Client(CallbackAPIVersion.VERSION2, protocol=paho.MQTTv311)
        device.on_message = lambda client, _, message: respond(client, seen, message)
        try:
            wait_until(lambda: online(bridge), PATIENCE, "the lines")
            device.connect("127.0.0.1", broker.port)
            device.loop_start()
            subscribed = device.subscribe([(f"command/{TENANT}/{DEVICE}/req/#", 1), (f"error/{TENANT}/{DEVICE}/#", 0)])
            assert subscribed[0] == paho.MQTT_ERR_SUCCESS
            for topic, payload, qos in SENT.values():
                device.publish(topic, payload, qos).wait_for_publish(60)
            command(kafka)
            wait_until(lambda: read(kafka, seen), PATIENCE, "the records")
            wait_until(lambda: len(seen.at_device) >= len(REFUSED) + 2, PATIENCE, "the commands and errors")
            yield seen
        finally:
            device.disconnect()
            device.loop_stop()


def online(bridge: Running) -> bool:
    lines = bridge.status("devices")["lines"] | bridge.status("commands")["lines"] | bridge.status("errors")["lines"]
    return all((one["gateway"] or {}).get("state") == "online" and one["query"] == "running" for one in lines.values())


def command(kafka: Kafka) -> None:
    """What an application writes."""
    records = (
        (DEVICE.encode(), name.encode(), [(header, value.encode()) for header, value in headers.items()])
        for name, headers in COMMANDS.items()
    )
    produce_all(kafka.bootstrap, f"hono.command.{TENANT}", records)


def read(kafka: Kafka, seen: World) -> bool:
    """Read what an application reads; whether it is all."""
    consumer = Consumer(
        {"bootstrap.servers": kafka.bootstrap, "group.id": str(uuid.uuid4()), "auto.offset.reset": "earliest"}
    )
    consumer.subscribe(TOPICS)
    end = time.monotonic() + 20
    records: list[tuple[Any, ...]] = []
    while time.monotonic() < end and len(records) < len(CARRIED) + 2:
        for one in consumer.consume(100, 0.5):
            if one.error() is None:
                headers = one.headers() or []
                assert len(dict(headers)) == len(headers), "no header stands twice"
                records.append((one.topic(), one.key(), one.value(), dict(headers)))
    consumer.close()
    seen.records = records
    return len(records) >= len(CARRIED) + 2


@pytest.mark.parametrize("name", CARRIED)
def test_up(world: World, name: str) -> None:
    topic, payload, _ = SENT[name]
    kind, headers = CARRIED[name]
    key, found = world.record(kind, payload)
    assert abs(int(found.pop("creation-time")) / 1000 - time.time()) < 600
    assert key == DEVICE.encode()
    assert found == {"device_id": DEVICE, "orig_adapter": "hono-mqtt", "orig_address": topic, **headers}


def test_both_qos_classes_keep_the_order_of_the_device(world: World) -> None:
    values = [value for topic, key, value, _ in world.records if "telemetry" in topic and key == DEVICE.encode()]
    assert values == [b"t0", b"t1"]


@pytest.mark.parametrize("name", REFUSED)
def test_a_device_is_told_what_was_refused(world: World, name: str) -> None:
    place, words = REFUSED[name]
    ((body,),) = [[json.loads(text)] for topic, text in world.at_device if topic == f"error/{TENANT}/{DEVICE}/{place}"]
    _, correlation, status = place.split("/")
    timestamp = body.pop("timestamp")
    assert (len(timestamp), timestamp[-1]) == (24, "Z")
    assert body == {"code": int(status), "message": words, "correlation-id": correlation}


def test_a_tenant_that_is_not_known_is_no_topic(world: World) -> None:
    assert not [topic for topic, *_ in world.records if "other" in topic]


def test_a_one_way_command(world: World) -> None:
    assert (f"command/{TENANT}/{DEVICE}/req//blink", b"one-way") in world.at_device


def test_a_request_and_its_response(world: World) -> None:
    """Kafka → device → Kafka."""
    assert (f"command/{TENANT}/{DEVICE}/req/203q-1/get/level", b"request") in world.at_device
    key, headers = world.record("command_response", b"level 5")
    assert int(headers.pop("creation-time")) > 0
    assert key == DEVICE.encode()
    assert headers == {
        "content-type": "text/x",
        "correlation-id": "q-1",
        "device_id": DEVICE,
        "status": "200",
        "tenant_id": TENANT,
    }


def test_a_delivery_failure(world: World) -> None:
    """Only where the application waits for a response."""
    (value,) = [v for topic, _, v, h in world.records if h.get("content-type") == FAILURE.encode()]
    assert json.loads(value) == {"error": "malformed command message: subject not set"}
    key, headers = world.record("command_response", value)
    assert int(headers.pop("creation-time")) > 0
    assert key == DEVICE.encode()
    assert headers == {
        "content-type": FAILURE,
        "correlation-id": "q-2",
        "device_id": DEVICE,
        "status": "400",
        "tenant_id": TENANT,
        METADATA: "7",
    }


def test_the_account_adds_up(world: World) -> None:
    """The last test: it ends the bridge."""

    def lines() -> dict[str, dict[str, Any]]:
        return {name: world.bridge.account(name) for name in ("devices", "commands", "errors")}

    expected = {
        "devices": {"received": 10, "in_kafka": 6, "dead_lettered": 4, "waiting": 0},
        "commands": {"taken": 4, "delivered": 2, "dead_lettered": 2, "waiting": 0},
        "errors": {"taken": 6, "delivered": 4, "filtered": 2, "waiting": 0},
    }

    def counted() -> bool:
        found = lines()
        return all(found[name].get(key) == count for name, counts in expected.items() for key, count in counts.items())

    wait_until(counted, PATIENCE, "the accounts")
    assert all(one["adds_up"] for one in lines().values())
    assert world.bridge.interrupt() == 0
    assert "Traceback" not in world.bridge.out
