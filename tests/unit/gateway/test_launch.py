from __future__ import annotations

import contextlib
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers import wait_until
from tests.unit.cli.test_main import ran
from tests.unit.gateway.serving import Served, mark, served
from towline.errors import BrokerRefused, ConfigError, GatewayError, GatewayUnreachable, JournalLocked
from towline.gateway import launch
from towline.gateway.client import GatewayClient, Lease
from towline.gateway.endpoint import ENDPOINT_FILE, ERROR_FILE, LOG_FILE, GatewayEndpoint
from towline.gateway.launch import ensure_running, find_running, stop_running
from towline.gateway.settings import GatewaySettings
from towline.processes import ProcessIdentity
from towline.spark import link
from towline.spark.gateways import PollRequest, SourceGateway
from towline.spark.link import GatewayAddress, ReadPlan

ROOT = Path(__file__).parents[3]

#: Stands in for ``python -m towline.gateway``: settings from stdin, the real service on a real journal, no broker.
_GATEWAY = """
import signal, sys, threading, time
from tests.unit.gateway.serving import Served
from towline import files
from towline.errors import TowlineError
from towline.gateway.endpoint import ERROR_FILE, error_fields
from towline.gateway.settings import GatewaySettings
import json
settings = GatewaySettings.model_validate_json(sys.stdin.buffer.read())
asked = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: asked.set())
try:
    server = Served(settings.state_dir, settings=settings)
except TowlineError as error:
    files.replace(settings.state_dir / ERROR_FILE, json.dumps(error_fields(error)))
    sys.exit(1)
print("up", flush=True)
end = time.monotonic() + 60
while not asked.wait(0.05) and time.monotonic() < end:  # the kernel may hand a signal to a thread of Arrow's
    pass
server.close()
"""


def settings(state_dir: Path, subscribe: str = "a/#") -> GatewaySettings:
    return GatewaySettings.model_validate(
        {"name": "plant", "state_dir": state_dir, "brokers": "127.0.0.1:9", "subscriptions": [{"pattern": subscribe}]}
    )


