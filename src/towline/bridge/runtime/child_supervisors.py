"""Supervisor threads of a bridge's parts: each starts its part, and restarts it after a failure.

The parts are Kafka, which is only polled; the gateway of a line, or its remote gateways, which are only polled; and
the Spark driver, whose reports are handled here.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from towline.bridge.config.model import AnyLine, Bridge, Uplink
from towline.bridge.lines import statuses
from towline.bridge.lines.account import LineNotes
from towline.bridge.lines.identity import Identity, configured_client_ids, is_drained
from towline.bridge.lines.recovery import journal_refusal, marker_store, start_refusal
from towline.bridge.runtime.failures import MAX_TEXT_CHARS
from towline.bridge.runtime.session import create_scratch_dir, driver_environment
from towline.bridge.runtime.state import HELD, PAUSED, PAUSED_FILE, STOPPED, BridgeState, LineView, read_notes
from towline.checkpoint import Checkpoint
from towline.errors import (
    BrokerRefused,
    ConfigError,
    ConfigErrors,
    GatewayError,
    JournalDamaged,
    JournalLocked,
    KafkaError,
    SessionUnknown,
    TowlineError,
    is_permanent,
)
from towline.gateway.client import GatewayClient
from towline.gateway.endpoint import GatewayEndpoint
from towline.gateway.launch import ensure_running
from towline.kafka.markers import ANY_QUERY
from towline.mqtt.reasons import KEEP_SESSIONS_ADVICE
from towline.spark.link import GatewayAddress
from towline.spark.session import is_cluster
from towline.text import error_text, printable
from towline.timing import Backoff, poll_until

if TYPE_CHECKING:
    from towline.kafka.admin import KafkaAdmin


class ChildSupervisor(threading.Thread, ABC):
    """Supervisor thread of one part; it continues after any exception, because its part would end with it unnoticed.

    It reports to `state`, ends when `stopping` is set, and pauses up to `longest_pause_s` seconds between failed runs.
    """

    #: Name of the part in error messages.
    location = ""

    def __init__(self, name: str, state: BridgeState, stopping: threading.Event, longest_pause_s: float) -> None:
        super().__init__(name=name, daemon=True)
        #: Error that only a person can fix: it ends the thread. None for no such error.
        self.fatal_error: TowlineError | None = None
        self._state = state
        self._stopping = stopping
        self._backoff = Backoff(first_s=0.5, max_s=longest_pause_s)

    def run(self) -> None:
        """Run the part again and again until the bridge stops or a fatal error occurs."""
        while self.is_active:
            try:
                self._run_once()
            except TowlineError as error:
                self._handle_failure(error)
            except OSError as error:
                self._handle_failure(start_error(self.location, error))
            except Exception as error:  # noqa: BLE001 - reported, and retried
                self._handle_failure(unexpected_error(self.location, error))

    @property
    def is_active(self) -> bool:
        """True until the bridge stops or a fatal error occurs; a thread that has ended before is a fault."""
        return self.fatal_error is None and not self._stopping.is_set()

    @abstractmethod
    def _run_once(self) -> None:
        """Start the part and wait until it ends."""

    @abstractmethod
    def _handle_failure(self, error: TowlineError) -> None:
        """Report the error that ended a run, and pause."""


def start_error(location: str, error: OSError) -> GatewayError:
    """Return TL-B32 for a process that can't be started: no memory, processes or file handles; it is retried."""
    remedy = "It is retried: free disk space, memory, processes or open files (ulimit)."
    return GatewayError("TL-B32", location, f"a process can't be started ({error.strerror or error})", remedy)


def unexpected_error(location: str, error: BaseException | None = None) -> GatewayError:
    """Return TL-B55 for an unexpected exception in a supervisor thread, or for a thread that has ended."""
    if error is not None and os.environ.get("TOWLINE_DEBUG"):
        traceback.print_exception(error)
    reason = "" if error is None else f" ({error_text(error)})"
    remedy = "It is retried. Please report it with the output of TOWLINE_DEBUG=1."
    return GatewayError("TL-B55", location, f"unexpected error in this part of the bridge{reason}", remedy)


# -- Kafka -------------------------------------------------------------------------------------------------------------

