"""Kills, outages, large messages and a broker that forgets, through a whole bridge; a referee counts."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.helpers import lacking
from towline.errors import SetupError
from towline.spark.java import find_java
from towline_prove.devstack.kafka import kafka_jars
from towline_prove.devstack.mosquitto import find_mosquitto
from towline_prove.evidence import RunDisplay, RunProgress
from towline_prove.processes import Role
from towline_prove.rig import OUTAGES
from towline_prove.scenario import KILLABLE_ROLES, RECEIPT_FAULTS, Run, Scenario, prove

pytestmark = [
    *(pytest.mark.long, pytest.mark.broker, pytest.mark.kafka, pytest.mark.spark, pytest.mark.faults),
    pytest.mark.timeout(1800),
]
#: What is away by itself; the bridge is in the scene of the receipts.
AWAY = tuple(what for what in OUTAGES if what != "bridge down")
KAFKA_AWAY = tuple(what for what in AWAY if what.startswith("kafka"))
MQTT_AWAY = tuple(what for what in AWAY if not what.startswith("kafka"))

Prove = Callable[[Scenario], list[Run]]


class Audience(RunDisplay):
    """Sees no more in Kafka than was sent."""

    def show_progress(self, progress: RunProgress, total: int) -> None:
        assert progress.kafka_count <= progress.offered_count
        assert progress.acked_count <= total


@pytest.fixture
def kept(tmp_path: Path, record_property: Callable[[str, object], None]) -> Prove:
    """Runs a scenario, and asserts of each run that it kept its promise with every message."""
    try:
        find_java(), kafka_jars(), find_mosquitto()
    except SetupError as error:
        lacking(str(error))

    def run(scenario: Scenario) -> list[Run]:
        runs = list(prove(scenario, tmp_path, Audience()))
        # As JSON has them: xdist sends plain types only between its processes.
        record_property("runs", [json.loads(json.dumps(done.record())) for done in runs])
        bad = [done.summary_text() for done in runs if not done.ok]
        assert not bad, "\n".join(bad)
        assert all(done.record()["delivered"] == scenario.messages for done in runs)
        return runs

    return run


def test_a_kill_of_each_role_loses_nothing(kept: Prove) -> None:
    runs = kept(Scenario(targets=KILLABLE_ROLES, runs=1, messages=4_000, rate=1_500))
    assert [run.faults[0].what for run in runs] == list(KILLABLE_ROLES)


def test_a_gateway_killed_again_and_again_takes_each_qos_2_message_once(kept: Prove) -> None:
    asked = Scenario(guarantee="exactly_once", targets=(Role.GATEWAY,), runs=1, kills=40, messages=100_000, rate=1_000)
    assert len(kept(asked)[0].faults) == 40


@pytest.mark.parametrize(
    ("targets", "messages", "rate", "own_limits"),
    [
        (AWAY, 20, 0.8, True),
        (AWAY, 20, 0.8, False),
        (KAFKA_AWAY, 18_000, 700.0, True),
        # Where the gateway is cut off, only a broker that keeps more than 1,000 messages can hold 4,000 of them.
        (MQTT_AWAY, 12_000, 700.0, False),
    ],
)
def test_a_third_before_an_outage_a_third_meanwhile_and_a_third_behind_it(
    kept: Prove, targets: tuple[str, ...], messages: int, rate: float, own_limits: bool
) -> None:
    """What one outage leaves the next one meets."""
    asked = Scenario(targets=targets, runs=1, at=1 / 3, away=3.0, messages=messages, rate=rate, own_limits=own_limits)
    runs = kept(asked)
    assert [run.faults[0].what for run in runs] == list(targets)
    assert all(run.faults[0].mended_at < messages for run in runs)


@pytest.mark.parametrize("guarantee", ["at_least_once", "exactly_once"])
@pytest.mark.parametrize(("messages", "size", "away"), [(8_000, 300_000, 60.0), (6, 60_000_000, 5.0)])
def test_a_backlog_of_large_messages_goes_through(
    kept: Prove, guarantee: str, messages: int, size: int, away: float
) -> None:
    fields = {"targets": ("kafka hangs",), "runs": 1, "away": away, "messages": messages, "rate": 0, "size": size}
    kept(Scenario(guarantee=guarantee, **fields))  # type: ignore[arg-type]


@pytest.mark.parametrize("guarantee", ["exactly_once", "at_least_once"])
def test_what_can_not_be_done_with_mosquitto(kept: Prove, guarantee: str) -> None:
    """Mosquitto forgets, the bridge is down, the publisher dies: all in Kafka, as the demo shows it."""
    asked = Scenario(guarantee=guarantee, messages=1_500, rate=300, runs=1, receipts=True, own_limits=True)
    (run,) = kept(replace(asked, faults=RECEIPT_FAULTS))
    # Between the bridge's end and Mosquitto's a quarter of all messages was acknowledged, by a broker that forgot.
    assert run.repeats[0] >= 0.2 * 1_500
