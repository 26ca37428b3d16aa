"""Each alert fires on its fault, and on no other: what can't be had of a real broker is planted in the facts.

The faults of real gateways, brokers and bridges are in tests/integration/monitor.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import generate_latest

from tests.engines.alert_rules import firing
from tests.unit.monitor.knowing import DOWN_STATUS, SOUND, UP_STATUS, Known, a_bridge, a_gateway
from tests.unit.monitor.test_metrics import NOW, PUBLISHER, exported
from towline.monitor.table import publisher_samples

WELL = {**UP_STATUS, "waiting": 0, "measured": {"inbox": {**UP_STATUS["measured"]["inbox"], "room_left": 10**12}}}
DOWN = {**DOWN_STATUS, "outbox": {**DOWN_STATUS["outbox"], "queued": 0, "in_flight": 0}}
DOWN["measured"] = {"outbox": {**UP_STATUS["measured"]["inbox"], "room_left": 10**12}}


def bridge(known: Known) -> str:
    return generate_latest(exported(known.samples(NOW))).decode()


def a_sound(**changes: object) -> Known:
    return a_bridge(**{"status": WELL, "rates": (1.0, 1.0), **changes})  # type: ignore[arg-type]


def down(**outbox: object) -> str:
    status = {**DOWN, "outbox": {**DOWN["outbox"], **outbox}}
    return bridge(a_bridge(a_gateway("down", status, (1.0, 1.0)), direction="down"))


UP = bridge(a_sound())
MORE = replace(SOUND, counts={**SOUND.counts, "dead_lettered": 5})
PUBLISHING = generate_latest(exported(publisher_samples(PUBLISHER, "app", "j"))).decode()
HELD = generate_latest(exported(publisher_samples({**PUBLISHER, "held_back": "full"}, "app", "j"))).decode()

FAULTS = {
    "nothing": (UP, UP, set()),
    "no answer": (UP, None, {"TowlineScrapeFails"}),
    "no query": (UP, bridge(a_sound(query="waiting to retry")), {"TowlineQueryDown"}),
    "paused": (UP, bridge(a_sound(query="paused", status={**WELL, "waiting": 5})), {"TowlinePaused"}),
    "no spark": (UP, bridge(a_sound(spark="starting again")), {"TowlineSparkDown"}),
    "no kafka": (UP, bridge(a_sound(kafka="unreachable")), {"TowlineKafkaAway"}),
    "not added up": (UP, bridge(a_sound(account=replace(SOUND, disagreements=("1, not 2",)))), {"TowlineAccountWrong"}),
    "broken": (UP, bridge(a_sound(account=replace(SOUND, broken="not kept"))), {"TowlineGuaranteeBroken"}),
    "dead letter": (UP, bridge(a_sound(account=MORE)), {"TowlineDeadLetters"}),
    "overrun": (UP, bridge(a_sound(status={**WELL, "window_overruns": 1})), {"TowlineWindowOverrun"}),
    "loop": (UP, bridge(a_sound(status={**WELL, "turned_s": 130})), {"TowlineLoopStands"}),
    "restarts": (UP, bridge(a_sound(spark_restarts=5)), {"TowlineRestarts"}),
    "sound way down": (down(), down(), set()),
    "refused": (down(), down(refused=2), {"TowlineRefused"}),
    "nothing goes down": (down(), down(queued=1), {"TowlineNothingCarried"}),
    "publisher": (PUBLISHING, HELD, {"TowlinePublisherHeldBack"}),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_and_its_alert(tmp_path: Path, name: str) -> None:
    sound, hurt, expected = FAULTS[name]
    assert firing(tmp_path, sound, {"fault": hurt})["fault"] == expected
