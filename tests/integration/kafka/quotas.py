"""What a Kafka takes of a client in a second, limited by Kafka itself."""

from __future__ import annotations

import socket
import struct

from towline_prove.devstack import Kafka

#: Kafka's protocol: AlterClientQuotas, version 0; confluent-kafka has no call for it.
_ALTER_CLIENT_QUOTAS = 49


def limit_bytes(kafka: Kafka, client_id: str, bytes_per_second: float) -> None:
    """Set ``producer_byte_rate`` of a client id (KIP-546); what is sent in the first ten seconds passes."""
    entity = struct.pack(">i", 1) + _text("client-id") + _text(client_id)
    value = struct.pack(">i", 1) + _text("producer_byte_rate") + struct.pack(">d?", bytes_per_second, False)
    body = struct.pack(">i", 1) + entity + value + struct.pack(">?", False)
    frame = struct.pack(">hhi", _ALTER_CLIENT_QUOTAS, 0, 1) + _text("tests") + body
    with socket.create_connection(("127.0.0.1", kafka.port), 30) as connection:
        connection.sendall(struct.pack(">i", len(frame)) + frame)
        answer = connection.makefile("rb").read(4 + 4 + 4 + 4 + 2)
    assert struct.unpack_from(">h", answer, 16) == (0,), answer


def _text(text: str) -> bytes:
    return struct.pack(">h", len(text)) + text.encode()
