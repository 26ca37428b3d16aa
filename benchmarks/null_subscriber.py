"""The ceiling: acknowledges from memory, in chunks, stores nothing. ``python -m benchmarks.null_subscriber PORT N``.

Same codec, same linger, same window as the gateway; everything a durable gateway does more is what durability costs.
Prints ``ready`` when subscribed and one JSON line (count, first and last arrival) after N messages, then goes on.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import time
from collections.abc import Iterator

import mqtt5
from mqtt5 import ConnectPacket, PubAckPacket, PublishPacket, QoS, SubscribePacket, TopicFilter

LINGER_S = 0.001
SMALL = 64 << 10


def subscribe(port: int, client_id: str, pattern: str) -> tuple[socket.socket, bytes]:
    """Connect with a persistent session and subscribe; returns the socket and bytes that came early."""
    sock = socket.create_connection(("127.0.0.1", port))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 21)
    sock.sendall(ConnectPacket(client_id, session_expiry_interval=3600, receive_max=65534).write())
    data = sock.recv(4096)
    _, used = mqtt5.read(memoryview(data))
    sock.sendall(SubscribePacket(1, [TopicFilter(pattern, max_qos=QoS.AT_LEAST_ONCE)]).write())
    return sock, data[used:]


def chunks(sock: socket.socket) -> Iterator[bytes]:
    """What arrives, small pieces with what follows them soon, until the broker ends it."""
    while data := sock.recv(1 << 20):
        if len(data) < SMALL:
            time.sleep(LINGER_S)
            with contextlib.suppress(BlockingIOError):
                data += sock.recv(1 << 21, socket.MSG_DONTWAIT)
        yield data


def drain(sock: socket.socket, rest: bytes, count: int) -> None:
    """Receive and acknowledge for ever."""
    acks = [b"", *(PubAckPacket(number).write() for number in range(1, 65536))]
    read, publish = mqtt5.read, PublishPacket
    seen, first = 0, 0.0
    print("ready", flush=True)
    for data in chunks(sock):
        if not seen:
            first = time.time()
        view, at, ids = memoryview(rest + data), 0, []
        end = len(view)
        while at < end:
            try:
                packet, used = read(view[at:])
            except IndexError:
                break
            at += used
            if type(packet) is publish:
                ids.append(packet.packet_id or 0)
        rest = bytes(view[at:])
        sock.sendall(b"".join([acks[number] for number in ids]))
        before, seen = seen, seen + len(ids)
        if before < count <= seen:
            print(json.dumps({"count": seen, "first": first, "last": time.time()}), flush=True)


def main() -> None:
    """Take the port and the count from the command line."""
    sock, rest = subscribe(int(sys.argv[1]), "null-subscriber", "telemetry/#")
    drain(sock, rest, int(sys.argv[2]))


if __name__ == "__main__":
    main()
