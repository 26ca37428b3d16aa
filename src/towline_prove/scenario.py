"""Scenario runner: numbered messages, faults while they flow, and the counts at the end.

A run ends when everything acknowledged is in Kafka, or nothing makes progress any more; then a referee compares the
senders' claims with the records of a plain consumer. The bridge stays up from run to run, as it would in life; where a
process is killed that a service manager watches, the harness restarts it.
"""

from __future__ import annotations

import contextlib
import json
import random
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, astuple, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from towline import files
from towline.errors import ConfigError
from towline_prove.devstack.process import spawn
from towline_prove.evidence import RunProgress, run_record
from towline_prove.history import SenderClaim
from towline_prove.processes import MemorySample, Peaks, Role, growth_problems
from towline_prove.rig import DELIVERY_TIMEOUT_S, OUTAGES, UNLIMITED_QUEUE, Rig, Trial
from towline_prove.subject import LINE, TOPIC, NotReady

if TYPE_CHECKING:
    from towline_prove.evidence import RunDisplay
    from towline_prove.referee import RunAccount

#: A gateway may have this much resident memory beside the size of one message, whatever waits in its journal.
MAX_GATEWAY_RSS = 400 * 10**6
#: Bytes beside the payload in the limits of Kafka and its clients: key, headers and some reserve.
_RECORD_OVERHEAD_BYTES = 1 << 20
_KAFKA_DEFAULT_MAX_BYTES = 1_000_000
#: Kafka holds a few requests in its heap at once: for payloads from this size on it gets more.
_LARGE_PAYLOAD_BYTES, _LARGE_HEAP_OPTIONS = 100_000, ("-Xmx2g",)
#: Roles that `Scenario.targets` may name.
KILLABLE_ROLES = (Role.GATEWAY, Role.JVM, Role.DRIVER, Role.BRIDGE, Role.WORKER, Role.KAFKA)


class SenderProcess:
    """Process of ``python -m towline_prove load``, started by `command` for each life; a context manager that ends it.

    The publishers are in a process of their own, because they must not share our interpreter's lock.
    """

    def __init__(self, log: Path, command: Callable[[], list[str]]) -> None:
        self.log = log
        self._command = command
        self.start()

    def start(self) -> None:
        """Start the process again."""
        self._process, _ = spawn([sys.executable, "-m", "towline_prove", *self._command()], self.log)

    @property
    def running(self) -> bool:
        """True while the process runs."""
        return self._process.poll() is None

    def kill(self) -> None:
        """Kill the process with SIGKILL, if it runs."""
        self._process.kill()
        self._process.wait(30)

    def receipt_report(self) -> dict[str, Any]:
        """Return the receipt counts that `publish_with_receipts` printed at its end; empty if it did not end."""
        lines = self.log.read_text(errors="replace").splitlines()
        return dict(json.loads(next((line for line in reversed(lines) if line.startswith("{")), "{}")))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


@dataclass(slots=True)
class Fault:
    """Fault injected into a run, and its effect.

    Attributes:
        what: A `Role`, which gets SIGKILL, or a name in `OUTAGES`.
        start_share: Share of the messages sent when the fault begins.
        end_share: An outage ends when this share is sent ...
        duration_s: ... or after so many seconds.
        at: Messages sent when it began; -1 before.
        mended_at: Messages sent when an outage ended; -1 before.
        back_s: Seconds until the role was played again, or the outage ended; -1 before.
        backlog: Messages that waited in the journal when an outage ended.
        began_at: Start on the monotonic clock.
    """

    what: str
    start_share: float = 0.0
    end_share: float = 1.0
    duration_s: float | None = None
    at: int = -1
    mended_at: int = -1
    back_s: float = -1.0
    backlog: int = 0
    began_at: float = 0.0

    def __str__(self) -> str:
        text = self.what if self.what in OUTAGES else f"killed {self.what} (kill -9)"
        text += f" at {self.at:,}" if self.at >= 0 else ": never"
        end_text = "over" if self.what in OUTAGES else "running again"
        return f"{text}, {end_text} after {self.back_s:.1f} s" if self.back_s >= 0 else f"{text}, NEVER RECOVERED"


