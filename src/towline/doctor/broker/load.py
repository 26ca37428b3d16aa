"""What comes in on each line: asked of the broker with QoS 0, so that nobody waits for us, or told with ``--rate``."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Final

from towline.bridge.config.model import Line
from towline.doctor.broker.probes import own_name
from towline.doctor.broker.targets import Target, targets_of
from towline.doctor.broker.wire import OtherVersion, Wire, meet
from towline.doctor.case import Case, LineLoad
from towline.errors import TowlineError
from towline.mqtt.events import Filter
from towline.mqtt.filters import unshared
from towline.mqtt.stubs import Published, Stub

__all__ = ["TYPICAL_BYTES", "measured", "told"]

#: Bytes of a message where only the number of messages is told.
TYPICAL_BYTES: Final = 256
#: Seconds between two looks whether it is to end.
_TURN: Final = 0.2
#: Patience with a broker here; whether it answers at all is told by those who probe it.
_PATIENCE: Final = 5.0


def measured(case: Case) -> Case:
    """The case with the load of each uplink; a line on which nothing came, or whose broker is away, has none."""
    lines = case.bridge.uplinks
    if case.rate is not None:
        return case.loaded(told(case.rate, [line.name for line in lines]))
    targets = targets_of(case.bridge)
    if not lines:
        return case
    stopping = threading.Event()
    with ThreadPoolExecutor(max_workers=len(lines)) as threads:
        try:
            asked = [(line.name, threads.submit(_of_line, line, targets, case, stopping)) for line in lines]
            found = {name: one.result() for name, one in asked}
        finally:
            stopping.set()
    return case.loaded({name: load for name, load in found.items() if load is not None})


def told(rate: float, lines: Sequence[str]) -> dict[str, LineLoad]:
    """The load of each line where only that of the bridge is known: in equal parts.

    Args:
        rate: Messages a second of the whole bridge.
        lines: Names of its uplinks.
    """
    each = rate / max(1, len(lines))
    how = f"--rate, taken as {TYPICAL_BYTES} bytes each"
    return {name: LineLoad(each, each * TYPICAL_BYTES, how) for name in lines}


def _of_line(line: Line, targets: Sequence[Target], case: Case, stopping: threading.Event) -> LineLoad | None:
    """What comes at the first of its brokers that lets us see it."""
    for target in targets:
        mine = [one for one in target.gateways if one.name == line.name]
        if mine and not stopping.is_set():
            try:
                return _at(target, [each for one in mine for each in one.filters], case, stopping)
            except TowlineError:
                continue
    return None


def _at(target: Target, filters: Iterable[Filter], case: Case, stopping: threading.Event) -> LineLoad | None:
    with _connected(target, min(case.patience, _PATIENCE)) as wire:
        for one in _listening(filters, wire.level):
            wire.subscribe(one, _PATIENCE)
        wire.arrived.clear()  # retained messages that came with the subscription
        messages = size = 0
        begun = time.monotonic()
        while (left := begun + case.seconds - time.monotonic()) > 0 and not stopping.is_set():
            wire.wait(lambda: bool(wire.arrived), min(left, _TURN))
            live = [one for one in wire.arrived if not one.retain]
            messages += len(live)
            size += sum(map(_size, live))
            wire.arrived.clear()
        took = time.monotonic() - begun
    return LineLoad(messages / took, size / took, f"measured for {case.seconds:g} s") if messages else None


def _connected(target: Target, patience_s: float) -> Wire:
    options = target.options()
    failure: OtherVersion | None = None
    for level in options.levels:
        try:
            return meet(options, own_name(), level=level, patience_s=patience_s)
        except OtherVersion as error:
            failure = error
    assert failure is not None
    raise failure


def _listening(filters: Iterable[Filter], level: int) -> list[Filter]:
    """Each filter once, with QoS 0; a shared one as what it shares, so that no member misses a message."""
    patterns = dict.fromkeys(unshared(one.pattern) for one in filters)
    five = level == 5
    plain = Filter("#", qos=0, no_local=five, retain_as_published=False, retain_handling=2 if five else None)
    return [replace(plain, pattern=pattern) for pattern in patterns]


def _size(packet: Published) -> int:
    """Bytes of topic, payload and properties."""
    if isinstance(packet, Stub):
        return next((int(value) for name, value in packet.user_properties if name == "towline-size"), 0)
    pairs = packet.user_properties or ()
    texts = (packet.content_type, packet.response_topic)
    return (
        len(packet.topic.encode())
        + len(packet.payload)
        + len(packet.correlation_data or b"")
        + sum(len((text or "").encode()) for text in texts)
        + sum(len(name.encode()) + len(value.encode()) for name, value in pairs)
    )
