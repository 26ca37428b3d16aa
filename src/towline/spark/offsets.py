"""The offset of ``format("mqtt")`` as it stands in Spark's checkpoint: a place in the journal of each gateway.

``{"gateways": {"plant-7": {"journal": "<id>", "offset": 4711, "incarnation": "<hex>", "at": "<place>"}}, "tick": 0}``.
Spark compares offsets as JSON text, so gateways stand in the order of their names, and keys in one order. ``"at"`` says
where a gateway is: a batch that a crash interrupted is then served again, and a gateway that was taken out of the list
asked what waits there.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from itertools import combinations
from typing import TYPE_CHECKING, Any, Final, Self

from towline.errors import ConfigError, GatewayError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from towline.checkpoint import Checkpoint

GATEWAYS_OPTION: Final = 'format("mqtt") option "gateways"'


@dataclass(frozen=True, slots=True)
class JournalPlace:
    """A place in one gateway's journal.

    Attributes:
        gateway: Name of the gateway.
        journal: Id of its journal: offsets of another journal mean other rows.
        offset: Offset after the last row before this place.
        incarnation: Which opening of the journal wrote the row below `offset` [I14]; "" where none did, or it is not
            known.
        at: The state directory or location of the gateway, as the options have it.
    """

    gateway: str
    journal: str
    offset: int
    incarnation: str = ""
    at: str = ""

    @classmethod
    def parse(cls, name: str, fields: Mapping[str, Any]) -> Self:
        """Read what stands under a gateway's name.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: It is no place.
        """
        texts = [str(fields.get(key, "")) for key in ("incarnation", "at")]
        return cls(name, str(fields["journal"]), int(fields["offset"]), *texts)

    def to_json(self) -> dict[str, Any]:
        """What stands under the gateway's name, keys in their fixed order."""
        known = {"incarnation": self.incarnation, "at": self.at}
        return {"journal": self.journal, "offset": self.offset} | {key: value for key, value in known.items() if value}

    def moved(self, offset: int, incarnation: str) -> Self:
        """The same journal, another offset."""
        return replace(self, offset=offset, incarnation=incarnation)


@dataclass(frozen=True, slots=True)
class Position:
    """Where a stream is.

    Attributes:
        places: One for each gateway, in the order of their names, no name twice.
        tick: Counts the empty batches that keep an idle query's Python workers alive.
    """

    places: tuple[JournalPlace, ...]
    tick: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "places", tuple(sorted(self.places, key=lambda place: place.gateway)))

    @classmethod
    def parse(cls, offset: Mapping[str, Any]) -> Self:
        """Read a checkpoint's offset.

        Raises:
            GatewayError: TL-G12 for one that this source did not write.
        """
        try:
            places = tuple(JournalPlace.parse(str(name), fields) for name, fields in offset["gateways"].items())
            found = cls(places, int(offset["tick"]))
        except (KeyError, TypeError, ValueError, AttributeError):
            raise _another_kind(offset) from None
        if not places:
            raise _another_kind(offset)
        return found

    def to_json(self) -> dict[str, Any]:
        """Write the offset, keys in their fixed order."""
        return {"gateways": {place.gateway: place.to_json() for place in self.places}, "tick": self.tick}

    def place(self, gateway: str) -> JournalPlace | None:
        """The place of a gateway; None where it has none."""
        return next((place for place in self.places if place.gateway == gateway), None)

    def offset_in(self, journal: str) -> int:
        """The offset in a journal; 0 where it has none."""
        return next((place.offset for place in self.places if place.journal == journal), 0)

    def having(self, *places: JournalPlace) -> Self:
        """The same position with these places, each instead of the one of its gateway or as a new one."""
        kept = {place.gateway: place for place in self.places} | {place.gateway: place for place in places}
        return replace(self, places=tuple(kept.values()))

    def without(self, *gateways: str) -> Self:
        """The same position without the places of these gateways."""
        return replace(self, places=tuple(place for place in self.places if place.gateway not in gateways))

    def ticked(self) -> Self:
        """The same places one tick later: a new offset for Spark, without a row."""
        return replace(self, tick=self.tick + 1)


def check_distinct(places: Iterable[JournalPlace]) -> None:
    """See that no two gateways of a list are one; raises ConfigError, TL-G50."""
    for one, other in combinations(places, 2):
        if one.gateway == other.gateway or one.journal == other.journal:
            same = f'have the same name "{one.gateway}"'
            if one.gateway != other.gateway:
                same = f"serve one journal, {one.journal}"
            what = f"{one.at} and {other.at} {same}"
            do = "Name each gateway once, and give each a name of its own: it stands in the checkpoint."
            raise ConfigError("TL-G50", GATEWAYS_OPTION, what, do)


def places_at(logs: Checkpoint, batch: int | None) -> tuple[JournalPlace, ...]:
    """Where a batch ends in the journal of each gateway; nothing where that can't be read, or there is none."""
    for value in logs.offsets(batch):
        with contextlib.suppress(GatewayError):
            return Position.parse(value).places
    return ()


def _another_kind(offset: object) -> GatewayError:
    what = f"the checkpoint holds an offset of another kind ({str(offset)[:80]})"
    do = "It belongs to another source: give this query a checkpoint directory of its own."
    return GatewayError("TL-G12", 'format("mqtt")', what, do)
