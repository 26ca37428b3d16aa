"""How much of each gateway goes into one micro-batch. Pure.

The limits hold for the batch, and are shared max-min: whoever has little waiting gets all of it, the others share what
is left evenly. So messages of a quiet gateway never wait behind another's backlog, as they would by shares in
proportion to it, and nobody gets more than waits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Admitted", "Offer", "admit", "fitting", "shares"]


@dataclass(frozen=True, slots=True)
class Offer:
    """What waits at one gateway, as far as the whole batch could take it.

    Attributes:
        rows: At least 0.
        size: Their bytes as they lie in its journal; at least 0.
    """

    rows: int
    size: int


@dataclass(frozen=True, slots=True)
class Admitted:
    """What a batch takes of one gateway: at most so many rows, and at most so many bytes; nothing where one is 0.

    Attributes:
        rows: At most what was offered.
        size: At most what was offered; None where the rows say it already.
    """

    rows: int
    size: int | None = None


def shares(waiting: Sequence[int], limit: int | None, turn: int = 0) -> list[int]:
    """Share a limit max-min: as equal as can be, and nobody more than waits.

    Args:
        waiting: What waits at each, at least 0.
        limit: Of all together; None for none.
        turn: Who gets the first of what can't be divided, a number from 0; one that grows with each batch lets nobody
            starve, however small the limit is.

    Returns:
        A share for each. Together they are the limit, or all that waits.
    """
    if limit is None or sum(waiting) <= limit:
        return list(waiting)
    given, left, count = [0] * len(waiting), limit, len(waiting)
    ascending = sorted(range(count), key=lambda one: waiting[one])
    for done, one in enumerate(ascending):
        even = left // (count - done)
        if waiting[one] > even:  # and so have all after it
            rest = sorted(ascending[done:], key=lambda other: (other - turn) % count)
            extra = left - even * len(rest)
            for place, other in enumerate(rest):
                given[other] = even + (place < extra)
            break
        given[one] = waiting[one]
        left -= waiting[one]
    return given


def admit(offers: Sequence[Offer], max_rows: int | None, max_bytes: int | None, turn: int = 0) -> list[Admitted]:
    """Share both limits of a batch among gateways, rows first: their bytes then share the other limit.

    Args:
        offers: What waits at each.
        max_rows: Most rows of the batch; None for no limit.
        max_bytes: Most bytes of the batch; None for no limit.
        turn: As `shares`.
    """
    rows = shares([offer.rows for offer in offers], max_rows, turn)
    sizes = [
        -(-offer.size * count // offer.rows) if offer.rows else 0 for offer, count in zip(offers, rows, strict=True)
    ]
    granted = shares(sizes, max_bytes, turn)
    return [
        Admitted(count, None if got >= size else got) for count, size, got in zip(rows, sizes, granted, strict=True)
    ]


def fitting(sizes: Sequence[int], max_bytes: int | None, turn: int = 0) -> list[bool]:
    """Which ranges go into the batch, once their sizes are known: a gateway gives one row at least, however large.

    Args:
        sizes: Bytes of what each would give; 0 for nothing.
        max_bytes: Most bytes of the batch; None for no limit.
        turn: Who is asked first, as `shares`; the first with anything is taken whatever its size, so that one huge
            message passes, and ten of them one after the other.
    """
    taken, total = [False] * len(sizes), 0
    for one in sorted(range(len(sizes)), key=lambda other: (other - turn) % len(sizes)):
        if sizes[one] and (max_bytes is None or not total or total + sizes[one] <= max_bytes):
            taken[one] = True
            total += sizes[one]
    return taken
