"""Before a query starts: do its checkpoint, its gateway's journal and its identity still belong together?

Restored copies, removed directories and changed settings make a batch mean other rows, or a marker another batch. Each
is recognised by comparing what the three say, and told in one message with the two ways out; nothing is guessed.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from enum import Enum
from itertools import chain
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

from towline.bridge.config.model import AnyLine, Line
from towline.bridge.lines.account import carry_totals
from towline.bridge.lines.evidence import Evidence, kafka_offsets, read_checkpoint
from towline.bridge.lines.identity import Identity, sinks
from towline.checkpoint import Checkpoint
from towline.errors import TowlineError
from towline.gateway.identity import MISMATCHES, is_other
from towline.guarantee import Guarantee, policy
from towline.kafka.admin import kept_ids
from towline.spark.offsets import places_at

#: Of the checkpoints that were replaced, so many are kept.
_KEPT_CHECKPOINTS: Final = 3
#: Their names: the generation, and nanoseconds where that was taken. Other names are a person's.
_REPLACED: Final = re.compile(r"checkpoint\.(\d+)(?:\.(\d{15,}))?")

#: The form of the offset log that Spark 4 writes unless told otherwise, and that is read here (OffsetSeqLog.VERSION).
_FORM: Final = "v1"


class CheckpointSettings(NamedTuple):
    """What of a line's settings stands in its checkpoint or its markers."""

    #: Transactions of a batch.
    parallelism: int
    #: Whether repeats are dropped, for which Spark keeps state; None where that is not ours to know.
    dedupe: bool | None = None
    #: Whether a batch that was begun must be finished as it was begun (``exactly_once``, then and now).
    whole: bool = True
    #: Whether batches are transactions now and were none, so that there is no marker of the last one.
    promoted: bool = False
    #: Digest of what the rows are made of, where a batch has several transactions; else "".
    split: str = ""

    @classmethod
    def of(cls, line: AnyLine, identity: Identity) -> CheckpointSettings:
        """As the file says it now; without transactions the number of writers stands nowhere."""
        now, before = policy(line.guarantee).transactions, policy(former_guarantee(line, identity)).transactions
        up = line if isinstance(line, Line) else None
        return cls(
            line.parallelism if now and before else identity.parallelism,
            None if up is None else up.within is not None,
            now and before,
            now and not before,
            _split(up) if up and now and line.parallelism > 1 else "",
        )


def former_guarantee(line: AnyLine, identity: Identity) -> Guarantee:
    """What the line promised when it ran last; before its first start, what it promises now."""
    return Guarantee(identity.guarantee or line.guarantee)


def _split(line: Line) -> str:
    """Changes with whatever a batch's rows are made of."""
    sections = [one.model_dump_json() for one in (*line.route, line.dedupe) if one]
    return hashlib.sha256(json.dumps([sections, line.dead_letter_topic]).encode()).hexdigest()[:16]


_THE_OTHER: Final = "Bring back the state directory of that journal"
_NEWEST: Final = "Bring back the newest state directory"
#: Code, what does not belong together, and the first way out.
Problem: TypeAlias = tuple[str, str, str]


def problem(identity: Identity, seen: Evidence, settings: CheckpointSettings) -> Problem | None:
    """The first thing that does not belong together; None when all does."""
    return next(chain(_mismatches(identity, seen), _changes(identity, seen, settings)), None)


def _mismatches(identity: Identity, seen: Evidence) -> Iterator[Problem]:
    """What is another one, or an older copy; what makes the later questions meaningless comes first."""
    if seen.form not in ("", _FORM):
        what = f"the checkpoint's offset log is of form {seen.form}, and this Towline reads {_FORM}"
        yield "TL-B53", what, "Take the version of PySpark that wrote it"
    if identity.query and not seen.query:
        taken = f"it belonged to query {identity.query}, which had taken {seen.committed:,} rows"
        yield "TL-B22", f"the checkpoint is gone; {taken}", "Bring the checkpoint back"
    if identity.query and seen.query != identity.query:
        what = f"the checkpoint is that of query {seen.query}, this line's is {identity.query}"
        yield "TL-B22", what, "Bring the line's own checkpoint back"
    if seen.journal and seen.journal != seen.gateway_journal:
        here = f"the gateway serves journal {seen.gateway_journal}"
        yield "TL-B24", f"the checkpoint belongs to journal {seen.journal}, {here}", _THE_OTHER
    if seen.journal and seen.planned_end > seen.tip:
        ends = f"the journal ends at {seen.tip:,}: an older copy"
        yield "TL-B24", f"the checkpoint has come to offset {seen.planned_end:,}, {ends}", _NEWEST
    # The same journal and long enough: only the opening that wrote the row tells that it is another one.
    if is_other(seen.incarnation, seen.written_by, seen.planned_end, seen.first):
        what = (
            f"the row below offset {seen.planned_end:,} was written by opening {seen.incarnation} of the journal when "
            f"the checkpoint took it, and here by {seen.written_by or 'another'}: an older copy that has gone on"
        )
        yield "TL-B24", what, _NEWEST
    if seen.done_end is not None and seen.done_end < seen.committed:
        last = f"its last batch {seen.done} ends at offset {seen.done_end:,}"
        what = f"the checkpoint is an older copy: {last}, and {seen.committed:,} was committed already"
        yield "TL-B23", what, "Bring back the newest checkpoint"


