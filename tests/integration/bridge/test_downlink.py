"""Kafka → MQTT with real brokers, a real Spark and real kills; a foreign subscriber judges."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from paho.mqtt import client as paho

from tests.conftest import NewTopic
from tests.helpers import produce_all, wait_until
from tests.integration.bridge.running import PATIENCE, Running
from tests.integration.bridge.test_dlq import run_dlq
from tests.integration.conftest import Ear
from tests.integration.devices import listening, properties_of
from tests.integration.gateway.test_outbox import in_order, repeats, save
from towline.bridge.runtime.status import collect_status
from towline_prove.devstack import Kafka, Mosquitto
from towline_prove.devstack.process import wait_for

pytestmark = pytest.mark.spark


def lines_of(bridge: Running) -> dict[str, Any]:
    lines: dict[str, Any] = collect_status(bridge.directory / "state")["lines"]
    return lines


def accounts(bridge: Running) -> dict[str, Any]:
    return {name: line["account"] for name, line in lines_of(bridge).items()}


def put(kafka: Kafka, topic: str, numbers: range, keys: int = 5) -> None:
    produce_all(kafka.bootstrap, topic, ((b"k%d" % (number % keys), b"%d" % number, []) for number in numbers))


PROPERTIES: list[dict[str, Any]] = [
    {},
    {
        "ContentType": "text/plain; charset=ü",
        "ResponseTopic": "answers/d1",
        "CorrelationData": b"\x00\xff\x01",
        "UserProperty": [("a", "1"), ("b", ""), ("a", "2"), ("", "🚀")],
        "PayloadFormatIndicator": 1,
    },
    {"MessageExpiryInterval": 3600, "UserProperty": [("mqtt.topic", "not ours")]},
]
EXAMPLES = Path(__file__).parents[3] / "examples"
#: Beside the lines of the example: one that sends every request back, and whatever is put into another topic.
BACK = """
[[downlink]]
name = "line"
guarantee = "exactly_once"
from = ["requests", "{extra}"]
where = "coalesce(CAST(value AS STRING), '') <> 'skip'"
dead_letter_topic = "{dead}"
[downlink.topic]
sql = "CASE topic WHEN 'requests' THEN concat('back/', CAST(key AS STRING)) ELSE CAST(key AS STRING) END"
"""


@pytest.fixture
def device(mosquitto: Mosquitto) -> Iterator[tuple[paho.Client, list[Any]]]:
    """A foreign device, and the messages that came to it."""
    with listening(mosquitto.port, ("back/#", 2), ("answers/#", 2)) as listener:
        yield listener


def assert_same(came: Any, values: dict[str, Any]) -> None:
    """Every property is as it was sent; of an expiry some time may be gone."""
    expected, answer = properties_of(values).json(), came.json()  # type: ignore[no-untyped-call]
    expiry = (expected.pop("MessageExpiryInterval", 0), answer.pop("MessageExpiryInterval", 0))
    assert answer == expected
    assert expiry[0] - 1000 < expiry[1] <= expiry[0]


def test_round_trip_request_response_and_dead_letters(
    bridge: Running,
    mosquitto: Mosquitto,
    kafka: Kafka,
    topic: NewTopic,
    device: tuple[paho.Client, list[Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A device's request goes up, is answered in Kafka, and the answer comes down where the device asked for it."""
    (client, messages), extra, dead = device, topic("extra"), topic("dead")
    kafka.create_topics({"requests": 1, "answers": 1})
    for name, value in {"STATE": bridge.directory / "state", "MQTT": mosquitto.uri, "KAFKA": kafka.bootstrap}.items():
        monkeypatch.setenv(f"TOWLINE_{name}", str(value))
    example = (EXAMPLES / "request_response.toml").read_text()
    bridge.file.write_text(example + BACK.format(extra=extra, dead=dead))
    bridge.start()
    wait_until(lambda: bridge.online("requests"), PATIENCE, "the uplink's gateway")
    for number, sent in enumerate(PROPERTIES):
        client.publish(f"requests/d{number}", b"\x00\xffx%d" % number, qos=1, properties=properties_of(sent))
    with subprocess.Popen([sys.executable, str(EXAMPLES / "request_response.py"), kafka.bootstrap]) as application:
        wait_until(lambda: len(messages) > len(PROPERTIES), PATIENCE, "what went up to come down, and the answer")
        application.send_signal(signal.SIGTERM)
        assert application.wait(60) == 0
    came = {message.topic: message for message in messages}
    for number, sent in enumerate(PROPERTIES):
        message = came[f"back/d{number}"]
        assert (message.payload, message.qos) == (b"\x00\xffx%d" % number, 2)
        assert_same(message.properties, sent)
    assert came["answers/d1"].payload == b"\x00\xffX1"
    assert_same(came["answers/d1"].properties, {"CorrelationData": b"\x00\xff\x01"})

    fine = (b"back/fine", b"42", [("trace", b"t1"), ("null", None)])
    produce_all(
        kafka.bootstrap, extra, [fine, (b"back/skip", b"skip", []), (None, b"nowhere", []), (b"back/#", b"wild", [])]
    )
    account = wait_until(
        lambda: (a := accounts(bridge)["line"]) and a["dead_lettered"] == 2 and a["waiting"] == 0 and a,
        PATIENCE,
        "the account",
    )
    assert (account["taken"], account["delivered"], account["filtered"], account["adds_up"]) == (7, 4, 1, True)
    wait_until(lambda: messages[-1].topic == "back/fine", what="the last message")
    assert_same(messages[-1].properties, {"UserProperty": [("trace", "t1"), ("null", "")]})
    assert bridge.interrupt() == 0
    code, shown, _ = run_dlq("show", str(bridge.file), "--line", "line")
    assert (code, "1  topic_absent " in shown, "1  topic_illegal " in shown) == (0, True, True)
    assert "taken 7 = delivered 4 + dead-lettered 2 + filtered 1 + waiting 0   adds up ✓" in bridge.out
    assert "Traceback" not in bridge.out


