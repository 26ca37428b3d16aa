"""Comparison of sent and delivered messages: total-queue checker, order per key, and a story for each fault. Pure.

    lost         acknowledged to the sender, never delivered
    unexpected   delivered, never attempted (or not readable as what was sent)
    doubled      delivered more than once
    recovered    delivered, though the sender never learnt the outcome; legal
    late         the first copy of a number came after a higher number of the same device

The rules are those of Jepsen's `checker/total-queue`; order is checked on first copies only, because 1,2,3,2,3,4 is a
legal QoS 1 sequence after a resume [MQTT-4.6.0-1, non-normative comment of section 4.6].

`RunAccount` compares the verdict with the watermarks of the gateway and the account of the line.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from towline_prove.history import Claims, NumberedMessage, SenderClaim, decode_message

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Offenders of one kind that get a story; all of them are counted.
MAX_STORIES = 20


class Arrival(NamedTuple):
    """Kafka record as read by an independent reader."""

    partition: int
    offset: int
    key: bytes | None
    value: bytes | None


class FaultStory(NamedTuple):
    """Story of one faulty message: its position and its neighbours."""

    fault: str
    publisher: int
    number: int
    device: str
    text: str

    def __str__(self) -> str:
        return f"{self.fault}: publisher {self.publisher} number {self.number} ({self.device}): {self.text}"


@dataclass(slots=True)
class RunVerdict:
    """Verdict of the referee; counts of messages, except `copies` (records).

    Attributes:
        attempted: Sent at least once.
        acked: Acknowledged to the sender.
        refused: Answered with an error by the broker; allowed to be missing.
        delivered: Distinct messages found.
        copies: Records found that belong to this run.
        lost: Acknowledged and not found.
        missing: Attempted, outcome unknown, not found; legal.
        unexpected: Records that were not sent, or not with this content.
        doubled: Copies beyond the first.
        resent_doubled: Copies beyond the first of messages that the *sender* published again; at QoS 1 these are new
            messages to the broker [MQTT-4.3.2-5] and no fault of the bridge.
        recovered: Found, though the sender never learnt the outcome.
        late: First copies after a higher number of the same device.
        split_devices: Devices found in more than one partition.
        foreign_records: Records of other runs, in no other count.
        device_partitions: Device → Kafka partitions with its messages; more than one breaks order by itself.
        late_devices: Devices with a late message.
        stories: Stories of the first faulty messages.
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
    split_devices: int = 0
    foreign_records: int = 0
    device_partitions: dict[str, set[int]] = field(default_factory=dict)
    late_devices: set[str] = field(default_factory=set)
    stories: list[FaultStory] = field(default_factory=list)

    def ok(self, guarantee: str = "at_least_once", *, ordered: bool = True) -> bool:
        """Return whether the guarantee was kept.

        Args:
            guarantee: ``at_most_once`` forbids copies (losses are allowed), ``at_least_once`` forbids losses,
                ``exactly_once`` forbids both. All three forbid records that were not sent and, per device, disorder.
            ordered: True if first copies must be in order.
        """
        copies_allowed = guarantee == "at_least_once"
        losses_allowed = guarantee == "at_most_once"
        return (
            not self.unexpected
            and not (ordered and self.late)
            and not self.split_devices
            and (losses_allowed or not self.lost)
            and (copies_allowed or self.doubled == self.resent_doubled)
        )

    def adds_up(self) -> bool:
        """Return whether every attempt is counted once: delivered, lost, or missing."""
        copies = self.delivered + self.doubled
        return self.attempted == self.delivered + self.lost + self.missing and self.copies == copies

    def counts(self) -> dict[str, int]:
        """Return the counts for the record of a run (`towline_prove.evidence`)."""
        return {name: getattr(self, name) for name in ("attempted", "acked", "delivered", "lost", "doubled", "late")}

    @property
    def disordered(self) -> int:
        """Number of devices with a late message, or in more than one partition."""
        split = {device for device, partitions in self.device_partitions.items() if len(partitions) > 1}
        return len(self.late_devices | split)

    def summary_line(self) -> str:
        """Return one line: sent = in Kafka + lost + never confirmed, and further counts."""
        other_counts = [
            (self.missing, "never confirmed and not found"),
            (self.unexpected, "unexpected"),
            (self.recovered, "recovered"),
            (self.refused, "refused by the broker"),
        ]
        other_text = "".join(f"   {label} {count:,}" for count, label in other_counts if count)
        return (
            f"sent {self.attempted:,}   acknowledged {self.acked:,}   delivered {self.delivered:,}   "
            f"lost {self.lost:,}   doubled {self.doubled:,}   "
            f"out of order {self.disordered} of {len(self.device_partitions)} devices{other_text}"
        )


