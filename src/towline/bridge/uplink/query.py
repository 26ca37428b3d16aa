"""Query of an uplink: start offsets, routes in force, and the stream from gateway to Kafka.

A message is routed by the routes in force when a batch takes it. If none matches, the route that matched when it was
received applies. Such a route is *retired*: it comes after all others, so it never takes a message from one of them
(docs/operate.md#reload).
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Self, TypeAlias

from pydantic import ValidationError

from towline.bridge.config.model import CONSUMER, Uplink
from towline.bridge.config.subscriptions import covers
from towline.bridge.config.tables import DEFAULT_BATCH_BYTES, RouteSection
from towline.bridge.lines.account import add_spark_counts, start_totals
from towline.bridge.lines.identity import Identity
from towline.bridge.lines.query import LineQuery
from towline.bridge.lines.recovery import ServedJournal, check_resume
from towline.bridge.lines.sql import RouteSql
from towline.bridge.lines.statuses import endpoints_of, gateway_status, request_status, wait_for_answers
from towline.bridge.patterns import Pattern
from towline.bridge.routes import routes_to_json
from towline.bridge.uplink.sink import SINK_FORMAT, SOURCE_FORMAT
from towline.checkpoint import Checkpoint
from towline.gateway.access import is_remote
from towline.gateway.identity import JournalPosition, own_positions
from towline.guarantee import policy
from towline.kafka.options import SinkSettings
from towline.spark.offsets import positions_at
from towline.validation import SettingsModel

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter

    from towline.gateway.access import ClientAccess
    from towline.gateway.client import GatewayClient


def query_journals(line: Uplink, access: ClientAccess, identity: Identity) -> dict[str, ServedJournal]:
    """Query the journals of a line's gateways, by their names; unavailable ones are left out.

    A query without a checkpoint that continues a former one needs all gateways of that one: each alone knows whether
    its journal is still the same.

    Raises:
        GatewayError: None of the required gateways answers.
    """
    checkpoint = Checkpoint(str(line.checkpoint))
    planned_batch = checkpoint.last_planned_batch()
    initial_positions = identity.positions if planned_batch is None else ()
    planned_positions = initial_positions or positions_at(checkpoint, planned_batch)
    committed = positions_at(checkpoint, checkpoint.last_committed_batch())

    def query_gateway(client: GatewayClient) -> tuple[str, ServedJournal]:
        status = request_status(client)
        name, journal = str(status["name"]), str(status["journal"])
        position = next(iter(own_positions(planned_positions, name, journal)), None)
        committed_position = next(iter(own_positions(committed, name, journal)), None)
        extent = client.extent(position.offset if position else 0)
        return name, ServedJournal(extent, status["consumers"].get(CONSUMER, 0), position, committed_position)

    endpoints = endpoints_of(line.gateways or [str(line.gateway.state_dir)], access)
    return dict(wait_for_answers(endpoints, query_gateway, require_all=bool(initial_positions)))


def initial_offsets(line: Uplink, identity: Identity, journals: Mapping[str, ServedJournal]) -> dict[str, int]:
    """Return the start offset of a query without a checkpoint, by gateway, from the states of their journals."""
    # Before a reset the uncommitted rows may have been written, and at_most_once must not repeat them.
    drops_rows = not policy(line.guarantee).replays_batches and identity.generation > 1
    offsets = {}
    for name, journal in journals.items():
        extent, committed_offset = journal.extent, journal.committed_offset
        offsets[name] = extent.end_offset if drops_rows else max(extent.first_offset, committed_offset)
        if journal.position is not None and journal.mismatch(name) is None:
            offsets[name] = max(journal.position.offset, committed_offset)
    return offsets


#: Shortest time that a retired route is kept, in seconds: by then the broker has delivered its queue.
RETIRED_ROUTE_S: Final = 86400.0
#: A former route of the file, and when it was retired, in seconds since 1970.
RetiredRoute: TypeAlias = tuple[RouteSection, float]


class ActiveRoutes(SettingsModel):
    """Routes in force of a line.

    Attributes:
        routes: Routes of the file, each with its effective dedupe.
        dead_letter_topics: Dead-letter topics of all lines of the bridge.
        retired: Former routes for messages that no present route matches, the newest first.
    """

    routes: tuple[RouteSection, ...]
    dead_letter_topic: str | None = None
    dead_letter_topics: tuple[str, ...] = ()
    retired: tuple[RetiredRoute, ...] = ()

    @classmethod
    def replacing(
        cls, line: Uplink, former: ActiveRoutes | None = None, now: float = 0.0, oldest_message: float | None = None
    ) -> Self:
        """Return the routes in force from now on, after those of `former`; None at the first start.

        `oldest_message` is the receive time of the oldest waiting message, in seconds since 1970 as `now`, or None.
        """
        previous = [*((route, now) for route in former.routes), *former.retired] if former else []
        retired_after = min(now, now if oldest_message is None else oldest_message) - RETIRED_ROUTE_S
        recent = (retired_route for retired_route in previous if retired_route[1] >= retired_after)
        return cls(
            routes=tuple(route.model_copy(update={"dedupe": route.dedupe or line.dedupe}) for route in line.route),
            dead_letter_topic=line.dead_letter_topic,
            dead_letter_topics=line.dead_letter_topics,
            retired=tuple(_reachable_routes(line.route, recent)),
        )

    @classmethod
    def from_mapping(cls, mapping: str) -> Self | None:
        """Parse the routes of the query's last start; None if there was none, or they are invalid."""
        with suppress(ValidationError):
            return cls.model_validate_json(mapping)
        return None

    @property
    def mapping(self) -> str:
        """JSON text of the routes for the line's identity."""
        return self.model_dump_json(by_alias=True, exclude_defaults=True)

    def apply_to(self, line: Uplink) -> Uplink:
        """Return the line with these routes; its subscriptions stay those of the file."""
        return line.model_copy(
            update={
                "route": (*self.routes, *(route for route, _ in self.retired)),
                "dedupe": None,
                "dead_letter_topic": self.dead_letter_topic,
                "dead_letter_topics": self.dead_letter_topics,
            }
        )


