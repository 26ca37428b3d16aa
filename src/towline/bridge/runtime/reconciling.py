"""`towline status --reconcile`: holds the account of each line against the markers that Kafka has of it.

A marker has the totals of all batches of the sink and is written in the transaction of the records (exactly_once):
they are equal to what the sink has noted, or one batch ahead of it where a kill came between.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

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


class Comparison(NamedTuple):
    """One thing that two sources say."""

    what: str
    #: What each says; None for nothing.
    kafka: int | None
    line: int | None
    #: None where they can't be compared.
    agrees: bool | None
    #: What is wrong, with its code, or why they can't be compared.
    why: str = ""


def reconcile(bridge: Bridge, status: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """What Kafka says of each line, and the line, as `towline.bridge.runtime.status.collect` asked it before.

    Raises:
        KafkaError: As `MarkerStore.read`.
        ConfigError: The client's configuration is impossible.
    """
    found = {}
    for line in bridge.lines:
        gateway = (status["lines"].get(line.name) or {}).get("gateway") or {}
        committed, logs = (gateway.get("consumers") or {}).get(CONSUMER), Checkpoint(str(line.checkpoint))
        comparisons = _markers(bridge, line)
        if isinstance(line, Line) and committed is not None and (ends := places_at(logs, logs.last_commit_batch())):
            comparisons.insert(0, of_journal(int(committed), sum(place.offset for place in ends)))
        found[line.name] = [one._asdict() for one in comparisons]
    return found


def of_journal(committed: int, done: int) -> Comparison:
    """The journal's watermark, asked before, against the end of the newest batch that is done: it is never ahead."""
    ahead = f"journal says {committed:,} committed · the checkpoint's last batch ends at {done:,}   [TL-K61]"
    return Comparison("committed", None, committed, committed <= done, "" if committed <= done else ahead)


def _markers(bridge: Bridge, line: AnyLine) -> list[Comparison]:
    identity, found = Identity.read(line.gateway.state_dir), list[Comparison]()
    if identity is None or not line.transacts:
        return found
    store = _store(bridge, line, identity, _TIMEOUT)
    for _ in range(_LOOKS):
        noted = next(reversed(SinkNote.read(Checkpoint(str(line.checkpoint))).totals), None)
        found = list(of_markers(noted, store.read_all(), f"{identity.sink}/{line.parallelism}"))
        if all(one.agrees is not False for one in found):
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


def of_markers(noted: BatchTotals | None, markers: Mapping[int, Marker | None], sink: str) -> Iterator[Comparison]:
    """The totals of a sink's markers, read after the note, against that; `sink` is ``<sink id>/<partitions>``."""
    what, there = "rows in the markers", [marker.total_rows for marker in markers.values() if marker is not None]
    total, partitions = sum(there) if there else None, int(sink.rpartition("/")[2])
    if noted is None or noted.marks is None or noted.sink != sink:
        yield Comparison(what, total, None, None, "the sink has noted nothing that it wrote with them")
        return
    known = [marker for part in range(partitions) if (marker := markers.get(part)) is not None]
    agrees: bool | None = False
    if len(known) < partitions:
        why = f"{partitions - len(known):,} of {partitions:,} markers are not there   [TL-K62]"
    elif any(marker.writer == ANYONE for marker in known):
        agrees, why = None, "a person has set them"
    elif odd := next((one for one in known if not 0 <= one.batch - noted.batch <= 1), None):
        why = f"a marker is of batch {odd.batch}, the sink has noted batch {noted.batch}   [TL-K62]"
    else:
        agrees, why = True, ""
    if not agrees:
        yield Comparison(what, total, noted.marks.rows, agrees, why)
        return
    ahead = [one for one in known if one.batch > noted.batch]  # by a batch that the sink has not noted yet
    rows = sum(one.total_rows for one in known) - sum(one.rows for one in ahead)
    dead = sum(one.total_dead_lettered for one in known) - sum(one.dead_lettered for one in ahead)
    letters = ("dead letters in the markers", dead, noted.marks.dead_lettered)
    for about, kafka, line in ((what, rows, noted.marks.rows), letters):
        why = "" if kafka == line else f"the markers say {kafka:,}, the sink has noted {line:,}   [TL-K62]"
        yield Comparison(about, kafka, line, kafka == line, why)


def render_comparisons(found: Mapping[str, list[dict[str, Any]]]) -> str:
    """The table, a part for each line."""
    out = []
    for name, comparisons in found.items():
        out.append(f'▸ line "{name}"   {_ROW.format("", "Kafka", "line")}'.rstrip())
        out += [_row(one) for one in comparisons] or ["  no markers to compare with"]
    return "\n".join(out) + "\n"


def _row(one: Mapping[str, Any]) -> str:
    sign = {True: "✓", False: "✗", None: "not compared"}[one["agrees"]]
    kafka, line = ("" if one[name] is None else f"{one[name]:,}" for name in ("kafka", "line"))
    why = f": {one['why']}" if one["why"] else ""
    return f"  {_ROW.format(one['what'], kafka, line)}  {sign}{why}".rstrip()


_ROW: Final = "{:<32} {:>12} {:>12}"
