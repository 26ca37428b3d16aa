"""Large messages through a whole bridge while Kafka is away: nothing lost, and how much memory and disk that took.

The backlog that builds up is larger than any single step may hold: batches of Arrow with 32-bit offsets end at 2 GiB,
and a gateway has to stay small whatever waits in its journal. One run is one line of JSON, without names of machines or
directories, so that runs can be kept beside the code (``docs/proof``).
"""

from __future__ import annotations

import contextlib
import subprocess
import threading
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from towline.kafka.admin import KafkaAdmin
from towline_prove.account import RunAccount
from towline_prove.devstack.process import wait_for
from towline_prove.history import read_history
from towline_prove.load import LoadPlan
from towline_prove.memory import Peaks, Watch
from towline_prove.outage import BREAKS
from towline_prove.reader import Tail
from towline_prove.referee import judge
from towline_prove.rig import TOPIC, Rig
from towline_prove.soak import KEEP_ALL, start_load

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from towline_prove.account import Watermarks
    from towline_prove.referee import Arrival

__all__ = ["LargePlan", "LargeRun", "run_large"]

#: A gateway may have this much resident memory, whatever waits in its journal.
MOST_RSS = 400 * 10**6
#: What Kafka and its clients have to be told for records of this size: the record, its key and headers, some room.
_ROOM = 1 << 20
_KAFKA_DEFAULT = 1_000_000
#: Everything is read back where nothing comes for so many seconds.
_SILENCE_S = 5.0
#: Kafka holds a few requests of that size in its heap at once.
_LARGE_HEAP = ("-Xmx2g",)


@dataclass(frozen=True, slots=True, kw_only=True)
class LargePlan:
    """One run.

    Attributes:
        messages: How many.
        size: Payload bytes of each.
        guarantee: Of the line; QoS 2 where it is exactly once.
        away: Seconds that Kafka is away, from the first message on; 0 for not at all.
        how: In which way, a name in `towline_prove.outage.BREAKS` that needs no proxy.
        seconds: Longest time for everything that was acknowledged to arrive.
    """

    messages: int = 10_000
    size: int = 300_000
    guarantee: str = "at_least_once"
    away: float = 60.0
    how: str = "kafka hangs"
    seconds: float = 900.0


@dataclass(frozen=True, slots=True)
class LargeRun:
    """How a run ended.

    Attributes:
        plan: What was done.
        account: What was sent and what was found.
        peaks: Memory of the gateway, and the spools.
        backlog: Bytes of payload that waited in the journal when Kafka came back, about.
        intake_s: Seconds until the last message was acknowledged to its publisher.
        seconds: Seconds until the last message was committed.
    """

    plan: LargePlan
    account: RunAccount
    peaks: Peaks
    backlog: int
    intake_s: float
    seconds: float

    @property
    def ok(self) -> bool:
        """Everything sent was acknowledged, the promise was kept, and the gateway stayed small."""
        verdict = self.account.verdict
        return self.account.ok and verdict.acked == self.plan.messages and self.peaks.rss < MOST_RSS

    def as_json(self) -> dict[str, Any]:
        """What was asked for and what was counted, as a record in ``docs/proof`` has it."""
        verdict, plan = self.account.verdict, asdict(self.plan)
        longest = plan.pop("seconds")
        return {
            **plan,
            "longest_s": longest,
            **verdict.counts(),
            "out_of_order_devices": sum(bool(t.late) or len(t.partitions) > 1 for t in verdict.devices.values()),
            "backlog_mb": _mb(self.backlog),
            "gateway_peak_rss_mb": _mb(self.peaks.rss),
            "gateway_peak_anonymous_mb": _mb(self.peaks.anonymous),
            "gateway_peak_mapped_mb": _mb(self.peaks.mapped),
            "spool_peak_mb": _mb(self.peaks.spool),
            "intake_s": round(self.intake_s, 1),
            "problems": self.account.problems(),
            "notes": self.account.notes,
        }


def _mb(size: int) -> float:
    return round(size / 1e6, 1)


