"""The Kafka topics of a downlink before its query starts: made anew, gone, and what of that cost records [I17].

Spark compares offsets alone. A topic made anew that is longer than the old one is read on from the old one's offset
without a word; one that is gone ends the query, whether records of it were unread or not. So the topics' ids are held
against those noted beside the offsets, and of a topic that is gone the checkpoint says whether all was delivered: a
batch that took fewer records than it was allowed to took all there were (`KafkaMicroBatchStream.rateLimit`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

from towline.bridge.lines.evidence import kafka_offsets
from towline.bridge.lines.recovery import again_command
from towline.checkpoint import Checkpoint
from towline.errors import KafkaError
from towline.kafka.admin import first_offsets, reachable
from towline.kafka.topicids import ids_of, keep_ids, kept_ids, made_anew, remade

if TYPE_CHECKING:
    from pathlib import Path

    from towline.bridge.config.model import DownLine
    from towline.bridge.lines.evidence import Evidence, KafkaOffsets

__all__ = ["GLANCE_S", "TopicFindings", "look_at_topics", "ways_out"]

#: Seconds to wait for Kafka here, on the driver's main thread: other lines wait as long.
GLANCE_S: Final = 4.0
_CREATE: Final = "Create it, and the line goes on by itself; or take it out of the file."
#: The ways out of what can't be read any more, also where a batch was begun; and of one whose topic is gone.
_GO_ON: Final = 'Set on_data_loss = "go_on" and start again, to go on with what is left; or begin again: {}.'
_STUCK: Final = (
    "A batch was begun with them, and Spark would wait for a topic that is gone. Begin again behind the last batch "
    "that is done: {}; of the one that was begun, what is in the outbox comes twice."
)


class TopicFindings(NamedTuple):
    """What is known of a line's topics.

    Attributes:
        ids: Of those that are there.
        remarks: What a person should know, a line each.
        gone: Whether it stands in topics that it does not read any more, and misses no record of them.
    """

    ids: Mapping[str, str] = {}
    remarks: tuple[str, ...] = ()
    gone: bool = False


def ways_out(line: DownLine, file: str) -> str:
    """What to do about a topic that was made anew."""
    return (
        'To read the new one from its beginning, set starting_offsets = "earliest" (the default) and run: '
        f'{again_command(line, file)}; from its end, set starting_offsets = "latest" and run the same. Other topics go '
        "on behind the last batch that is done; of a batch that was begun, what is in the outbox comes twice."
    )


def look_at_topics(
    line: DownLine, file: str, evidence: Evidence, client: Mapping[str, str], limit: int
) -> TopicFindings:
    """Hold the topics against the checkpoint, and note their ids before the first offset of them is known.

    Args:
        line: As its next batch is read.
        file: The bridge's, as a command names it.
        evidence: What the checkpoint says.
        client: A client configuration, unresolved.
        limit: Records that its last batches took at most.

    Raises:
        KafkaError: TL-B03, a topic that the line names is not there; TL-B06, a topic was made anew, or is gone and had
            records that were not read; TL-K01, no answer to a line that has no offsets yet.
        JournalError: TL-J20, the ids can't be noted.
    """
    section, logs, where = line.section, Checkpoint(str(line.checkpoint)), f'line "{line.name}"'
    before, begun = _batch(line.checkpoint, evidence.planned)
    stood = begun if evidence.decided else {**before, **begun}
    kept = kept_ids(logs) if stood else {}
    try:
        named = section.topics or list(filter(section.reads, reachable(client, GLANCE_S).topics))
        ids = ids_of(client, {*named, *stood}, GLANCE_S)
    except KafkaError:
        if not stood:
            raise
        return TopicFindings()  # Spark waits longer for Kafka, and the sink looks before the tasks of each batch
    if remade(kept, ids):
        raise made_anew(where, ways_out(line, file), stood, kept, ids)
    if missing := sorted(set(section.topics) - set(ids)):
        what = f"{where} reads {', '.join(missing)}, and Kafka has no such topic"
        raise KafkaError("TL-B03", client["bootstrap.servers"], what, _CREATE)
    gone = {name: at for name, at in stood.items() if name not in ids or not section.reads(name)}
    lost = {name: "" if name in ids else _unread(name, evidence, line.checkpoint, limit) for name in gone}
    texts, stops = [text for text in lost.values() if text], section.on_data_loss == "stop"
    stuck = not evidence.decided and any(_ranges(before, begun, name) for name in gone if lost[name])
    if stops and gone and not evidence.decided and not texts:
        texts = _overtaken(client, before, {name: at for name, at in begun.items() if name not in gone})
    if texts and (stuck or stops):
        what = f"Kafka no longer has records that the line had not read: {'; '.join(texts)}"
        raise KafkaError("TL-B06", where, what, (_STUCK if stuck else _GO_ON).format(again_command(line, file)))
    if not stood:
        line.checkpoint.mkdir(mode=0o700, parents=True, exist_ok=True)
        keep_ids(logs, ids)
    return TopicFindings(ids, tuple(_remarks(ids, gone, lost)), gone=bool(gone))


def _remarks(ids: Mapping[str, str], gone: KafkaOffsets, lost: Mapping[str, str]) -> list[str]:
    """What is weaker than it looks, or has become less."""
    told = []
    for name, at in gone.items():
        known = f"lost are {lost[name]}" if lost[name] else "all that is known of it was delivered"
        why = "is not read any more" if name in ids else f"is gone from Kafka; {known}"
        told.append(f'topic "{name}", read up to {", ".join(f"offset {end:,}" for end in at.values())}, {why}')
    if unknown := ", ".join(sorted(name for name, one in ids.items() if not one)):
        what = "this Kafka gives none, so a topic that is deleted and made again is not recognised"
        told.append(f"topic ids unknown ({unknown}): {what}")
    return told


def _unread(name: str, evidence: Evidence, checkpoint: Path, limit: int) -> str:
    """What of a topic that is gone was not delivered, as far as the checkpoint says; "" for nothing."""
    before, begun = _batch(checkpoint, evidence.planned)
    if not evidence.decided and name in begun:
        return _told(name, _ranges(before, begun, name))
    start, end = _batch(checkpoint, evidence.done)  # where the query began, and no record was taken, if none is done
    taken = [one for each in end for one in _ranges(start, end, each)]
    # Each partition with records gives a batch one at least, and the share of each is rounded.
    idle = not _ranges(start, end, name) or sum(b - a for _, a, b in taken) + len(taken) < limit
    if idle and evidence.done is not None:
        return ""
    last = ", ".join(f"{at:,}" for at in end.get(name, {}).values())
    return f'topic "{name}" behind offset {last}, where more records were, or may have been'


def _overtaken(client: Mapping[str, str], start: KafkaOffsets, end: KafkaOffsets) -> list[str]:
    """Records of a batch that Kafka has deleted: while topics are gone Spark is not asked to stop at that."""
    lost = []
    for name in end:
        ranges = _ranges(start, end, name)
        firsts = first_offsets(client, name, [int(part) for part, _, _ in ranges])
        late = [(part, a, min(b, firsts[int(part)])) for part, a, b in ranges if firsts[int(part)] > a]
        lost += [_told(name, late)] if late else []
    return lost


def _batch(checkpoint: Path, number: int | None) -> tuple[KafkaOffsets, KafkaOffsets]:
    """Where a batch begins and ends; without one, where the query began."""
    return kafka_offsets(checkpoint, number - 1 if number else None), kafka_offsets(checkpoint, number)


def _ranges(start: KafkaOffsets, end: KafkaOffsets, name: str) -> list[tuple[str, int, int]]:
    """Partitions of a topic with records in a batch: number, first offset, offset after the last."""
    begins = start.get(name, {})
    return [(part, begins.get(part, 0), to) for part, to in end.get(name, {}).items() if to > begins.get(part, 0)]


def _told(name: str, ranges: list[tuple[str, int, int]]) -> str:
    return "; ".join(f'offsets {a:,} to {b - 1:,} of topic "{name}", partition {part}' for part, a, b in ranges)
