"""Nothing that doctor makes reaches a line, and nothing is taken from one, running or stopped [I16]."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.conftest import NewMosquitto
from tests.helpers import present, wait_until
from tests.integration.conftest import KEEPING
from tests.integration.doctor.brokers import examined, wrong
from tests.unit.doctor.bridges import UP, bridge_of
from tests.unit.doctor.recorded import HOLDS, UNKNOWN
from towline import Client, files
from towline.bridge.config.model import Uplink
from towline.doctor.inputs import PROBE_PREFIX
from towline.net.settings import ClientSettings
from towline_prove.devstack import Mosquitto

pytestmark = pytest.mark.broker

#: What a broker queues for a client by default, and how much of it is taken when doctor comes.
LIMIT, BEFORE, DURING = 1000, 890, 100


def gateway(line: Uplink, uri: str, settings: ClientSettings | None = None) -> Client:
    """In place of the line's own gateway: its client id and filters, and nothing acknowledged unless it is told."""
    told = line.gateway
    return Client(
        uri, client_id=told.mqtt_client_id, subscribe=told.subscriptions, settings=settings or ClientSettings()
    )


def published(uri: str, numbers: Sequence[int], user: str | None = None, pause_s: float = 0.0) -> None:
    settings, sent = ClientSettings(username=user, session_expiry_s=0), []
    with Client(uri, client_id="device", settings=settings) as device:
        for number in numbers:
            sent.append(device.publish("plant/d7/state", str(number)))
            time.sleep(pause_s)
        for one in sent:
            one.result(30)


def received(client: Client, count: int) -> list[tuple[str, bytes]]:
    """What comes to a client until this many have come, and whatever comes in the next moment; repeats once."""
    came: dict[tuple[str, bytes], None] = {}
    while (message := client.receive(30 if len(came) < count else 0.3)) is not None:
        message.ack()
        came[message.topic, message.payload or b""] = None
    return list(came)


@pytest.mark.parametrize("pattern", ["#", "+/#", "+/+/+"])
def test_a_running_and_a_stopped_line_get_all_that_is_theirs_and_nothing_else(
    new_mosquitto: NewMosquitto, tmp_path: Path, pattern: str
) -> None:
    """Each has a queue at the broker that the probes would fill, if they came to it: what comes then would be lost."""
    broker = new_mosquitto(**{**KEEPING, "max_queued_messages": str(LIMIT)})
    stopped = UP.replace("telemetry/#", pattern)
    running = stopped.replace('name = "telemetry"', 'name = "running"')
    bridge = bridge_of(tmp_path, broker.uri, stopped + running)
    away, there = bridge.uplinks
    with gateway(away, broker.uri):
        pass
    with gateway(there, broker.uri) as online:
        published(broker.uri, range(BEFORE))
        with ThreadPoolExecutor(1) as pool:
            asking = pool.submit(examined, bridge, broker, rate=None, probes=1500)
            published(broker.uri, range(BEFORE, BEFORE + DURING), pause_s=0.04)  # as long as the probes take
        expected = [("plant/d7/state", str(number).encode()) for number in range(BEFORE + DURING)]
        assert received(online, len(expected)) == expected
        assert (online.online, online.last_error, online.sessions_lost) == (True, None, 0)
    with gateway(away, broker.uri) as back:
        assert received(back, len(expected)) == expected
        assert back.sessions_lost == 0
    told = {one.code: one for one in asking.result()}
    assert told["TL-D11"].verdict is HOLDS
    assert told["TL-D11"].evidence.split()[-3].startswith(f"${PROBE_PREFIX}" if pattern != "+/+/+" else PROBE_PREFIX)


@pytest.mark.parametrize("is_online", [False, True])
@pytest.mark.parametrize("readable", [False, True])
def test_a_broker_that_gives_all_clients_of_a_user_one_session(
    new_mosquitto: NewMosquitto, tmp_path: Path, is_online: bool, readable: bool
) -> None:
    """A probe would be in the line's place: it ends no session, acknowledges nothing, and asks no more."""
    broker = new_mosquitto(**KEEPING, use_username_as_clientid="true")
    files.replace(secret := tmp_path / "secret", "any", sync=False)
    bridge = bridge_of(
        tmp_path, broker.uri, UP.replace("telemetry/#", "#"), f'username = "line"\npassword_file = "{secret}"'
    )
    [line] = bridge.uplinks
    own = ClientSettings(username="line", password="any", receive_maximum=5)
    with gateway(line, broker.uri, own) as client:
        if not is_online:
            client.close()
        published(broker.uri, range(100), "device")
        connections = broker.log.read_text().count(" as line ")
        found = examined(bridge, broker if readable else None, rate=1.0)
        probed = broker.log.read_text().count(" as line ") - connections
        published(broker.uri, range(100, 200), "device")
        if is_online:
            wait_until(lambda: client.online)
    with gateway(line, broker.uri, own) as back:
        came = received(back, 200)
        assert back.connack is not None
        assert back.connack.session_present
    assert came == [("plant/d7/state", str(number).encode()) for number in range(200)]
    assert {("TL-D03", UNKNOWN), ("TL-D05", UNKNOWN), ("TL-D11", UNKNOWN), ("TL-D12", UNKNOWN)} <= wrong(found)
    assert all("use_username_as_clientid" in one.evidence for one in found if one.verdict is UNKNOWN)
    assert probed <= (0 if readable else 2 if is_online else 1)  # of a running line, it and the line that comes back


def doctor(directory: Path, *options: str) -> subprocess.Popen[str]:
    """The command."""
    command = [sys.executable, "-m", "towline", "doctor", "bridge.toml", *options]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=directory, stdout=pipe, stderr=pipe, text=True)


def leftover(broker: Mosquitto) -> str:
    """A topic under which a message of the doctor's is retained; by then no session is there but that of who asks."""
    clean = ClientSettings(session_expiry_s=0)
    with Client(broker.uri, client_id="finds", subscribe=[f"{PROBE_PREFIX}/#"], settings=clean) as client:
        client.publish(f"{PROBE_PREFIX}/last", b"")  # what is retained comes before
        first = present(client.receive(30))
    total = b""
    with Client(broker.uri, client_id="asks", subscribe=["$SYS/broker/clients/total"], settings=clean) as client:

        def only_we() -> bool:
            nonlocal total
            message = client.receive(1)
            total = total if message is None else message.payload or b""
            return total == b"1"

        wait_until(only_we, what="one client only")
    return "" if first.topic == f"{PROBE_PREFIX}/last" else first.topic


def test_ctrl_c_in_the_middle_of_a_probe_leaves_nothing_behind(new_mosquitto: NewMosquitto, tmp_path: Path) -> None:
    broker = new_mosquitto(sys_interval="1", max_queued_messages="20")
    bridge_of(tmp_path, broker.uri)
    process = doctor(tmp_path, "--rate", "10", "--probe-messages", "100000")
    wait_until(lambda: f"are being dropped for client {PROBE_PREFIX}-" in broker.log.read_text(encoding="utf-8"))
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert leftover(broker) == ""
