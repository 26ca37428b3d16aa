"""Where rows lie in a landing partition: a sparse index of lower bounds, and how many bytes lie below each; pure.

Every row has an offset of Kafka's own, and a transaction takes one more for its end: between two rows lie at least as
many offsets as rows. So from a row whose offset is known, or is known to be no smaller, follows a lower bound for each
later one, which a reader corrects with the number that stands in the record it finds there.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["Place", "RowPlaces"]

#: RowPlaces are kept so many rows apart, and so many of them: beyond that every second one goes.
_STRIDE: Final = 256
_MOST: Final = 512
#: Bytes that a row is taken to have where none is known.
_A_ROW: Final = 512


class Place(NamedTuple):
    """A row that begins a transaction.

    Attributes:
        row: Its number.
        offset: Its offset in the partition, or a smaller one.
        below: Bytes of all rows before it, over the journal's life.
    """

    row: int
    offset: int
    below: int


class RowPlaces:
    """RowPlaces in order of their rows.

    Args:
        places: As `as_json` gave them.
    """

    def __init__(self, places: Iterable[Sequence[int]] = ()) -> None:
        #: rows, offsets and bytes grow from one to the next; replaced, never changed, when places go
        self._places: list[Place] = [Place(*place) for place in places]

    def note(self, place: Place) -> None:
        """Add a place above all others, unless the last one is near; a better bound replaces it."""
        if self._places and place.row <= self._places[-1].row:
            self._places[-1] = max(self._places[-1], place)
        elif not self._places or place.row - self._places[-1].row >= _STRIDE:
            self._places.append(place)
            if len(self._places) > _MOST:
                self._places = [self._places[0], *self._places[1:-1:2], self._places[-1]]

    def learn(self, row: int, offset: int) -> None:
        """The offset of a row was seen."""
        places = self._places
        at = bisect_right(places, row, key=lambda place: place.row) - 1
        if at >= 0 and places[at].row == row and places[at].offset < offset:
            places[at] = places[at]._replace(offset=offset)

    def forget(self, row: int) -> None:
        """Rows below are gone."""
        at = max(bisect_right(self._places, row, key=lambda place: place.row) - 1, 0)
        self._places = self._places[at:]

    def offset_of(self, row: int) -> int:
        """An offset at or before that of the row."""
        place = self._at(row)
        return 0 if place is None else place.offset + row - place.row

    def _at(self, row: int) -> Place | None:
        places = self._places
        at = bisect_right(places, row, key=lambda place: place.row) - 1
        return places[at] if at >= 0 else None

    def bytes_below(self, row: int, end: Place) -> int:
        """Bytes of all rows below this one; between two places evenly for their rows.

        Args:
            row: Its number.
            end: The place of the next row to come.
        """
        if row >= end.row:
            return end.below
        places = [*self._places, end]
        at = bisect_right(places, row, key=lambda place: place.row)
        if at == 0:
            return max(0, places[0].below - (places[0].row - row) * _A_ROW)
        low, high = places[at - 1], places[at]
        return low.below + (row - low.row) * (high.below - low.below) // max(1, high.row - low.row)

    def row_at(self, below: int, end: Place) -> int:
        """The last row with at most so many bytes below it."""
        places = [*self._places, end]
        at = bisect_right(places, below, key=lambda place: place.below)
        if at == 0:
            return places[0].row
        if at == len(places):
            return end.row
        low, high = places[at - 1], places[at]
        return low.row + (below - low.below) * (high.row - low.row) // max(1, high.below - low.below)

    def as_json(self) -> list[Any]:
        """For `RowPlaces`."""
        return [list(place) for place in self._places]