class _Referee:
    def __init__(self, claims: Sequence[Claims]) -> None:
        self.claims = {load_claims.run: load_claims for load_claims in claims}
        self.verdict = RunVerdict()
        #: Of each publisher of each run a byte for each number, 1 where it was found.
        self.arrived_flags = {
            (load.run, publisher): bytearray(len(flags)) for load in claims for publisher, flags in load.flags.items()
        }
        self.first_positions: dict[tuple[str, int, int], tuple[int, int]] = {}
        self.highest_numbers: dict[tuple[str, str], tuple[int, int, int]] = {}

    def add_story(self, fault_kind: str, message: NumberedMessage | None, text: str) -> None:
        if sum(story.fault == fault_kind for story in self.verdict.stories) < MAX_STORIES:
            identity = (message.publisher, message.number, message.device) if message else (-1, -1, "?")
            self.verdict.stories.append(FaultStory(fault_kind, *identity, text))

    def take_arrival(self, arrival: Arrival) -> None:
        message = decode_message(arrival.value)
        if message is not None and message.run not in self.claims:
            self.verdict.foreign_records += 1
        elif message is None or not self.claims[message.run].flags_of(message.publisher, message.number):
            self.verdict.unexpected += 1
            text = f"partition {arrival.partition} offset {arrival.offset}, value {(arrival.value or b'')[:60]!r}"
            self.add_story("unexpected", message, text)
        else:
            self._count_arrival(message, arrival)

    def _count_arrival(self, message: NumberedMessage, arrival: Arrival) -> None:
        verdict = self.verdict
        verdict.copies += 1
        verdict.device_partitions.setdefault(message.device, set()).add(arrival.partition)
        flags = self.arrived_flags[message.run, message.publisher]
        position = (arrival.partition, arrival.offset)
        if flags[message.number]:
            self._count_copy(message, position)
        else:
            verdict.delivered += 1
            self.first_positions[message.run, message.publisher, message.number] = position
            self._check_order(message, position)
        flags[message.number] = 1

    def _count_copy(self, message: NumberedMessage, position: tuple[int, int]) -> None:
        self.verdict.doubled += 1
        claim = self.claims[message.run].flags_of(message.publisher, message.number)
        self.verdict.resent_doubled += bool(claim & SenderClaim.RESENT)
        first = self.first_positions[message.run, message.publisher, message.number]
        text = f"first at partition {first[0]} offset {first[1]}, again at {position[0]} offset {position[1]}"
        self.add_story("doubled", message, text)

    def _check_order(self, message: NumberedMessage, position: tuple[int, int]) -> None:
        highest = self.highest_numbers.get((message.run, message.device))
        if highest is None or message.number > highest[0]:
            self.highest_numbers[message.run, message.device] = (message.number, *position)
            return
        self.verdict.late += 1
        self.verdict.late_devices.add(message.device)
        self.add_story(
            "late",
            message,
            f"partition {position[0]} offset {position[1]}, "
            f"after number {highest[0]} at partition {highest[1]} offset {highest[2]}",
        )

    def finish(self) -> RunVerdict:
        verdict = self.verdict
        for load_claims in self.claims.values():
            for publisher, flags in load_claims.flags.items():
                self._count_outcomes(load_claims.run, publisher, flags)
            verdict.attempted += load_claims.count(SenderClaim.ATTEMPTED)
            verdict.acked += load_claims.count(SenderClaim.ACKED)
            verdict.refused += load_claims.count(SenderClaim.REFUSED)
        verdict.split_devices = sum(len(partitions) > 1 for partitions in verdict.device_partitions.values())
        return verdict

    def _count_outcomes(self, run: str, publisher: int, flags: bytearray) -> None:
        """Count lost, missing and recovered messages."""
        for number, (flag, arrived) in enumerate(zip(flags, self.arrived_flags[run, publisher], strict=True)):
            if arrived:
                self.verdict.recovered += not SenderClaim(flag) & (SenderClaim.ACKED | SenderClaim.REFUSED)
            elif flag & SenderClaim.ACKED:
                self.verdict.lost += 1
                self._report_lost(run, publisher, number)
            elif flag:
                self.verdict.missing += 1

    def _report_lost(self, run: str, publisher: int, number: int) -> None:
        arrived = self.arrived_flags[run, publisher]
        neighbours = arrived.rfind(1, 0, number), arrived.find(1, number + 1)
        before, after = (self._describe(run, publisher, neighbour) for neighbour in neighbours)
        text = f"acknowledged, not found; the publisher's nearest found: {before} before, {after} after"
        self.add_story("lost", NumberedMessage(run, publisher, number, "", 0, 0), text)

    def _describe(self, run: str, publisher: int, number: int) -> str:
        if number < 0:
            return "none"
        partition, offset = self.first_positions[run, publisher, number]
        return f"{number} (partition {partition} offset {offset})"


