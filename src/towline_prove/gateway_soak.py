"""QoS 2 from a real broker while the gateway is killed at random moments: the journal holds each message once.

The journal alone is judged, so a run needs neither Kafka nor Spark and can afford many kills.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from towline.gateway.settings import GatewaySettings
from towline.guarantee import Guarantee
from towline.mqtt.events import Filter
from towline_prove.devstack import Mosquitto
from towline_prove.devstack.process import wait_for
from towline_prove.history import SenderRecord, read_history
from towline_prove.load import LoadPlan
from towline_prove.referee import judge
from towline_prove.soak import KEEP_ALL, sent_by, start_load
from towline_prove.subject import GatewayRun, journal_arrivals

if TYPE_CHECKING:
    from pathlib import Path

    from towline_prove.referee import Verdict

__all__ = ["GatewaySoak", "GatewaySoakPlan"]

_PATIENCE_S = 600.0
_GUARANTEES = {1: Guarantee.AT_LEAST_ONCE, 2: Guarantee.EXACTLY_ONCE}


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySoakPlan:
    """How much is sent and how often the gateway dies.

    Attributes:
        messages: Numbered messages from 8 publishers.
        kills: SIGKILLs, spread over the run at random.
        rate: Messages a second; 0 for as fast as the broker takes them.
        qos: 2, where nothing may come twice; or 1.
        seed: Decides the moments.
    """

    messages: int = 100_000
    kills: int = 40
    rate: float = 2_000.0
    qos: int = 2
    seed: int = 1

    @classmethod
    def quick(cls) -> GatewaySoakPlan:
        """The short form that belongs into every test run."""
        return cls(messages=4_000, kills=4, rate=1_000.0)

    @property
    def guarantee(self) -> Guarantee:
        """What the run is held against."""
        return _GUARANTEES[self.qos]


@dataclass
class GatewaySoak:
    """Runs a plan in a directory.

    Attributes:
        plan: What to do.
        directory: For the broker, the state, the history and the logs.
        say: Gets a line for each kill.
    """

    plan: GatewaySoakPlan
    directory: Path
    say: Callable[[str], None] = lambda _: None

    def run(self) -> Verdict:
        """Publish and kill, take in what is left, and judge the journal against what the senders claim."""
        claims = self.directory / "claims"
        with Mosquitto(self.directory / "mosquitto", settings=KEEP_ALL) as broker:
            settings = self._settings(broker)
            with GatewayRun(settings, log=self.directory / "gateway.log") as run:
                run.start().online()
                load = start_load(self._load(broker), claims)
                try:
                    self._kill(run, claims)
                    load.wait(_PATIENCE_S)
                finally:
                    load.kill()
                self._settle(run, claims)
                run.stop()
        arrivals, _ = journal_arrivals(settings)
        return judge(read_history(claims), arrivals)

    def _settings(self, broker: Mosquitto) -> GatewaySettings:
        return GatewaySettings(
            name="soak",
            state_dir=self.directory / "gateway",
            brokers=(broker.uri,),  # type: ignore[arg-type] # the validator reads a URI
            subscriptions=(Filter("telemetry/#", qos=self.plan.qos),),
            guarantee=self.plan.guarantee,
        )

    def _load(self, broker: Mosquitto) -> LoadPlan:
        plan = self.plan
        return LoadPlan(port=broker.port, run="soak", messages=plan.messages, rate=plan.rate, qos=plan.qos)

    def _kill(self, run: GatewayRun, claims: Path) -> None:
        chance = random.Random(self.plan.seed)  # noqa: S311 - moments, not secrets
        moments = sorted(chance.uniform(0.01, 0.95) for _ in range(self.plan.kills))
        for number, moment in enumerate(moments, start=1):
            at = sent_by(claims, moment * self.plan.messages, _PATIENCE_S)
            run.kill()
            began = time.monotonic()
            run.start().online()
            self.say(f"kill {number:>3} at {at:>9,} sent   subscribed again after {time.monotonic() - began:4.1f} s")

    def _settle(self, run: GatewayRun, claims: Path) -> None:
        """Wait until the journal has grown by everything acknowledged, and for what may come beyond it."""
        acked = read_history(claims).count(SenderRecord.ACKED)
        run.until(acked, _PATIENCE_S)
        wait_for(lambda: not (run.status() or {"held": 1}).get("held"), 30)
