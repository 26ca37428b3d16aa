"""Supervisor of a bridge, `towline run`: starts gateways and the Spark driver, restarts them, shows the account.

It runs without Spark. Gateways start first and end last: they receive while Spark or Kafka is down. The driver starts
queries once Kafka has answered; a line whose topics do not exist then waits for them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from functools import partial

from towline import files
from towline.bridge.config.file import load
from towline.bridge.config.model import AnyLine, Bridge
from towline.bridge.kafka_source import with_kafka_jars
from towline.bridge.lines.identity import assign_identities, record_lines, removed_line_notes
from towline.bridge.runtime.child_supervisors import (
    DriverSupervisor,
    GatewaySupervisor,
    KafkaSupervisor,
    unexpected_error,
)
from towline.bridge.runtime.reload import Reloader
from towline.bridge.runtime.screen import Screen, line_state
from towline.bridge.runtime.state import RESTART_FILE, BridgeState, consume_request
from towline.errors import ConfigError, TowlineError
from towline.gateway.launch import open_state_lock
from towline.kafka.clientconfig import insecure_settings
from towline.logfile import rotate_log
from towline.processes import notify, stat_fields
from towline.spark.java import cache_directory, check_java
from towline.spark.session import check_pyspark
from towline.text import count_text, printable
from towline.threads import call_in_thread
from towline.version import release

EXIT_INTERRUPTED = 130
#: Seconds between two checks of the supervisors.
TICK_S = 0.25
#: Longest wait for a running reload to abort, in seconds.
RELOAD_ABORT_S = 2.0
#: Longest wait for the driver to finish its batches, in seconds; then it is killed, and the batch is repeated.
DRIVER_STOP_S = 13.0
#: Longest wait for the gateways to end, in seconds. The sum is below 30 s, the usual limit of service managers.
GATEWAY_STOP_S = 8.0
#: The same after a second interrupt.
FORCED_STOP_S = 2.0


def _has_terminal() -> bool:
    """Return True if the process has a controlling terminal: tty_nr of proc(5) is not 0."""
    return (stat_fields(os.getpid()) or ["0"] * 5)[4] != "0"


class Supervisor:
    """Supervisor of a bridge; `observe` gets its state before anything is started."""

    def __init__(self, bridge: Bridge, screen: Screen, observe: Callable[[BridgeState], None] = lambda _: None) -> None:
        self._bridge = bridge
        self._screen = screen
        self._observe = observe
        self._interrupts = 0
        #: A service got SIGHUP, and no reload has started since.
        self._reload_requested = False
        #: The last reload or restart; a done future before the first.
        self._reload_task = Future[None]()
        self._reload_task.set_result(None)
        #: Last notification of the service manager.
        self._last_notification: dict[str, str] = {}
        #: Action of a second interrupt; None before anything was started.
        self._on_second_interrupt: Callable[[], None] | None = None
        self._stopping = threading.Event()
        self._spark_stopping = threading.Event()

    def run(self) -> int:
        """Run until Ctrl-C, SIGTERM, the end of the terminal, or until no line can continue.

        Returns:
            0 after a requested stop, 130 after two interrupts.

        Raises:
            ConfigError: TL-B10, another bridge runs in this state directory; TL-B20, TL-B21, a line may have been
                renamed or copied; TL-C.., every line has an error.
            TowlineError: The error that stops every line.
        """
        file = bridge = self._bridge
        with lock_state_directory(bridge), _handle_signals(self._on_interrupt, self._on_hangup):
            _check_members(bridge)
            check_pyspark()
            check_java()
            cache_directory()  # TL-C193, before a file of it is on a class path
            self._screen.print_event(f"towline {release()}")
            bridge.log_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            source_error: ConfigError | None = None
            try:
                bridge = self._bridge = with_kafka_jars(bridge)
            except ConfigError as error:
                if not bridge.uplinks:
                    raise
                source_error = error  # of downlinks; uplinks need no jar
            is_retiring = any(line.gateway.drain_s is not None for line in bridge.lines)
            if not is_retiring:
                for text in (*assign_identities(bridge), *removed_line_notes(bridge)):
                    self._screen.print_event(text)
                record_lines(bridge)
            insecure = insecure_settings(bridge.kafka.client_settings())
            for text in insecure:
                self._screen.print_event(f"insecure: [kafka] {text}")
            directions = {line.name: line.direction for line in bridge.lines}
            self._state = BridgeState(bridge.name, bridge.state_dir, directions, insecure, bridge.file)
            self._observe(self._state)
            self._kafka = KafkaSupervisor(bridge, self._state, self._spark_stopping)
            self._driver = DriverSupervisor(bridge, self._state, self._kafka, self._spark_stopping)
            for line in bridge.downlinks if source_error else ():
                self._driver.stop_line(line.name, str(source_error))
            self._gateways = {line.name: self._create_gateway(line) for line in bridge.lines}
            shared_parts = self._state, self._driver, self._gateways, self._create_gateway, self._spark_stopping
            self._reloader = Reloader(file, bridge, lambda: _check_members(load(file.file)), *shared_parts)
            self._driver.apply_pauses()
            self._on_second_interrupt = self._driver.kill
            for child in (*self._gateways.values(), self._kafka, self._driver):
                child.start()
            try:
                fatal_error = self._watch()
            finally:
                self._shut_down()
            if fatal_error is not None:
                raise fatal_error
        return EXIT_INTERRUPTED if self._interrupts > 1 else 0

    def _create_gateway(self, line: AnyLine) -> GatewaySupervisor:
        return GatewaySupervisor(line, self._bridge, self._state, self._stopping)

    def _watch(self) -> TowlineError | None:
        """Show the account until a stop is requested; return an error that stops the bridge."""
        saved_at = 0.0
        for name in ("", *self._gateways):  # done by this start
            consume_request(self._bridge.state_dir / name / RESTART_FILE)
        while not self._interrupts:
            now = time.monotonic()
            if now - saved_at >= 1.0:
                saved_at = now
                self._state.save()
                rotate_log(self._driver.log_path)
            self._update_screen()
            if self._reload_task.done():
                self._start_requests()
            if fatal_error := self._fatal_error():
                return fatal_error
            self._stopping.wait(TICK_S)
        return None

    def _start_requests(self) -> None:
        """Start a requested reload or restart; requests during a reload wait, and equal ones are merged."""
        self._driver.apply_pauses()
        names, state_dir = ("", *self._state.lines), self._bridge.state_dir
        requests = (name for name in names if consume_request(state_dir / name / RESTART_FILE))
        if (line := next(requests, "" if self._reload_requested else None)) is not None:
            if not line:
                self._reload_requested = False
            self._reload_task = call_in_thread(partial(self._reloader.reload, line), "reload")

    def _update_screen(self) -> None:
        self._state.heartbeat = time.monotonic()
        for text in self._state.take_events():
            self._screen.print_event(text)
        with self._state.lock:
            self._screen.show(self._state)
            views = self._state.lines.values()
            states = [f"{view.name}: {line_state(view, self._state.spark)}" for view in views]
            all_answered = all(view.status or view.gateway_error for view in views)
        notification = ({"READY": "1"} if all_answered else {}) | {"STATUS": printable("; ".join(states))}
        if notification != self._last_notification:
            self._last_notification = notification
            notify(**notification)

    def _fatal_error(self) -> TowlineError | None:
        """Return the error that ends the bridge: of Kafka's settings, of all lines, or of a supervisor thread."""
        for child in (*self._gateways.values(), self._kafka, self._driver):
            if child.is_active and not child.is_alive():
                return unexpected_error(child.location)
        if fatal_error := self._kafka.fatal_error or self._driver.fatal_error:
            return fatal_error
        gateways = [*self._gateways.values()]
        failed_gateways = [child for child in gateways if child.fatal_error is not None]
        if len(failed_gateways) == len(gateways):
            return failed_gateways[0].fatal_error
        stopped_lines = {child.line.name for child in failed_gateways} | self._driver.stopped_lines
        if len(stopped_lines) == len(gateways):
            names = ", ".join(sorted(stopped_lines))
            remedy = "Correct the errors above and start again; received messages wait on disk."
            return ConfigError("TL-B04", str(self._bridge.file), f"no line can run ({names})", remedy)
        return None

    def _on_interrupt(self) -> None:
        self._interrupts += 1
        if self._on_second_interrupt is None:
            raise KeyboardInterrupt  # during a download by Maven
        if self._interrupts > 1:
            self._on_second_interrupt()

    def _on_hangup(self) -> None:
        self._reload_requested = True

    def _shut_down(self) -> None:
        """Stop Spark first, so that the gateways can commit its last batch; then all gateways at once."""
        notify(STOPPING="1")
        deadline = time.monotonic() + DRIVER_STOP_S
        has_running_query = any(view.query == "running" for view in self._state.lines.values())
        if self._interrupts == 1 and has_running_query:
            self._screen.print_event("stopping: the running batch is finished first (Ctrl-C again stops at once)")
        self._spark_stopping.set()
        wait([self._reload_task], RELOAD_ABORT_S)
        if has_running_query:
            call_in_thread(self._driver.stop, "stop")  # a frozen driver does not read the command
        else:
            self._driver.kill()
        while self._driver.is_alive() and self._interrupts < 2 and time.monotonic() < deadline:
            self._driver.join(TICK_S)
            self._state.save()
            self._update_screen()
        if self._driver.is_alive() and self._interrupts < 2:
            seconds = f"{DRIVER_STOP_S:.0f} s"
            self._screen.print_event(f"Spark did not end within {seconds}: its batch is repeated after the next start")
        self._driver.kill()
        self._driver.join(2.0)
        self._stopping.set()
        interrupts = self._interrupts
        deadline = time.monotonic() + (FORCED_STOP_S if interrupts > 1 else GATEWAY_STOP_S)
        tasks = [
            call_in_thread(partial(child.end, deadline, poll_first=True), f"end {child.name}")
            for child in self._gateways.values()
        ]
        while self._interrupts == interrupts and wait(tasks, 0.02).not_done and time.monotonic() < deadline + TICK_S:
            self._state.save()
        self._update_screen()
        self._state.save(has_ended=True)
        for text in self._final_report():
            self._screen.print_event(text)

    def _final_report(self) -> Iterator[str]:
        for name, view in self._state.lines.items():
            if (account := view.account) is None:
                if view.status:
                    yield f'line "{name}": no gateway answers; messages on disk stay there, their number is unknown'
                continue
            yield f'line "{name}": {account.sentence()}'
            if account.pending:
                yield f'line "{name}": {count_text(account.pending)} on disk; the next start delivers them'
            status = view.status
            if view.gateways:
                yield f'line "{name}": its gateways continue'
            elif status.get("session_kept_s") and status["state"] == "online" and not status.get("drain"):
                yield f'line "{name}": the broker keeps the session {status["client_id"]}'


