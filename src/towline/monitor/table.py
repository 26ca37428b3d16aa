"""Table of all metrics: name, kind, labels, status key and help text. Nothing else is exported.

Names follow Prometheus: base units, ``_total`` for counters, which the client library adds. A label's values come from
the bridge file or from this code, never from a device [I12, I13].
"""

from __future__ import annotations

import contextlib
import platform
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as MetricFamily
from prometheus_client.registry import Collector

from towline.errors import PublisherError
from towline.timing import Histogram
from towline.version import revision, version

if TYPE_CHECKING:
    from towline.publisher import Publisher

#: Labels of a gateway's and of a line's metrics. ``direction`` is ``up`` (MQTT to Kafka) or ``down``.
GATEWAY: Final = ("bridge", "line", "gateway", "direction")
LINE: Final = ("bridge", "line", "direction")
BRIDGE: Final = ("bridge",)
_FAMILIES: Final = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}
PUBLISHER: Final = ("publisher",)


@dataclass(frozen=True, slots=True)
class Metric:
    """Definition of one metric.

    Attributes:
        name: Exported name, ``_total`` included.
        kind: ``counter``, which only grows, and may begin at 0 after a restart; ``gauge``; or ``histogram``.
        labels: Names of its labels, in order.
        key: Key of the value in a status, several with + for their sum; before | for uplinks, after it for downlinks.
            By default the metric's own name: the value is derived.
        is_persistent: The counter is stored in the journal, so it goes on after a restart.
    """

    name: str
    kind: str
    labels: tuple[str, ...]
    key: str
    text: str
    is_persistent: bool


