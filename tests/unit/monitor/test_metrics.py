"""What is exported: the table's metrics and no others, by Prometheus' conventions, and counters that only grow."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tests.unit.monitor.knowing import DOWN_STATUS, UP_STATUS, a_bridge, a_gateway
from towline.monitor.gateway import outage_budget_s
from towline.monitor.table import METRICS, Sample, TableCollector, build_sample, publisher_samples
from towline.timing import Histogram, RateMeter

NOW = 1_700_000_100.0
PUBLISHER = {
    **DOWN_STATUS["outbox"],
    "online": True,
    "client_id": "c",
    "receipts": {"awaiting": 3},
    "measured": DOWN_STATUS["measured"]["outbox"],
    "held_back": None,
}


def exported(samples: Iterable[Sample]) -> CollectorRegistry:
    known, registry = list(samples), CollectorRegistry()
    registry.register(TableCollector(lambda: known))
    return registry


def everything() -> list[Sample]:
    return [build_sample(), *a_bridge().samples(NOW, 1000), *publisher_samples(PUBLISHER, "app", "j")]


def values(samples: Iterable[Sample]) -> dict[tuple[str, tuple[str, ...]], Any]:
    return {(one.name, one.labels): one.value for one in samples}


def test_each_metric_of_the_table_is_exported_somewhere() -> None:
    """With all that can be known: nobody has to look for a metric that never comes."""
    assert {sample.name for sample in everything()} == set(METRICS)


def test_what_is_not_known_has_no_sample() -> None:
    silent = values(a_bridge(up=False, account=None, kafka="unknown").samples(NOW))
    assert silent["towline_gateway_up", ("b", "line", "gw", "up")] == 0
    names = {name for name, _ in silent}
    assert "towline_broker_connected" not in names
    assert "towline_messages_received_total" not in names
    assert "towline_account_adds_up" not in names
    assert "towline_kafka_reachable" not in names


def test_the_budgets_are_room_and_queue_over_the_rates() -> None:
    place = ("b", "line", "gw", "up")
    known = values(a_bridge(rates=(50.0, 1000.0)).samples(NOW, 1000))
    assert known["towline_outage_budget_intake_seconds", place] == UP_STATUS["measured"]["inbox"]["room_left"] / 1000
    assert known["towline_outage_budget_broker_seconds", place] == 20.0
    assert ("towline_outage_budget_broker_seconds", place) not in values(a_bridge(rates=(50.0, 1.0)).samples(NOW))
    assert (outage_budget_s(0, 0), outage_budget_s(-1, 1), outage_budget_s(5, 0)) == (0.0, 0.0, float("inf"))
    at_broker = a_bridge(status={**UP_STATUS, "ack_after": "kafka"}, rates=(50.0, 1000.0))
    assert {name for name, _ in values(at_broker.samples(NOW, 1000)) if "budget" in name} == {
        "towline_outage_budget_broker_seconds"
    }, "its window is full long before its disk"


@given(st.lists(st.tuples(st.sampled_from(["a", "b"]), st.integers(0, 1000)), min_size=1))
def test_a_counter_that_the_journal_knows_never_goes_back(told: list[tuple[str, int]]) -> None:
    """But for another journal: then it begins anew, as Prometheus takes a restart."""
    now: list[Sample] = []
    collector = TableCollector(lambda: now)
    before: tuple[str, float] | None = None
    for journal, count in told:
        now[:] = [Sample("towline_messages_received_total", ("b", "l", "g", "up"), count, journal)]
        (family,) = collector.collect()
        value = family.samples[0].value
        if before is not None and before[0] == journal:
            assert value == max(before[1], count)
        else:
            assert value == count
        before = journal, value


@given(st.lists(st.floats(0, 1e5), max_size=30))
def test_buckets_are_cumulative_and_end_with_the_count(durations: list[float]) -> None:
    status = {**UP_STATUS, "measured": {"inbox": dict(UP_STATUS["measured"]["inbox"])}}
    histogram = Histogram()
    for seconds in durations:
        histogram.observe(seconds)
    status["measured"]["inbox"]["syncs"] = histogram.as_json()
    text = generate_latest(exported(a_bridge(status=status).samples(NOW))).decode()
    (family,) = [one for one in text_string_to_metric_families(text) if one.name == "towline_fdatasync_seconds"]
    buckets = [one.value for one in family.samples if one.name.endswith("_bucket")]
    assert buckets == sorted(buckets)
    assert buckets[-1] == len(durations)


@given(st.lists(st.tuples(st.floats(2, 60), st.integers(1, 500), st.integers(1, 10_000)), min_size=2, max_size=40))
def test_a_rate_is_what_came_over_the_time_it_took(steps: list[tuple[float, int, int]]) -> None:
    meter, looks = RateMeter(300), [(0.0, 0, 0)]
    for step in steps:
        looks.append((looks[-1][0] + step[0], looks[-1][1] + step[1], looks[-1][2] + step[2]))
        meter.sample(*looks[-1])
    at, messages, size = looks[-1]
    assert meter.rates in [((messages - n) / (at - t), (size - b) / (at - t)) for t, n, b in looks[1:-1]]
    meter.sample(at + 5, 0, 0)
    assert meter.rates is None, "a restarted counter begins anew"


def test_a_downlink_counts_what_the_broker_took() -> None:
    known = values(a_bridge(a_gateway("down", DOWN_STATUS), direction="down").samples(NOW))
    place = ("b", "line", "gw", "down")
    assert known["towline_messages_acknowledged_total", place] == 7
    assert known["towline_messages_refused_total", place] == 1 + 1  # one was sent once more, and refused all the same
    assert known["towline_messages_waiting", place] == 5
    assert ("towline_messages_received_total", place) not in known
