"""The account of a line: no message leaves the ledger without a counted reason [I11].

It is made when somebody asks, of sources that do not know each other: what the gateway says that it received, stored
and sent, and the notes in the checkpoint, of what each committed batch held and what Kafka or the outbox took of it.
What is counted differs by direction (`towline.bridge.uplink.account`, `towline.bridge.downlink.account`); the sum is
one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["AccountWords", "LineAccount", "remark", "sink_disagreements"]


@dataclass(frozen=True, slots=True)
class AccountWords:
    """What the parts of an account are called.

    Attributes:
        received: Key in JSON and word for what came into the line.
        carried_key: Key in JSON for what is where it was to go.
        carried: Word for it.
        parts: Key in JSON → word for everything else, in the order of the sum.
    """

    received: str
    carried_key: str
    carried: str
    parts: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class LineAccount:
    """Where every message of a line is.

    Attributes:
        words: Of its direction.
        received: What came into the line.
        carried: What is where it was to go.
        waiting: On disk, not yet carried.
        parts: What became of the others, by the keys of the words.
        disagreements: Which source says what, where they can't all be right; empty when the account adds up.
        uncounted: Messages of a batch in work, or of one that no note tells of.
        broken: What the guarantee promises and was not kept, or "".
        notes: Remarks on `received`, on `carried` and on `waiting`.
        more: What else stands in JSON.
        away: Gateways that do not answer, in words; their numbers are those of their last word.
        stopped: The line has stopped for good: what its sources say of it is not judged, unless they disagree.
    """

    words: AccountWords
    received: int
    carried: int
    waiting: int
    parts: Mapping[str, int]
    disagreements: Sequence[str] = ()
    uncounted: int = 0
    broken: str = ""
    notes: tuple[str, str, str] = ("", "", "")
    more: Mapping[str, Any] = field(default_factory=dict)
    away: tuple[str, ...] = ()
    stopped: bool = False

    @property
    def adds_up(self) -> bool | None:
        """Whether the parts are the whole, and the sources agree; None for not known [I19]."""
        return False if self.disagreements else None if self.stopped else True

    @property
    def why_not(self) -> str:
        """All disagreements in one line."""
        return "; ".join(self.disagreements)

    @property
    def arriving(self) -> int:
        """Received, not yet on disk and not acknowledged."""
        return self.parts.get("arriving", 0)

    @property
    def pending(self) -> int:
        """What is still to be carried."""
        return self.waiting + self.arriving

    def sentence(self) -> str:
        """The sum in one line, and whether it holds."""
        verdict = "adds up ✓" if self.adds_up else "not judged: the line has stopped"
        verdict = f"does not add up ✗ ({self.why_not})" if self.disagreements else verdict
        said = f"{self.sum()}   {verdict}" + (f", but is {self.broken} ✗" if self.broken else "")
        return "   ".join((said, *self.away))

    def sum(self) -> str:
        """The sum; parts that are zero are left out, but for the three that matter."""
        words, (on_received, on_carried, on_waiting) = self.words, self.notes
        others = (f"{word} {count:,}" for key, word in words.parts.items() if (count := self.parts[key]))
        carried = f"{words.carried} {self.carried:,}{on_carried}"
        whole = " + ".join([carried, *others, f"waiting {self.waiting:,}{on_waiting}"])
        return f"{words.received} {self.received:,}{on_received} = {whole}"

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            self.words.received: self.received,
            self.words.carried_key: self.carried,
            **self.parts,
            "waiting": self.waiting,
            "adds_up": self.adds_up,
            "why_not": self.why_not,
            "disagreements": list(self.disagreements),
            "uncounted": self.uncounted,
            **({"away": list(self.away)} if self.away else {}),
            **self.more,
        }


def remark(*counts: tuple[int, str]) -> str:
    """What is to be said of some of a number's messages, such as " (9 of them uncounted)"; empty for none."""
    said = [f"{count:,} of them {word}" for count, word in counts if count]
    return f" ({', '.join(said)})" if said else ""


def sink_disagreements(counts: Counter[str], given: str, others: str = "") -> Iterator[str]:
    """Where the sink to Kafka, or Kafka's markers, say something else than what was given to it.

    Args:
        counts: Its totals.
        given: What was given, in words.
        others: What did not come to it, in words.
    """
    said = f"{counts['acknowledged']:,} acknowledged by Kafka + {counts['dead_lettered']:,} dead letters"
    if counts["given"] != sum(counts[name] for name in ("acknowledged", "dead_lettered", "lost", "unknown")):
        lost = "".join(f" + {counts[name]:,} {name}" for name in ("lost", "unknown") if counts[name])
        yield f"{given} · the sink says {said}{lost}{others}"
    if counts["drift"] or counts["drift_dead"]:
        dead = counts["dead_lettered"] + counts["drift_dead"]
        rows = counts["acknowledged"] + counts["dead_lettered"] + counts["drift"]
        yield f"Kafka's markers say {rows:,} rows, {dead:,} of them dead letters · the sink says {said}"
