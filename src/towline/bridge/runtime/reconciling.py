"""Comparison of each line's account with its markers in Kafka: `towline status --reconcile`.

A marker has the totals of all batches of the sink and is written in the transaction of the records (exactly_once).
The totals are equal to those of the sink's checkpoint, or one batch ahead of them after a kill between the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from towline.bridge.config.model import CONSUMER, AnyLine, Bridge, Uplink
from towline.bridge.lines.identity import Identity
from towline.bridge.lines.recovery import start_refusal
from towline.checkpoint import Checkpoint
from towline.errors import TowlineError
from towline.kafka.markers import ANY_QUERY, Marker
from towline.kafka.markerstore import MarkerStore
from towline.kafka.options import SinkSettings
from towline.spark.offsets import positions_at
from towline.spark.sink_note import BatchTotals, SinkNote

#: Number of reads of markers and checkpoint: a batch may end between the two.
_MAX_READS: Final = 5
#: Time-out of a read of markers, in seconds, as an option.
_TIMEOUT_S: Final = "15"
#: The same at the start of a line, which waits for it before it receives.
_START_TIMEOUT_S: Final = "5"


def reconcile(bridge: Bridge, status: Mapping[str, Any]) -> None:
    """Add the result of `compare_markers` to the `status` of each line, under ``markers``.

    The gateway's committed watermark must not be ahead of the last batch in the checkpoint; that is reported too.

    Raises:
        KafkaError: As `MarkerStore.read`.
        ConfigError: The settings of the Kafka client contradict each other.
    """
    for line in bridge.lines:
        if (line_status := status["lines"].get(line.name)) is None:  # the status is of an older version of the file
            continue
        committed = ((line_status["gateway"] or {}).get("consumers") or {}).get(CONSUMER)
        comparison, checkpoint = _compare_line(bridge, line), Checkpoint(str(line.checkpoint))
        if isinstance(line, Uplink) and committed is not None:
            positions = positions_at(checkpoint, checkpoint.last_committed_batch()) or ()
            end = sum(position.offset for position in positions)
            if positions and int(committed) > end:
                text = f"journal says {committed:,} committed · the checkpoint's last batch ends at {end:,}   [TL-K61]"
                comparison |= {"agrees": False, "why": text}
        line_status["markers"] = comparison


def _compare_line(bridge: Bridge, line: AnyLine) -> dict[str, Any]:
    identity, comparison = Identity.read(line.gateway.state_dir), dict[str, Any](agrees=None, why="the line has none")
    if identity is None or not line.transactional:
        return comparison
    store = _marker_store(bridge, line, identity, _TIMEOUT_S)
    for _ in range(_MAX_READS):
        sink_totals = next(reversed(SinkNote.read(Checkpoint(str(line.checkpoint))).totals), None)
        comparison = compare_markers(sink_totals, store.read_markers(), f"{identity.sink}/{line.parallelism}")
        if comparison["agrees"] is not False:
            break
    return comparison


def foreign_marker_error(bridge: Bridge, line: AnyLine) -> TowlineError | None:
    """Return an error if the sink id of an uplink without a checkpoint has markers of another query, with rows.

    The state directory was emptied or replaced. The first batch would stop with TL-K13, after messages were
    acknowledged. A marker without rows belongs to nobody.

    Raises:
        KafkaError: As `MarkerStore.read`; the markers are unknown then.
    """
    identity, own_query = Identity.read(line.gateway.state_dir), Checkpoint(str(line.checkpoint)).query_id
    if not (isinstance(line, Uplink) and line.transactional) or identity is None or identity.query:
        return None
    for marker in _marker_store(bridge, line, identity, _START_TIMEOUT_S).read_markers().values():
        if marker is not None and marker.writer not in (ANY_QUERY, own_query) and marker.total_rows:
            problem = f'its sink "{identity.sink}" has {marker.total_rows:,} rows of query {marker.writer} in Kafka'
            problem += ", and its checkpoint is not here; nothing was received"
            return start_refusal(line, bridge.file, "TL-K13", problem, "Bring back the state directory of that query")
    return None


def _marker_store(bridge: Bridge, line: AnyLine, identity: Identity, timeout_s: str) -> MarkerStore:
    options = {**bridge.sink_options(line, identity.sink), "deliveryTimeout": timeout_s}
    return MarkerStore(SinkSettings.parse(options), identity.sink)


def compare_markers(sink_totals: BatchTotals | None, markers: Mapping[int, Marker | None], sink: str) -> dict[str, Any]:
    """Compare the totals of a sink's markers with its checkpoint's, read before; `sink` is ``<id>/<partitions>``.

    Returns:
        ``rows`` and ``dead_lettered`` of the markers, ``noted_rows`` and ``noted_dead_lettered`` of the sink, if known;
        ``agrees``, None if they can't be compared; and ``why`` not.
    """
    partitions, rows = int(sink.rpartition("/")[2]), [marker.total_rows for marker in markers.values() if marker]
    comparison: dict[str, Any] = {"rows": sum(rows) if rows else None, "agrees": None}
    if sink_totals is None or sink_totals.marks is None or sink_totals.sink != sink:
        return {**comparison, "why": "the sink has no totals to compare"}
    comparison["noted_rows"] = sink_totals.marks.rows
    sink_markers = [marker for part in range(partitions) if (marker := markers.get(part)) is not None]
    if len(sink_markers) < partitions:
        reason = f"{partitions - len(sink_markers):,} of {partitions:,} markers are missing   [TL-K62]"
        return {**comparison, "agrees": False, "why": reason}
    if any(marker.writer == ANY_QUERY for marker in sink_markers):
        return {**comparison, "why": "a person has set the markers"}
    batch = sink_totals.batch
    if batches := [marker.batch for marker in sink_markers if not 0 <= marker.batch - batch <= 1]:
        reason = f"a marker is of batch {batches[0]}, the sink has batch {batch}   [TL-K62]"
        return {**comparison, "agrees": False, "why": reason}
    new_markers = [marker for marker in sink_markers if marker.batch > batch]  # one batch ahead of the checkpoint
    comparison["rows"] = sum(m.total_rows for m in sink_markers) - sum(m.rows for m in new_markers)
    new_letters = sum(marker.dead_lettered for marker in new_markers)
    comparison["dead_lettered"] = sum(marker.total_dead_lettered for marker in sink_markers) - new_letters
    comparison["noted_dead_lettered"] = sink_totals.marks.dead_lettered
    mismatches = [
        f"the markers say {comparison[key]:,} {noun}, the sink has {comparison[f'noted_{key}']:,}   [TL-K62]"
        for key, noun in (("rows", "rows"), ("dead_lettered", "dead letters"))
        if comparison[key] != comparison[f"noted_{key}"]
    ]
    return {**comparison, "agrees": not mismatches, "why": "; ".join(mismatches)}
