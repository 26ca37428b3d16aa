"""Recovery checks before a query starts: checkpoint, gateway journal and identity must belong together.

After restored copies, removed directories or changed settings a batch could mean other rows, or a marker another batch.
Each case is recognised by comparing the three, and reported in one message with two remedies; nothing is guessed.
"""

from __future__ import annotations

import re
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple

from towline.bridge.config.model import AnyLine, Bridge, Uplink
from towline.bridge.lines.account import copy_totals
from towline.bridge.lines.identity import Identity, sink_ids
from towline.checkpoint import Checkpoint
from towline.errors import TowlineError
from towline.gateway.identity import INBOX_MISMATCH_CODES, Extent, JournalPosition, check_offset
from towline.guarantee import Guarantee, policy
from towline.kafka.admin import saved_topic_ids
from towline.kafka.markerstore import MarkerStore
from towline.kafka.options import SinkSettings
from towline.spark.offsets import positions_at

#: Number of former checkpoints to keep.
_MAX_FORMER_CHECKPOINTS: Final = 3
#: Their names: generation, and nanoseconds. Other names belong to the user.
_FORMER_NAME: Final = re.compile(r"checkpoint\.(\d+)\.(\d{15,})")

#: Version of the offset log that Spark 4 writes by default (OffsetSeqLog.VERSION).
_LOG_VERSION: Final = "v1"


def former_guarantee(line: AnyLine, identity: Identity) -> Guarantee:
    """Return the line's guarantee when it last ran; before its first start, the configured one."""
    return Guarantee(identity.guarantee or line.guarantee)


class ServedJournal(NamedTuple):
    """Journal of a gateway, and the line's positions in it.

    Attributes:
        extent: Extent of the journal, for the check of `position`.
        committed_offset: Offset up to which the bridge reported batches as committed.
        position: End of the newest planned batch, or start of a query without a checkpoint; None for none.
        committed_position: End of the newest committed batch.
    """

    extent: Extent
    committed_offset: int = 0
    position: JournalPosition | None = None
    committed_position: JournalPosition | None = None

    def mismatch(self, name: str) -> TowlineError | None:
        """Return the error if the gateway's journal doesn't match `position`; else None."""
        try:
            if self.position is not None:
                check_offset(name, self.position, self.extent)
        except TowlineError as error:
            return error
        return None


_RESTORE_NEWEST: Final = "Bring back the newest state directory"


def _mismatches(
    identity: Identity, checkpoint: Checkpoint, journals: Mapping[str, ServedJournal]
) -> Iterator[tuple[str, str, str]]:
    """Yield code, problem and first remedy of each mismatch; one that makes later checks meaningless comes first."""
    if (version := checkpoint.offset_log_version) not in ("", _LOG_VERSION):
        problem = f"the checkpoint's offset log has version {version}, and this Towline reads {_LOG_VERSION}"
        yield "TL-B53", problem, "Take the version of PySpark that wrote it"
    if identity.query and checkpoint.query_id != identity.query:
        present_text = f"is that of query {checkpoint.query_id}" if checkpoint.query_id else "is missing"
        problem = f"the checkpoint {present_text}, this line's is that of query {identity.query}"
        yield "TL-B22", problem, "Bring the line's own checkpoint back"
    for name, journal in sorted(journals.items()):
        prefix = "" if name == identity.line else f"gateway {name}: "
        if checkpoint.last_planned_batch() is not None and (error := journal.mismatch(name)):
            yield "TL-B24", f"{prefix}{error.problem}", _RESTORE_NEWEST
        committed = journal.committed_offset
        if (end := journal.committed_position) is not None and end.offset < committed:
            last_batch = f"its last batch {checkpoint.last_committed_batch()} ends at offset {end.offset:,}"
            problem = f"the checkpoint is an older copy: {last_batch}, and {committed:,} was committed already"
            yield "TL-B23", f"{prefix}{problem}", "Bring back the newest checkpoint"


class ResumeStep(Enum):
    """Step with which a checked query resumes."""

    #: With the same checkpoint.
    CONTINUE = "continues"
    #: With a new checkpoint, exactly behind the last committed batch.
    NEW_CHECKPOINT = "begins a new checkpoint behind the last batch"
    #: With the same checkpoint, since it has the dedupe keys, and new markers.
    NEW_SINK = "continues with its checkpoint, under a new sink id"


