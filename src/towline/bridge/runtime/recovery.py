"""Before a query starts: do its checkpoint, its gateway's journal and its identity still belong together?

Restored copies, removed directories and changed settings make a batch mean other rows, or a marker another batch. Each
is recognised by comparing what the three say, and told in one message with the two ways out; nothing is guessed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from towline.bridge.config.model import Line
from towline.bridge.runtime.identity import Identity, sinks
from towline.checkpoint import Checkpoint
from towline.errors import GatewayUnreachable, TowlineError
from towline.gateway.belonging import MISMATCHES, is_other
from towline.gateway.launch import discover
from towline.gateway.remembered import UNFIT
from towline.guarantee import Guarantee, policy

if TYPE_CHECKING:
    from towline.bridge.config.model import AnyLine
    from towline.gateway.client import GatewayClient

__all__ = [
    "PERMANENT",
    "Asked",
    "Evidence",
    "Marks",
    "ResumeStep",
    "begin_again",
    "examine",
    "gateway_status",
    "gather",
    "kafka_offsets",
    "mapping_problem",
    "problem",
    "read_checkpoint",
    "refused",
    "starting",
    "step",
]

#: How long a gateway is waited for, in seconds; the query tries again afterwards.
_PATIENCE_S: Final = 20.0
#: Checkpoints put aside that are kept.
_ASIDE: Final = 3
#: Their names: the generation, and nanoseconds where that was taken. Other names are a person's.
_PUT_ASIDE: Final = re.compile(r"checkpoint\.(\d+)(?:\.(\d{15,}))?")

#: The form of the offset log that Spark 4 writes unless told otherwise, and that is read here (OffsetSeqLog.VERSION).
_FORM: Final = "v1"

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a checkpoint and a gateway say of themselves.

    Attributes:
        query: Query id in the checkpoint; "" when there is none.
        planned: Newest batch in the offset log; None when there is none.
        done: Newest batch in the commit log.
        journal: Journal of the newest planned batch; "" when there is none.
        planned_end: Offset after the last row of the newest planned batch.
        done_end: Offset after the last row of the newest batch that is done.
        gateway_journal: Journal the gateway serves.
        committed: Offset up to which the bridge told the gateway that it is done.
        tip: Offset after the last row of the journal.
        incarnation: Which opening of the journal wrote the row below `planned_end`, as the checkpoint has it; "" from
            a Towline that did not say.
        done_incarnation: The same of `done_end`.
        first: First offset that the gateway has.
        found: Which opening wrote the row below `planned_end` as the gateway has it; below where the line begins, for a
            query without a checkpoint.
        stateful: Whether the checkpoint holds state, which is what repeats are recognised by.
        form: First line of the newest planned batch in the offset log; "" when there is none.
    """

    query: str = ""
    planned: int | None = None
    done: int | None = None
    journal: str = ""
    planned_end: int = 0
    done_end: int | None = None
    gateway_journal: str = ""
    committed: int = 0
    tip: int = 0
    incarnation: str = ""
    done_incarnation: str = ""
    first: int = 0
    found: str = ""
    stateful: bool = False
    form: str = ""

    @property
    def decided(self) -> bool:
        """Whether no batch was begun that is not done."""
        return self.planned == self.done


def gather(line: Line, consumer: str, identity: Identity) -> Evidence:
    """Read a line's checkpoint and ask its gateway.

    Raises:
        GatewayUnreachable: TL-G01 when it does not answer for a while.
    """
    seen = read_checkpoint(line.checkpoint)
    offset = max(0, identity.start) if seen.planned is None else seen.planned_end
    status, found = _answered(line.gateway.state_dir, lambda gateway: (_status(gateway), gateway.incarnation(offset)))
    return replace(
        seen,
        gateway_journal=str(status["journal"]),
        committed=int(status["consumers"].get(consumer, 0)),
        first=int(status["first"]),
        tip=int(status["end"]),
        found=found,
    )