#: Seconds between two polls of Kafka and for measuring backlogs; seconds for an answer, which a busy Kafka needs.
#: A stopped or frozen Kafka is reported within 10 s.
_KAFKA_POLL_S, _KAFKA_TIMEOUT_S = 2.0, 5.0
_OUTAGE_EFFECT: Final = 'messages are still received and wait on disk, with ack_after = "kafka" at the broker'


class KafkaSupervisor(ChildSupervisor):
    """Supervisor of the connection to Kafka: queries start after its first answer, then it is polled."""

    location = "kafka"

    def __init__(self, bridge: Bridge, state: BridgeState, stopping: threading.Event) -> None:
        super().__init__("kafka", state, stopping, 5.0)
        #: Set after Kafka's first answer.
        self.ready = threading.Event()
        #: Called once after Kafka's first answer.
        self.on_ready: Callable[[], object] = lambda: None
        self.bridge = bridge

    def _run_once(self) -> None:
        """Poll Kafka with one client, which uses the advertised listeners as all clients do, until it fails."""
        from towline.kafka.admin import KafkaAdmin  # noqa: PLC0415 - loads librdkafka

        admin = KafkaAdmin(self.bridge.kafka.client_settings(), _KAFKA_TIMEOUT_S)
        while self.is_active:
            admin.check_reachable()
            self._mark_reachable()
            self._measure_backlogs(admin)
            self._stopping.wait(_KAFKA_POLL_S)

    def _mark_reachable(self) -> None:
        self._backoff.reset()
        with self._state.lock:
            was_unreachable = self._state.kafka_error is not None
            self._state.kafka, self._state.kafka_error = "reachable", None
        if was_unreachable:
            self._state.add_event(f"kafka: {self.bridge.kafka.bootstrap_servers} answers")
        if not self.ready.is_set():
            self.ready.set()
            self.on_ready()

    def _measure_backlogs(self, admin: KafkaAdmin | None) -> None:
        """Measure the backlog of each downlink, from the offsets in its checkpoint.

        It is unknown without a client, and for a stopped line: its topic may have been deleted [I19].
        """
        deadline = time.monotonic() + _KAFKA_POLL_S
        for line in self.bridge.downlinks:
            checkpoint, backlog = Checkpoint(str(line.checkpoint)), None
            offsets = checkpoint.kafka_offsets(checkpoint.last_committed_batch())
            is_stopped, remaining_s = self._state.lines[line.name].query == STOPPED, deadline - time.monotonic()
            if admin is not None and offsets and not is_stopped and remaining_s > 0:
                with contextlib.suppress(KafkaError):
                    backlog = admin.backlog(offsets, remaining_s)
            with self._state.lock:
                view = self._state.lines[line.name]
                view.behind, view.hidden = backlog or (None, None)

    def _handle_failure(self, error: TowlineError) -> None:
        if not isinstance(error, KafkaError | GatewayError) and not self.ready.is_set():
            self.fatal_error = error  # of the settings
            return
        self._measure_backlogs(None)
        with self._state.lock:
            if self._state.kafka_error is None:
                self._state.add_event(f"{error}\nkafka: {_OUTAGE_EFFECT}; retrying")
            self._state.kafka, self._state.kafka_error = "unreachable", str(error)
        self._stopping.wait(self._backoff.next_pause())


def ensure_topics(bridge: Bridge, topics: Iterable[str]) -> str:
    """Check that topics exist, or create them if the file has ``create_topics``; return a text about created topics.

    Raises:
        KafkaError: TL-B03, a topic is missing; TL-K01, Kafka does not answer; TL-K09, a topic can't be created.
    """
    from towline.kafka.admin import KafkaAdmin  # noqa: PLC0415 - loads librdkafka

    admin, topic_settings = KafkaAdmin(bridge.kafka.client_settings()), bridge.kafka.create_topics
    missing_topics = sorted(set(topics) - set(admin.info().topics))
    if not missing_topics:
        return ""
    if topic_settings is None:
        names, is_plural = ", ".join(f'"{name}"' for name in missing_topics), len(missing_topics) > 1
        problem = f"the topic{'s' if is_plural else ''} {names} {'are' if is_plural else 'is'} not there"
        remedy = "Create it, or let Towline do it with create_topics = { partitions = 6 } in [kafka]."
        raise KafkaError("TL-B03", bridge.kafka.bootstrap_servers, problem, remedy)
    partitions = dict.fromkeys(missing_topics, topic_settings.partitions)
    created_topics = admin.create(partitions, replication=topic_settings.replication_factor)
    return f"kafka: created {', '.join(created_topics)} with {topic_settings.partitions} partitions each"


