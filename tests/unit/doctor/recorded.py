"""Recorded facts: what a broker, Kafka or this machine was seen to be, in place of asking it."""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from mqtt5 import ConnAckPacket

from tests.unit.doctor.bridges import UP, bridge_of
from towline.doctor import broker
from towline.doctor.broker import Broker, KeptQueue
from towline.doctor.case import Case, LineLoad, targets_of
from towline.doctor.table import Answer, Check, Standing, answers
from towline.mosquitto_conf import read

__all__ = ["BROKEN", "HOLDS", "LIMITED", "SOUND_CONF", "UNKNOWN", "WARNS", "broker_of", "rows", "wrong"]

BROKEN, HOLDS, LIMITED, UNKNOWN, WARNS = (
    Standing.BROKEN,
    Standing.HOLDS,
    Standing.LIMITED,
    Standing.UNKNOWN,
    Standing.WARNS,
)
#: Of a Mosquitto that keeps what it acknowledges.
SOUND_CONF = "persistence true\nautosave_on_changes true\nautosave_interval 1\nmax_queued_messages 0\n"
_F = TypeVar("_F")


def broker_of(
    directory: Path,
    lines: str = UP,
    *,
    mqtt: str = "",
    conf: str | None = SOUND_CONF,
    rate: float | None = None,
    **facts: Any,
) -> Broker:
    """A sound broker as probes would have seen it, but for these facts; a load is taken as 100 bytes a message."""
    bridge = bridge_of(directory, "mqtt://127.0.0.1", lines, mqtt)
    loads = {} if rate is None else {line.name: LineLoad(rate, rate * 100, "--rate") for line in bridge.uplinks}
    [target] = targets_of(bridge)
    one = Broker(target, Case(bridge, rate, loads=loads))
    if conf is not None:
        own = f"persistence_location {directory}/\nuser {pwd.getpwuid(os.geteuid()).pw_name}\n"
        (directory / "m.conf").write_text(own + conf, encoding="utf-8")
    sound: Mapping[str, Any] = {
        "connack": ConnAckPacket(),
        "level": 5,
        "topic": "towline-doctor/x",
        "heard": {line.name: LineLoad(3.0, 300.0, "measured for 1 s") for line in bridge.uplinks},
        "queue": KeptQueue(present=True, accepted=1500, numbers=range(1500)),
        "window": (10, 11),
        "qos_2": True,
        "conf": None if conf is None else read(directory / "m.conf"),
    }
    vars(one).update({**sound, **facts})
    return one


def rows(checks: Iterable[Check[_F]], facts: _F) -> dict[str, Answer]:
    """The last row of each code."""
    return {one.code: one for one in answers(checks, facts)}


def wrong(one: Broker) -> set[tuple[str, Standing]]:
    """Rows of a broker that are not kept."""
    return {(row.code, row.verdict) for row in answers(broker.CHECKS, one) if row.verdict not in {HOLDS, LIMITED}}
