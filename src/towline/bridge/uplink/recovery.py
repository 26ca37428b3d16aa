"""Where the query of a line to Kafka begins, by its checkpoint and its gateway."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from towline.bridge.lines.evidence import Evidence, answer_of, read_checkpoint, status_of
from towline.errors import GatewayError
from towline.gateway.belonging import is_other
from towline.gateway.launch import discover
from towline.guarantee import policy

if TYPE_CHECKING:
    from towline.bridge.config.model import Line
    from towline.bridge.lines.identity import Identity

__all__ = ["gather", "offset_of", "oldest_waiting", "starting"]


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


def _continues(identity: Identity, seen: Evidence) -> bool:
    """Whether the gateway's journal is the one in which the line is to begin."""
    same = not is_other(identity.incarnation, seen.written_by, identity.start, seen.first)
    return same and identity.journal == seen.gateway_journal and 0 <= identity.start <= seen.tip


def oldest_waiting(line: Line) -> float | None:
    """When the oldest message came that waits in the line's journal, in seconds since 1970; None where none waits.

    0 where that is not known: of gateways elsewhere, and of one that does not answer.
    """
    client = None if line.gateways else discover(line.gateway.state_dir)
    if client is None:
        return 0.0
    with client:
        try:
            oldest: float | None = status_of(client).get("oldest")
        except GatewayError:
            return 0.0
    return oldest
