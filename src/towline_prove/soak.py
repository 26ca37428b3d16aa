"""kill -9 of every role at random moments under load, and an account of each run.

One run: numbered messages from 8 publishers (QoS 2 where exactly once is promised), in a process of their own; at a
random moment (a fixed seed makes it repeatable) one role gets SIGKILL; the run ends when everything acknowledged is in
Kafka, or is not. The bridge stays up from run to run, as it would in life; where the bridge itself is killed, the
harness starts it again, as a service manager would.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from towline_prove.devstack.process import wait_for
from towline_prove.evidence import evidence
from towline_prove.history import SenderRecord, read_history
from towline_prove.processes import Role
from towline_prove.rig import PATIENCE_S, Rig, dropped_by

if TYPE_CHECKING:
    from pathlib import Path

    from towline_prove.account import RunAccount
    from towline_prove.load import LoadPlan

__all__ = ["EVERYBODY", "KEEP_ALL", "ROLES", "Soak", "SoakPlan", "SoakRun", "sent_by", "start_load"]

ROLES = (Role.GATEWAY, Role.JVM, Role.DRIVER, Role.BRIDGE)
#: Also Spark's Python workers, which hold the transactions, and Kafka itself.
EVERYBODY = (*ROLES, Role.WORKER, Role.KAFKA)

#: A stopped or restarting gateway must not make the broker drop: what a user is told to set.
KEEP_ALL = {"max_queued_messages": "0", "max_inflight_messages": "1000"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakPlan:
    """How much is killed how often.

    Attributes:
        roles: Who is killed.
        runs: Runs per role; one kill each.
        messages: Messages per run.
        rate: Messages a second; 0 for as fast as the broker takes them.
        seed: Decides the moments.
        guarantee: The promise that is held against each run.
    """

    roles: tuple[Role, ...] = ROLES
    runs: int = 20
    messages: int = 100_000
    rate: float = 10_000.0
    seed: int = 1
    guarantee: str = "at_least_once"

    @classmethod
    def quick(cls, guarantee: str = "at_least_once") -> SoakPlan:
        """The short form that belongs into every test run."""
        return cls(runs=1, messages=4_000, rate=1_500.0, guarantee=guarantee)


@dataclass(frozen=True, slots=True)
class SoakRun:
    """One run.

    Attributes:
        role: Who was killed.
        run: Which run of that role, from 1.
        at: How many messages had been sent at the kill; -1 when there was no process to kill.
        back: Seconds until the role was played again.
        seconds: The whole run.
        account: Its account.
    """

    role: Role
    run: int
    at: int
    back: float
    seconds: float
    account: RunAccount

    @property
    def ok(self) -> bool:
        """A kill took place, the role came back, and the promise was kept."""
        return self.at >= 0 and self.back >= 0 and self.account.ok

    def line(self) -> str:
        """One line of the table."""
        sign = "ok " if self.ok else "BAD"
        back = f"back after {self.back:4.1f} s" if self.back >= 0 else "NEVER BACK"
        text = f"{sign} {self.role:<8} {self.run:>3}   killed at {self.at:>9,}   {back}   {self.account.line()}"
        problems = [*self.account.problems(), *map(str, self.account.verdict.stories)] if not self.ok else []
        return "\n      ".join([text, *problems])

    def evidence(self, plan: SoakPlan) -> dict[str, Any]:
        """The record of this run, as one of `plan`."""
        asked = {"role": self.role, "run": self.run, "seed": plan.seed, "guarantee": plan.guarantee, "rate": plan.rate}
        counts = {"killed_at": self.at, "back_s": round(self.back, 1), **self.account.verdict.counts()}
        remarks = {"problems": self.account.problems(), "notes": self.account.notes}
        return evidence("soak", ok=self.ok, seconds=self.seconds, details={**asked, **counts, **remarks})


@dataclass
class Soak:
    """Runs a plan in a directory.

    Attributes:
        plan: What to do.
        directory: For brokers, state, histories and logs.
        say: Gets a line for each event.
    """

    plan: SoakPlan
    directory: Path
    say: Callable[[str], None] = lambda _: None
    outcomes: list[SoakRun] = field(default_factory=list, init=False)

    def run(self) -> list[SoakRun]:
        """Run everything; the outcomes, good and bad."""
        with Rig(self.directory, mosquitto=KEEP_ALL, guarantee=self.plan.guarantee) as rig:
            self.say(f"Mosquitto {rig.mosquitto.version}, Kafka {rig.kafka.version}, seed {self.plan.seed}")
            rig.warm()
            for outcome in self._runs(rig):
                self.outcomes.append(outcome)
                self.say(outcome.line())
            dropped = dropped_by(rig.mosquitto)
            if dropped:
                self.say(f"the broker itself dropped {dropped:,} messages: its fault, and these runs prove nothing")
        return self.outcomes

    def _runs(self, rig: Rig) -> Iterator[SoakRun]:
        chance = random.Random(self.plan.seed)  # noqa: S311 - moments, not secrets
        for role in self.plan.roles:
            for number in range(1, self.plan.runs + 1):
                yield self._one(rig, role, number, chance.uniform(0.05, 0.9))

    def _one(self, rig: Rig, role: Role, number: int, moment: float) -> SoakRun:
        began = time.monotonic()
        with rig.trial(f"{role}-{number}") as trial:
            plan, claims = trial.plan(self.plan.messages, rate=self.plan.rate)
            load = start_load(plan, claims)
            try:
                at = _kill_at(rig, role, claims, int(moment * self.plan.messages))
                trial.notes.append(f"killed {role} at {at}")
                back = _await_back(rig, role) if at >= 0 else -1.0
                load.wait(plan.seconds)
            finally:
                load.kill()
            account = trial.account()
            if not rig.bridge.running:
                trial.notes.append("the bridge has ended")
        return SoakRun(role, number, at, back, time.monotonic() - began, account)


def start_load(plan: LoadPlan, claims: Path) -> subprocess.Popen[bytes]:
    """Publish from another process: the senders must not share our interpreter's lock."""
    options = [f"--{name}={value}" for name, value in plan.public().items() if value is not None]
    command = [sys.executable, "-m", "towline_prove", "load", str(claims), *options]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL)


def _kill_at(rig: Rig, role: Role, claims: Path, moment: int) -> int:
    """Wait for the moment and kill; how many messages had been sent then, -1 when there was no process to kill."""
    at = sent_by(claims, moment, PATIENCE_S)
    if not wait_for(lambda: rig.kill(role), PATIENCE_S):
        return -1
    return at


def sent_by(claims: Path, moment: float, timeout: float) -> int:
    """Wait until the senders claim to have sent so many messages, or time is up; how many they claim then."""

    def sent() -> int:
        return read_history(claims).count(SenderRecord.ATTEMPTED) if claims.exists() else 0

    wait_for(lambda: sent() >= moment, timeout, 0.02)
    return sent()


def _await_back(rig: Rig, role: Role) -> float:
    """Seconds until a process plays the role again; -1 when none does in time."""
    began = time.monotonic()
    return time.monotonic() - began if wait_for(lambda: rig.revive(role), PATIENCE_S, 0.02) else -1.0
