"""Which mapping a batch of a downlink was begun with: it has to be finished with the same.

The outbox may have the first rows of a batch that a crash interrupted, and knows them by their number [I10]. So what
decides which record becomes a row is fixed from one start to the next, and changes only where no batch is undecided.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from towline.bridge.lines.evidence import Evidence, answer_of, status_of
from towline.bridge.lines.recovery import refusal

if TYPE_CHECKING:
    from pathlib import Path

    from towline.bridge.config.downlink import DownlinkSection
    from towline.bridge.config.model import DownLine
    from towline.bridge.lines.identity import Identity

__all__ = ["check_mapping", "mapping_of", "section_of", "with_mapping"]


def with_mapping(line: DownLine, file: Path | str, identity: Identity, evidence: Evidence) -> Identity:
    """The identity with the mapping of the next batches, durable before there is one.

    Raises:
        TowlineError: TL-B27, a batch was begun with another mapping.
        GatewayUnreachable: TL-G01 when the gateway does not answer for a while.
    """
    digest = mapping_of(line)
    if not evidence.decided:
        check_mapping(line, file, identity, evidence, digest)
        return identity
    status = answer_of(line.gateway.state_dir, status_of)
    online = status.get("state") == "online"  # only then the broker's word is known, and None means no limit
    limit = int(status.get("broker_max_packet_bytes") or 0) if online else identity.packet_limit
    begun = replace(identity, mapping=digest, packet_limit=limit)
    begun.save(line.gateway.state_dir)
    return begun


def check_mapping(line: DownLine, file: Path | str, identity: Identity, evidence: Evidence, mapping: str) -> None:
    """Refuse to finish a batch with another mapping than it was begun with.

    Raises:
        TowlineError: TL-B27, with both ways out.
    """
    if identity.mapping not in ("", mapping):
        what = f"batch {evidence.planned} was begun when the line said something else: parts of it may be in the outbox"
        raise refusal(line, file, "TL-B27", what, "Set the line back until this batch is done, then change it")


def section_of(line: DownLine) -> DownlinkSection:
    """What the line says, with what it leaves to its dead-letter topic filled in."""
    return line.section.model_copy(update={"control_characters": line.control_characters})


#: What does not decide which record becomes which row of a batch that was begun.
_UNDECIDING: Final = {
    "name",
    "starting_offsets",
    "confirm",
    "max_messages_per_trigger",
    "trigger_interval_s",
    "listen",
}


def mapping_of(line: DownLine) -> str:
    """A digest that changes with whatever decides which record becomes which row."""
    text = section_of(line).model_dump_json(exclude=_UNDECIDING, exclude_defaults=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
