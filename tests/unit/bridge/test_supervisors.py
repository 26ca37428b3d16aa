"""What keeps the children running must not end itself, whatever goes wrong, and is watched all the same."""

from __future__ import annotations

import errno
import os
import random
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest

from tests.unit.bridge.test_config import GOOD, read
from tests.unit.bridge.test_expected_screens import Watched
from towline.bridge.runtime import child_supervisors
from towline.bridge.runtime import supervisor as supervisor_module
from towline.bridge.runtime.child_supervisors import ChildSupervisor
from towline.bridge.runtime.screen import PlainScreen
from towline.bridge.runtime.state import BridgeState
from towline.bridge.runtime.supervisor import Supervisor, _handle_signals, _has_terminal
from towline.errors import ConfigError, GatewayUnreachable, TowlineError
from towline.gateway.endpoint import GatewayEndpoint
from towline.gateway.identity import record_client_session, record_session_end
from towline.processes import ProcessIdentity
from towline.timing import Backoff


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    return Watched(tmp_path)


class Failing(ChildSupervisor):
    """A part whose first run fails."""

    location = "here"

    def __init__(self, state: BridgeState, stopping: threading.Event, error: Exception) -> None:
        super().__init__("part", state, stopping, 0.0)
        self.errors, self.codes = [error], list[str]()

    def _run_once(self) -> None:
        if self.errors:
            raise self.errors.pop()
        self._stopping.set()

    def _handle_failure(self, error: TowlineError) -> None:
        self.codes.append(error.code)


@pytest.mark.parametrize(
    ("error", "code"), [(OSError(errno.EAGAIN, "no process"), "TL-B32"), (RuntimeError("no thread"), "TL-B55")]
)
def test_a_part_is_run_again_whatever_went_wrong(watched: Watched, error: Exception, code: str) -> None:
    stopping = threading.Event()
    child = Failing(watched.state, stopping, error)
    child.run()
    assert (child.codes, stopping.is_set()) == ([code], True)


@pytest.mark.parametrize("how", ["drained", ""])
def test_a_gateway_that_was_drained_is_not_started_again(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """It would take part; one that was killed in its drain does."""
    child, settings = watched.gateway, watched.line.gateway
    directory, client_id = settings.state_dir, settings.mqtt_client_id
    directory.mkdir()
    record_client_session(directory, client_id, "mqtt://b:1883")
    if how:
        record_session_end(directory, client_id, how)
    starts: list[int] = []

    class Leaving:
        said = False

        def __enter__(self) -> Self:
            starts.append(1)
            if len(starts) == 2:
                child._stopping.set()
            return self

        def __exit__(self, *_: object) -> None:
            """Nothing to close."""

        def status(self, **_: object) -> dict[str, Any]:
            if self.said:
                raise GatewayUnreachable("TL-G01", "g", "no gateway answers", "Is it running?")
            self.said = True
            return {"state": "online", "drain": "waiting for commits"}

    monkeypatch.setattr(child_supervisors, "ensure_running", lambda *_, **__: Leaving())
    child.run()
    assert (len(starts), child.fatal_error and child.fatal_error.code) == ((1, "TL-G55") if how else (2, None))


@pytest.mark.parametrize("elsewhere", [False, True])
def test_the_bridge_ends_its_gateway_and_no_process_that_has_its_pid_here(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, elsewhere: bool
) -> None:
    """In a container that was made anew the bridge has the pid it had, and what it left behind tells of pids there."""
    directory = watched.line.gateway.state_dir
    directory.mkdir()
    mark = ProcessIdentity.of(os.getpid())
    host = f"{mark.host}-before" if elsewhere else mark.host
    left = GatewayEndpoint("grpc+unix:///none", mark.pid, mark.started, host, "plant", "j", "now")
    replace(left, owner_pid=os.getpid()).write(directory)
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda *args: sent.append(args))
    watched.gateway.end(0.0)
    assert sent == ([] if elsewhere else [(mark.pid, signal.SIGTERM), (mark.pid, signal.SIGKILL)])


def test_a_secret_that_is_gone_while_kafka_is_away_ends_no_bridge_that_runs(watched: Watched) -> None:
    child, state = watched.kafka, watched.state
    gone = ConfigError("TL-C46", "kafka", "the file can not be read", "Mend it.")
    child.ready.set()
    child._handle_failure(gone)
    assert (child.fatal_error, state.kafka, state.kafka_error) == (None, "unreachable", str(gone))
    child.ready.clear()
    child._handle_failure(gone)
    assert child.fatal_error is gone, "before the start it is a mistake of the file"


def test_a_report_that_can_not_be_read_ends_nothing(watched: Watched) -> None:
    for report in ('{"kind": "started", "line": "nobody"}', '{"kind": "progress", "line": "telemetry"}', "[]", "{"):
        watched.spark._handle_report(report)
    events = watched.reports("started")
    assert watched.state.lines["telemetry"].query == "running"
    assert sum("[TL-B55]" in text for text in events) == 4