def read_checkpoint(checkpoint: Path) -> Evidence:
    """What a checkpoint says, whoever serves its journal."""
    logs = Checkpoint(str(checkpoint))
    planned, done = logs.last_offsets_batch(), logs.last_commit_batch()
    newest = _position(checkpoint, planned)
    last = None if done is None else _position(checkpoint, done)
    return Evidence(
        _query_id(checkpoint),
        planned,
        done,
        newest.journal,
        newest.offset,
        None if last is None else last.offset,
        incarnation=newest.incarnation,
        done_incarnation="" if last is None else last.incarnation,
        stateful=logs.stateful,
        form=logs.form,
    )


def gateway_status(state_dir: Path) -> Mapping[str, Any]:
    """The answer of a line's gateway, which is waited for.

    Raises:
        GatewayUnreachable: TL-G01 when it does not answer for a while.
    """
    return _answered(state_dir, _status)


def _status(gateway: GatewayClient) -> Mapping[str, Any]:
    return gateway.status(timeout_s=5.0)


def _answered(state_dir: Path, ask: Callable[[GatewayClient], _T]) -> _T:
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        client = discover(state_dir)
        if client is not None:
            with client:
                return ask(client)
        time.sleep(0.1)
    raise GatewayUnreachable(
        "TL-G01", str(state_dir), "no gateway answers", "It is started again by itself; the query then goes on."
    )


def _query_id(checkpoint: Path) -> str:
    try:
        return str(json.loads((checkpoint / "metadata").read_text().splitlines()[0])["id"])
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        return ""


class _Place(NamedTuple):
    journal: str = ""
    offset: int = 0
    incarnation: str = ""


def _position(checkpoint: Path, batch: int | None) -> _Place:
    """The place in one entry of the offset log (`towline.spark.offsets`); an empty one where it can't be read."""
    try:
        lines = (checkpoint / "offsets" / str(batch)).read_text().splitlines()[1:]
    except OSError:
        return _Place()
    for line in lines:
        try:
            ((_, place),) = json.loads(line)["gateways"].items()
            return _Place(str(place["journal"]), int(place["offset"]), str(place.get("incarnation", "")))
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
    return _Place()


def kafka_offsets(checkpoint: Path, batch: int | None) -> dict[str, dict[str, int]]:
    """The entry of Spark's Kafka source in the offset log, by topic and partition.

    Returns:
        Nothing where there is no entry, or the line goes the other way.
    """
    try:
        lines = (checkpoint / "offsets" / str(batch)).read_text().splitlines()[2:]
    except OSError:
        return {}
    for text in lines:
        with contextlib.suppress(ValueError, AttributeError):
            told: dict[str, dict[str, int]] = json.loads(text)
            if told and "gateways" not in told and all(isinstance(parts, dict) for parts in told.values()):
                return told
    return {}


def first_offsets(checkpoint: Path) -> dict[str, dict[str, int]]:
    """Where a query of Spark's Kafka source began, by topic and partition; nothing where that can't be read."""
    try:
        content = (checkpoint / "sources" / "0" / "0").read_text()
        # A zero byte, the version and the offsets (KafkaSourceInitialOffsetWriter).
        found: dict[str, dict[str, int]] = json.loads(content.lstrip("\0").partition("\n")[2])
    except (OSError, ValueError):
        return {}
    return found


class Asked(NamedTuple):
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
    def of(cls, line: AnyLine, identity: Identity) -> Asked:
        """As the file says it now; without transactions the number of writers stands nowhere."""
        now, before = policy(line.guarantee).transactions, policy(_former(line, identity)).transactions
        up = line if isinstance(line, Line) else None
        return cls(
            line.parallelism if now and before else identity.parallelism,
            None if up is None else up.within is not None,
            now and before,
            now and not before,
            _split(up) if up and now and line.parallelism > 1 else "",
        )


