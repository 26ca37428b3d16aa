"""Kafka → MQTT with real brokers, a real Spark and real kills; a foreign subscriber judges."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from confluent_kafka.admin import AdminClient, NewPartitions  # type: ignore[attr-defined]
from paho.mqtt import client as paho
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from tests.conftest import NewMosquitto, NewTopic
from tests.helpers import produce_all, producer_in_order, wait_until, wait_while_it_moves
from tests.integration.bridge.running import PATIENCE, Running
from tests.integration.gateway.test_outbox import KEEPING, Ear, in_order, repeats, save
from towline.bridge.runtime.status import collect_status
from towline.gateway.endpoint import GatewayEndpoint
from towline_prove.devstack import Kafka, Mosquitto
from towline_prove.devstack.process import wait_for

pytestmark = pytest.mark.spark

#: Mosquitto's default max_inflight_messages.
MOSQUITTO_IN_FLIGHT = 20


def write(bridge: Running, broker: Mosquitto, kafka: Kafka, lines: str) -> None:
    # A name of the test's own: the Kafka that it shares with others has their markers.
    bridge.file.write_text(f"""
name = "{bridge.directory.parent.name}"
state_dir = "state"
mqtt = {{ brokers = "{broker.uri}" }}
kafka = {{ bootstrap_servers = "{kafka.bootstrap}", create_topics = {{ partitions = 1 }} }}
spark = {{ master = "local[2]" }}
{lines}""")


def lines_of(bridge: Running) -> dict[str, Any]:
    lines: dict[str, Any] = collect_status(bridge.directory / "state")["lines"]
    return lines


def accounts(bridge: Running) -> dict[str, Any]:
    return {name: line["account"] for name, line in lines_of(bridge).items()}


def put(kafka: Kafka, topic: str, numbers: range, keys: int = 5) -> None:
    produce_all(kafka.bootstrap, topic, ((b"k%d" % (number % keys), b"%d" % number, []) for number in numbers))


class Device:
    """A foreign device that keeps whole messages."""

    def __init__(self, broker: Mosquitto, pattern: str) -> None:
        self.messages: list[Any] = []
        self.client = paho.Client(CallbackAPIVersion.VERSION2, protocol=paho.MQTTv5)
        self.client.on_message = lambda _client, _data, message: self.messages.append(message)
        self.client.connect("127.0.0.1", broker.port)
        self.client.subscribe(pattern, 2)
        self.client.loop_start()

    def publish(self, topic: str, payload: bytes, properties: dict[str, Any], **more: Any) -> None:
        extra = Properties(PacketTypes.PUBLISH)  # type: ignore[no-untyped-call]
        for name, value in properties.items():
            setattr(extra, name, value)
        self.client.publish(topic, payload, qos=1, properties=extra, **more).wait_for_publish(30)

    def close(self) -> None:
        self.client.disconnect()
        self.client.loop_stop()


@pytest.fixture
def devices() -> Iterator[list[Device | Ear]]:
    clients: list[Device | Ear] = []
    yield clients
    for device in clients:
        device.close()


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
def application(kafka: Kafka) -> Iterator[subprocess.Popen[bytes]]:
    """The answering end of the example."""
    started = subprocess.Popen([sys.executable, str(EXAMPLES / "request_response.py"), kafka.bootstrap])
    yield started
    started.send_signal(signal.SIGTERM)
    assert started.wait(60) == 0


def test_round_trip_request_response_and_dead_letters(
    bridge: Running,
    mosquitto: Mosquitto,
    kafka: Kafka,
    topic: NewTopic,
    devices: list[Device | Ear],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """A device's request goes up, is answered in Kafka, and the answer comes down where the device asked for it."""
    extra, dead = topic("extra"), topic("dead")
    kafka.create_topics({"requests": 1, "answers": 1})
    request.getfixturevalue("application")
    for name, value in {"STATE": bridge.directory / "state", "MQTT": mosquitto.uri, "KAFKA": kafka.bootstrap}.items():
        monkeypatch.setenv(f"TOWLINE_{name}", str(value))
    example = (EXAMPLES / "request_response.toml").read_text()
    bridge.file.write_text(example + BACK.format(extra=extra, dead=dead))
    devices.append(device := Device(mosquitto, "back/#"))
    device.client.subscribe("answers/#", 2)
    bridge.start()
    wait_until(lambda: "requests" in running(bridge), PATIENCE, "the uplink's gateway")
    for number, properties in enumerate(PROPERTIES):
        device.publish(f"requests/d{number}", b"\x00\xffx%d" % number, properties)
    wait_until(lambda: len(device.messages) > len(PROPERTIES), PATIENCE, "what went up to come down, and the answer")

    came = {message.topic: message for message in device.messages}
    for number, sent in enumerate(PROPERTIES):
        message = came[f"back/d{number}"]
        assert (message.payload, message.qos) == (b"\x00\xffx%d" % number, 2)
        assert_same(message.properties, sent)
    answer = came["answers/d1"]
    assert answer.payload == b"\x00\xffX1"
    assert_same(answer.properties, {"CorrelationData": b"\x00\xff\x01"})

    producer = producer_in_order(kafka.bootstrap)
    producer.produce(extra, b"42", b"back/fine", headers=[("trace", b"t1"), ("null", None)])
    producer.produce(extra, b"skip", b"back/skip")
    producer.produce(extra, b"nowhere")
    producer.produce(extra, b"wild", b"back/#")
    assert producer.flush(30) == 0
    account = wait_until(
        lambda: (a := accounts(bridge)["line"]) and a["dead_lettered"] == 2 and a["waiting"] == 0 and a,
        PATIENCE,
        "the account",
    )
    assert (account["taken"], account["delivered"], account["filtered"], account["adds_up"]) == (7, 4, 1, True)
    wait_until(lambda: device.messages[-1].topic == "back/fine", what="the last message")
    assert_same(device.messages[-1].properties, {"UserProperty": [("trace", "t1"), ("null", "")]})
    # A committed transaction is readable a moment after its commit has returned.
    show = ("dlq", "show", str(bridge.file), "--line", "line", "--json")
    shown = wait_until(lambda: (output := towline(*show))["waiting"] and output, 60, "the dead letters")
    assert {row["reason"]: row["letters"] for row in shown["waiting"]} == {"topic_absent": 1, "topic_illegal": 1}
    assert {row["topic"] for row in shown["first"]} == {extra}
    assert bridge.interrupt() == 0
    assert "Spark's Kafka source for PySpark" in bridge.out
    assert "taken 7 = delivered 4 + dead-lettered 2 + filtered 1 + waiting 0   adds up ✓" in bridge.out
    assert "Traceback" not in bridge.out


