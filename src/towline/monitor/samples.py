"""Facts as samples of the metrics in `towline.monitor.table`, and those as the families of Prometheus' client library.

What is not known has no sample; counters that the journal knows never go back.
"""

from __future__ import annotations

import math
import platform
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Any, Final, NamedTuple, TypeAlias

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from towline.bridge.runtime.state import PAUSED
from towline.guarantee import AckAfter
from towline.monitor.facts import BridgeFacts, GatewayFacts, LineFacts
from towline.monitor.table import METRICS, MetricKind
from towline.timing import Histogram
from towline.version import revision, version

__all__ = ["Sample", "TableCollector", "budget", "build", "of_bridge", "of_gateway", "of_line"]

_Family: TypeAlias = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


class Sample(NamedTuple):
    """A value of a metric.

    Attributes:
        name: In `towline.monitor.table.METRICS`.
        labels: Values of its labels, in order.
        value: A number; for a histogram the durations.
        source: Of a counter that is kept: the journal that knows it. Another one begins anew.
    """

    name: str
    labels: tuple[str, ...]
    value: float | Histogram
    source: str = ""


#: Counter → key in a gateway's status, on the way up.
_UP: Final = {
    "towline_messages_received_total": "received",
    "towline_messages_journaled_total": "journaled",
    "towline_messages_committed_total": "committed",
    "towline_messages_repeated_total": "deduplicated",
    "towline_messages_lower_qos_total": "lower_qos",
    "towline_messages_acknowledged_total": "acknowledged",
    "towline_messages_redelivered_total": "redelivered",
}
#: The same in the ``outbox`` of its status, on the way down.
_DOWN: Final = {
    "towline_messages_journaled_total": "accepted",
    "towline_messages_acknowledged_total": "delivered",
    "towline_messages_expired_total": "expired",
    "towline_messages_degraded_total": "degraded",
    "towline_messages_resent_total": "resent_after_lost_session",
}
#: Of either.
_BOTH: Final = {
    "towline_sessions_lost_total": "sessions_lost",
    "towline_window_overruns_total": "window_overruns",
}
#: Reason of holding back → what a gateway says.
_HELD: Final = {"journal": "journal full", "window": "window full"}
#: Counter of a line → part of its account.
_PARTS: Final = {
    "towline_messages_dead_lettered_total": "dead_lettered",
    "towline_messages_filtered_total": "filtered",
    "towline_messages_undecided_total": "undecided",
    "towline_messages_unrouted_total": "unrouted",
    "towline_messages_deduplicated_total": "deduplicated",
    "towline_messages_given_up_total": "skipped",
    "towline_messages_lost_total": "lost",
    "towline_kafka_behind_records": "behind",
    "towline_kafka_hidden_records": "hidden",
}


def build() -> Sample:
    """The versions of what runs."""
    return Sample("towline_build_info", (version(), revision(), platform.python_version()), 1)


def of_gateway(facts: GatewayFacts, now: float, queue: int | None = None) -> Iterator[Sample]:
    """What a gateway says of itself.

    Args:
        facts: Of the gateway.
        now: Seconds since 1970.
        queue: Messages that the broker keeps for this client while it is away; None where that is not known.
    """
    labels, status = facts.labels, facts.status
    yield Sample("towline_gateway_up", labels, int(facts.up))
    if not facts.up:
        return
    down: Mapping[str, Any] | None = (status.get("outbox") or {}) if facts.direction == "down" else None
    yield Sample("towline_broker_connected", labels, int(facts.online))
    yield from _counters(labels, status, _BOTH)
    yield Sample("towline_reconnects_total", labels, max(0, int(status.get("connects") or 0) - 1))
    yield Sample("towline_loop_age_seconds", labels, float(status.get("turned_s") or 0))
    yield from _of_journals(labels, status)
    oldest = status.get("oldest")
    if down is None:
        yield from _counters(labels, status, _UP)
        stubs = int(status.get("packets_too_large") or 0) + int(status.get("too_many_properties") or 0)
        yield Sample("towline_messages_not_whole_total", labels, stubs, str(status.get("journal")))
        waiting = int(status.get("waiting") or 0)
        yield from _window(labels, status.get("unacknowledged"), status.get("receive_maximum"))
        held = str(status.get("held_back") or "")
        for reason, text in _HELD.items():
            yield Sample("towline_intake_held_back", (*labels, reason), int(held == text))
    else:
        yield from _counters(labels, down, _DOWN, str(status.get("journal")))
        refused = int(down.get("refused", 0)) + int(down.get("replayed", 0))  # a replay takes none of them back
        yield Sample("towline_messages_refused_total", labels, refused, str(status.get("journal")))
        waiting = int(down.get("queued", 0)) + int(down.get("in_flight", 0))
        yield from _window(labels, down.get("window_open"), down.get("window"))
    yield Sample("towline_messages_waiting", labels, waiting)
    age = max(0.0, now - float(oldest)) if oldest is not None and waiting else 0.0
    yield Sample("towline_oldest_waiting_seconds", labels, age)
    yield from _budgets(facts, queue)