def _changes(identity: Identity, seen: Evidence, settings: CheckpointSettings) -> Iterator[Problem]:
    """Settings by which a batch that was begun would be another one: parts of it may be in Kafka."""
    if seen.decided:
        return
    until = "back until this batch is done, then change"
    begun = f"batch {seen.planned} was begun"
    if _scale_changed(identity, settings):  # each part has a marker of its own
        now = f"with parallelism {identity.parallelism}, and it is {settings.parallelism} now"
        yield "TL-B25", f"{begun} {now}: parts of it may be in Kafka", f"Set parallelism {until} it"
    if settings.whole and _state_changed(seen, settings):  # which rows it has depends on whether repeats are dropped
        was, now = ("with", "without") if seen.stateful else ("without", "with")
        what = f"{begun} {was} dedupe, and the line is {now} it now: it may be in Kafka"
        yield "TL-B50", what, f"Set dedupe {until} it"
    if settings.whole and identity.split not in ("", settings.split):  # by another key a row would be in another part
        what = f"{begun} when the line said something else: parts of it may be in Kafka"
        yield "TL-B52", what, f"Set routes, dedupe and dead_letter_topic {until} them"


def _scale_changed(identity: Identity, settings: CheckpointSettings) -> bool:
    return identity.parallelism not in (0, settings.parallelism)


def _state_changed(seen: Evidence, settings: CheckpointSettings) -> bool:
    """Whether Spark would refuse the checkpoint: it has state that the query has no use for, or lacks what it needs.

    A query that has not finished a batch has no state yet, and can begin any.
    """
    return settings.dedupe not in (None, seen.stateful) and (seen.stateful or seen.done is not None)


class ResumeStep(Enum):
    """How a query that may start goes on."""

    #: With its checkpoint, as it was.
    GO = "goes on"
    #: With a new checkpoint, exactly behind the last batch that is done.
    CUT = "begins a new checkpoint behind the last batch"
    #: With its checkpoint, because that holds what repeats are recognised by, and new markers.
    MARK = "goes on with its checkpoint, under a new sink id"


def step(identity: Identity, seen: Evidence, settings: CheckpointSettings) -> ResumeStep:
    """What a changed setting takes, when `problem` has found none."""
    if _state_changed(seen, settings):
        return ResumeStep.CUT
    if _scale_changed(identity, settings) or (settings.promoted and seen.planned is not None):
        keeps = settings.dedupe and seen.decided and seen.done is not None
        return ResumeStep.MARK if keeps else ResumeStep.CUT
    return ResumeStep.GO


#: Makes a batch the last one that counts as written by a sink: identity, batch.
SetMarkers = Callable[[Identity, int], None]


def examine(
    line: AnyLine, file: Path | str, identity: Identity, seen: Evidence, mark: SetMarkers | None = None
) -> Identity:
    """Let a query start, or say why not; the identity to start with is a new one where a changed setting takes one.

    Raises:
        TowlineError: TL-B22 to TL-B25, TL-B50, TL-B52, TL-B53, with both ways out; what `mark` raises.
    """
    settings = CheckpointSettings.of(line, identity)
    if reason := problem(identity, seen, settings):
        raise refusal(line, file, *reason)
    how = step(identity, seen, settings)
    if how is not ResumeStep.GO:
        sys.stderr.write(f"--- line {line.name}\na changed setting: the line {how.value}\n")
    resumed = identity
    if how is ResumeStep.CUT:
        resumed = _begin(line, identity)
    elif how is ResumeStep.MARK:
        assert mark is not None
        assert seen.done is not None
        resumed = identity.rescaled(line.parallelism, sinks(line.gateway.state_dir))
        mark(resumed, seen.done)  # before the identity: a crash in between sets the same markers again
    split = resumed.split if how is ResumeStep.GO and not seen.decided else settings.split
    resumed = replace(resumed, guarantee=line.guarantee.value, split=split)
    if resumed != identity:
        resumed.save(line.gateway.state_dir)  # before there is a batch that was begun so
    return resumed


