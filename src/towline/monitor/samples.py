"""Samples of the metrics in `towline.monitor.table`, as the families of Prometheus' client library.

What is not known has no sample; counters that the journal knows never go back.
"""

from __future__ import annotations

import platform
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from towline.monitor.table import METRICS, MetricKind
from towline.timing import Histogram
from towline.version import revision, version

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


def read(sources: Mapping[str, str], status: Mapping[str, Any]) -> dict[str, float]:
    """The values of metrics in a status, by name; none of what it leaves out.

    Args:
        sources: Metric → its key in the status, or several with + between for their sum.
        status: What is asked.
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
