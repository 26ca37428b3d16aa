"""The offset of ``format("mqtt")`` as it stands in Spark's checkpoint.

``{"gateways": {"plant-7": {"journal": "<id>", "offset": 4711, "incarnation": "<hex>"}}, "tick": 0}``. Spark compares
offsets as JSON text, so the order of the keys never changes. The map of gateways has one entry today; several are a
wider source later. Offsets of an earlier Towline have no incarnation: they are written back as they are, and the next
one has it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from towline.errors import GatewayError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Position"]


@dataclass(frozen=True, slots=True)
class Position:
    """A place in one gateway's journal.

    Attributes:
        gateway: Name of the gateway.
        journal: Id of its journal: offsets of another journal mean other rows.
        offset: Offset after the last row before this place.
        tick: Counts the empty batches that keep an idle query's Python workers alive.
        incarnation: Which opening of the journal wrote the row below `offset` [I14]; "" where none did, or it is not
            known.
    """

    gateway: str
    journal: str
    offset: int
    tick: int = 0
    incarnation: str = ""

    @classmethod
    def parse(cls, offset: Mapping[str, Any]) -> Self:
        """Read a checkpoint's offset.

        Raises:
            GatewayError: TL-G12 for one that this source did not write.
        """
        try:
            ((name, place),) = offset["gateways"].items()
            tick, incarnation = int(offset.get("tick", 0)), str(place.get("incarnation", ""))
            found = cls(str(name), str(place["journal"]), int(place["offset"]), tick, incarnation)
        except (KeyError, TypeError, ValueError, AttributeError):
            raise GatewayError(
                "TL-G12",
                'format("mqtt")',
                f"the checkpoint holds an offset of another kind ({str(offset)[:80]})",
                "It belongs to another source: give this query a checkpoint directory of its own.",
            ) from None
        return found

    def to_json(self) -> dict[str, Any]:
        """Write the offset, keys in their fixed order."""
        place: dict[str, Any] = {"journal": self.journal, "offset": self.offset}
        if self.incarnation:
            place["incarnation"] = self.incarnation
        return {"gateways": {self.gateway: place}, "tick": self.tick}

    def at(self, offset: int, incarnation: str) -> Self:
        """The same journal, another offset."""
        return replace(self, offset=offset, incarnation=incarnation)

    def ticked(self) -> Self:
        """The same place one tick later: a new offset for Spark, without a row."""
        return replace(self, tick=self.tick + 1)