def test_a_bridge_ends_when_none_of_its_lines_can_go_on(tmp_path: Path) -> None:
    """One that can is left to run; a thread that ended ends the bridge, and a service manager starts it."""

    def child(name: str, **more: Any) -> Any:
        alive = {"is_alive": lambda: True, "is_active": True, "location": name, "line": SimpleNamespace(name=name)}
        return SimpleNamespace(**{"fatal_error": None, "stopped_lines": set(), **alive, **more})

    supervisor = Supervisor(read(GOOD, tmp_path), PlainScreen(sys.stdout))
    supervisor._kafka, supervisor._driver = child("kafka"), child("driver", stopped_lines={"a"})
    supervisor._gateways = {name: child(name) for name in "ab"}
    assert supervisor._fatal_error() is None
    supervisor._gateways["b"] = child("b", fatal_error=ConfigError("TL-B24", "b", "an older copy", "Restore it."))
    error = supervisor._fatal_error()
    assert isinstance(error, ConfigError), "exit code 2"
    assert (error.code, error.problem) == ("TL-B04", "no line can run (a, b)")
    supervisor._gateways["b"] = child("gateway line", is_alive=lambda: False)
    error = supervisor._fatal_error()
    assert error is not None
    assert (error.code, error.location) == ("TL-B55", "gateway line")


def test_a_downlink_without_kafkas_jars_stops_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uplinks need no jar; a bridge that has none of them does not start."""

    def refuse(_: object) -> None:
        raise ConfigError("TL-B07", "spark", "the jars can't be fetched", "Bring them.")

    started: list[str] = []
    monkeypatch.setattr(supervisor_module, "with_kafka_jars", refuse)
    for check in ("check_pyspark", "check_java"):
        monkeypatch.setattr(supervisor_module, check, lambda *_: None)
    monkeypatch.setattr(ChildSupervisor, "start", lambda child: started.append(child.name))
    for step in ("_watch", "_shut_down"):
        monkeypatch.setattr(Supervisor, step, lambda _: None)
    down = '\n[[downlink]]\nname = "commands"\nfrom = "commands"\ntopic = "c/{key}"\n'
    with pytest.raises(ConfigError, match="TL-B07"):
        Supervisor(read(GOOD.partition("[[uplink]]")[0] + down, tmp_path), PlainScreen(sys.stdout)).run()
    assert not started
    supervisor = Supervisor(read(GOOD + down, tmp_path), PlainScreen(sys.stdout))
    assert supervisor.run() == 0
    assert started == ["gateway telemetry", "gateway commands", "kafka", "driver"]
    assert supervisor._driver.stopped_lines == {"commands"}
    (event,) = supervisor._state.take_events()
    assert event.endswith('[TL-B07]\nline "commands": this line stops')


@pytest.mark.parametrize(
    ("has_terminal", "former", "reloads"),
    [(True, signal.SIG_DFL, False), (True, signal.SIG_IGN, True), (False, signal.SIG_DFL, True)],
)
def test_a_terminal_that_goes_away_ends_a_bridge_and_a_service_is_reloaded(
    monkeypatch: pytest.MonkeyPatch, has_terminal: bool, former: Any, reloads: bool
) -> None:
    """SIG_IGN is what nohup sets."""
    monkeypatch.setattr(supervisor_module, "_has_terminal", lambda: has_terminal)
    heard, before = list[str](), signal.signal(signal.SIGHUP, former)
    try:
        with _handle_signals(lambda: heard.append("end"), lambda: heard.append("reload")):
            os.kill(os.getpid(), signal.SIGHUP)
        assert (heard, signal.getsignal(signal.SIGHUP)) == (["reload" if reloads else "end"], former)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_process_knows_whether_it_has_a_terminal() -> None:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR))
    except OSError:
        assert not _has_terminal()
    else:
        assert _has_terminal()


def test_backoff_doubles_to_a_limit_and_begins_again() -> None:
    backoff = Backoff(first_s=1, max_s=8, jitter=0.5, rng=random.Random(1))
    pauses = [backoff.next_pause() for _ in range(100)]
    assert all(0.5 * full <= pause <= full for pause, full in zip(pauses, [1, 2, 4, 8, *[8] * 96], strict=True))
    backoff.reset()
    assert backoff.next_pause() <= 1


def test_an_interrupt_before_anything_was_started_ends_the_bridge_at_once(tmp_path: Path) -> None:
    """Maven may be at work for minutes."""
    supervisor = Supervisor(read(GOOD, tmp_path), PlainScreen(sys.stdout))
    with pytest.raises(KeyboardInterrupt):
        supervisor._on_interrupt()
    killed: list[bool] = []
    supervisor._on_second_interrupt = lambda: killed.append(True)
    supervisor._on_interrupt()
    assert killed == [True]
