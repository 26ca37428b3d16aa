"""A line whose inbox is in Kafka: the bridge reads it with Spark's own source, exactly once, whatever is killed.

Kafka is one that lets nobody in without TLS and SCRAM: gateway, standby, Spark's source and the look-ups all log in.
"""

from __future__ import annotations

import json
import os
import signal
import socket
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from paho.mqtt import client as paho
from paho.mqtt.enums import CallbackAPIVersion

from tests.conftest import NewMosquitto
from tests.engines.forked import ForkedGateway
from tests.helpers import wait_until
from tests.integration.bridge.running import PATIENCE, Running, in_kafka, publish
from towline.bridge.config.file import load
from towline.bridge.runtime.status import render
from towline.checkpoint import Checkpoint
from towline.gateway.endpoint import GatewayEndpoint
from towline.gateway.settings import GatewaySettings
from towline.landing import lookup
from towline.landing.followers import committed_of
from towline.landing.place import LandingPlace
from towline_prove.devstack import Mosquitto
from towline_prove.devstack.secured import SecuredKafka

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]


def _on_another_machine(bridge: Running) -> GatewaySettings:
    """The line's gateway as the same file gives it there."""
    settings = load(bridge.file).uplinks[0].gateway
    return settings.model_copy(update={"state_dir": bridge.directory / "elsewhere", "owner_pid": os.getpid()})


def alternate(broker: Mosquitto, first: int, count: int) -> None:
    """Publish so many messages of QoS 0 and of QoS 1 in turns, so that each batch of two and more has both."""
    device = paho.Client(CallbackAPIVersion.VERSION2, protocol=paho.MQTTv5)
    device.connect("127.0.0.1", broker.port)
    device.loop_start()
    sent = [device.publish(f"b/{qos}", f"m{n}", qos=qos) for n in range(first, first + count) for qos in (0, 1)]
    for each in sent:
        each.wait_for_publish(PATIENCE)
    device.disconnect()
    device.loop_stop()


def at_rest(line: dict[str, Any]) -> bool:
    """Whether no QoS 2 handshake is open at its gateway: a kill then has the broker repeat nothing [MQTT-4.4.0-1]."""
    gateway = line["gateway"] or {"unacknowledged": -1}
    return not gateway["unacknowledged"] and not gateway["qos2_held"]


def seen_elsewhere(bridge: Running, who: str) -> dict[str, Any]:
    """What ``towline status`` tells of the line once it has heard of its owner, whose word may be late."""
    owner = {"who": who, "epoch": 3, "lives": True, "online": True}

    def told() -> dict[str, Any] | None:
        line: dict[str, Any] = bridge.status_command()["lines"]["line"]
        return line if (line["gateway"] or {}).get("owner") == owner else None

    return wait_until(told, PATIENCE, f"{who}, online")


def offsets_of_last_batch(checkpoint: Checkpoint) -> int:
    """Kafka's offsets, of rows and of what ends their transactions."""
    batch = checkpoint.last_commit_batch() or 0
    ends = [sum(partitions.values()) for n in (batch - 1, batch) for partitions in checkpoint.offsets(n)[0].values()]
    return int(ends[1] - ends[0])


def forget_the_last_batch(state: Path) -> Path:
    """Leave the line "both" as if all was killed before its last batch was done, or heard of: the batch's commit."""
    checkpoint = state / "both" / "checkpoint"
    newest = checkpoint / "commits" / str(Checkpoint(f"file:{checkpoint}").last_commit_batch())
    newest.unlink()
    file = state / "bridge.json"
    known = json.loads(file.read_text())
    known["lines"]["both"]["counts"] = {}
    file.write_text(json.dumps(known))
    return newest


@pytest.fixture
def secured(tmp_path: Path) -> Iterator[SecuredKafka]:
    with SecuredKafka(tmp_path / "kafka") as kafka:
        yield kafka


@pytest.fixture
def bridge(tmp_path: Path) -> Running:
    return Running(tmp_path, tmp_path / "bridge.toml")


