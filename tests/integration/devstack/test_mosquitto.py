"""A real Mosquitto: started, killed, paused, refused."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest

from tests.conftest import NewMosquitto
from tests.helpers import lacking, wait_until
from towline.errors import SetupError
from towline_prove.devstack import Mosquitto, MosquittoTooOld
from towline_prove.devstack.mosquitto import find_mosquitto

pytestmark = pytest.mark.broker


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A self-signed certificate for 127.0.0.1, as mosquitto.conf names it."""
    if shutil.which("openssl") is None:
        lacking("openssl is missing")
    place = tmp_path_factory.mktemp("tls")
    cert, key = place / "cert.pem", place / "key.pem"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *subject]
    subprocess.run([*command, "-out", cert, "-keyout", key], check=True, capture_output=True)
    return {"certfile": str(cert), "keyfile": str(key), "cafile": str(cert)}


def answers(broker: Mosquitto) -> bool:
    return broker._answers(broker.port)


def test_it_runs_while_the_block_runs(tmp_path: Path) -> None:
    with Mosquitto(tmp_path / "broker") as broker:
        assert answers(broker)
        pid = broker.pid
        assert pid is not None
        assert not broker.paused
    assert not broker.running
    assert broker.pid is None
    assert not Path(f"/proc/{pid}").exists()


def test_kill_keeps_port_and_data(new_mosquitto: NewMosquitto) -> None:
    broker = new_mosquitto(persistence="true")
    port, pid = broker.port, broker.pid
    broker.kill()
    assert not broker.running
    assert not answers(broker)
    broker.start()
    assert broker.port == port
    assert broker.pid != pid
    assert answers(broker)


def test_persistence_survives_a_restart(new_mosquitto: NewMosquitto) -> None:
    broker = new_mosquitto(persistence="true")
    if shutil.which("mosquitto_pub") is None:
        lacking("mosquitto-clients are missing")
    there = ["-h", "127.0.0.1", "-p", str(broker.port), "-t", "kept"]
    subprocess.run(["mosquitto_pub", *there, "-q", "1", "-r", "-m", "still here"], check=True)
    broker.restart()
    got = subprocess.run(["mosquitto_sub", *there, "-C", "1", "-W", "5"], check=True, capture_output=True, text=True)
    assert got.stdout == "still here\n"
    assert (broker.directory / "mosquitto.db").exists()


def test_a_paused_broker_answers_nobody_until_it_is_resumed(mosquitto: Mosquitto) -> None:
    mosquitto.pause()
    assert mosquitto.paused
    assert mosquitto.running
    with socket.create_connection(("127.0.0.1", mosquitto.port), 2) as connection:  # the kernel still accepts
        connection.sendall(b"\x10\x10\x00\x04MQTT\x05\x02\x00\x0a\x00\x00\x03abc")
        connection.settimeout(0.2)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        mosquitto.resume()
        connection.settimeout(5)
        assert connection.recv(1) == b"\x20"
    pid = mosquitto.pid
    mosquitto.pause()
    assert mosquitto.start().pid == pid, "a start resumes it, too"
    assert answers(mosquitto)
    mosquitto.pause()
    mosquitto.stop()
    assert not mosquitto.running