def _counters(
    labels: tuple[str, ...], told: Mapping[str, Any], names: Mapping[str, str], journal: str = ""
) -> Iterator[Sample]:
    source = journal or str(told.get("journal", ""))
    for name, key in names.items():
        if told.get(key) is not None:
            yield Sample(name, labels, int(told[key]), source)


def _of_journals(labels: tuple[str, ...], status: Mapping[str, Any]) -> Iterator[Sample]:
    measured: Mapping[str, Mapping[str, Any]] = status.get("measured") or {}
    waiting = measured.get("outbox", measured.get("inbox"))
    if waiting is not None:
        yield Sample("towline_waiting_bytes", labels, int(waiting["bytes_waiting"]))
    for journal, told in measured.items():
        yield Sample("towline_journal_written_bytes_total", (*labels, journal), int(told["bytes_written"]))
        yield Sample("towline_journal_size_bytes", (*labels, journal), int(told["bytes_on_disk"]))
        yield Sample("towline_fdatasync_seconds", (*labels, journal), Histogram.from_json(told["syncs"]))


def _window(labels: tuple[str, ...], used: Any, limit: Any) -> Iterator[Sample]:
    if used is None or not limit:
        return
    yield Sample("towline_window_in_flight", labels, int(used))
    yield Sample("towline_window_limit", labels, int(limit))
    yield Sample("towline_window_use_ratio", labels, int(used) / int(limit))


def _budgets(facts: GatewayFacts, queue: int | None) -> Iterator[Sample]:
    if facts.rates is None:
        return
    messages, size = facts.rates
    journal = "inbox" if facts.direction == "up" else "outbox"
    room = ((facts.status.get("measured") or {}).get(journal) or {}).get("room_left")
    if room is not None and facts.status.get("ack_after") != AckAfter.KAFKA:  # else the window ends it
        yield Sample("towline_outage_budget_intake_seconds", facts.labels, budget(room, size))
    if queue is not None and facts.direction == "up":
        yield Sample("towline_outage_budget_broker_seconds", facts.labels, budget(queue, messages))


def budget(room: float, rate: float) -> float:
    """Seconds until `room` is used up at `rate`; 0 without room, infinite while nothing comes."""
    if room <= 0:
        return 0.0
    return room / rate if rate > 0 else math.inf


