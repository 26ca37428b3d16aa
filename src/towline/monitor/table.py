"""Every metric there is, in one table: name, kind, labels, and what it says. Nothing else is ever exported.

Names follow Prometheus: base units, ``_total`` for counters, which the client library adds. A label's values come from
the bridge file or from this code, never from a device [I12, I13].
"""

from __future__ import annotations

import platform
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as MetricFamily
from prometheus_client.registry import Collector

from towline.timing import Histogram
from towline.version import revision, version

#: Labels of what a gateway says of itself, and of what is known of a line. ``direction`` is ``up`` (MQTT to Kafka) or
#: ``down``.
GATEWAY: Final = ("bridge", "line", "gateway", "direction")
LINE: Final = ("bridge", "line", "direction")
_BRIDGE: Final = ("bridge",)
_FAMILIES: Final = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}
PUBLISHER: Final = ("publisher",)


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    Attributes:
        name: As it is exported, ``_total`` included.
        kind: ``counter``, which only grows, and may begin at 0 after a restart; ``gauge``; or ``histogram``.
        labels: Names of its labels, in order.
        kept: Of a counter: the journal knows it, so it goes on after a restart.
    """

    name: str
    kind: str
    labels: tuple[str, ...]
    text: str
    kept: bool = False


def _metrics(kind: str, labels: tuple[str, ...], texts: Mapping[str, str], *, kept: bool = False) -> list[Metric]:
    end = "_total" if kind == "counter" else ""
    return [Metric(f"towline_{name}{end}", kind, labels, text, kept) for name, text in texts.items()]


_ALL: Final = [
    *_metrics(
        "counter",
        GATEWAY,
        {
            "messages_received": "messages that came from the broker, those left out included (up)",
            "messages_journaled": "messages made durable: in the inbox (up), in the outbox (down)",
            "messages_committed": "messages that Spark has committed, so that they may be removed (up)",
            "messages_repeated": "messages that came again, were answered and not stored (up)",
            "messages_not_whole": "messages too large, or with too many properties, to be taken in whole (up)",
            "messages_lower_qos": "messages published with a lower QoS than the guarantee needs (up)",
            "messages_expired": "messages not sent, their time was over (down)",
            "messages_refused": "messages the broker refused for good (down)",
            "messages_degraded": "QoS 2 messages that the broker took as QoS 1 (down)",
            "messages_resent": "messages sent again because the broker lost the session (down)",
            "sessions_lost": "times the broker had lost this client's session",
        },
        kept=True,
    ),
    *_metrics(
        "counter",
        GATEWAY,
        {
            "messages_acknowledged": "acknowledgements: sent to the broker (up), received from it (down)",
            "messages_redelivered": "messages stored that the broker had sent before, DUP (up)",
            "reconnects": "connections to the broker after the first",
            "window_overruns": "times the broker had more open than Receive Maximum allows",
        },
    ),
    *_metrics("counter", (*GATEWAY, "journal"), {"journal_written_bytes": "bytes written to the inbox or outbox"}),
    *_metrics(
        "gauge",
        GATEWAY,
        {
            "gateway_up": "1 while the gateway answers",
            "broker_connected": "1 while the session with the broker is online",
            "messages_waiting": "messages on disk, not carried yet",
            "waiting_bytes": "bytes of those, about",
            "oldest_waiting_seconds": "age of the oldest of those; 0 when none waits",
            "window_in_flight": "QoS 1 and 2 messages without acknowledgement",
            "window_limit": "how many there may be: Receive Maximum",
            "window_use_ratio": "the one over the other, 0 to 1",
            "loop_age_seconds": "time since the gateway's loop looked around; it does so once a minute at least",
            "outage_budget_intake_seconds": "how long intake can go on at the present rate, nothing being committed, "
            "until disk or journal is full; +Inf while nothing comes; absent with ack_after = kafka",
            "outage_budget_broker_seconds": "how long the broker's queue holds what comes at the present rate while "
            "this gateway is away; only where broker_queue_messages says its limit",
        },
    ),
    *_metrics(
        "gauge", (*GATEWAY, "reason"), {"intake_held_back": "1 while nothing is read from the broker, for this reason"}
    ),
    *_metrics("gauge", (*GATEWAY, "journal"), {"journal_size_bytes": "bytes of all segments of the inbox or outbox"}),
    *_metrics(
        "histogram",
        (*GATEWAY, "journal"),
        {
            "fdatasync_seconds": "how long each fdatasync of a journal on disk took",
        },
    ),
    *_metrics(
        "counter",
        LINE,
        {
            "messages_dead_lettered": "messages in the dead-letter topic",
            "messages_filtered": "messages left out by where or transform",
            "messages_undecided": "messages left out because their where is null",
            "messages_unrouted": "messages that no route takes (up)",
            "messages_deduplicated": "repeats left out, those of the gateway included (up)",
            "messages_given_up": "messages given up by at_most_once after a crash (up)",
            "messages_lost": "messages that Kafka did not take in time, lost by at_most_once (up)",
        },
        kept=True,
    ),
    *_metrics(
        "counter",
        LINE,
        {
            "query_restarts": "times the query of the line failed",
            "gateway_restarts": "times the gateway of the line was started again",
        },
    ),
    *_metrics(
        "gauge",
        LINE,
        {
            "query_running": "1 while Spark's query of the line runs",
            "line_paused": "1 while the line is paused, and its query does not run",
            "last_batch_timestamp_seconds": "when the last batch was committed, since 1970",
            "account_adds_up": "1 when the account adds up, 0 when not; absent while it is not known",
            "guarantee_kept": "1 while the guarantee of the line was kept, 0 since it was broken",
            "kafka_behind_records": "offsets up to Kafka's high watermarks not taken (down); absent while unknown",
            "kafka_hidden_records": "those of them that nobody can read before an open transaction ends (down)",
        },
    ),
    *_metrics("gauge", (*LINE, "part"), {"account_messages": "where every message is: the parts of the account"}),
    *_metrics(
        "histogram",
        LINE,
        {
            "batch_seconds": "how long each micro-batch took",
            "kafka_transaction_seconds": "how long each transaction of a batch was open (exactly_once, up)",
        },
    ),
    *_metrics("counter", _BRIDGE, {"spark_restarts": "times Spark's driver was started again"}),
    *_metrics(
        "gauge",
        _BRIDGE,
        {
            "spark_running": "1 while Spark's session is up",
            "config_last_reload_successful": "1 when the last reload made the file what runs, or found it so; 0 when "
            "it was refused; absent before the first",
            "kafka_reachable": "1 while Kafka answers where its brokers tell clients to come; 0 within 10 s of silence",
        },
    ),
    *_metrics("gauge", ("version", "revision", "python"), {"build_info": "1, with the versions"}),
    *_metrics(
        "counter",
        PUBLISHER,
        {
            "publisher_messages_accepted": "messages that are durable in the outbox",
            "publisher_messages_delivered": "messages that the broker has",
            "publisher_messages_expired": "messages not sent, their time was over",
            "publisher_messages_refused": "messages the broker refused for good",
        },
        kept=True,
    ),
    *_metrics(
        "gauge",
        PUBLISHER,
        {
            "publisher_connected": "1 while the session with the broker is online",
            "publisher_held_back": "1 while the outbox has no room",
            "publisher_messages_waiting": "messages on disk that are not at the broker",
            "publisher_messages_awaiting_receipt": "messages at the broker without a receipt; absent without receipts",
            "publisher_outbox_size_bytes": "bytes of the outbox on disk",
            "publisher_window_in_flight": "messages of QoS 1 and 2 without an answer",
            "publisher_window_limit": "how many the broker allows: its Receive Maximum",
            "publisher_room_bytes": "bytes that may still come before publish waits or refuses",
        },
    ),
    *_metrics("histogram", PUBLISHER, {"publisher_fdatasync_seconds": "how long each fdatasync of the outbox took"}),
]

#: By name.
METRICS: Final[Mapping[str, Metric]] = MappingProxyType({one.name: one for one in _ALL})


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


def read(sources: Mapping[str, str], status: Mapping[str, Any]) -> dict[str, float]:
    """The values of metrics in a status, by name; none of what it leaves out.

    Each metric names its key in the status, or several with + between for their sum.
    """
    cells = ((name, keys.split("+")) for name, keys in sources.items())
    return {name: sum(status[key] for key in keys) for name, keys in cells if None not in map(status.get, keys)}


def build() -> Sample:
    """The versions of what runs."""
    return Sample("towline_build_info", (version(), revision(), platform.python_version()), 1)


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

    def describe(self) -> Iterable[MetricFamily]:
        """Nothing: registering it must ask nobody."""
        return ()

    def collect(self) -> Iterator[MetricFamily]:
        """The families that have samples now."""
        families: dict[str, MetricFamily] = {}
        for sample in self._samples():
            if sample.name not in families:
                metric = METRICS[sample.name]
                families[sample.name] = _FAMILIES[metric.kind](metric.name, metric.text, labels=metric.labels)
            _add(families[sample.name], sample, self._grown(sample))
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


def _add(family: MetricFamily, sample: Sample, value: float) -> None:
    if isinstance(family, HistogramMetricFamily):
        assert isinstance(sample.value, Histogram), sample
        family.add_metric(sample.labels, *_buckets(sample.value))
    else:
        assert isinstance(family, CounterMetricFamily | GaugeMetricFamily), sample
        family.add_metric(sample.labels, value)


def _buckets(histogram: Histogram) -> tuple[list[tuple[str, float]], float]:
    """Cumulated, the last one ``+Inf``, and the sum."""
    counts = list(histogram.counts)  # one moment: it may be counted on meanwhile
    bounds = [*(str(float(bound)) for bound in histogram.bounds), "+Inf"]
    return list(zip(bounds, map(float, accumulate(counts)), strict=True)), histogram.seconds
