"""Examinations of real brokers."""

from __future__ import annotations

from towline.bridge.config.model import Bridge
from towline.doctor import examine_brokers
from towline.doctor.inputs import Inputs
from towline.doctor.table import Finding, Verdict
from towline_prove.devstack import Mosquitto


def examined(
    bridge: Bridge, broker: Mosquitto | None = None, *, rate: float | None = 200.0, probes: int = 60
) -> list[Finding]:
    """What is found about the brokers; with the broker's configuration where one is given."""
    conf = None if broker is None else broker.directory / "mosquitto.conf"
    return examine_brokers(Inputs(bridge, rate, 0.5, conf, probe_messages=probes))


def wrong(found: list[Finding]) -> set[tuple[str, Verdict]]:
    """The rows that do not leave a shell with 0."""
    return {(one.code, one.verdict) for one in found if one.verdict not in {Verdict.HOLDS, Verdict.LIMITED}}
