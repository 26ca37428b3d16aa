"""One table decides what a guarantee sets: code, plan and documents agree with it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.bridge.test_config import changed, read
from towline.bridge.config.plan import plan_of, render
from towline.bridge.runtime.session import settings_of
from towline.gateway.settings import GatewaySettings
from towline.guarantee import POLICIES, Guarantee, conf_problem, policy, qos_problem
from towline.kafka.options import SinkSettings

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
    assert qos_problem(Guarantee.EXACTLY_ONCE, 1) == (
        "guarantee exactly_once needs QoS 2",
        "Raise it, or give a dedupe key, which allows QoS 1.",
    )
    assert qos_problem(Guarantee.EXACTLY_ONCE, 1, keyed=True) is None
    assert qos_problem(Guarantee.AT_LEAST_ONCE, 1) is None


@pytest.mark.parametrize("guarantee", [Guarantee.AT_LEAST_ONCE, Guarantee.EXACTLY_ONCE])
@pytest.mark.parametrize("keyed", [False, True])
def test_qos_0_is_led_to_the_promise_that_takes_it(guarantee: Guarantee, keyed: bool) -> None:
    problem = qos_problem(guarantee, 0, keyed=keyed)
    assert problem is not None
    assert "by_qos" in problem[1]
    assert qos_problem(Guarantee.BY_QOS, 0, keyed=keyed) is None


def test_qos_2_is_not_taken_where_it_would_be_less() -> None:
    assert [qos_problem(Guarantee.BY_QOS, qos) is None for qos in (0, 1, 2)] == [True, True, False]
    assert [qos_problem(Guarantee.AT_MOST_ONCE, qos) for qos in (0, 1, 2)] == [None] * 3


@pytest.mark.parametrize("value", [True, "true", "TRUE "])
def test_a_spark_setting_may_not_undo_the_promise(value: object) -> None:
    assert conf_problem(Guarantee.EXACTLY_ONCE, {"spark.speculation": value}) == ("spark.speculation", "false")
    assert conf_problem(Guarantee.AT_LEAST_ONCE, {"spark.speculation": value}) is None
    assert conf_problem(Guarantee.EXACTLY_ONCE, {"spark.speculation": False}) is None


@pytest.mark.parametrize("guarantee", list(Guarantee))
def test_a_bridge_sets_what_its_promises_ask_of_spark(guarantee: Guarantee, tmp_path: Path) -> None:
    own = changed('name = "telemetry"', f'name = "telemetry"\nguarantee = "{guarantee}"')
    assert settings_of(read(own, tmp_path)).items() >= policy(guarantee).spark.items()


def test_check_tells_what_by_qos_costs(tmp_path: Path) -> None:
    shown = render(plan_of(read(changed('name = "telemetry"', 'name = "telemetry"\nguarantee = "by_qos"'), tmp_path)))
    for part in (
        'line "telemetry"   by_qos',
        "(QoS 1)",
        "is served again without its rows of QoS 0",
        "limit     of a batch that a crash, a stop or a refusal of Kafka interrupted the messages of QoS 0 are",
    ):
        assert part in shown, part


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
