"""Faults planted in real brokers: each is found by the row that is about it, and a sound broker by none."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.conftest import NewMosquitto
from tests.helpers import lacking, wait_until
from tests.integration.doctor.brokers import (
    DOWN,
    KEEPING,
    UP,
    UP_2,
    Planted,
    bridge_of,
    examined,
    lets_more_in,
    wrong,
)
from towline import Client, ClientSettings
from towline.doctor.broker.probes import PREFIX
from towline.doctor.findings import Finding, Standing, exit_code
from towline.errors import SetupError
from towline_prove.devstack import Mosquitto, MosquittoTooOld
from towline_prove.devstack.certificates import certificates
from towline_prove.devstack.mosquitto import find_mosquitto
from towline_prove.devstack.ports import LOOPBACK

pytestmark = pytest.mark.broker

BROKEN, WARNS, UNKNOWN = Standing.BROKEN, Standing.WARNS, Standing.UNKNOWN
AT_ONCE = ClientSettings(session_expiry_s=0)
OWN = f"topic readwrite {PREFIX}/#\n"

#: Two members with filters of their own.
MEMBERS = UP.replace(
    "[[uplink.route]]",
    '[[uplink.member]]\nname = "a"\nfilters = ["telemetry/a/#"]\n'
    '[[uplink.member]]\nname = "b"\nfilters = ["telemetry/b/#"]\n[[uplink.route]]',
)

PLANTED = {
    "default-queue": Planted(
        "TL-D05",
        {"max_queued_messages": "1000", "persistence": "false"},
        WARNS,
        "1,000 messages, 5 s at 200 msg/s",
        conf=False,
        probes=1100,
    ),
    "queue-in-the-file": Planted("TL-D05", {"max_queued_messages": "5000"}, WARNS, "5,000 messages, 25 s"),
    "queue-of-unknown-load": Planted("TL-D05", {"max_queued_messages": "1000"}, WARNS, "1,000 messages", rate=None),
    "queue-in-bytes": Planted("TL-D06", {"max_queued_bytes": "512000"}, WARNS, "10 s at 51.2 kB/s"),
    "expiry-of-the-broker": Planted("TL-D04", {"persistent_client_expiration": "2h"}, WARNS, "away for 2 h"),
    "expiry-of-the-line": Planted("TL-D04", {}, WARNS, "away for 90 s", mqtt="session_expiry_s = 90"),
    "no-persistence": Planted("TL-D07", {"persistence": "false"}, BROKEN, "persistence is false"),
    "rare-saving": Planted(
        "TL-D08",
        {"autosave_on_changes": "false", "autosave_interval": "1800"},
        WARNS,
        "30 min of messages: 360,000 messages at 200 msg/s",
    ),
    "no-qos-2": Planted("TL-D09", {"max_qos": "1"}, BROKEN, "Maximum QoS 1", DOWN.replace("at_least", "exactly")),
    "silent-rule": Planted("TL-D10", {"acl_file": OWN}, BROKEN, "grants the subscription"),
    "silent-rule-for-a-part": Planted("TL-D10", {"acl_file": f"{OWN}topic read telemetry/a/#\n"}, WARNS, "only a part"),
    "no-right-to-write": Planted("TL-D10", {"acl_file": OWN}, BROKEN, 'write "command/all"', DOWN),
    "silent-rule-for-a-member": Planted(
        "TL-D10", {"acl_file": f"{OWN}topic read telemetry/a/#\n"}, BROKEN, '"telemetry/b/#"', MEMBERS
    ),
    "probes-forbidden": Planted("TL-D11", {"acl_file": "topic read telemetry/#\n"}, UNKNOWN, "could not be looked at"),
    "window-of-3.1.1": Planted(
        "TL-D15",
        {"max_inflight_messages": "5", "max_queued_messages": "1000"},
        BROKEN,
        "20 messages in flight together",
        DOWN,
        'protocol = "3.1.1"',
    ),
    "silent-size-limit": Planted("TL-D17", {"message_size_limit": "1000"}, BROKEN, "acknowledged and dropped"),
    "small-packets": Planted("TL-D17", {"max_packet_size": "9000"}, WARNS, "more than 9,000 bytes", DOWN),
    "nothing-retained": Planted(
        "TL-D18", {"retain_available": "false"}, BROKEN, "Retain Available 0", DOWN + "retain = true\n"
    ),
    "tls-port": Planted("TL-D02", {"certfile": ""}, BROKEN, "Write mqtts://127.0.0.1:"),
    "wrong-password": Planted("TL-D02", {"password_file": ""}, BROKEN, "not authorized"),
    "nobody-there": Planted("TL-D02", {"port": "nobody"}, BROKEN, "TL-M01"),
    "two-that-share-nothing": Planted(
        "TL-D22", {"port": "two"}, BROKEN, "is not known at", mqtt="brokers_share_sessions = true"
    ),
    "broken-window": Planted("TL-D12", {"port": "more"}, BROKEN, "20 came unacknowledged", UP_2),
}

SOUND = {
    "at-least-once": Planted("", lines=UP),
    "exactly-once": Planted("", lines=UP_2),
    "both-ways": Planted("", lines=UP + DOWN + "retain = true\n"),
    "without-the-file": Planted("", lines=UP + DOWN, conf=False),
    "nothing-comes": Planted("", lines=UP, rate=None),
    "a-limit-far-away": Planted("", {"max_queued_messages": "1000000"}),
    "rules-that-let-it-through": Planted("", {"acl_file": f"{OWN}topic read #\n"}),
    "older-protocol": Planted("", {"max_inflight_messages": "20"}, lines=UP + DOWN, mqtt='protocol = "auto"'),
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Finding]]:
    """What is found at each of them; they mostly wait, so all at once."""
    try:
        find_mosquitto()
    except SetupError as error:
        lacking(str(error))
    root = tmp_path_factory.mktemp("planted")
    cases = PLANTED | SOUND
    with warnings.catch_warnings(), ThreadPoolExecutor(max_workers=6) as threads:
        warnings.simplefilter("ignore", MosquittoTooOld)
        asked = {name: threads.submit(_answer, root / name, case) for name, case in cases.items()}
        return {name: one.result() for name, one in asked.items()}


def _answer(directory: Path, case: Planted) -> list[Finding]:
    directory.mkdir()
    with contextlib.ExitStack() as running:
        settings = KEEPING | dict(case.settings)
        where = settings.pop("port", "")
        for name in ("acl_file", "password_file"):
            if name in settings:
                (directory / name).write_text(settings[name], encoding="utf-8")
                settings[name] = str(directory / name)
        if "certfile" in settings:
            made = certificates(directory / "tls")
            settings |= {"certfile": str(made.server), "keyfile": str(made.server_key)}
        broker = running.enter_context(Mosquitto(directory / "mosquitto", settings=settings))
        uris = broker.uri.replace("mqtts:", "mqtt:")
        if where == "nobody":
            broker.stop()
        elif where == "two":
            other = running.enter_context(Mosquitto(directory / "other", settings=settings))
            uris = f"{uris},{other.uri}"
        elif where == "more":
            port = running.enter_context(lets_more_in(broker.port, 10, 20))
            uris = f"mqtt://{LOOPBACK}:{port}"
        bridge = bridge_of(directory, uris, case.lines, case.mqtt)
        return examined(bridge, broker if case.conf else None, rate=case.rate, probes=case.probes)


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found_by_its_row_and_by_no_other(answers: dict[str, list[Finding]], name: str) -> None:
    case, found = PLANTED[name], answers[name]
    assert {*wrong(found)} == {(case.code, case.verdict)}
    row = next(one for one in found if (one.code, one.verdict) == (case.code, case.verdict))
    assert case.told in f"{row.until} | {row.because} | {row.mend}"


@pytest.mark.parametrize("name", SOUND)
def test_nothing_is_found_at_a_sound_broker(answers: dict[str, list[Finding]], name: str) -> None:
    found = answers[name]
    assert wrong(found) == []
    assert exit_code(found) == 0
    assert {"TL-D02", "TL-D03", "TL-D07"} <= {one.code for one in found}


SHARED = UP.replace("telemetry/#", "$share/plant/telemetry/#")


def test_a_running_line_loses_nothing_and_its_load_is_measured(new_mosquitto: NewMosquitto, tmp_path: Path) -> None:
    """The doctor has client ids and a group of its own; and it sees that a publisher sends with QoS 0."""
    broker = new_mosquitto(**KEEPING)
    bridge = bridge_of(tmp_path, broker.uri, SHARED)
    ended = threading.Event()
    sent: list[bytes] = []

    def publish() -> None:
        with Client(broker.uri, client_id="device") as device:
            while not ended.wait(0.01):
                device.publish("telemetry/d", b"unsure", qos=0)
                sent.append(str(len(sent)).encode())
                device.publish("telemetry/d", sent[-1], qos=1)

    [subscription] = bridge.uplinks[0].gateway.subscriptions
    line = Client(broker.uri, client_id=bridge.uplinks[0].gateway.mqtt_client_id, subscribe=[subscription])
    publisher = threading.Thread(target=publish)
    with line:
        publisher.start()
        wait_until(lambda: sent)
        try:
            found = examined(bridge, broker, rate=None, seconds=2)
        finally:
            ended.set()
            publisher.join()
        came: list[bytes] = []
        while len(came) < len(sent):
            message = line.receive(30)
            assert message is not None, f"{len(came)} of {len(sent)} came"
            message.ack()
            came += [message.payload or b""] if message.qos else []
        assert came == sent
        assert (line.sessions_lost, line.last_error) == (0, None)
    assert {*wrong(found)} == {("TL-D24", WARNS)}
    [row] = [one for one in found if one.code == "TL-D10"]
    assert row.verdict is Standing.HOLDS
    assert "came" in row.because


def doctor(directory: Path, *options: str) -> subprocess.Popen[str]:
    """The command."""
    command = [sys.executable, "-m", "towline.cli", "doctor", "bridge.toml", *options]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=directory, stdout=pipe, stderr=pipe, text=True)


def leftover(broker: Mosquitto) -> str:
    """A topic under which a message of the doctor's is retained; by then no session is there but that of who asks."""
    with Client(broker.uri, client_id="finds", subscribe=[f"{PREFIX}/#"], settings=AT_ONCE) as client:
        client.publish(f"{PREFIX}/last", b"")  # what is retained comes before
        first = client.receive(30)
        assert first is not None
    total = b""
    with Client(broker.uri, client_id="asks", subscribe=["$SYS/broker/clients/total"], settings=AT_ONCE) as client:

        def only_we() -> bool:
            nonlocal total
            message = client.receive(1)
            total = total if message is None else message.payload or b""
            return total == b"1"

        wait_until(only_we, what="one client only")
    return "" if first.topic == f"{PREFIX}/last" else first.topic


