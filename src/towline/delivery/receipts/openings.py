"""Which opening of a publisher's journal gave out each of its numbers: it tells a number from that of a copy.

A publisher whose directory was restored from an older copy gives out numbers anew. Each opening of a journal has a name
of its own [I14], so the same number under another name is another message.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import Final

__all__ = ["Openings", "same_messages"]

#: Openings whose numbers all have their receipt are kept for repeats that come late; so many in all, at least.
_KEPT: Final = 8
#: At most, as they stand in every note and receipt.
_MOST: Final = 128


class Openings:
    """Steps: first number and name; each holds up to the next, and the last one for ever.

    What it says of a number that was never received means nothing.

    Args:
        steps: In order; below the first, it is not known any more.
    """

    def __init__(self, steps: Iterable[tuple[int, str]] = ()) -> None:
        self._steps = [(start, name) for start, name in steps]

    def steps(self) -> tuple[tuple[int, str], ...]:
        """All of them, as JSON holds them."""
        return tuple(self._steps)

    def of(self, number: int) -> str | None:
        """The opening of a number; None where it is not known."""
        at = self._at(number)
        return self._steps[at][1] if at >= 0 else None

    def put(self, number: int, name: str, *, newest: bool, low: int) -> bool:
        """Note who gave out a number; False for no room.

        Args:
            number: Received now.
            name: Its opening.
            newest: No larger number was received.
            low: All below have their receipt.
        """
        at = self._at(number)
        if at == len(self._steps) - 1 and at >= 0 and self._steps[at][1] == name:
            return True  # in order, as nearly always
        steps = [step for step in self._steps[: at + 1] if step[0] < number] + [(number, name)]
        if not newest:
            after = self._steps[at + 1 :]
            if at >= 0 and (not after or after[0][0] > number + 1):
                steps.append((number + 1, self._steps[at][1]))
            steps += after
        steps = [step for i, step in enumerate(steps) if not i or step[1] != steps[i - 1][1]]
        while len(steps) > _KEPT and steps[1][0] <= low:
            del steps[0]
        if len(steps) > _MOST:
            return False
        self._steps = steps
        return True

    def _at(self, number: int) -> int:
        return bisect_right(self._steps, number, key=lambda step: step[0]) - 1


def same_messages(
    steps: Sequence[tuple[int, str]], ranges: Iterable[tuple[int, int]], opening_of: Callable[[int], str]
) -> bool:
    """Whether the numbers that a gateway has are the messages that a publisher has under them.

    Args:
        steps: Of the gateway.
        ranges: Numbers that the gateway has.
        opening_of: Of the publisher: number → its opening; the numbers of an opening have no others between them.
    """
    for start, end in ranges:
        at = start
        while at < end:
            step = bisect_right(steps, at, key=lambda step: step[0]) - 1
            if step < 0:
                return False  # forgotten, because a publisher said long ago that it has the receipts
            stop = min(end, steps[step + 1][0]) if step + 1 < len(steps) else end
            name = steps[step][1]
            if not name == opening_of(at) == opening_of(stop - 1):
                return False
            at = stop
    return True