def test_exactly_once_whatever_is_killed(
    bridge: Running, new_mosquitto: NewMosquitto, secured: SecuredKafka, tmp_path: Path
) -> None:
    broker, name = new_mosquitto(max_queued_messages="0"), "kept"
    said = ", ".join(f'"{name}" = "{value}"' for name, value in secured.settings_of().items())
    bridge.file.write_text(f"""
name = "tests"
state_dir = "state"
mqtt = {{ brokers = "mqtt://127.0.0.1:{broker.port}" }}
spark = {{ master = "local[2]" }}
[kafka]
bootstrap_servers = "{secured.bootstrap}"
password_file = "{secured.password_file}"
settings = {{ {said} }}
create_topics = {{ partitions = 1, replication_factor = 1 }}
[[uplink]]
name = "line"
guarantee = "exactly_once"
inbox = "kafka"
[[uplink.route]]
from = "t/{{device}}/#"
topic = "{name}"
key = "{{device}}"
where = "length(payload) > 1"
headers = {{ said = "{{mqtt.user.text}}" }}
[[uplink]]
name = "both"
guarantee = "by_qos"
inbox = "kafka"
route = [{{ from = "b/{{qos}}", topic = "both", key = "{{qos}}" }}]
""")
    bridge.start()
    try:
        wait_until(lambda: bridge.status()["lines"]["line"]["gateway_running"], PATIENCE, "the gateway")
        publish(broker, 0, 200, qos=2, user="text")
        publish(broker, 0, 7, qos=2, text="x")
        wait_until(lambda: (a := bridge.account())["received"] == 207 and not a["waiting"], PATIENCE, "the first batch")
        account = wait_until(lambda: (a := bridge.line()["account"])["filtered"] == 7 and a, PATIENCE, "the counts")
        assert (account["received"], account["in_kafka"], account["adds_up"]) == (207, 200, True)
        place = LandingPlace(secured.client, "tests.line")
        wait_until(lambda: lookup.bounds(place)[0] > 0, 30, "what is committed to be removed")
        assert lookup.row_at(place, committed_of(place, "bridge") or 0) == 207

        both, checkpoint = 0, Checkpoint(f"file:{tmp_path / 'state' / 'both' / 'checkpoint'}")
        while not both or offsets_of_last_batch(checkpoint) < 4:  # from four on there are two rows among them
            alternate(broker, both, 20)
            both += 20
            wait_until(
                lambda: (a := bridge.account("both"))["received"] == 2 * both and not a["waiting"],  # noqa: B023 - asked now
                PATIENCE,
                "both kinds",
            )

        endpoint = GatewayEndpoint.read(bridge.state_dir)
        assert endpoint is not None
        os.kill(endpoint.pid, signal.SIGKILL)
        publish(broker, 200, 200, qos=2)
        wait_until(lambda: bridge.account()["received"] >= 407, PATIENCE, "the gateway again")
        wait_until(lambda: at_rest(bridge.line()), PATIENCE, "the end of the handshakes")
        children = psutil.Process(bridge.process.pid).children(recursive=True)
        bridge.process.kill()
        bridge.process.wait()
        psutil.wait_procs(children, timeout=60)
        publish(broker, 400, 200, qos=2)
        forgotten = forget_the_last_batch(tmp_path / "state")
        elsewhere = ForkedGateway(_on_another_machine(bridge), bridge.directory / "elsewhere.log")
        with elsewhere:
            assert elsewhere.fork().until(607)
            who = f"the gateway with pid {elsewhere.pid} on {socket.gethostname()}"
            alone = seen_elsewhere(bridge, who)
            assert (alone["account"]["received"], alone["gateway"]["end"]) == (607, 607)
            bridge.start()
            wait_until(forgotten.exists, PATIENCE, "the batch that was begun")
            wait_until(lambda: (a := bridge.account())["received"] >= 607 and not a["waiting"], PATIENCE, "all of it")
            line = seen_elsewhere(bridge, who)
            assert line["account"]["adds_up"], line["sentence"]
            assert (line["account"]["in_kafka"], line["account"]["deduplicated"]) == (600, 0)
            wait_until(lambda: bridge.account("both")["skipped"], PATIENCE, "Spark's word of the batch")
            account = bridge.account("both")
            assert account["adds_up"], account
            assert account["skipped"] == 2 * both - account["in_kafka"]
            shown = f"owner     {who}   epoch 3   online"
            wait_until(lambda: shown in (text := render(bridge.status())) and "no gateway" not in text, PATIENCE, shown)
            assert bridge.interrupt() == 0
            assert f"{who} has its inbox in Kafka" in bridge.out
    finally:
        if bridge.process.poll() is None:
            bridge.interrupt()
    assert "does not add up" not in bridge.out
    records = in_kafka(secured.inside, name)
    assert [value for _, value, _ in records] == [f"m{n}".encode() for n in range(600)]
    arrived = Counter((key, value) for key, value, _ in in_kafka(secured.inside, "both"))
    assert {one for one, times in arrived.items() if times == 1} >= {(b"0", b"m%d" % n) for n in range(both)}
    assert set(arrived) == {(qos, b"m%d" % n) for qos in (b"0", b"1") for n in range(both)}
    assert max(arrived.values()) == 2, "nothing was served again: this proves too little"
    assert (records[3][0], records[3][2]["said"], records[3][2]["mqtt.topic"]) == (b"d", b"m3", b"t/d/x")
    assert "Traceback" not in bridge.out
    written = [file for file in (tmp_path / "state").rglob("*") if file.is_file()] + [tmp_path / "elsewhere.log"]
    secret = secured.password_file.read_bytes()
    assert not [file for file in written if secret in file.read_bytes()]
    assert secret.decode() not in bridge.out