def running(bridge: Running) -> set[str]:
    """The lines whose gateways answer."""
    if not (bridge.directory / "state" / "bridge.json").exists():
        return set()
    return {name for name, line in lines_of(bridge).items() if line["gateway_running"]}


def assert_same(came: Any, sent: dict[str, Any]) -> None:
    """Every property is as it was sent; of an expiry some time may be gone."""
    wanted = Properties(PacketTypes.PUBLISH)  # type: ignore[no-untyped-call]
    for name, value in sent.items():
        setattr(wanted, name, value)
    expected, answer = wanted.json(), came.json()  # type: ignore[no-untyped-call]
    expiry = (expected.pop("MessageExpiryInterval", None), answer.pop("MessageExpiryInterval", None))
    assert answer == expected
    assert (expiry[0] is None) == (expiry[1] is None)


def towline(*words: str) -> Any:
    run = subprocess.run([sys.executable, "-m", "towline", *words], capture_output=True, check=True, timeout=60)
    return json.loads(run.stdout)


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


def assert_once(ear: Ear, line: str, total: int, *, broker_kills: int, more: str = "") -> None:
    """Exactly once; a killed Mosquitto repeats, at most, what was on its way to the subscriber."""
    ours, the_brokers = judge(ear, line, range(total))
    assert not ours, f"{ours} doubled {more}"
    assert the_brokers <= broker_kills * MOSQUITTO_IN_FLIGHT, more


