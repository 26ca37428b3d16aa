"""The ids of Kafka topics beside what is kept of them by name (KIP-516): a topic made anew has another id [I17].

A checkpoint has offsets by topic and partition. Deleted and made again, a topic of that name is another one, and read
on from an offset of the old one its first records would never come. So the ids are noted in the checkpoint beside
Spark's own files, and compared before the tasks of each batch that reads the topic, and after them. A broker that
gives no ids leaves them unknown, and nothing is compared.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from towline.checkpoint import Checkpoint, kafka_offsets_in
from towline.errors import KafkaError
from towline.kafka.admin import KafkaAdmin

if TYPE_CHECKING:
    from collections.abc import Mapping

_NOTE: Final = "towline.topics"
#: By process and configuration: a new connection for each batch would cost 20 ms.
_clusters: Final[dict[tuple[int, frozenset[tuple[str, str]]], KafkaAdmin]] = {}


def kept_ids(checkpoint: Checkpoint, note: str = _NOTE) -> dict[str, str]:
    """The ids noted in a checkpoint, by topic; none where the note can't be read."""
    with contextlib.suppress(OSError, ValueError):
        return dict(json.loads(checkpoint.note(note) or "{}"))
    return {}


def keep_ids(checkpoint: Checkpoint, ids: Mapping[str, str], note: str = _NOTE) -> None:
    """Note ids in a checkpoint, durably; nothing where it is on no disk of this machine.

    Raises:
        JournalError: TL-J20, the disk did not take them.
    """
    if ids != kept_ids(checkpoint, note):
        checkpoint.keep_note(note, json.dumps(ids))


def remade(kept: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Topics with another id than the one that was noted, sorted; an unknown id is no other one."""
    return sorted(name for name, one in now.items() if one and kept.get(name, "") not in ("", one))


def made_anew(
    where: str, do: str, offsets: Mapping[str, Mapping[str, int]], kept: Mapping[str, str], now: Mapping[str, str]
) -> KafkaError:
    """TL-B06 of a query that stands at offsets of topics which were deleted and made again."""
    told = (
        f'"{name}" (its id was {kept[name]}, and is {now[name]}): offset '
        + ", ".join(f"{at:,} of partition {part}" for part, at in offsets.get(name, {}).items())
        for name in remade(kept, now)
    )
    what = f"Kafka topics were deleted and made again, and the query stands in the old ones, {'; '.join(told)}"
    return KafkaError("TL-B06", where, f"{what}; nothing is read from there", do)


@dataclass(frozen=True, slots=True)
class SourceTopics:
    """The topics that a query reads with Spark's Kafka source, looked at around each of its batches, on the driver.

    Attributes:
        client: A client configuration, unresolved.
        location: The query's checkpoint.
        where: Whose query it is, for messages.
        do: The ways out of TL-B06.
    """

    client: Mapping[str, str]
    location: str
    where: str
    do: str

    def look(self) -> None:
        """Compare the topics of the newest batch, and note the ids of those that are new in it.

        Call it when a writer is made, which Spark does before the tasks of a batch and again for its commit. Only
        topics with records in the batch are asked about: one that stands still is not read from a wrong offset.

        Raises:
            KafkaError: TL-B06, a topic was made anew; TL-K01, no answer.
            JournalError: TL-J20, the ids can't be noted.
        """
        logs = Checkpoint(self.location)
        batch, kept = logs.last_offsets_batch(), kept_ids(logs)
        begun = kafka_offsets_in(logs.offsets(batch - 1) if batch else [logs.first_offsets()])
        ends = kafka_offsets_in(logs.offsets(batch))
        cluster = _clusters.setdefault((os.getpid(), frozenset(self.client.items())), KafkaAdmin(self.client))
        now = cluster.ids(name for name in ends if name not in kept or begun.get(name) != ends[name])
        if remade(kept, now):
            raise made_anew(self.where, self.do, begun, kept, now)
        keep_ids(logs, {name: kept.get(name) or now.get(name, "") for name in ends})
