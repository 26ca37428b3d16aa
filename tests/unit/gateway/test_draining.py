"""A drain that is taken back: what a thread sees that looks on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from mqtt5 import SubAckPacket, SubAckReasonCode, UnsubAckPacket, UnsubAckReasonCode

from tests.unit.gateway.brokered import Broker, turn
from towline.gateway.pump import Pump
from towline.gateway.settings import GatewaySettings
from towline.journal import Journal, Limits
from towline.schema import ROW_SCHEMA


def where(pump: Pump) -> tuple[Any, bool]:
    """State of the session, and whether the gateway is being drained."""
    status = pump.status()
    return status["state"], status["drain"] is not None


def test_it_is_not_shown_as_taking_part_before_the_broker_says_so(
    tmp_path: Path, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is published between would not be for it."""
    given = {"name": "g", "state_dir": tmp_path, "brokers": broker.url, "linger_ms": 0}
    settings = GatewaySettings.model_validate(given | {"subscriptions": [{"filter": "#", "qos": 2}]})
    with Journal.open(tmp_path / "inbox", schema=ROW_SCHEMA, limits=Limits(min_free_bytes=0)) as inbox:
        pump = Pump(settings, inbox)
        broker.accept(pump, session_present=False)
        pump.drain(begin=True)
        turn(pump)
        broker.say(pump, UnsubAckPacket(2, [UnsubAckReasonCode.SUCCESS]))
        assert where(pump) == ("online", True)

        seen, handle, status = [], pump._driver.handle, pump._departure.drain.status

        def looked_at(event: Any) -> None:
            """Just before the session hears of it, somebody asks."""
            seen.append(where(pump))
            handle(event)

        def overtaken() -> Any:
            """While somebody asks, all of it happens."""
            monkeypatch.setattr(pump._departure.drain, "status", status)
            turn(pump)
            return status()

        monkeypatch.setattr(pump._driver, "handle", looked_at)
        monkeypatch.setattr(pump._departure.drain, "status", overtaken)
        pump.drain(begin=False)
        seen.append(where(pump))
        assert ("online", False) not in seen
        assert seen[-1] == where(pump) == ("subscribing", False)
        broker.say(pump, SubAckPacket(3, [SubAckReasonCode.GRANTED_QOS_EXACTLY_ONCE]))
        assert where(pump) == ("online", False)
        pump.stop()
        pump.run()