# -- the gateways of a line --------------------------------------------------------------------------------------------

#: Seconds between two polls of a gateway's status.
STATUS_POLL_S: Final = 0.5
#: After this many polls without an answer the gateway is looked up or started again.
_MAX_TIMEOUTS: Final = 3
#: Errors that a person has to fix: a retry would fail too.
_FATAL_ERRORS: Final = (ConfigError, BrokerRefused, SessionUnknown, JournalLocked, JournalDamaged)
#: Time-out of a read of markers, in seconds, as an option: a line waits for it before it receives.
_MARKER_TIMEOUT_S: Final = "5"
_REJOIN_REMEDY: Final = "Start towline run again to have it receive."


class GatewaySupervisor(ChildSupervisor):
    """Supervisor of a line's gateway, with its status and account; remote gateways are only polled, never ended."""

    def __init__(self, line: AnyLine, bridge: Bridge, state: BridgeState, stopping: threading.Event) -> None:
        super().__init__(f"gateway {line.name}", state, stopping, 15.0)
        self.line, self._bridge = line, bridge
        self.location = f'line "{line.name}"'
        #: Set after the gateway's first answer.
        self.ready = threading.Event()
        #: Another supervisor has replaced this one; its first gateway replaces the running one.
        self.is_replaced, self.replaces_gateway = False, False
        #: Last reported problem of each gateway; "" is the key of a local gateway.
        self._last_problems: dict[str, str] = {}
        self._remote_gateways: list[GatewayAddress] = []
        if remote_locations := line.gateways if isinstance(line, Uplink) else ():
            access = bridge.gateway.access()
            self._view.gateways, self._view.access = remote_locations, asdict(access)
            self._remote_gateways = statuses.endpoints_of(remote_locations, access)

    @property
    def is_active(self) -> bool:
        """True until the bridge stops, a fatal error occurs, or another supervisor replaces this one."""
        return super().is_active and not self.is_replaced

    @property
    def _view(self) -> LineView:
        return self._state.lines[self.line.name]

    def _run_once(self) -> None:
        if self._remote_gateways:
            self.poll()
            self.ready.set()
            self._backoff.reset()
            self._stopping.wait(STATUS_POLL_S)
            return
        if not self.ready.is_set():  # no message was received yet; Kafka may be unavailable [I7]
            with contextlib.suppress(KafkaError):
                if (error := foreign_marker_error(self._bridge, self.line)) is not None:
                    raise error
        log = self._bridge.log_dir / f"gateway-{self.line.name}.log"
        replace = self.replaces_gateway
        with ensure_running(self.line.gateway, owner_pid=os.getpid(), log=log, replace=replace) as client:
            self.replaces_gateway = False
            self._mark_online()
            self._poll_until_end(client)

    def poll(self) -> None:
        """Poll the status once; without an answer of a local gateway the last status stays."""
        notes = read_notes(self._view.directory)
        if self._remote_gateways:
            answers = statuses.ask_each(self._remote_gateways, statuses.request_status)
            status = statuses.combine_statuses(answers, self._view.previous_status)
            remote_error = next((status for status in answers.values() if isinstance(status, GatewayError)), None)
            with self._state.lock:
                self._view.gateway_error = str(remote_error) if status["state"] == "away" else None
            self._handle_status(status, notes)
        elif own_status := statuses.gateway_status(self.line.gateway.state_dir):
            self._handle_status(own_status, notes)

    def end(self, deadline: float, *, poll_first: bool = False) -> None:
        """End a gateway that this process started: it acknowledges what it has stored and keeps its session.

        Args:
            deadline: On `time.monotonic`; a gateway that still runs is killed: its acknowledged messages are on disk
                [I2].
            poll_first: Poll the status once more before, to include Spark's last batch.
        """
        if poll_first:
            self.poll()
        endpoint = None if self._remote_gateways else GatewayEndpoint.read(self.line.gateway.state_dir)
        if endpoint is None or endpoint.owner_pid != os.getpid() or not endpoint.process.is_running():
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(endpoint.pid, signal.SIGTERM)
            if not poll_until(endpoint.process.has_ended, deadline - time.monotonic()):
                os.kill(endpoint.pid, signal.SIGKILL)

    def _mark_online(self) -> None:
        is_restart = self.ready.is_set()
        self.ready.set()
        with self._state.lock:
            self._view.gateway_error = None
            self._view.gateway_restarts += is_restart
        if is_restart:
            self._add_event("the gateway is running again")

    def _poll_until_end(self, client: GatewayClient) -> None:
        """Poll the gateway until it ends; raise TL-G55 after a drain: a restarted gateway would subscribe again."""
        timeouts, state_dir = 0, self.line.gateway.state_dir
        while self.is_active and timeouts < _MAX_TIMEOUTS and not self._stopping.wait(STATUS_POLL_S):
            notes = read_notes(self._view.directory)
            try:
                status = client.status(timeout_s=5.0)
            except GatewayError:
                endpoint = GatewayEndpoint.read(state_dir)
                has_ended = endpoint is None or endpoint.process.has_ended()
                was_draining = has_ended and self._view.status.get("drain")
                if was_draining and is_drained(state_dir, configured_client_ids(self.line)):
                    problem, remedy = "its gateway was drained, and is not restarted", _REJOIN_REMEDY
                    raise GatewayError("TL-G55", self.location, problem, remedy) from None
                timeouts = _MAX_TIMEOUTS if has_ended else timeouts + 1
            else:
                timeouts = 0
                self._backoff.reset()
                self._handle_status(status, notes)
        if self.is_active:
            self._add_event("the gateway has ended; restarting it")

    def _handle_status(self, status: Mapping[str, Any], notes: LineNotes | None) -> None:
        """Store a status, and report changed problems of each gateway."""
        if status.get("state") != "away":
            with self._state.lock:
                self._view.update_status(status, notes)
        old_statuses = statuses.statuses_by_gateway(self._view.previous_status)
        for name, gateway in statuses.statuses_by_gateway(status).items():
            is_away, last_error = statuses.AWAY_SINCE in gateway, gateway.get("last_error") or {}
            problem = statuses.outage_text(name, gateway) if is_away else str(last_error.get("text", ""))
            if problem != self._last_problems.get(name):
                text = statuses.outage_problem(name, gateway) if is_away else problem
                if not text and (name or gateway.get("state") == "online"):
                    broker_text, state_text = f"connected to {gateway.get('broker')}", str(gateway.get("state"))
                    text = f"gateway {name} answers again: {state_text}" if name else broker_text
                if text:
                    self._add_event(text)
                    self._last_problems[name] = problem
            for event in _new_losses(old_statuses.get(name, {}), gateway) if not is_away else ():
                self._add_event(f"gateway {name}: {event}" if name else event)
        self._view.previous_status = status

    def _add_event(self, text: str) -> None:
        """Add an event with the name of the line, unless the text has it."""
        text = text.removeprefix(f"{self.line.name} at ").removeprefix(f"{self.line.name}: ")
        self._state.add_event(text if self.location in text else f"{self.location}: {text}")

    def _handle_failure(self, error: TowlineError) -> None:
        if not self.is_active:
            return
        error = journal_refusal(self.line, self._bridge.file, error) or error
        if is_permanent(error.code) or (isinstance(error, _FATAL_ERRORS) and not self.ready.is_set()):
            self.fatal_error = error
        if error.code == "TL-G55" and self.line.gateway.drain_s is not None:
            return  # a requested drain
        with self._state.lock:
            is_new = self._view.gateway_error != str(error)
            self._view.gateway_error = str(error)
        if is_new:
            self._add_event(str(error))
        if self.fatal_error is None:
            self._stopping.wait(self._backoff.next_pause())


