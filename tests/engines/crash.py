"""Every crash point of a gateway's intake, not a sample: the n-th system call kills or fails it, for each n.

One point: a gateway with an empty state directory runs under strace with one fault armed; when it listens, numbered
QoS 1 messages are published; it takes them in and is asked to end. If it dies on the way it is started again without
the fault and takes in what the broker still holds. Then the journal must hold every message that the senders saw
acknowledged: a message whose PUBACK the gateway sent without having it on disk would be missing now, for the broker
has forgotten it [I2].

With ``power`` the machine goes down with the process: before the second start the state directory is what a disk would
hold, rebuilt from the record of the run (`tests.engines.powerloss`). The broker lives on another machine and is as it
then was.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Literal

from tests.engines.forked import ForkedGateway
from tests.engines.powerloss import DiskModel
from tests.engines.strace import Injection, fired, recording, wrapped
from towline.gateway.settings import GatewaySettings
from towline.guarantee import Guarantee
from towline.journal import Journal, Limits
from towline.mqtt.events import Filter
from towline.schema import ROW_SCHEMA
from towline_prove.devstack.process import wait_for
from towline_prove.history import read_history
from towline_prove.load import LoadPlan, run_load
from towline_prove.referee import Arrival, judge
from towline_prove.subject import GatewayRun, NotReady

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    import pyarrow as pa

    from tests.engines.powerloss import Survives
    from towline_prove.devstack.mosquitto import Mosquitto
    from towline_prove.referee import Verdict

__all__ = ["LEAST_POINTS", "CrashBench", "Point"]

#: Fewer points than these mean that the calls have other names now, and nothing was proved.
LEAST_POINTS = {"fsync": 3, "fdatasync": 4, "writev": 5, "sendto": 4, "rename": 1}

#: More points than any short run has; an enumeration that gets here never ends by itself.
MOST_POINTS = 500

#: The smallest that a journal may have, and a payload that does not fit into one: each run crosses into the next.
_SEGMENT_BYTES = 64 << 10
_PAYLOAD_BYTES = 90_000

_KILLED = {-9, 137}


@dataclass(frozen=True, slots=True)
class Point:
    """One crash point and what came of it.

    Attributes:
        injection: The fault.
        fired: Whether the run reached it.
        code: Exit code of the faulty run; None when it had to be killed because it did not end.
        verdict: The senders' claims against the journal, after recovery.
        recovery: What the journal said it repaired, if anything.
        problem: Something that went wrong beside the verdict; empty when nothing did.
        guarantee: What the verdict is held against.
    """

    injection: Injection
    fired: bool
    code: int | None
    verdict: Verdict
    recovery: str
    problem: str = ""
    guarantee: str = "at_least_once"

    @property
    def ok(self) -> bool:
        """Nothing lost, nothing invented, order kept, and a failed sync ended the process [I6]."""
        return not self.problem and self.verdict.ok(self.guarantee) and self.verdict.adds_up() and self._ended_well

    @property
    def _ended_well(self) -> bool:
        if not self.fired:
            return self.code == 0
        if self.injection.fault == "KILL":
            return self.code in _KILLED
        if self.injection.call in {"fdatasync", "fsync"}:
            return self.code not in {0, None}
        return self.code is not None

    def __str__(self) -> str:
        end = "not reached" if not self.fired else f"exit code {self.code}"
        stories = "".join(f"\n    {story}" for story in self.verdict.stories)
        problem = f"   {self.problem}" if self.problem else ""
        return f"{self.injection}: {end}   {self.verdict.line()}{problem}{stories}"


class CrashBench:
    """Runs crash points against one broker.

    Args:
        broker: A running Mosquitto that keeps everything (``max_queued_messages 0``).
        directory: For state directories, histories and strace logs; one subdirectory a point.
        messages: How many messages a point takes in.
        chunks: In how many chunks at the least they come, each with its sync and its answers, however slow the
            machine is; the points of a run grow with it.
        qos: 1 for at least once; 2 for exactly once, where nothing may come twice either [I3].
        power: What survives of the changes that were not synced; None when only the process dies.
        unsynced: No sync is made, though the gateway is told so: to see that this bench can find a loss.
    """

    def __init__(
        self,
        broker: Mosquitto,
        directory: Path,
        *,
        messages: int = 12,
        chunks: int = 3,
        qos: int = 1,
        power: Survives | None = None,
        unsynced: bool = False,
    ) -> None:
        self._broker = broker
        self._directory = directory
        self._messages = messages
        self._chunks = chunks
        self._qos = qos
        self._guarantee = Guarantee.EXACTLY_ONCE if qos == 2 else Guarantee.AT_LEAST_ONCE
        self._power = power
        self._unsynced = unsynced
        self._numbers = count(1)

    def every(self, call: str, fault: Literal["KILL", "EIO", "ENOSPC"]) -> Iterator[Point]:
        """Run the fault at the first, second, third ... such call, until a run does not reach it any more."""
        for when in range(1, MOST_POINTS):
            point = self.run(Injection(call, str(when), fault))
            yield point
            if not point.fired:
                return

    def run(self, injection: Injection, patience: float = 20) -> Point:
        """Run one point.

        Args:
            injection: The fault.
            patience: Longest time for the messages to be taken in, in seconds; a full disk uses all of it.
        """
        when = injection.when.replace("+", "-on")  # the name becomes a topic, where + is a wildcard
        directory = self._directory / f"{next(self._numbers):03}-{injection.call}-{when}-{injection.fault}"
        directory.mkdir(parents=True)
        log = directory / "strace"
        settings = self._settings(directory)
        disk = DiskModel.of(_disk(directory))
        with ForkedGateway(settings, log=directory / "gateway.log") as run:
            run.fork(lambda pid: self._hurt(pid, injection, log))
            listening = _ready(run)
            if listening:
                self._publish(directory)
                run.until(self._messages, patience)
                code = _end(run)
            else:
                code = run.wait(5)
        if self._power is not None:
            disk.follow(log).cut(self._power)
        hurt = code != 0 or fired(log)  # held back by a full disk, it ends cleanly and leaves the rest at the broker
        problem = self._recover(settings, directory, published=listening) if hurt else ""
        verdict, recovery = self._judge(settings, directory)
        return Point(injection, _fired(injection, log, code), code, verdict, recovery, problem, self._guarantee)

    def _hurt(self, pid: int, injection: Injection, log: Path) -> list[str]:
        if self._power is None:
            return wrapped(pid, injection, log)
        return recording(pid, log, injection=injection, unsynced=self._unsynced)

    def _settings(self, directory: Path) -> GatewaySettings:
        _disk(directory).mkdir()
        name = directory.name.lower()
        plain = GatewaySettings(
            name=name,
            state_dir=_disk(directory) / "towline" / "gateway",
            brokers=(self._broker.uri,),  # type: ignore[arg-type] # the validator reads a URI
            subscriptions=(Filter(f"{name}/#", qos=self._qos),),
            guarantee=self._guarantee,
            receive_maximum=self._messages // self._chunks,
        )
        return plain.model_copy(update={"journal": Limits(segment_bytes=_SEGMENT_BYTES)})

    def _publish(self, directory: Path) -> None:
        plan = LoadPlan(
            port=self._broker.port,
            run=directory.name.lower(),
            publishers=2,
            devices=4,
            messages=self._messages,
            rate=self._messages * 200 // self._chunks,  # a chunk in each tick of the load
            size=_PAYLOAD_BYTES // self._messages,
            topic=f"{directory.name.lower()}/{{device}}",
            qos=self._qos,
            seconds=30,
        )
        run_load(plan, directory / "claims")

    def _recover(self, settings: GatewaySettings, directory: Path, *, published: bool) -> str:
        """Start again without the fault, take in the rest, end; returns what went wrong."""
        with ForkedGateway(settings, log=directory / "gateway.log") as run:
            run.fork()
            ready = _ready(run)
            if not published:
                self._publish(directory)
            if not ready:
                return f"did not start again (exit code {run.wait(5)})"
            claims = read_history(directory / "claims")
            if not wait_for(lambda: not run.running or not judge(claims, _rows(run)).lost, 20):
                return "the broker has more, and it does not come"
            code = _end(run)
            return "" if code == 0 and claims.run else f"did not end cleanly (exit code {code})"

    def _judge(self, settings: GatewaySettings, directory: Path) -> tuple[Verdict, str]:
        """The verdict on the inbox of an ended gateway, and what opening it repaired."""
        with Journal.open(settings.inbox, schema=ROW_SCHEMA) as journal:
            arrivals = _arrivals(journal.read(journal.first, journal.end))
            return judge(read_history(directory / "claims"), arrivals), journal.repair


def _disk(directory: Path) -> Path:
    """What a power failure strikes; the gateway makes everything below it."""
    return directory / "disk"


def _fired(injection: Injection, log: Path, code: int | None) -> bool:
    """A run that we had to kill ourselves has no exit code, so -9 is strace's work."""
    return code in _KILLED if injection.fault == "KILL" else fired(log)


def _end(run: GatewayRun) -> int | None:
    """SIGTERM; under ptrace the kernel may hand it to any thread, and the gateway has to end all the same."""
    return run.stop(15)


def _ready(run: GatewayRun) -> bool:
    try:
        run.online()
    except NotReady:
        return False
    return True


def _rows(run: GatewayRun) -> Iterator[Arrival]:
    """What a running gateway serves now."""
    status, client = run.status(), run.client()
    if status is None or client is None:
        return
    with client:
        yield from _arrivals(client.read(status["journal"], status["first"], status["journaled"]))


def _arrivals(batches: Iterable[pa.RecordBatch]) -> Iterator[Arrival]:
    """What the referee compares, of batches of the inbox."""
    for batch in batches:
        for row in batch.select(["offset", "payload"]).to_pylist():
            yield Arrival(0, row["offset"], None, row["payload"])
