"""``ack_after = "kafka"``: what is owed to the broker when a connection breaks, or the gateway, and comes again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mqtt5 import PubAckPacket, PublishPacket, PubRecPacket, QoS

from tests.helpers import read_all
from tests.unit.gateway.brokered import Broker, turn
from towline.gateway.pump import Pump
from towline.gateway.settings import GatewaySettings
from towline.journal import Journal, Limits
from towline.schema import ROW_SCHEMA


def message(qos: int, *, again: bool) -> PublishPacket:
    return PublishPacket("t", b"1", qos=QoS(qos), packet_id=7, duplicate=again)


def answered(broker: Broker) -> list[int]:
    """The packet ids that were acknowledged since the last look."""
    broker.line.setblocking(False)
    try:
        data = broker.line.recv(65536)
    except BlockingIOError:
        data = b""
    broker.line.setblocking(True)
    return [one.packet_id for one in read_all(data) if isinstance(one, PubAckPacket | PubRecPacket)]


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize(("qos", "stored"), [(1, 2), (2, 1)])
def test_what_comes_again_is_answered_when_all_before_it_is_in_kafka(
    tmp_path: Path, broker: Broker, qos: int, stored: int, restarts: bool
) -> None:
    """QoS 1 is stored again, as nothing tells it from another message; QoS 2 is not, and waits all the same."""
    given: dict[str, Any] = {"name": "g", "state_dir": tmp_path, "brokers": broker.url, "linger_ms": 0}
    given |= {"ack_after": "kafka", "subscriptions": [{"pattern": "#", "qos": 2}]}

    def opened() -> tuple[Journal, Pump, Callable[[], None]]:
        inbox = Journal.open(tmp_path / "inbox", schema=ROW_SCHEMA, limits=Limits(min_free_bytes=0))
        pump = Pump(GatewaySettings.model_validate(given), inbox)

        def close() -> None:
            pump.stop()
            pump.run()
            inbox.close()

        return inbox, pump, close

    inbox, pump, close = opened()
    broker.accept(pump, session_present=False)
    inbox.commit("spark", 0)
    broker.say(pump, message(qos, again=False))
    assert (inbox.end, answered(broker)) == (1, [])
    if restarts:
        close()
        inbox, pump, close = opened()
    else:
        broker.line.close()
        turn(pump)
    broker.accept(pump, session_present=True)
    broker.say(pump, message(qos, again=True))
    assert (inbox.end, answered(broker)) == (stored, [])
    for upto in range(1, stored + 1):
        assert answered(broker) == [], "not all of it is in Kafka"
        inbox.commit("spark", upto)
        pump.set_committed(inbox.committed)
        turn(pump)
    assert answered(broker) == [7]
    close()
