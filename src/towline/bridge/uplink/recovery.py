"""Where the query of a line to Kafka begins, by its checkpoint and its gateway."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from towline.bridge.lines.evidence import Evidence, answer_of, read_checkpoint, status_of
from towline.bridge.lines.identity import UNKNOWN
from towline.gateway.belonging import is_other
from towline.guarantee import policy

if TYPE_CHECKING:
    from towline.bridge.config.model import Line
    from towline.bridge.lines.identity import Identity
    from towline.gateway.client import GatewayClient
    from towline.spark.offsets import JournalPlace

__all__ = ["count_below", "gather", "handed_out", "offset_of", "starting"]


def gather(line: Line, consumer: str, identity: Identity) -> Evidence:
    """Read a line's checkpoint and ask its gateway.

    Raises:
        GatewayUnreachable: TL-G01 when it does not answer for a while.
    """
    seen = read_checkpoint(line.checkpoint)
    offset = max(0, identity.start) if seen.planned is None else seen.planned_end
    status, incarnation = answer_of(
        line.gateway.state_dir, lambda gateway: (status_of(gateway), gateway.incarnation(offset))
    )
    return replace(
        seen,
        gateway_journal=str(status["journal"]),
        committed=int(status["consumers"].get(consumer, 0)),
        first=int(status["first"]),
        tip=int(status["end"]),
        written_by=incarnation,
    )


def starting(line: Line, identity: Identity, seen: Evidence) -> str:
    """The offset where a query without a checkpoint begins, as the source's option ``startingOffset``."""
    if _continues(identity, seen):
        return str(max(identity.start, seen.committed))
    # A line that begins again may have written the uncommitted rows already, and at_most_once doubles nothing.
    return "committed" if policy(line.guarantee).serves_again or identity.generation == 1 else "latest"


def offset_of(begin: str, seen: Evidence) -> int:
    """The offset that `starting` has named, when the gateway says what it said."""
    named = {"committed": max(seen.committed, seen.first), "latest": seen.tip}
    return named[begin] if begin in named else int(begin)


def count_below(gateway: GatewayClient, start: int, end: JournalPlace, qos: int) -> int:
    """How many rows of a range were received with a lower QoS; they are read for it.

    Args:
        gateway: That has them.
        start: Offset of the first row.
        end: The place after the last one.
        qos: The QoS.

    Raises:
        GatewayError: It has not got them.
    """
    rows = gateway.read(end.journal, start, end.offset, incarnation=end.incarnation)
    return sum(sum(one < qos for one in chunk.column("qos").to_pylist()) for chunk in rows)


def handed_out(identity: Identity, seen: Evidence) -> int:
    """Offset below which rows may have been handed to Kafka before the query's checkpoint began; 0 for none.

    Where the former checkpoint does not say it, because it is gone, an older copy, or of another journal: all there is.
    """
    if identity.handed == 0 or seen.planned is not None:
        return max(0, identity.handed)
    known = identity.handed != UNKNOWN and _continues(identity, seen) and seen.committed <= identity.handed
    return identity.handed if known else seen.tip


def _continues(identity: Identity, seen: Evidence) -> bool:
    """Whether the gateway's journal is the one in which the line is to begin."""
    same = not is_other(identity.incarnation, seen.written_by, identity.start, seen.first)
    return same and identity.journal == seen.gateway_journal and 0 <= identity.start <= seen.tip
