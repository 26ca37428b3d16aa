"""What a checkpoint and a gateway say of themselves, for whoever has to know whether they belong together."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from towline.checkpoint import Checkpoint, kafka_offsets_in
from towline.errors import GatewayError, GatewayUnreachable, NotAllowed
from towline.gateway.launch import discover

if TYPE_CHECKING:
    from towline.gateway.client import GatewayClient

__all__ = [
    "NO_ANSWER",
    "Evidence",
    "KafkaOffsets",
    "awaited_status",
    "gateway_status",
    "kafka_offsets",
    "read_checkpoint",
    "status_of",
]

#: How long a gateway is waited for, in seconds; the query tries again afterwards.
_PATIENCE_S: Final = 20.0

#: Of a line's own gateway that does not answer: what it is, and what becomes of it.
NO_ANSWER: Final = ("no gateway answers", "It is started again by itself; the query then goes on.")

#: By topic and partition.
KafkaOffsets: TypeAlias = Mapping[str, Mapping[str, int]]


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a checkpoint and a gateway say of themselves.

    Attributes:
        query: Query id in the checkpoint; "" when there is none.
        planned: Newest batch in the offset log; None when there is none.
        done: Newest batch in the commit log.
        journal: Journal of a gateway in the newest planned batch; "" when there is none.
        planned_end: Offset after its last row there.
        done_end: Offset after its last row in the newest batch that is done.
        gateway_journal: Journal the gateway serves.
        committed: Offset up to which the bridge told the gateway that it is done.
        tip: Offset after the last row of the journal.
        incarnation: Which opening of the journal wrote the row below `planned_end`, as the checkpoint has it.
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
    return Evidence(logs.query, planned, done, stateful=logs.stateful, form=logs.form)


def status_of(gateway: GatewayClient) -> dict[str, Any]:
    """The answer of a line's gateway to the action ``status``."""
    return gateway.status(timeout_s=5.0)


def gateway_status(state_dir: Path) -> dict[str, Any] | None:
    """What the gateway of a state directory says of itself; None when none answers. Raises as `discover`."""
    try:
        client = discover(state_dir)
        if client is None:
            return None
        with client:
            return status_of(client)
    except NotAllowed:
        raise
    except GatewayError:
        return None


def awaited_status(state_dir: Path) -> dict[str, Any]:
    """What a line's gateway says of itself; it is waited for.

    Raises:
        GatewayUnreachable: TL-G01 when it does not answer for a while.
    """
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        client = discover(state_dir)
        if client is not None:
            with client:
                return status_of(client)
        time.sleep(0.1)
    raise GatewayUnreachable("TL-G01", str(state_dir), *NO_ANSWER)


def kafka_offsets(checkpoint: Path, batch: int | None) -> KafkaOffsets:
    """Where a batch of Spark's Kafka source ends; without a batch, where the query began.

    Returns:
        Offsets by topic and partition; nothing where that can't be read, or the line goes the other way.
    """
    logs = Checkpoint(str(checkpoint))
    return kafka_offsets_in([logs.first_offsets()] if batch is None else logs.offsets(batch))