def _check_members(bridge: Bridge) -> Bridge:
    """Raise TL-C127 for a line with members but without locations: a bridge does not start members."""
    for line in bridge.uplinks:
        if line.members and not line.gateways:
            problem = f'line "{line.name}" has {len(line.members)} gateways, and their locations are missing'
            remedy = 'Start each with towline gateway --member NAME, and give gateways = ["grpc+tls://HOST:PORT", ...].'
            raise ConfigError("TL-C127", str(bridge.file), problem, remedy)
    return bridge


@contextlib.contextmanager
def lock_state_directory(bridge: Bridge) -> Iterator[None]:
    """Lock the state directory for this bridge until the context ends.

    Raises:
        ConfigError: TL-B10, another bridge has the lock.
    """
    handle = open_state_lock(bridge.state_dir, "bridge.lock")
    try:
        if not files.try_lock(handle):
            pid = os.pread(handle, 32, 0).decode(errors="replace").strip() or "unknown"
            remedy = "Stop that one first, or give this bridge a state_dir of its own."
            raise ConfigError("TL-B10", str(bridge.state_dir), f"a bridge runs here (pid {pid})", remedy)
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(handle)


@contextlib.contextmanager
def _handle_signals(on_interrupt: Callable[[], None], on_hangup: Callable[[], None]) -> Iterator[None]:
    """Handle SIGINT, SIGTERM and SIGHUP, and restore the former handlers at the end.

    Ignored SIGINT and SIGTERM stay ignored. SIGHUP is about the end of the terminal, as SIGTERM; `on_hangup` is for a
    process that has none, or that was started with ``nohup``.
    """
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    ignored = [number for number in signals if signal.getsignal(number) is signal.SIG_IGN]  # background job of a script
    callbacks = dict.fromkeys((number for number in signals if number not in ignored), on_interrupt)
    if signal.SIGHUP in ignored or not _has_terminal():
        callbacks[signal.SIGHUP] = on_hangup
    old_handlers = {number: signal.signal(number, lambda *_, call=call: call()) for number, call in callbacks.items()}
    try:
        yield
    finally:
        for number, handler in old_handlers.items():
            signal.signal(number, handler)