def _new_losses(old_status: Mapping[str, Any], new_status: Mapping[str, Any]) -> Iterator[str]:
    """Yield events about lost sessions and degraded QoS, which weaken the guarantee; the latter only once."""
    if new_status.get("sessions_lost", 0) > old_status.get("sessions_lost", 0):
        problem = "the broker lost this client's session, and all messages queued in it"
        yield f"{problem}. {(new_status.get('session_lost') or {}).get('do', KEEP_SESSIONS_ADVICE)}   [TL-M22]"
    old_degraded, degraded = ((status.get("outbox") or {}).get("degraded", 0) for status in (old_status, new_status))
    if degraded and not old_degraded:
        problem = "the broker answers QoS 2 like QoS 1: from now on a message may be doubled"
        yield f'{problem}. Use a broker with QoS 2, or guarantee = "at_least_once".   [TL-B58]'


def foreign_marker_error(bridge: Bridge, line: AnyLine) -> TowlineError | None:
    """Return an error if the sink id of an uplink without a checkpoint has markers of another query, with rows.

    The state directory was emptied or replaced. The first batch would stop with TL-K13, after messages were
    acknowledged. A marker without rows belongs to nobody.

    Raises:
        KafkaError: As `MarkerStore.read`; the markers are unknown then.
    """
    identity, own_query = Identity.read(line.gateway.state_dir), Checkpoint(str(line.checkpoint)).query_id
    if not (isinstance(line, Uplink) and line.transactional) or identity is None or identity.query:
        return None
    store = marker_store(bridge, line, identity, deliveryTimeout=_MARKER_TIMEOUT_S)
    for marker in store.read_markers().values():
        if marker is not None and marker.writer not in (ANY_QUERY, own_query) and marker.total_rows:
            problem = f'its sink "{identity.sink}" has {marker.total_rows:,} rows of query {marker.writer} in Kafka'
            problem += ", and its checkpoint is not here; nothing was received"
            return start_refusal(line, bridge.file, "TL-K13", problem, "Bring back the state directory of that query")
    return None