def run_large(plan: LargePlan, directory: Path, say: Callable[[str], None] = lambda _: None) -> LargeRun:
    """Run a plan in a directory, with brokers of its own.

    Raises:
        NotReady: The bridge did not start (TL-P01).
    """
    with _rig(plan, directory) as rig:
        say(f"Mosquitto {rig.mosquitto.version}, Kafka {rig.kafka.version}: {plan.messages:,} x {plan.size:,} B")
        rig.warm()
        before = rig.watermarks()
        with Watch(lambda: _gateway(rig), rig.bridge.everyone) as watch:
            began = time.monotonic()
            with start_load(_load(plan, rig), directory / "claims") as load, _killed(load):
                ended: list[float] = []
                waiting = threading.Thread(target=lambda: ended.append(_ended(load)), daemon=True)
                waiting.start()
                backlog = _away(plan, rig, before, say)
                waiting.join(plan.seconds)
            intake_s = (ended[0] if ended else time.monotonic()) - began
            say(f"taken in after {intake_s:.0f} s")
            wait_for(lambda: _all_committed(rig), plan.seconds, 0.2)
            seconds = time.monotonic() - began
        say(f"nothing waits any more after {seconds:.0f} s")
        return LargeRun(plan, _account(plan, rig, before), watch.peaks, backlog, intake_s, seconds)


def _rig(plan: LargePlan, directory: Path) -> Rig:
    most = plan.size + _ROOM
    settings = {"message.max.bytes": str(most), "replica.fetch.max.bytes": str(most)} if most > _KAFKA_DEFAULT else {}
    client = {"message.max.bytes": most} if settings else None
    rig = Rig(directory, mosquitto=KEEP_ALL, guarantee=plan.guarantee, kafka=settings, client=client, direct=True)
    rig.kafka.more_jvm = _LARGE_HEAP
    return rig


def _load(plan: LargePlan, rig: Rig) -> LoadPlan:
    publishers = min(4, plan.messages)
    return LoadPlan(
        port=rig.mosquitto.port,
        run="large",
        publishers=publishers,
        devices=max(publishers, min(20, plan.messages)),
        messages=plan.messages,
        qos=2 if plan.guarantee == "exactly_once" else 1,
        size=plan.size,
        window=max(1, min(100, (32 << 20) // plan.size)),
        seconds=plan.seconds,
    )


@contextlib.contextmanager
def _killed(load: subprocess.Popen[bytes]) -> Iterator[None]:
    try:
        yield
    finally:
        load.kill()


def _ended(load: subprocess.Popen[bytes]) -> float:
    load.wait()
    return time.monotonic()


def _gateway(rig: Rig) -> int | None:
    gateway = rig.bridge.gateway()
    return gateway.pid if gateway else None


def _away(plan: LargePlan, rig: Rig, before: Watermarks | None, say: Callable[[str], None]) -> int:
    """Let Kafka be away; how many bytes waited at the end of it."""
    if not plan.away:
        return 0
    with BREAKS[plan.how](rig):
        time.sleep(plan.away)
        watermarks = rig.watermarks()
    waiting = watermarks.since(before).waiting if watermarks and before else 0
    say(f"Kafka is back after {plan.away:g} s, {waiting:,} messages wait")
    return waiting * plan.size


def _all_committed(rig: Rig) -> bool:
    rig.bridge.restart_if_ended()
    return rig.nothing_waits()


def _account(plan: LargePlan, rig: Rig, before: Watermarks | None) -> RunAccount:
    """Judge what Kafka holds, a few records in memory at a time."""
    KafkaAdmin(rig.bootstrap).settled(TOPIC)
    tail = Tail(rig.bootstrap, TOPIC)
    try:
        verdict = judge(read_history(rig.directory / "claims"), _all_arrivals(tail))
    finally:
        tail.close()
    after = rig.watermarks()
    added = after.since(before) if after and before else after
    notes = [] if rig.bridge.starts == 1 else [f"the bridge was started {rig.bridge.starts} times"]
    return RunAccount(verdict, plan.guarantee, added, notes)


def _all_arrivals(tail: Tail) -> Iterator[Arrival]:
    """All records, one piece after the other; the end is where nothing more comes for a while."""
    heard = time.monotonic()
    while time.monotonic() - heard < _SILENCE_S:
        for arrival in tail.pull(0.5):
            yield arrival
            heard = time.monotonic()
