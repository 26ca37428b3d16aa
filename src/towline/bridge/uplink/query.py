"""The query of a line from MQTT to Kafka: where it begins, by which routes, and gateway → routes → Kafka.

A message goes by the routes that are in force when a batch takes it; one that none of them takes, by the route that was
there for it when it was received. Such a route is *retired*: it comes after all others, so it never takes a message
from one of them (docs/reload.md).
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Self, TypeAlias

from pydantic import ValidationError

from towline.bridge.config.model import CONSUMER, Line
from towline.bridge.config.subscriptions import covers
from towline.bridge.config.tables import BATCH_BYTES, RouteSection
from towline.bridge.lines.account import add_spark_counts, begin_totals
from towline.bridge.lines.evidence import (
    Evidence,
    awaited,
    gateway_status,
    places_of,
    read_checkpoint,
    status_of,
)
from towline.bridge.lines.identity import IDENTITY_FILE, Identity
from towline.bridge.lines.query import LineQuery
from towline.bridge.lines.recovery import ServedJournal, examine
from towline.bridge.lines.statements import Statements
from towline.bridge.patterns import Pattern
from towline.bridge.routes import to_json
from towline.bridge.uplink.sink import MESSAGES, RECORDS
from towline.checkpoint import Checkpoint
from towline.errors import ConfigError
from towline.gateway.access import is_remote
from towline.gateway.identity import Extent
from towline.guarantee import policy
from towline.kafka.markerstore import MarkerStore
from towline.kafka.options import SinkSettings
from towline.spark.offsets import JournalPlace, places_at
from towline.validation import SettingsModel

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter

    from towline.gateway.access import Access
    from towline.gateway.client import GatewayClient


def gather(line: Line, access: Access, identity: Identity) -> tuple[Evidence, dict[str, ServedJournal]]:
    """Read a line's checkpoint and ask its gateways; those that are away are done without.

    A query without a checkpoint that begins behind what was carried needs the gateways it was carried from: each knows
    alone whether its journal is still the same.

    Returns:
        What the checkpoint says; and the journal of each gateway that answered, by its name.

    Raises:
        GatewayError: None of the gateways that are needed answers.
    """
    seen, logs = read_checkpoint(line.checkpoint), Checkpoint(str(line.checkpoint))
    begun = identity.begins if seen.planned is None else ()
    places, done = begun or places_at(logs, seen.planned), places_at(logs, seen.done)

    def asked(client: GatewayClient) -> tuple[str, ServedJournal]:
        status = status_of(client)
        place = _own(places, status)
        incarnation = client.extent(place.offset).incarnation if place else ""
        here = Extent(str(status["journal"]), int(status["first"]), int(status["end"]), incarnation)
        committed = int(status["consumers"].get(CONSUMER, 0))
        return str(status["name"]), ServedJournal(here, committed, place, _own(done, status))

    where = places_of(line.gateways or [str(line.gateway.state_dir)], access)
    return seen, dict(awaited(where, asked, every=bool(begun), own=not line.gateways))


def beginnings(line: Line, identity: Identity, journals: Mapping[str, ServedJournal]) -> dict[str, int]:
    """The offsets where a query without a checkpoint begins, by gateway, when these say what they said."""
    # A line that begins again may have written the uncommitted rows already, and at_most_once doubles nothing.
    gives_up = not policy(line.guarantee).serves_again and identity.generation > 1
    starts = {}
    for name, one in journals.items():
        starts[name] = one.here.tip if gives_up else max(one.here.first, one.committed)
        if one.place is not None and one.mismatch(name) is None:
            starts[name] = max(one.place.offset, one.committed)
    return starts


def _own(places: Iterable[JournalPlace], status: Mapping[str, Any]) -> JournalPlace | None:
    """The place of a gateway: that of its journal, else that under its name, which is then another journal's."""
    mine = [one for one in places if status["journal"] == one.journal or status["name"] == one.gateway]
    return min(mine, key=lambda one: one.journal != status["journal"], default=None)


#: A retired route is kept for so long at least, in seconds: what a broker had queued has come by then.
KEPT_S: Final = 86400.0
#: A route that the file does not have any more, as it was in force; and when it was retired, in seconds since 1970.
RetiredRoute: TypeAlias = tuple[RouteSection, float]


