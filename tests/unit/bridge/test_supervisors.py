"""What keeps the children running must not end itself, whatever goes wrong, and is watched all the same."""

from __future__ import annotations

import ast
import contextlib
import errno
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest

from tests.helpers import wait_until
from tests.unit.bridge.test_config import GOOD, read
from towline.bridge.config.model import Bridge
from towline.bridge.runtime import child_supervisors
from towline.bridge.runtime import supervisor as supervisor_module
from towline.bridge.runtime.child_supervisors import (
    ChildSupervisor,
    DriverSupervisor,
    GatewaySupervisor,
    KafkaSupervisor,
)
from towline.bridge.runtime.screen import PlainScreen
from towline.bridge.runtime.state import BridgeState, pause, resume
from towline.bridge.runtime.supervisor import Supervisor
from towline.errors import ConfigError, GatewayUnreachable, TowlineError
from towline.gateway.endpoint import GatewayEndpoint
from towline.gateway.identity import record_client_session, record_session_end
from towline.processes import ProcessIdentity
from towline.timing import Backoff


@pytest.fixture
def stopping() -> threading.Event:
    return threading.Event()


@pytest.fixture
def state(tmp_path: Path) -> BridgeState:
    return BridgeState("plant", tmp_path, {"line": "up"})


NO_PROCESS = OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
#: What nobody thought of, and the machine's refusals beside OSError.
UNFORESEEN = [KeyError("received"), RuntimeError("can't start new thread"), MemoryError()]


class Failing(ChildSupervisor):
    """A part whose first run fails."""

    part, location = "the part", "here"

    def __init__(self, state: BridgeState, stopping: threading.Event, error: Exception) -> None:
        super().__init__("part", state, stopping, 0.0)
        self.errors, self.codes = [error], list[str]()

    def _run_once(self) -> None:
        if self.errors:
            raise self.errors.pop()
        self._stopping.set()

    def _handle_failure(self, error: TowlineError) -> None:
        self.codes.append(error.code)


@pytest.mark.parametrize(("error", "code"), [(NO_PROCESS, "TL-B32"), *((error, "TL-B55") for error in UNFORESEEN)])
def test_a_part_is_run_again_whatever_went_wrong(
    state: BridgeState, stopping: threading.Event, error: Exception, code: str
) -> None:
    child = Failing(state, stopping, error)
    child.run()
    assert (child.codes, stopping.is_set()) == ([code], True)


