"""ejabberd 23.01 with mod_mqtt: it speaks MQTT 5, has a window of 1, and keeps sessions in memory."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.engines.erlang import Ejabberd
from tests.helpers import wait_until
from tests.integration.conftest import Gateway, NewGateway, payloads
from tests.integration.doctor.brokers import examined, wrong
from tests.unit.doctor.bridges import UP, bridge_of
from towline import ClientSettings, files
from towline.delivery.outrows import rows_from_messages
from towline.doctor.table import Verdict
from towline.net.client import Client

USER = "towline@localhost"


def at(broker: Ejabberd, new_gateway: NewGateway, name: str, **settings: Any) -> Gateway:
    files.replace(secret := broker.directory / "any-password", "any", sync=False)
    return new_gateway(broker.uri, name, username=USER, password_file=secret, **settings)


def publish(broker: Ejabberd, numbers: range, topic: str, qos: int) -> None:
    with Client(broker.uri, client_id="device", settings=ClientSettings(username=USER, password="any")) as client:
        for receipt in [client.publish(topic, b"%d" % n, qos=qos) for n in numbers]:
            receipt.result(30)


@pytest.mark.parametrize("qos", [1, 2])
def test_an_uplink_session_outlives_a_kill_of_the_gateway(
    ejabberd: Ejabberd, new_gateway: NewGateway, qos: int
) -> None:
    filters = [{"pattern": f"up{qos}/#", "qos": qos}]
    gateway = at(ejabberd, new_gateway, f"up-{qos}", qos=qos, subscriptions=filters).connect(protocol="5")
    publish(ejabberd, range(40), f"up{qos}/x", qos)
    gateway.until(journaled=40)
    gateway.stop(signal.SIGKILL)
    publish(ejabberd, range(40, 80), f"up{qos}/x", qos)
    gateway.start()
    gateway.until(journaled=80, sessions_lost=0)
    gateway.stop()
    assert payloads(gateway) == list(range(80))


def seen_by(ear: Gateway, count: int) -> list[int]:
    wait_until(lambda: ear.status()["journaled"] >= count, what=f"{count} messages")
    return ear.seen()


@pytest.mark.parametrize("qos", [1, 2])
def test_a_downlink_loses_nothing_when_the_gateway_is_killed(
    ejabberd: Ejabberd, new_gateway: NewGateway, qos: int
) -> None:
    ear = at(ejabberd, new_gateway, f"ear-{qos}", subscriptions=[{"pattern": f"down{qos}/#", "qos": qos}]).connect()
    gateway = at(ejabberd, new_gateway, f"down-{qos}", qos=qos, subscriptions=[], outbox={})
    client = gateway.connect().client
    rows = rows_from_messages([{"topic": f"down{qos}/x", "payload": b"%d" % n, "qos": qos} for n in range(200)])
    client.send("q/0", 0, rows)
    seen_by(ear, 50)
    gateway.stop(signal.SIGKILL)
    client = gateway.start()
    stored = client.send("q/0", 0, rows)
    assert stored.already
    assert client.wait_delivered(stored.end, timeout_s=60)
    numbers = seen_by(ear, 200)
    assert set(numbers) == set(range(200))
    if qos == 2:
        assert len(numbers) == 200
    status = gateway.status()
    assert (status["outbox"]["delivered"], status["sessions_lost"]) == (200, 0)


def test_a_shared_subscription_it_does_not_offer_is_refused(ejabberd: Ejabberd, new_gateway: NewGateway) -> None:
    line = at(ejabberd, new_gateway, "shared", subscriptions=[{"pattern": "$share/g/up/#", "qos": 1}]).fail()
    assert "no shared subscriptions" in line
    assert "TL-M17" in line


def test_two_stand_side_by_side_and_leave_no_process(ejabberd: Ejabberd, tmp_path: Path) -> None:
    """Erlang's epmd, one for a machine, would outlive both."""
    with Ejabberd(tmp_path / "other") as other:
        assert other.running
        assert ejabberd.running
        assert other.port != ejabberd.port
    left = [process.name() for process in psutil.process_iter() if str(other.directory) in environment(process)]
    assert left == []


def environment(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return str(process.environ())
    return ""


def test_the_doctor_finds_what_it_lacks(ejabberd: Ejabberd, tmp_path: Path) -> None:
    """No shared subscriptions, and sessions of 5 minutes."""
    files.replace(secret := tmp_path / "any-password", "any", sync=False)
    mqtt = f'username = "{USER}"\npassword_file = "{secret}"'
    shared = UP.replace("telemetry/#", "$share/plant/doctor/#")
    found = examined(bridge_of(tmp_path, ejabberd.uri, shared, mqtt), rate=20)
    assert wrong(found) == {("TL-D04", Verdict.WARNS), ("TL-D10", Verdict.BROKEN)}
    told = {one.code: one.evidence for one in found}
    assert "no shared subscriptions" in told["TL-D10"]
    assert "Session Expiry Interval 300 s" in told["TL-D04"]