# -- Spark's driver ----------------------------------------------------------------------------------------------------

#: Longest wait for Spark, in seconds: it may be starting, or a batch may be running.
_DRIVER_TIMEOUT_S: Final = 120.0


class DriverSupervisor(ChildSupervisor):
    """Supervisor of the Spark driver process: sends its commands and handles its reports."""

    location = "spark"
    command: Sequence[str] = (sys.executable, "-m", "towline.bridge.runtime.driver")

    def __init__(self, bridge: Bridge, state: BridgeState, kafka: KafkaSupervisor, stopping: threading.Event) -> None:
        super().__init__("driver", state, stopping, 30.0)
        #: Log file of the driver's standard error, with Spark's log.
        self.log_path = bridge.log_dir / "driver.log"
        self._bridge = bridge
        self._kafka = kafka
        kafka.on_ready = lambda: self._send_commands("go")
        self._process: subprocess.Popen[str] | None = None
        #: Protects the process and its standard input: commands are whole lines, and none goes to a former process.
        self._write_lock = threading.RLock()
        #: Names of lines whose query stays stopped: paused lines, and lines that a reload changes.
        self._held_lines: set[str] = set()
        #: Command of an SQL check without an answer yet, repeated to a new driver; and the results by id of the check.
        self._pending_checks: list[str] = []
        self._check_results: dict[str, list[ConfigError]] = {}
        self._last_report = ""
        #: Reason of the last end; the same reason is not repeated in full.
        self._last_reason = ""

    def _run_once(self) -> None:
        self._last_report = ""
        log_start, has_reported = self.log_path.stat().st_size if self.log_path.exists() else 0, False
        with self._write_lock:
            new_process, directory = self._start_process()
        with new_process as process:
            assert process.stdout is not None
            for line in process.stdout:
                self._handle_report(line)
                has_reported = True
            exit_code = process.wait()
        shutil.rmtree(directory, ignore_errors=True)  # a dying JVM may still write: the next start removes the rest
        if self.is_active:
            exit_text = f"was ended by signal {-exit_code}" if exit_code < 0 else f"ended with code {exit_code}"
            log_text = "" if has_reported else self._last_log_line(log_start)
            self._handle_exit(self._last_report or f"its driver {exit_text}{log_text}")

    def _last_log_line(self, log_start: int) -> str:
        """Return the last line of the driver's log after a position, as the end of a sentence."""
        text = ""
        with contextlib.suppress(OSError), self.log_path.open("rb") as log:
            log.seek(max(log_start, log.seek(0, os.SEEK_END) - (MAX_TEXT_CHARS << 2)))
            text = log.read().decode(errors="replace").rstrip().rpartition("\n")[2].strip()
        return f": {printable(text, MAX_TEXT_CHARS)}" if text else ""

    def _handle_failure(self, error: TowlineError) -> None:
        if self.is_active:
            self._handle_exit(str(error).removeprefix("spark: "))

    def stop(self) -> None:
        """Ask the driver to finish its batches and end."""
        self._send_commands("stop")

    def hold_queries(self, lines: Sequence[str]) -> None:
        """Stop the queries of lines between two batches, until `start_queries`.

        A driver that is started meanwhile does not start these queries.

        Raises:
            ConfigError: TL-C174, they did not stop in time.
        """
        with self._write_lock:  # a process that starts later gets the command at its start
            self._held_lines.update(lines)
            self._send_commands(*(json.dumps({"hold": line}) for line in lines))
        views = [self._state.lines[line] for line in lines]
        problem = "the queries were not stopped between two batches"
        self._wait_for(lambda: all(view.query in (PAUSED, HELD) for view in views), problem)

    def check_sql(self, lines: Sequence[AnyLine]) -> None:
        """Check the SQL of new settings of lines with Spark.

        Raises:
            ConfigErrors: TL-C74, errors in the SQL; TL-C174, Spark does not answer in time.
        """
        check_id, line_values = uuid.uuid4().hex, [line.model_dump(mode="json", by_alias=True) for line in lines]
        with self._write_lock:  # a process that starts later gets the command at its start
            self._pending_checks = [json.dumps({"judge": line_values, "of": check_id})]
            self._send_commands(*self._pending_checks)
        try:
            self._wait_for(lambda: check_id in self._check_results, "the SQL of the routes was not checked")
        finally:
            self._pending_checks = []
        if errors := self._check_results.pop(check_id):
            raise ConfigErrors(errors)

    def _wait_for(self, condition: Callable[[], bool], problem: str) -> None:
        if not poll_until(condition, _DRIVER_TIMEOUT_S, self._stopping.wait):
            reason = "the bridge ends" if self._stopping.is_set() else "Spark does not answer"
            remedy = "Reload again when Spark runs."
            raise ConfigError("TL-C174", str(self._bridge.file), f"{problem}: {reason}", remedy)

    @property
    def stopped_lines(self) -> set[str]:
        """Names of lines whose query is not retried."""
        return {name for name, view in self._state.lines.items() if view.query == STOPPED}

    def stop_line(self, name: str, reason: str) -> None:
        """Stop the query of a line for good, and report the reason."""
        with self._state.lock:
            self._on_failed({"line": name, "text": reason})

    def apply_pauses(self) -> None:
        """Stop the queries of paused lines and start those of resumed lines; not to be called during a reload."""
        for name in (line.name for line in self._bridge.lines):
            if self._is_paused(name) and name not in self._held_lines:
                self._state.add_event(f'line "{name}": paused; new messages wait until towline resume')
                with self._write_lock, self._state.lock:
                    self._held_lines.add(name)
                    if self._state.spark != "running":  # the next driver gets the command before it starts a query
                        self._state.lines[name].query = PAUSED
                    self._send_commands(json.dumps({"hold": name}))
            elif name in self._held_lines and not self._is_paused(name):
                self._state.add_event(f'line "{name}": resumed')
                self.start_queries(self._bridge, [name])

    def _is_paused(self, name: str) -> bool:
        return (self._bridge.state_dir / name / PAUSED_FILE).exists()

    def start_queries(self, bridge: Bridge, lines: Sequence[str]) -> None:
        """Switch to a new bridge and start the queries of `lines`; those of paused lines start when resumed."""
        with self._write_lock, self._state.lock:
            self._bridge = self._kafka.bridge = bridge
            for name in lines:
                view = self._state.lines[name]
                if self._is_paused(name):  # its query gets the new settings when it is resumed
                    self._held_lines.add(name)
                    view.query = PAUSED
                    continue
                self._held_lines.discard(name)
                view.query, view.query_error = "starting", None
                self._send_commands(json.dumps({"take": bridge.line(name).model_dump(mode="json", by_alias=True)}))

    def kill(self) -> None:
        """Kill the driver, its JVM and its workers; the running batch is repeated after the next start."""
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _start_process(self) -> tuple[subprocess.Popen[str], Path]:
        """Start the driver process; return it with its scratch directory."""
        self._bridge.log_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._state.lock:
            self._state.spark = "starting"
        with contextlib.ExitStack() as stack:
            handle = os.open(self.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            stack.callback(os.close, handle)
            directory, lock = create_scratch_dir(self._bridge.state_dir)
            stack.callback(os.close, lock)
            process = subprocess.Popen(
                self.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=handle,
                encoding="utf-8",
                errors="replace",
                # Spark writes files to its working directory; for a cluster see `driver_environment`.
                cwd=directory if is_cluster(self._bridge.spark.master) else self._bridge.state_dir,
                env=driver_environment(self._bridge, directory),
                pass_fds=(lock,),
                start_new_session=True,  # only the supervisor handles Ctrl-C
            )
        self._process = process
        stopped_lines = self.stopped_lines
        lines = tuple(line for line in self._bridge.lines if line.name not in stopped_lines)
        started_bridge = self._bridge.model_copy(update={"lines": lines})
        # ASCII only: PYTHONIOENCODING may set another encoding at the driver's end of the pipe.
        bridge = json.dumps(started_bridge.model_dump(mode="json", by_alias=True))
        hold_commands = [json.dumps({"hold": name}) for name in self._held_lines]
        go_command = ["go"] if self._kafka.ready.is_set() else []  # else sent after Kafka's first answer
        self._send_commands(bridge, *hold_commands, *self._pending_checks, *go_command)
        return process, directory

    def _send_commands(self, *commands: str) -> None:
        with self._write_lock, contextlib.suppress(BrokenPipeError, ValueError):
            if self._process is not None and self._process.stdin is not None:
                self._process.stdin.write("".join(f"{command}\n" for command in commands))
                self._process.stdin.flush()

    def _handle_exit(self, reason: str) -> None:
        pause = self._backoff.next_pause()
        with self._state.lock:
            self._state.spark = "starting again"
            self._state.spark_restarts += 1
            for name in self._state.lines.keys() - self.stopped_lines:
                self._state.lines[name].query = PAUSED if self._is_paused(name) else "starting"
        text = "the same error" if reason == self._last_reason else reason
        retry_text = f"restarting in {pause:.1f} s, messages are still received"
        self._state.add_event(f"spark: {text}; {retry_text} (log: {self.log_path})")
        self._last_reason = reason
        self._stopping.wait(pause)

    def _handle_report(self, text: str) -> None:
        try:
            report = json.loads(text)
            handler = getattr(self, f"_on_{report['kind']}", None)
            if handler is not None:
                with self._state.lock:
                    handler(report)
        except Exception as error:  # noqa: BLE001 - an invalid report does not stop the others
            self._state.add_event(str(unexpected_error("spark's report", error)))

    def _on_ready(self, report: dict[str, Any]) -> None:
        self._last_reason = ""
        self._state.spark = "running"
        self._state.add_event(f"spark: {report['spark']} is up after {report['seconds']:.1f} s")

    def _on_jvm(self, report: dict[str, Any]) -> None:
        self._last_report = report["text"]

    def _on_started(self, report: dict[str, Any]) -> None:
        view = self._state.lines[report["line"]]
        view.query = "running"
        old_remarks, view.remarks = view.remarks, report.get("remarks", ())
        for text in (remark for remark in view.remarks if remark not in old_remarks):
            self._state.add_event(f'line "{view.name}": {text}')

    def _on_noted(self, report: dict[str, Any]) -> None:
        self._state.add_event(report["text"])

    def _on_progress(self, report: dict[str, Any]) -> None:
        view = self._state.lines[report["line"]]
        view.batch_at = float(report["at"])
        view.batch_s = report["millis"].get("triggerExecution", 0) / 1000
        view.batches.observe(view.batch_s)
        if view.query_error is not None:
            self._state.add_event(f'line "{view.name}": runs again')
        view.query_error = None
        if view.name not in self._held_lines:
            view.query = "running"
        self._backoff.reset()

    def _on_failed(self, report: dict[str, Any]) -> None:
        view = self._state.lines[report["line"]]
        retry_in_s = report.get("again_in")
        is_new = view.query_error != report["text"]
        view.query_error = report["text"]
        view.restarts += 1
        view.query = STOPPED if retry_in_s is None else "waiting to retry"
        if is_new or retry_in_s is None:
            waiting_text = "messages wait on disk" if view.direction == "up" else "unread records stay in Kafka"
            consequence = "this line stops" if retry_in_s is None else f"{waiting_text}; retrying"
            self._state.add_event(f'{report["text"]}\nline "{view.name}": {consequence}')

    def _on_held(self, report: dict[str, Any]) -> None:
        self._state.lines[report["line"]].query = PAUSED if self._is_paused(report["line"]) else HELD

    def _on_judged(self, report: dict[str, Any]) -> None:
        self._check_results[report["of"]] = [ConfigError(*error) for error in report["errors"]]