def _former(line: AnyLine, identity: Identity) -> Guarantee:
    return next((known for known in Guarantee if known.value == identity.guarantee), line.guarantee)


def _split(line: Line) -> str:
    """Changes with whatever a batch's rows are made of; of what differs from the defaults: later versions have more."""
    said = [one.model_dump_json(exclude_defaults=True) for one in (*line.sections, line.dedupe) if one]
    return hashlib.sha256(json.dumps([said, line.dead_letter_topic]).encode()).hexdigest()[:16]


_Rule = Callable[[Identity, Evidence, Asked], str]


def _gone(identity: Identity, seen: Evidence, asked: Asked) -> str:
    del asked
    if identity.query and not seen.query:
        return f"the checkpoint is gone; it belonged to query {identity.query}, which had taken {seen.committed:,} rows"
    return ""


def _other(identity: Identity, seen: Evidence, asked: Asked) -> str:
    del asked
    if identity.query and seen.query != identity.query:
        return f"the checkpoint is that of query {seen.query}, this line's is {identity.query}"
    return ""


def _swapped(identity: Identity, seen: Evidence, asked: Asked) -> str:
    del identity, asked
    if seen.journal and seen.journal != seen.gateway_journal:
        return f"the checkpoint belongs to journal {seen.journal}, the gateway serves journal {seen.gateway_journal}"
    return ""


def _old_journal(identity: Identity, seen: Evidence, asked: Asked) -> str:
    del identity, asked
    if seen.journal and seen.planned_end > seen.tip:
        return (
            f"the checkpoint has come to offset {seen.planned_end:,}, the journal ends at {seen.tip:,}: an older copy"
        )
    return ""


def _gone_on(identity: Identity, seen: Evidence, asked: Asked) -> str:
    """The same journal and long enough: only the opening that wrote the row tells that it is another one."""
    del identity, asked
    if is_other(seen.incarnation, seen.found, seen.planned_end, seen.first):
        return (
            f"the row below offset {seen.planned_end:,} was written by opening {seen.incarnation} of the journal when "
            f"the checkpoint took it, and here by {seen.found or 'another'}: an older copy that has gone on"
        )
    return ""


def _old_checkpoint(identity: Identity, seen: Evidence, asked: Asked) -> str:
    del identity, asked
    if seen.done_end is not None and seen.done_end < seen.committed:
        return (
            f"the checkpoint is an older copy: its last batch {seen.done} ends at offset {seen.done_end:,}, "
            f"and {seen.committed:,} was committed already"
        )
    return ""


def _rescaled(identity: Identity, seen: Evidence, asked: Asked) -> str:
    """A batch that was begun in N parts is finished in N parts: each part has a marker of its own."""
    if _scale_changed(identity, asked) and not seen.decided:
        return (
            f"batch {seen.planned} was begun with parallelism {identity.parallelism}, and it is {asked.parallelism} "
            "now: parts of it may be in Kafka"
        )
    return ""


def _restated(identity: Identity, seen: Evidence, asked: Asked) -> str:
    """Which rows a batch has depends on whether repeats are dropped from it."""
    del identity
    if asked.whole and _state_changed(seen, asked) and not seen.decided:
        was, now = ("with", "without") if seen.stateful else ("without", "with")
        return f"batch {seen.planned} was begun {was} dedupe, and the line is {now} it now: it may be in Kafka"
    return ""


def _resplit(identity: Identity, seen: Evidence, asked: Asked) -> str:
    """The parts that are in Kafka are compared with what comes now; by another key a row would be in another part."""
    if asked.whole and identity.split not in ("", asked.split) and not seen.decided:
        return f"batch {seen.planned} was begun when the line said something else: parts of it may be in Kafka"
    return ""


def _unread(identity: Identity, seen: Evidence, asked: Asked) -> str:
    del identity, asked
    if seen.form not in ("", _FORM):
        return f"the checkpoint's offset log is of form {seen.form}, and this Towline reads {_FORM}"
    return ""


