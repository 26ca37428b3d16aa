"""One kind of run with parameters: numbered messages, what is hurt while they flow, and what is counted at the end.

A run ends when everything acknowledged is in Kafka, or nothing moves any more; then a referee compares what the senders
claim with what a plain consumer finds. The bridge stays up from run to run, as it would in life; where a process is
killed that a service manager watches, the harness starts it again.
"""

from __future__ import annotations

import contextlib
import random
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, astuple, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from towline import files
from towline.errors import ConfigError
from towline_prove.evidence import evidence
from towline_prove.history import SenderRecord
from towline_prove.memory import Look, Peaks, Watch, growth
from towline_prove.processes import Role
from towline_prove.rig import BREAKS, KEEP_ALL, PATIENCE_S, Rig, Trial
from towline_prove.senders import Senders
from towline_prove.stage import Moment
from towline_prove.subject import LINE, TOPIC, NotReady

if TYPE_CHECKING:
    from towline_prove.account import RunAccount
    from towline_prove.stage import Stage

#: A gateway may have this much resident memory, whatever waits in its journal.
MOST_RSS = 400 * 10**6
#: What Kafka and its clients have to be told for large records: the record, its key and headers, some room.
_ROOM = 1 << 20
_KAFKA_DEFAULT = 1_000_000
#: Kafka holds a few requests in its heap at once: for payloads from this size on it gets more.
_LARGE, _LARGE_HEAP = 100_000, ("-Xmx2g",)
#: Who can be killed by `Scenario.hurt`.
ROLES = (Role.GATEWAY, Role.JVM, Role.DRIVER, Role.BRIDGE, Role.WORKER, Role.KAFKA)


@dataclass(slots=True)
class Strike:
    """Something that is done to a run, and what came of it.

    Attributes:
        what: A `Role`, which gets SIGKILL, or a name in `BREAKS`.
        due: The share of the messages that is sent when it strikes.
        until: A break ends when this share is sent ...
        seconds: ... or after so many seconds.
        at: Messages sent when it struck; -1 before.
        mended_at: The same when a break was mended.
        back_s: Seconds until the role was played again, or the break was mended; -1 before.
        backlog: Messages that waited in the journal when a break was mended.
        began: On the monotonic clock, when it had struck.
    """

    what: str
    due: float = 0.0
    until: float = 1.0
    seconds: float | None = None
    at: int = -1
    mended_at: int = -1
    back_s: float = -1.0
    backlog: int = 0
    began: float = 0.0

    def __str__(self) -> str:
        text = self.what if self.what in BREAKS else f"killed {self.what} (kill -9)"
        text += f" at {self.at:,}" if self.at >= 0 else ": never"
        end = "over" if self.what in BREAKS else "running again"
        return f"{text}, {end} after {self.back_s:.1f} s" if self.back_s >= 0 else f"{text}, NEVER BACK"


