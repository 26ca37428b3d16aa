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

__all__ = ["check_mapping", "mappings", "with_mapping"]


def with_mapping(line: DownLine, file: Path | str, identity: Identity, evidence: Evidence) -> Identity:
    """The identity with the mapping of the next batches, durable before there is one.

    Raises:
        TowlineError: TL-B27, a batch was begun with another mapping.
        GatewayUnreachable: TL-G01 when the gateway does not answer for a while.
    """
    possible = mappings(line)
    digest = next(iter(possible))
    if not evidence.decided:
        check_mapping(line, file, identity, evidence, identity.mapping if identity.mapping in possible else digest)
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


def mappings(line: DownLine) -> dict[str, DownlinkSection]:
    """What may be made of a record, by digest, as this version and those before have it; the present one first."""
    return {digest(section): section for digest in (_digest, _former_digest) for section in _sections(line)}


def _sections(line: DownLine) -> tuple[DownlinkSection, DownlinkSection]:
    """What is made of a record: as the line says it now, and as it was before control characters were looked at."""
    now = line.section.model_copy(update={"control_characters": line.control_characters})
    return now, now.model_copy(update={"control_characters": "send"})


#: What does not decide which record becomes which row of a batch that was begun.
_UNDECIDING: Final = {
    "name",
    "starting_offsets",
    "confirm",
    "max_messages_per_trigger",
    "trigger_interval_s",
    "listen",
}


def _digest(section: DownlinkSection) -> str:
    """Changes with whatever decides which record becomes which row.

    Of what differs from the defaults, so that a later version with one more key finds the same; a default must not
    change its meaning then.
    """
    text = section.model_dump_json(exclude=_UNDECIDING, exclude_defaults=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


#: Keys that were added since the digest is no longer one of every key: the versions before did not write them down.
_SINCE: Final = {"fields", "reject", "failure_notice", "listen"}


def _former_digest(section: DownlinkSection) -> str:
    """The same of an earlier version: a batch that it began can be finished by this one."""
    unsaid = {"control_characters"} if section.control_characters == "send" else set()
    unsaid |= {"isolation_level"} if section.isolation_level == "read_committed" else set()
    return hashlib.sha256(section.model_dump_json(exclude=_SINCE | unsaid).encode()).hexdigest()[:16]