#: The bridge is down, its messages queue in a Mosquitto that persists nothing, and that is killed with them; then
#: the publisher is; then the bridge comes back.
RECEIPT_FAULTS = (Fault("bridge down", 0.15, 0.8), Fault(Role.MOSQUITTO, 0.4), Fault(Role.PUBLISHER, 0.6))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Parameters of a scenario: load, faults and limits.

    Attributes:
        guarantee: Guarantee of the line, checked in each run; QoS 2 with exactly_once, 0 with at_most_once, else 1.
        targets: Roles, and names in `OUTAGES`: each has runs of its own; empty for runs without faults.
        runs: Runs for each role or outage.
        kills: Kills of a role in a run, at random moments.
        at: Share of the messages that is sent when an outage begins.
        away: Seconds that an outage lasts.
        faults: Faults of each run, in place of `targets`.
        messages: Messages per run.
        rate: Messages a second; 0 for as fast as the broker takes them.
        size: Payload bytes.
        devices: Keys.
        own_limits: Mosquitto has its own limits, 1,000 messages queued among them; else it drops nothing.
        receipts: One `Publisher` with end-to-end receipts publishes, in place of bare MQTT connections.
        memory_samples: Samples of memory, heap and files in a run; they may not grow.
        batches: Micro-batches of the bridge at the end of each run, at least.
        seconds: Longest time of a load.
        seed: Seed of the random moments.
    """

    guarantee: str = "at_least_once"
    targets: tuple[str, ...] = ()
    runs: int = 20
    kills: int = 1
    at: float = 0.0
    away: float = 10.0
    faults: tuple[Fault, ...] = ()
    messages: int = 100_000
    rate: float = 10_000.0
    size: int = 150
    devices: int = 50
    own_limits: bool = False
    receipts: bool = False
    memory_samples: int = 0
    batches: int = 0
    seconds: float = 7_200.0
    seed: int = 1

    def __post_init__(self) -> None:
        possible = [*KILLABLE_ROLES, *OUTAGES]
        if unknown := set(self.targets) - set(possible):
            problem = f"unknown roles or outages: {', '.join(sorted(unknown))}"
            raise ConfigError("TL-C83", "a run", problem, f"Choose from {', '.join(possible)}.")
        if self.memory_samples == 1:
            raise ConfigError("TL-C83", "a run", "one memory sample shows no growth", "Take 2 at least, or 0.")

    def plans(self) -> Iterator[tuple[int, list[Fault]]]:
        """Yield each run: its number, from 1 for each role or outage, and its faults."""
        random_source = random.Random(self.seed)  # noqa: S311 - moments, not secrets
        for fault_name in self.targets or ("",):
            for number in range(1, self.runs + 1):
                if not fault_name:
                    yield number, [replace(fault) for fault in self.faults]
                elif fault_name in OUTAGES:
                    yield number, [Fault(fault_name, self.at, duration_s=self.away)]
                else:
                    yield number, [Fault(fault_name, random_source.uniform(0.05, 0.9)) for _ in range(self.kills)]

    def create_rig(self, directory: Path) -> Rig:
        """Create the brokers and the bridge, without starting them."""
        max_bytes, uplink_line = self.size + _RECORD_OVERHEAD_BYTES, ""
        is_large = max_bytes > _KAFKA_DEFAULT_MAX_BYTES
        if self.receipts:
            directory.mkdir(parents=True, exist_ok=True)
            files.replace(directory / "receipts.key", secrets.token_hex(32) + "\n")
            uplink_line = 'receipts = { key_file = "receipts.key" }'
        rig = Rig(
            directory,
            mosquitto={} if self.own_limits else UNLIMITED_QUEUE,
            guarantee=self.guarantee,
            kafka=dict.fromkeys(("message.max.bytes", "replica.fetch.max.bytes"), str(max_bytes)) if is_large else {},
            client={"message.max.bytes": max_bytes} if is_large else {},
            uplink_line=uplink_line,
            direct=not any(OUTAGES[fault_name].needs_proxies for fault_name in self.targets if fault_name in OUTAGES),
        )
        rig.kafka.extra_jvm_options = _LARGE_HEAP_OPTIONS if self.size >= _LARGE_PAYLOAD_BYTES else ()
        return rig

    def start_senders(self, rig: Rig, trial: Trial) -> SenderProcess:
        """Start the publishers."""

        def next_command() -> list[str]:
            plan, claims = trial.plan_load(
                self.messages, rate=self.rate, seconds=self.seconds, size=self.size, devices=self.devices
            )
            options = asdict(plan)
            if self.receipts:
                options |= {"outbox": rig.directory / "publisher", "key-file": rig.directory / "receipts.key"}
            return ["load", str(claims), *(f"--{name}={value}" for name, value in options.items())]

        return SenderProcess(rig.directory / "senders.log", next_command)


@dataclass(slots=True)
class Run:
    """Result of one run.

    Attributes:
        number: Number from 1, among the runs with the same fault.
        broker_dropped: Messages that the broker itself dropped.
        repeats: With receipts: messages that the publisher sent again, and messages that the gateway deduplicated.
        intake_s: Seconds until the senders had ended.
    """

    scenario: Scenario
    number: int
    faults: list[Fault]
    account: RunAccount | None = None
    peaks: Peaks = field(default_factory=Peaks)
    memory_samples: list[MemorySample] = field(default_factory=list)
    batches: int = 0
    broker_dropped: int = 0
    repeats: tuple[int, int] = (0, 0)
    intake_s: float = 0.0
    seconds: float = 0.0

    def problems(self) -> list[str]:
        """Return all broken promises, missing faults and growth; empty for a good run."""
        if self.account is None:
            return ["it has not ended"]
        problems = [*self.account.problems(), *(str(fault) for fault in self.faults if fault.back_s < 0)]
        verdict, messages = self.account.verdict, self.scenario.messages
        # A killed publisher may not have recorded the acknowledgement of its last messages.
        confirmed_count, verb = verdict.delivered if self.scenario.receipts else verdict.acked, "acknowledged"
        if self.scenario.guarantee == "at_most_once":
            confirmed_count, verb = verdict.attempted, "sent"
        if confirmed_count < messages:
            problems.append(f"{confirmed_count:,} of {messages:,} messages were {verb}")
        if not verdict.delivered:
            problems.append("nothing arrived")
        if len(self.memory_samples) < self.scenario.memory_samples:
            problems.append(f"{len(self.memory_samples)} memory samples, not {self.scenario.memory_samples}")
        if not self.peaks.rss:
            problems.append("the gateway's memory was never measured")
        if self.peaks.rss > MAX_GATEWAY_RSS + self.scenario.size:
            problems.append(f"the gateway took {self.peaks.rss / 1e6:,.0f} MB")
        if self.broker_dropped > 0 and not self.scenario.receipts:
            problems.append(f"the broker itself dropped {self.broker_dropped:,} messages")
        if self.batches < self.scenario.batches:
            problems.append(f"{self.batches:,} batches, not {self.scenario.batches:,}")
        return problems + (growth_problems(self.memory_samples) if self.memory_samples else [])

    @property
    def ok(self) -> bool:
        """True for a run without problems."""
        return not self.problems()

    def summary_text(self) -> str:
        """Return one line of a table, and one for each problem."""
        fault_text = "; ".join(map(str, self.faults))
        text = f"{'ok ' if self.ok else 'BAD'} {self.number:>3}   {fault_text}   {self.account and self.account.line()}"
        stories = self.account.verdict.stories if self.account and not self.ok else []
        return "\n      ".join([text, *self.problems(), *map(str, stories)])

    def record(self) -> dict[str, Any]:
        """Return the record of a run that has ended (`towline_prove.evidence`)."""
        assert self.account is not None
        fields = asdict(replace(self.scenario, faults=()))
        omitted, recorded = {"targets", "faults", "runs", "seconds"}, ("what", "at", "mended_at", "back_s", "backlog")
        fault_records = [{name: getattr(fault, name) for name in recorded} for fault in self.faults]
        backlog = max((fault.backlog for fault in self.faults), default=0) * self.scenario.size
        sizes = {"gateway_peak_rss": self.peaks.rss, "spool_peak": self.peaks.spool, "backlog": backlog}
        details = {
            "run": self.number,
            **{name: value for name, value in fields.items() if name not in omitted},
            "longest_s": self.scenario.seconds,
            "struck": fault_records,
            **self.account.verdict.counts(),
            "out_of_order_devices": self.account.verdict.disordered,
            **{f"{name}_mb": round(size / 1e6, 1) for name, size in sizes.items()},
            "made_batches": self.batches,
            "dropped": self.broker_dropped,
            "repeats": self.repeats,
            "intake_s": round(self.intake_s, 1),
            "looked": [asdict(sample) for sample in self.memory_samples],
            "problems": self.problems(),
            "notes": self.account.notes,
        }
        return run_record("soak", ok=self.ok, seconds=self.seconds, details=details)


def prove(scenario: Scenario, directory: Path | None, stage: RunDisplay) -> Iterator[Run]:
    """Start the brokers of a scenario and yield its runs, each one when it has ended, good or bad.

    Without a directory a temporary one is kept only after a bad run, for its logs. NotReady TL-P01 if the bridge does
    not start, or without jcmd for `Scenario.memory_samples`.
    """
    if scenario.memory_samples and shutil.which("jcmd") is None:
        problem = "it is missing, and shows what lives in a JVM"
        raise NotReady("TL-P01", "jcmd", problem, "Install a JDK, not a JRE alone.")
    began_at = time.monotonic()
    run_directory = directory or Path(tempfile.mkdtemp(prefix="towline-prove-"))
    with scenario.create_rig(run_directory) as rig:
        stage.step("brokers", rig.versions)
        rig.warm_up()
        seconds = time.monotonic() - began_at
        route_text = f"telemetry/{{device}}/data → kafka:{TOPIC}   {scenario.guarantee}"
        stage.step(f'line "{LINE}"', f"{route_text}   acks after fdatasync   {seconds:.1f} s")
        stage.show_bridge(rig.bridge.config)
        all_ok = True
        for number, faults in scenario.plans():
            run = Run(scenario, number, faults)
            _RunInProgress(run, rig, stage).run()
            all_ok = all_ok and run.ok
            yield run
    if directory is None and all_ok:
        shutil.rmtree(run_directory, ignore_errors=True)
    elif directory is None:
        stage.step("logs", f"kept in {run_directory}")


class _RunInProgress:
    """Runner of one run in progress."""

    def __init__(self, run: Run, rig: Rig, stage: RunDisplay) -> None:
        self._run, self._scenario = run, run.scenario
        self._rig = rig
        self._stage = stage
        self._progress = RunProgress()
        self._pending_fixes: dict[str, Callable[[Rig], object]] = {}

    def run(self) -> None:
        run, rig, began_at = self._run, self._rig, time.monotonic()
        dropped_before = rig.broker_dropped()
        with rig.start_trial() as self._trial:
            with self._scenario.start_senders(rig, self._trial) as self._senders, self._end_outages():
                self._watch_until_end()
            time.sleep(1.5)  # duplicates may still come, and the broker's counters are a second old
            run.account = replace(self._trial.account(), ordered=not self._scenario.receipts)
        run.batches, run.broker_dropped = rig.batches, rig.broker_dropped() - dropped_before
        run.seconds = time.monotonic() - began_at
        if self._scenario.receipts:
            status = rig.bridge.status() or {}
            run.repeats = int(self._senders.receipt_report().get("sent_again", 0)), int(status.get("deduplicated", 0))

    @contextlib.contextmanager
    def _end_outages(self) -> Iterator[None]:
        try:
            yield
        finally:
            for fix in self._pending_fixes.values():
                fix(self._rig)

    def _watch_until_end(self) -> None:
        """Watch the run and inject its faults, until all is in Kafka, or nothing makes progress any more."""
        faults, began_at = self._run.faults, time.monotonic()
        last_progress_at, last_state = began_at, None
        while time.monotonic() - last_progress_at < DELIVERY_TIMEOUT_S:
            self._update_progress()
            self._run.peaks.measure(self._rig.bridge)
            for fault in faults:
                self._advance_fault(fault)
            self._sample_memory()
            self._stage.show_progress(self._progress, self._scenario.messages)
            if self._senders.running:
                self._run.intake_s = time.monotonic() - began_at
            elif all(fault.back_s >= 0 for fault in faults) and self._has_all_samples() and self._is_all_delivered():
                return
            state = astuple(self._progress), sum(fault.back_s >= 0 for fault in faults)
            if state != last_state:
                last_progress_at, last_state = time.monotonic(), state
            time.sleep(0.05)  # each poll is a call to the gateway
        self._trial.notes.append(f"no progress for {DELIVERY_TIMEOUT_S:g} s")

    def _has_all_samples(self) -> bool:
        return len(self._run.memory_samples) >= self._scenario.memory_samples

    def _is_all_delivered(self) -> bool:
        if self._scenario.guarantee == "at_most_once":  # lost messages never come
            return self._progress.uncommitted_count == 0
        return self._trial.all_delivered()

    def _update_progress(self) -> None:
        progress, trial = self._progress, self._trial
        progress.kafka_count = trial.count_arrived(0.1)
        progress.acked_count = trial.count_claims(SenderClaim.ACKED)
        progress.offered_count = trial.count_claims(SenderClaim.ATTEMPTED)
        watermarks = trial.watermarks(0)
        if watermarks is not None:
            progress.journal_count, progress.uncommitted_count = watermarks.journaled, watermarks.uncommitted

    def _advance_fault(self, fault: Fault) -> None:
        """Inject the fault at its time, one killed process at a time; then note when it is over."""
        sent, is_outage = self._progress.offered_count, fault.what in OUTAGES
        if fault.at < 0:
            process_down = any(other.at >= 0 > other.back_s and other.what not in OUTAGES for other in self._run.faults)
            if sent >= max(1, fault.start_share * self._scenario.messages) and (is_outage or not process_down):
                fault.at = sent if self._inject_fault(fault.what) else -1
                fault.began_at = time.monotonic()
        elif fault.back_s < 0:
            elapsed = time.monotonic() - fault.began_at
            is_over = elapsed >= (fault.duration_s or 0.0)
            if fault.duration_s is None:
                is_over = sent >= fault.end_share * self._scenario.messages
            if is_outage and is_over:
                fault.backlog = self._progress.uncommitted_count
                self._pending_fixes.pop(fault.what)(self._rig)
                self._update_progress()
                fault.mended_at = self._progress.offered_count
            if is_over if is_outage else self._revive_role(fault.what):
                fault.back_s = round(time.monotonic() - fault.began_at, 1)
                self._trial.notes.append(str(fault))
                self._stage.fault(str(fault))

    def _inject_fault(self, fault_name: str) -> bool:
        """Inject a fault; False if no process has that role now."""
        if fault_name in OUTAGES:
            self._pending_fixes[fault_name] = OUTAGES[fault_name].fix
            OUTAGES[fault_name].inject(self._rig)
        elif fault_name == Role.PUBLISHER:
            self._senders.kill()
        else:
            return self._rig.kill(Role(fault_name))
        return True

    def _revive_role(self, role: str) -> bool:
        if role != Role.PUBLISHER:
            return self._rig.revive(Role(role))
        self._senders.start()
        return True

    def _sample_memory(self) -> None:
        samples, scenario = self._run.memory_samples, self._scenario
        sample_due = len(samples) * scenario.messages < self._progress.offered_count * scenario.memory_samples
        if sample_due and (sample := MemorySample.take(self._rig)) is not None:
            samples.append(sample)
            self._stage.step("look", str(sample))