def test_the_command_leaves_nothing_behind(new_mosquitto: NewMosquitto, tmp_path: Path) -> None:
    broker = new_mosquitto(sys_interval="1", persistence="true")
    bridge_of(tmp_path, broker.uri, UP + DOWN + "retain = true\n")
    process = doctor(tmp_path, "--json", "--seconds", "0.5", "--probe-messages", "50")
    out, _ = process.communicate(timeout=120)
    answer = json.loads(out)
    codes = {one["code"] for one in answer["findings"]}
    assert {"TL-D02", "TL-D03", "TL-D05", "TL-D18"} <= codes
    assert process.returncode == answer["exit_code"]
    assert leftover(broker) == ""


def test_ctrl_c_in_the_middle_of_a_probe_leaves_nothing_behind(new_mosquitto: NewMosquitto, tmp_path: Path) -> None:
    broker = new_mosquitto(sys_interval="1", max_queued_messages="20")
    bridge_of(tmp_path, broker.uri)
    process = doctor(tmp_path, "--rate", "10", "--probe-messages", "100000")
    wait_until(lambda: "are being dropped for client towline-doctor-" in broker.log.read_text(encoding="utf-8"))
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert leftover(broker) == ""


def test_ctrl_c_while_it_listens(new_mosquitto: NewMosquitto, tmp_path: Path) -> None:
    broker = new_mosquitto(sys_interval="1")
    bridge_of(tmp_path, broker.uri)
    process = doctor(tmp_path, "--seconds", "600")
    wait_until(lambda: " as towline-doctor-" in broker.log.read_text(encoding="utf-8"))
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert leftover(broker) == ""
