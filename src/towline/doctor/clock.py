"""The examiner of the clock: against Kafka's, against what disciplines it, and against itself.

A record of an uplink has this machine's time (``received_at``); a topic of CreateTime takes none that is far from the
broker's, and deletes by it. MQTT has no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from towline.doctor import host
from towline.doctor.findings import DoctorQuestion, Finding, Standing
from towline.doctor.kafka.brokerclock import Skews, skews
from towline.doctor.kafka.flaws import days
from towline.doctor.kafka.wanted import PROBE, TopicRole, wanted
from towline.errors import TowlineError
from towline.kafka import admin

if TYPE_CHECKING:
    from towline.doctor.case import Case

__all__ = ["ClockSeen", "examine", "judge"]

#: Two machines that are synchronised differ by some milliseconds; what is beyond this is not.
_NEAR_S, _FAR_S = 1.0, 5.0
#: A clock that went another way than the machine's own count of seconds by more than this was set.
_JUMP_S: Final = 0.5
_CLOCK: Final = DoctorQuestion("TL-D46", "clock")
_SYNCHRONISE: Final = "Let it be synchronised: timedatectl set-ntp true, or chrony."


@dataclass(frozen=True, kw_only=True)
class ClockSeen:
    """What was seen.

    Attributes:
        synchronised: Whether something disciplines this machine's clock; None where it can't be told.
        broker: How far ahead of each broker's it is; empty where that could not be measured.
        jumped: Seconds that it was set by while doctor looked.
        one_machine: All brokers are on this machine: one clock for both.
        ahead_ms: Least message.timestamp.after.max.ms of the records' topics; None for no limit, or not known.
        behind_ms: Least message.timestamp.before.max.ms of them.
    """

    synchronised: bool | None
    broker: Skews
    jumped: float = 0.0
    one_machine: bool = False
    ahead_ms: int | None = None
    behind_ms: int | None = None


def examine(
    case: Case,
    measure: Callable[[Case], Skews] = skews,
    synchronised: Callable[[], bool | None] = host.synchronised,
) -> Iterator[Finding]:
    """Look at this machine's clock (`towline.doctor.case.Examiner`).

    Args:
        case: Whose Kafka, and the clocks.
        measure: Compares with the brokers' clocks. Injected in tests.
        synchronised: Asks the kernel. Injected in tests.
    """
    began = case.now() - case.monotonic()
    broker = measure(case)
    ahead, behind = _limits(case) if broker.listed is not None else (None, None)
    jumped = case.now() - case.monotonic() - began
    if broker.left:
        because = f"doctor made the topic {broker.left} to read Kafka's time, and may not remove it"
        mend = f"Remove it, or grant Delete on topics that begin with {PROBE}."
        yield _CLOCK.answer(Standing.WARNS, because, "somebody removes it", mend)
    yield judge(
        ClockSeen(
            synchronised=synchronised(),
            broker=broker,
            jumped=jumped,
            one_machine=broker.local,
            ahead_ms=ahead,
            behind_ms=behind,
        )
    )


def _limits(case: Case) -> tuple[int | None, int | None]:
    """What the topics of records take, where Kafka tells it."""
    names = [one.name for one in wanted(case.bridge, ()) if one.role is TopicRole.RECORDS]
    try:
        facts = admin.topic_facts(case.bridge.kafka.client(), names, case.patience).values()
    except TowlineError:
        return None, None
    ahead = [one.after_ms for one in facts if one.after_ms is not None]
    behind = [one.before_ms for one in facts if one.before_ms is not None]
    return min(ahead, default=None), min(behind, default=None)


def judge(seen: ClockSeen) -> Finding:
    """TL-D46: the worst of what was seen of the clock."""
    worst = max(seen.broker.by_broker.values(), key=abs, default=None)
    told = "" if worst is None else f"this machine's clock is {_apart(worst)} Kafka's; "
    for verdict, because, until in _faults(seen, worst):
        return _CLOCK.answer(verdict, f"{told}{because}", until, _SYNCHRONISE)
    if seen.one_machine:
        return _CLOCK.answer(Standing.HOLDS, f"{told}Kafka is on this machine: one clock for both")
    if worst is None:
        until = "the brokers' clocks are wrong: they were not compared"
        because = f"this machine's clock is synchronised; {seen.broker.why}"
        return _CLOCK.answer(Standing.LIMITED, because, until)
    return _CLOCK.answer(Standing.HOLDS, f"{told}something synchronises it")


def _faults(seen: ClockSeen, worst: float | None) -> Iterator[tuple[Standing, str, str]]:
    """What is wrong, the worst first."""
    if worst is not None:
        for name, limit, apart in (
            ("message.timestamp.after.max.ms", seen.ahead_ms, worst),
            ("message.timestamp.before.max.ms", seen.behind_ms, -worst),
        ):
            if limit is not None and apart * 1000 >= limit:
                until = "now: Kafka refuses the time of every record (INVALID_TIMESTAMP)"
                yield Standing.BROKEN, f"{name} = {limit:,}", until
        if abs(worst) > _FAR_S:
            yield Standing.WARNS, "records have this machine's time", "the two differ by more than Kafka takes"
    if abs(seen.jumped) > _JUMP_S:
        because = f"it was set by {_span(seen.jumped)} while doctor looked"
        yield Standing.WARNS, because, "times of records go back, and time-outs end early or late"
    if seen.one_machine:
        return
    if seen.synchronised is False:
        yield Standing.WARNS, "nothing synchronises it (adjtimex: STA_UNSYNC)", "it drifts, by seconds a day"
    elif seen.synchronised is None and worst is None:
        yield Standing.UNKNOWN, f"whether something synchronises this clock can't be told; {seen.broker.why}", ""


def _apart(seconds: float) -> str:
    if abs(seconds) < _NEAR_S:
        return "the same as"
    return f"{_span(seconds)} {'ahead of' if seconds > 0 else 'behind'}"


def _span(seconds: float) -> str:
    return f"{abs(seconds) * 1000:,.0f} ms" if abs(seconds) < 1 else days(abs(seconds) * 1000)
