"""A gateway whose outbox is in Kafka: what it had taken, and what was on its way, its standby delivers."""

from __future__ import annotations

import json
import signal
from collections import Counter
from pathlib import Path

import pytest

from tests.conftest import NewMosquitto
from tests.engines.forked import fork_gateway
from tests.helpers import wait_until
from tests.integration.gateway.conftest import NewGateway
from tests.integration.gateway.test_outbox import KEEPING, Ear, drained, in_order, rows
from towline.gateway.launch import discover
from towline.schema import MESSAGE_SCHEMA
from towline_prove.devstack import Kafka


@pytest.mark.parametrize("qos", [pytest.param(1, marks=pytest.mark.long), 2])
def test_a_standby_delivers_what_the_other_had_taken(
    new_mosquitto: NewMosquitto, kafka: Kafka, new_gateway: NewGateway, tmp_path: Path, qos: int
) -> None:
    broker, ear = new_mosquitto(**KEEPING), None
    given: dict[str, object] = {
        "subscriptions": [],
        "outbox": {},
        "guarantee": "exactly_once" if qos == 2 else "at_least_once",
        "landing": {"client": kafka.client, "create": True, "name": f"sends-{qos}"},
    }
    try:
        ear = Ear(broker)
        active = new_gateway(broker, "sends", **given)
        standby = new_gateway(broker, "sends", **given, state_dir=tmp_path / "other")
        standby.log = tmp_path / "other.log"
        standby.log.touch()
        client = active.start()
        standby.process = fork_gateway(standby.settings, standby.log, start="standby")
        wait_until(lambda: '"standing by"' in standby.log.read_text(), what="the standby")
        client.send("q/0", 0, [rows(range(600), qos)], MESSAGE_SCHEMA)
        wait_until(lambda: ear.hear() > 100, what="some of the batch")
        active.stop(signal.SIGKILL)
        taken = wait_until(lambda: discover(standby.settings.state_dir), what="the standby's endpoint")
        standby._client = taken
        assert taken.send("q/0", 0, [rows(range(600), qos)], MESSAGE_SCHEMA).already
        assert drained(standby)["delivered"] == 600
        ear.until(600)
        counts = Counter(ear.numbers())
        assert set(counts) == set(range(600))
        if qos == 2:
            assert counts.total() == 600
        assert in_order(ear.messages)
        assert standby.stop() == 0
        assert not [line for line in standby.log.read_text().splitlines() if json.loads(line)["level"] == "error"]
    finally:
        if ear is not None:
            ear.close()