@contextlib.contextmanager
def standing_still(bridge: Running) -> Iterator[None]:
    """Nothing of ours runs meanwhile but Spark.

    Mosquitto acknowledges QoS 2 messages that it has not saved: killed then it loses by itself up to a window of them,
    which no publisher can know (`tests/integration/gateway/test_forgetful_broker.py`).
    """
    supervisor = psutil.Process(bridge.process.pid)
    supervisor.suspend()  # first, so that it starts no more
    still = [supervisor]
    try:
        for child in supervisor.children():
            with contextlib.suppress(psutil.ZombieProcess):  # killed a moment ago
                if "towline.gateway" in child.cmdline():
                    child.suspend()
                    still.append(child)
        yield
    finally:
        for process in still:
            process.resume()


def killed(bridge: Running, broker: Mosquitto, what: str, line: str = "") -> None:
    if what == "mosquitto":
        with standing_still(bridge):
            save(broker)
            broker.kill()
            broker.start()
    elif what == "gateway":
        endpoint = GatewayEndpoint.read(bridge.directory / "state" / line)
        if endpoint is not None:
            with contextlib.suppress(ProcessLookupError):  # killed a moment ago and not back yet
                os.kill(endpoint.pid, signal.SIGKILL)
    else:
        part = {"jvm": "org.apache.spark.deploy.SparkSubmit", "driver": "towline.bridge.runtime.driver"}[what]
        if process := bridge.child(part):
            os.kill(process.pid, signal.SIGKILL)


def heard(ear: Ear) -> set[tuple[str, bytes]]:
    """The different messages that came of the lines q1 and q2."""
    return {(m.topic, m.payload) for m in list(ear.messages) if m.topic.startswith(("q1/", "q2/"))}


def run_through(
    bridge: Running, broker: Mosquitto, kafka: Kafka, ear: Ear, source: str, kills: list[str], step: int, first: int = 0
) -> int:
    """Feed, kill in the midst of it, again and again, and wait until everything is delivered; how many there were."""
    total = first
    for kill in [*kills, ""]:
        before = len(ear.messages)
        put(kafka, source, range(total, total + step))
        total += step
        wait_until(lambda before=before: len(ear.messages) > before, PATIENCE, f"messages before {kill}")  # type: ignore[misc]
        for line in ("q1", "q2") if kill == "gateway" else ("",):
            if kill:
                killed(bridge, broker, kill, line)

    def done() -> bool:
        now = [account for name, account in accounts(bridge).items() if name in ("q0", "q1", "q2")]
        return all(a and a["taken"] >= total and not a["waiting"] and a["adds_up"] for a in now)

    # A Mosquitto that saves its store at every change takes as long as the machine's disk.
    wait_while_it_moves(done, lambda: accounts(bridge), PATIENCE)
    # Delivered is the broker's word; the ear may still be listening. Repeats of the QoS 1 line don't count here.
    wait_for(lambda: len(heard(ear)) >= 2 * total, 60 + total / 100)  # `judge` names what is missing then
    return total


COUNTED = """
[[downlink]]
name = "line"
from = "{topic}"
topic = "down/{{key}}"
where = "value <> 'skip'"
dead_letter_topic = "{dead}"
"""


