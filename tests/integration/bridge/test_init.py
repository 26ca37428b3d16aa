"""A bridge file made from the configuration of a Mosquitto that runs: its lines get the messages of either side."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.conftest import NewMosquitto
from towline import Client, ClientSettings
from towline.bridge.config.file import load
from towline_prove.subject import GatewayRun

PASSWORD = "a word & a half"  # noqa: S105 - of a broker of this test


def towline(*arguments: str | Path) -> str:
    command = [sys.executable, "-m", "towline", *map(str, arguments)]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, stdin=subprocess.DEVNULL)
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_the_file_of_a_mosquitto_that_runs_becomes_a_bridge_that_runs(
    new_mosquitto: NewMosquitto, tmp_path: Path
) -> None:
    passwords = tmp_path / "passwords"
    made = ["mosquitto_passwd", "-b", "-c", str(passwords), "plant", PASSWORD]
    subprocess.run(made, check=True, capture_output=True, timeout=30)
    remote = new_mosquitto(password_file=str(passwords))
    included = tmp_path / "conf.d"
    included.mkdir()
    (included / "cloud.conf").write_text(f"""\
connection cloud
address 127.0.0.1:{remote.port}
remote_username plant
remote_password {PASSWORD}
remote_clientid mosquitto-of-the-plant
topic sensors/# in 1
topic telemetry/# out 1
""")
    local = new_mosquitto(include_dir=str(included))
    secret = tmp_path / "bridge.cloud-in.password"
    file = tmp_path / "bridge.toml"
    said = towline("init", file, "--from", local.directory / "mosquitto.conf", "--name", "plant-7")
    assert f"wrote {file} and {secret}, mode 0600" in said
    assert 'Not imported of connection "cloud": remote_clientid (' in said
    assert PASSWORD not in said + file.read_text()
    assert "Nothing was contacted" in towline("check", file)
    lines = {line.name: line.gateway for line in load(file).uplinks}
    with (
        GatewayRun(lines["cloud-in"]).start() as came,
        GatewayRun(lines["cloud-out"]).start() as out,
        Client(
            remote.uri, client_id="far", settings=ClientSettings(username="plant", password=PASSWORD.encode())
        ) as far,
        Client(local.uri, client_id="near") as near,
    ):
        came.wait_online()
        out.wait_online()
        far.publish("sensors/d1", b"1", qos=1).wait(60)
        near.publish("telemetry/d1", b"2", qos=1).wait(60)
        assert came.wait_journaled(1)
        assert out.wait_journaled(1)
