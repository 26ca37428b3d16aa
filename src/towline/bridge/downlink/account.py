"""The account of a line from Kafka to MQTT.

    Kafka's offsets   how many records a batch can have had: markers of transactions take offsets too
    Spark             what it took of them
    the writer        what it was given, what it left out, and how many dead letters there were
    the sink          what Kafka acknowledged of the dead letters
    the outbox        how many rows it had of each batch; what came in, and what is done of it, by the messages' numbers
    the broker        its answers, PUBACK and PUBCOMP, as they were counted

None of them knows the others. The account is their sum, and says who disagrees with whom [I11].
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from towline.bridge.lines.account import AccountWords, LineAccount, remark, sink_disagreements
from towline.bridge.lines.elsewhere import AWAY

if TYPE_CHECKING:
    from towline.bridge.lines.notes import LineNotes

__all__ = ["downlink_account"]

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


def downlink_account(notes: LineNotes, gateway: Mapping[str, Any]) -> LineAccount:
    """Bring the sources together.

    Args:
        notes: Read before the gateway was asked.
        gateway: With the counts of its ``outbox``; delivered are those that the broker has, with QoS 0 those that were
            sent.
    """
    outbox: Mapping[str, Any] = gateway["outbox"]
    accepted, delivered, expired, refused = (
        int(outbox[name]) for name in ("accepted", "delivered", "expired", "refused")
    )
    counts = notes.counts
    if AWAY in gateway:
        accepted = max(accepted, counts["sent"])  # its last answer is older than the last batch
    filtered = counts["filtered"] + notes.spark.get("removed", 0)
    # Published with QoS 2, and the broker took it as QoS 1, so it may be doubled.
    degraded = int(outbox.get("degraded", 0))
    broken = "not exactly once" if degraded and gateway.get("guarantee") == "exactly_once" else ""
    uncounted = max(0, accepted - counts["sent"])
    return LineAccount(
        _WORDS,
        accepted + filtered + counts["undecided"] + counts["unfit"],
        delivered,
        waiting=accepted - delivered - expired - refused,
        parts={
            "dead_lettered": counts["unfit"],
            "filtered": filtered,
            "undecided": counts["undecided"],
            "expired": expired,
            "refused": refused,
        },
        disagreements=[*_disagreements(notes), *_of_the_outbox(outbox, accepted, counts["sent"])],
        uncounted=uncounted,
        broken=broken,
        notes=(remark((uncounted, "uncounted")), remark((degraded, "at QoS 1, not 2")), ""),
        more={"degraded": degraded, "broken": broken},
    )


def _disagreements(notes: LineNotes) -> Iterator[str]:
    """Which source says what, where they can't both be right."""
    counts, spark = notes.counts, notes.spark
    taken = spark.get("taken", 0)
    if beyond := spark.get("beyond", 0):
        yield f"Kafka's offsets have room for {taken - beyond:,} records · Spark took {taken:,}"
    if unlike := spark.get("unlike", 0):
        yield f"Spark took {taken:,} records · the writer was given {taken - unlike:,} of them"
    sent = counts["records"] - counts["filtered"] - counts["undecided"] - counts["unfit"]
    if sent != counts["sent"]:
        yield f"the writer says {sent:,} messages went to the outbox · the outbox says it has {counts['sent']:,}"
    missing = max(counts["unlettered"], counts["unfit"] - counts["dead_lettered"])
    if missing > 0:
        yield f"the writer says {counts['unfit']:,} dead letters · the sink says {counts['unfit'] - missing:,}"
    yield from sink_disagreements(counts, f"the writer brought {counts['given']:,} dead letters and notices")


def _of_the_outbox(outbox: Mapping[str, Any], accepted: int, sent: int) -> Iterator[str]:
    delivered = int(outbox["delivered"])
    if accepted < sent:
        theirs = f"the outbox knows {accepted:,}"
        yield f"the writer brought {sent:,} messages · {theirs}: was it restored from a copy?"
    answered = int(outbox["acknowledged"]) - int(outbox.get("taken_back", 0))
    plain = int(outbox.get("sent", 0))
    if delivered != answered + plain:
        more = f" + {plain:,} sent with QoS 0" if plain else ""
        yield f"the outbox says {delivered:,} delivered · the broker has acknowledged {answered:,}{more}"