class KeptRoutes(SettingsModel):
    """What a line makes its records by.

    Attributes:
        routes: Those of the file, each with the dedupe that counts for it.
        dead_letter_topics: Of all lines of the bridge.
        retired: Those that take what none of these takes, the newest first.
    """

    routes: tuple[RouteSection, ...]
    dead_letter_topic: str | None = None
    dead_letter_topics: tuple[str, ...] = ()
    retired: tuple[RetiredRoute, ...] = ()

    @classmethod
    def of(cls, line: Line, former: KeptRoutes | None = None, now: float = 0.0, oldest: float | None = None) -> Self:
        """What is in force from now on, behind what was `former`; None at the first start.

        `oldest` is when the oldest message came that waits, in seconds since 1970 as `now`; None where none does.
        """
        before = [*((one, now) for one in former.routes), *former.retired] if former else []
        since = min(now, now if oldest is None else oldest) - KEPT_S
        return cls(
            routes=tuple(one.model_copy(update={"dedupe": one.dedupe or line.dedupe}) for one in line.route),
            dead_letter_topic=line.dead_letter_topic,
            dead_letter_topics=line.dead_letter_topics,
            retired=tuple(_uncovered(line.route, (one for one in before if one[1] >= since))),
        )

    @classmethod
    def read(cls, mapping: str) -> Self | None:
        """What was in force when the line's query started last; None for a line that never did, or what is none."""
        with suppress(ValidationError):
            return cls.model_validate_json(mapping)
        return None

    @property
    def mapping(self) -> str:
        """As the line's identity has it."""
        return self.model_dump_json(by_alias=True, exclude_defaults=True)

    def applied(self, line: Line) -> Line:
        """A line that makes its records by these routes; its subscriptions are still those of the file."""
        return line.model_copy(
            update={
                "route": (*self.routes, *(route for route, _ in self.retired)),
                "dedupe": None,
                "dead_letter_topic": self.dead_letter_topic,
                "dead_letter_topics": self.dead_letter_topics,
            }
        )


def _uncovered(routes: Sequence[RouteSection], retired: Iterable[RetiredRoute]) -> Iterator[RetiredRoute]:
    """Those that may still get a message: a topic that an earlier one takes whole never comes to a later one."""
    patterns = [Pattern.parse(one.from_) for one in routes]
    for route, at in retired:
        pattern = Pattern.parse(route.from_)
        if not any(covers(above, pattern) for above in patterns):
            patterns.append(pattern)
            yield route, at


_ARROW_BYTES: Final = "spark.sql.execution.arrow.maxBytesPerBatch"
#: The value with which Spark does not ask for the size of an Arrow batch after every row, which costs a fifth of its
#: work (`BatchedPythonArrowInput.writeSizedBatch`). Micro-batches are small enough: the gateway knows their size.
_UNLIMITED: Final = (1 << 31) - 1
#: Of Spark's state store: rows that it has dropped because one of their key had come before.
_REPEATS: Final = "numDroppedDuplicateRows"


