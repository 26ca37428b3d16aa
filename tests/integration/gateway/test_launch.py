"""How a gateway's process is found, started, replaced and ended, and what is told when it can't be."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers import gateway_settings, present, wait_until
from tests.integration.bridge.terminal import PROMPT, Terminal, sessions
from tests.unit.cli.test_main import ran
from tests.unit.gateway.serving import Served, mark
from towline.errors import ConfigError, GatewayUnreachable, JournalLocked, TowlineError
from towline.gateway import launch
from towline.gateway.client import Lease
from towline.gateway.endpoint import ENDPOINT_FILE, ERROR_FILE, LOG_FILE, GatewayEndpoint
from towline.gateway.launch import ensure_running, find_running, stop_running
from towline.gateway.settings import GatewaySettings
from towline.processes import ProcessIdentity
from towline.spark import link
from towline.spark.link import GatewayAddress
from towline_prove.devstack import Mosquitto

#: What a gateway that is out of order does in place of it, and what is told of that.
_FAULTS = {
    "import json, sys\n"
    "from pathlib import Path\n"
    "error = {'type': 'BrokerRefused', 'code': 'TL-M05', 'where': 'mqtt://b', 'what': 'no', 'do': 'Ask.'}\n"
    f"(Path(json.load(sys.stdin)['state_dir']) / {ERROR_FILE!r}).write_text(json.dumps(error))\n"
    "sys.exit(3)\n": r"mqtt://b: no\. Ask\.   \[TL-M05\]",
    "raise SystemExit(9)\n": r"the gateway ended with code 9 before it listened\. See .*/gateway\.log\.   \[TL-G02\]",
    "import time\ntime.sleep(5)\n": r"has been starting for 2 s\. See .*/gateway\.log.*TL-G02",
}


def settings(state_dir: Path, subscribe: str = "a/#", **more: object) -> GatewaySettings:
    """A gateway whose broker is away."""
    subscriptions = [{"pattern": subscribe}]
    return gateway_settings(
        name="plant", state_dir=state_dir, brokers="127.0.0.1:9", subscriptions=subscriptions, **more
    )


@pytest.fixture
def state_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A state directory; the gateway that serves it ends with the test, and those of other tests don't count."""
    children: list[subprocess.Popen[bytes]] = []
    monkeypatch.setattr(launch, "_children", children)
    yield tmp_path / "state"
    for child in children:
        child.kill()
        child.wait()


def test_starters_at_the_same_moment_get_one_gateway_that_is_no_part_of_this_process(
    state_dir: Path, tmp_path: Path
) -> None:
    """It says where it logs to, and nobody else reads its files; started again it goes on with its journal."""
    with ThreadPoolExecutor(4) as pool:
        clients = [*pool.map(lambda _: ensure_running(settings(state_dir), owner_pid=os.getpid()), range(4))]
    endpoint = present(GatewayEndpoint.read(state_dir))
    assert [client.status()["pid"] for client in clients] == [endpoint.pid] * 4
    assert len(launch._children) == 1
    assert endpoint.owner_pid == os.getpid()
    assert os.getsid(endpoint.pid) == endpoint.pid
    assert stat.S_IMODE(state_dir.stat().st_mode) == 0o700
    assert stat.S_IMODE((state_dir / LOG_FILE).stat().st_mode) == 0o600
    assert '"serving"' in (state_dir / LOG_FILE).read_text()
    for client in clients:
        client.close()
    os.kill(endpoint.pid, signal.SIGKILL)
    wait_until(endpoint.process.has_ended)
    with ensure_running(settings(state_dir), owner_pid=os.getpid(), log=tmp_path / "else.log") as client:
        assert (client.status()["journal"], client.status()["epoch"]) == (endpoint.journal, 2)
    assert '"serving"' in (tmp_path / "else.log").read_text()


@pytest.mark.parametrize("program", _FAULTS)
def test_a_gateway_that_does_not_start_is_told_with_its_error_or_its_log(
    state_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    state_dir.mkdir()
    (state_dir / ERROR_FILE).write_text('{"type": "BrokerRefused", "code": "TL-OLD"}')
    (tmp_path / "gateway.py").write_text(program)
    (tmp_path / "launcher").write_text(f'#!/bin/sh\nprintf x >&0\nexec "{sys.executable}" "{tmp_path}/gateway.py"\n')
    (tmp_path / "launcher").chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "launcher"))
    monkeypatch.setattr(launch, "START_TIMEOUT_S", 2.0)
    with pytest.raises(TowlineError, match=_FAULTS[program]):
        ensure_running(settings(state_dir), owner_pid=os.getpid())