def _scale_changed(identity: Identity, asked: Asked) -> bool:
    return identity.parallelism not in (0, asked.parallelism)


def _state_changed(seen: Evidence, asked: Asked) -> bool:
    """Whether Spark would refuse the checkpoint: it has state that the query has no use for, or lacks what it needs.

    A query that has not finished a batch has no state yet, and can begin any.
    """
    return asked.dedupe not in (None, seen.stateful) and (seen.stateful or seen.done is not None)


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
#: Another try finds the same.
PERMANENT: Final = frozenset({*(code for code, _, _ in RULES), "TL-B27", *UNFIT})


def problem(identity: Identity, seen: Evidence, asked: Asked) -> tuple[str, str, str] | None:
    """The first thing that does not belong together: code, what it is, and the first way out; None when all does."""
    for code, rule, way in RULES:
        if what := rule(identity, seen, asked):
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


def step(identity: Identity, seen: Evidence, asked: Asked) -> ResumeStep:
    """What a changed setting takes, when `problem` has found none."""
    if _state_changed(seen, asked):
        return ResumeStep.CUT
    if _scale_changed(identity, asked) or (asked.promoted and seen.planned is not None):
        keeps = asked.dedupe and seen.decided and seen.done is not None
        return ResumeStep.MARK if keeps else ResumeStep.CUT
    return ResumeStep.GO


#: Makes a batch the last one that counts as written by a sink: identity, batch.
Marks = Callable[[Identity, int], None]


def examine(line: AnyLine, file: Path, identity: Identity, seen: Evidence, mark: Marks | None = None) -> Identity:
    """Let a query start, or say why not.

    Args:
        line: The line.
        file: The bridge's.
        identity: The line's.
        seen: What its checkpoint and its gateway say.
        mark: Sets markers; a line that drops repeats needs it.

    Returns:
        The identity to start with: a new one where a changed setting takes one (`step`).

    Raises:
        TowlineError: TL-B22 to TL-B25, TL-B50, TL-B52, TL-B53, with both ways out; what `mark` raises.
    """
    asked = Asked.of(line, identity)
    if found := problem(identity, seen, asked):
        raise _told(line, file, *found)
    how = step(identity, seen, asked)
    if how is not ResumeStep.GO:
        sys.stderr.write(f"--- line {line.name}\na changed setting: the line {how.value}\n")
    made = identity
    if how is ResumeStep.CUT:
        made = _begin(line, identity)
    elif how is ResumeStep.MARK:
        assert mark is not None
        assert seen.done is not None
        made = identity.rescaled(line.parallelism, sinks(line.gateway.state_dir))
        mark(made, seen.done)  # before the identity: a crash in between sets the same markers again
    split = made.split if how is ResumeStep.GO and not seen.decided else asked.split
    noted = replace(made, guarantee=line.guarantee.value, split=split)
    if noted != identity:
        noted.save(line.gateway.state_dir)  # before there is a batch that was begun so
    return noted


def mapping_problem(line: AnyLine, file: Path, identity: Identity, seen: Evidence, mapping: str) -> None:
    """Refuse to finish a downlink's batch with another mapping than it was begun with.

    Raises:
        TowlineError: TL-B27, with both ways out.
    """
    if identity.mapping not in ("", mapping):
        what = f"batch {seen.planned} was begun when the line said something else: parts of it may be in the outbox"
        raise _told(line, file, "TL-B27", what, "Set the line back until this batch is done, then change it")


def _told(line: AnyLine, file: Path, code: str, what: str, way: str) -> TowlineError:
    again = f"towline run {file} --begin-again {line.name}"
    cost = _COST_OF_A_COPY if code == "TL-B24" and policy(line.guarantee).serves_again else _COST[line.guarantee.value]
    do = f"{way} (in {line.gateway.state_dir}); or begin again where the gateway's account stands: {again} ({cost})."
    return TowlineError(code, f'line "{line.name}"', what, do)