#: The bridge is away, its messages queue in a Mosquitto that keeps nothing on disk, and that is killed with them; then
#: the publisher is; then the bridge comes back.
RECEIPTS = (Strike("bridge away", 0.15, 0.8), Strike(Role.MOSQUITTO, 0.4), Strike(Role.PUBLISHER, 0.6))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What runs, what is hurt and what may not grow.

    Attributes:
        guarantee: Of the line, held against each run; QoS 2 with exactly_once, 0 with at_most_once, else 1.
        hurt: Roles, and names in `BREAKS`: each has runs of its own; with none nothing is hurt.
        runs: For each of them.
        kills: Of a role in a run, at moments that chance decides.
        at: The share of the messages that is sent when something breaks.
        away: Seconds that it is broken.
        strikes: Of each run, in place of `hurt`.
        messages: Messages per run.
        rate: Messages a second; 0 for as fast as the broker takes them.
        size: Payload bytes.
        devices: Keys.
        own_limits: Mosquitto has its own limits, 1,000 messages queued among them; else it drops nothing.
        receipts: One `Publisher` with end-to-end receipts publishes, in place of bare MQTT connections.
        looks: How often memory, heap and files are looked at in a run; they may not grow.
        batches: Micro-batches of the bridge at the end of each run, at least.
        seconds: Longest time of a load.
        seed: Decides the moments.
    """

    guarantee: str = "at_least_once"
    hurt: tuple[str, ...] = ()
    runs: int = 20
    kills: int = 1
    at: float = 0.0
    away: float = 10.0
    strikes: tuple[Strike, ...] = ()
    messages: int = 100_000
    rate: float = 10_000.0
    size: int = 150
    devices: int = 50
    own_limits: bool = False
    receipts: bool = False
    looks: int = 0
    batches: int = 0
    seconds: float = 7_200.0
    seed: int = 1

    def __post_init__(self) -> None:
        possible = [*ROLES, *BREAKS]
        if unknown := set(self.hurt) - set(possible):
            what = f"can't be hurt: {', '.join(sorted(unknown))}"
            raise ConfigError("TL-C83", "a run", what, f"Choose from {', '.join(possible)}.")
        if self.looks == 1:
            raise ConfigError("TL-C83", "a run", "one look shows no growth", "Take two at least, or 0 for none.")

    def plans(self) -> Iterator[tuple[int, list[Strike]]]:
        """Each run: its number, from 1 for each that is hurt, and what is done to it."""
        chance = random.Random(self.seed)  # noqa: S311 - moments, not secrets
        for what in self.hurt or ("",):
            for number in range(1, self.runs + 1):
                if not what:
                    yield number, [replace(strike) for strike in self.strikes]
                elif what in BREAKS:
                    yield number, [Strike(what, self.at, seconds=self.away)]
                else:
                    yield number, [Strike(what, chance.uniform(0.05, 0.9)) for _ in range(self.kills)]

    def rig(self, directory: Path) -> Rig:
        """The brokers and the bridge, not started."""
        most = self.size + _ROOM
        large = {"message.max.bytes": str(most), "replica.fetch.max.bytes": str(most)} if most > _KAFKA_DEFAULT else {}
        line = ""
        if self.receipts:
            directory.mkdir(parents=True, exist_ok=True)
            files.replace(directory / "receipts.key", secrets.token_hex(32) + "\n")
            line = 'receipts = { key_file = "receipts.key" }'
        rig = Rig(
            directory,
            mosquitto={} if self.own_limits else KEEP_ALL,
            guarantee=self.guarantee,
            kafka=large,
            client={"message.max.bytes": most} if large else {},
            line=line,
            direct=not any(BREAKS[what].proxied for what in self.hurt if what in BREAKS),
        )
        rig.kafka.more_jvm = _LARGE_HEAP if self.size >= _LARGE else ()
        return rig

    def senders(self, rig: Rig, trial: Trial) -> Senders:
        """Who publishes, started."""

        def command() -> list[str]:
            plan, claims = trial.plan(
                self.messages, rate=self.rate, seconds=self.seconds, size=self.size, devices=self.devices
            )
            options = asdict(plan)
            if self.receipts:
                options |= {"outbox": rig.directory / "publisher", "key-file": rig.directory / "receipts.key"}
            return ["load", str(claims), *(f"--{name}={value}" for name, value in options.items())]

        return Senders(rig.directory / "senders.log", command)


@dataclass(slots=True)
class Run:
    """One run, and how it ended.

    Attributes:
        scenario: What it is a run of.
        number: From 1, of the runs in which the same is hurt.
        strikes: What was done to it.
        account: What was sent and what was found; None before the end.
        peaks: Memory of the gateway, and the spools.
        looks: In order.
        batches: Micro-batches of the bridge at the end.
        dropped: Messages that the broker itself dropped.
        repeats: With receipts: messages that the publisher sent again, and repeats that the gateway recognised.
        intake_s: Seconds until the senders had ended.
        seconds: The whole run.
    """

    scenario: Scenario
    number: int
    strikes: list[Strike]
    account: RunAccount | None = None
    peaks: Peaks = field(default_factory=Peaks)
    looks: list[Look] = field(default_factory=list)
    batches: int = 0
    dropped: int = 0
    repeats: tuple[int, int] = (0, 0)
    intake_s: float = 0.0
    seconds: float = 0.0

    def problems(self) -> list[str]:
        """Everything that broke the promise, was not done, or has grown; empty for a good run."""
        if self.account is None:
            return ["it has not ended"]
        problems = [*self.account.problems(), *(str(strike) for strike in self.strikes if strike.back_s < 0)]
        verdict, messages = self.account.verdict, self.scenario.messages
        # A publisher that is killed may not have told of its last messages that they were acknowledged.
        taken, how = verdict.delivered if self.scenario.receipts else verdict.acked, "acknowledged"
        if self.scenario.guarantee == "at_most_once":
            taken, how = verdict.attempted, "sent"
        if taken < messages:
            problems.append(f"{taken:,} of {messages:,} messages were {how}")
        if not verdict.delivered:
            problems.append("nothing arrived")
        if len(self.looks) < self.scenario.looks:
            problems.append(f"{len(self.looks)} looks at memory, not {self.scenario.looks}")
        if not self.peaks.rss:
            problems.append("the gateway's memory was never seen")
        if self.peaks.rss > MOST_RSS:
            problems.append(f"the gateway took {self.peaks.rss / 1e6:,.0f} MB")
        if self.dropped > 0 and not self.scenario.receipts:
            problems.append(f"the broker itself dropped {self.dropped:,} messages")
        if self.batches < self.scenario.batches:
            problems.append(f"{self.batches:,} batches, not {self.scenario.batches:,}")
        return problems + (growth(self.looks) if self.looks else [])

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems()

    def line(self) -> str:
        """One line of a table, and one for each thing that is wrong."""
        struck = "; ".join(map(str, self.strikes))
        text = f"{'ok ' if self.ok else 'BAD'} {self.number:>3}   {struck}   {self.account and self.account.line()}"
        stories = self.account.verdict.stories if self.account and not self.ok else []
        return "\n      ".join([text, *self.problems(), *map(str, stories)])

    def record(self) -> dict[str, Any]:
        """The record of a run that has ended (`towline_prove.evidence`)."""
        assert self.account is not None
        asked = asdict(replace(self.scenario, strikes=()))
        kept = {name: value for name, value in asked.items() if name not in {"hurt", "strikes", "runs", "seconds"}}
        struck = [
            {name: getattr(strike, name) for name in ("what", "at", "mended_at", "back_s", "backlog")}
            for strike in self.strikes
        ]
        sizes = {f"gateway_peak_{name}": size for name, size in asdict(self.peaks).items() if name != "spool"}
        sizes["spool_peak"] = self.peaks.spool
        sizes["backlog"] = max((strike.backlog for strike in self.strikes), default=0) * self.scenario.size
        details = {
            "run": self.number,
            **kept,
            "longest_s": self.scenario.seconds,
            "struck": struck,
            **self.account.verdict.counts(),
            "out_of_order_devices": self.account.verdict.disordered,
            **{f"{name}_mb": round(size / 1e6, 1) for name, size in sizes.items()},
            "made_batches": self.batches,
            "dropped": self.dropped,
            "repeats": self.repeats,
            "intake_s": round(self.intake_s, 1),
            "looked": [asdict(look) for look in self.looks],
            "problems": self.problems(),
            "notes": self.account.notes,
        }
        return evidence("soak", ok=self.ok, seconds=self.seconds, details=details)


def prove(scenario: Scenario, directory: Path | None, stage: Stage) -> Iterator[Run]:
    """Do the runs of a scenario with brokers of its own; each when it has ended, well or not.

    Args:
        scenario: What is done.
        directory: Keeps everything; None for one that is removed when all runs were good: the logs in it explain a
            failure.
        stage: Where it is shown.

    Raises:
        NotReady: The bridge did not start, or there is no jcmd for `Scenario.looks` (TL-P01).
    """
    if scenario.looks and shutil.which("jcmd") is None:
        what = "it is missing, and shows what lives in a JVM"
        raise NotReady("TL-P01", "jcmd", what, "Install a JDK, not a JRE alone.")
    began = time.monotonic()
    place = directory or Path(tempfile.mkdtemp(prefix="towline-prove-"))
    with scenario.rig(place) as rig:
        stage.step("brokers", rig.versions)
        rig.warm()
        seconds = time.monotonic() - began
        way = f"telemetry/{{device}}/data → kafka:{TOPIC}   {scenario.guarantee}"
        stage.step(f'line "{LINE}"', f"{way}   acks after fdatasync   {seconds:.1f} s")
        good = True
        for number, strikes in scenario.plans():
            run = Run(scenario, number, strikes)
            _Running(run, rig, stage).run()
            good = good and run.ok
            yield run
    if directory is None and good:
        shutil.rmtree(place, ignore_errors=True)
    elif directory is None:
        stage.step("logs", f"kept in {place}")


class _Running:
    """A run while it runs."""

    def __init__(self, run: Run, rig: Rig, stage: Stage) -> None:
        self._run, self._scenario = run, run.scenario
        self._rig = rig
        self._stage = stage
        self._moment = Moment()
        self._mends: dict[str, Callable[[Rig], object]] = {}

    def run(self) -> None:
        run, rig, began = self._run, self._rig, time.monotonic()
        dropped = rig.dropped()
        with rig.trial() as self._trial, Watch(rig.bridge) as watch:
            with self._scenario.senders(rig, self._trial) as self._senders, self._mended():
                self._attend()
            time.sleep(1.5)  # what comes twice may come yet, and the broker's own counters are a second old
            run.account = replace(self._trial.account(), ordered=not self._scenario.receipts)
        run.peaks, run.batches, run.dropped = watch.peaks, rig.batches, rig.dropped() - dropped
        run.seconds = time.monotonic() - began
        if self._scenario.receipts:
            status = rig.bridge.status() or {}
            run.repeats = int(self._senders.report().get("sent_again", 0)), int(status.get("deduplicated", 0))

    @contextlib.contextmanager
    def _mended(self) -> Iterator[None]:
        try:
            yield
        finally:
            for mend in self._mends.values():
                mend(self._rig)

    def _attend(self) -> None:
        """Watch and strike, until all is in Kafka, or nothing moves any more."""
        strikes, began = self._run.strikes, time.monotonic()
        moved, before = began, None
        while time.monotonic() - moved < PATIENCE_S:
            self._observe()
            for strike in strikes:
                self._attend_to(strike)
            self._look()
            self._stage.show(self._moment, self._scenario.messages)
            if self._senders.running:
                self._run.intake_s = time.monotonic() - began
            elif all(strike.back_s >= 0 for strike in strikes) and self._looked() and self._settled():
                return
            now = astuple(self._moment), sum(strike.back_s >= 0 for strike in strikes)
            if now != before:
                moved, before = time.monotonic(), now
            time.sleep(0.05)  # a look at the gateway is a call
        self._trial.notes.append(f"nothing moved for {PATIENCE_S:g} s")

    def _looked(self) -> bool:
        return len(self._run.looks) >= self._scenario.looks

    def _settled(self) -> bool:
        if self._scenario.guarantee == "at_most_once":  # what is lost would be waited for in vain
            return self._moment.waiting == 0
        return self._trial.settled()

    def _observe(self) -> None:
        moment, trial = self._moment, self._trial
        moment.in_kafka = trial.arrived(0.1)
        moment.acknowledged = trial.claimed(SenderRecord.ACKED)
        moment.offered = trial.claimed(SenderRecord.ATTEMPTED)
        watermarks = trial.watermarks(0)
        if watermarks is not None:
            moment.journaled, moment.waiting = watermarks.journaled, watermarks.waiting

    def _attend_to(self, strike: Strike) -> None:
        """Strike when it is time, one process at a time; and see whether what was struck is back."""
        sent, breaks = self._moment.offered, strike.what in BREAKS
        if strike.at < 0:
            down = any(other.at >= 0 > other.back_s and other.what not in BREAKS for other in self._run.strikes)
            if sent >= max(1, strike.due * self._scenario.messages) and (breaks or not down):
                strike.at = sent if self._struck(strike.what) else -1
                strike.began = time.monotonic()
        elif strike.back_s < 0:
            lasted = time.monotonic() - strike.began
            by_share = strike.seconds is None
            due = sent >= strike.until * self._scenario.messages if by_share else lasted >= (strike.seconds or 0.0)
            if breaks and due:
                strike.backlog = self._moment.waiting
                self._mends.pop(strike.what)(self._rig)
                self._observe()
                strike.mended_at = self._moment.offered
            if due if breaks else self._back(strike.what):
                strike.back_s = round(time.monotonic() - strike.began, 1)
                self._trial.notes.append(str(strike))
                self._stage.fault(str(strike))

    def _struck(self, what: str) -> bool:
        """Hurt it; False when nobody plays that role now."""
        if what in BREAKS:
            self._mends[what] = BREAKS[what].mend
            BREAKS[what].hurt(self._rig)
        elif what == Role.PUBLISHER:
            self._senders.kill()
        else:
            return self._rig.kill(Role(what))
        return True

    def _back(self, role: str) -> bool:
        if role != Role.PUBLISHER:
            return self._rig.revive(Role(role))
        self._senders.start()
        return True

    def _look(self) -> None:
        looks, scenario = self._run.looks, self._scenario
        due = len(looks) * scenario.messages < self._moment.offered * scenario.looks
        if due and (look := Look.at(self._rig)) is not None:
            looks.append(look)
            self._stage.step("look", str(look))
