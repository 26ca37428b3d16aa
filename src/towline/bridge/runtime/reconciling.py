"""`towline status --reconcile`: holds the account of each line against the markers that Kafka has of it.

A marker has the totals of all batches of the sink and is written in the transaction of the records (exactly_once):
they are equal to what the sink has noted, or one batch ahead of it where a kill came between.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from towline.bridge.config.model import CONSUMER, AnyLine, Bridge, Line
from towline.bridge.lines.identity import Identity
from towline.bridge.lines.recovery import refusal
from towline.checkpoint import Checkpoint
from towline.errors import TowlineError
from towline.kafka.markers import ANYONE, Marker
from towline.kafka.markerstore import MarkerStore
from towline.kafka.options import SinkSettings
from towline.spark.offsets import places_at
from towline.spark.tally import BatchTotals, SinkNote

#: A batch may end between two looks: so often both are read again.
_LOOKS: Final = 5
#: Seconds Kafka has for each answer.
_TIMEOUT: Final = "15"
#: The same where a line waits for it before it takes anything in.
_SOON: Final = "5"


def reconcile(bridge: Bridge, status: Mapping[str, Any]) -> None:
    """Put what Kafka's markers say into the `status` of each line, as `of_markers` has it, under ``markers``.

    The journal's watermark, which was asked before, is never ahead of the newest batch that is done: else that is told.

    Raises:
        KafkaError: As `MarkerStore.read`.
        ConfigError: The client's configuration is impossible.
    """
    for line in bridge.lines:
        if (found := status["lines"].get(line.name)) is None:  # a monitor that reads the file as it was
            continue
        committed = ((found["gateway"] or {}).get("consumers") or {}).get(CONSUMER)
        markers, logs = _markers(bridge, line), Checkpoint(str(line.checkpoint))
        if isinstance(line, Line) and committed is not None and (ends := places_at(logs, logs.last_commit_batch())):
            done = sum(place.offset for place in ends)
            if int(committed) > done:
                why = f"journal says {committed:,} committed · the checkpoint's last batch ends at {done:,}   [TL-K61]"
                markers |= {"agrees": False, "why": why}
        found["markers"] = markers


def _markers(bridge: Bridge, line: AnyLine) -> dict[str, Any]:
    identity, found = Identity.read(line.gateway.state_dir), dict[str, Any](agrees=None, why="the line has none")
    if identity is None or not line.transacts:
        return found
    store = _store(bridge, line, identity, _TIMEOUT)
    for _ in range(_LOOKS):
        noted = next(reversed(SinkNote.read(Checkpoint(str(line.checkpoint))).totals), None)
        found = of_markers(noted, store.read_all(), f"{identity.sink}/{line.parallelism}")
        if found["agrees"] is not False:
            break
    return found


def foreign_marker(bridge: Bridge, line: AnyLine) -> TowlineError | None:
    """Why an uplink without a checkpoint must not take anything in: another query's markers of its sink say rows.

    Its state directory was emptied, or is another than it was: the first batch would stop [TL-K13], with messages
    acknowledged by then. A marker of no row at all is nobody's.

    Raises:
        KafkaError: As `MarkerStore.read`; it is not known then.
    """
    identity, ours = Identity.read(line.gateway.state_dir), Checkpoint(str(line.checkpoint)).query
    if not (isinstance(line, Line) and line.transacts) or identity is None or identity.query:
        return None
    for marker in _store(bridge, line, identity, _SOON).read_all().values():
        if marker is not None and marker.writer not in (ANYONE, ours) and marker.total_rows:
            what = f'its sink "{identity.sink}" has {marker.total_rows:,} rows of query {marker.writer} in Kafka'
            what += ", whose checkpoint is not here; nothing was taken in"
            return refusal(line, bridge.file, "TL-K13", what, "Bring back the state directory of that query")
    return None


def _store(bridge: Bridge, line: AnyLine, identity: Identity, patience_s: str) -> MarkerStore:
    options = {**bridge.sink_options(line, identity.sink), "deliveryTimeout": patience_s}
    return MarkerStore(SinkSettings.parse(options), identity.sink)


def of_markers(noted: BatchTotals | None, markers: Mapping[int, Marker | None], sink: str) -> dict[str, Any]:
    """The totals of a sink's markers, read after the note, against that; `sink` is ``<sink id>/<partitions>``.

    Returns:
        ``rows`` and ``dead_lettered`` of the markers, ``noted_rows`` and ``noted_dead_lettered`` by the sink, as far as
        they are known; whether it ``agrees``, None where it can't be compared; and ``why`` not.
    """
    there, partitions = [marker for marker in markers.values() if marker is not None], int(sink.rpartition("/")[2])
    found: dict[str, Any] = {"rows": sum(marker.total_rows for marker in there) if there else None, "agrees": None}
    if noted is None or noted.marks is None or noted.sink != sink:
        return {**found, "why": "the sink has noted nothing that it wrote with them"}
    found["noted_rows"] = noted.marks.rows
    known = [marker for part in range(partitions) if (marker := markers.get(part)) is not None]
    if len(known) < partitions:
        why = f"{partitions - len(known):,} of {partitions:,} markers are not there   [TL-K62]"
        return {**found, "agrees": False, "why": why}
    if any(marker.writer == ANYONE for marker in known):
        return {**found, "why": "a person has set them"}
    if odd := next((one for one in known if not 0 <= one.batch - noted.batch <= 1), None):
        why = f"a marker is of batch {odd.batch}, the sink has noted batch {noted.batch}   [TL-K62]"
        return {**found, "agrees": False, "why": why}
    ahead = [one for one in known if one.batch > noted.batch]  # by a batch that the sink has not noted yet
    found["rows"] = sum(one.total_rows for one in known) - sum(one.rows for one in ahead)
    found["dead_lettered"] = sum(one.total_dead_lettered for one in known) - sum(one.dead_lettered for one in ahead)
    found["noted_dead_lettered"] = noted.marks.dead_lettered
    wrong = [
        f"the markers say {found[key]:,} {what}, the sink has noted {found[f'noted_{key}']:,}   [TL-K62]"
        for key, what in (("rows", "rows"), ("dead_lettered", "dead letters"))
        if found[key] != found[f"noted_{key}"]
    ]
    return {**found, "agrees": not wrong, "why": "; ".join(wrong)}
