"""Offset of ``format("mqtt")`` in Spark's checkpoint: a position in the journal of each gateway.

``{"gateways": {"plant-7": {"journal": "<id>", "offset": 4711, "incarnation": "<hex>"}}, "tick": 0}``. Spark compares
offsets as JSON text, so gateways are sorted by name, and keys have one order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import combinations
from typing import TYPE_CHECKING, Any, Final, Self

from towline.errors import ConfigError, GatewayError
from towline.gateway.identity import JournalPosition, parse_positions

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from towline.checkpoint import Checkpoint

GATEWAYS_OPTION: Final = 'format("mqtt") option "gateways"'


@dataclass(frozen=True, slots=True)
class SourceOffset:
    """Offset of a stream: its position at each gateway.

    Attributes:
        positions: One for each gateway, sorted by unique names.
        tick: Counter of the empty batches that keep an idle query's Python workers alive.
    """

    positions: tuple[JournalPosition, ...]
    tick: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "positions", tuple(sorted(self.positions, key=lambda position: position.gateway)))

    @classmethod
    def parse(cls, offset: Mapping[str, Any]) -> Self:
        """Parse an offset of the checkpoint.

        Raises:
            GatewayError: TL-G12, the offset was not written by this source.
        """
        positions = parse_positions(offset)
        if not positions or not isinstance(tick := offset.get("tick"), int):
            problem = f"the checkpoint has an offset of another source ({str(offset)[:80]})"
            remedy = "Give this query a checkpoint directory of its own."
            raise GatewayError("TL-G12", 'format("mqtt")', problem, remedy)
        return cls(positions, tick)

    def to_json(self) -> dict[str, Any]:
        """Return the offset as JSON, keys in their fixed order."""
        return {"gateways": {position.gateway: position.to_json() for position in self.positions}, "tick": self.tick}

    def offset_in(self, journal: str) -> int:
        """Return the offset in a journal; 0 if it has none."""
        return next((position.offset for position in self.positions if position.journal == journal), 0)

    def update(self, positions: Iterable[JournalPosition], removed_gateways: Collection[str]) -> Self:
        """Return the offset with these positions, each replacing that of its gateway, and without removed gateways."""
        by_gateway = {position.gateway: position for position in (*self.positions, *positions)}
        remaining = (position for name, position in by_gateway.items() if name not in removed_gateways)
        return replace(self, positions=tuple(remaining))


def check_distinct(positions: Iterable[JournalPosition]) -> None:
    """Check that no gateway is listed twice; raises ConfigError, TL-G50."""
    for first_position, second_position in combinations(positions, 2):
        if first_position.gateway == second_position.gateway or first_position.journal == second_position.journal:
            conflict = f'have the same name "{first_position.gateway}"'
            if first_position.gateway != second_position.gateway:
                conflict = f"serve one journal, {first_position.journal}"
            remedy = "List each gateway once, with a unique name: the checkpoint uses it."
            raise ConfigError("TL-G50", GATEWAYS_OPTION, f"two gateways {conflict}", remedy)


def positions_at(checkpoint: Checkpoint, batch: int | None) -> tuple[JournalPosition, ...]:
    """Return the end positions of a batch; empty if they can't be read, or there are none."""
    return next(filter(None, map(parse_positions, checkpoint.offsets(batch))), ())
