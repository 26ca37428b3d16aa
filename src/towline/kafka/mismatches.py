"""A marker that does not fit: what happened, and the two ways out, in one line each. Pure."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple

from towline.errors import KafkaError
from towline.kafka.markers import STEPS, Situation

if TYPE_CHECKING:
    from collections.abc import Mapping

    from towline.kafka.markers import Claim, Marker

__all__ = ["MarkerPlace", "changed", "mismatch"]


class MarkerPlace(NamedTuple):
    """Where a marker is, for messages.

    Attributes:
        servers: The bootstrap servers.
        sink_id: The sink.
        topic: Its marker topic.
        command: How ``towline kafka marker`` is told where it is.
    """

    servers: str
    sink_id: str
    topic: str
    command: str


#: What happened; {b} the batch, {m} the marker's batch, {p} the partition, {n} {k} the parallelism now and then.
_WHAT: Final[Mapping[Situation, str]] = MappingProxyType(
    {
        Situation.MISSING: (
            "batch {b} has no marker of the batch before it (partition {p}): the topic {topic} was deleted "
            "or lost it, or this checkpoint wrote to another sink until now"
        ),
        Situation.BEHIND: (
            "the marker of partition {p} says batch {m}, Spark runs batch {b}: markers were lost, or another "
            "sink wrote batches {after} to {before}"
        ),
        Situation.AHEAD: (
            "the marker of partition {p} says batch {m}, Spark runs batch {b} only: an older checkpoint was "
            "restored, and skipping would lose new rows under old numbers"
        ),
        Situation.FOREIGN: (
            "the marker of partition {p} belongs to query {writer}, this is query {me}: the checkpoint was "
            "deleted, or two queries write as this sink"
        ),
        Situation.RESCALED: ("batch {m} was written with parallelism {k}, now it is {n}: partitions no longer match"),
        Situation.OTHER_OFFSETS: (
            "batch {m} was written with other source offsets than the checkpoint has for it now: an "
            "older checkpoint was restored, and ran on"
        ),
        Situation.REFUSED: ("batch {b} has more than {n} partitions (partition {rp} came), and parallelism is {n}"),
        Situation.TORN: (
            "batch {b} is half written: partition {p} is in Kafka ({rows} rows), partition {rp} and others "
            "were refused because parallelism was {k}"
        ),
    }
)
_RESET: Final = "`towline kafka marker reset {command} --to-batch {to} --yes`"
#: Where no marker says how many there were.
_RESET_ALL: Final = "`towline kafka marker reset {command} --to-batch {to} --parallelism {n} --yes`"
#: In the words of both places where it is read: a program with format("kafka_transactional"), and a bridge file.
_ANEW: Final = "a new sinkId (for a bridge: towline run FILE --begin-again LINE)"
#: Two ways out of each: one that starts anew, one that goes on.
_DO: Final[Mapping[Situation, str]] = MappingProxyType(
    {
        Situation.MISSING: (
            f"If batch {{b}} is not in Kafka, {_RESET_ALL} goes on and writes it; if it is, the same with "
            "--to-batch {b} leaves it out."
        ),
        Situation.BEHIND: (
            f"If batch {{b}} is not in Kafka, {_RESET} goes on and writes it; else start with a new "
            f"checkpoint and {_ANEW}."
        ),
        Situation.AHEAD: (
            f"Restore the newest checkpoint; or {_RESET} writes batches {{b}} to {{m}} again, doubling their rows."
        ),
        Situation.FOREIGN: (
            f"Take {_ANEW}; or {_RESET} hands this sink over to this query, and its next batch is "
            "written whatever the other query wrote."
        ),
        Situation.RESCALED: (
            "Set parallelism back to {k}; or, when batch {m} is complete in Spark's commit log, "
            "`towline kafka marker reset {command} --to-batch {m} --parallelism {n} --yes`."
        ),
        Situation.OTHER_OFFSETS: (
            f"Restore the newest checkpoint; or {_RESET} goes on from this one, and rows between the "
            "two may be doubled."
        ),
        Situation.REFUSED: (
            "Leave parallelism out; or put .coalesce(1) before writeStream, or .repartition(N, key) with parallelism=N."
        ),
        Situation.TORN: (
            f"Start with a new checkpoint, {_ANEW} and a new topic; or "
            f"{_RESET} writes the whole batch, doubling those rows."
        ),
    }
)


def mismatch(found: Situation, marker: Marker | None, claim: Claim, place: MarkerPlace) -> KafkaError:
    """The error for a `Situation` whose step is FAIL."""
    m = -1 if marker is None else marker.batch
    refused = None if marker is None else marker.refused
    words = {
        "b": claim.batch,
        "m": m,
        "p": claim.partition,
        "n": claim.parallelism,
        "k": 1 if marker is None else marker.parallelism,
        "rows": f"{0 if marker is None else marker.rows:,}",
        "rp": "?" if refused is None else refused.partition,
        "writer": "unknown" if marker is None else marker.writer,
        "me": claim.writer,
        "after": m + 1,
        "before": claim.batch - 1,
        "to": claim.batch - 1,
        "topic": place.topic,
        "command": place.command,
    }
    where = f"sink {place.sink_id} on {place.servers}"
    return KafkaError(STEPS[found].code, where, _WHAT[found].format(**words), _DO[found].format(**words))


def changed(marker: Marker, rows: int, claim: Claim, place: MarkerPlace) -> KafkaError:
    """TL-K16: a batch that is to be skipped has other rows than the one that was written."""
    versus = (
        f"{rows:,} rows, {marker.rows:,} were written" if rows != marker.rows else f"{rows:,} rows, but not the same"
    )
    what = f"batch {claim.batch} is in Kafka, and its replay brings other rows (partition {claim.partition}: {versus})"
    do = (
        "Run one query on a checkpoint, not two copies of it; use the same program, a source that serves the same rows "
        "for the same offsets, and no rand(); or accept what was written: verifyOnSkip=false, once."
    )
    return KafkaError("TL-K16", f"sink {place.sink_id} on {place.servers}", what, do)