def _has_markers(line: AnyLine, identity: Identity) -> bool:
    """Return whether batches are transactions with markers, now and when the line last ran."""
    return policy(line.guarantee).transactions and policy(former_guarantee(line, identity)).transactions


def resume_step(line: AnyLine, identity: Identity, checkpoint: Checkpoint) -> ResumeStep:
    """Return the step that changed settings need, if nothing mismatches."""
    needs_state = isinstance(line, Uplink) and line.dedupe_window is not None
    # Spark refuses a checkpoint with state that the query has no use for, or without what it needs. A query that has
    # not finished a batch has no state yet, and can begin any.
    has_batch, has_state = checkpoint.last_committed_batch() is not None, checkpoint.has_state
    if needs_state != has_state and (has_state or has_batch):
        return ResumeStep.NEW_CHECKPOINT
    # Each transaction of a batch has a marker of its own; without transactions the number of writers is not stored.
    has_markers = _has_markers(line, identity)
    rescaled = has_markers and identity.parallelism not in (0, line.parallelism)
    needs_markers = policy(line.guarantee).transactions and not has_markers  # there is no marker of the last batch
    if checkpoint.last_planned_batch() is None or not (rescaled or needs_markers):
        return ResumeStep.CONTINUE
    keeps_checkpoint = needs_state and has_batch and checkpoint.all_committed
    return ResumeStep.NEW_SINK if keeps_checkpoint else ResumeStep.NEW_CHECKPOINT


def marker_store(bridge: Bridge, line: AnyLine, identity: Identity, **options: str) -> MarkerStore:
    """Return the store of the markers of a line's sink; `options` are those of the sink."""
    return MarkerStore(SinkSettings.parse({**bridge.sink_options(line, identity.sink), **options}), identity.sink)


def check_resume(
    bridge: Bridge,
    line: AnyLine,
    identity: Identity,
    checkpoint: Checkpoint,
    journals: Mapping[str, ServedJournal] = MappingProxyType({}),
) -> Identity:
    """Check that a query may start; return the identity to start with, a new one if a changed setting needs it.

    Args:
        bridge: The bridge.
        line: Line with the settings of its next batch.
        identity: Identity of its last start.
        checkpoint: Its checkpoint.
        journals: Journals of the gateways that answered, by name.

    Raises:
        TowlineError: TL-B22 to TL-B24, TL-B53, with both remedies; TL-C210; errors of `MarkerStore.reset`.
    """
    for code, problem, remedy in _mismatches(identity, checkpoint, journals):
        raise start_refusal(line, bridge.file, code, problem, remedy)
    next_step = resume_step(line, identity, checkpoint)
    replaces = next_step is ResumeStep.NEW_CHECKPOINT
    if replaces and not checkpoint.all_committed and _has_markers(line, identity):  # another sink would rewrite it
        problem = f"batch {checkpoint.last_planned_batch()} was begun, and by other settings than these"
        raise start_refusal(line, bridge.file, "TL-C210", problem, "Set dedupe as it was until the batch is done")
    if next_step is not ResumeStep.CONTINUE:
        sys.stderr.write(f"--- line {line.name}\na changed setting: the line {next_step.value}\n")
    new_identity = identity
    if next_step is ResumeStep.NEW_CHECKPOINT:
        new_identity = _reset_checkpoint(line, identity)
    elif next_step is ResumeStep.NEW_SINK:
        batch = checkpoint.last_committed_batch()
        assert batch is not None
        new_identity = identity.with_new_sink(sink_ids(line.gateway.state_dir))
        # Before the identity: a crash in between sets the same markers again.
        marker_store(bridge, line, new_identity).reset(batch)
    new_identity = replace(new_identity, guarantee=line.guarantee.value, parallelism=line.parallelism)
    if new_identity != identity:
        new_identity.save(line.gateway.state_dir)  # before the first batch with these settings
    return new_identity


def reset_command(line: AnyLine, file: Path | str) -> str:
    """Return the command that resets a line."""
    return f"towline reset {file} {line.name}"


