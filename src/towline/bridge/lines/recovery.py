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
from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from towline.bridge.config.model import Line
from towline.bridge.lines.evidence import Evidence, kafka_offsets, read_checkpoint
from towline.bridge.lines.identity import Identity, sinks
from towline.bridge.lines.notes import carry_totals
from towline.checkpoint import Checkpoint
from towline.errors import TowlineError
from towline.gateway.identity import MISMATCHES, is_other
from towline.guarantee import Guarantee, policy
from towline.kafka.topicids import kept_ids
from towline.spark.offsets import places_at

if TYPE_CHECKING:
    from towline.bridge.config.model import AnyLine

__all__ = [
    "CheckpointSettings",
    "ResumeStep",
    "SetMarkers",
    "again_command",
    "begin_again",
    "examine",
    "former_guarantee",
    "problem",
    "refusal",
    "refused",
    "step",
]

#: Of the checkpoints that were replaced, so many are kept.
_KEPT_CHECKPOINTS: Final = 3
#: Their names: the generation, and nanoseconds where that was taken. Other names are a person's.
_REPLACED: Final = re.compile(r"checkpoint\.(\d+)(?:\.(\d{15,}))?")

#: The form of the offset log that Spark 4 writes unless told otherwise, and that is read here (OffsetSeqLog.VERSION).
_FORM: Final = "v1"


class CheckpointSettings(NamedTuple):
    """What of a line's settings stands in its checkpoint or its markers.

    Attributes:
        parallelism: Transactions of a batch.
        dedupe: Whether repeats are dropped, for which Spark keeps state; None where that is not ours to know.
        whole: Whether a batch that was begun must be finished as it was begun (``exactly_once``, then and now).
        promoted: Whether batches are transactions now and were none, so that there is no marker of the last one.
        split: Digest of what the rows are made of, where a batch has several transactions; else "".
    """

    parallelism: int
    dedupe: bool | None = None
    whole: bool = True
    promoted: bool = False
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
    sections = [one.model_dump_json() for one in (*line.sections, line.dedupe) if one]
    return hashlib.sha256(json.dumps([sections, line.dead_letter_topic]).encode()).hexdigest()[:16]


_Rule = Callable[[Identity, Evidence, CheckpointSettings], str]


def _gone(identity: Identity, seen: Evidence, settings: CheckpointSettings) -> str:
    del settings
    if identity.query and not seen.query:
        return f"the checkpoint is gone; it belonged to query {identity.query}, which had taken {seen.committed:,} rows"
    return ""


def _other(identity: Identity, seen: Evidence, settings: CheckpointSettings) -> str:
    del settings
    if identity.query and seen.query != identity.query:
        return f"the checkpoint is that of query {seen.query}, this line's is {identity.query}"
    return ""


def _swapped(identity: Identity, seen: Evidence, settings: CheckpointSettings) -> str:
    del identity, settings
    if seen.journal and seen.journal != seen.gateway_journal:
        return f"the checkpoint belongs to journal {seen.journal}, the gateway serves journal {seen.gateway_journal}"
    return ""


def _old_journal(identity: Identity, seen: Evidence, settings: CheckpointSettings) -> str:
    del identity, settings
    if seen.journal and seen.planned_end > seen.tip:
        return (
            f"the checkpoint has come to offset {seen.planned_end:,}, the journal ends at {seen.tip:,}: an older copy"
        )
    return ""


def _gone_on(identity: Identity, seen: Evidence, settings: CheckpointSettings) -> str:
    """The same journal and long enough: only the opening that wrote the row tells that it is another one."""
    del identity, settings
    if is_other(seen.incarnation, seen.written_by, seen.planned_end, seen.first):
        here = seen.written_by or "another"
        return (
            f"the row below offset {seen.planned_end:,} was written by opening {seen.incarnation} of the journal when "
            f"the checkpoint took it, and here by {here}: an older copy that has gone on"
        )
    return ""


def _old_checkpoint(identity: Identity, seen: Evidence, settings: CheckpointSettings) -> str:
    del identity, settings
    if seen.done_end is not None and seen.done_end < seen.committed:
        return (
            f"the checkpoint is an older copy: its last batch {seen.done} ends at offset {seen.done_end:,}, "
            f"and {seen.committed:,} was committed already"
        )
    return ""


def _rescaled(identity: Identity, seen: Evidence, settings: CheckpointSettings) -> str:
    """A batch that was begun in N parts is finished in N parts: each part has a marker of its own."""
    if _scale_changed(identity, settings) and not seen.decided:
        return (
            f"batch {seen.planned} was begun with parallelism {identity.parallelism}, and it is {settings.parallelism} "
            "now: parts of it may be in Kafka"
        )
    return ""


def _restated(identity: Identity, seen: Evidence, settings: CheckpointSettings) -> str:
    """Which rows a batch has depends on whether repeats are dropped from it."""
    del identity
    if settings.whole and _state_changed(seen, settings) and not seen.decided:
        was, now = ("with", "without") if seen.stateful else ("without", "with")
        return f"batch {seen.planned} was begun {was} dedupe, and the line is {now} it now: it may be in Kafka"
    return ""


def _resplit(identity: Identity, seen: Evidence, settings: CheckpointSettings) -> str:
    """The parts that are in Kafka are compared with what comes now; by another key a row would be in another part."""
    if settings.whole and identity.split not in ("", settings.split) and not seen.decided:
        return f"batch {seen.planned} was begun when the line said something else: parts of it may be in Kafka"
    return ""