def test_two_starts_at_once_make_one_broker(tmp_path: Path) -> None:
    brokers = [Mosquitto(tmp_path / "broker") for _ in range(4)]
    threads = [threading.Thread(target=broker.start) for broker in brokers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    try:
        assert len({broker.pid for broker in brokers}) == 1
        assert len({broker.port for broker in brokers}) == 1
    finally:
        brokers[0].stop()


def test_another_object_finds_the_running_broker(mosquitto: Mosquitto) -> None:
    other = Mosquitto(mosquitto.directory)
    assert other.pid == mosquitto.pid
    assert other.uri == mosquitto.uri
    other.kill()
    assert mosquitto.pid is None
    other.start()
    assert answers(mosquitto)
    mosquitto.stop()
    assert other.pid is None


def test_a_broker_that_died_by_itself_is_seen(mosquitto: Mosquitto) -> None:
    assert mosquitto.pid
    os.kill(mosquitto.pid, signal.SIGKILL)
    wait_until(lambda: not mosquitto.running, what="the end")
    assert answers(mosquitto.start())


@pytest.mark.parametrize("verb", ["kill", "pause", "resume"])
def test_a_stopped_broker_can_not_be_killed_or_paused(tmp_path: Path, verb: str) -> None:
    broker = Mosquitto(tmp_path)
    with pytest.raises(SetupError, match=r"does not run\. Start it first.*TL-S17"):
        getattr(broker, verb)()


def test_stopping_what_does_not_run_is_nothing(tmp_path: Path) -> None:
    Mosquitto(tmp_path / "never").stop()
    assert not (tmp_path / "never").exists()


def test_a_recycled_pid_is_not_killed(tmp_path: Path) -> None:
    """The state file names a pid that now belongs to another: to this very test, say."""
    broker = Mosquitto(tmp_path)
    with broker:
        state = json.loads(broker._state_file.read_text())
    state["process"] = {"pid": os.getpid(), "started": 1, "host": "here"}
    broker._state_file.write_text(json.dumps(state))
    assert not broker.running
    broker.stop()
    with broker:
        assert answers(broker)


def test_a_broken_state_file_is_one_line(tmp_path: Path) -> None:
    broker = Mosquitto(tmp_path)
    broker._state_file.write_text("{")
    with pytest.raises(SetupError, match=r"is not a state file of ours.*TL-S18"):
        broker.start()


def test_a_taken_port_that_was_asked_for_is_an_error(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        broker = Mosquitto(tmp_path, port=taken.getsockname()[1])
        with pytest.raises(SetupError, match=r"the port for mosquitto is taken.*TL-S13"):
            broker.start()
    assert not broker.running
    with broker:
        assert answers(broker)


def test_a_picked_port_that_was_taken_meanwhile_is_exchanged(tmp_path: Path) -> None:
    broker = Mosquitto(tmp_path)
    picked = broker.port
    with socket.create_server(("127.0.0.1", picked)), broker:
        assert broker.port != picked
        assert answers(broker)


def test_a_port_that_has_been_told_is_not_exchanged(tmp_path: Path) -> None:
    """Clients know it: better an error than a broker that nobody finds."""
    broker = Mosquitto(tmp_path)
    with broker:
        port = broker.port
    with socket.create_server(("127.0.0.1", port)), pytest.raises(SetupError, match="TL-S13"):
        broker.start()
    with broker:
        assert broker.port == port


def test_a_setting_it_does_not_know(tmp_path: Path) -> None:
    broker = Mosquitto(tmp_path, settings={"max_queued_mesages": "1"})
    with pytest.raises(SetupError, match=r"ended at once: .*max_queued_mesages.*TL-S12") as caught:
        broker.start()
    assert "\n" not in str(caught.value)
    assert not broker.running


def test_a_directory_that_can_not_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SetupError, match=r"Not a directory.*TL-S18"):
        Mosquitto(tmp_path / "file" / "broker").start()


def test_tls_that_asks_for_a_certificate_of_ours(new_mosquitto: NewMosquitto, certificate: dict[str, str]) -> None:
    assert new_mosquitto(**certificate, require_certificate="true").running


def test_passwords(new_mosquitto: NewMosquitto, tmp_path: Path) -> None:
    if shutil.which("mosquitto_passwd") is None:
        lacking("mosquitto_passwd is missing")
    passwords = tmp_path / "passwords"
    subprocess.run(["mosquitto_passwd", "-c", "-b", passwords, "ann", "secret"], check=True, capture_output=True)
    broker = new_mosquitto(password_file=str(passwords))
    there = ["-h", "127.0.0.1", "-p", str(broker.port), "-t", "t", "-m", "m"]
    accepted = subprocess.run(["mosquitto_pub", *there, "-u", "ann", "-P", "secret"], check=False)
    unknown = subprocess.run(["mosquitto_pub", *there], check=False, capture_output=True)
    assert accepted.returncode == 0
    assert unknown.returncode != 0


def test_an_old_mosquitto_runs_with_a_warning(tmp_path: Path) -> None:
    sound = find_mosquitto().binary
    old = tmp_path / "old"
    old.write_text(f'#!/bin/sh\n[ "$1" = -h ] && echo "mosquitto version 2.0.11" && exit 3\nexec {sound} "$@"\n')
    old.chmod(0o755)
    broker = Mosquitto(tmp_path / "broker", binary=old)
    with pytest.warns(MosquittoTooOld, match="loses QoS 2 messages by itself"):
        broker.start()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        broker.restart()
    assert broker.running
    broker.stop()


def test_it_outlives_the_program_that_started_it(tmp_path: Path) -> None:
    code = "import sys; from towline_prove.devstack import Mosquitto; print(Mosquitto(sys.argv[1]).start().pid)"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    broker = Mosquitto(tmp_path)
    try:
        assert done.stderr == ""
        assert broker.pid == int(done.stdout)
        assert answers(broker)
    finally:
        broker.stop()


def test_its_files_are_for_us_alone(mosquitto: Mosquitto) -> None:
    assert mosquitto.directory.stat().st_mode & 0o777 == 0o700
    assert (mosquitto.directory / "mosquitto.conf").stat().st_mode & 0o777 == 0o600


def test_only_loopback_is_listened_on(mosquitto: Mosquitto) -> None:
    listeners = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    port = f"{mosquitto.port:04X}"
    assert {row[1] for row in listeners if row[3] == "0A" and row[1].endswith(port)} == {f"0100007F:{port}"}
