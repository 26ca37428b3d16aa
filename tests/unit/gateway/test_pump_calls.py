"""Calls of other threads on the pump's thread."""

from __future__ import annotations

from pathlib import Path

from tests.unit.gateway.brokered import Broker, turn
from towline.gateway.pump import Pump
from towline.gateway.settings import GatewaySettings
from towline.journal import Journal, Limits
from towline.schema import ROW_SCHEMA


def test_a_call_of_another_thread_is_answered_in_the_next_turn(tmp_path: Path, broker: Broker) -> None:
    given = {"name": "g", "state_dir": tmp_path, "brokers": broker.url, "subscriptions": [{"pattern": "a", "qos": 1}]}
    with Journal.open(tmp_path / "inbox", schema=ROW_SCHEMA, limits=Limits(min_free_bytes=0)) as inbox:
        pump = Pump(GatewaySettings.model_validate(given), inbox)
        broker.accept(pump, session_present=False)
        answer, wrong = pump.submit(lambda: 7), pump.submit(lambda: int("seven"))
        assert not answer.done()
        turn(pump)
        assert answer.result(0) == 7
        assert isinstance(wrong.exception(0), ValueError)
        late = pump.submit(lambda: 8)
        pump.stop()
        pump.run()
        assert late.cancelled()
