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

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from towline_prove.history import Claims, SenderRecord
from towline_prove.numbered import Numbered, decode

__all__ = ["Arrival", "DeviceTally", "Story", "Verdict", "judge"]

#: Offenders of one kind that get a story; all of them are counted.
STORIES = 20


class Arrival(NamedTuple):
    """One record as an independent reader read it.

    Attributes:
        partition: Kafka partition; 0 where the place has none.
        offset: Offset in it.
        key: Record key.
        value: Record value, the payload that was sent.
        timestamp_ms: Record timestamp, milliseconds since 1970 UTC; -1 when unknown.
    """

    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    timestamp_ms: int = -1


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
class DeviceTally:
    """The account of one device.

    Attributes:
        delivered: Distinct messages delivered.
        doubled: Copies beyond the first.
        late: First copies that came after a higher number.
        partitions: Kafka partitions it was found in; more than one breaks order by itself.
    """

    delivered: int = 0
    doubled: int = 0
    late: int = 0
    partitions: set[int] = field(default_factory=set)


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
        devices: The account of each device.
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
    devices: dict[str, DeviceTally] = field(default_factory=dict)
    stories: list[Story] = field(default_factory=list)

    def ok(self, guarantee: str = "at_least_once") -> bool:
        """Whether the promise was kept.

        Args:
            guarantee: ``at_most_once`` forbids copies (losses are allowed), ``at_least_once`` forbids losses,
                ``exactly_once`` forbids both. All three forbid records nobody sent and, per device, disorder.
        """
        copies_allowed = guarantee == "at_least_once"
        losses_allowed = guarantee == "at_most_once"
        return (
            not self.unexpected
            and not self.late
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

    def merge(self, other: Verdict) -> None:
        """Take in the verdict on another run that was read from the same records."""
        for name in _SUMMED:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for device, tally in other.devices.items():
            mine = self.devices.setdefault(device, DeviceTally())
            mine.delivered += tally.delivered
            mine.doubled += tally.doubled
            mine.late += tally.late
            mine.partitions |= tally.partitions
        self.split = sum(len(tally.partitions) > 1 for tally in self.devices.values())
        # What is foreign to both is what neither of them claims.
        self.foreign = max(0, self.foreign - other.copies)
        self.stories += other.stories

    def line(self) -> str:
        """One line: sent = in Kafka + lost + never confirmed, and what else was seen."""
        disordered = sum(bool(tally.late) or len(tally.partitions) > 1 for tally in self.devices.values())
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
            f"out of order {disordered} of {len(self.devices)} devices{rest}"
        )


_SUMMED = (
    *("attempted", "acked", "refused", "delivered", "copies", "lost", "missing"),
    *("doubled", "resent_doubled", "recovered", "late"),
)


class _Judge:
    def __init__(self, claims: Claims) -> None:
        self.claims = claims
        self.verdict = Verdict()
        self.seen: dict[int, bytearray] = {
            publisher: bytearray(len(flags)) for publisher, flags in claims.flags.items()
        }
        self.first_place: dict[tuple[int, int], tuple[int, int]] = {}
        self.highest: dict[str, tuple[int, int, int]] = {}

    def report(self, fault: str, message: Numbered | None, text: str) -> None:
        if sum(story.fault == fault for story in self.verdict.stories) < STORIES:
            publisher, number, device = (
                (message.publisher, message.number, message.device) if message else (-1, -1, "?")
            )
            self.verdict.stories.append(Story(fault, publisher, number, device, text))

    def take(self, arrival: Arrival) -> None:
        message = decode(arrival.value)
        if message is not None and message.run != self.claims.run:
            self.verdict.foreign += 1
        elif message is None or not self.claims.of(message.publisher, message.number):
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
        tally = verdict.devices.setdefault(message.device, DeviceTally())
        tally.partitions.add(arrival.partition)
        seen = self.seen[message.publisher]
        place = (arrival.partition, arrival.offset)
        if seen[message.number]:
            self._doubled(message, place, tally)
        else:
            verdict.delivered += 1
            tally.delivered += 1
            self.first_place[message.publisher, message.number] = place
            self._order(message, place, tally)
        seen[message.number] = 1

    def _doubled(self, message: Numbered, place: tuple[int, int], tally: DeviceTally) -> None:
        self.verdict.doubled += 1
        tally.doubled += 1
        claim = self.claims.of(message.publisher, message.number)
        self.verdict.resent_doubled += bool(claim & SenderRecord.RESENT)
        first = self.first_place[message.publisher, message.number]
        self.report(
            "doubled",
            message,
            f"first at partition {first[0]} offset {first[1]}, again at {place[0]} offset {place[1]}",
        )

    def _order(self, message: Numbered, place: tuple[int, int], tally: DeviceTally) -> None:
        highest = self.highest.get(message.device)
        if highest is None or message.number > highest[0]:
            self.highest[message.device] = (message.number, *place)
            return
        self.verdict.late += 1
        tally.late += 1
        self.report(
            "late",
            message,
            f"partition {place[0]} offset {place[1]}, "
            f"after number {highest[0]} at partition {highest[1]} offset {highest[2]}",
        )

    def absent(self) -> Iterator[tuple[int, int, SenderRecord]]:
        for publisher, flags in self.claims.flags.items():
            seen = self.seen[publisher]
            for number, flag in enumerate(flags):
                if flag and not seen[number]:
                    yield publisher, number, SenderRecord(flag)

    def close(self) -> Verdict:
        verdict = self.verdict
        for publisher, number, claim in self.absent():
            if claim & SenderRecord.ACKED:
                verdict.lost += 1
                self._report_lost(publisher, number)
            else:
                verdict.missing += 1
        verdict.attempted = self.claims.count(SenderRecord.ATTEMPTED)
        verdict.acked = self.claims.count(SenderRecord.ACKED)
        verdict.refused = self.claims.count(SenderRecord.REFUSED)
        verdict.recovered = self._recovered()
        verdict.split = sum(len(tally.partitions) > 1 for tally in verdict.devices.values())
        return verdict

    def _recovered(self) -> int:
        return sum(
            bool(seen) and not SenderRecord(flag) & (SenderRecord.ACKED | SenderRecord.REFUSED)
            for publisher, flags in self.claims.flags.items()
            for flag, seen in zip(flags, self.seen[publisher], strict=True)
        )

    def _report_lost(self, publisher: int, number: int) -> None:
        before = self._neighbour(publisher, number, -1)
        after = self._neighbour(publisher, number, +1)
        message = Numbered(self.claims.run, publisher, number, "", 0, 0)
        self.report(
            "lost", message, f"acknowledged, not found; the publisher's nearest found: {before} before, {after} after"
        )

    def _neighbour(self, publisher: int, number: int, step: int) -> str:
        seen = self.seen[publisher]
        at = seen.rfind(1, 0, number) if step < 0 else seen.find(1, number + 1)
        if at < 0:
            return "none"
        partition, offset = self.first_place[publisher, at]
        return f"{at} (partition {partition} offset {offset})"


def judge(claims: Claims, arrivals: Iterable[Arrival]) -> Verdict:
    """Compare what senders claim with what an independent reader read.

    Args:
        claims: The senders' history.
        arrivals: Everything found, per partition in offset order.
    """
    referee = _Judge(claims)
    for arrival in arrivals:
        referee.take(arrival)
    return referee.close()
