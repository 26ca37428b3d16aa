"""Kills, outages, large messages and a broker that forgets, through a whole bridge; a referee counts.

`make test` kills gateway and bridge in `bridge/test_bridge.py`, driver and JVM in `bridge/test_delivery_semantics.py`,
has an outage of Kafka in `bridge/test_bridge.py`, of either broker in `gateway/` and `kafka/`, and receipts in
`publisher/test_receipts.py`, with a commit in place of Spark and Kafka.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

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

Prove = Callable[[Scenario], list[Run]]


@pytest.fixture
def kept(tmp_path: Path, record_property: Callable[[str, object], None]) -> Prove:
    """Runs a scenario, and asserts of each run that it kept its promise with every message."""
    try:
        find_java(), kafka_jars(), find_mosquitto()
    except SetupError as error:
        lacking(str(error))

    def run(scenario: Scenario) -> list[Run]:
        runs = list(prove(scenario, tmp_path, Audience()))
        record_property("runs", [done.record() for done in runs])
        bad = [done.summary_text() for done in runs if not done.ok]
        assert not bad, "\n".join(bad)
        assert all(done.record()["delivered"] == scenario.messages for done in runs)
        return runs

    return run


class Audience(RunDisplay):
    """Sees no more in Kafka than was sent."""

    def show_progress(self, progress: RunProgress, total: int) -> None:
        assert progress.kafka_count <= progress.offered_count
        assert progress.acked_count <= total


def test_a_kill_of_each_role_loses_nothing(kept: Prove) -> None:
    runs = kept(Scenario(targets=KILLABLE_ROLES, runs=1, messages=4_000, rate=1_500))
    assert [run.faults[0].what for run in runs] == list(KILLABLE_ROLES)


@pytest.mark.parametrize(("messages", "kills", "rate"), [(4_000, 4, 500.0), (100_000, 40, 1_000.0)])
def test_a_gateway_killed_again_and_again_takes_each_qos_2_message_once(
    kept: Prove, messages: int, kills: int, rate: float
) -> None:
    (run,) = kept(
        Scenario(guarantee="exactly_once", targets=(Role.GATEWAY,), runs=1, kills=kills, messages=messages, rate=rate)
    )
    assert len(run.faults) == kills


@pytest.mark.parametrize("own_limits", [True, False])
def test_four_and_four_and_four_make_twelve(kept: Prove, own_limits: bool) -> None:
    """Four before something is away, four meanwhile and four behind it; what one outage leaves the next one meets."""
    runs = kept(
        Scenario(targets=AWAY, runs=1, at=1 / 3, away=2.0, messages=12, rate=0.8, devices=8, own_limits=own_limits)
    )
    assert [run.faults[0].what for run in runs] == list(AWAY)
    assert all(run.faults[0].mended_at < 12 for run in runs), "the last four come behind it"


@pytest.mark.parametrize(
    ("breaks", "own_limits"),
    [
        (tuple(what for what in AWAY if what.startswith("kafka")), True),
        # Where the gateway is cut off, only a broker that keeps more than 1,000 messages can hold 4,000 of them.
        (tuple(what for what in AWAY if not what.startswith("kafka")), False),
    ],
    ids=["kafka", "mqtt"],
)
def test_the_same_with_four_thousand(kept: Prove, breaks: tuple[str, ...], own_limits: bool) -> None:
    runs = kept(
        Scenario(targets=breaks, runs=1, at=1 / 3, away=4.0, messages=12_000, rate=700.0, own_limits=own_limits)
    )
    assert all(run.faults[0].mended_at < 12_000 for run in runs)


@pytest.mark.parametrize("seconds", [5, 60])
def test_a_publisher_that_goes_on_fills_the_journal_and_not_the_broker(kept: Prove, seconds: int) -> None:
    """Kafka away at 2,000 msg/s: Mosquitto, which drops beyond 1,000, never has to queue."""
    (run,) = kept(
        Scenario(
            targets=("kafka refuses",),
            runs=1,
            away=seconds,
            messages=2_000 * (seconds + 5),
            rate=2_000,
            own_limits=True,
        )
    )
    assert run.broker_dropped == 0
    assert run.faults[0].backlog >= 0.9 * 2_000 * seconds


@pytest.mark.parametrize("guarantee", ["at_least_once", "exactly_once"])
@pytest.mark.parametrize(("messages", "size", "away"), [(8_000, 300_000, 60.0), (6, 60_000_000, 5.0)])
def test_a_backlog_of_large_messages_goes_through(
    kept: Prove, guarantee: str, messages: int, size: int, away: float
) -> None:
    kept(
        Scenario(guarantee=guarantee, targets=("kafka hangs",), runs=1, away=away, messages=messages, rate=0, size=size)
    )


@pytest.mark.parametrize("guarantee", ["exactly_once", "at_least_once"])
def test_what_can_not_be_done_with_mosquitto(kept: Prove, guarantee: str) -> None:
    """Mosquitto forgets, the bridge is down, the publisher dies: all in Kafka, as the demo shows it."""
    asked: dict[str, Any] = {"faults": RECEIPT_FAULTS, "receipts": True, "own_limits": True, "runs": 1}
    (run,) = kept(Scenario(guarantee=guarantee, messages=1_500, rate=300, **asked))
    # Between the bridge's end and Mosquitto's a quarter of all messages was acknowledged, by a broker that forgot.
    assert run.repeats[0] >= 0.2 * 1_500
