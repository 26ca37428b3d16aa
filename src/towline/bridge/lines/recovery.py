"""Before a query starts: do its checkpoint, its gateway's journal and its identity still belong together?

Restored copies, removed directories and changed settings make a batch mean other rows, or a marker another batch. Each
is recognised by comparing what the three say, and told in one message with the two ways out; nothing is guessed.
"""

from __future__ import annotations

import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple, TypeAlias

from towline.bridge.config.model import AnyLine, Line
from towline.bridge.lines.account import carry_totals
from towline.bridge.lines.evidence import Evidence, kafka_offsets, read_checkpoint
from towline.bridge.lines.identity import Identity, sinks
from towline.checkpoint import Checkpoint
from towline.errors import TowlineError
from towline.gateway.identity import MISMATCHES, Extent, KnownOffset, check_offset
from towline.guarantee import Guarantee, policy
from towline.kafka.admin import kept_ids
from towline.spark.offsets import JournalPlace, places_at

#: Of the checkpoints that were replaced, so many are kept.
_KEPT_CHECKPOINTS: Final = 3
#: Their names: the generation, and nanoseconds where that was taken. Other names are a person's.
_REPLACED: Final = re.compile(r"checkpoint\.(\d+)(?:\.(\d{15,}))?")

#: The form of the offset log that Spark 4 writes unless told otherwise, and that is read here (OffsetSeqLog.VERSION).
_FORM: Final = "v1"


def former_guarantee(line: AnyLine, identity: Identity) -> Guarantee:
    """What the line promised when it ran last; before its first start, what it promises now."""
    return Guarantee(identity.guarantee or line.guarantee)


class ServedJournal(NamedTuple):
    """The journal that a gateway serves, and where a line stands in it.

    Attributes:
        here: Of the journal, asked about `place`.
        committed: Up to where the bridge told the gateway that it is done.
        place: In the newest planned batch, or where a query without a checkpoint begins; None for nowhere.
        done: In the newest batch that is done.
    """

    here: Extent
    committed: int = 0
    place: JournalPlace | None = None
    done: JournalPlace | None = None

    def mismatch(self, name: str) -> TowlineError | None:
        """Why the journal of a gateway is not the one in which `place` is."""
        try:
            if (place := self.place) is not None:
                check_offset(name, KnownOffset(place.journal, place.offset, place.incarnation), self.here)
        except TowlineError as error:
            return error
        return None


_NEWEST: Final = "Bring back the newest state directory"
#: Code, what does not belong together, and the first way out.
Problem: TypeAlias = tuple[str, str, str]


def _problems(identity: Identity, seen: Evidence, journals: Mapping[str, ServedJournal]) -> Iterator[Problem]:
    """What is another one, or an older copy; what makes the later questions meaningless comes first."""
    if seen.form not in ("", _FORM):
        what = f"the checkpoint's offset log is of form {seen.form}, and this Towline reads {_FORM}"
        yield "TL-B53", what, "Take the version of PySpark that wrote it"
    if identity.query and not seen.query:
        taken = f", which had taken {sum(one.committed for one in journals.values()):,} rows" if journals else ""
        what = f"the checkpoint is gone; it belonged to query {identity.query}{taken}"
        yield "TL-B22", what, "Bring the checkpoint back"
    if identity.query and seen.query != identity.query:
        what = f"the checkpoint is that of query {seen.query}, this line's is {identity.query}"
        yield "TL-B22", what, "Bring the line's own checkpoint back"
    for name, one in sorted(journals.items()):
        who = "" if name == identity.line else f"gateway {name}: "
        if seen.planned is not None and (error := one.mismatch(name)):
            yield "TL-B24", f"{who}{error.what}", _way_back(error)
        if one.done is not None and one.done.offset < one.committed:
            last = f"its last batch {seen.done} ends at offset {one.done.offset:,}"
            what = f"the checkpoint is an older copy: {last}, and {one.committed:,} was committed already"
            yield "TL-B23", f"{who}{what}", "Bring back the newest checkpoint"


def _way_back(error: TowlineError) -> str:
    return "Bring back the state directory of that journal" if error.code == "TL-G04" else _NEWEST