@pytest.mark.parametrize("ends", [True, False])
def test_a_journal_that_stays_locked_is_told(state_dir: Path, monkeypatch: pytest.MonkeyPatch, ends: bool) -> None:
    """One that is just ending, and has withdrawn its endpoint, is waited for."""
    locking, start_error = Served(state_dir), launch._start_error
    (state_dir / ENDPOINT_FILE).unlink()

    def refused(*of: Any) -> TowlineError:
        if ends:
            locking.close()
        else:
            monkeypatch.setattr(launch, "time", SimpleNamespace(monotonic=lambda: float("inf")))
        return start_error(*of)

    monkeypatch.setattr(launch, "_start_error", refused)
    if ends:
        ensure_running(settings(state_dir), owner_pid=os.getpid()).close()
        return
    with pytest.raises(JournalLocked, match=f"pid {os.getpid()}"):
        ensure_running(settings(state_dir), owner_pid=os.getpid())
    locking.close()


def test_an_idle_gateway_of_ours_is_replaced_when_settings_change_and_one_in_use_is_not(state_dir: Path) -> None:
    me, lease = os.getpid(), Lease("default")
    with ensure_running(settings(state_dir), owner_pid=me) as client:
        first = client.status()
        with pytest.raises(ConfigError, match=r"runs here with other settings.*TL-C27"):
            ensure_running(settings(state_dir, "b/#"), owner_pid=1)
        client.acquire(lease)
        with pytest.raises(ConfigError, match=r"runs here with other settings.*TL-C27"):
            ensure_running(settings(state_dir, "b/#"), owner_pid=me)
        client.release(lease)
    with ensure_running(settings(state_dir, "b/#"), owner_pid=me) as client:
        second = client.status()
    assert (first["journal"], first["epoch"] + 1) == (second["journal"], second["epoch"])
    with ensure_running(settings(state_dir, "b/#"), owner_pid=me, replace=True) as client:
        assert client.status()["epoch"] == second["epoch"] + 1
        with pytest.raises(ConfigError, match=r"runs here with other settings.*TL-C27"):
            ensure_running(settings(state_dir), owner_pid=1, replace=True)
        assert client.status()["epoch"] == second["epoch"] + 1


def test_a_gateway_that_hangs_is_killed_when_it_is_replaced(state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_END_TIMEOUT_S", 0.5)
    with ensure_running(settings(state_dir), owner_pid=os.getpid()) as client:
        first = client.status()
    os.kill(first["pid"], signal.SIGSTOP)
    with ensure_running(settings(state_dir), owner_pid=os.getpid(), replace=True) as client:
        second = client.status()
    assert (first["journal"], first["epoch"] + 1) == (second["journal"], second["epoch"])


def test_a_directory_that_cannot_be_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError) as caught:
        ensure_running(settings(tmp_path / "file" / "state"), owner_pid=4711)
    assert str(caught.value) == (
        f"{tmp_path}/file/state: the state directory can't be used (Not a directory). Give a directory on a local disk "
        "that this user may write.   [TL-C25]"
    )


# -- outside of a bridge ---------------------------------------------------------------------------------------------


def test_the_edges_session(mosquitto: Mosquitto, tmp_path: Path) -> None:
    """The session of docs/publishers.md, typed in a person's terminal: a gateway alone, with a broker and no Kafka."""
    (session,) = sessions((Path(__file__).parents[3] / "docs" / "publishers.md").read_text())
    with Terminal(tmp_path, {}) as shell:
        shell.perform(session, 60.0, {"mqtt://broker.example:1883": mosquitto.address})
        shell.wait_for(PROMPT, 60.0)
        assert "received 1,000 = in Kafka 0 + waiting 1,000   adds up ✓" in shell.said


def refusal_to_stop(state_dir: Path, capsys: pytest.CaptureFixture[str]) -> str:
    code, _, told = ran(capsys, "gateway", "--stop", str(state_dir))
    assert code == 2
    return told


def place_of(state_dir: Path, owner: ProcessIdentity) -> GatewayAddress:
    return GatewayAddress(str(state_dir), settings(state_dir).model_dump_json(), owner=owner)


