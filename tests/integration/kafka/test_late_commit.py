"""The hole of the old transaction protocol: a commit request that arrives during the next transaction (KIP-890)."""

from __future__ import annotations

import socket
import struct
import threading
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.integration.kafka.reading import numbers
from tests.integration.kafka.writing import QUERY, account, counted, exactly_once
from towline.kafka.producers import TransactionalProducer
from towline.sinks import Task
from towline_prove.devstack import Kafka

pytestmark = pytest.mark.faults

_END_TXN = 26
INVALID_PRODUCER_EPOCH, PRODUCER_FENCED = 47, 90
ROWS = 300


class EndTxnHolder:
    """A proxy before a Kafka that knows its frames: it holds one EndTxn back, and the connection behind it."""

    def __init__(self) -> None:
        self.sockets = ExitStack()
        self.listener = self.sockets.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.port: int = self.listener.getsockname()[1]
        self.target = 0
        self.armed, self.held, self.released, self.answered = (threading.Event() for _ in range(4))
        self.error_code = 0

    def accept(self) -> None:
        with suppress(OSError):
            while True:
                client = self.sockets.enter_context(self.listener.accept()[0])
                server = self.sockets.enter_context(socket.socket())
                late: list[int] = []  # correlation id of the held request, if it is of this connection
                with suppress(OSError):
                    server.connect(("127.0.0.1", self.target))
                for way in (self._requests, self._answers):
                    threading.Thread(target=way, args=(client, server, late), daemon=True).start()

    def _requests(self, client: socket.socket, server: socket.socket, late: list[int]) -> None:
        with suppress(OSError, struct.error):
            while True:
                frame = _frame(client)
                api, _, correlation = struct.unpack_from(">hhi", frame, 4)
                if api == _END_TXN and self.armed.is_set():
                    self.armed.clear()
                    late.append(correlation)
                    self.held.set()
                    self.released.wait(60)
                server.sendall(frame)
        if not late:  # the held request must reach Kafka after its sender has gone
            with suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)

    def _answers(self, client: socket.socket, server: socket.socket, late: list[int]) -> None:
        with suppress(OSError, struct.error):
            while True:
                frame = _frame(server)
                if late and struct.unpack_from(">i", frame, 4) == (late[0],):
                    # version 0 and 1: correlation id, throttle time, error code
                    (self.error_code,) = struct.unpack_from(">h", frame, 12)
                    self.answered.set()
                with suppress(OSError):
                    client.sendall(frame)
        with suppress(OSError):
            client.shutdown(socket.SHUT_RDWR)


def _frame(sock: socket.socket) -> bytes:
    """A request or an answer with its length; shorter where the connection ends."""
    head = sock.recv(4, socket.MSG_WAITALL)
    return head + sock.recv(struct.unpack(">i", head)[0], socket.MSG_WAITALL)


def test_a_late_commit_does_not_end_the_next_transaction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proxy, topic = EndTxnHolder(), "late"
    threading.Thread(target=proxy.accept, daemon=True).start()
    kafka = Kafka(tmp_path, settings={"advertised.listeners": f"PLAINTEXT://127.0.0.1:{proxy.port}"})
    proxy.target = kafka.port
    with proxy.sockets, kafka:
        kafka.create_topics({topic: 1})
        options: dict[str, Any] = {"kafka__socket__timeout__ms": "1000", "deliveryTimeout": "20"}
        sink = exactly_once(kafka.bootstrap, topic=topic, sinkId=topic, **options)
        sink.deliver(Task(0, batch=0, query=QUERY), counted(0, ROWS))
        proxy.armed.set()
        # The request of batch 1 hangs; librdkafka gives up on that connection after a second and asks again on another.
        assert sink.deliver(Task(0, batch=1, query=QUERY), counted(ROWS, 2 * ROWS)).rows == ROWS
        assert proxy.held.is_set()
        original = TransactionalProducer.write_marker

        def late(self: TransactionalProducer, *args: Any) -> None:
            if not proxy.answered.is_set():
                self._producer.flush(10)
                assert account(numbers(kafka.bootstrap, topic, amid=True), 2 * ROWS) == (0, 0)
                proxy.released.set()
                assert proxy.answered.wait(60)
            original(self, *args)

        monkeypatch.setattr(TransactionalProducer, "write_marker", late)
        assert sink.deliver(Task(0, batch=2, query=QUERY), counted(2 * ROWS, 3 * ROWS)).rows == ROWS
        assert proxy.error_code in {INVALID_PRODUCER_EPOCH, PRODUCER_FENCED}
        assert account(numbers(kafka.bootstrap, topic), 3 * ROWS) == (0, 0)