TWO_LINES = """
[[downlink]]
name = "q1"
from = "{topic}"
topic = "q1/{{key}}"
dead_letter_topic = false
max_messages_per_trigger = {most}
[[downlink]]
name = "q2"
guarantee = "exactly_once"
from = "{topic}"
topic = "q2/{{key}}"
dead_letter_topic = "{dead}"
max_messages_per_trigger = {most}
"""


def judge(ear: Ear, line: str, numbers: range) -> tuple[int, int]:
    """Lost none, each topic in order; how many repeats are ours, and how many the killed Mosquitto's."""
    mine = [message for message in ear.messages if message.topic.startswith(f"{line}/")]
    assert in_order(mine), f"{line}: order"
    came = {int(message.payload) for message in mine}
    lost = sorted(set(numbers) - came)
    assert not lost, f"{line}: lost {len(lost)}: {lost[:20]}"
    assert came <= set(numbers), f"{line}: invented {came - set(numbers)}"
    return repeats(mine)


def kill_broker(bridge: Running, broker: Mosquitto) -> None:
    """Kill Mosquitto while nothing of ours runs but Spark, and start it again.

    It acknowledges QoS 2 messages that it has not saved: killed then it loses by itself up to a window of them, which
    no publisher can know.
    """
    supervisor = psutil.Process(bridge.process.pid)
    supervisor.suspend()  # first, so that it starts no more
    still = [supervisor, *(child for child in supervisor.children() if "towline.gateway" in child.cmdline())]
    for process in still:
        process.suspend()
    try:
        save(broker)
        broker.kill()
        broker.start()
    finally:
        for process in still:
            process.resume()


def run_through(bridge: Running, broker: Mosquitto, kafka: Kafka, ear: Ear, source: str, step: int, first: int) -> int:
    """Feed, kill Mosquitto and then Spark in the midst of it, and wait until all is delivered; how many there were."""
    for kill in ("mosquitto", "jvm", ""):
        before = len(ear.messages)
        put(kafka, source, range(first, first + step))
        first += step
        wait_until(lambda before=before: len(ear.messages) > before, PATIENCE, f"messages before {kill}")  # type: ignore[misc]
        if kill == "mosquitto":
            kill_broker(bridge, broker)
        elif kill == "jvm" and (spark := bridge.child("org.apache.spark.deploy.SparkSubmit")):
            os.kill(spark.pid, signal.SIGKILL)

    def done() -> bool:
        now = [account for name, account in accounts(bridge).items() if name in ("q0", "q1", "q2")]
        return all(a and a["taken"] >= first and not a["waiting"] and a["adds_up"] for a in now)

    wait_until(done, PATIENCE, "the accounts")
    # Delivered is the broker's word; the ear may still be listening. Repeats of the QoS 1 line don't count here.
    wait_for(lambda: len({(m.topic, m.payload) for m in ear.messages if m.topic[:2] in ("q1", "q2")}) >= 2 * first, 60)
    return first
