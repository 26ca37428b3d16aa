"""No room for what comes in and none for what goes out, at once: every number means one message all the same."""

from __future__ import annotations

from pathlib import Path

from mqtt5 import PublishPacket, QoS

from tests.unit.gateway.brokered import Broker, turn
from tests.unit.journal.support import FillingDisk
from towline.delivery.outrows import add_arrival, rows_from_messages
from towline.gateway.pump import Pump
from towline.gateway.settings import GatewaySettings
from towline.journal import Journal, Limits, Outbox
from towline.schema import OUTBOX_SCHEMA, ROW_SCHEMA
from towline.timing import Timestamp

LIMITS = Limits(max_bytes=64 << 10, min_free_bytes=0)


def settings_of(place: Path, broker: Broker) -> GatewaySettings:
    given = {"name": "g", "state_dir": place, "brokers": broker.url, "linger_ms": 0}
    return GatewaySettings.model_validate(given | {"subscriptions": [{"pattern": "#", "qos": 2}], "outbox": {}})


def message(number: int, size: int = 6000) -> PublishPacket:
    return PublishPacket("t", bytes([number]) * size, qos=QoS.EXACTLY_ONCE, packet_id=number + 1)


def test_a_session_made_anew_while_rows_wait(tmp_path: Path, broker: Broker) -> None:
    """The new one goes on after those rows, and knows their packet ids."""
    disk = FillingDisk()
    inbox = Journal.open(tmp_path / "inbox", schema=ROW_SCHEMA, limits=LIMITS)
    outbox = Outbox.open(tmp_path / "outbox", schema=OUTBOX_SCHEMA, limits=Limits(min_free_bytes=0), disk=disk)
    inbox.commit("spark", 0)
    pump = Pump(settings_of(tmp_path, broker), inbox, outbox=outbox)
    broker.accept(pump, session_present=False)
    last = -1
    while not pump._uplink.is_full:
        last += 1
        broker.say(pump, message(last))
    assert 0 < inbox.end <= last
    outbox.append_batch(add_arrival(rows_from_messages([{"topic": "out", "payload": b"", "qos": 2}]), Timestamp(0)))
    disk.full = True
    turn(pump)  # what is to be sent can't be recorded
    assert not pump._driver.connected
    disk.full = False
    inbox.commit("spark", inbox.end)
    pump._uplink.retry_at = 0.0
    turn(pump)
    assert inbox.end == last + 1
    broker.accept(pump, session_present=True)
    broker.say(pump, message(last), message(last + 1))  # the first again: its PUBREC never left
    rows = [row for batch in inbox.read(inbox.first_offset, inbox.end) for row in batch.to_pylist()]
    assert [row["offset"] for row in rows] == list(range(inbox.first_offset, last + 2))
    assert [row["payload"][0] for row in rows] == list(range(inbox.first_offset, last + 2))
    pump.stop()
    pump.run()
    outbox.close()
    inbox.close()