def start_refusal(line: AnyLine, file: Path | str, code: str, problem: str, fix: str) -> TowlineError:
    """Return the error of a line that does not start, with both remedies: restore, or reset."""
    cost = _COPY_COST if code == "TL-B24" and policy(line.guarantee).replays_batches else _COST[line.guarantee.value]
    cmd = reset_command(line, file)
    remedy = f"{fix} (in {line.gateway.state_dir}); or reset it to the gateway's committed offset: {cmd} ({cost})."
    return TowlineError(code, f'line "{line.name}"', problem, remedy)


def journal_refusal(line: AnyLine, file: Path | str, exc: TowlineError) -> TowlineError | None:
    """Return TL-B24 for a gateway whose journal does not match the checkpoint; None for another error."""
    problem = f"{exc.problem}; nothing was taken in"
    refusal = start_refusal(line, file, "TL-B24", problem, _RESTORE_NEWEST)
    return refusal if exc.code in INBOX_MISMATCH_CODES else None


#: Possible cost of a reset.
_COST: Final = {
    "at_most_once": "what waits on disk is dropped",
    "at_least_once": "what the last batch held may come twice",
    "exactly_once": "what the last batch held may come twice, this once",
}
#: Another journal does not know which messages were delivered meanwhile.
_COPY_COST: Final = "what waits in this journal is delivered, what was delivered before a second time"


def reset_line(line: AnyLine) -> str:
    """Reset a line: move its checkpoint away and take a new sink id; the query then starts at the committed offsets."""
    identity = Identity.read(line.gateway.state_dir)
    if identity is None:
        return f'line "{line.name}" needs no reset: it has never run here'
    kept_text = "; an old checkpoint is kept beside the new one" if line.checkpoint.exists() else ""
    return f'line "{line.name}" is reset, its new sink is "{_reset_checkpoint(line, identity).sink}"{kept_text}'


def _reset_checkpoint(line: AnyLine, identity: Identity) -> Identity:
    """Start a new checkpoint behind the last committed batch; with at_most_once behind the last planned one.

    A crash after the move shows as TL-B22; the next call then continues with the moved checkpoint.
    """
    backups = [path for generation, path in _former_checkpoints(line.checkpoint) if generation == identity.generation]
    continues_move = bool(backups) and not Checkpoint(str(line.checkpoint)).query_id
    former = backups[-1] if continues_move else line.checkpoint
    logs = Checkpoint(str(former))
    # A batch that was begun with at_most_once is dropped, whatever the guarantee is now.
    may_repeat = policy(line.guarantee).replays_batches and policy(former_guarantee(line, identity)).replays_batches
    batch = logs.last_committed_batch() if may_repeat else logs.last_planned_batch()
    # Without a batch the start is the former one, which "latest" would miss; of a lost checkpoint it is unknown.
    start_positions = identity.positions if identity.query in ("", logs.query_id) else ()
    new_identity = identity.reset(
        sink_ids(line.gateway.state_dir),
        positions=positions_at(logs, batch) or start_positions,
        offsets=logs.kafka_offsets(batch) or identity.offsets,
        topic_ids=saved_topic_ids(logs) or identity.topic_ids,
    )
    if former.exists():
        if not continues_move:
            former = former.rename(former.with_name(f"checkpoint.{identity.generation}.{time.time_ns()}"))
        copy_totals(former, line.checkpoint)
        for _, path in _former_checkpoints(line.checkpoint)[:-_MAX_FORMER_CHECKPOINTS]:
            shutil.rmtree(path, ignore_errors=True)
    new_identity.save(line.gateway.state_dir)
    return new_identity


def _former_checkpoints(checkpoint: Path) -> list[tuple[int, Path]]:
    """Return the former checkpoints with their generations, oldest first; a person may restore one of them."""
    directory = checkpoint.parent
    paths = directory.iterdir() if directory.is_dir() else ()
    entries = [(match, path) for path in paths if (match := _FORMER_NAME.fullmatch(path.name))]
    entries.sort(key=lambda entry: (int(entry[0][1]), int(entry[0][2])))
    return [(int(match[1]), path) for match, path in entries]
