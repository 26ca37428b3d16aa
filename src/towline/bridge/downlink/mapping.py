"""By which settings a batch of a downlink was begun: it is finished by the same, whatever the file says by then.

The outbox may have a part of a batch that a crash interrupted, and Kafka its dead letters [I10]. So what decides which
record becomes a row is kept from one start to the next, and is replaced only where no batch is undecided.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from towline.bridge.config.downlink import DownlinkSection
from towline.bridge.lines.evidence import Evidence, awaited_status

if TYPE_CHECKING:
    from towline.bridge.config.model import DownLine
    from towline.bridge.lines.identity import Identity

__all__ = ["begun_line", "mapping_of", "with_mapping"]

#: What does not decide which record becomes which row of a batch that was begun: it is as the file says now.
_UNDECIDING: Final = ("name", "starting_offsets", "on_data_loss", "confirm", "trigger_interval_s", "listen")


def with_mapping(line: DownLine, identity: Identity, evidence: Evidence) -> Identity:
    """The identity with the settings of the next batches, durable before there is one; the same while one is undecided.

    Raises:
        GatewayUnreachable: TL-G01 when the gateway does not answer for a while.
    """
    if not evidence.decided:
        return identity
    status = awaited_status(line.gateway.state_dir)
    online = status.get("state") == "online"  # only then the broker's word is known, and None means no limit
    limit = int(status.get("broker_max_packet_bytes") or 0) if online else identity.packet_limit
    begun = replace(identity, mapping=mapping_of(line), packet_limit=limit)
    begun.save(line.gateway.state_dir)
    return begun


def mapping_of(line: DownLine) -> str:
    """A line's settings as JSON, with what it leaves to its dead-letter topic filled in."""
    filled = {"control_characters": line.control_characters, "dead_letter_topic": line.dead_letter_topic or False}
    return line.section.model_copy(update=filled).model_dump_json(by_alias=True, exclude_defaults=True)


def begun_line(line: DownLine, mapping: str) -> DownLine:
    """The line as its last batches were begun.

    Args:
        line: As the file says it.
        mapping: Of its identity; "" for a line that never ran.
    """
    kept = DownlinkSection.model_validate_json(mapping or mapping_of(line))
    return line.model_copy(
        update={
            "section": kept.model_copy(update={name: getattr(line.section, name) for name in _UNDECIDING}),
            "guarantee": kept.guarantee,
            "parallelism": kept.parallelism,
            "dead_letter_topic": kept.dead_letter_topic or None,
        }
    )
