"""RabbitMQ 3.10 with its MQTT plugin: it speaks MQTT 3.1.1 only, and takes QoS 2 as QoS 1."""

from __future__ import annotations

import signal
from pathlib import Path

from tests.engines.erlang import RabbitMQ
from tests.helpers import wait_until
from tests.integration.conftest import NewGateway, payloads
from tests.integration.doctor.brokers import examined, wrong
from tests.unit.doctor.bridges import UP, bridge_of
from towline import ClientSettings
from towline.delivery.outrows import rows_from_messages
from towline.doctor.table import Verdict
from towline.net.client import Client


def test_auto_finds_out_that_it_speaks_3_1_1_and_a_session_outlives_a_kill(
    rabbitmq: RabbitMQ, new_gateway: NewGateway
) -> None:
    """It ends the connection at a CONNECT of version 5, without a word."""
    gateway = new_gateway(rabbitmq.uri, "up-1", subscriptions=[{"pattern": "up/#", "qos": 1}], protocol="auto")
    gateway.connect(protocol="3.1.1")
    gateway.stop(signal.SIGKILL)
    with Client(rabbitmq.uri, client_id="up-1-sender", settings=ClientSettings(protocol="auto")) as client:
        assert client.publish("up/x", b"0", qos=1).result(30).reason == 0
    gateway.start()
    gateway.until(journaled=1, sessions_lost=0)
    gateway.stop()
    assert payloads(gateway) == [0]


def test_version_5_alone_names_the_way_out(rabbitmq: RabbitMQ, new_gateway: NewGateway) -> None:
    gateway = new_gateway(rabbitmq.uri, "up-5")
    gateway.start()
    error = wait_until(lambda: gateway.status()["last_error"], what="an error")
    assert error["code"] == "TL-M03"
    assert "in place of CONNACK (MQTT 5)" in error["text"]
    assert 'protocol = "auto"' in error["text"]


def test_exactly_once_uplink_is_refused(rabbitmq: RabbitMQ, new_gateway: NewGateway) -> None:
    subscriptions = [{"pattern": "up/#", "qos": 2}]
    line = new_gateway(
        rabbitmq.uri, "up-2", subscriptions=subscriptions, guarantee="exactly_once", protocol="3.1.1"
    ).fail()
    assert "grants" in line
    assert "TL-M11" in line


def test_exactly_once_downlink_stands_still_at_the_first_message(rabbitmq: RabbitMQ, new_gateway: NewGateway) -> None:
    """It answers QoS 2 with PUBACK."""
    name = "down-2"
    gateway = new_gateway(rabbitmq.uri, name, subscriptions=[], outbox={}, guarantee="exactly_once", protocol="3.1.1")
    client = gateway.start()
    client.send("q/0", 0, rows_from_messages([{"topic": "d/2", "payload": b"%d" % n, "qos": 2} for n in range(50)]))
    status = wait_until(lambda: (s := gateway.status())["last_error"] and s, what="the refusal")
    assert status["last_error"]["code"] == "TL-M44"
    outbox = status["outbox"]
    assert (outbox["delivered"], outbox["degraded"]) == (1, 1)
    assert outbox["queued"] + outbox["in_flight"] == 49
    assert "exactly once" in outbox["held_back"]


def test_a_downlink_of_qos_1_loses_nothing_when_the_gateway_is_killed(
    rabbitmq: RabbitMQ, new_gateway: NewGateway
) -> None:
    """It keeps no session without subscriptions: nothing of that is told as a loss."""
    ear = new_gateway(rabbitmq.uri, "ear-1", subscriptions=[{"pattern": "down/#", "qos": 1}], protocol="3.1.1")
    ear.connect()
    gateway = new_gateway(rabbitmq.uri, "down-1", subscriptions=[], outbox={}, protocol="3.1.1")
    client = gateway.start()
    rows = rows_from_messages([{"topic": "down/x", "payload": b"%d" % n, "qos": 1} for n in range(500)])
    client.send("q/0", 0, rows)
    wait_until(lambda: ear.status()["journaled"] >= 50, what="some of them")
    gateway.stop(signal.SIGKILL)
    client = gateway.start()
    stored = client.send("q/0", 0, rows)
    assert client.wait_delivered(stored.end, timeout_s=60)
    wait_until(lambda: set(ear.seen()) == set(range(500)), what="all of them")
    assert gateway.status()["sessions_lost"] == 0


def test_a_shared_subscription_is_refused_on_the_way_down(rabbitmq: RabbitMQ, new_gateway: NewGateway) -> None:
    """To 3.1.1 it is a filter as any other: it is granted, and nothing would ever arrive."""
    gateway = new_gateway(
        rabbitmq.uri, "shared", subscriptions=[{"pattern": "$share/g/up/#", "qos": 1}], protocol="auto"
    )
    gateway.start()
    error = wait_until(lambda: gateway.status()["last_error"], what="an error")
    assert "MQTT 3.1.1 can't be used: a shared subscription" in error["text"]


def test_a_drain_takes_in_what_is_queued_and_ends_the_session(rabbitmq: RabbitMQ, new_gateway: NewGateway) -> None:
    """MQTT 3.1.1 and a window of 10: what was queued still comes after UNSUBSCRIBE, and CleanSession 1 ends it."""
    gateway = new_gateway(rabbitmq.uri, "out-1", subscriptions=[{"pattern": "out/#", "qos": 1}], protocol="3.1.1")
    gateway.connect()
    gateway.stop()
    with Client(rabbitmq.uri, client_id="out-1-sender", settings=ClientSettings(protocol="3.1.1")) as client:
        for receipt in [client.publish("out/x", b"%d" % n, qos=1) for n in range(200)]:
            receipt.result(30)
    gateway.start(2.0)
    gateway.until(journaled=200)
    assert gateway.seen() == [*range(200)]
    gateway.commit()
    assert gateway.process.wait(30) == 0


def test_the_doctor_finds_that_it_speaks_no_version_5_and_knows_no_qos_2(rabbitmq: RabbitMQ, tmp_path: Path) -> None:
    """QoS 2 is answered with PUBACK, and a subscription with QoS 2 is granted 1."""
    [row] = [one for one in examined(bridge_of(tmp_path / "5", rabbitmq.uri)) if one.verdict is Verdict.BROKEN]
    assert row.code == "TL-D02"
    twice = UP.replace("at_least_once", "exactly_once")
    found = examined(bridge_of(tmp_path / "2", rabbitmq.uri, twice, 'protocol = "auto"'))
    assert wrong(found) == {("TL-D09", Verdict.BROKEN)}
    assert {one.promise for one in found if one.code == "TL-D09"} == {"QoS 2", "granted QoS"}
