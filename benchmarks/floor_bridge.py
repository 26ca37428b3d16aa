"""The floor: socket, decoder, librdkafka. ``python -m benchmarks.floor_bridge PORT KAFKA TOPIC FILTER``.

The decoder is the gateway's, and the records are those of a line, key and three headers. There is no disk, no Spark and
no error handling, and messages are acknowledged as soon as librdkafka has them: what a line takes more is what its
promise costs. Prints ``ready`` when subscribed.
"""

from __future__ import annotations

import gc
import socket
import sys
import time
from collections.abc import Sequence
from itertools import chain
from typing import Any

from confluent_kafka import Producer
from mqtt5 import PubAckPacket

from benchmarks.null_subscriber import chunks, subscribe
from towline.bridge.properties import property_headers
from towline.delivery.inbound import plain_run
from towline.mqtt.codec import Decoder, PublishRun
from towline.mqtt.plain import PlainRun
from towline.schema import OPTIONAL_COLUMNS

_QUEUED = 1_000_000
#: What no message of the load says.
_NOTHING = dict.fromkeys(("retain", *OPTIONAL_COLUMNS))


def forward(sock: socket.socket, rest: bytes, producer: Producer, topic: str) -> None:
    """Receive, produce and acknowledge for ever."""
    decoder = Decoder(plain_reader=plain_run)
    acks = [b"", *(PubAckPacket(number).write() for number in range(1, 65536))]
    print("ready", flush=True)
    for data in chain([rest] if rest else [], chunks(sock)):
        ids: list[int] = []
        for run in decoder.feed(data):
            payloads: Sequence[bytes | None]
            if isinstance(run, PlainRun):
                payloads = run.columns.payloads()
            elif isinstance(run, PublishRun):
                payloads = [packet.payload for packet in run.packets]
            else:
                continue
            ids += run.packet_ids
            _produce(producer, topic, run.topics, payloads)
        sock.sendall(b"".join([acks[number] for number in ids]))


def _produce(producer: Producer, topic: str, names: Any, payloads: Any) -> None:
    received = time.time_ns() // 1000
    known = {
        name: (name.split("/")[1].encode(), property_headers(name.encode(), 1, received, _NOTHING))
        for name in set(names)
    }
    produce: Any = producer.produce
    for name, payload in zip(names, payloads, strict=True):
        key, headers = known[name]
        while True:
            try:
                produce(topic, payload, key, -1, None, None, 0, headers)
                break
            except BufferError:
                producer.poll(0.1)
    producer.poll(0)


def main() -> None:
    """Take port, servers and topic from the command line."""
    gc.disable()
    settings = {"enable.idempotence": True, "linger.ms": 20, "batch.size": 1_000_000, "partitioner": "murmur2_random"}
    limits = {"queue.buffering.max.messages": _QUEUED}
    sock, rest = subscribe(int(sys.argv[1]), "floor", sys.argv[4])
    forward(sock, rest, Producer({"bootstrap.servers": sys.argv[2], **settings, **limits}), sys.argv[3])


if __name__ == "__main__":
    main()
