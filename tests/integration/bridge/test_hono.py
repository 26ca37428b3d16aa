"""``examples/hono.toml`` on real brokers: each kind of message, seen by a Kafka client and an MQTT client."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from paho.mqtt import client as paho

from tests.helpers import produce_all, wait_until
from tests.integration.bridge.conftest import ended
from tests.integration.bridge.running import PATIENCE, Running
from tests.integration.devices import device
from tests.integration.kafka.reading import records
from towline_prove.devstack import Kafka, Mosquitto

pytestmark = pytest.mark.spark

EXAMPLE = Path(__file__).parents[3] / "examples" / "hono.toml"
TENANT, DEVICE = "plant-7", "press-1"
TOPICS = [f"hono.{kind}.{TENANT}" for kind in ("telemetry", "event", "command_response")]
EMPTY = "application/vnd.eclipse-hono-empty-notification"
FAILURE = "application/vnd.eclipse-hono-delivery-failure-notification+json"
METADATA = "delivery-failure-notification-metadata.trace"
#: Topic, payload and QoS of what the device publishes, and the topic and headers of the record that it becomes;
#: "creation-time" is in all of them, and events without a time to live of their own get the tenant's cap.
CARRIED: list[tuple[str, bytes, int, dict[str, str]]] = [
    (f"telemetry/{TENANT}/{DEVICE}", b"t0", 0, {"qos": "0", "content-type": "application/json"}),
    (f"telemetry/{TENANT}/{DEVICE}", b"t1", 1, {"qos": "1", "content-type": "application/json"}),
    (f"event/{TENANT}/{DEVICE}", b"e0", 1, {"qos": "1", "content-type": "application/json", "ttl": "3600000"}),
    (
        f"event/{TENANT}/{DEVICE}/?content-type={EMPTY}&hono-ttd=-1&hono-ttl=60",
        b"",
        1,
        {"qos": "1", "content-type": EMPTY, "ttl": "60000", "ttd": "-1"},
    ),
]
#: What is refused, and where and with which words the device is told; one of a tenant that is not known is not.
REFUSED: list[tuple[str, bytes, int, str, str]] = [
    (
        f"event/{TENANT}/{DEVICE}/?correlation-id=c1&on-error=ignore",
        b"",
        0,
        "event/c1/400",
        "Only QoS 1 supported for event messages",
    ),
    (f"telemetry/{TENANT}/{DEVICE}", b"", 1, "telemetry/-1/400", "Content-Type null does not match payload"),
    (f"command/{TENANT}/{DEVICE}/res/203abc/ok", b"", 1, "command-response/-1/400", "invalid status code"),
    (f"t/other/{DEVICE}", b"x", 1, "", ""),
]
#: Value and headers of commands: one-way, a request, one without subject, and one for which nobody waits.
COMMANDS: dict[str, dict[str, str]] = {
    "one-way": {"device_id": DEVICE, "subject": "blink", "content-type": "text/plain"},
    "request": {"device_id": DEVICE, "subject": "get/level", "response-required": "true", "correlation-id": "q-1"},
    "without subject": {"device_id": DEVICE, "response-required": "true", "correlation-id": "q-2", METADATA: "7"},
    "nobody waits": {"device_id": DEVICE},
}
ACCOUNTS = {
    "devices": {"received": 9, "in_kafka": 5, "dead_lettered": 4, "waiting": 0},
    "commands": {"taken": 4, "delivered": 2, "dead_lettered": 2, "waiting": 0},
    "errors": {"taken": 6, "delivered": 4, "filtered": 2, "waiting": 0},
}


def test_devices_and_applications_meet(tmp_path: Path, kafka: Kafka, monkeypatch: pytest.MonkeyPatch) -> None:
    at_device: list[tuple[str, bytes]] = []

    def respond(client: paho.Client, _: object, message: paho.MQTTMessage) -> None:
        """Answer each request under the id that it was given, as a device does."""
        at_device.append((message.topic, bytes(message.payload)))
        endpoint, tenant, name, kind, request, *_rest = message.topic.split("/")
        if (endpoint, kind) == ("command", "req") and request:
            client.publish(f"command/{tenant}/{name}/res/{request}/200/?content-type=text/x", b"level 5", qos=1)

    with Mosquitto(tmp_path / "mosquitto") as broker, ended(Running(tmp_path, EXAMPLE)) as bridge:
        for name, value in {"STATE": tmp_path / "state", "MQTT": broker.uri, "KAFKA": kafka.bootstrap}.items():
            monkeypatch.setenv(f"TOWLINE_{name}", str(value))
        bridge.start()
        wait_until(lambda: online(bridge), PATIENCE, "the lines")
        with device(broker.port, paho.MQTTv311) as client:
            client.on_message = respond
            client.subscribe([(f"command/{TENANT}/{DEVICE}/req/#", 1), (f"error/{TENANT}/{DEVICE}/#", 0)])
            for topic, payload, qos in [one[:3] for one in CARRIED] + [one[:3] for one in REFUSED]:
                client.publish(topic, payload, qos).wait_for_publish(60)
            commands_sent = (
                (DEVICE.encode(), name.encode(), [(header, text.encode()) for header, text in headers.items()])
                for name, headers in COMMANDS.items()
            )
            produce_all(kafka.bootstrap, f"hono.command.{TENANT}", commands_sent)
            wait_until(lambda: len(at_device) >= 3 + 2, PATIENCE, "the commands and errors")
            wait_until(lambda: counted(bridge), PATIENCE, "the accounts")
            wait_until(lambda: len(read(kafka)) >= len(CARRIED) + 2, PATIENCE, "the records")
            found = read(kafka)
        assert bridge.interrupt() == 0
        assert "Traceback" not in bridge.out
    assert {key for _, key, _, _ in found} == {DEVICE.encode()}
    assert all(abs(int(headers.pop("creation-time")) / 1000 - time.time()) < 600 for *_, headers in found)
    for topic, payload, _, headers in CARRIED:
        said = {"device_id": DEVICE, "orig_adapter": "hono-mqtt", "orig_address": topic, **headers}
        assert (f"hono.{topic.partition('/')[0]}.{TENANT}", payload, said) in [(one[0], *one[2:]) for one in found]
    assert [value for topic, _, value, _ in found if "telemetry" in topic] == [b"t0", b"t1"], "the device's order"
    for *_, place, words in REFUSED[:3]:
        (body,) = [json.loads(text) for topic, text in at_device if topic == f"error/{TENANT}/{DEVICE}/{place}"]
        timestamp = body.pop("timestamp")
        assert (len(timestamp), timestamp[-1]) == (24, "Z")
        _, correlation, status = place.split("/")
        assert body == {"code": int(status), "message": words, "correlation-id": correlation}
    commands = {(topic, payload) for topic, payload in at_device if topic.startswith("command/")}
    place = f"command/{TENANT}/{DEVICE}/req/"
    assert commands == {(f"{place}/blink", b"one-way"), (f"{place}203q-1/get/level", b"request")}
    answer, failure = sorted((headers for topic, _, _, headers in found if "response" in topic), key=str, reverse=True)
    common = {"device_id": DEVICE, "tenant_id": TENANT}
    assert answer == {**common, "content-type": "text/x", "correlation-id": "q-1", "status": "200"}
    assert failure == {**common, "content-type": FAILURE, "correlation-id": "q-2", "status": "400", METADATA: "7"}
    values = [value for topic, _, value, _ in found if "response" in topic]
    assert json.loads(next(value for value in values if value != b"level 5")) == {
        "error": "malformed command message: subject not set"
    }


def online(bridge: Running) -> bool:
    lines = [line for name in ACCOUNTS for line in bridge.status(name)["lines"].values()]
    return all((one["gateway"] or {}).get("state") == "online" and one["query"] == "running" for one in lines)


def counted(bridge: Running) -> bool:
    found = {name: bridge.account(name) for name in ACCOUNTS}
    return all(
        found[name].get(key) == count for name, counts in ACCOUNTS.items() for key, count in counts.items()
    ) and all(one["adds_up"] for one in found.values())


def read(kafka: Kafka) -> list[tuple[str, bytes, bytes, dict[str, Any]]]:
    """Topic, key, value and headers of all that an application reads."""
    found = [one for topic in TOPICS for one in records(kafka.bootstrap, topic)]
    assert all(len(dict(one.headers())) == len(one.headers()) for one in found), "no header stands twice"
    return [
        (one.topic(), one.key(), one.value(), {name: text.decode() for name, text in one.headers()}) for one in found
    ]
