"""Who got what: the total-queue checker, order per key, and the story of each offender. Pure.

    lost         acknowledged to the sender, never delivered
    unexpected   delivered, never attempted (or not readable as what was sent)
    doubled      delivered more than once
    recovered    delivered, though the sender never learnt the outcome; legal
    late         the first copy of a number came after a higher number of the same device

The rules are those of Jepsen's `checker/total-queue`; order is judged on first copies only, because 1,2,3,2,3,4 is a
legal QoS 1 sequence after a resume [MQTT-4.6.0-1, non-normative comment of section 4.6].
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from towline_prove.history import Claims, SenderRecord
from towline_prove.numbered import Numbered, decode

#: Offenders of one kind that get a story; all of them are counted.
STORIES = 20


class Arrival(NamedTuple):
    """One record as an independent reader read it.

    Attributes:
        partition: Kafka partition; 0 where the place has none.
        offset: Offset in it.
        key: Record key.
        value: Record value, the payload that was sent.
    """

    partition: int
    offset: int
    key: bytes | None
    value: bytes | None


class Story(NamedTuple):
    """One offender: what happened to it and what stood beside it.

    Attributes:
        fault: ``lost``, ``unexpected``, ``doubled`` or ``late``.
        publisher: Its publisher; -1 when unreadable.
        number: Its number; -1 when unreadable.
        device: Its device.
        text: Where it is or should be, and its neighbours.
    """

    fault: str
    publisher: int
    number: int
    device: str
    text: str

    def __str__(self) -> str:
        return f"{self.fault}: publisher {self.publisher} number {self.number} ({self.device}): {self.text}"


@dataclass(slots=True)
class Verdict:
    """What the referee found; counts of messages, except `copies` (records).

    Attributes:
        attempted: Sent at least once.
        acked: Acknowledged to the sender.
        refused: Answered with an error by the broker; not claimed by anybody.
        delivered: Distinct messages found.
        copies: Records found that belong to this run.
        lost: Acknowledged and not found.
        missing: Attempted, outcome unknown, not found; legal.
        unexpected: Records nobody sent, or not as they were sent.
        doubled: Copies beyond the first.
        resent_doubled: Copies beyond the first of messages the *sender* published again; at QoS 1 these are new
            messages to the broker [MQTT-4.3.2-5] and no fault of what comes behind it.
        recovered: Found, though the sender never learnt the outcome.
        late: First copies after a higher number of the same device.
        split: Devices found in more than one partition.
        foreign: Records of other runs, left out of every other count.
        devices: Of each device the Kafka partitions it was found in; more than one breaks order by itself.
        late_devices: Devices with a late message.
        stories: The first offenders.
    """

    attempted: int = 0
    acked: int = 0
    refused: int = 0
    delivered: int = 0
    copies: int = 0
    lost: int = 0
    missing: int = 0
    unexpected: int = 0
    doubled: int = 0
    resent_doubled: int = 0
    recovered: int = 0
    late: int = 0
    split: int = 0
    foreign: int = 0
    devices: dict[str, set[int]] = field(default_factory=dict)
    late_devices: set[str] = field(default_factory=set)
    stories: list[Story] = field(default_factory=list)

    def ok(self, guarantee: str = "at_least_once", *, ordered: bool = True) -> bool:
        """Whether the promise was kept.

        Args:
            guarantee: ``at_most_once`` forbids copies (losses are allowed), ``at_least_once`` forbids losses,
                ``exactly_once`` forbids both. All three forbid records nobody sent and, per device, disorder.
            ordered: Whether first copies have to come in order.
        """
        copies_allowed = guarantee == "at_least_once"
        losses_allowed = guarantee == "at_most_once"
        return (
            not self.unexpected
            and not (ordered and self.late)
            and not self.split
            and (losses_allowed or not self.lost)
            and (copies_allowed or self.doubled == self.resent_doubled)
        )

    def adds_up(self) -> bool:
        """Whether every attempt is accounted for once: delivered, lost, or missing."""
        return (
            self.attempted == self.delivered + self.lost + self.missing and self.copies == self.delivered + self.doubled
        )

    def counts(self) -> dict[str, int]:
        """What is said of a run in its record (`towline_prove.evidence`)."""
        return {name: getattr(self, name) for name in ("attempted", "acked", "delivered", "lost", "doubled", "late")}

    @property
    def disordered(self) -> int:
        """Devices with a late message, or in more than one partition."""
        return len(self.late_devices | {device for device, places in self.devices.items() if len(places) > 1})

    def line(self) -> str:
        """One line: sent = in Kafka + lost + never confirmed, and what else was seen."""
        extras = [
            (self.missing, "never confirmed and not found"),
            (self.unexpected, "unexpected"),
            (self.recovered, "recovered"),
            (self.refused, "refused by the broker"),
        ]
        rest = "".join(f"   {label} {count:,}" for count, label in extras if count)
        return (
            f"sent {self.attempted:,}   acknowledged {self.acked:,}   delivered {self.delivered:,}   "
            f"lost {self.lost:,}   doubled {self.doubled:,}   "
            f"out of order {self.disordered} of {len(self.devices)} devices{rest}"
        )


class _Judge:
    def __init__(self, claims: Sequence[Claims]) -> None:
        self.claims = {load.run: load for load in claims}
        self.verdict = Verdict()
        #: Of each publisher of each run a byte for each number, 1 where it was found.
        self.seen = {
            (load.run, publisher): bytearray(len(flags)) for load in claims for publisher, flags in load.flags.items()
        }
        self.first_place: dict[tuple[str, int, int], tuple[int, int]] = {}
        self.highest: dict[tuple[str, str], tuple[int, int, int]] = {}

    def report(self, fault: str, message: Numbered | None, text: str) -> None:
        if sum(story.fault == fault for story in self.verdict.stories) < STORIES:
            publisher, number, device = (
                (message.publisher, message.number, message.device) if message else (-1, -1, "?")
            )
            self.verdict.stories.append(Story(fault, publisher, number, device, text))

    def take(self, arrival: Arrival) -> None:
        message = decode(arrival.value)
        if message is not None and message.run not in self.claims:
            self.verdict.foreign += 1
        elif message is None or not self.claims[message.run].of(message.publisher, message.number):
            self.verdict.unexpected += 1
            sample = (arrival.value or b"")[:60]
            self.report(
                "unexpected", message, f"partition {arrival.partition} offset {arrival.offset}, value {sample!r}"
            )
        else:
            self._count(message, arrival)

    def _count(self, message: Numbered, arrival: Arrival) -> None:
        verdict = self.verdict
        verdict.copies += 1
        verdict.devices.setdefault(message.device, set()).add(arrival.partition)
        seen = self.seen[message.run, message.publisher]
        place = (arrival.partition, arrival.offset)
        if seen[message.number]:
            self._doubled(message, place)
        else:
            verdict.delivered += 1
            self.first_place[message.run, message.publisher, message.number] = place
            self._order(message, place)
        seen[message.number] = 1

    def _doubled(self, message: Numbered, place: tuple[int, int]) -> None:
        self.verdict.doubled += 1
        claim = self.claims[message.run].of(message.publisher, message.number)
        self.verdict.resent_doubled += bool(claim & SenderRecord.RESENT)
        first = self.first_place[message.run, message.publisher, message.number]
        self.report(
            "doubled",
            message,
            f"first at partition {first[0]} offset {first[1]}, again at {place[0]} offset {place[1]}",
        )

    def _order(self, message: Numbered, place: tuple[int, int]) -> None:
        highest = self.highest.get((message.run, message.device))
        if highest is None or message.number > highest[0]:
            self.highest[message.run, message.device] = (message.number, *place)
            return
        self.verdict.late += 1
        self.verdict.late_devices.add(message.device)
        self.report(
            "late",
            message,
            f"partition {place[0]} offset {place[1]}, "
            f"after number {highest[0]} at partition {highest[1]} offset {highest[2]}",
        )

    def close(self) -> Verdict:
        verdict = self.verdict
        for load in self.claims.values():
            for publisher, flags in load.flags.items():
                self._close(load.run, publisher, flags)
            verdict.attempted += load.count(SenderRecord.ATTEMPTED)
            verdict.acked += load.count(SenderRecord.ACKED)
            verdict.refused += load.count(SenderRecord.REFUSED)
        verdict.split = sum(len(places) > 1 for places in verdict.devices.values())
        return verdict

    def _close(self, run: str, publisher: int, flags: bytearray) -> None:
        """Count what was not found, and what was found though nobody had answered."""
        for number, (flag, found) in enumerate(zip(flags, self.seen[run, publisher], strict=True)):
            if found:
                self.verdict.recovered += not SenderRecord(flag) & (SenderRecord.ACKED | SenderRecord.REFUSED)
            elif flag & SenderRecord.ACKED:
                self.verdict.lost += 1
                self._report_lost(run, publisher, number)
            elif flag:
                self.verdict.missing += 1

    def _report_lost(self, run: str, publisher: int, number: int) -> None:
        seen = self.seen[run, publisher]
        neighbours = seen.rfind(1, 0, number), seen.find(1, number + 1)
        before, after = (self._place(run, publisher, neighbour) for neighbour in neighbours)
        text = f"acknowledged, not found; the publisher's nearest found: {before} before, {after} after"
        self.report("lost", Numbered(run, publisher, number, "", 0, 0), text)

    def _place(self, run: str, publisher: int, number: int) -> str:
        if number < 0:
            return "none"
        partition, offset = self.first_place[run, publisher, number]
        return f"{number} (partition {partition} offset {offset})"


def judge(claims: Claims | Sequence[Claims], arrivals: Iterable[Arrival]) -> Verdict:
    """Compare what senders claim with what an independent reader read.

    Args:
        claims: The senders' history; or those of several runs.
        arrivals: Everything found, per partition in offset order.
    """
    referee = _Judge([claims] if isinstance(claims, Claims) else claims)
    for arrival in arrivals:
        referee.take(arrival)
    return referee.close()