class UplinkQuery(LineQuery[Line]):
    """The query of an uplink."""

    def _begun(self, mapping: str) -> Line | None:
        routes = KeptRoutes.read(mapping)
        return None if routes is None else routes.applied(self.line)

    def _next(self, identity: Identity) -> tuple[Line, str]:
        """By the routes of the file and the retired ones."""
        if (former := KeptRoutes.read(identity.mapping)) is None and identity.mapping:
            what = "messages may wait for routes that this version refuses"
            file = self.line.gateway.state_dir / IDENTITY_FILE
            do = f'Carry them with the version before; or set "mapping": "" in {file}, which forgets these routes.'
            raise ConfigError("TL-C210", f'line "{self.line.name}"', what, do)
        oldest = self._oldest_waiting() if former is not None and former.retired else None
        routes = KeptRoutes.of(self.line, former, time.time(), oldest)
        return routes.applied(self.line), routes.mapping

    def _oldest_waiting(self) -> float | None:
        """When the oldest message came that waits, in seconds since 1970; None where none waits, 0 for not known."""
        status = None if self.line.gateways else gateway_status(self.line.gateway.state_dir)
        return 0.0 if status is None else status.get("oldest")

    def _conf(self) -> dict[str, str]:
        limited = self.line.max_bytes_per_trigger > BATCH_BYTES
        return {_ARROW_BYTES: str(BATCH_BYTES if limited else _UNLIMITED)}

    def _prepared(self, spark: SparkSession) -> tuple[DataStreamWriter, Identity]:
        line, file, access = self.line, str(self.bridge.file), self.bridge.gateway.access()
        former = Identity.of(self.bridge, line)
        seen, journals = gather(line, access, former)
        identity = examine(line, file, former, seen, self._set_markers, journals)
        new = seen.planned is None
        if self._mapping:
            identity = identity.noted(line.gateway.state_dir, mapping=self._mapping)
        if identity.generation != former.generation:  # it begins anew behind what is done
            seen, journals = gather(line, access, identity)
        begin, again = beginnings(line, identity, journals), policy(line.guarantee).serves_again
        if new:
            first = [JournalPlace(name, one.here.journal, begin[name]) for name, one in journals.items()]
            begin_totals(line.checkpoint, first, gives_up=not again)
        elif seen.done is not None:
            begin_totals(line.checkpoint, places_at(Checkpoint(str(line.checkpoint)), seen.done), batch=seen.done)
        own = {
            "routes": self._routes,
            "letters": line.dead_letter_topic or "",
            "dedupes": str(line.within is not None).lower(),
            "empty": str(seen.planned) if not again and not seen.decided else "",
        }
        rows = self.prepared(self.source(spark, begin))
        return rows.writeStream.format(RECORDS).options(**own, **self._sink_options(identity)), identity

    def sink_settings(self) -> SinkSettings:
        """What the sink of the line's next start is told; no connection is made."""
        return SinkSettings.parse(self._sink_options(Identity.of(self.bridge, self.line)))

    def _sink_options(self, identity: Identity) -> dict[str, str]:
        keeps = self.line.dead_letter_topic and policy(self.line.guarantee).serves_again
        own = {"deadLetterTopic": str(self.line.dead_letter_topic)} if keeps else {}
        return {"guarantee": self.line.guarantee.value, **self.bridge.sink_options(self.line, identity.sink), **own}

    def _set_markers(self, identity: Identity, batch: int) -> None:
        """Make a batch the last one that the line's sink has written."""
        MarkerStore(SinkSettings.parse(self._sink_options(identity)), identity.sink).reset(batch)

    def source(self, spark: SparkSession, begin: Mapping[str, int]) -> DataFrame:
        """The rows that the line's gateways give; `begin` is where a query without a checkpoint begins at each."""
        line = self.line
        options = {
            **self._gateway_options(),
            "consumer": CONSUMER,
            "guarantee": line.guarantee.value,
            "maxMessagesPerTrigger": line.max_messages_per_trigger,
            "maxBytesPerTrigger": line.max_bytes_per_trigger,
            "maxTriggerDelayMs": line.max_trigger_delay_ms,
            "startingOffset": json.dumps(begin) if line.gateways else str(*begin.values()),
            "checkpointLocation": str(line.checkpoint),
            "eventTime": str(line.within is not None).lower(),
            "writers": line.parallelism,
        }
        if self._statements.needed:
            options |= {"routes": self._routes, "values": json.dumps(self._statements.values)}
        return spark.readStream.format(MESSAGES).options(**options).load()

    def _gateway_options(self) -> dict[str, str]:
        """How Spark finds the line's gateway, or its gateways elsewhere."""
        line = self.line
        if not line.gateways:
            return super()._gateway_options()
        removed = {"removedGateways": ",".join(line.removed_gateways)} if line.removed_gateways else {}
        known = self.bridge.gateway.options() if any(map(is_remote, line.gateways)) else {}
        return {"gateways": json.dumps(line.gateways), **removed, **known}

    def prepared(self, rows: DataFrame) -> DataFrame:
        """What the task that writes gets: the slices, or rows with what the line's SQL says of them."""
        if not self._statements.needed:
            return rows
        return self._statements.applied(rows, tolerant=self.line.dead_letter_topic is not None)

    @cached_property
    def _statements(self) -> Statements:
        return Statements(self.line.routes, self.line.within, self.line.parallelism)

    @cached_property
    def _routes(self) -> str:
        return to_json(self.line.routes)

    def count_spark(self, progress: Mapping[str, Any]) -> None:
        """Count the rows that Spark dropped as repeats, or as late, beside those that the sink has not got."""
        if self.line.within is None:
            return
        operators = progress.get("stateOperators") or []
        late = sum(int(one.get("numRowsDroppedByWatermark") or 0) for one in operators)
        repeats = sum(int((one.get("customMetrics") or {}).get(_REPEATS) or 0) for one in operators)
        add_spark_counts(
            self.line.checkpoint,
            progress["batchId"],
            lambda sink: {"deduplicated": repeats, "late": late, "dropped": sink["dropped"]},
        )
