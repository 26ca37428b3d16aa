"""One table decides what a guarantee sets: code, plan and documents agree with it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.bridge.test_config import changed, read
from towline.bridge.config.plan import plan_of, render
from towline.gateway.settings import GatewaySettings
from towline.guarantee import POLICIES, Guarantee, conf_problem, low_subscription, policy
from towline.kafka.options import SinkSettings
from towline.mqtt.events import Filter

ROOT = Path(__file__).parents[3]


def test_the_page_says_what_the_code_does() -> None:
    run = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "guarantees.py"), "--check"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("guarantee", list(Guarantee))
def test_the_gateway_takes_what_the_table_sets(guarantee: Guarantee, tmp_path: Path) -> None:
    table = policy(guarantee)
    settings = GatewaySettings.model_validate(
        {
            "name": "x",
            "state_dir": tmp_path,
            "brokers": "mqtt://x",
            "guarantee": guarantee,
            "subscriptions": [{"filter": "a", "qos": table.qos}],
        }
    )
    assert settings.acks is table.acks[0]


@pytest.mark.parametrize("guarantee", list(Guarantee))
def test_the_sink_takes_what_the_table_sets(guarantee: Guarantee) -> None:
    settings = SinkSettings.parse({"kafka.bootstrap.servers": "k:9092", "guarantee": guarantee.value})
    assert settings.client.items() >= POLICIES[guarantee].kafka.items()
    assert settings.timeout_s == POLICIES[guarantee].kafka_timeout_s


def test_a_low_qos_needs_a_key() -> None:
    low = [Filter("a", qos=2), Filter("b", qos=1)]
    assert low_subscription(Guarantee.EXACTLY_ONCE, low) == low[1]
    assert low_subscription(Guarantee.EXACTLY_ONCE, low, keyed=True) is None
    assert low_subscription(Guarantee.AT_LEAST_ONCE, low) is None


@pytest.mark.parametrize("value", [True, "true", "TRUE "])
def test_a_spark_setting_may_not_undo_the_promise(value: object) -> None:
    assert conf_problem(Guarantee.EXACTLY_ONCE, {"spark.speculation": value}) == ("spark.speculation", "false")
    assert conf_problem(Guarantee.AT_LEAST_ONCE, {"spark.speculation": value}) is None
    assert conf_problem(Guarantee.EXACTLY_ONCE, {"spark.speculation": False}) is None


def test_check_tells_promise_cost_and_limits(tmp_path: Path) -> None:
    text = changed(
        'name = "telemetry"',
        'name = "telemetry"\nguarantee = "exactly_once"\ndead_letter_topic = "dead"\n'
        'dedupe = { key = "{mqtt.user.id}" }',
    )
    plan = plan_of(read(text, tmp_path))
    shown = render(plan)
    (line,) = plan["lines"]
    assert line["guarantee"] == "exactly_once"
    for part in (
        "doubled   no, for a consumer with isolation.level=read_committed",
        "one transaction a batch, all topics and the marker at once   dead letters to dead",
        "cost      a transaction a batch: records are visible when it is committed; two more packets a message",
        "limit     repeats are dropped for 10 minutes at least",
        "limit     Kafka with unclean leader election",
        "repeats by {mqtt.user.id}",
        "(QoS 2)",
    ):
        assert part in shown, part
