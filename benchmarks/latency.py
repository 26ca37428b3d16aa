"""How long a message waits: PUBLISH → PUBACK at the gateway, and published → readable in Kafka for the whole way."""

from __future__ import annotations

import tempfile
import threading
import time
from pathlib import Path

from benchmarks.costs import clocks
from benchmarks.intake import gateway_at
from benchmarks.rig import machine
from benchmarks.stub_broker import StubBroker
from towline.checkpoint import Checkpoint
from towline_prove.history import decode_message
from towline_prove.load import run_load
from towline_prove.reader import TopicTail
from towline_prove.rig import Rig
from towline_prove.subject import LINE, TOPIC

#: Seconds at the same rate before the first message that counts.
_WARM_S = 15.0
#: Places that use the most CPU in a batch.
_SHOWN = 9


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
        rig.warm_up(5_000)
        rig.warm_up(int(rate * _WARM_S), rate)  # as many batches again, for Spark's compiler
        child = rig.bridge.child
        assert child is not None
        with rig.start_trial("latency") as trial:
            plan, claims = trial.plan_load(int(rate * seconds), rate=rate)
            tail = TopicTail(rig.bootstrap, TOPIC, skip_existing=True)
            sender = threading.Thread(target=run_load, args=(plan, claims))
            first, began, before = _newest_batch(rig), time.monotonic(), clocks(child.pid)
            sender.start()
            seen = _delays(tail, plan.messages, seconds + 30)
            used, took, batches = clocks(child.pid), time.monotonic() - began, _newest_batch(rig) - first
            used.subtract(before)
            sender.join()
            tail.close()
        tell(f"published → readable in Kafka, {rate:,.0f} msg/s, {guarantee}", seen, "150 / 400 ms")
        gateway = sum(value for place, value in used.items() if place.process == "gateway")
        all_told = sum(used.values())
        print(
            f"    CPU us a message: gateway {gateway / plan.messages * 1e6:.0f},"
            f" all told {all_told / plan.messages * 1e6:.0f}; {batches} batches, each {took / batches * 1e3:.0f} ms and"
            f" {all_told / batches * 1e3:.0f} ms of CPU:"
        )
        parts = {f"{place.process}, {place.part}": value / batches * 1e3 for place, value in used.items()}
        largest = sorted(parts.items(), key=lambda part: -part[1])[:_SHOWN]
        print(f"    {'; '.join(f'{name} {value:.0f}' for name, value in largest)}", flush=True)


def _newest_batch(rig: Rig) -> int:
    """Number of the newest batch in Spark's offset log."""
    batch = Checkpoint(str(rig.directory / "state" / LINE / "checkpoint")).last_planned_batch()
    assert batch is not None
    return batch


def _delays(tail: TopicTail, count: int, seconds: float) -> list[float]:
    deadline = time.monotonic() + seconds
    delays: list[float] = []
    while len(delays) < count and time.monotonic() < deadline:
        arrival = tail.next_arrival(0.2)
        if arrival is not None and (message := decode_message(arrival.value)) is not None:
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