def _unread(identity: Identity, seen: Evidence, settings: CheckpointSettings) -> str:
    del identity, settings
    if seen.form not in ("", _FORM):
        return f"the checkpoint's offset log is of form {seen.form}, and this Towline reads {_FORM}"
    return ""


def _scale_changed(identity: Identity, settings: CheckpointSettings) -> bool:
    return identity.parallelism not in (0, settings.parallelism)


def _state_changed(seen: Evidence, settings: CheckpointSettings) -> bool:
    """Whether Spark would refuse the checkpoint: it has state that the query has no use for, or lacks what it needs.

    A query that has not finished a batch has no state yet, and can begin any.
    """
    return settings.dedupe not in (None, seen.stateful) and (seen.stateful or seen.done is not None)


_THE_OTHER: Final = "Bring back the state directory of that journal"
_NEWEST: Final = "Bring back the newest state directory"
#: In this order: what makes the later questions meaningless comes first. Code, rule, first way out.
RULES: Final[tuple[tuple[str, _Rule, str], ...]] = (
    ("TL-B53", _unread, "Take the version of PySpark that wrote it"),
    ("TL-B22", _gone, "Bring the checkpoint back"),
    ("TL-B22", _other, "Bring the line's own checkpoint back"),
    ("TL-B24", _swapped, _THE_OTHER),
    ("TL-B24", _old_journal, _NEWEST),
    ("TL-B24", _gone_on, _NEWEST),
    ("TL-B23", _old_checkpoint, "Bring back the newest checkpoint"),
    ("TL-B25", _rescaled, "Set parallelism back until this batch is done, then change it"),
    ("TL-B50", _restated, "Set dedupe back until this batch is done, then change it"),
    ("TL-B52", _resplit, "Set routes, dedupe and dead_letter_topic back until this batch is done, then change them"),
)


def problem(identity: Identity, seen: Evidence, settings: CheckpointSettings) -> tuple[str, str, str] | None:
    """The first thing that does not belong together: code, what it is, and the first way out; None when all does."""
    for code, rule, way in RULES:
        if what := rule(identity, seen, settings):
            return code, what, way
    return None


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
    """Let a query start, or say why not.

    Args:
        line: The line.
        file: The bridge's, as a command names it.
        identity: The line's.
        seen: What its checkpoint and its gateway say.
        mark: Sets markers; a line that drops repeats needs it.

    Returns:
        The identity to start with: a new one where a changed setting takes one (`step`).

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
    """What a gateway that found its journal not to be the checkpoint's says to the bridge's user [TL-B24].

    Returns:
        None for any other error.
    """
    if error.code not in MISMATCHES:
        return None
    way = _THE_OTHER if error.code == "TL-G04" else _NEWEST
    return refusal(line, file, "TL-B24", f"{error.what}; nothing was taken in", way)


#: What beginning again may cost.
_COST: Final = {
    "at_most_once": "what waits on disk is given up",
    "at_least_once": "what the last batch held may come twice",
    "exactly_once": "what the last batch held may come twice, this once",
}
#: The account of another journal knows nothing of what was carried meanwhile.
_COST_OF_A_COPY: Final = "what waits in this journal is carried, and what of it was carried before comes twice"


def begin_again(line: AnyLine) -> str:
    """Keep the checkpoint under another name and take a new sink id; the query then starts where the account stands.

    Returns:
        What was done, for the person asked.
    """
    identity = Identity.read(line.gateway.state_dir)
    if identity is None:
        return f'line "{line.name}" begins anyway: it has never run here'
    kept = "; an old checkpoint is kept beside the new one" if line.checkpoint.exists() else ""
    return f'line "{line.name}" begins again as sink "{_begin(line, identity).sink}"{kept}'


def _begin(line: AnyLine, identity: Identity) -> Identity:
    """Cut after the last batch that is done; at_most_once after the last that was begun.

    A crash after the move shows as a checkpoint that is gone [TL-B22], and beginning again is one of its ways out.
    """
    old = read_checkpoint(line.checkpoint)
    # A batch that was begun with at_most_once is given up, whatever the line promises now.
    again = policy(line.guarantee).serves_again and policy(former_guarantee(line, identity)).serves_again
    batch = old.done if again else old.planned
    # Without a batch it begins where it began before, which "latest" would not say.
    at = kafka_offsets(line.checkpoint, batch)
    offsets = json.dumps(at) if at else identity.offsets
    ends = {place.gateway: place.to_json() for place in places_at(Checkpoint(str(line.checkpoint)), batch)}
    fresh = identity.again(json.dumps(ends) if ends else "", offsets, sinks(line.gateway.state_dir))
    fresh = replace(fresh, topic_ids=json.dumps(kept_ids(Checkpoint(str(line.checkpoint)))))
    if line.checkpoint.exists():
        former = _free(line.checkpoint.with_name(f"checkpoint.{identity.generation}"))
        line.checkpoint.rename(former)
        carry_totals(former, line.checkpoint)
        _remove_oldest(line.checkpoint)
    fresh.save(line.gateway.state_dir)
    return fresh


def _remove_oldest(checkpoint: Path) -> None:
    """Of the checkpoints that were replaced only the newest are of use: a person may bring one back."""
    ours = [(match, path) for path in checkpoint.parent.iterdir() if (match := _REPLACED.fullmatch(path.name))]
    replaced = sorted(ours, key=lambda one: (int(one[0][1]), int(one[0][2] or 0)))
    for _, path in replaced[:-_KEPT_CHECKPOINTS]:
        shutil.rmtree(path, ignore_errors=True)


def _free(path: Path) -> Path:
    return path if not path.exists() else path.with_name(f"{path.name}.{time.time_ns()}")
