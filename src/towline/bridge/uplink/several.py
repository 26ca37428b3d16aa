"""Where the query of a line over several gateways begins, and whether its checkpoint and their journals fit."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from towline.bridge.lines.elsewhere import each, places_of
from towline.bridge.lines.evidence import Evidence, places_at, read_checkpoint, status_of
from towline.bridge.lines.recovery import CheckpointSettings, problem, refusal
from towline.checkpoint import Checkpoint
from towline.errors import GatewayError
from towline.gateway.belonging import is_other
from towline.guarantee import policy
from towline.spark.offsets import JournalPlace

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from towline.bridge.config.model import Line
    from towline.bridge.lines.identity import Identity
    from towline.gateway.access import Access
    from towline.gateway.client import GatewayClient

__all__ = ["Seen", "beginnings", "belong", "gather", "offsets_of"]

#: How long the gateways are waited for that a query needs to begin, in seconds; it tries again afterwards.
_PATIENCE_S: Final = 20.0


@dataclass(frozen=True, slots=True)
class Seen:
    """What a checkpoint and several gateways say of themselves.

    Attributes:
        checkpoint: What the checkpoint says, whoever serves its journals.
        parts: The same with each gateway that answered, by its name.
        starts: Where each of those would begin by its account: its watermark, and its tip.
    """

    checkpoint: Evidence
    parts: Mapping[str, Evidence]
    starts: Mapping[str, tuple[int, int]]


def gather(line: Line, access: Access, consumer: str, identity: Identity) -> Seen:
    """Read a line's checkpoint and ask its gateways; those that are away are done without.

    A query without a checkpoint that begins behind what was carried needs the gateways it was carried from: each knows
    alone whether its journal is still the same.

    Raises:
        GatewayError: None of the gateways that are needed answers.
    """
    seen, logs = read_checkpoint(line.checkpoint), Checkpoint(str(line.checkpoint))
    planned = {place.gateway: place for place in places_at(logs, seen.planned)}
    done = {place.gateway: place for place in places_at(logs, seen.done)}
    begun = _places(identity) if seen.planned is None else {}
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        answers = each(places_of(line.gateways, access), lambda client: _asked(client, planned or begun))
        told = {str(answer[0]["name"]): answer for answer in answers.values() if not isinstance(answer, GatewayError)}
        lost = [one for one in answers.values() if isinstance(one, GatewayError)]
        if (told or not lost) and (not lost or not begun):
            break
        if time.monotonic() >= deadline:
            raise lost[0]
        time.sleep(0.2)
    parts, starts = {}, {}
    for name, (status, incarnation) in told.items():
        place = _own(planned or begun, status)
        behind = _own(done, status)
        first, tip = int(status["first"]), int(status["end"])
        committed = int(status["consumers"].get(consumer, 0))
        starts[name] = (max(first, committed), tip)
        parts[name] = replace(
            seen,
            journal=place.journal if place and planned else "",
            planned_end=place.offset if place and planned else 0,
            incarnation=place.incarnation if place and planned else "",
            done_end=behind.offset if behind else None,
            gateway_journal=str(status["journal"]),
            committed=committed,
            first=first,
            tip=tip,
            written_by=incarnation,
        )
    return Seen(seen, parts, starts)


def belong(line: Line, file: Path | str, identity: Identity, seen: Seen) -> None:
    """See that the checkpoint and the journal of each gateway that answered belong together.

    Raises:
        TowlineError: TL-B22 to TL-B25, TL-B50, TL-B52, TL-B53, with both ways out.
    """
    settings = CheckpointSettings.of(line, identity)
    for name, part in sorted(seen.parts.items()):
        if reason := problem(identity, part, settings):
            code, what, way = reason
            raise refusal(line, file, code, f"gateway {name}: {what}", way)


def beginnings(line: Line, identity: Identity, seen: Seen) -> str:
    """Where a query without a checkpoint begins at each gateway, as the source's option ``startingOffset``."""
    begun = _places(identity)
    # A line that begins again may have written the uncommitted rows already, and at_most_once doubles nothing.
    other = "committed" if policy(line.guarantee).serves_again or identity.generation == 1 else "latest"
    starts: dict[str, str | int] = {}
    for name, part in seen.parts.items():
        place = _of_journal(begun, part.gateway_journal)
        same = place and not is_other(place.incarnation, part.written_by, place.offset, part.first)
        starts[name] = max(place.offset, part.committed) if place and same and place.offset <= part.tip else other
    return json.dumps(starts)


def offsets_of(begin: str, seen: Seen) -> dict[str, int]:
    """The offsets that `beginnings` has named, when the gateways say what they said."""
    named = {name: {"committed": start, "latest": tip} for name, (start, tip) in seen.starts.items()}
    return {name: where if isinstance(where, int) else named[name][where] for name, where in json.loads(begin).items()}


def _asked(client: GatewayClient, places: Mapping[str, JournalPlace]) -> tuple[Mapping[str, Any], str]:
    status = status_of(client)
    place = _own(places, status)
    return status, client.incarnation(place.offset) if place else ""


def _own(places: Mapping[str, JournalPlace], status: Mapping[str, Any]) -> JournalPlace | None:
    """The place of a gateway: that of its journal, else that under its name, which is then another journal's."""
    return _of_journal(places, str(status["journal"])) or places.get(str(status["name"]))


def _of_journal(places: Mapping[str, JournalPlace], journal: str) -> JournalPlace | None:
    return next((place for place in places.values() if place.journal == journal), None)


def _places(identity: Identity) -> dict[str, JournalPlace]:
    """Where the line begins in each journal, as its identity has it."""
    return {name: JournalPlace.parse(name, fields) for name, fields in json.loads(identity.places or "{}").items()}
