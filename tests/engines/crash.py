"""Crash points of a gateway's intake, enumerated: the n-th system call kills or fails it, for each n.

For one point, a gateway with an empty state directory runs under strace with one fault. When it listens, numbered QoS 1
messages are published; it stores them and is stopped. If it dies on the way it is started again without the fault and
receives the rest from the broker. Then the journal must hold every message that was acknowledged to the senders: a
message whose PUBACK was sent before it was durable is missing now, because the broker has deleted it [I2].

With ``surviving_changes`` the machine loses power with the process: before the second start the state directory is what
a disk would hold, computed from the record of the run (`tests.engines.powerloss`). The broker is on another machine and
keeps its state.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Literal

from tests.engines.forked import ForkedGateway
from tests.engines.powerloss import DiskModel
from tests.engines.strace import Injection, inject_command, record_command, was_injected
from towline.gateway.settings import GatewaySettings
from towline.guarantee import Guarantee
from towline.journal import Journal, Limits
from towline.mqtt.events import Filter
from towline.schema import ROW_SCHEMA
from towline_prove.devstack.process import wait_for
from towline_prove.history import read_history
from towline_prove.load import LoadPlan, run_load
from towline_prove.referee import Arrival, judge_arrivals
from towline_prove.subject import GatewayRun, NotReady

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    import pyarrow as pa

    from tests.engines.powerloss import Survives
    from towline_prove.devstack.mosquitto import Mosquitto
    from towline_prove.referee import RunVerdict

__all__ = ["MIN_POINTS", "CrashBench", "CrashPoint"]

#: Fewer points than these mean that the calls have other names now, and nothing was proved.
MIN_POINTS = {"fsync": 3, "fdatasync": 4, "writev": 5, "sendto": 4, "rename": 1}

#: More points than any short run has; an enumeration that gets here never ends by itself.
MAX_POINTS = 500

#: The smallest that a journal may have, and a payload that does not fit into one: each run crosses into the next.
_SEGMENT_BYTES = 64 << 10
_PAYLOAD_BYTES = 90_000

_KILL_CODES = {-9, 137}


@dataclass(frozen=True, slots=True)
class CrashPoint:
    """Result of one crash point.

    Attributes:
        injection: The fault.
        was_injected: Whether the run reached it.
        exit_code: Exit code of the faulty run; None when it had to be killed because it did not end.
        verdict: The senders' claims against the journal, after recovery.
        repair_note: Repair that the journal reported, if any.
        problem: Other problem beside the verdict; empty without one.
        guarantee: Guarantee that the verdict is compared with.
    """

    injection: Injection
    was_injected: bool
    exit_code: int | None
    verdict: RunVerdict
    repair_note: str
    problem: str = ""
    guarantee: str = "at_least_once"

    @property
    def ok(self) -> bool:
        """Whether no message is lost or invented, order is kept, and a failed sync ended the process [I6]."""
        return (
            not self.problem and self.verdict.ok(self.guarantee) and self.verdict.adds_up() and self._has_expected_exit
        )

    @property
    def _has_expected_exit(self) -> bool:
        if not self.was_injected:
            return self.exit_code == 0
        if self.injection.fault == "KILL":
            return self.exit_code in _KILL_CODES
        if self.injection.call in {"fdatasync", "fsync"}:
            return self.exit_code not in {0, None}
        return self.exit_code is not None

    def __str__(self) -> str:
        end = "not reached" if not self.was_injected else f"exit code {self.exit_code}"
        stories = "".join(f"\n    {story}" for story in self.verdict.stories)
        problem = f"   {self.problem}" if self.problem else ""
        return f"{self.injection}: {end}   {self.verdict.summary_line()}{problem}{stories}"


class CrashBench:
    """Runner of crash points against one broker.

    Args:
        broker: A running Mosquitto that keeps everything (``max_queued_messages 0``).
        directory: For state directories, histories and strace logs; one subdirectory a point.
        messages: Number of messages per point.
        chunks: Minimum number of chunks, each with its sync and acknowledgements, however slow the machine is; the
            points of a run grow with it.
        qos: 1 for at least once; 2 for exactly once, where no message may come twice either [I3].
        surviving_changes: Decides which unsynced changes survive a power failure; None when only the process dies.
        fake_syncs: No sync is made, though it returns success: shows that this bench can find a loss.
    """

    def __init__(
        self,
        broker: Mosquitto,
        directory: Path,
        *,
        messages: int = 12,
        chunks: int = 3,
        qos: int = 1,
        surviving_changes: Survives | None = None,
        fake_syncs: bool = False,
    ) -> None:
        self._broker = broker
        self._directory = directory
        self._messages = messages
        self._chunks = chunks
        self._qos = qos
        self._guarantee = Guarantee.EXACTLY_ONCE if qos == 2 else Guarantee.AT_LEAST_ONCE
        self._surviving_changes = surviving_changes
        self._fake_syncs = fake_syncs
        self._numbers = count(1)

    def run_all(self, call: str, fault: Literal["KILL", "EIO", "ENOSPC"]) -> Iterator[CrashPoint]:
        """Inject the fault at the first, second, third ... such call, until a run does not reach it any more."""
        for number in range(1, MAX_POINTS):
            point = self.run(Injection(call, str(number), fault))
            yield point
            if not point.was_injected:
                return

    def run(self, injection: Injection, timeout_s: float = 20) -> CrashPoint:
        """Run one point.

        Args:
            injection: The fault.
            timeout_s: Longest time to store the messages, in seconds; a full disk uses all of it.
        """
        occurrence = injection.occurrence.replace("+", "-on")  # the name becomes a topic, where + is a wildcard
        directory = self._directory / f"{next(self._numbers):03}-{injection.call}-{occurrence}-{injection.fault}"
        directory.mkdir(parents=True)
        log = directory / "strace"
        settings = self._settings(directory)
        disk = DiskModel.of(_disk_directory(directory))
        with ForkedGateway(settings, log=directory / "gateway.log") as gateway:
            gateway.fork(lambda pid: self._fault_command(pid, injection, log))
            listening = _is_ready(gateway)
            if listening:
                self._publish(directory)
                gateway.wait_journaled(self._messages, timeout_s)
                exit_code = _stop(gateway)
            else:
                exit_code = gateway.wait(5)
        if self._surviving_changes is not None:
            disk.replay(log).lose_power(self._surviving_changes)
        needs_recovery = exit_code != 0 or was_injected(
            log
        )  # held back by a full disk, it ends cleanly and leaves the rest at the broker
        problem = self._recover(settings, directory, is_published=listening) if needs_recovery else ""
        verdict, repair_note = self._verify_inbox(settings, directory)
        return CrashPoint(
            injection,
            _was_injected(injection, log, exit_code),
            exit_code,
            verdict,
            repair_note,
            problem,
            self._guarantee,
        )

    def _fault_command(self, pid: int, injection: Injection, log: Path) -> list[str]:
        if self._surviving_changes is None:
            return inject_command(pid, injection, log)
        return record_command(pid, log, injection=injection, fake_syncs=self._fake_syncs)

    def _settings(self, directory: Path) -> GatewaySettings:
        _disk_directory(directory).mkdir()
        name = directory.name.lower()
        settings = GatewaySettings(
            name=name,
            state_dir=_disk_directory(directory) / "towline" / "gateway",
            brokers=(self._broker.uri,),  # type: ignore[arg-type] # the validator reads a URI
            subscriptions=(Filter(f"{name}/#", qos=self._qos),),
            guarantee=self._guarantee,
            receive_maximum=self._messages // self._chunks,
        )
        return settings.model_copy(update={"journal": Limits(segment_bytes=_SEGMENT_BYTES)})

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

    def _recover(self, settings: GatewaySettings, directory: Path, *, is_published: bool) -> str:
        """Start the gateway again without the fault, store the rest, stop; return the problem or ""."""
        with ForkedGateway(settings, log=directory / "gateway.log") as gateway:
            gateway.fork()
            ready = _is_ready(gateway)
            if not is_published:
                self._publish(directory)
            if not ready:
                return f"did not start again (exit code {gateway.wait(5)})"
            claims = read_history(directory / "claims")
            if not wait_for(lambda: not gateway.running or not judge_arrivals(claims, _served_rows(gateway)).lost, 20):
                return "the broker has more, and it does not come"
            exit_code = _stop(gateway)
            return "" if exit_code == 0 and claims.run else f"did not end cleanly (exit code {exit_code})"

    def _verify_inbox(self, settings: GatewaySettings, directory: Path) -> tuple[RunVerdict, str]:
        """Return the verdict on the inbox of an ended gateway, and the repair note of its opening."""
        with Journal.open(settings.inbox_dir, schema=ROW_SCHEMA) as journal:
            arrivals = _arrivals(journal.read(journal.first_offset, journal.end))
            return judge_arrivals(read_history(directory / "claims"), arrivals), journal.repair_note


def _disk_directory(directory: Path) -> Path:
    """Return the directory that loses power; the gateway creates everything below it."""
    return directory / "disk"


def _was_injected(injection: Injection, log: Path, exit_code: int | None) -> bool:
    """Return whether the fault was injected; a run killed by the bench has no exit code, so -9 is strace's."""
    return exit_code in _KILL_CODES if injection.fault == "KILL" else was_injected(log)


def _stop(gateway: GatewayRun) -> int | None:
    """Stop by SIGTERM; under ptrace the kernel may deliver it to any thread, and the gateway still has to end."""
    return gateway.stop(15)


def _is_ready(gateway: GatewayRun) -> bool:
    try:
        gateway.wait_online()
    except NotReady:
        return False
    return True


def _served_rows(gateway: GatewayRun) -> Iterator[Arrival]:
    """Yield the rows that a running gateway serves now."""
    status, client = gateway.status(), gateway.client()
    if status is None or client is None:
        return
    with client:
        yield from _arrivals(client.read(status["journal"], status["first"], status["journaled"]))


def _arrivals(batches: Iterable[pa.RecordBatch]) -> Iterator[Arrival]:
    """Yield the inbox's rows as arrivals for the referee."""
    for batch in batches:
        for row in batch.select(["offset", "payload"]).to_pylist():
            yield Arrival(0, row["offset"], None, row["payload"])
