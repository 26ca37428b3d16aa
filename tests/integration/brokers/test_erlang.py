"""RabbitMQ 3.10 (MQTT 3.1.1 only, QoS 2 taken as QoS 1) and ejabberd 23.01 (MQTT 5, a window of 1, sessions in memory).

What a broker refuses that offers less is in unit/mqtt; that these two do is what the doctor finds.
"""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.engines.erlang import Ejabberd, OnErlang, RabbitMQ
from tests.helpers import wait_until
from tests.integration.conftest import Gateway, NewGateway, payloads
from tests.integration.doctor.brokers import examined, wrong
from tests.unit.doctor.bridges import UP, bridge_of
from towline import ClientSettings, files
from towline.delivery.outrows import rows_from_messages
from towline.doctor.table import Verdict
from towline.net.client import Client

pytestmark = pytest.mark.long

#: Who may log in with "guest", and the version that is found out.
USERS = {"rabbitmq": "guest", "ejabberd": "guest@localhost"}
VERSIONS = {"rabbitmq": "3.1.1", "ejabberd": "5"}
each_broker = pytest.mark.parametrize(
    ("broker", "qos"), [("rabbitmq", 1), ("ejabberd", 1), ("ejabberd", 2)], indirect=["broker"]
)


@pytest.fixture
def broker(request: pytest.FixtureRequest) -> OnErlang:
    """The one that is named."""
    named: OnErlang = request.getfixturevalue(request.param)
    return named


def at(broker: OnErlang, new_gateway: NewGateway, name: str, **settings: Any) -> Gateway:
    files.replace(secret := broker.directory / "guest", "guest", sync=False)
    login = {"username": USERS[broker.name], "password_file": secret}
    return new_gateway(broker.uri, name, **{"protocol": "auto", **login, **settings})


def publish(broker: OnErlang, numbers: range, topic: str, qos: int) -> None:
    settings = ClientSettings(username=USERS[broker.name], password="guest", protocol="auto")
    with Client(broker.uri, client_id="device", settings=settings) as client:
        for receipt in [client.publish(topic, b"%d" % n, qos=qos) for n in numbers]:
            receipt.result(30)


@each_broker
def test_an_uplink_session_outlives_a_kill_of_the_gateway(broker: OnErlang, new_gateway: NewGateway, qos: int) -> None:
    """RabbitMQ ends the connection at a CONNECT of version 5, without a word."""
    filters = [{"pattern": f"up{qos}/#", "qos": qos}]
    gateway = at(broker, new_gateway, f"up-{qos}", qos=qos, subscriptions=filters)
    gateway.connect(protocol=VERSIONS[broker.name])
    publish(broker, range(40), f"up{qos}/x", qos)
    gateway.until(journaled=40)
    gateway.stop(signal.SIGKILL)
    publish(broker, range(40, 80), f"up{qos}/x", qos)
    gateway.start()
    gateway.until(journaled=80, sessions_lost=0)
    gateway.stop()
    assert payloads(gateway) == list(range(80))


def seen_by(ear: Gateway, count: int) -> list[int]:
    wait_until(lambda: len(set(ear.seen())) >= count, what=f"{count} messages")
    return ear.seen()


@each_broker
def test_a_downlink_loses_nothing_when_the_gateway_is_killed(
    broker: OnErlang, new_gateway: NewGateway, qos: int
) -> None:
    """RabbitMQ keeps no session without subscriptions: nothing of that is told as a loss."""
    ear = at(broker, new_gateway, f"ear-{qos}", subscriptions=[{"pattern": f"down{qos}/#", "qos": qos}]).connect()
    gateway = at(broker, new_gateway, f"down-{qos}", qos=qos, subscriptions=[], outbox={})
    client = gateway.connect().client
    rows = rows_from_messages([{"topic": f"down{qos}/x", "payload": b"%d" % n, "qos": qos} for n in range(500)])
    client.send("q/0", 0, rows)
    seen_by(ear, 50)
    gateway.stop(signal.SIGKILL)
    client = gateway.start()
    stored = client.send("q/0", 0, rows)
    assert stored.already
    assert client.wait_delivered(stored.end, timeout_s=60)
    numbers = seen_by(ear, 500)
    assert set(numbers) == set(range(500))
    assert qos == 1 or len(numbers) == 500
    status = gateway.status()
    assert (status["outbox"]["delivered"], status["sessions_lost"]) == (500, 0)


def test_exactly_once_downlink_stands_still_at_the_first_message(rabbitmq: RabbitMQ, new_gateway: NewGateway) -> None:
    """It answers QoS 2 with PUBACK."""
    client = (gateway := at(rabbitmq, new_gateway, "down-2", qos=2, subscriptions=[], outbox={})).start()
    client.send("q/0", 0, rows_from_messages([{"topic": "d/2", "payload": b"%d" % n, "qos": 2} for n in range(50)]))
    status = wait_until(lambda: (s := gateway.status())["last_error"] and s, what="the refusal")
    assert status["last_error"]["code"] == "TL-M44"
    outbox = status["outbox"]
    assert (outbox["delivered"], outbox["degraded"]) == (1, 1)
    assert outbox["queued"] + outbox["in_flight"] == 49
    assert "exactly once" in outbox["held_back"]


def test_a_drain_takes_in_what_is_queued_and_ends_the_session(rabbitmq: RabbitMQ, new_gateway: NewGateway) -> None:
    """MQTT 3.1.1 and a window of 10: what was queued still comes after UNSUBSCRIBE, and CleanSession 1 ends it."""
    filters = [{"pattern": "out/#", "qos": 1}]
    gateway = at(rabbitmq, new_gateway, "out-1", subscriptions=filters, protocol="3.1.1").connect()
    gateway.stop()
    publish(rabbitmq, range(200), "out/x", 1)
    gateway.start(2.0)
    gateway.until(journaled=200)
    assert gateway.seen() == [*range(200)]
    gateway.commit()
    assert gateway.process.wait(30) == 0


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


def test_the_doctor_finds_what_ejabberd_lacks(ejabberd: Ejabberd, tmp_path: Path) -> None:
    """No shared subscriptions, and sessions of 5 minutes."""
    files.replace(secret := tmp_path / "guest", "guest", sync=False)
    mqtt = f'username = "{USERS["ejabberd"]}"\npassword_file = "{secret}"'
    shared = UP.replace("telemetry/#", "$share/plant/doctor/#")
    found = examined(bridge_of(tmp_path, ejabberd.uri, shared, mqtt), rate=20)
    assert wrong(found) == {("TL-D04", Verdict.WARNS), ("TL-D10", Verdict.BROKEN)}
    told = {one.code: one.evidence for one in found}
    assert "no shared subscriptions" in told["TL-D10"]
    assert "Session Expiry Interval 300 s" in told["TL-D04"]


def test_the_doctor_finds_that_rabbitmq_speaks_no_version_5_and_knows_no_qos_2(
    rabbitmq: RabbitMQ, tmp_path: Path
) -> None:
    """QoS 2 is answered with PUBACK, and a subscription with QoS 2 is granted 1."""
    [row] = [one for one in examined(bridge_of(tmp_path / "5", rabbitmq.uri)) if one.verdict is Verdict.BROKEN]
    assert row.code == "TL-D02"
    twice = UP.replace("at_least_once", "exactly_once")
    found = examined(bridge_of(tmp_path / "2", rabbitmq.uri, twice, 'protocol = "auto"'))
    assert wrong(found) == {("TL-D09", Verdict.BROKEN)}
    assert {one.promise for one in found if one.code == "TL-D09"} == {"QoS 2", "granted QoS"}
