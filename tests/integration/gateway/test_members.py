"""Several gateways of one line on a real broker: nothing lost, nothing doubled, order as each way promises it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.helpers import ServiceManager, wait_until
from tests.integration.conftest import NewMembers, towline_command
from towline import Client
from towline.gateway.identity import read_client_sessions
from towline.gateway.launch import find_running
from towline_prove.devstack import Mosquitto

ROUTE = '[[uplink.route]]\nfrom = "t/{site}/{device}/#"\ntopic = "t"\n'
TWO = '[[uplink.member]]\nname = "g1"\n[[uplink.member]]\nname = "g2"\n'


def status_of(directory: Path) -> str:
    return towline_command("status", directory / "bridge.toml").stdout


def test_the_command_drains_in_place_of_what_runs(
    mosquitto: Mosquitto, new_members: NewMembers, tmp_path: Path
) -> None:
    members = new_members(mosquitto, f'share = "subscription"\n{ROUTE}{TWO}')
    command = [sys.executable, "-m", "towline", "gateway", str(tmp_path / "bridge.toml"), "--idle", "1", "--member"]

    def run(*more: str, **variables: str) -> subprocess.Popen[str]:
        environ = {**os.environ, **variables}
        return subprocess.Popen(
            [*command, *more], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environ
        )

    first = members["g1"]
    first.connect()
    with Client(mosquitto.uri, client_id="device") as client:
        for n in range(10):
            client.publish(f"t/a/d{n}", b"%d" % n, qos=1).result(30)
    first.until(end=10)
    before = first.process

    with run("g1", "--drain") as draining:
        assert before.wait(30) == 0, "the one that ran is ended"
        first._client = wait_until(lambda: find_running(first.settings.state_dir), what="the gateway that is drained")
        first.until(drain="waiting for commits")
        assert "drain: waiting for commits" in status_of(tmp_path)
        draining.send_signal(signal.SIGINT)
        out, _ = draining.communicate(timeout=30)
    assert draining.returncode == 1, out
    assert "TL-G58" in out.splitlines()[-1]

    with run("g1", "--drain") as draining:
        first._client = wait_until(lambda: find_running(first.settings.state_dir), what="the gateway that is drained")
        first.commit()
        out, _ = draining.communicate(timeout=30)
    assert draining.returncode == 0, out
    assert out.splitlines()[-2:] == [
        "line-g1 is drained: all is committed, and its session at the broker is ended",
        'Remove it from a query over several gateways: removed_gateways = ["line-g1"].',
    ]
    with ServiceManager() as manager, run("g2", "--drain", **manager.environ) as alone:  # none runs, and none ever has
        out, _ = alone.communicate(timeout=60)
        assert manager.received.splitlines() == [f"STATUS=connected to {mosquitto.uri}", "READY=1", "STOPPING=1"]
    assert alone.returncode == 0, out
    assert find_running(members["g2"].settings.state_dir) is None
    status = status_of(tmp_path)
    assert "member    g1   none answers on this machine" in status
    assert "TL-M51" not in status


def test_a_member_taken_out_of_the_file_leaves_a_session_that_is_named_and_ended(
    mosquitto: Mosquitto, new_members: NewMembers, tmp_path: Path
) -> None:
    members = new_members(mosquitto, f'share = "subscription"\n{ROUTE}{TWO}')
    for one in members.values():
        one.connect()
        one.stop()
    shared = f'share = "subscription"\n{ROUTE}[[uplink.member]]\nname = "g1"\n'
    new_members(mosquitto, shared)
    assert f'the session "b-line-g2" at {mosquitto.uri} was not ended' in status_of(tmp_path)

    given_up = new_members(mosquitto, f'mqtt = {{ abandon_session = "b-line-g2" }}\n{shared}')
    given_up["g1"].start()
    its_own = members["g2"].settings.state_dir
    wait_until(
        lambda: [one.how for one in read_client_sessions(its_own)] == ["discarded"], what="the end of its session"
    )
    assert "was not ended" not in status_of(tmp_path)