def again_command(line: AnyLine, file: Path | str) -> str:
    """The command with which a line begins again."""
    return f"towline begin-again {file} {line.name}"


def refusal(line: AnyLine, file: Path | str, code: str, what: str, way: str) -> TowlineError:
    """Why a line does not start, with both ways out: mend it, or begin again."""
    cost = _COST_OF_A_COPY if code == "TL-B24" and policy(line.guarantee).serves_again else _COST[line.guarantee.value]
    again = again_command(line, file)
    do = f"{way} (in {line.gateway.state_dir}); or begin again where the gateway's account stands: {again} ({cost})."
    return TowlineError(code, f'line "{line.name}"', what, do)


def refused(line: AnyLine, file: Path | str, error: TowlineError) -> TowlineError | None:
    """What a gateway that found its journal not to be the checkpoint's says to the bridge's user [TL-B24], or None."""
    way = _THE_OTHER if error.code == "TL-G04" else _NEWEST
    what = f"{error.what}; nothing was taken in"
    return refusal(line, file, "TL-B24", what, way) if error.code in MISMATCHES else None


#: What beginning again may cost.
_COST: Final = {
    "at_most_once": "what waits on disk is given up",
    "at_least_once": "what the last batch held may come twice",
    "exactly_once": "what the last batch held may come twice, this once",
}
#: The account of another journal knows nothing of what was carried meanwhile.
_COST_OF_A_COPY: Final = "what waits in this journal is carried, and what of it was carried before comes twice"


def begin_again(line: AnyLine) -> str:
    """Keep the checkpoint under another name and take a new sink id; the query then starts where the account stands."""
    identity = Identity.read(line.gateway.state_dir)
    if identity is None:
        return f'line "{line.name}" begins anyway: it has never run here'
    kept = "; an old checkpoint is kept beside the new one" if line.checkpoint.exists() else ""
    return f'line "{line.name}" begins again as sink "{_begin(line, identity).sink}"{kept}'


def _begin(line: AnyLine, identity: Identity) -> Identity:
    """Cut after the last batch that is done; at_most_once after the last that was begun.

    After a crash behind the move, which shows as TL-B22, the next call goes on with the checkpoint that was moved.
    """
    moved = [path for generation, path in _replaced(line.checkpoint) if generation == identity.generation]
    going_on = bool(moved) and not Checkpoint(str(line.checkpoint)).query
    former = moved[-1] if going_on else line.checkpoint
    old, logs = read_checkpoint(former), Checkpoint(str(former))
    # A batch that was begun with at_most_once is given up, whatever the line promises now.
    again = policy(line.guarantee).serves_again and policy(former_guarantee(line, identity)).serves_again
    batch = old.done if again else old.planned
    # Without a batch it begins where it began before, which "latest" would not say.
    at = kafka_offsets(former, batch)
    offsets = json.dumps(at) if at else identity.offsets
    ends = {place.gateway: place.to_json() for place in places_at(logs, batch)}
    fresh = identity.again(json.dumps(ends) if ends else "", offsets, sinks(line.gateway.state_dir))
    fresh = replace(fresh, topic_ids=json.dumps(kept_ids(logs)))
    if former.exists():
        former = former if going_on else former.rename(_free(former.with_name(f"checkpoint.{identity.generation}")))
        carry_totals(former, line.checkpoint)
        for _, path in _replaced(line.checkpoint)[:-_KEPT_CHECKPOINTS]:
            shutil.rmtree(path, ignore_errors=True)
    fresh.save(line.gateway.state_dir)
    return fresh


def _replaced(checkpoint: Path) -> list[tuple[int, Path]]:
    """Checkpoints that were moved aside with their generations, oldest first; a person may bring a new one back."""
    directory = checkpoint.parent
    names = directory.iterdir() if directory.is_dir() else ()
    ours = [(match, path) for path in names if (match := _REPLACED.fullmatch(path.name))]
    ours.sort(key=lambda entry: (int(entry[0][1]), int(entry[0][2] or 0)))
    return [(int(match[1]), path) for match, path in ours]


def _free(path: Path) -> Path:
    return path if not path.exists() else path.with_name(f"{path.name}.{time.time_ns()}")
