"""What is counted of a line from Kafka to MQTT.

Spark counts what it took from Kafka and what it left out, the gateway what came into the outbox and what became of it.
Kafka's offsets are no witness: markers of transactions take offsets too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final, Self

from towline.bridge.lines.account import AccountWords, LineAccount, LineCounts, unseen

__all__ = ["DownlinkCounts"]

#: ``expired``: not sent, their time was over. ``refused``: the broker does not take them, the gateway keeps them apart.
_WORDS: Final = AccountWords(
    "taken",
    "delivered",
    "delivered",
    {"dead_lettered": "dead-lettered", "filtered": "filtered", "expired": "expired", "refused": "refused"},
)


@dataclass(frozen=True, slots=True)
class DownlinkCounts(LineCounts):
    """What the committed batches of a downlink held.

    Attributes:
        added: Made by the transform beyond what was taken.
        unseen: Batches that were committed while nobody listened: the bridge ended in between.
        behind: Offsets in Kafka that were not taken at the last batch; markers of transactions are among them. None for
            not known.
    """

    witness: ClassVar[str] = "outbox"

    added: int = 0
    unseen: int = 0
    behind: int | None = None

    def add(self, report: Mapping[str, Any]) -> Self:
        """Count a committed batch; one that was counted before changes nothing.

        Args:
            report: ``query``, ``batch``, ``rows``, ``behind``, ``observed``.
        """
        query, batch = str(report.get("query", "")), int(report["batch"])
        last = self.batch if query == self.query else -1
        behind = None if report.get("behind") is None else int(report["behind"])
        if batch <= last:
            return replace(self, behind=behind) if batch == last else self
        observed = report.get("observed") or {}
        rows = int(observed.get("rows", report.get("rows") or 0))
        transformed = int(observed.get("kept", rows)) - rows
        return replace(
            self,
            query=query,
            batch=batch,
            rows=self.rows + rows,
            filtered=self.filtered + int(observed.get("filtered", 0)) + max(0, -transformed),
            dead_lettered=self.dead_lettered + int(observed.get("dead_lettered", 0)),
            added=self.added + max(0, transformed),
            unseen=self.unseen + batch - last - 1,
            behind=behind,
        )

    @property
    def sent(self) -> int:
        """Messages that must be in the outbox."""
        return self.rows + self.added - self.filtered - self.dead_lettered

    def account(self, gateway: Mapping[str, Any]) -> LineAccount:
        """Bring both witnesses together.

        Args:
            gateway: With the counts of its ``outbox``; delivered are those that the broker has, with QoS 0 those that
                were sent.
        """
        outbox: Mapping[str, Any] = gateway["outbox"]
        accepted, delivered, expired, refused = (
            int(outbox[name]) for name in ("accepted", "delivered", "expired", "refused")
        )
        # Published with QoS 2, and the broker took it as QoS 1, so it may be doubled.
        degraded = int(outbox.get("degraded", 0))
        why_not = ""
        if accepted < self.sent:
            theirs = f"the outbox knows {accepted:,}"
            why_not = f"Spark brought {self.sent:,} messages, {theirs}: was it restored from a copy?"
        uncounted = max(0, accepted - self.sent)
        broken = "not exactly once" if degraded and gateway.get("guarantee") == "exactly_once" else ""
        return LineAccount(
            _WORDS,
            accepted + self.filtered + self.dead_lettered,
            delivered,
            waiting=accepted - delivered - expired - refused,
            parts={
                "dead_lettered": self.dead_lettered,
                "filtered": self.filtered,
                "expired": expired,
                "refused": refused,
            },
            disagreements=[why_not] if why_not else [],
            uncounted=uncounted,
            broken=broken,
            notes=(unseen(uncounted), f" ({degraded:,} of them at QoS 1, not 2)" if degraded else "", ""),
            more={"behind": self.behind, "degraded": degraded, "broken": broken},
        )
