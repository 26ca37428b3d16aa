"""The rival everybody writes: paho-mqtt in, confluent-kafka out, acknowledged after delivery (at least once).

``python -m benchmarks.paho_bridge PORT BOOTSTRAP TOPIC N``. Prints ``ready`` when subscribed and one JSON line after
N deliveries.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import paho.mqtt.client as mqtt
from confluent_kafka import Producer
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties


class Bridge:
    """One paho client, one idempotent producer, manual acknowledgements."""

    def __init__(self, port: int, bootstrap: str, topic: str, count: int) -> None:
        self.topic, self.count, self.delivered, self.first = topic, count, 0, 0.0
        self.producer = Producer(
            {"bootstrap.servers": bootstrap, "enable.idempotence": True, "acks": "all", "linger.ms": 20,
             "batch.size": 1_000_000, "queue.buffering.max.messages": 1_000_000}
        )  # fmt: skip
        self.client = mqtt.Client(CallbackAPIVersion.VERSION2, "paho-bridge", protocol=mqtt.MQTTv5, manual_ack=True)
        self.client.on_connect = self.on_connect
        self.client.on_subscribe = lambda *_: print("ready", flush=True)
        self.client.on_message = self.on_message
        properties = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]
        properties.SessionExpiryInterval = 3600
        properties.ReceiveMaximum = 65534
        self.client.connect("127.0.0.1", port, clean_start=False, properties=properties)

    def on_connect(self, client: mqtt.Client, *_: Any) -> None:
        """Subscribe, also after a reconnect."""
        client.subscribe("telemetry/#", qos=1)

    def on_message(self, _client: mqtt.Client, _data: Any, message: mqtt.MQTTMessage) -> None:
        """Hand one message to the producer."""
        if not self.first:
            self.first = time.time()
        mid, qos = message.mid, message.qos
        key = message.topic.split("/")[1].encode()
        while True:
            try:
                self.producer.produce(
                    self.topic, bytes(message.payload), key,
                    on_delivery=lambda error, _record: self.on_delivery(error, mid, qos),
                )  # fmt: skip
                break
            except BufferError:
                self.producer.poll(0.1)
        self.producer.poll(0)

    def on_delivery(self, error: Any, mid: int, qos: int) -> None:
        """Acknowledge what Kafka has."""
        if error is not None:
            raise SystemExit(f"not delivered: {error}")
        self.client.ack(mid, qos)
        self.delivered += 1
        if self.delivered == self.count:
            print(json.dumps({"count": self.delivered, "first": self.first, "last": time.time()}), flush=True)

    def run(self) -> None:
        """Drive both libraries from one thread."""
        while self.client.loop(0.01) == mqtt.MQTT_ERR_SUCCESS:
            self.producer.poll(0)


def main() -> None:
    """Take the places from the command line."""
    Bridge(int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])).run()


if __name__ == "__main__":
    main()
