"""The 1,343 client vectors over a real socket: the public client on one side, the script of each case on the other.

As pure bytes they are in `tests/unit/mqtt/test_vectors.py`, cut everywhere; here the transport, the reconnecting
connection and the client's thread are in it too, and "must drop" means that the socket is closed.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence

import pytest

from tests.helpers import lacking
from tests.unit.mqtt.test_vectors import DEVIATIONS
from tests.unit.mqtt.vectors import (
    ALIVE,
    CONNACK,
    CONNECT,
    FOLDER,
    RESUMED,
    Case,
    expected_bytes,
    load,
    probe_packet,
)
from towline import Client, Memory, SessionRecord
from towline.errors import TowlineError
from towline.mqtt.events import Held

CASES = load()
#: Seconds a client has to answer or to close; what passes takes milliseconds.
PATIENCE = 30.0


def parameters() -> list[object]:
    if not CASES:
        return [pytest.param(None, id="no vectors")]
    return [
        pytest.param(
            case,
            id=name,
            marks=[pytest.mark.xfail(reason=DEVIATIONS[name], strict=True)] if name in DEVIATIONS else [],
        )
        for name, case in CASES.items()
    ]


@pytest.fixture(scope="module")
def server() -> Iterator[socket.socket]:
    """One listening socket for all cases."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(PATIENCE)
        yield listening


class Subscribed(Memory):
    """Knows of a subscription that nobody wants any more: the way to make a client unsubscribe."""

    def load(self) -> tuple[SessionRecord | None, Mapping[int, Held]]:
        return SessionRecord("fuzzish", established=True, subscriptions={"test/subscribe": 1}), {}


def make(case: Case, port: int) -> Client:
    kept = case.command == "unsubscribe"
    return Client(
        f"mqtt://127.0.0.1:{port}",
        client_id="fuzzish",
        protocol={5: "5", 4: "3.1.1", 3: "3.1"}[case.version],  # type: ignore[arg-type]
        clean_start=not kept,
        session_expiry_s=0xFFFFFFFF if kept else 0,
        receive_maximum=20,
        store=Subscribed() if kept else None,
    )


class User(threading.Thread):
    """What a program does with a client: open, publish, acknowledge everything."""

    def __init__(self, client: Client, command: str) -> None:
        super().__init__(daemon=True)
        self._client, self._command = client, command

    def run(self) -> None:
        with contextlib.suppress(TowlineError):
            self._client.open()
            if self._command.startswith("publish"):
                self._client.publish(
                    "test/publish",
                    b"message",
                    qos=int(self._command[-1]),
                    payload_is_utf8=True,
                    expiry_s=0xFFFFFFFF,
                    response_topic="response/topic",
                    correlation_data=b"7deac5c5-8802-44ff-86ce-11479f337419",
                    content_type="text/plain",
                    user_properties=[("key", "value")],
                )
            for message in self._client:
                message.ack()


def receive(line: socket.socket, count: int) -> bytes:
    """`count` bytes, or as many as there were before the client closed or its time was over."""
    data = b""
    with contextlib.suppress(TimeoutError, ConnectionError):
        while len(data) < count and (more := line.recv(count - len(data))):
            data += more
    return data


def rest(line: socket.socket) -> bytes | None:
    """What came until the client closed, None when it did not close in time."""
    data = b""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        try:
            more = line.recv(4096)
        except TimeoutError:
            return None
        except ConnectionError:
            return data
        if not more:
            return data
        data += more
        if data.endswith(ALIVE):
            return None
    return None


def send(line: socket.socket, data: bytes) -> None:
    with contextlib.suppress(ConnectionError):  # it may have dropped us already
        line.sendall(data)


def converse(case: Case, line: socket.socket) -> None:
    connect = bytes.fromhex(CONNECT[case.version])
    if case.command == "unsubscribe":
        head = receive(line, 2)
        assert head[0] == 0x10
        assert len(receive(line, head[1])) == head[1]
    else:
        assert receive(line, len(connect)).hex() == connect.hex()
    if case.connack:
        send(line, bytes.fromhex((RESUMED if case.command == "unsubscribe" else CONNACK)[case.version]))
    for kind, data in case.messages:
        if kind == "recv":
            wanted = expected_bytes(data, case.version)
            assert receive(line, len(wanted)).hex() == wanted.hex()
        else:
            send(line, data)
    send(line, probe_packet(case))
    if case.must_drop:
        assert rest(line) is not None, "must drop, but is alive"
    else:
        assert receive(line, len(ALIVE)).hex() == ALIVE.hex(), "must stay, but dropped or said something else"


def calls_left_over(server: socket.socket) -> None:
    """Close what a client of the case before has begun after its end."""
    while select.select([server], [], [], 0)[0]:
        server.accept()[0].close()


@pytest.mark.parametrize("case", parameters())
def test_vector(case: Case | None, server: socket.socket) -> None:
    if case is None:
        lacking(f"the client vectors are not at {FOLDER}")
    calls_left_over(server)
    client = make(case, server.getsockname()[1])
    user = User(client, case.command)
    user.start()
    try:
        line, _ = server.accept()
        with line:
            line.settimeout(PATIENCE)
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            converse(case, line)
    finally:
        client.close(0)
        user.join(PATIENCE)
    assert not user.is_alive()


def test_every_case_is_played() -> None:
    played: Sequence[object] = parameters()
    assert len(played) == (1343 if CASES else 1)