def judge_arrivals(claims: Claims | Sequence[Claims], arrivals: Iterable[Arrival]) -> RunVerdict:
    """Compare claims of senders, of one run or several, with all records found, per partition in offset order."""
    referee = _Referee([claims] if isinstance(claims, Claims) else claims)
    for arrival in arrivals:
        referee.take_arrival(arrival)
    return referee.finish()


@dataclass(frozen=True, slots=True)
class Watermarks:
    """Watermarks reported by a gateway; counts of messages since its journal began [I1]."""

    received: int
    journaled: int
    committed: int

    @classmethod
    def from_status(cls, status: Mapping[str, Any]) -> Watermarks:
        """Return the three watermarks in a gateway's status."""
        return cls(*(int(status[name]) for name in ("received", "journaled", "committed")))

    def subtract(self, other: Watermarks) -> Watermarks:
        """Return the difference to earlier watermarks."""
        names = ("received", "journaled", "committed")
        return Watermarks(*(getattr(self, name) - getattr(other, name) for name in names))

    @property
    def uncommitted(self) -> int:
        """Number of durable messages that are not committed yet."""
        return self.journaled - self.committed

    @property
    def is_ordered(self) -> bool:
        """True for received >= journaled >= committed [I1]."""
        return self.received >= self.journaled >= self.committed >= 0


@dataclass(frozen=True, slots=True)
class RunAccount:
    """Account of one run against its promise.

    Attributes:
        notes: Faults during the run, in order.
        line_account: Account of the bridge's line since its first message, as in ``towline status --json``; None if
            there is none.
        ordered: True if order was promised; a message that a publisher sends again comes after later ones.
    """

    verdict: RunVerdict
    guarantee: str = "at_least_once"
    gateway: Watermarks | None = None
    notes: list[str] = field(default_factory=list)
    line_account: Mapping[str, Any] | None = None
    ordered: bool = True

    def problems(self) -> list[str]:
        """Return all broken promises and inconsistent counts; empty for a good run."""
        problems = []
        if not self.verdict.ok(self.guarantee, ordered=self.ordered):
            problems.append(f"{self.guarantee} was not kept")
        if not self.verdict.adds_up():
            problems.append("the referee's own sum does not add up")
        if self.gateway is not None:
            problems += self._gateway_problems(self.gateway)
        if self.line_account is not None:
            problems += [f"the line's account: {disagreement}" for disagreement in self.line_account["disagreements"]]
            if unknown_count := self.line_account["not_witnessed"] + self.line_account["left_out"]:
                problems.append(f"the line's account does not know what became of {unknown_count:,} messages")
        return problems

    def _gateway_problems(self, gateway: Watermarks) -> list[str]:
        problems = []
        if not gateway.is_ordered:
            problems.append(f"watermarks out of order: {gateway}")
        losses_expected = self.guarantee == "at_most_once" or self.verdict.lost
        if gateway.uncommitted == 0 and self.verdict.copies < gateway.journaled and not losses_expected:
            problems.append(
                f"{gateway.journaled:,} journaled and committed, only {self.verdict.copies:,} records found"
            )
        if gateway.journaled < self.verdict.delivered:
            problems.append(f"{self.verdict.delivered:,} delivered, but only {gateway.journaled:,} journaled")
        if not gateway.uncommitted and gateway.committed < self.verdict.acked - self.verdict.lost:
            problems.append(f"{self.verdict.acked:,} acknowledged to the senders, only {gateway.committed:,} committed")
        return problems

    @property
    def ok(self) -> bool:
        """True for a run without problems."""
        return not self.problems()

    def line(self) -> str:
        """Return the account in one line."""
        state = self.gateway
        text = ""
        if state is not None:
            text = f"   journaled {state.journaled:,}   committed {state.committed:,}   waiting {state.uncommitted:,}"
        return self.verdict.summary_line() + text
