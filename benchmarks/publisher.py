"""A durable publisher against bare ones: `towline.Publisher`, paho and a null publisher, at QoS 1, in one run.

The null publisher stores nothing: the same codec and session, packets made beforehand. All publish the same messages to
one broker, one after the other; a message counts when the broker has acknowledged it.
"""

from __future__ import annotations

import tempfile
import threading
import time
from pathlib import Path

from paho.mqtt.client import Client as PahoClient
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion

from towline import Client, Publisher
from towline_prove.devstack import Mosquitto

PAYLOAD = b"x" * 150
SETTINGS = {"max_inflight_messages": "0", "max_queued_messages": "0"}

#: Subjects in a record.
_SAID = {
    "null": "null publisher",
    "paho": "paho",
    "durable": "Towline, durable",
    "durable, 8 threads": "Towline, durable, 8 threads",
}


def run(messages: int) -> dict[str, list[float]]:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        with Mosquitto(directory / "broker", settings=SETTINGS) as broker:
            rates = {
                "null": null(broker, messages),
                "paho": paho(broker, messages // 4),
                "durable": durable(broker, directory / "outbox", messages),
                "durable, 8 threads": threaded(broker, directory / "outbox8", messages // 4),
            }
    for who, rate in rates.items():
        print(f"{who:<20} {rate:10,.0f} msg/s")
    print(f"durable / paho       {rates['durable'] / rates['paho']:10.2f}   aim 3")
    print(f"durable / null       {rates['durable'] / rates['null']:10.2f}   aim 0.8")
    return {_SAID[who]: [round(rate)] for who, rate in rates.items()}


def null(broker: Mosquitto, messages: int) -> float:
    with Client(broker.uri, client_id="null") as client:
        started = time.perf_counter()
        for number in range(messages):
            last = client.publish(f"t/{number % 50}", PAYLOAD)
        last.result()
        return messages / (time.perf_counter() - started)


def paho(broker: Mosquitto, messages: int) -> float:
    client = PahoClient(CallbackAPIVersion.VERSION2, client_id="paho", protocol=MQTTProtocolVersion.MQTTv5)
    client.max_inflight_messages_set(1000)
    done = threading.Semaphore(0)
    client.on_publish = lambda *_: done.release()
    client.connect("127.0.0.1", broker.port)
    client.loop_start()
    started = time.perf_counter()
    for n in range(messages):
        client.publish(f"t/{n % 50}", PAYLOAD, qos=1)
    for _ in range(messages):
        done.acquire()
    seconds = time.perf_counter() - started
    client.disconnect()
    client.loop_stop()
    return messages / seconds


def durable(broker: Mosquitto, directory: Path, messages: int) -> float:
    with Publisher(broker.uri, state_dir=directory) as publisher:
        publisher.publish("t/0", PAYLOAD).at_broker.result(10)
        started = time.perf_counter()
        for n in range(messages):
            publisher.publish(f"t/{n % 50}", PAYLOAD, wait=False)
        publisher.flush()
        return messages / (time.perf_counter() - started)


def threaded(broker: Mosquitto, directory: Path, messages: int) -> float:
    """Each call returns when its message is durable; the threads share the syncs."""
    with Publisher(broker.uri, state_dir=directory) as publisher:
        publisher.publish("t/0", PAYLOAD).at_broker.result(10)
        share = messages // 8
        threads = [
            threading.Thread(target=lambda t=t: [publisher.publish(f"t/{t}", PAYLOAD) for _ in range(share)])
            for t in range(8)
        ]
        started = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        publisher.flush()
        return 8 * share / (time.perf_counter() - started)