def refused(line: AnyLine, file: Path, error: TowlineError) -> TowlineError | None:
    """What a gateway that found its journal not to be the checkpoint's says to the bridge's user [TL-B24].

    Returns:
        None for any other error.
    """
    if error.code not in MISMATCHES:
        return None
    way = _THE_OTHER if error.code == "TL-G04" else _NEWEST
    return _told(line, file, "TL-B24", f"{error.what}; nothing was taken in", way)


def starting(line: Line, identity: Identity, seen: Evidence) -> str:
    """The offset where a query without a checkpoint begins, as the source's option ``startingOffset``."""
    same = not is_other(identity.incarnation, seen.found, identity.start, seen.first)
    if same and identity.journal == seen.gateway_journal and 0 <= identity.start <= seen.tip:
        return str(max(identity.start, seen.committed))
    # A line that begins again may have written the uncommitted rows already, and at_most_once doubles nothing.
    return "committed" if policy(line.guarantee).serves_again or identity.generation == 1 else "latest"


#: What beginning again may cost.
_COST: Final = {
    "at_most_once": "what waits on disk is given up",
    "at_least_once": "what the last batch held may come twice",
    "exactly_once": "what the last batch held may come twice, this once",
}
#: The account of another journal knows nothing of what was carried meanwhile.
_COST_OF_A_COPY: Final = "what waits in this journal is carried, and what of it was carried before comes twice"


def begin_again(line: AnyLine) -> str:
    """Put the checkpoint aside and take a new sink id; the query then starts where the account stands.

    Returns:
        What was done, for the person who asked.
    """
    identity = Identity.read(line.gateway.state_dir)
    if identity is None or not identity.query:
        return f'line "{line.name}" begins anyway: it has no checkpoint'
    fresh = _begin(line, identity)
    return f'line "{line.name}" begins again as sink "{fresh.sink}"; an old checkpoint is kept beside the new one'


def _begin(line: AnyLine, identity: Identity) -> Identity:
    """Cut after the last batch that is done; at_most_once after the last that was begun.

    A crash after the move shows as a checkpoint that is gone [TL-B22], and beginning again is one of its ways out.
    """
    old = read_checkpoint(line.checkpoint)
    # A batch that was begun with at_most_once is given up, whatever the line promises now.
    again = policy(line.guarantee).serves_again and policy(_former(line, identity)).serves_again
    cut = old.done_end if again else old.planned_end
    batch = old.done if again else old.planned
    # Without a batch it begins where it began before, which "latest" would not say.
    found = kafka_offsets(line.checkpoint, batch) if batch is not None else first_offsets(line.checkpoint)
    offsets = json.dumps(found) if found else identity.offsets
    incarnation = old.done_incarnation if again else old.incarnation
    taken = sinks(line.gateway.state_dir)
    fresh = identity.again(old.journal, -1 if cut is None else cut, offsets, incarnation, taken)
    if line.checkpoint.exists():
        line.checkpoint.rename(_free(line.checkpoint.with_name(f"checkpoint.{identity.generation}")))
        _remove_oldest(line.checkpoint)
    fresh.save(line.gateway.state_dir)
    return fresh


def _remove_oldest(checkpoint: Path) -> None:
    """Of the checkpoints that were put aside only the newest are of use: a person may bring one back."""
    ours = [(match, path) for path in checkpoint.parent.iterdir() if (match := _PUT_ASIDE.fullmatch(path.name))]
    aside = sorted(ours, key=lambda one: (int(one[0][1]), int(one[0][2] or 0)))
    for _, path in aside[:-_ASIDE]:
        shutil.rmtree(path, ignore_errors=True)


def _free(path: Path) -> Path:
    return path if not path.exists() else path.with_name(f"{path.name}.{time.time_ns()}")
