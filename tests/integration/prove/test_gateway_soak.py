"""The quick soak of the gateway alone: killed under QoS 2, its journal holds each message once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.helpers import lacking
from towline.errors import SetupError
from towline_prove.devstack.mosquitto import find_mosquitto
from towline_prove.gateway_soak import GatewaySoak, GatewaySoakPlan

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800), pytest.mark.broker, pytest.mark.faults]


@pytest.mark.parametrize("plan", [GatewaySoakPlan.quick(), GatewaySoakPlan()])
def test_a_gateway_killed_again_and_again_holds_each_qos_2_message_once(
    plan: GatewaySoakPlan, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    try:
        find_mosquitto()
    except SetupError as error:
        lacking(str(error))
    kills: list[str] = []
    verdict = GatewaySoak(plan, tmp_path, kills.append).run()
    for name, value in {**asdict(plan), **verdict.counts()}.items():
        record_property(name, value)
    assert len(kills) == plan.kills
    assert verdict.ok("exactly_once"), [verdict.line(), *map(str, verdict.stories)]
    assert verdict.adds_up()
    assert (verdict.delivered, verdict.copies) == (plan.messages, plan.messages)
