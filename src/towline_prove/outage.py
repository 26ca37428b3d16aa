"""The outage test: four messages, something breaks, four more, it is mended, four more: twelve in Kafka.

As functions, so that tests, `prove` and people can run them in any size. Whatever is broken, the broker keeps taking
messages and the gateway, where it can be reached, keeps acknowledging.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from towline_prove.devstack.process import wait_for
from towline_prove.load import run_load
from towline_prove.rig import PATIENCE_S, dropped_by

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from towline_prove.account import RunAccount
    from towline_prove.rig import Rig

__all__ = ["BREAKS", "Steady", "outage", "steady_outage"]


@contextlib.contextmanager
def kafka_stopped(rig: Rig) -> Iterator[None]:
    """Kafka is shut down and started again."""
    rig.kafka.stop()
    try:
        yield
    finally:
        rig.kafka.start()


@contextlib.contextmanager
def kafka_killed(rig: Rig) -> Iterator[None]:
    """Kafka is killed and started again."""
    rig.kafka.kill()
    try:
        yield
    finally:
        rig.kafka.start()


@contextlib.contextmanager
def kafka_hangs(rig: Rig) -> Iterator[None]:
    """Kafka is stopped by SIGSTOP: connections stay open, nobody answers."""
    rig.kafka.pause()
    try:
        yield
    finally:
        rig.kafka.resume()


@contextlib.contextmanager
def kafka_refuses(rig: Rig) -> Iterator[None]:
    """The way to Kafka is closed, Kafka itself lives."""
    rig.kafka_proxy.refuse()
    try:
        yield
    finally:
        rig.kafka_proxy.forward()


@contextlib.contextmanager
def mqtt_refused(rig: Rig) -> Iterator[None]:
    """The gateway's connection is cut and a new one refused."""
    rig.mqtt_proxy.refuse()
    try:
        yield
    finally:
        rig.mqtt_proxy.forward()


@contextlib.contextmanager
def mqtt_hangs(rig: Rig) -> Iterator[None]:
    """The gateway's connection stays open and carries nothing."""
    rig.mqtt_proxy.hang()
    try:
        yield
    finally:
        rig.mqtt_proxy.forward()


@contextlib.contextmanager
def mqtt_cut_in_a_packet(rig: Rig) -> Iterator[None]:
    """The gateway's connection is cut in the middle of a packet from the broker."""
    rig.mqtt_proxy.cut_after(301)
    yield


@contextlib.contextmanager
def both_gone(rig: Rig) -> Iterator[None]:
    """Neither the broker nor Kafka can be reached."""
    with mqtt_refused(rig), kafka_refuses(rig):
        yield


BREAKS: dict[str, Callable[[Rig], AbstractContextManager[None]]] = {
    "kafka stopped": kafka_stopped,
    "kafka killed": kafka_killed,
    "kafka hangs": kafka_hangs,
    "kafka refuses": kafka_refuses,
    "mqtt refused": mqtt_refused,
    "mqtt hangs": mqtt_hangs,
    "mqtt cut in a packet": mqtt_cut_in_a_packet,
    "both gone": both_gone,
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
            before = rig.watermarks()
            plan, claims = trial.plan(int(rate * seconds), rate=rate, seconds=seconds * 2 + 30)
            sent = run_load(plan, claims)
            wait_for(lambda: _journaled(rig) - (before.journaled if before else 0) >= sent.acked, 10)
            during = _journaled(rig) - (before.journaled if before else 0)
        account = trial.account()
        time.sleep(1.5)  # the broker's own counters are a second old
        return Steady(account, during, sent.attempted, dropped_by(rig.mosquitto) - dropped)


def _journaled(rig: Rig) -> int:
    time.sleep(0.05)
    marks = rig.watermarks()
    return marks.journaled if marks else 0