@pytest.fixture
def gateway_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Replaces what `ensure_running` starts by a program, given as Python text."""

    def use(program: str) -> None:
        script = tmp_path / "gateway.py"
        script.write_text(program)
        launcher = tmp_path / "launcher"
        launcher.write_text(f'#!/bin/sh\nprintf x >&0\nexec "{sys.executable}" "{script}"\n')
        launcher.chmod(0o700)
        monkeypatch.setattr(sys, "executable", str(launcher))
        monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'src'}")

    return use


@pytest.fixture
def state_dir(tmp_path: Path) -> Iterator[Path]:
    """A state directory; the gateway that serves it ends with the test."""
    directory = tmp_path / "state"
    yield directory
    for child in launch._children:
        child.kill()
        child.wait()
    launch._children.clear()


# -- discover --------------------------------------------------------------------------------------------------------


def test_a_running_gateway_is_found(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        client = find_running(tmp_path)
        assert client is not None
        assert client.location == server.location
        client.close()
    assert find_running(tmp_path) is None


@pytest.mark.parametrize(
    "change",
    [
        {"location": "grpc+unix:///none.sock"},
        {"journal": "another"},
        {"started": 1},  # the pid is another process's now
        {"pid": 0},
    ],
)
def test_an_endpoint_of_no_running_gateway_is_none(tmp_path: Path, change: dict[str, Any]) -> None:
    with served(tmp_path / "a") as server, subprocess.Popen(["true"]) as process:
        dead = {"pid": process.pid, "started": mark(process.pid).started} if "pid" in change else change
        process.wait()
        replace(server.service.endpoint, **dead).write(tmp_path)
        assert find_running(tmp_path) is None


# -- ensure ----------------------------------------------------------------------------------------------------------


def test_ensure_attaches_to_a_running_gateway(tmp_path: Path) -> None:
    before = list(launch._children)  # of other tests in this process
    with (
        served(tmp_path, settings=settings(tmp_path)) as server,
        ensure_running(settings(tmp_path), owner_pid=os.getpid()) as client,
    ):
        assert client.location == server.location
    assert launch._children == before


def test_ensure_starts_one_that_is_no_part_of_this_process(
    state_dir: Path, gateway_program: Callable[[str], None]
) -> None:
    gateway_program(_GATEWAY)
    with ensure_running(settings(state_dir), owner_pid=4711) as client:
        status = client.status()
    endpoint = GatewayEndpoint.read(state_dir)
    assert endpoint is not None
    assert endpoint.owner_pid == 4711
    assert status["pid"] == endpoint.pid != os.getpid()
    assert os.getsid(endpoint.pid) == endpoint.pid
    assert stat.S_IMODE(state_dir.stat().st_mode) == 0o700
    assert stat.S_IMODE((state_dir / LOG_FILE).stat().st_mode) == 0o600
    assert (state_dir / LOG_FILE).read_text() == "up\n"


def test_the_log_can_be_elsewhere(tmp_path: Path, state_dir: Path, gateway_program: Callable[[str], None]) -> None:
    gateway_program(_GATEWAY)
    ensure_running(settings(state_dir), owner_pid=4711, log=tmp_path / "else.log").close()
    assert (tmp_path / "else.log").read_text() == "up\n"


def test_starters_at_the_same_moment_get_one_gateway(state_dir: Path, gateway_program: Callable[[str], None]) -> None:
    gateway_program(_GATEWAY)
    clients: list[GatewayClient] = []

    def start() -> None:
        clients.append(ensure_running(settings(state_dir), owner_pid=4711))

    before = set(launch._children)
    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len({client.status()["pid"] for client in clients}) == 1
    assert len(clients) == 4
    assert len(set(launch._children) - before) == 1
    for client in clients:
        client.close()


def test_a_gateway_that_another_way_started_first_wins(
    state_dir: Path, gateway_program: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal is locked by a gateway that has no endpoint yet: the started one ends, the first one is used."""
    gateway_program(_GATEWAY)
    with served(state_dir, settings=settings(state_dir)) as server:
        endpoint = state_dir / ENDPOINT_FILE
        hidden = state_dir / "hidden"
        endpoint.rename(hidden)
        started = launch._spawn

        def start(*arguments: Any) -> subprocess.Popen[bytes]:
            child = started(*arguments)
            wait_until(lambda: child.poll() is not None, what="the end of the loser")
            hidden.rename(endpoint)
            return child

        monkeypatch.setattr(launch, "_spawn", start)
        with ensure_running(settings(state_dir), owner_pid=4711) as client:
            assert client.location == server.location