def test_tasks_that_find_their_gateway_gone_start_one_that_ends_with_the_driver(
    state_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Several at a time start one; and a command does not end what a query would start again."""
    with subprocess.Popen(["sleep", "60"]) as driver:
        place = place_of(state_dir, mark(driver.pid))
        with ThreadPoolExecutor(2) as pool:
            for task in [pool.submit(lambda: list(place.rows("journal", 0, 1))) for _ in range(2)]:
                with pytest.raises(TowlineError, match="TL-G04"):  # it answers, and has another journal
                    task.result(60)
        endpoint = present(GatewayEndpoint.read(state_dir))
        assert endpoint.owner_pid == driver.pid
        way_out = f"its gateway can't be ended like this: it ends with process {driver.pid}. End the query"
        assert way_out in refusal_to_stop(state_dir, capsys)
        replace(endpoint, host="elsewhere", owner_pid=None).write(state_dir)
        assert "it runs on elsewhere" in refusal_to_stop(state_dir, capsys)
        assert not endpoint.process.has_ended()
        driver.kill()
    wait_until(endpoint.process.has_ended, what="the end of the gateway")


def test_a_task_on_another_machine_than_the_driver_starts_none(
    state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "GATEWAY_TIMEOUT_S", 0.2)
    place = place_of(state_dir, replace(mark(), host="the driver's machine"))
    with pytest.raises(GatewayUnreachable, match=r"other machines need one on the network.*TL-G01"):
        list(place.rows("journal", 0, 1))
    assert not state_dir.exists()


def test_a_detached_gateway_outlives_whoever_started_it_and_is_ended_by_a_command(
    state_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with subprocess.Popen(["true"]) as over:
        over.wait()
    ensure_running(settings(state_dir, detached=True), owner_pid=over.pid).close()
    endpoint = present(GatewayEndpoint.read(state_dir))
    with present(find_running(state_dir)) as client:
        lease = Lease("default")
        client.acquire(lease)
        assert f"process {os.getpid()} reads from it. End the query" in refusal_to_stop(state_dir, capsys)
        client.release(lease)
    assert ran(capsys, "gateway", "--stop", str(state_dir)) == (
        0,
        "plant has ended; its session stays at the broker, and its received messages on disk\n",
        "",
    )
    assert endpoint.process.has_ended()
    nobody = "no gateway runs in this directory. Is it the right stateDir?   [TL-G63]"
    assert nobody in refusal_to_stop(state_dir, capsys)


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_drain_ends_the_gateway_of_this_machine_and_no_other_process(tmp_path: Path, elsewhere: bool) -> None:
    """A state directory that came from another machine, or container, tells of a pid there."""
    with subprocess.Popen(["sleep", "60"]) as other:
        there = mark(other.pid)
        host = f"{there.host}-before" if elsewhere else there.host
        GatewayEndpoint("grpc+unix:///none", there.pid, there.started, host, "plant", "j", "now").write(tmp_path)
        try:
            stop_running(tmp_path)
            assert (other.poll() is None) is elsewhere
        finally:
            other.kill()


# -- the process -----------------------------------------------------------------------------------------------------

PROGRAM = """
import signal, sys
from towline.gateway import process
def fail(*_, **__):
    raise RuntimeError("can't start new thread")
{}
sys.exit(process.main())
"""


def begun(state_dir: Path, log: Path, first: str = "") -> subprocess.Popen[bytes]:
    with log.open("ab") as file:
        command = [sys.executable, "-c", PROGRAM.format(first)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=file)
    assert process.stdin is not None
    process.stdin.write(settings(state_dir).model_dump_json().encode())
    process.stdin.close()
    return process


@pytest.mark.parametrize("broken", ["process.GatewayService = fail", "process.Pump._turn = fail"])
def test_what_nobody_foresaw_ends_it_with_a_word(state_dir: Path, tmp_path: Path, broken: str) -> None:
    """A service that does not come up used to leave a gateway that receives and that nobody can reach."""
    log = tmp_path / "gateway-telemetry.log"
    assert begun(state_dir, log, broken).wait(30) == 1
    error = json.loads((state_dir / ERROR_FILE).read_text())
    assert error["code"] == "TL-G09"
    assert error["what"] == "the gateway failed in an unexpected way (RuntimeError: can't start new thread)"
    assert str(log) in error["do"]
    assert "Traceback" in log.read_text()
    assert all(json.loads(line) for line in log.read_text().splitlines())  # the traceback too is in one line


def test_signals_that_are_ignored_stay_so_and_a_reader_that_waits_handles_its_own(
    state_dir: Path, tmp_path: Path
) -> None:
    """``nohup``, and the background jobs of a script; gRPC would hold a reader's main thread for a minute."""
    process = begun(state_dir, tmp_path / "log", "signal.signal(signal.SIGINT, signal.SIG_IGN)")
    client = wait_until(lambda: find_running(state_dir), what="the gateway")
    program = (
        "import signal, sys\n"
        "from towline.gateway.client import GatewayClient, Lease\n"
        "def leave(*_):\n    print('left', flush=True); raise SystemExit(7)\n"
        "signal.signal(signal.SIGTERM, leave)\n"
        "client = GatewayClient(sys.argv[1])\n"
        "client.wait(Lease('default'), 0, journal=sys.argv[2], timeout_s=60)\n"
    )
    command = [sys.executable, "-c", program, client.location, client.status()["journal"]]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as reader:
        wait_until(lambda: client.status()["readers"], what="a waiting reader")
        reader.terminate()
        assert reader.communicate(timeout=10)[0] == b"left\n"
    assert reader.returncode == 7
    client.close()
    process.send_signal(signal.SIGINT)
    process.terminate()
    assert process.wait(30) == 0
