"""Checks of broker, Kafka and machine against the guarantees of a bridge file, run before the start.

A check is a code, a promise and a rule. A fact is probed once, when a rule needs it. No line can receive a probe
message, and nothing of a line is changed [I16].
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from towline.doctor import broker, kafka, machine
from towline.doctor.broker import BrokerProbe
from towline.doctor.cluster import ClusterProbe
from towline.doctor.inputs import Inputs, LineLoad, broker_targets
from towline.doctor.machine import MachineProbe
from towline.doctor.table import Finding, run_checks

#: Assumed bytes of a message if only a message rate is configured.
_TYPICAL_MESSAGE_BYTES: Final = 256


def examine(inputs: Inputs, report_progress: Callable[[str], None] = lambda _text: None) -> list[Finding]:
    """Run all checks; errors become findings.

    Args:
        inputs: Bridge and limits of the probes; its loads are filled in.
        report_progress: Called with the name of each step.
    """
    findings = examine_brokers(inputs, report_progress)
    report_progress("Kafka")
    findings += run_checks(kafka.CHECKS, ClusterProbe(inputs))
    report_progress("this machine")
    return [*findings, *run_checks(machine.CHECKS, MachineProbe(inputs))]


def examine_brokers(inputs: Inputs, report_progress: Callable[[str], None] = lambda _text: None) -> list[Finding]:
    """Run the checks of the MQTT brokers; see `examine`."""
    findings: list[Finding] = []
    with contextlib.ExitStack() as stack:
        broker_probes = [stack.enter_context(BrokerProbe(target, inputs)) for target in broker_targets(inputs.bridge)]
        report_progress("load of the lines")
        inputs.loads.update(_line_loads(inputs, broker_probes))
        for broker_probe in broker_probes:
            report_progress(f"broker {broker_probe.target.endpoint}")
            line_names = ", ".join(broker_probe.target.by_line) if len(broker_probes) > 1 else ""
            findings += run_checks(broker.CHECKS, broker_probe, line_names)
    return findings


def _line_loads(inputs: Inputs, broker_probes: Sequence[BrokerProbe]) -> dict[str, LineLoad]:
    """Return the load of each uplink: measured at its first broker that permits it, or ``--rate`` in equal parts."""
    with ThreadPoolExecutor(max_workers=len(broker_probes) or 1) as threads:
        measured_loads = [load for loads in [*threads.map(_measured_loads, broker_probes)][::-1] for load in loads]
    if inputs.rate is None:
        return dict(measured_loads)
    rate = inputs.rate / max(1, len(inputs.bridge.uplinks))
    source = f"--rate, taken as {_TYPICAL_MESSAGE_BYTES} bytes each"
    return {line.name: LineLoad(rate, rate * _TYPICAL_MESSAGE_BYTES, source) for line in inputs.bridge.uplinks}


def _measured_loads(broker_probe: BrokerProbe) -> list[tuple[str, LineLoad]]:
    """Return the measured loads at one broker; empty on an error, which its findings report."""
    with contextlib.suppress(Exception):
        loads = broker_probe.measured_loads.items()
        return [(name, load) for name, load in loads if isinstance(load, LineLoad) and load.messages_s]
    return []
