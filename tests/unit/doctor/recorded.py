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
from towline.doctor.broker import BrokerProbe, QueueProbe
from towline.doctor.inputs import Inputs, LineLoad, broker_targets
from towline.doctor.mosquitto import read_conf
from towline.doctor.table import Check, Finding, Verdict, run_checks

BROKEN, HOLDS, LIMITED, UNKNOWN, WARNS = (
    Verdict.BROKEN,
    Verdict.HOLDS,
    Verdict.LIMITED,
    Verdict.UNKNOWN,
    Verdict.WARNS,
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
) -> BrokerProbe:
    """A sound broker as probes would have seen it, but for these facts; a load is taken as 100 bytes a message."""
    bridge = bridge_of(directory, "mqtt://127.0.0.1", lines, mqtt)
    loads = {} if rate is None else {line.name: LineLoad(rate, rate * 100, "--rate") for line in bridge.uplinks}
    [target] = broker_targets(bridge)
    one = BrokerProbe(target, Inputs(bridge, rate, loads=loads))
    if conf is not None:
        own = f"persistence_location {directory}/\nuser {pwd.getpwuid(os.geteuid()).pw_name}\n"
        (directory / "m.conf").write_text(own + conf, encoding="utf-8")
    sound: Mapping[str, Any] = {
        "connack": ConnAckPacket(),
        "level": 5,
        "probe_topic": "towline-doctor/x",
        "measured_loads": {line.name: LineLoad(3.0, 300.0, "measured for 1 s") for line in bridge.uplinks},
        "queue_probe": QueueProbe(session_present=True, accepted_count=1500, numbers=range(1500)),
        "window_counts": (10, 11),
        "qos_2": True,
        "conf": None if conf is None else read_conf(directory / "m.conf"),
    }
    vars(one).update({**sound, **facts})
    return one


def rows(checks: Iterable[Check[_F]], facts: _F) -> dict[str, Finding]:
    """The last row of each code."""
    return {one.code: one for one in run_checks(checks, facts)}


def wrong(one: BrokerProbe) -> set[tuple[str, Verdict]]:
    """Rows of a broker that are not kept."""
    return {(row.code, row.verdict) for row in run_checks(broker.CHECKS, one) if row.verdict not in {HOLDS, LIMITED}}