class ResumeStep(Enum):
    """How a query that may start goes on."""

    #: With its checkpoint, as it was.
    GO = "goes on"
    #: With a new checkpoint, exactly behind the last batch that is done.
    CUT = "begins a new checkpoint behind the last batch"
    #: With its checkpoint, because that holds what repeats are recognised by, and new markers.
    MARK = "goes on with its checkpoint, under a new sink id"


def _marked(line: AnyLine, identity: Identity) -> bool:
    """Whether batches are transactions with markers, and were when the line ran last."""
    return policy(line.guarantee).transactions and policy(former_guarantee(line, identity)).transactions


def step(line: AnyLine, identity: Identity, seen: Evidence) -> ResumeStep:
    """What a changed setting takes, where nothing is another one, or an older copy."""
    # What keeps state on the way down is the user's own transform.
    dedupe = line.within is not None if isinstance(line, Line) else seen.stateful
    # Spark refuses a checkpoint with state that the query has no use for, or without what it needs. A query that has
    # not finished a batch has no state yet, and can begin any.
    if dedupe != seen.stateful and (seen.stateful or seen.done is not None):
        return ResumeStep.CUT
    # Each transaction of a batch has a marker of its own; without transactions the number of writers stands nowhere.
    marked = _marked(line, identity)
    rescaled = marked and identity.parallelism not in (0, line.parallelism)
    promoted = policy(line.guarantee).transactions and not marked  # there is no marker of the last batch
    if seen.planned is None or not (rescaled or promoted):
        return ResumeStep.GO
    keeps = isinstance(line, Line) and dedupe and seen.decided and seen.done is not None
    return ResumeStep.MARK if keeps else ResumeStep.CUT


#: Makes a batch the last one that counts as written by a sink: identity, batch.
SetMarkers = Callable[[Identity, int], None]


def examine(
    line: AnyLine,
    file: Path | str,
    identity: Identity,
    seen: Evidence,
    mark: SetMarkers | None = None,
    journals: Mapping[str, ServedJournal] = MappingProxyType({}),
) -> Identity:
    """Let a query start, or say why not; the identity to start with is a new one where a changed setting takes one.

    Args:
        line: By the settings that its next batch is made by.
        file: The bridge's, as a command names it.
        identity: That of its last start.
        seen: What the checkpoint says.
        mark: For lines whose batches are transactions.
        journals: Of the gateways that answered, by name.

    Raises:
        TowlineError: TL-B22 to TL-B24, TL-B53, with both ways out; what `mark` raises.
    """
    for code, what, way in _problems(identity, seen, journals):
        raise refusal(line, file, code, what, way)
    how = step(line, identity, seen)
    if how is ResumeStep.CUT and not seen.decided and _marked(line, identity):  # another sink would write it again
        what = f"batch {seen.planned} was begun, and by other settings than these"
        raise refusal(line, file, "TL-C210", what, "Set dedupe as it was until the batch is done")
    if how is not ResumeStep.GO:
        sys.stderr.write(f"--- line {line.name}\na changed setting: the line {how.value}\n")
    resumed = identity
    if how is ResumeStep.CUT:
        resumed = _begin(line, identity)
    elif how is ResumeStep.MARK:
        assert mark is not None
        assert seen.done is not None
        resumed = identity.rescaled(sinks(line.gateway.state_dir))
        mark(resumed, seen.done)  # before the identity: a crash in between sets the same markers again
    resumed = replace(resumed, guarantee=line.guarantee.value, parallelism=line.parallelism)
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
    what = f"{error.what}; nothing was taken in"
    return refusal(line, file, "TL-B24", what, _way_back(error)) if error.code in MISMATCHES else None


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
    # Without a batch it begins where it began before, which "latest" would not say; of a lost one that is not known.
    before = identity.places if identity.query in ("", old.query) else {}
    fresh = identity.again(
        sinks(line.gateway.state_dir),
        places={place.gateway: place.to_json() for place in places_at(logs, batch)} or before,
        offsets=kafka_offsets(former, batch) or identity.offsets,
        topic_ids=kept_ids(logs) or identity.topic_ids,
    )
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
