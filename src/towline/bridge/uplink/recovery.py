"""Where the query of a line to Kafka begins, and whether its checkpoint and the journals of its gateways fit."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from towline.bridge.config.model import CONSUMER
from towline.bridge.lines.elsewhere import each, places_of
from towline.bridge.lines.evidence import NO_ANSWER, Evidence, gateway_status, read_checkpoint, status_of
from towline.bridge.lines.recovery import CheckpointSettings, problem, refusal
from towline.checkpoint import Checkpoint
from towline.errors import GatewayError, GatewayUnreachable
from towline.gateway.identity import is_other
from towline.guarantee import policy
from towline.spark.offsets import places_at

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from towline.bridge.config.model import Line
    from towline.bridge.lines.identity import Identity
    from towline.gateway.access import Access
    from towline.gateway.client import GatewayClient
    from towline.spark.offsets import JournalPlace

__all__ = ["Seen", "beginnings", "belong", "gather", "offsets_of", "oldest_waiting"]

#: How long the gateways are waited for that a query needs to begin, in seconds; it tries again afterwards.
_PATIENCE_S: Final = 20.0


@dataclass(frozen=True, slots=True)
class Seen:
    """What a checkpoint and its gateways say of themselves.

    Attributes:
        checkpoint: What the checkpoint says, whoever serves its journals.
        parts: The same with each gateway that answered, by its name.
    """

    checkpoint: Evidence
    parts: Mapping[str, Evidence]


def gather(line: Line, access: Access, identity: Identity) -> Seen:
    """Read a line's checkpoint and ask its gateways; those that are away are done without.

    A query without a checkpoint that begins behind what was carried needs the gateways it was carried from: each knows
    alone whether its journal is still the same.

    Raises:
        GatewayError: None of the gateways that are needed answers.
    """
    seen, logs = read_checkpoint(line.checkpoint), Checkpoint(str(line.checkpoint))
    planned, done = places_at(logs, seen.planned), places_at(logs, seen.done)
    begun = identity.begins if seen.planned is None else ()
    where = places_of(line.gateways or [str(line.gateway.state_dir)], access)
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        answers = each(where, lambda client: _asked(client, planned or begun))
        told = {str(answer[0]["name"]): answer for answer in answers.values() if not isinstance(answer, GatewayError)}
        lost = [one for one in answers.values() if isinstance(one, GatewayError)]
        if (told or not lost) and (not lost or not begun):
            break
        if time.monotonic() >= deadline:
            if not line.gateways and lost[0].code == "TL-G01":
                raise GatewayUnreachable("TL-G01", str(line.gateway.state_dir), *NO_ANSWER)
            raise lost[0]
        time.sleep(0.2)
    parts = {}
    for name, (status, incarnation) in told.items():
        place, behind = _own(planned, status), _own(done, status)
        parts[name] = replace(
            seen,
            journal=place.journal if place else "",
            planned_end=place.offset if place else 0,
            incarnation=place.incarnation if place else "",
            done_end=behind.offset if behind else None,
            gateway_journal=str(status["journal"]),
            committed=int(status["consumers"].get(CONSUMER, 0)),
            first=int(status["first"]),
            tip=int(status["end"]),
            written_by=incarnation,
        )
    return Seen(seen, parts)


def belong(line: Line, file: Path | str, identity: Identity, seen: Seen) -> None:
    """See that the checkpoint and the journal of each gateway that answered belong together.

    Raises:
        TowlineError: TL-B22 to TL-B25, TL-B50, TL-B52, TL-B53, with both ways out.
    """
    settings = CheckpointSettings.of(line, identity)
    for name, part in sorted(seen.parts.items()):
        if reason := problem(identity, part, settings):
            code, what, way = reason
            raise refusal(line, file, code, f"gateway {name}: {what}" if line.gateways else what, way)


def beginnings(line: Line, identity: Identity, seen: Seen) -> dict[str, str | int]:
    """Where a query without a checkpoint begins at each gateway, as the source's option ``startingOffset`` says it."""
    # A line that begins again may have written the uncommitted rows already, and at_most_once doubles nothing.
    other = "committed" if policy(line.guarantee).serves_again or identity.generation == 1 else "latest"
    starts: dict[str, str | int] = {}
    for name, part in seen.parts.items():
        place = _of_journal(identity.begins, part.gateway_journal)
        same = place and not is_other(place.incarnation, part.written_by, place.offset, part.first)
        starts[name] = max(place.offset, part.committed) if place and same and place.offset <= part.tip else other
    return starts


def offsets_of(begin: Mapping[str, str | int], seen: Seen) -> dict[str, int]:
    """The offsets that `beginnings` has named, when the gateways say what they said."""
    named = {name: {"committed": max(one.first, one.committed), "latest": one.tip} for name, one in seen.parts.items()}
    return {name: where if isinstance(where, int) else named[name][where] for name, where in begin.items()}


def oldest_waiting(line: Line) -> float | None:
    """When the oldest message came that waits in the line's journal, in seconds since 1970; None where none waits.

    0 where that is not known: of gateways elsewhere, and of one that does not answer.
    """
    status = None if line.gateways else gateway_status(line.gateway.state_dir)
    return 0.0 if status is None else status.get("oldest")


def _asked(client: GatewayClient, places: Iterable[JournalPlace]) -> tuple[Mapping[str, Any], str]:
    status = status_of(client)
    place = _own(places, status)
    return status, client.incarnation(place.offset) if place else ""


def _own(places: Iterable[JournalPlace], status: Mapping[str, Any]) -> JournalPlace | None:
    """The place of a gateway: that of its journal, else that under its name, which is then another journal's."""
    named = next((place for place in places if place.gateway == status["name"]), None)
    return _of_journal(places, str(status["journal"])) or named


def _of_journal(places: Iterable[JournalPlace], journal: str) -> JournalPlace | None:
    return next((place for place in places if place.journal == journal), None)
