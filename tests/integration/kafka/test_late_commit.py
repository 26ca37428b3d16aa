"""The hole of the old transaction protocol: a commit request that arrives during the next transaction (KIP-890)."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.integration.bridge.test_dlq import put
from tests.integration.kafka.holding import EndTxnHolder
from tests.integration.kafka.writing import QUERY, account, committed, counted, exactly_once
from towline.bridge import deadletters
from towline.bridge.deadletters import RemapResult
from towline.kafka import producers
from towline.kafka.columns import Rows
from towline.kafka.deadletters import DeadLetter, Reason
from towline.kafka.producers import TransactionalProducer
from towline.sinks import Task
from towline_prove.devstack import Kafka

pytestmark = pytest.mark.faults

INVALID_PRODUCER_EPOCH, PRODUCER_FENCED = 47, 90
ROWS = 300


@pytest.fixture(scope="module")
def holder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EndTxnHolder, Kafka]]:
    """A Kafka that is only reached through the proxy."""
    with EndTxnHolder() as proxy:
        settings = {"advertised.listeners": f"PLAINTEXT://127.0.0.1:{proxy.port}"}
        kafka = Kafka(tmp_path_factory.mktemp("held"), settings=settings)
        proxy.target = kafka.port
        with kafka:
            yield proxy, kafka


def rearm(proxy: EndTxnHolder) -> None:
    for event in (proxy.held, proxy.answered, proxy._released):
        event.clear()
    proxy.error_code = None
    proxy.hold_next()


def release_in_the_middle(proxy: EndTxnHolder) -> None:
    proxy.release()
    assert proxy.answered.wait(60)


def test_a_late_commit_does_not_end_the_next_transaction(
    holder: tuple[EndTxnHolder, Kafka], monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy, kafka = holder
    topic = "late"
    kafka.create_topics({topic: 1})
    options: dict[str, Any] = {"kafka__socket__timeout__ms": "1000", "deliveryTimeout": "20"}
    sink = exactly_once(kafka.bootstrap, topic=topic, sinkId=topic, **options)
    sink.deliver(Task(0, batch=0, query=QUERY), counted(0, ROWS))
    rearm(proxy)
    # The request of batch 1 hangs; librdkafka gives up on that connection after a second and asks again on another.
    assert sink.deliver(Task(0, batch=1, query=QUERY), counted(ROWS, 2 * ROWS)).rows == ROWS
    assert proxy.held.is_set()
    original = TransactionalProducer.write_marker

    def late(self: TransactionalProducer, *args: Any) -> None:
        if not proxy.answered.is_set():
            self._producer.flush(10)
            assert account(committed(kafka, topic, amid=True), 2 * ROWS) == (0, 0)
            release_in_the_middle(proxy)
        original(self, *args)

    monkeypatch.setattr(TransactionalProducer, "write_marker", late)
    assert sink.deliver(Task(0, batch=2, query=QUERY), counted(2 * ROWS, 3 * ROWS)).rows == ROWS
    assert proxy.error_code in {INVALID_PRODUCER_EPOCH, PRODUCER_FENCED}
    assert account(committed(kafka, topic), 3 * ROWS) == (0, 0)


def test_a_late_commit_of_a_replay_does_not_end_its_next_transaction(
    holder: tuple[EndTxnHolder, Kafka], monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy, kafka = holder
    kafka.create_topics({"mended": 1, "letters": 1})
    letters = [DeadLetter(Reason.UNMAPPED, "mended", None, str(number).encode(), source="line") for number in (0, 1)]
    put(kafka.bootstrap, "letters", letters)
    client = {"bootstrap.servers": kafka.bootstrap, "socket.timeout.ms": "1000"}
    ledger = deadletters.DeadLetterTopic(client, "letters", {"line": SimpleNamespace(name="line")})  # type: ignore[dict-item]
    monkeypatch.setattr(
        deadletters, "LetterMapper", lambda *_: SimpleNamespace(remap=lambda found: [*map(carried, found)])
    )
    monkeypatch.setattr(deadletters, "LETTERS_PER_TRANSACTION", 1)
    rearm(proxy)
    write = producers.TransactionalProducer.write

    def late(self: producers.TransactionalProducer, rows: Rows) -> None:
        write(self, rows)
        if proxy.held.is_set() and not proxy.answered.is_set():
            self.flush(10)
            release_in_the_middle(proxy)

    monkeypatch.setattr(producers.TransactionalProducer, "write", late)
    assert deadletters.replay(ledger, deadletters.LetterFilter(), lambda: None).replayed_by_topic == {"mended": 2}  # type: ignore[arg-type,return-value]
    assert proxy.error_code in {INVALID_PRODUCER_EPOCH, PRODUCER_FENCED}
    assert committed(kafka, "mended") == [0, 1]


def carried(letter: DeadLetter) -> RemapResult:
    return RemapResult(("mended", letter.value, None, -1, None, None, 0, []))
