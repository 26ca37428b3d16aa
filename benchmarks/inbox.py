"""The inbox on disk against the one in Kafka: PUBLISH → PUBACK, and how much passes; the same stub broker feeds both.

One Kafka without replication on this machine: in a cluster each commit waits for the other replicas' brokers too.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.intake import WINDOW, gateway_at
from benchmarks.latency import percentile
from benchmarks.rig import Meter, machine
from benchmarks.stub_broker import StubBroker
from towline_prove.devstack.kafka import Kafka

__all__ = ["run"]


class Measured(NamedTuple):
    """One store: percentiles of delays in ms by rate, messages a second flat out, CPU us a message of the gateway."""

    delays: dict[float, tuple[float, float]]
    rate: float
    micros: float


def _measure(directory: Path, rates: tuple[float, ...], seconds: float, count: int, **more: Any) -> Measured:
    directory.mkdir()
    with StubBroker() as stub, gateway_at(stub.port, directory, **more) as gateway:
        stub.accept()
        stub.pace(rates[0], 2.0)  # warm
        delays = {}
        for rate in rates:
            waited = [delay * 1000 for delay in stub.pace(rate, seconds)]
            delays[rate] = (percentile(waited, 0.5), percentile(waited, 0.99))
        stub.push(min(count, WINDOW))  # warm
        meter = Meter({"gateway": lambda: [gateway.pid]})
        meter.start()
        took = stub.push(count)
        meter.stop()
        stub.close()
        gateway.kill()
    return Measured(delays, count / took, meter.used["gateway"] / count * 1e6)


def run(*, quick: bool = False) -> None:
    """Both in turn, twice, so that what one run did to the machine shows; then their ratios."""
    rates = (100.0, 1_000.0, 5_000.0)
    seconds, count, rounds = (3.0, 50_000, 1) if quick else (10.0, 300_000, 3)
    print(f"inbox: acknowledgements of disk and Kafka, 150 B, QoS 1; Kafka with one broker\n  {machine()}\n")
    best: dict[str, Measured] = {}
    with tempfile.TemporaryDirectory(prefix="towline-bench-") as name, Kafka(Path(name) / "kafka") as kafka:
        landing = {"client": {"bootstrap.servers": kafka.bootstrap}, "create": True}
        for number in range(rounds):
            for store, more in (("disk", {}), ("kafka", {"landing": {**landing, "name": f"bench-{number}"}})):
                outcome = _measure(Path(name) / f"{store}-{number}", rates, seconds, count, **more)
                _tell(store, outcome)
                if store not in best or outcome.rate > best[store].rate:
                    best[store] = outcome
    disk, landed = best["disk"], best["kafka"]
    print(f"\n  ratio Kafka : disk   flat out {landed.rate / disk.rate:.2f}", end="")
    print(f"   CPU {landed.micros / disk.micros:.1f} x", end="")
    for rate in rates:
        pair = [landed.delays[rate][place] / disk.delays[rate][place] for place in (0, 1)]
        print(f"   {rate:,.0f} msg/s p50 {pair[0]:.1f} x, p99 {pair[1]:.1f} x", end="")
    print("\n")


def _tell(store: str, outcome: Measured) -> None:
    parts = [f"{rate:,.0f}/s p50 {p50:.1f} p99 {p99:.1f} ms" for rate, (p50, p99) in outcome.delays.items()]
    print(
        f"  {store:<6} {'   '.join(parts)}   flat out {outcome.rate:,.0f} msg/s, {outcome.micros:.1f} us CPU",
        flush=True,
    )
