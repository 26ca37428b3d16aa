"""The quick soak: one kill -9 of each role under load, and an account that adds up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.helpers import lacking
from towline.errors import SetupError
from towline.spark.java import find_java
from towline_prove.devstack.kafka import kafka_jars
from towline_prove.devstack.mosquitto import find_mosquitto
from towline_prove.processes import Role
from towline_prove.soak import Soak, SoakPlan

pytestmark = [pytest.mark.broker, pytest.mark.kafka, pytest.mark.spark, pytest.mark.faults]


#: `make test` kills gateway and bridge in `tests/integration/bridge/test_bridge.py`, driver and JVM in
#: `test_delivery_semantics.py` beside it, and Kafka there too; here a referee counts.
@pytest.mark.long
def test_a_kill_of_each_role_loses_nothing(tmp_path: Path) -> None:
    try:
        find_java(), kafka_jars(), find_mosquitto()
    except SetupError as error:
        lacking(str(error))
    roles = (Role.JVM, Role.GATEWAY, Role.DRIVER, Role.BRIDGE, Role.WORKER, Role.KAFKA)
    plan = replace(SoakPlan.quick(), roles=roles)
    outcomes = Soak(plan, tmp_path, print).run()
    assert [outcome.role for outcome in outcomes] == list(plan.roles)
    bad = [outcome.line() for outcome in outcomes if not outcome.ok]
    assert not bad, "\n".join(bad)
    assert all(outcome.account.verdict.delivered == plan.messages for outcome in outcomes)