#: Kind (``kept``: stored in the journal) and labels → name → help text, or key in the status and help text.
_TABLE: Final[Mapping[tuple[str, tuple[str, ...]], Mapping[str, str | tuple[str, str]]]] = {
    ("kept counter", GATEWAY): {
        "messages_received": ("received|", "messages received from the broker, deduplicated ones included (up)"),
        "messages_journaled": ("journaled|accepted", "messages made durable: in the inbox (up), in the outbox (down)"),
        "messages_committed": ("committed|", "messages that Spark has committed, so that they may be removed (up)"),
        "messages_repeated": ("deduplicated|", "repeats that were acknowledged and not stored (up)"),
        "messages_not_whole": (
            "packets_too_large+too_many_properties|",
            "messages too large, or with too many properties, to be taken in whole (up)",
        ),
        "messages_lower_qos": ("lower_qos|", "messages published with a lower QoS than the guarantee needs (up)"),
        "messages_expired": ("|expired", "messages that expired before they were sent (down)"),
        "messages_refused": ("|refused+replayed", "messages the broker refused for good (down)"),
        "messages_degraded": ("|degraded", "QoS 2 messages that the broker took as QoS 1 (down)"),
        "messages_resent": ("|resent_after_lost_session", "messages sent again after a lost session (down)"),
        "sessions_lost": "times the broker had lost this client's session",
    },
    ("counter", GATEWAY): {
        "messages_acknowledged": ("acknowledged|delivered", "acknowledgements sent (up) or received (down)"),
        "messages_redelivered": ("redelivered|", "messages stored that the broker had sent before, DUP (up)"),
        "reconnects": "connections to the broker after the first",
        "window_overruns": "times the broker had more open than Receive Maximum allows",
    },
    ("counter", (*GATEWAY, "journal")): {"journal_written_bytes": "bytes written to the inbox or outbox"},
    ("gauge", GATEWAY): {
        "gateway_up": "1 while the gateway answers",
        "broker_connected": "1 while the session with the broker is online",
        "messages_waiting": ("waiting|queued+in_flight", "messages on disk, not delivered yet"),
        "waiting_bytes": "approximate bytes of the waiting messages",
        "oldest_waiting_seconds": "age of the oldest waiting message; 0 when none waits",
        "window_in_flight": ("unacknowledged|window_open", "QoS 1 and 2 messages without acknowledgement"),
        "window_limit": ("receive_maximum|window", "limit of them: Receive Maximum"),
        "loop_age_seconds": ("turned_s", "time since the last turn of the gateway's loop; up to 60 s when idle"),
        "outage_budget_intake_seconds": "how long intake can go on at the present rate, nothing being committed, "
        "until disk or journal is full; +Inf while nothing comes; absent with ack_after = kafka",
        "outage_budget_broker_seconds": "how long the broker's queue holds what comes at the present rate while "
        "this gateway is away; only where broker_queue_messages says its limit",
    },
    ("gauge", (*GATEWAY, "reason")): {"intake_held_back": "1 while nothing is read from the broker, for this reason"},
    ("gauge", (*GATEWAY, "journal")): {"journal_size_bytes": "bytes of all segments of the inbox or outbox"},
    ("histogram", (*GATEWAY, "journal")): {"fdatasync_seconds": "how long each fdatasync of a journal on disk took"},
    ("kept counter", LINE): {
        "messages_dead_lettered": ("dead_lettered", "messages in the dead-letter topic"),
        "messages_filtered": ("filtered", "messages filtered by where"),
        "messages_undecided": ("undecided", "messages filtered because their where is null"),
        "messages_unrouted": ("unrouted", "messages that match no route (up)"),
        "messages_deduplicated": ("deduplicated", "repeats not written to Kafka, those of the gateway included (up)"),
        "messages_given_up": ("skipped", "messages dropped by at_most_once after a crash (up)"),
        "messages_lost": ("lost", "messages that Kafka did not take in time, lost by at_most_once (up)"),
    },
    ("counter", LINE): {
        "query_restarts": "times the query of the line failed",
        "gateway_restarts": "times the gateway of the line was started again",
    },
    ("gauge", LINE): {
        "query_running": "1 while Spark's query of the line runs",
        "line_paused": "1 while the line is paused, and its query does not run",
        "last_batch_timestamp_seconds": "when the last batch was committed, since 1970",
        "account_adds_up": "1 when the account adds up, 0 when not; absent while it is not known",
        "guarantee_kept": "1 while the guarantee of the line was kept, 0 since it was broken",
        "kafka_behind_records": ("behind", "offsets below Kafka's high watermarks not read (down); absent if unknown"),
        "kafka_hidden_records": ("hidden", "those of them behind an open transaction (down)"),
    },
    ("gauge", (*LINE, "part")): {"account_messages": "where every message is: the parts of the account"},
    ("histogram", LINE): {
        "batch_seconds": "how long each micro-batch took",
        "kafka_transaction_seconds": "how long each transaction of a batch was open (exactly_once, up)",
    },
    ("counter", BRIDGE): {"spark_restarts": "times Spark's driver was started again"},
    ("gauge", BRIDGE): {
        "spark_running": "1 while Spark's session is up",
        "config_last_reload_successful": "1 when the last reload made the file what runs, or found it so; 0 when "
        "it was refused; absent before the first",
        "kafka_reachable": "1 while Kafka answers at its advertised listeners; 0 within 10 s without an answer",
    },
    ("gauge", ("version", "revision", "python")): {"build_info": "1, with the versions"},
    ("kept counter", PUBLISHER): {
        "publisher_messages_accepted": ("accepted", "messages that are durable in the outbox"),
        "publisher_messages_delivered": ("delivered", "messages delivered to the broker"),
        "publisher_messages_expired": ("expired", "messages that expired before they were sent"),
        "publisher_messages_refused": ("refused+replayed", "messages the broker refused for good"),
    },
    ("gauge", PUBLISHER): {
        "publisher_connected": ("online", "1 while the session with the broker is online"),
        "publisher_held_back": "1 while the outbox has no room",
        "publisher_messages_waiting": ("queued+in_flight", "messages on disk that are not at the broker"),
        "publisher_messages_awaiting_receipt": ("awaiting", "messages that await a receipt; absent without receipts"),
        "publisher_outbox_size_bytes": ("bytes_on_disk", "bytes of the outbox on disk"),
        "publisher_window_in_flight": ("window_open", "messages of QoS 1 and 2 without an answer"),
        "publisher_window_limit": ("window", "how many the broker allows: its Receive Maximum"),
        "publisher_room_bytes": ("room_left", "bytes that may still come before publish waits or refuses"),
    },
    ("histogram", PUBLISHER): {"publisher_fdatasync_seconds": "how long each fdatasync of the outbox took"},
}


def _metrics() -> Iterator[Metric]:
    for (kind_text, labels), rows in _TABLE.items():
        kind = kind_text.removeprefix("kept ")
        for name, row in rows.items():
            key, text = (name, row) if isinstance(row, str) else row
            yield Metric(f"towline_{name}{'_total' * (kind == 'counter')}", kind, labels, key, text, kind != kind_text)


#: Metrics by name.
METRICS: Final[Mapping[str, Metric]] = MappingProxyType({metric.name: metric for metric in _metrics()})


