"""The outage test: four messages, something breaks, four more, it is mended, four more: twelve in Kafka.

As functions, so that tests, `prove` and people can run them in any size. Whatever is broken, the broker keeps taking
messages and the gateway, where it can be reached, keeps acknowledging.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from towline_prove.devstack.process import wait_for
from towline_prove.load import run_load
from towline_prove.rig import PATIENCE_S, dropped_by

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from contextlib import AbstractContextManager

    from towline_prove.account import RunAccount
    from towline_prove.rig import Rig

    Break = Callable[[Rig], AbstractContextManager[None]]

__all__ = ["BREAKS", "Steady", "outage", "steady_outage"]


@contextlib.contextmanager
def _between(rig: Rig, hurt: Callable[[Rig], object], mend: Callable[[Rig], object]) -> Iterator[None]:
    hurt(rig)
    try:
        yield
    finally:
        mend(rig)


def _both_refuse(rig: Rig) -> None:
    rig.mqtt_proxy.refuse()
    rig.kafka_proxy.refuse()


def _both_forward(rig: Rig) -> None:
    rig.kafka_proxy.forward()
    rig.mqtt_proxy.forward()


def _break(hurt: Callable[[Rig], object], mend: Callable[[Rig], object]) -> Break:
    return partial(_between, hurt=hurt, mend=mend)


#: What breaks, and how it is mended. A server that hangs (SIGSTOP, or a proxy that passes nothing on) keeps its
#: connections open and answers nobody; one that refuses lives, and nobody reaches it. The connection that is cut in the
#: middle of a packet from the broker heals by itself.
BREAKS: Mapping[str, Break] = {
    "kafka stopped": _break(lambda rig: rig.kafka.stop(), lambda rig: rig.kafka.start()),
    "kafka killed": _break(lambda rig: rig.kafka.kill(), lambda rig: rig.kafka.start()),
    "kafka hangs": _break(lambda rig: rig.kafka.pause(), lambda rig: rig.kafka.resume()),
    "kafka refuses": _break(lambda rig: rig.kafka_proxy.refuse(), lambda rig: rig.kafka_proxy.forward()),
    "mqtt refused": _break(lambda rig: rig.mqtt_proxy.refuse(), lambda rig: rig.mqtt_proxy.forward()),
    "mqtt hangs": _break(lambda rig: rig.mqtt_proxy.hang(), lambda rig: rig.mqtt_proxy.forward()),
    "mqtt cut in a packet": _break(lambda rig: rig.mqtt_proxy.cut_after(301), lambda _: None),
    "both gone": _break(_both_refuse, _both_forward),
}


def outage(rig: Rig, what: str, each: int = 4, *, held: float = 2.0) -> RunAccount:
    """Send a part, break something, send another, mend it, send the third; the account of all three.

    Args:
        rig: A warm rig.
        what: A name in `BREAKS`.
        each: Messages in each of the three parts.
        held: Seconds that the break lasts at least after its part was sent.
    """
    with rig.trial(what.replace(" ", "-")) as trial:
        trial.load(each)
        wait_for(lambda: trial.arrived() >= each, PATIENCE_S)
        with BREAKS[what](rig):
            trial.load(each)
            time.sleep(held)
        trial.load(each)
        return trial.account()


@dataclass(frozen=True, slots=True)
class Steady:
    """A steady publisher during an outage of Kafka.

    Attributes:
        account: Of the whole run.
        journaled_during: Messages that became durable while Kafka was away.
        sent_during: Messages sent in that time.
        dropped: What the broker says it dropped.
    """

    account: RunAccount
    journaled_during: int
    sent_during: int
    dropped: int


def steady_outage(rig: Rig, *, rate: float = 2_000.0, seconds: float = 60.0, what: str = "kafka refuses") -> Steady:
    """Publish at a rate while Kafka is away; the gateway must keep acknowledging, so that nothing queues in the broker.

    Args:
        rig: A warm rig, its broker with the default ``max_queued_messages``.
        rate: Messages a second.
        seconds: How long Kafka is away.
        what: How, a name in `BREAKS`.
    """
    with rig.trial("steady") as trial:
        trial.load(int(rate), rate=rate)
        dropped = dropped_by(rig.mosquitto)
        with BREAKS[what](rig):
            before = rig.journaled()
            plan, claims = trial.plan(int(rate * seconds), rate=rate, seconds=seconds * 2 + 30)
            sent = run_load(plan, claims)
            wait_for(lambda: rig.journaled() - before >= sent.acked, 10, 0.05)
            during = rig.journaled() - before
        account = trial.account()
        time.sleep(1.5)  # the broker's own counters are a second old
        return Steady(account, during, sent.attempted, dropped_by(rig.mosquitto) - dropped)
