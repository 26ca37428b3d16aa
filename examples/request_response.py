"""Answers requests in Kafka; examples/request_response.toml carries both to and from MQTT.

    python examples/request_response.py 127.0.0.1:9092

Reads the topic requests, writes to the topic answers, in one transaction with its offsets: each request is answered
once, whatever is killed. What makes an answer find its way is two headers that are copied: the response topic and the
correlation data. An application that is not in Python does the same.
"""

from __future__ import annotations

import argparse
import signal
import threading
from typing import Any

from confluent_kafka import Consumer, Producer

#: What an answer takes over from its request.
COPIED = ("mqtt.response-topic", "mqtt.correlation-data")


def answer(value: bytes) -> bytes:
    """What the application is for."""
    return value.upper()


def serve(bootstrap: str, stopping: threading.Event) -> int:
    """Answer until told to stop; how many there were."""
    answered = 0
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "request-response",
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
        }
    )
    producer = Producer({"bootstrap.servers": bootstrap, "transactional.id": "request-response"})
    producer.init_transactions(30)
    consumer.subscribe(["requests"])
    while not stopping.is_set():
        requests = [one for one in consumer.consume(500, 0.5) if one.error() is None]
        if not requests:
            continue
        producer.begin_transaction()
        for request in requests:
            told: Any = request.headers() or []  # pairs, as they came
            headers = [(name, value) for name, value in told if name in COPIED]
            if len(headers) == len(COPIED):  # the others want no answer
                producer.produce("answers", answer(request.value() or b""), request.key(), headers=headers)
                answered += 1
        producer.send_offsets_to_transaction(
            consumer.position(consumer.assignment()), consumer.consumer_group_metadata(), 30
        )
        producer.commit_transaction(30)
    consumer.close()
    return answered


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bootstrap", help="HOST:PORT of Kafka")
    given = parser.parse_args()
    stopping = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopping.set())
    print(f"{serve(given.bootstrap, stopping)} answered")


if __name__ == "__main__":
    main()