def _reachable_routes(routes: Sequence[RouteSection], retired_routes: Iterable[RetiredRoute]) -> Iterator[RetiredRoute]:
    """Yield the retired routes that can still match a message: those not covered by earlier routes."""
    filters = [Pattern.parse(route.from_).filter for route in routes]
    for route, retired_at in retired_routes:
        topic_filter = Pattern.parse(route.from_).filter
        if not any(covers(earlier_filter, topic_filter) for earlier_filter in filters):
            yield route, retired_at


#: With this value Spark does not measure an Arrow batch after every row, a fifth of its CPU time
#: (`BatchedPythonArrowInput.writeSizedBatch`). The gateway already limits the size of a micro-batch.
_UNLIMITED_BYTES: Final = (1 << 31) - 1
#: Metric of Spark's state store: dropped rows with a known key.
_DUPLICATES_METRIC: Final = "numDroppedDuplicateRows"


class UplinkQuery(LineQuery[Uplink]):
    """Query of an uplink."""

    _forgets_settings = False  # waiting messages may need former routes

    def _line_of_last_batch(self, mapping: str) -> Uplink | None:
        routes = ActiveRoutes.from_mapping(mapping)
        return None if routes is None else routes.apply_to(self.line)

    def _line_of_next_batch(self, identity: Identity) -> tuple[Uplink, str]:
        """Return the line with the routes of the file and the retired ones, and their mapping."""
        former = ActiveRoutes.from_mapping(identity.mapping)
        oldest_message = self._oldest_waiting() if former is not None and former.retired else None
        routes = ActiveRoutes.replacing(self.line, former, time.time(), oldest_message)
        return routes.apply_to(self.line), routes.mapping

    def _oldest_waiting(self) -> float | None:
        """Return when the oldest waiting message came, in seconds since 1970; None without one, 0 if unknown."""
        status = None if self.line.gateways else gateway_status(self.line.gateway.state_dir)
        return 0.0 if status is None else status.get("oldest")

    def _max_arrow_bytes(self) -> int:
        return DEFAULT_BATCH_BYTES if self.line.max_bytes_per_trigger > DEFAULT_BATCH_BYTES else _UNLIMITED_BYTES

    def _prepare_writer(self, spark: SparkSession) -> tuple[DataStreamWriter, Identity]:
        line, access = self.line, self.bridge.gateway.access()
        former, checkpoint = Identity.of_line(self.bridge, line), Checkpoint(str(line.checkpoint))
        journals = query_journals(line, access, former)
        identity = check_resume(self.bridge, line, former, checkpoint, journals)
        if self._mapping:
            identity = identity.update(line.gateway.state_dir, mapping=self._mapping)
        if identity.generation != former.generation:  # reset: it starts after the committed batches
            journals = query_journals(line, access, identity)
        offsets, replays = initial_offsets(line, identity, journals), policy(line.guarantee).replays_batches
        if checkpoint.last_planned_batch() is None:
            start = [JournalPosition(name, journal.extent.journal, offsets[name]) for name, journal in journals.items()]
            start_totals(line.checkpoint, start, drops=not replays)
        line_options = {
            "routes": self._routes,
            "letters": line.dead_letter_topic or "",
            "dedupes": str(line.dedupe_window is not None).lower(),
            "empty": str(checkpoint.last_planned_batch()) if not replays and not checkpoint.all_committed else "",
        }
        rows = self.source(spark, offsets)
        if self._statements.needs_spark:
            rows = self._statements.writer_frame(rows)
        return rows.writeStream.format(SINK_FORMAT).options(**line_options, **self._sink_options(identity)), identity

    def sink_settings(self) -> SinkSettings:
        """Return the sink settings for the line's next start; opens no connection."""
        return SinkSettings.parse(self._sink_options(Identity.of_line(self.bridge, self.line)))

    def _sink_options(self, identity: Identity) -> dict[str, str]:
        return {"guarantee": self.line.guarantee.value, **self.bridge.sink_options(self.line, identity.sink)}

    def source(self, spark: SparkSession, start_offsets: Mapping[str, int]) -> DataFrame:
        """Return slices of the line's journals, or their rows where the line has SQL.

        `start_offsets` apply to a query without a checkpoint.
        """
        line = self.line
        options = {
            **self._gateway_options(),
            "consumer": CONSUMER,
            "guarantee": line.guarantee.value,
            "maxMessagesPerTrigger": line.max_messages_per_trigger,
            "maxBytesPerTrigger": line.max_bytes_per_trigger,
            "maxTriggerDelayMs": line.max_trigger_delay_ms,
            "startingOffset": json.dumps(start_offsets) if line.gateways else str(*start_offsets.values()),
            "checkpointLocation": str(line.checkpoint),
            "eventTime": str(line.dedupe_window is not None).lower(),
            "writers": line.parallelism,
        }
        if self._statements.needs_spark:
            options |= {"routes": self._routes, "values": json.dumps(self._statements.value_columns)}
        return spark.readStream.format(SOURCE_FORMAT).options(**options).load()

    def _gateway_options(self) -> dict[str, str]:
        """Return the source options with the line's gateway, or its remote gateways."""
        line = self.line
        if not line.gateways:
            return super()._gateway_options()
        removed_option = {"removedGateways": ",".join(line.removed_gateways)} if line.removed_gateways else {}
        access_options = self.bridge.gateway.spark_options() if any(map(is_remote, line.gateways)) else {}
        return {"gateways": json.dumps(line.gateways), **removed_option, **access_options}

    @cached_property
    def _statements(self) -> RouteSql:
        return RouteSql(self.line.routes, self.line.dedupe_window, self.line.parallelism)

    @cached_property
    def _routes(self) -> str:
        return routes_to_json(self.line.routes)

    def count_spark(self, progress: Mapping[str, Any]) -> None:
        """Count the rows that Spark dropped as duplicates or as late."""
        if self.line.dedupe_window is None:
            return
        operators = progress.get("stateOperators") or []
        late_rows = sum(int(operator.get("numRowsDroppedByWatermark") or 0) for operator in operators)
        metrics = [operator.get("customMetrics") or {} for operator in operators]
        duplicate_rows = sum(int(values.get(_DUPLICATES_METRIC) or 0) for values in metrics)
        counts = {"deduplicated": duplicate_rows, "late": late_rows}
        add_spark_counts(self.line.checkpoint, progress["batchId"], counts, "dropped")
