"""The account of a line from Kafka to MQTT: no record leaves the ledger without a counted reason [I11].

Two witnesses again: Spark counts what it took from Kafka and what it left out, the gateway what came into the outbox
and what became of it. Kafka's offsets are no witness: markers of transactions take offsets too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from towline.bridge.runtime.account import sum_of, unseen, verdict

__all__ = ["DownAccount", "DownCounts", "down_account"]


@dataclass(frozen=True, slots=True)
class DownCounts:
    """What the committed batches of a line held, over restarts.

    Attributes:
        query: Id of the query the batch number belongs to.
        batch: Last counted batch.
        rows: Records Spark took.
        filtered: Left out by ``where`` or the transform.
        dead_lettered: Sent to the dead-letter topic.
        added: Made by the transform beyond what was taken.
        unseen: Batches that were committed while nobody listened: the bridge ended in between.
        behind: Offsets in Kafka that were not taken at the last batch; markers of transactions are among them. None for
            not known.
    """

    query: str = ""
    batch: int = -1
    rows: int = 0
    filtered: int = 0
    dead_lettered: int = 0
    added: int = 0
    unseen: int = 0
    behind: int | None = None

    def add(self, progress: Mapping[str, Any]) -> Self:
        """Count a committed batch; one that was counted before changes nothing.

        Args:
            progress: A report of the driver: ``query``, ``batch``, ``rows``, ``behind``, ``observed``.
        """
        query, batch = str(progress.get("query", "")), int(progress["batch"])
        last = self.batch if query == self.query else -1
        told = progress.get("behind")
        behind = None if told is None else int(told)
        if batch <= last:
            return replace(self, behind=behind) if batch == last else self
        observed = progress.get("observed") or {}
        rows = int(observed.get("rows", progress.get("rows") or 0))
        made = int(observed.get("kept", rows)) - rows  # by the transform
        return replace(
            self,
            query=query,
            batch=batch,
            rows=self.rows + rows,
            filtered=self.filtered + int(observed.get("filtered", 0)) + max(0, -made),
            dead_lettered=self.dead_lettered + int(observed.get("dead_lettered", 0)),
            added=self.added + max(0, made),
            unseen=self.unseen + batch - last - 1,
            behind=behind,
        )

    @property
    def sent(self) -> int:
        """Messages that must be in the outbox."""
        return self.rows + self.added - self.filtered - self.dead_lettered

    @property
    def fallback(self) -> int:
        """The way down has no fallback topics."""
        return 0

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """From `as_json`; unknown keys are left out."""
        return cls(**{key: value for key, value in values.items() if key in cls.__dataclass_fields__})


@dataclass(frozen=True, slots=True)
class DownAccount:
    """Where every record of a line is.

    Attributes:
        taken: From Kafka, what a transform has added included.
        delivered: The broker has them; with QoS 0: they were sent.
        filtered: Left out by ``where`` or the transform.
        dead_lettered: In the dead-letter topic.
        expired: Not sent, their time was over.
        refused: Set aside by the gateway, the broker does not take them.
        waiting: In the outbox, not yet confirmed.
        behind: Offsets in Kafka that were not taken yet, about; None for not known.
        adds_up: Whether the parts are the whole, and both witnesses agree.
        why_not: What does not agree, or "".
        uncounted: Messages in the outbox that no report of Spark told of: a batch in work, or one that was committed
            while nobody listened.
        degraded: Part of `delivered`: published with QoS 2, and the broker took it as QoS 1, so it may be doubled.
        broken: What the guarantee promises and was not kept, or "".
    """

    taken: int
    delivered: int
    filtered: int
    dead_lettered: int
    expired: int
    refused: int
    waiting: int
    behind: int | None
    adds_up: bool
    why_not: str = ""
    uncounted: int = 0
    degraded: int = 0
    broken: str = ""

    @property
    def received(self) -> int:
        """What came into the line."""
        return self.taken

    @property
    def carried(self) -> int:
        """What is where it was to go."""
        return self.delivered

    @property
    def arriving(self) -> int:
        """Records are not received before they are taken."""
        return 0

    @property
    def words(self) -> tuple[str, str]:
        """What `received` and `carried` are called."""
        return "taken", "delivered"

    def sentence(self) -> str:
        """The sum in one line, and whether it holds."""
        return f"{self.sum()}   {verdict(self)}" + (f", but is {self.broken} ✗" if self.broken else "")

    def sum(self) -> str:
        """The sum; parts that are zero are left out, but for the three that matter."""
        rest = {
            "dead-lettered": self.dead_lettered,
            "filtered": self.filtered,
            "expired": self.expired,
            "refused": self.refused,
        }
        degraded = f" ({self.degraded:,} of them at QoS 1, not 2)" if self.degraded else ""
        parts = sum_of(f"delivered {self.delivered:,}{degraded}", rest, self.waiting)
        return f"taken {self.taken:,}{unseen(self.uncounted)} = {parts}"

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def down_account(gateway: Mapping[str, Any], counts: DownCounts) -> DownAccount:
    """Bring both witnesses together.

    Args:
        gateway: The answer to the action ``status``; its ``outbox`` counts.
        counts: What the bridge counted.
    """
    outbox: Mapping[str, Any] = gateway["outbox"]
    accepted, delivered, expired, refused = (
        int(outbox[name]) for name in ("accepted", "delivered", "expired", "refused")
    )
    degraded = int(outbox.get("degraded", 0))
    why_not = ""
    if accepted < counts.sent:
        why_not = f"Spark brought {counts.sent:,} messages, the outbox knows {accepted:,}: was it restored from a copy?"
    return DownAccount(
        taken=accepted + counts.filtered + counts.dead_lettered,
        delivered=delivered,
        filtered=counts.filtered,
        dead_lettered=counts.dead_lettered,
        expired=expired,
        refused=refused,
        waiting=accepted - delivered - expired - refused,
        behind=counts.behind,
        adds_up=not why_not,
        why_not=why_not,
        uncounted=max(0, accepted - counts.sent),
        degraded=degraded,
        broken="not exactly once" if degraded and gateway.get("guarantee") == "exactly_once" else "",
    )