class Sample(NamedTuple):
    """Value of a metric.

    Attributes:
        name: Key of `towline.monitor.table.METRICS`.
        labels: Values of its labels, in order.
        value: A number; for a histogram the durations.
        journal: Id of the journal that stores a persistent counter. With another journal it restarts.
    """

    name: str
    labels: tuple[str, ...]
    value: float | Histogram
    journal: str = ""


def status_samples(
    names: tuple[str, ...], labels: tuple[str, ...], status: Mapping[str, Any], journal: str = "", *, down: bool = False
) -> Iterator[Sample]:
    """Yield the samples of all metrics with the label `names` that a status has a value for; None is no value."""
    for metric in METRICS.values():
        uplink_keys, separator, downlink_keys = metric.key.partition("|")
        keys = (downlink_keys if separator and down else uplink_keys).split("+")
        values: list[Any] = [status.get(key) for key in keys]
        if metric.labels == names and None not in values:
            yield Sample(metric.name, labels, sum(values[1:], values[0]), journal)


def build_sample() -> Sample:
    """Return the sample with the versions of Towline and Python."""
    return Sample("towline_build_info", (version(), revision(), platform.python_version()), 1)


class TableCollector(Collector):
    """Prometheus collector of samples.

    A status is not one instant: counters are read one after the other, and their sum may be smaller by a message than a
    moment before. Prometheus would take that for a counter reset and count everything again.

    Args:
        samples: Called at every scrape, from any thread.
    """

    def __init__(self, samples: Callable[[], Iterable[Sample]]) -> None:
        self._samples = samples
        self._lock = threading.Lock()
        self._highest: dict[tuple[str, tuple[str, ...]], tuple[str, float]] = {}

    def describe(self) -> Iterable[MetricFamily]:
        """Return nothing: registering must not call `samples`."""
        return ()

    def collect(self) -> Iterator[MetricFamily]:
        """Yield the metric families that have samples now."""
        families: dict[str, Any] = {}
        for sample in self._samples():
            metric = METRICS[sample.name]
            if sample.name not in families:
                families[sample.name] = _FAMILIES[metric.kind](metric.name, metric.text, labels=metric.labels)
            if isinstance(sample.value, Histogram):
                families[sample.name].add_metric(sample.labels, *_buckets(sample.value))
            else:
                value = self._monotonic_value(sample, sample.value) if metric.is_persistent else sample.value
                families[sample.name].add_metric(sample.labels, float(value))
        yield from families.values()

    def _monotonic_value(self, sample: Sample, value: float) -> float:
        series = (sample.name, sample.labels)
        with self._lock:
            journal, highest = self._highest.get(series, (sample.journal, value))
            value = max(highest, value) if journal == sample.journal else value
            self._highest[series] = (sample.journal, value)
        return value


def _buckets(histogram: Histogram) -> tuple[list[tuple[str, float]], float]:
    """Return cumulated buckets, the last one ``+Inf``, and the sum."""
    bucket_counts = list(histogram.counts)  # a copy: the counters may grow meanwhile
    bounds = [*(str(float(bound)) for bound in histogram.bounds), "+Inf"]
    return list(zip(bounds, map(float, accumulate(bucket_counts)), strict=True)), histogram.seconds


# -- a Publisher's ---------------------------------------------------------------------------------------------------


def publisher_metrics(publisher: Publisher, name: str = "") -> Collector:
    """Return a Prometheus collector of a publisher's metrics; it blocks nothing and reads only this process.

    ``prometheus_client.REGISTRY.register(towline.publisher_metrics(publisher))`` adds them to the metrics of an
    application; ``prometheus_client.start_http_server(9465, "127.0.0.1")`` serves them without another server. A closed
    publisher has no samples; unregister its collector before registering another one of that name.

    Args:
        publisher: The publisher.
        name: Value of the label ``publisher``; default its MQTT client id.
    """

    def samples() -> Iterator[Sample]:
        with contextlib.suppress(PublisherError):  # the publisher belongs to the parent of this forked process
            if not (status := publisher.status())["closed"]:
                yield from publisher_samples(status, name or str(status["client_id"]), publisher.journal_id)

    return TableCollector(samples)


def publisher_samples(status: Mapping[str, Any], name: str, journal: str) -> Iterator[Sample]:
    """Yield the samples of a publisher's status."""
    disk_status = status["measured"]
    values = {**disk_status, **(status["receipts"] or {}), **status}
    values["publisher_held_back"] = int(bool(status["held_back"]))
    values["publisher_fdatasync_seconds"] = Histogram.from_json(disk_status["syncs"])
    return status_samples(PUBLISHER, (name,), values, journal)