def of_line(facts: LineFacts, now: float, queue: int | None = None) -> Iterator[Sample]:
    """What is known of a line, and what its gateways say."""
    labels, account = facts.labels, facts.account
    for gateway in facts.gateways:
        yield from of_gateway(gateway, now, queue)
    yield Sample("towline_query_running", labels, int(facts.query == "running"))
    yield Sample("towline_line_paused", labels, int(facts.query == PAUSED))
    yield Sample("towline_query_restarts_total", labels, facts.query_restarts)
    yield Sample("towline_gateway_restarts_total", labels, facts.gateway_restarts)
    if facts.batches is not None:
        yield Sample("towline_batch_seconds", labels, facts.batches)
    if facts.transactions is not None:
        yield Sample("towline_kafka_transaction_seconds", labels, facts.transactions)
    if facts.batch_at is not None:
        yield Sample("towline_last_batch_timestamp_seconds", labels, facts.batch_at)
    if account is None:
        return
    verdict = account.adds_up
    yield from () if verdict is None else (Sample("towline_account_adds_up", labels, int(verdict)),)
    yield Sample("towline_guarantee_kept", labels, int(not account.broken))
    whole = {account.words.received: account.received, account.words.carried_key: account.carried}
    parts = {**whole, "waiting": account.waiting, **account.parts}
    for part, count in parts.items():
        yield Sample("towline_account_messages", (*labels, part), count)
    said = {**parts, **account.more}
    for name, part in _PARTS.items():
        if (value := said.get(part)) is not None:
            yield Sample(name, labels, value)


def of_bridge(facts: BridgeFacts, now: float, queue: int | None = None) -> Iterator[Sample]:
    """What is known of a bridge and its lines."""
    labels = (facts.name,)
    yield Sample("towline_spark_running", labels, int(facts.spark == "running"))
    yield Sample("towline_spark_restarts_total", labels, facts.spark_restarts)
    if facts.reloaded is not None:
        yield Sample("towline_config_last_reload_successful", labels, int(facts.reloaded))
    if facts.kafka != "unknown":
        yield Sample("towline_kafka_reachable", labels, int(facts.kafka == "reachable"))
    for line in facts.lines:
        yield from of_line(line, now, queue)


class TableCollector(Collector):
    """Exports samples; register it with a registry.

    A status is not one instant: counters are read one after the other, and a sum of them may be smaller by a message
    than it was a moment before. Prometheus would take that for a restart and count everything once more.

    Args:
        samples: Asked at every scrape, from any thread.
    """

    def __init__(self, samples: Callable[[], Iterable[Sample]]) -> None:
        self._samples = samples
        self._lock = threading.Lock()
        self._highest: dict[tuple[str, tuple[str, ...]], tuple[str, float]] = {}

    def describe(self) -> Iterable[Metric]:
        """Nothing: registering it must ask nobody."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """The families that have samples now."""
        families: dict[str, _Family] = {}
        for sample in self._samples():
            family = families.get(sample.name)
            if family is None:
                family = families[sample.name] = _family(sample.name)
            _add(family, sample, self._grown(sample))
        yield from families.values()

    def _grown(self, sample: Sample) -> float:
        value = 0.0 if isinstance(sample.value, Histogram) else float(sample.value)
        if not METRICS[sample.name].kept:
            return value
        place = (sample.name, sample.labels)
        with self._lock:
            source, highest = self._highest.get(place, (sample.source, value))
            value = max(highest, value) if source == sample.source else value
            self._highest[place] = (sample.source, value)
        return value


def _family(name: str) -> _Family:
    metric = METRICS[name]
    if metric.kind is MetricKind.COUNTER:
        return CounterMetricFamily(name, metric.text, labels=metric.labels)
    if metric.kind is MetricKind.GAUGE:
        return GaugeMetricFamily(name, metric.text, labels=metric.labels)
    return HistogramMetricFamily(name, metric.text, labels=metric.labels)


def _add(family: _Family, sample: Sample, value: float) -> None:
    if isinstance(family, HistogramMetricFamily):
        assert isinstance(sample.value, Histogram), sample
        family.add_metric(sample.labels, *_buckets(sample.value))
    else:
        family.add_metric(sample.labels, value)


def _buckets(histogram: Histogram) -> tuple[list[tuple[str, float]], float]:
    """Cumulated, the last one ``+Inf``, and the sum."""
    counts = list(histogram.counts)  # one moment: it may be counted on meanwhile
    bounds = [*(str(float(bound)) for bound in histogram.bounds), "+Inf"]
    return list(zip(bounds, map(float, accumulate(counts)), strict=True)), histogram.seconds
