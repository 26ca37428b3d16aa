"""The example of requests and answers on real brokers and a real Spark, and dead letters; a foreign device judges."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from paho.mqtt import client as paho

from tests.conftest import NewTopic
from tests.helpers import produce_all, wait_until
from tests.integration.bridge.running import PATIENCE, Running
from tests.integration.bridge.test_dlq import run_dlq
from tests.integration.devices import listening, properties_of
from towline_prove.devstack import Kafka, Mosquitto

pytestmark = pytest.mark.spark


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
        lambda: (a := bridge.account()).get("dead_lettered") == 2 and a["waiting"] == 0 and a,
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
