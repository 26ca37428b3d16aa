"""What is counted of a line from Kafka to MQTT, and who says so.

    Kafka's offsets   how many records a batch can have had: markers of transactions take offsets too
    Spark             what it took of them
    the writer        what it left out, and how many dead letters there were
    the sink          how many rows the outbox had of each batch; what Kafka acknowledged of the dead letters
    the outbox        what came in, and what is done of it, by the messages' numbers
    the broker        its answers, PUBACK and PUBCOMP, as they were counted

None of them knows the others. The account is their sum, and says who disagrees with whom [I11].
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final, Self

from towline.bridge.lines.account import AccountWords, LineAccount, LineCounts, remark

__all__ = ["DownlinkCounts"]

#: ``undecided``: their ``where`` is null. ``expired``: not sent, their time was over. ``refused``: the broker does not
#: take them, the gateway keeps them apart.
_WORDS: Final = AccountWords(
    "taken",
    "delivered",
    "delivered",
    {
        "dead_lettered": "dead-lettered",
        "filtered": "filtered",
        "undecided": "where is null",
        "expired": "expired",
        "refused": "refused",
    },
)


@dataclass(frozen=True, slots=True)
class DownlinkCounts(LineCounts):
    """What the committed batches of a downlink held.

    Attributes:
        undecided: Their ``where`` is null.
        added: Made by the transform beyond what was taken.
        unseen: Batches that were committed while nobody listened: the bridge ended in between.
        behind: Offsets in Kafka, up to its high watermarks, that are not taken; control records of transactions are
            among them. None for not known.
        hidden: Of those, how many are behind an open transaction, where nobody gets them yet. None for not known.
        brought: Rows that the outbox had, by the sink's word.
        told: What the sink had said at the last report, of all batches since `since`; None before its first word.
        since: The first batch of those.
        unreported: Of `brought`, rows of batches that nobody reported.
        unlike: By how many rows the sink says more than Spark; below zero for fewer.
        beyond: Records that Spark took, and that Kafka's offsets have no room for.
        letters_off: Dead letters that Spark counted, and of which the sink knows nothing.
    """

    witness: ClassVar[str] = "outbox"

    undecided: int = 0
    added: int = 0
    unseen: int = 0
    behind: int | None = None
    hidden: int | None = None
    brought: int = 0
    told: int | None = None
    since: int | None = None
    unreported: int = 0
    unlike: int = 0
    beyond: int = 0
    letters_off: int = 0

    def add(self, report: Mapping[str, Any]) -> Self:
        """Count a committed batch; one that was counted before changes nothing.

        Args:
            report: ``query``, ``batch``, ``rows``, ``observed``; ``offsets``, how many Kafka's offsets are
                that the batch has, where known; ``brought``, what the sink says of the outbox: ``since``, and the rows
                ``upto`` the batch and of its ``own``; ``sink``, what it says of dead letters.
        """
        query, batch = str(report.get("query", "")), int(report["batch"])
        last = self.batch if query == self.query else -1
        if batch <= last:
            return self
        observed = report.get("observed") or {}
        rows = int(observed.get("rows", report.get("rows") or 0))
        transformed = int(observed.get("kept", rows)) - rows
        filtered = int(observed.get("filtered", 0)) + max(0, -transformed)
        dead, undecided = (int(observed.get(why, 0)) for why in ("dead_lettered", "undecided"))
        sent = rows + max(0, transformed) - filtered - undecided - dead
        heard = self._heard(report, sent, dead, whole=batch == last + 1)
        room = report.get("offsets")
        return replace(
            heard,
            query=query,
            beyond=self.beyond + (0 if room is None else max(0, rows - int(room))),
            batch=batch,
            rows=self.rows + rows,
            filtered=self.filtered + filtered,
            undecided=self.undecided + undecided,
            dead_lettered=self.dead_lettered + dead,
            added=self.added + max(0, transformed),
            unseen=self.unseen + batch - last - 1,
        )

    def _heard(self, report: Mapping[str, Any], sent: int, dead: int, *, whole: bool) -> Self:
        """With the word of the sink on the batches since the last report; Spark brought `sent` and `dead`."""
        counted = replace(self, told=None)  # sums that come after a report without them are of what it has counted
        if (said := report.get("brought")) is not None:
            goes_on = (
                self.told is not None and self.query == str(report.get("query", "")) and self.since == said["since"]
            )
            rows = int(said["upto"]) - int(self.told or 0) if goes_on else int(said["own"])
            silent = rows - sent if goes_on and not whole else 0
            counted = replace(
                counted,
                brought=self.brought + rows,
                told=int(said["upto"]),
                since=int(said["since"]),
                unreported=self.unreported + max(0, silent),
                unlike=self.unlike + rows - sent - max(0, silent),
            )
        heard = self.sink.hear(report, batch=True, counted=False)
        if heard is None:
            return replace(counted, sink=self.sink.silent(report))
        # A failure notice that Kafka refuses is a dead letter too, and Spark knows nothing of that.
        missing = max(0, dead - heard.sums.dead_lettered)
        return replace(counted, sink=heard.witness, letters_off=self.letters_off + missing)

    @property
    def sent(self) -> int:
        """Messages that must be in the outbox."""
        return self.rows + self.added - self.filtered - self.undecided - self.dead_lettered

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
        broken = "not exactly once" if degraded and gateway.get("guarantee") == "exactly_once" else ""
        known = [*self._disagreements(), *self._of_the_outbox(outbox)]
        uncounted = max(0, accepted - self.sent)
        return LineAccount(
            _WORDS,
            accepted + self.filtered + self.undecided + self.dead_lettered,
            delivered,
            waiting=accepted - delivered - expired - refused,
            parts={
                "dead_lettered": self.dead_lettered,
                "filtered": self.filtered,
                "undecided": self.undecided,
                "expired": expired,
                "refused": refused,
            },
            disagreements=known,
            uncounted=uncounted,
            broken=broken,
            notes=(
                remark((uncounted, "uncounted")),
                remark((degraded, "at QoS 1, not 2")),
                "",
            ),
            more={"behind": self.behind, "hidden": self.hidden, "degraded": degraded, "broken": broken},
        )

    def _disagreements(self) -> Iterator[str]:
        """Which witness says what, where they can't both be right."""
        if self.beyond:
            yield f"Kafka's offsets have room for {self.rows - self.beyond:,} records · Spark took {self.rows:,}"
        if self.unlike:
            sent = self.brought - self.unreported - self.unlike
            yield f"Spark says {sent:,} messages went to the outbox · the sink says it has {self.brought:,}"
        if self.letters_off:
            told = self.dead_lettered - self.letters_off
            yield f"Spark says {self.dead_lettered:,} dead letters · the sink says {told:,}"
        if not self.sink.accounts_for_all:
            yield f"Spark brought {self.sink.sums.given:,} dead letters and notices · the sink says {self.sink.kafka}"
        yield from self.sink.against_markers()

    def _of_the_outbox(self, outbox: Mapping[str, Any]) -> Iterator[str]:
        accepted, delivered, brought = int(outbox["accepted"]), int(outbox["delivered"]), self.sent + self.unreported
        if accepted < brought:
            theirs = f"the outbox knows {accepted:,}"
            yield f"Spark brought {brought:,} messages · {theirs}: was it restored from a copy?"
        answered = int(outbox["acknowledged"]) - int(outbox.get("taken_back", 0))
        sent = int(outbox.get("sent", 0))
        if delivered != answered + sent:
            more = f" + {sent:,} sent with QoS 0" if sent else ""
            yield f"the outbox says {delivered:,} delivered · the broker has acknowledged {answered:,}{more}"
