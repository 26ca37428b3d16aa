"""How long a message waits: PUBLISH → PUBACK at the gateway, and published → readable in Kafka for the whole way."""

from __future__ import annotations

import tempfile
import threading
import time
from pathlib import Path

from benchmarks.intake import gateway_at
from benchmarks.rig import Meter, machine
from benchmarks.stub_broker import StubBroker
from towline_prove import processes
from towline_prove.load import run_load
from towline_prove.numbered import decode
from towline_prove.reader import Tail
from towline_prove.rig import TOPIC, Rig

#: Seconds at the same rate before the first message that counts.
_WARM_S = 15.0


def percentile(values: list[float], share: float) -> float:
    """A percentile, in the unit of the values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def tell(title: str, seconds: list[float], aim: str) -> None:
    """Print p50, p99 and the worst in milliseconds."""
    p50, p99, worst = (value * 1000 for value in (percentile(seconds, 0.5), percentile(seconds, 0.99), max(seconds)))
    print(f"  {title:<52} p50 {p50:7.1f} ms   p99 {p99:7.1f} ms   max {worst:7.1f} ms   (aim {aim})")


def acks(rate: float = 5_000.0, seconds: float = 10.0) -> None:
    """Durable acknowledgements of the gateway alone, fed by a stub that does nothing but measure."""
    with (
        tempfile.TemporaryDirectory(prefix="towline-bench-") as name,
        StubBroker() as stub,
        gateway_at(stub.port, Path(name)) as run,
    ):
        stub.accept()
        stub.pace(rate, 2.0)
        delays = stub.pace(rate, seconds)
        tell(f"PUBLISH → PUBACK, durable, {rate:,.0f} msg/s", delays, "3 / 10 ms")
        stub.close()
        run.kill()


def way(rate: float = 100.0, seconds: float = 30.0, guarantee: str = "at_least_once") -> None:
    """Published → readable in Kafka (read_committed), everything warm; QoS 2 where it is to be exactly once."""
    with (
        tempfile.TemporaryDirectory(prefix="towline-bench-") as name,
        Rig(Path(name), direct=True, guarantee=guarantee) as rig,
    ):
        rig.warm(5_000)
        rig.warm(int(rate * _WARM_S), rate)  # as many batches again, for Spark's compiler
        gateway, child = rig.bridge.gateway(), rig.bridge.child
        assert gateway is not None
        assert child is not None
        meter = Meter({"gateway": lambda: [gateway.pid], "all": lambda: processes.tree(child.pid)})
        with rig.trial("latency") as trial:
            plan, claims = trial.plan(int(rate * seconds), rate=rate)
            tail = Tail(rig.bootstrap, TOPIC, from_now=True)
            sender = threading.Thread(target=run_load, args=(plan, claims))
            meter.start()
            sender.start()
            seen = _delays(tail, plan.messages, seconds + 30)
            meter.stop()
            sender.join()
            tail.close()
        tell(f"published → readable in Kafka, {rate:,.0f} msg/s, {guarantee}", seen, "150 / 400 ms")
        micros = {name: used / plan.messages * 1e6 for name, used in meter.used.items()}
        print(f"    CPU us a message: gateway {micros['gateway']:.0f}, all told {micros['all']:.0f}", flush=True)


def _delays(tail: Tail, count: int, seconds: float) -> list[float]:
    deadline = time.monotonic() + seconds
    delays: list[float] = []
    while len(delays) < count and time.monotonic() < deadline:
        arrival = tail.next(0.2)
        if arrival is not None and (message := decode(arrival.value)) is not None:
            delays.append((time.time_ns() - message.sent_ns) / 1e9)
    return delays


def run() -> None:
    """The gateway alone, then the whole way with both guarantees."""
    print(f"latency\n  {machine()}\n")
    acks()
    for guarantee in ("exactly_once", "at_least_once"):
        for rate in (5_000.0, 100.0):
            way(rate, 20.0, guarantee)
    print()
