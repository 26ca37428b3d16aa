"""One query over two real gateways: one is killed, refuses, leaves and comes back; nothing is missing or doubled."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from tests.conftest import NewMosquitto
from tests.helpers import wait_until
from tests.integration.gateway.conftest import Gateway, NewGateway, new_gateway, publish
from tests.integration.spark.test_source import LONG, begun
from tests.unit.gateway.remote import TOKEN, Pki
from towline_prove.devstack import Mosquitto
from towline_prove.devstack.process import free_port

__all__ = ["new_gateway"]


class Arrived:
    """What came to the sink in the order in which its one task read it: gateway, device and number.

    A batch that comes again takes the place of the first: so the sink is exactly once.
    """

    def __init__(self) -> None:
        self._batches: dict[int, list[tuple[str, str, int]]] = {}

    @property
    def rows(self) -> list[tuple[str, str, int]]:
        return [row for _, rows in sorted(self._batches.items()) for row in rows]

    def __call__(self, frame: DataFrame, batch: int) -> None:
        table = frame.coalesce(1).selectExpr("gateway", "topic", "CAST(payload AS STRING) AS payload").toArrow()
        columns = (table.column(name).to_pylist() for name in ("gateway", "topic", "payload"))
        self._batches[batch] = [(name, topic, int(payload)) for name, topic, payload in zip(*columns, strict=True)]

    def of(self, gateway: str) -> int:
        return sum(name == gateway for name, _, _ in self.rows)

    def devices(self) -> dict[str, list[int]]:
        return {topic: [n for _, one, n in self.rows if one == topic] for topic in sorted({t for _, t, _ in self.rows})}


@pytest.fixture
def broker(new_mosquitto: NewMosquitto) -> Mosquitto:
    return new_mosquitto(max_queued_messages="0")


@pytest.fixture
def pki(tmp_path: Path) -> Pki:
    return Pki.made(tmp_path / "pki")


@pytest.fixture
def gateways(broker: Mosquitto, new_gateway: NewGateway, pki: Pki) -> tuple[Gateway, Gateway]:
    """Devices a come by g1, devices b by g2, which is on a network: split filters keep the order of each."""
    far: dict[str, object] = {"listen": pki.settings(address=f"127.0.0.1:{free_port()}")}
    made = [
        new_gateway(broker, name, subscriptions=[{"pattern": f"{device}/#", "qos": 2}], **more)
        for name, device, more in (("g1", "a", {}), ("g2", "b", far))
    ]
    for one in made:
        one.log = one.settings.state_dir.parent / f"{one.settings.name}.log"
        one.start()
        one.until(state="online")
    return made[0], made[1]


@pytest.fixture
def start(spark: SparkSession, tmp_path: Path) -> Iterator[Callable[..., StreamingQuery]]:
    queries: list[StreamingQuery] = []

    def run(sink: Arrived, **options: Any) -> StreamingQuery:
        reader = spark.readStream.format("mqtt").option("checkpointLocation", str(tmp_path / "ck"))
        frame = reader.options(**{key: str(value) for key, value in options.items()}).load()
        writer = frame.writeStream.foreachBatch(sink).option("checkpointLocation", str(tmp_path / "ck"))
        queries.append(begun(writer))
        return queries[-1]

    yield run
    for query in queries:
        query.stop()


def publish_all(broker: Mosquitto) -> None:
    """600 messages of each of four devices, a pair by each gateway, a little of each at a time."""
    for first in range(0, 600, 100):
        for topic, start in (("a/1", first + 100), ("b/1", first), ("a/2", first), ("b/2", first)):
            publish(broker, range(start, start + 100), topic, qos=2)


def until(query: StreamingQuery, condition: Callable[[], object]) -> None:
    wait_until(lambda: condition() or not query.isActive, LONG)
    assert query.isActive, query.exception()


def last_report(query: StreamingQuery) -> dict[str, Any]:
    import json  # noqa: PLC0415 - progress is JSON in JSON

    progress = query.lastProgress
    found: Any = json.loads(progress.json)["sources"][0]["latestOffset"] if progress else {}
    return found if isinstance(found, dict) else json.loads(found or "{}")


def ended(gateway: Gateway) -> int:
    assert gateway.process is not None
    return gateway.process.wait(60)


def part_of(query: StreamingQuery, gateway: str) -> dict[str, Any]:
    part: dict[str, Any] = last_report(query).get("gateways", {}).get(gateway, {})
    return part


def test_one_is_killed_and_the_other_goes_on(
    broker: Mosquitto, gateways: tuple[Gateway, Gateway], start: Callable[..., StreamingQuery], pki: Pki
) -> None:
    g1, g2 = gateways
    sink = Arrived()
    # A checkpoint of one gateway ...
    query = start(sink, gateway=g1.settings.state_dir, pollMs=500)
    publish(broker, range(100), "a/1", qos=2)
    until(query, lambda: sink.of("g1") == 100)
    query.stop()
    # ... goes on with two, in many small batches of both.
    assert g2.settings.listen is not None
    shown = pki.directory / "shown"
    shown.write_text(TOKEN)
    access = {"gatewayTokenFile": shown, "gatewayCaFile": pki.directory / "ca.pem"}
    both = f"{g1.settings.state_dir},{g2.settings.listen.location}"
    query = start(sink, gateways=both, pollMs=500, maxMessagesPerTrigger=120, **access)
    publishing = threading.Thread(target=publish_all, args=(broker,))
    publishing.start()
    until(query, lambda: sink.of("g2") > 200)
    g2.stop(signal.SIGKILL)  # perhaps with rows in a batch that was begun: that waits for it
    g2.start()
    publishing.join(LONG)
    until(query, lambda: sink.of("g1") == 1300 and sink.of("g2") == 1200)

    g2.stop(signal.SIGKILL)  # with nothing of it in work
    publish(broker, range(700, 800), "a/1", qos=2)
    publish(broker, range(600, 700), "b/1", qos=2)
    until(query, lambda: sink.of("g1") == 1400)
    assert sink.of("g2") == 1200
    until(query, lambda: last_report(query).get("away") == ["g2"])
    publish(broker, range(800, 900), "a/1", qos=2)
    until(query, lambda: sink.of("g1") == 1500)
    g2.start()
    until(query, lambda: sink.of("g2") == 1300)
    wait_until(lambda: g1.status()["committed"] == 1500 and g2.status()["committed"] == 1300)

    pki.tokens("0123456789abcdef-another-token")  # g2 refuses this query, and nobody else does
    for topic, first in (("b/1", 700), ("a/1", 900)):
        publish(broker, range(first, first + 100), topic, qos=2)
    until(query, lambda: sink.of("g1") == 1600)
    until(query, lambda: part_of(query, "g2").get("refused"))
    assert sink.of("g2") == 1300
    pki.tokens(TOKEN)
    until(query, lambda: sink.of("g2") == 1400)

    g2.stop()  # taken out, and away: only a person can say that nothing waits there
    g2.spawn(1.0)
    until(query, lambda: g2.process and g2.process.poll() is not None)
    assert ended(g2) == 0, g2.log.read_text()
    publish(broker, range(1000, 1100), "a/1", qos=2)
    until(query, lambda: sink.of("g1") == 1700)
    query.stop()
    query = start(sink, gateways=str(g1.settings.state_dir), pollMs=500)
    wait_until(lambda: not query.isActive, LONG)
    assert "TL-G51" in str(query.exception())
    query = start(sink, gateways=str(g1.settings.state_dir), pollMs=500, removedGateways="g2")
    publish(broker, range(1100, 1200), "a/1", qos=2)
    until(query, lambda: sink.of("g1") == 1800)
    assert sink.devices() == {
        "a/1": list(range(1200)),
        "a/2": list(range(600)),
        "b/1": list(range(800)),
        "b/2": list(range(600)),
    }, "every row once, and each device's in its order"
    wait_until(lambda: g1.status()["committed"] == 1800)