@pytest.mark.parametrize("how", ["drained", ""])
def test_a_gateway_that_was_drained_is_not_started_again(
    stopping: threading.Event, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """It would take part; one that was killed in its drain does."""
    bridge = read(GOOD, tmp_path)
    (line,) = bridge.uplinks
    directory, client_id = line.gateway.state_dir, line.gateway.mqtt_client_id
    directory.mkdir(parents=True)
    record_client_session(directory, client_id, "mqtt://b:1883")
    if how:
        record_session_end(directory, client_id, how)
    starts: list[int] = []

    class Leaving(Closing):
        def __init__(self) -> None:
            self.said = False

        def status(self, **_: object) -> dict[str, Any]:
            if self.said:
                raise GatewayUnreachable("TL-G01", "g", "no gateway answers", "Is it running?")
            self.said = True
            return {"state": "online", "drain": "waiting for commits"}

    def ensure(*_: object, **__: object) -> Leaving:
        starts.append(1)
        if len(starts) == 2:
            stopping.set()
        return Leaving()

    state = BridgeState("plant", tmp_path, {line.name: "up"})
    child = GatewaySupervisor(line, bridge, state, stopping)
    monkeypatch.setattr(child_supervisors, "ensure_running", ensure)
    monkeypatch.setattr(child_supervisors, "STATUS_POLL_S", 0.01)
    child.start()
    child.join(20)
    assert not child.is_alive()
    assert (len(starts), child.fatal_error and child.fatal_error.code) == ((1, "TL-G55") if how else (2, None))


@pytest.mark.parametrize("elsewhere", [False, True])
def test_the_bridge_ends_its_gateway_and_no_process_that_has_its_pid_here(
    state: BridgeState, stopping: threading.Event, tmp_path: Path, elsewhere: bool
) -> None:
    """In a container that was made anew the bridge has the pid it had, and what it left behind tells of pids there."""
    bridge = read(GOOD, tmp_path)
    line = bridge.lines[0]
    supervisor = GatewaySupervisor(line, bridge, state, stopping)
    directory = line.gateway.state_dir
    directory.mkdir(parents=True, exist_ok=True)
    with subprocess.Popen(["sleep", "60"]) as other:
        there = ProcessIdentity.of(other.pid)
        host = f"{there.host}-before" if elsewhere else there.host
        left = GatewayEndpoint("grpc+unix:///none", there.pid, there.started, host, "plant", "j", "now")
        replace(left, owner_pid=os.getpid()).write(directory)
        ending = threading.Thread(target=supervisor.end, args=(time.monotonic() + 20,))
        ending.start()
        try:
            wait_until(lambda: other.poll() is not None or not ending.is_alive(), what="the end of either")
            assert (other.poll() is None) is elsewhere
        finally:
            other.kill()
            ending.join()


#: A process that hears no SIGTERM, and says when it does not.
DEAF = "import signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); signal.pause()"


def test_a_bridge_ends_though_its_driver_and_its_gateways_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are killed, the gateways at the same time; what was acknowledged is on disk."""
    monkeypatch.setattr(supervisor_module, "DRIVER_STOP_S", 0.5)
    monkeypatch.setattr(supervisor_module, "GATEWAY_STOP_S", 0.5)
    head, uplink, telemetry = GOOD.partition("[[uplink]]")
    bridge = read(head + uplink + telemetry + uplink + telemetry.replace("telemetry", "events"), tmp_path)
    bridge.log_dir.mkdir(parents=True)
    screen = io.StringIO()
    supervisor = Supervisor(bridge, PlainScreen(screen))
    state = supervisor._state = BridgeState("plant", tmp_path, {line.name: "up" for line in bridge.lines})
    kafka: Any = SimpleNamespace(ready=threading.Event())
    child = supervisor._driver = DriverSupervisor(bridge, state, kafka, supervisor._spark_stopping)
    child.command = (sys.executable, "-c", DEAF)
    child.start()
    driver = wait_until(lambda: child._process, what="a driver")
    state.lines["telemetry"].query = "running"
    supervisor._gateways = {}
    with contextlib.ExitStack() as stack:
        ends = [driver]
        for line in bridge.lines:
            deaf = stack.enter_context(subprocess.Popen(child.command, stdout=subprocess.PIPE, text=True))
            stack.callback(deaf.kill)
            ends.append(deaf)
            assert deaf.stdout is not None
            assert deaf.stdout.readline()
            mark = ProcessIdentity.of(deaf.pid)
            line.gateway.state_dir.mkdir(parents=True)
            there = GatewayEndpoint("grpc+unix:///none", mark.pid, mark.started, mark.host, line.name, "j", "now")
            replace(there, owner_pid=os.getpid()).write(line.gateway.state_dir)
            supervisor._gateways[line.name] = GatewaySupervisor(line, bridge, state, supervisor._stopping)
        supervisor._shut_down()
        assert [one.wait(20) for one in ends] == [-signal.SIGKILL] * 3
        assert "its batch is repeated after the next start" in screen.getvalue()
        child.join(20)


def test_a_secret_that_is_gone_while_kafka_is_away_ends_no_bridge_that_runs(
    state: BridgeState, stopping: threading.Event
) -> None:
    bridge: Any = SimpleNamespace(kafka=SimpleNamespace(bootstrap_servers="k:9092"), lines=(), downlinks=())
    child = KafkaSupervisor(bridge, state, stopping)
    child._backoff = Backoff(first_s=0.0, max_s=0.0)
    gone = ConfigError("TL-C46", "kafka", "the file can not be read", "Mend it.")
    child.ready.set()
    child._handle_failure(gone)
    assert (child.fatal_error, state.kafka, state.kafka_error) == (None, "unreachable", str(gone))
    child.ready.clear()
    child._handle_failure(gone)
    assert child.fatal_error is gone, "before the start it is a mistake of the file"


def test_a_report_that_can_not_be_read_ends_nothing(state: BridgeState, stopping: threading.Event) -> None:
    nothing: Any = SimpleNamespace(state_dir="state", log_dir=Path("logs"), spark=SimpleNamespace(master="spark://m"))
    child = DriverSupervisor(nothing, state, nothing, stopping)
    for report in ('{"kind": "started", "line": "nobody"}', '{"kind": "progress", "line": "line"}', "[]", "{"):
        child._handle_report(report)
    child._handle_report('{"kind": "started", "line": "line"}')
    assert state.lines["line"].query == "running"
    assert sum("[TL-B55]" in text for text in state.take_events()) == 4


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


class Closing:
    """A client with nothing to say."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to close."""


def test_what_the_driver_is_told_is_ascii(state: BridgeState, stopping: threading.Event, tmp_path: Path) -> None:
    """``PYTHONIOENCODING=latin-1`` garbled the routes on the way."""
    bridge = read(GOOD.replace('"telemetry/{device}/#"', '"tél/温度/{device}/#"'), tmp_path)
    bridge.state_dir.mkdir()
    kafka: Any = SimpleNamespace(ready=threading.Event())
    child = DriverSupervisor(bridge, BridgeState("plant", tmp_path, {"telemetry": "up"}), kafka, stopping)
    echo = "import sys; print(ascii(sys.stdin.readline()))"
    child.command = (sys.executable, "-c", echo)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONIOENCODING", "latin-1")
        with child._start_process()[0] as process:
            assert process.stdout is not None
            received = Bridge.model_validate_json(ast.literal_eval(process.stdout.read()))
    assert received.uplinks[0].routes == bridge.uplinks[0].routes


def test_a_driver_that_ends_before_its_first_word_is_told_by_its_last_line(
    stopping: threading.Event, tmp_path: Path
) -> None:
    """What it wrote before is another start's."""
    bridge = read(GOOD, tmp_path)
    bridge.log_dir.mkdir(parents=True)
    (bridge.log_dir / "driver.log").write_text("ValueError: of yesterday\n")
    state = BridgeState("plant", tmp_path, {"telemetry": "up"})
    child = DriverSupervisor(bridge, state, SimpleNamespace(ready=threading.Event()), stopping)  # type: ignore[arg-type]
    child.command = (sys.executable, "-c", "import sys; sys.stdin.readline(); import no_such_module")
    child.start()
    said = wait_until(state.take_events, what="the end of the driver")
    stopping.set()
    child.join(20)
    assert said[0].startswith(
        "spark: its driver ended with code 1: ModuleNotFoundError: No module named 'no_such_module';"
    )


#: A driver that does what it is told about queries, and says so; `killed` once, at its first command.
OBEDIENT = """
import json, os, sys
bridge = json.loads(sys.stdin.readline())
for line in sys.stdin:
    if line.startswith("{"):
        order = json.loads(line)
        mark = os.path.join(sys.argv[1], "killed")
        if not os.path.exists(mark):
            open(mark, "w").close()
            os.kill(os.getpid(), 9)
        if "hold" in order:
            print(json.dumps({"kind": "held", "line": order["hold"]}), flush=True)
        elif "judge" in order:
            wrong = ["TL-C74", "bridge.toml:9", "where: no", order["judge"][0]["name"]]
            for of, mistakes in (("the one before", []), (order["of"], [wrong])):
                print(json.dumps({"kind": "judged", "of": of, "mistakes": mistakes}), flush=True)
        else:
            with open(os.path.join(sys.argv[1], "taken"), "a") as taken:
                taken.write(order["take"]["name"] + " " + order["take"]["route"][0]["topic"] + chr(10))
            print(json.dumps({"kind": "started", "line": order["take"]["name"]}), flush=True)
"""


def test_a_query_that_is_held_stays_so_over_the_end_of_its_driver(stopping: threading.Event, tmp_path: Path) -> None:
    """The driver is killed before it has stopped the query: the next one is told before it starts any."""
    bridge = read(GOOD, tmp_path)
    bridge.state_dir.mkdir()
    state = BridgeState("plant", tmp_path, {"telemetry": "up"})
    child = DriverSupervisor(bridge, state, SimpleNamespace(ready=threading.Event()), stopping)  # type: ignore[arg-type]
    child.command = (sys.executable, "-c", OBEDIENT, str(tmp_path))
    child.stop_line("telemetry", "its SQL was wrong")
    assert child.stopped_lines == {"telemetry"}
    other = read(GOOD.replace('name = "telemetry"', 'name = "second"'), tmp_path)
    child._bridge = bridge.model_copy(update={"lines": (*bridge.lines, *other.lines)})
    state.lines |= BridgeState("plant", tmp_path, {"second": "up"}).lines
    child.start()
    try:
        assert child.hold_queries(["telemetry"], 60)
        assert (tmp_path / "killed").exists()
        assert state.lines["telemetry"].query == "held for a reload"
        changed = read(GOOD.replace('topic = "', 'topic = "x.', 1), tmp_path)
        assert str(child.check_sql(changed.uplinks, 60)) == str(
            [ConfigError("TL-C74", "bridge.toml:9", "where: no", "telemetry")]
        )
        child.start_queries(changed.model_copy(update={"lines": (*changed.lines, *other.lines)}), ["telemetry"])
        wait_until(lambda: state.lines["telemetry"].query == "running", what="the query")
        assert (tmp_path / "taken").read_text() == f"telemetry {changed.uplinks[0].route[0].topic}\n"
        assert child.stopped_lines == set(), "a line that was given up begins again"

        view, place = state.lines["telemetry"], bridge.state_dir / "telemetry"
        child._on_ready({"spark": "Spark", "seconds": 1.0})
        pause(place)
        child.apply_pauses()
        wait_until(lambda: view.query == "paused", what="the pause")
        first = child._process
        child.kill()
        wait_until(lambda: child._process is not first, what="the next driver")
        child._handle_report(json.dumps({"kind": "progress", "line": "telemetry", "batch": 1, "at": 0.0, "millis": {}}))
        child.start_queries(child._bridge, ["telemetry"])
        child.apply_pauses()
        assert view.query == "paused", "whatever is reported, reloaded and started again"
        resume(place)
        child.apply_pauses()
        wait_until(lambda: view.query == "running", what="the query that goes on")
        assert len((tmp_path / "taken").read_text().splitlines()) == 2
        said = [text for text in state.take_events() if text.startswith('line "telemetry": ')]
        assert said == [
            f'line "telemetry": {text}' for text in ("paused; new messages wait until towline resume", "resumed")
        ]
    finally:
        stopping.set()
        child.kill()
        child.join(20)


#: A driver that says what it is told.
ECHO = """
import json, sys
sys.stdin.readline()
for line in sys.stdin:
    print(json.dumps({"kind": "noted", "text": line.strip()}), flush=True)
"""


def test_queries_begin_when_kafka_has_answered(stopping: threading.Event, tmp_path: Path) -> None:
    """A driver that is started later is told at its start."""
    bridge = read(GOOD, tmp_path)
    bridge.state_dir.mkdir()
    state = BridgeState("plant", tmp_path, {"telemetry": "up"})
    kafka = KafkaSupervisor(bridge, state, stopping)
    child = DriverSupervisor(bridge, state, kafka, stopping)
    child.command = (sys.executable, "-c", ECHO)
    child.start()
    try:
        first = wait_until(lambda: child._process, what="a driver")
        child._send_commands("before")
        wait_until(lambda: "before" in state.take_events(), what="a word")
        kafka._mark_reachable()
        wait_until(lambda: "go" in state.take_events(), what="the first go")
        child._backoff = Backoff(first_s=0.0, max_s=0.0)
        child.kill()
        wait_until(lambda: "go" in state.take_events(), what="the go of the next driver")
        assert child._process is not first
        kafka._mark_reachable()
        child._send_commands("after")
        said = wait_until(lambda: [text for text in state.take_events() if text in ("go", "after")], what="a word")
        assert said == ["after"], "it is told once"
    finally:
        stopping.set()
        child.kill()
        child.join(20)


def test_what_becomes_of_messages_while_kafka_is_away(
    state: BridgeState, stopping: threading.Event, tmp_path: Path
) -> None:
    kept = GOOD.replace('name = "telemetry"', 'name = "telemetry"\nack_after = "kafka"')
    beside = GOOD.partition("[[uplink]]")[2].replace('"telemetry"', '"beside"')
    for text, said in (
        (GOOD, "messages are still received and wait on disk"),
        (kept, "receiving stops at the broker's window, and the brokers queue new messages"),
        (f"{kept}[[uplink]]{beside}", 'wait on disk, except those of "telemetry", which the broker queues'),
    ):
        assert KafkaSupervisor(read(text, tmp_path), state, stopping)._outage_effect.endswith(said)
