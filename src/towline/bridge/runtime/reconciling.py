"""`towline status --reconcile`: reads Kafka itself, and holds the accounts of a bridge against it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from towline.bridge.config.model import CONSUMER, Line
from towline.bridge.lines.evidence import kafka_offsets, read_checkpoint
from towline.bridge.lines.identity import Identity
from towline.bridge.lines.reconcile import Comparison, of_ends, of_journal, of_markers, of_offsets
from towline.bridge.runtime.state import counts_of, read_state
from towline.bridge.uplink.account import UplinkCounts
from towline.checkpoint import Checkpoint
from towline.guarantee import policy
from towline.kafka.admin import topic_bounds
from towline.kafka.markerstore import MarkerStore
from towline.kafka.options import SinkSettings
from towline.spark import tally

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from towline.bridge.config.model import AnyLine, Bridge, DownLine
    from towline.kafka.markers import Marker

__all__ = ["reconcile", "render_comparisons"]

#: A batch may end between two looks: so often both are read again.
_LOOKS: Final = 5
#: Seconds Kafka has for each answer.
_TIMEOUT: Final = "15"


def reconcile(bridge: Bridge, status: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """What Kafka says of each line, and the line.

    Args:
        bridge: The file.
        status: Of `towline.bridge.runtime.status.collect`, asked before.

    Raises:
        KafkaError: TL-K01 no answer; as `MarkerStore.read`.
        ConfigError: The client's configuration is impossible.
    """
    saved = (read_state(bridge.state_dir) or {}).get("lines", {})
    found = {}
    for line in bridge.lines:
        view, known = saved.get(line.name, {}), status["lines"].get(line.name) or {}
        up = isinstance(line, Line)
        comparisons = _up(bridge, line, view, known) if up else _down(bridge, line, view)  # type: ignore[arg-type]
        found[line.name] = [one.as_json() for one in comparisons]
    return found


def _up(bridge: Bridge, line: Line, saved: Mapping[str, Any], known: Mapping[str, Any]) -> Iterator[Comparison]:
    """Numbers of the line first, Kafka's after that: they only grow."""
    counts = counts_of("up", saved.get("counts", {}))
    assert isinstance(counts, UplinkCounts)
    yield from _journal(line, known.get("gateway") or {})
    yield from _markers(bridge, line)
    topics = {route.topic.constant for route in line.routes} | {route.fallback_topic for route in line.routes}
    named = sorted(topic for topic in topics if topic)
    plain = counts.plain_letters and line.dead_letter_topic
    carried = counts.sink.sums.acknowledged
    if policy(line.guarantee).kafka["acks"] == "0":
        yield Comparison("records", None, carried, None, "with acks=0 Kafka acknowledges nothing")
    elif None in {route.topic.constant for route in line.routes}:
        yield Comparison("records", None, carried, None, "topics are made of messages")
    else:
        places = [*named, *([str(line.dead_letter_topic)] if plain else [])]
        yield of_ends("records", places, topic_bounds(bridge.kafka.client(), places), carried)
    yield from _letters(bridge, line, counts.sink.sums.dead_lettered)


def _down(bridge: Bridge, line: DownLine, saved: Mapping[str, Any]) -> Iterator[Comparison]:
    counts = counts_of("down", saved.get("counts", {}))
    seen = read_checkpoint(line.checkpoint)
    stands = kafka_offsets(line.checkpoint, seen.done) if seen.done is not None else {}
    yield from of_offsets(stands, topic_bounds(bridge.kafka.client(), stands))
    if line.dead_letter_topic:
        yield from _markers(bridge, line)
    yield from _letters(bridge, line, counts.sink.sums.dead_lettered)


def _letters(bridge: Bridge, line: AnyLine, dead_lettered: int) -> Iterator[Comparison]:
    if line.dead_letter_topic:
        topics = [line.dead_letter_topic]
        yield of_ends("dead letters", topics, topic_bounds(bridge.kafka.client(), topics), dead_lettered)


def _journal(line: Line, gateway: Mapping[str, Any]) -> Iterator[Comparison]:
    committed = (gateway.get("consumers") or {}).get(CONSUMER)
    done = read_checkpoint(line.checkpoint).done_end if not line.gateways and line.gateway.landing is None else None
    if committed is not None and done is not None:
        yield of_journal(int(committed), done)


def _markers(bridge: Bridge, line: AnyLine) -> Iterator[Comparison]:
    identity = Identity.read(line.gateway.state_dir)
    if not policy(line.guarantee).transactions or identity is None:
        return
    store = MarkerStore(_settings(bridge, line, identity.sink), identity.sink)
    sink = f"{identity.sink}/{line.parallelism}"
    found: list[Comparison] = []
    for _ in range(_LOOKS):
        noted = tally.noted_last(Checkpoint(str(line.checkpoint)))
        markers: Mapping[int, Marker | None] = store.read_all()
        found = list(of_markers(noted, markers, sink))
        if all(one.agrees is not False for one in found):
            break
    yield from found


def _settings(bridge: Bridge, line: AnyLine, sink: str) -> SinkSettings:
    client = {f"kafka.{name}": value for name, value in bridge.kafka.client().items()}
    own = {"sinkId": sink, "parallelism": str(line.parallelism), "deliveryTimeout": _TIMEOUT}
    return SinkSettings.parse({**client, **own})


def render_comparisons(found: Mapping[str, list[dict[str, Any]]]) -> str:
    """The table, a part for each line."""
    out = []
    for name, comparisons in found.items():
        out.append(f'▸ line "{name}"   {_ROW.format("", "Kafka", "line")}'.rstrip())
        out += [_row(one) for one in comparisons] or ["  nothing of it is in Kafka"]
    return "\n".join(out) + "\n"


def _row(one: Mapping[str, Any]) -> str:
    sign = {True: "✓", False: "✗", None: "not compared"}[one["agrees"]]
    kafka, line = ("" if one[name] is None else f"{one[name]:,}" for name in ("kafka", "line"))
    relation = "≥" if one["bound"] and one["agrees"] is not None else ""
    why = f": {one['why']}" if one["why"] else ""
    return f"  {_ROW.format(one['what'], kafka, line)}  {relation} {sign}{why}".rstrip()


_ROW: Final = "{:<32} {:>12} {:>12}"