@pytest.mark.long
def test_a_batch_that_was_committed_while_nobody_listened_is_counted(
    bridge: Running, mosquitto: Mosquitto, kafka: Kafka, topic: NewTopic
) -> None:
    """[I11] A kill between a commit and Spark's word of it: what it left out would be in no account."""
    source = topic("commands", partitions=3)
    write(bridge, mosquitto, kafka, COUNTED.format(topic=source, dead=topic("dead")))
    often = 'master = "local[2]", conf = { "spark.sql.streaming.noDataProgressEventInterval" = "50" }'
    bridge.file.write_text(bridge.file.read_text().replace('master = "local[2]"', often))
    bridge.start()
    wait_until(lambda: running(bridge) and lines_of(bridge)["line"]["query"] == "running", PATIENCE, "the query")
    put_mixed(kafka, source)
    assert_counted(bridge, 1)
    # Spark's last update is, but for luck, of a trigger without a batch by now: it has the number of the next batch.
    commits = bridge.directory / "state" / "line" / "checkpoint" / "commits"
    following = commits / str(1 + max(int(one.name) for one in commits.iterdir() if one.name.isdigit()))
    driver, jvm = (
        bridge.child(part) for part in ("towline.bridge.runtime.driver", "org.apache.spark.deploy.SparkSubmit")
    )
    assert driver
    assert jvm
    put_mixed(kafka, source)
    end = time.monotonic() + PATIENCE
    while not following.exists() and time.monotonic() < end:
        time.sleep(0.0005)
    driver.suspend()  # the listener is told some ten milliseconds after the commit
    bridge.process.kill()
    bridge.process.wait()
    jvm.kill()
    driver.kill()
    bridge.start()
    assert_counted(bridge, 2)
    assert bridge.interrupt() == 0
    # Begun anew behind the last batch; Spark demands an offset for every partition there is by then.
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap})
    admin.create_partitions([NewPartitions(source, 4)])[source].result(30)
    put_mixed(kafka, source, 4)
    assert "is reset" in bridge.command("reset", "line")
    bridge.start()
    assert_counted(bridge, 3)
    assert bridge.interrupt() == 0


def put_mixed(kafka: Kafka, source: str, parts: int = 3) -> None:
    """Two records to be delivered, three to be filtered, five dead letters."""
    producer = producer_in_order(kafka.bootstrap)
    for number in range(10):
        value, key = b"skip" if number < 3 else b"m", b"down" if number < 5 else b"#"
        producer.produce(source, value, key, partition=number % parts)
    assert producer.flush(30) == 0


def assert_counted(bridge: Running, times: int) -> None:
    """Each record of `put_mixed` is in the account."""

    def counted() -> Any:
        account = accounts(bridge)["line"]
        return account and account["taken"] >= 10 * times and not account["waiting"] and account

    account = wait_until(counted, PATIENCE, f"the account: {accounts(bridge)}")
    parts = ("taken", "delivered", "filtered", "dead_lettered", "uncounted")
    assert [account[part] for part in parts] == [10 * times, 2 * times, 3 * times, 5 * times, 0]
    assert account["adds_up"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("whom", "messages", "settings"),
    [
        pytest.param(["gateway", "jvm", "driver"], 100_000, {"max_queued_messages": "0"}, id="100k"),
        # At every change Mosquitto writes its whole store anew: with thousands waiting it takes 50 messages a second.
        pytest.param(["gateway", "jvm", "driver", "mosquitto"], 10_000, KEEPING, id="broker too"),
    ],
)
def test_30_random_kills(
    bridge: Running,
    new_mosquitto: NewMosquitto,
    kafka: Kafka,
    topic: NewTopic,
    devices: list[Device | Ear],
    whom: list[str],
    messages: int,
    settings: dict[str, str],
    record_property: Callable[[str, object], None],
) -> None:
    seed = int(os.environ.get("TOWLINE_SEED", time.time_ns() % 1_000_000))
    record_property("seed", seed)
    kills = random.Random(seed).choices(whom, k=30)
    broker = new_mosquitto(**settings)
    source = topic("commands")
    write(bridge, broker, kafka, TWO_LINES.format(topic=source, most=2000, dead=topic("dead")))
    devices.append(ear := Ear(broker))
    bridge.start()
    total = run_through(bridge, broker, kafka, ear, source, kills, messages // 31 + 1)
    record_property("messages", total)
    judge(ear, "q1", range(total))
    assert_once(ear, "q2", total, broker_kills=kills.count("mosquitto"), more=f"seed {seed}")
