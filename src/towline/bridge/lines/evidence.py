"""What a checkpoint and a gateway say of themselves, for whoever has to know whether they belong together."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from towline.checkpoint import Checkpoint
from towline.errors import GatewayUnreachable
from towline.gateway.launch import discover

if TYPE_CHECKING:
    from towline.gateway.client import GatewayClient

__all__ = ["Evidence", "answer_of", "first_offsets", "kafka_offsets", "read_checkpoint", "status_of"]

#: How long a gateway is waited for, in seconds; the query tries again afterwards.
_PATIENCE_S: Final = 20.0

_Answer = TypeVar("_Answer")


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
        written_by: Which opening wrote the row below `planned_end` as the gateway has it; below where the line
            begins, for a query without a checkpoint.
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
    written_by: str = ""
    stateful: bool = False
    form: str = ""

    @property
    def decided(self) -> bool:
        """Whether no batch was begun that is not done."""
        return self.planned == self.done


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


def status_of(gateway: GatewayClient) -> Mapping[str, Any]:
    """The answer of a line's gateway to the action ``status``."""
    return gateway.status(timeout_s=5.0)


def answer_of(state_dir: Path, ask: Callable[[GatewayClient], _Answer]) -> _Answer:
    """What a line's gateway answers to `ask`; the gateway is waited for.

    Raises:
        GatewayUnreachable: TL-G01 when it does not answer for a while.
    """
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        client = discover(state_dir)
        if client is not None:
            with client:
                return ask(client)
        time.sleep(0.1)
    do = "It is started again by itself; the query then goes on."
    raise GatewayUnreachable("TL-G01", str(state_dir), "no gateway answers", do)


def _query_id(checkpoint: Path) -> str:
    try:
        return str(json.loads((checkpoint / "metadata").read_text().splitlines()[0])["id"])
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        return ""


class _GatewayOffset(NamedTuple):
    journal: str = ""
    offset: int = 0
    incarnation: str = ""


def _position(checkpoint: Path, batch: int | None) -> _GatewayOffset:
    """The place in one entry of the offset log (`towline.spark.offsets`); an empty one where it can't be read."""
    try:
        lines = (checkpoint / "offsets" / str(batch)).read_text().splitlines()[1:]
    except OSError:
        return _GatewayOffset()
    for line in lines:
        try:
            ((_, place),) = json.loads(line)["gateways"].items()
            return _GatewayOffset(str(place["journal"]), int(place["offset"]), str(place.get("incarnation", "")))
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
    return _GatewayOffset()


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
            offsets: dict[str, dict[str, int]] = json.loads(text)
            if offsets and "gateways" not in offsets and all(isinstance(parts, dict) for parts in offsets.values()):
                return offsets
    return {}


def first_offsets(checkpoint: Path) -> dict[str, dict[str, int]]:
    """Where a query of Spark's Kafka source began, by topic and partition; nothing where that can't be read."""
    try:
        content = (checkpoint / "sources" / "0" / "0").read_text()
        # A zero byte, the version and the offsets (KafkaSourceInitialOffsetWriter).
        offsets: dict[str, dict[str, int]] = json.loads(content.lstrip("\0").partition("\n")[2])
    except (OSError, ValueError):
        return {}
    return offsets