def test_a_gateway_that_is_just_ending_is_waited_for(
    state_dir: Path, gateway_program: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its endpoint is withdrawn and its journal still locked: the first child loses, a later one gets it."""
    gateway_program(_GATEWAY)
    ending = Served(state_dir)
    ending.service.close()
    started = launch._spawn
    tries = []

    def start(*arguments: Any) -> subprocess.Popen[bytes]:
        child = started(*arguments)
        tries.append(child)
        if len(tries) == 1:
            wait_until(lambda: child.poll() is not None, what="the end of the first try")
            ending.close()
        return child

    monkeypatch.setattr(launch, "_spawn", start)
    with ensure_running(settings(state_dir), owner_pid=4711) as client:
        assert client.status()["pid"] == tries[1].pid


def test_a_journal_that_stays_locked_is_told(
    state_dir: Path, gateway_program: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway_program(_GATEWAY)
    refused: list[object] = []
    start_error = launch._start_error

    def refused_once(*of: Any) -> Any:
        refused.append(of)
        return start_error(*of)

    monkeypatch.setattr(launch, "_start_error", refused_once)
    # The patience ends with the first refusal, however long a gateway takes to say it on this machine.
    clock = SimpleNamespace(sleep=time.sleep, monotonic=lambda: time.monotonic() + len(refused) * 3600)
    monkeypatch.setattr(launch, "time", clock)
    with served(state_dir):
        (state_dir / ENDPOINT_FILE).unlink()
        with pytest.raises(JournalLocked, match=f"pid {os.getpid()}"):
            ensure_running(settings(state_dir), owner_pid=4711)


def test_the_error_of_a_gateway_is_raised_here(state_dir: Path, gateway_program: Callable[[str], None]) -> None:
    gateway_program(
        "import json, sys\n"
        "from pathlib import Path\n"
        "directory = json.load(sys.stdin)['state_dir']\n"
        "error = {'type': 'BrokerRefused', 'code': 'TL-M05', 'where': 'mqtt://b', 'what': 'no', 'do': 'Ask.'}\n"
        f"(Path(directory) / {ERROR_FILE!r}).write_text(json.dumps(error))\n"
        "sys.exit(3)\n"
    )
    with pytest.raises(BrokerRefused) as caught:
        ensure_running(settings(state_dir), owner_pid=4711)
    assert str(caught.value) == "mqtt://b: no. Ask.   [TL-M05]"


def test_an_end_without_a_word_names_the_log(state_dir: Path, gateway_program: Callable[[str], None]) -> None:
    state_dir.mkdir()
    (state_dir / ERROR_FILE).write_text('{"type": "BrokerRefused", "code": "TL-OLD"}')
    gateway_program("import sys\nsys.exit(9)\n")
    with pytest.raises(GatewayError) as caught:
        ensure_running(settings(state_dir), owner_pid=4711)
    assert str(caught.value) == (
        f"{state_dir}: the gateway ended with code 9 before it listened. See {state_dir}/gateway.log.   [TL-G02]"
    )


def test_a_gateway_that_hangs_is_given_up(
    state_dir: Path, gateway_program: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "START_TIMEOUT_S", 0.3)
    gateway_program("import time\ntime.sleep(1)\n")
    with pytest.raises(GatewayError, match=r"has been starting for 0 s\. See .*/gateway\.log.*TL-G02"):
        ensure_running(settings(state_dir), owner_pid=4711)


def test_a_directory_that_cannot_be_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError) as caught:
        ensure_running(settings(tmp_path / "file" / "state"), owner_pid=4711)
    assert str(caught.value) == (
        f"{tmp_path}/file/state: the state directory can't be used (Not a directory). Give a directory on a local disk "
        "that this user may write.   [TL-C25]"
    )


def test_an_idle_gateway_of_ours_is_replaced_when_settings_change(
    state_dir: Path, gateway_program: Callable[[str], None]
) -> None:
    gateway_program(_GATEWAY)
    with ensure_running(settings(state_dir), owner_pid=4711) as client:
        first = client.status()
    with ensure_running(settings(state_dir, "b/#"), owner_pid=4711) as client:
        second = client.status()
    assert first["pid"] != second["pid"]
    assert (first["journal"], first["epoch"] + 1) == (second["journal"], second["epoch"])


@pytest.mark.parametrize("case", ["another owner", "somebody reads"])
def test_a_gateway_in_use_is_not_replaced(state_dir: Path, gateway_program: Callable[[str], None], case: str) -> None:
    gateway_program(_GATEWAY)
    with ensure_running(settings(state_dir), owner_pid=4711) as client:
        if case == "somebody reads":
            client.acquire(Lease("default"))
        with pytest.raises(ConfigError, match=r"runs here with other settings.*TL-C27"):
            ensure_running(settings(state_dir, "b/#"), owner_pid=4712 if case == "another owner" else 4711)
        assert client.status()["epoch"] == 1
    with ensure_running(settings(state_dir), owner_pid=4711, replace=True) as client:
        assert client.status()["epoch"] == 2, "whoever owns the readers may ask for it"


# -- outside of a bridge ---------------------------------------------------------------------------------------------


def killed(state_dir: Path) -> GatewayEndpoint:
    """Kill the gateway of a state directory; what its endpoint said."""
    endpoint = GatewayEndpoint.read(state_dir)
    assert endpoint is not None
    os.kill(endpoint.pid, signal.SIGKILL)
    wait_until(endpoint.process.has_ended)
    return endpoint


def place_of(state_dir: Path, owner: ProcessIdentity) -> GatewayAddress:
    return GatewayAddress(str(state_dir), settings(state_dir).model_dump_json(), owner=owner)


def test_a_gateway_is_started_again_while_nobody_asks_for_it_and_by_tasks_that_find_it_gone(
    state_dir: Path, gateway_program: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """While a batch runs Spark asks its source for nothing; whoever starts one, it ends with the driver."""
    gateway_program(_GATEWAY)
    with subprocess.Popen(["sleep", "60"]) as driver:
        place = place_of(state_dir, mark(driver.pid))
        gateway = SourceGateway(place, ReadPlan(place), Lease("default"))
        gateway.start_poll(None, 0)
        wait_until(lambda: gateway.start is not None, what="a lease")
        entry = gateway.start
        assert entry is not None
        before = killed(state_dir)
        wait_until(lambda: (GatewayEndpoint.read(state_dir) or before) != before, what="another gateway")
        question = PollRequest(entry, 0)
        with contextlib.suppress(GatewayUnreachable):  # the connection may be that of the one before
            gateway.poll_rows(question, 0)
        assert gateway.poll_rows(question, 0).end.offset == 0, "it knows no lease, and gives it again"
        gateway.release()
        gateway._restart_thread.join(30)
        assert not gateway._restart_thread.is_alive()

        killed(state_dir)
        said: list[str] = []

        def read() -> None:
            with pytest.raises(GatewayError) as caught:
                list(place.rows(entry.journal, 0, 1))
            said.append(caught.value.code)

        threads = [threading.Thread(target=read) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        driver.kill()
    after = GatewayEndpoint.read(state_dir)
    assert after is not None
    assert said == ["TL-G06", "TL-G06"], "it answers, and its journal is empty"
    client = find_running(state_dir)
    assert client is not None
    with client:
        assert (client.status()["epoch"], after.owner_pid) == (3, driver.pid)

    code, _, err = ran(capsys, "gateway", "--stop", str(state_dir))
    assert code == 2
    assert f"its gateway can't be ended like this: it ends with process {driver.pid}. End the query" in err
    replace(after, host="elsewhere", owner_pid=None).write(state_dir)
    code, _, err = ran(capsys, "gateway", "--stop", str(state_dir))
    assert code == 2
    assert "it runs on elsewhere" in err
    assert not after.process.has_ended()


def test_a_task_on_another_machine_than_the_driver_starts_none(
    state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "GATEWAY_TIMEOUT_S", 0.2)
    me = mark()
    place = place_of(state_dir, ProcessIdentity(me.pid, me.started, "the driver's machine"))
    with pytest.raises(GatewayUnreachable, match=r"It is on the driver's machine: other machines need one .*TL-G01"):
        list(place.rows("journal", 0, 1))
    assert not state_dir.exists()


def test_a_detached_gateway_outlives_whoever_started_it_and_is_ended_by_a_command(
    state_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A real one, whose broker is away."""
    with subprocess.Popen(["true"]) as over:
        over.wait()
    ensure_running(settings(state_dir).model_copy(update={"detached": True}), owner_pid=over.pid).close()
    endpoint = GatewayEndpoint.read(state_dir)
    client = find_running(state_dir)
    assert endpoint is not None
    assert client is not None
    with client:
        lease = Lease("default")
        client.acquire(lease)
        code, _, err = ran(capsys, "gateway", "--stop", str(state_dir))
        assert code == 2
        assert f"process {os.getpid()} reads from it. End the query" in err
        client.release(lease)
    assert ran(capsys, "gateway", "--stop", str(state_dir)) == (
        0,
        "plant has ended; its session stays at the broker, and its received messages on disk\n",
        "",
    )
    assert endpoint.process.has_ended()
    code, _, err = ran(capsys, "gateway", "--stop", str(state_dir))
    assert code == 2
    assert "no gateway runs in this directory. Is it the right stateDir?   [TL-G63]" in err


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_drain_ends_the_gateway_of_this_machine_and_no_other_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, elsewhere: bool
) -> None:
    """A state directory that came from another machine, or container, tells of a pid there."""
    monkeypatch.setattr(launch, "START_TIMEOUT_S", 5.0)
    with subprocess.Popen(["sleep", "60"]) as other:
        there = mark(other.pid)
        host = f"{there.host}-before" if elsewhere else there.host
        GatewayEndpoint("grpc+unix:///none", there.pid, there.started, host, "plant", "j", "now").write(tmp_path)
        try:
            stop_running(tmp_path)
            assert (other.poll() is None) is elsewhere
        finally:
            other.kill()
