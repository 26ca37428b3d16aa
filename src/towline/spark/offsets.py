"""The offset of ``format("mqtt")`` as it stands in Spark's checkpoint.

``{"gateways": {"plant-7": {"journal": "<id>", "offset": 4711}}, "tick": 0}``. Spark compares offsets as JSON text, so
the order of the keys never changes. The map of gateways has one entry today; several are a wider source later.
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
    """

    gateway: str
    journal: str
    offset: int
    tick: int = 0

    @classmethod
    def parse(cls, offset: Mapping[str, Any]) -> Self:
        """Read a checkpoint's offset.

        Raises:
            GatewayError: TL-G12 for one that this source did not write.
        """
        try:
            ((name, place),) = offset["gateways"].items()
            found = cls(str(name), str(place["journal"]), int(place["offset"]), int(offset.get("tick", 0)))
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
        return {"gateways": {self.gateway: {"journal": self.journal, "offset": self.offset}}, "tick": self.tick}

    def at(self, offset: int) -> Self:
        """The same journal, another offset."""
        return replace(self, offset=offset)

    def ticked(self) -> Self:
        """The same place one tick later: a new offset for Spark, without a row."""
        return replace(self, tick=self.tick + 1)
