"""What the surroundings of a bridge can keep of what its file promises: a table of checks, asked before the start.

A check is a code, a promise and a rule; facts are asked for when a rule needs them, and each once. Nothing that is made
here can be received by a line, and nothing of a line's is touched [I16].
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from towline.doctor import broker, kafka, machine
from towline.doctor.broker import Broker
from towline.doctor.case import Case, LineLoad, targets_of
from towline.doctor.cluster import Cluster
from towline.doctor.machine import ThisMachine
from towline.doctor.table import Answer, answers

#: Bytes of a message where only the number of messages is told.
_TYPICAL_BYTES: Final = 256


def examine(case: Case, say: Callable[[str], None] = lambda _text: None) -> list[Answer]:
    """All rows; nothing is raised for what is asked. The case gets its loads, `say` what is looked at next."""
    found = ask_brokers(case, say)
    say("Kafka")
    found += answers(kafka.CHECKS, Cluster(case))
    say("this machine")
    return [*found, *answers(machine.CHECKS, ThisMachine(case))]


def ask_brokers(case: Case, say: Callable[[str], None] = lambda _text: None) -> list[Answer]:
    """The same of the MQTT brokers alone."""
    found: list[Answer] = []
    with contextlib.ExitStack() as stack:
        brokers = [stack.enter_context(Broker(target, case)) for target in targets_of(case.bridge)]
        say("what the lines receive")
        case.loads.update(_loads(case, brokers))
        for one in brokers:
            say(f"broker {one.target.endpoint}")
            found += answers(broker.CHECKS, one, one.target.names)
    return found


def _loads(case: Case, brokers: Sequence[Broker]) -> dict[str, LineLoad]:
    """What comes in on each uplink, at the first of its brokers that lets us see it; or as told, in equal parts."""
    with ThreadPoolExecutor(max_workers=len(brokers) or 1) as threads:
        heard = [load for one in [*threads.map(_heard, brokers)][::-1] for load in one]
    if case.rate is None:
        return dict(heard)
    each = case.rate / max(1, len(case.bridge.uplinks))
    told = LineLoad(each, each * _TYPICAL_BYTES, f"--rate, taken as {_TYPICAL_BYTES} bytes each")
    return {line.name: told for line in case.bridge.uplinks}


def _heard(one: Broker) -> list[tuple[str, LineLoad]]:
    """What came in meanwhile at one broker; why nothing could, its rows tell."""
    with contextlib.suppress(Exception):
        return [(name, it) for name, it in one.heard.items() if isinstance(it, LineLoad) and it.messages_s]
    return []
