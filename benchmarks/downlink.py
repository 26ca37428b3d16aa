"""The way back, Kafka → MQTT, from one backlog in Kafka to the broker's last acknowledgement, in one run.

Beside our downlink lines at both guarantees stand the bridge written by hand (a consumer, paho-mqtt, offsets committed
after the acknowledgements) and the null publisher, which stores and reads nothing: what the broker takes at QoS 1.
"""

from __future__ import annotations

import tempfile
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from confluent_kafka import Consumer, Producer
from paho.mqtt.client import Client
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion

from benchmarks import publisher
from benchmarks.rig import UNLIMITED, Meter, Outcome, held, machine, wait
from towline_prove import processes
from towline_prove.devstack.kafka import Kafka
from towline_prove.devstack.mosquitto import Mosquitto
from towline_prove.processes import Role
from towline_prove.subject import BridgeRun

if TYPE_CHECKING:
    from collections.abc import Sequence

TOPIC = "commands"
PAYLOAD = b"x" * 150
WARM_UP = 2_000

_CONFIG = """\
name = "bench"
state_dir = "{state_dir}"
mqtt = {{ brokers = "{mqtt}" }}
kafka = {{ bootstrap_servers = "{kafka}" }}

[[downlink]]
name = "{guarantee}"
guarantee = "{guarantee}"
from = "{topic}"
topic = "command/{{key}}"
dead_letter_topic = false
"""


def run(messages: int) -> dict[str, list[float]]:
    """Measure all four; prints and returns messages a second."""
    with tempfile.TemporaryDirectory(prefix="towline-bench-") as name, ExitStack() as stack:
        directory = Path(name)
        broker = stack.enter_context(Mosquitto(directory / "mosquitto", settings=UNLIMITED))
        kafka = stack.enter_context(Kafka(directory / "kafka"))
        kafka.create_topics({TOPIC: 1, "by-hand": 1})
        print(f"downlink: {messages:,} records of 150 B to Mosquitto {broker.version}\n  {machine()}\n")
        rates = {"null publisher": publisher.null(broker, messages)}
        fill(kafka, "by-hand", messages // 4)
        rates["consumer + paho by hand"] = by_hand(broker, kafka, messages // 4)
        for guarantee in ("at_least_once", "exactly_once"):
            outcome = Line(directory, broker, kafka, guarantee).drain(messages)
            print(outcome.line(), flush=True)
            rates[guarantee] = outcome.rate
    for who, rate in rates.items():
        print(f"{who:<24} {rate:10,.0f} msg/s")
    for guarantee in ("at_least_once", "exactly_once"):
        ratio = rates[guarantee] / rates["consumer + paho by hand"]
        print(f"{guarantee} / by hand  {ratio:.2f}   / null  {rates[guarantee] / rates['null publisher']:.2f}")
    said = {"at_least_once": "Towline at least once", "exactly_once": "Towline exactly once"}
    return {said.get(who, who): [round(rate)] for who, rate in rates.items()}


def fill(kafka: Kafka, topic: str, count: int) -> None:
    """Put so many records into a topic, for 50 devices."""
    producer = Producer(
        {"bootstrap.servers": kafka.bootstrap, "enable.idempotence": True, "linger.ms": "50", "batch.size": "1000000"}
    )
    for number in range(count):
        producer.produce(topic, PAYLOAD, b"d%d" % (number % 50))
        if number % 10_000 == 0:
            producer.flush()
    producer.flush()


def by_hand(broker: Mosquitto, kafka: Kafka, count: int) -> float:
    """A consumer and a paho client, QoS 1, 1,000 in flight; offsets are committed after the acknowledgements."""
    consumer = Consumer(
        {
            "bootstrap.servers": kafka.bootstrap,
            "group.id": "by-hand",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
        }
    )
    consumer.subscribe(["by-hand"])
    client = Client(CallbackAPIVersion.VERSION2, client_id="by-hand", protocol=MQTTProtocolVersion.MQTTv5)
    client.max_inflight_messages_set(1000)
    client.connect("127.0.0.1", broker.port)
    client.loop_start()
    done, started = 0, 0.0
    while done < count:
        records = consumer.consume(1000, 1.0)
        started = started or time.perf_counter()
        sent = [
            client.publish(f"command/{(r.key() or b'').decode()}", r.value(), qos=1) for r in records if not r.error()
        ]
        for each in sent:
            each.wait_for_publish(30)
        if sent:
            consumer.commit(asynchronous=False)
        done += len(sent)
    seconds = time.perf_counter() - started
    client.disconnect()
    client.loop_stop()
    consumer.close()
    return count / seconds


class Line:
    """A bridge with one downlink line.

    Args:
        directory: Its file, state and log go here.
        broker: Where it publishes.
        kafka: Where it reads.
        guarantee: Of the line.
    """

    def __init__(self, directory: Path, broker: Mosquitto, kafka: Kafka, guarantee: str) -> None:
        self._name, self._broker, self._kafka, self._topic = guarantee, broker, kafka, f"{TOPIC}-{guarantee}"
        state = directory / guarantee
        file = directory / f"{guarantee}.toml"
        file.write_text(
            _CONFIG.format(
                state_dir=state, mqtt=broker.uri, kafka=kafka.bootstrap, guarantee=guarantee, topic=self._topic
            )
        )
        self._bridge = BridgeRun(file, state / guarantee, directory / f"{guarantee}.log")

    def drain(self, messages: int) -> Outcome:
        """Warm it up, stop Spark, fill Kafka, let go; until the broker has acknowledged all."""
        self._kafka.create_topics({self._topic: 1})
        with self._bridge as bridge:
            bridge.start()
            fill(self._kafka, self._topic, WARM_UP)
            wait(lambda: self._delivered() >= WARM_UP, f"the first messages of {self._name}", pause=0.1)
            jvm = self._pids(Role.JVM)[0]
            meter = Meter({role: partial(self._pids, role) for role in (Role.JVM, Role.WORKER, Role.GATEWAY)})
            with held(jvm):
                fill(self._kafka, self._topic, messages)
                meter.start()
                began = time.monotonic()
            wait(lambda: self._delivered() >= WARM_UP + messages, f"{self._name} to drain", pause=0.05)
            seconds = time.monotonic() - began
            meter.stop()
            return Outcome(self._name, messages, seconds, meter.used, list(meter.groups))

    def _delivered(self) -> int:
        status = self._bridge.status() or {}
        return int((status.get("outbox") or {}).get("delivered", 0))

    def _pids(self, role: Role) -> Sequence[int]:
        assert self._bridge.child is not None
        return processes.pids_with_role(self._bridge.child.pid, role)
