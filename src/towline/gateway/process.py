"""Gateway process: runs a journal, a Flight service and a pump.

The pump has the main thread; the service runs on Arrow's threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from functools import lru_cache, partial
from typing import IO, Any, Final

import pyarrow as pa
import structlog

from towline import files
from towline.errors import ConfigError, GatewayError, TowlineError
from towline.gateway.access import ServerCertificate, TokenFile
from towline.gateway.endpoint import ERROR_FILE, error_fields, error_from
from towline.gateway.identity import check_checkpoint, check_outbox
from towline.gateway.pump import Pump, row_time
from towline.gateway.service import GatewayService, unexpected_error
from towline.gateway.settings import GatewaySettings
from towline.journal import Journal, Limits, Outbox
from towline.journal.disk import Disk, prepare_directory
from towline.logfile import MAX_LOG_BYTES, LogStream, log_settings
from towline.processes import notify
from towline.schema import OUTBOX_SCHEMA, ROW_SCHEMA
from towline.text import printable, printable_lines
from towline.threads import guarded_thread
from towline.timing import Backoff
from towline.version import revision, version

#: Allocations between two garbage collections: a few dozen chunks instead of a fraction of one.
ALLOCATIONS_PER_COLLECTION = 200_000
#: mallopt(3), and the size from which on a buffer is mapped: larger than a chunk needs.
_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8
_MMAP_THRESHOLD_BYTES: Final = 4 << 20
EXIT_FAILED = 1
EXIT_CONFIG = 2


def main() -> int:
    """Read the settings from standard input, run the gateway, return its exit code."""
    os.environ.pop("NOTIFY_SOCKET", None)  # the notifications are for the service manager of the starter
    try:
        configure_logging(LogStream(sys.stderr, MAX_LOG_BYTES))  # nothing else limits the gateway's own log file
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_CONFIG
    with contextlib.suppress(OSError):  # no socket, so nobody waits for the modules (`towline.gateway.launch`)
        os.write(sys.stdin.fileno(), b"\n")
    return run(GatewaySettings.model_validate_json(sys.stdin.buffer.read()))


def run(settings: GatewaySettings) -> int:
    """Run one gateway until SIGTERM, SIGINT, the end of its owner, or the end of its drain; return the exit code.

    A fatal error is one line on stderr, a record in ``<state_dir>/gateway-error.json``, and an exit code other than 0.
    """
    log = structlog.get_logger("towline.gateway").bind(line=settings.name)
    log.info("begins", version=version(), revision=revision())
    try:
        return_free_memory()
        prepare_directory(settings.state_dir, Disk())
        with contextlib.suppress(PermissionError):  # a volume of root's that lets this user write
            settings.state_dir.chmod(0o700)
        (settings.state_dir / ERROR_FILE).unlink(missing_ok=True)
        with contextlib.ExitStack() as exit_stack:
            _Gateway(settings, exit_stack).run()
    except Exception as error:  # noqa: BLE001 - any error is reported to the starter
        failure = error if isinstance(error, TowlineError) else unexpected_error(settings.name, error)
        log.error("ended", code=failure.code, reason=str(failure))  # noqa: TRY400  # one line, no traceback
        if failure.code != "TL-J23":  # never write to another user's state
            with contextlib.suppress(OSError):  # the log has it
                files.replace(settings.state_dir / ERROR_FILE, json.dumps(error_fields(failure)), sync=False)
        return EXIT_CONFIG if isinstance(failure, ConfigError) else EXIT_FAILED
    log.info("ended", reason="as asked" if settings.drain_s is None else "drained")
    return 0


def configure_logging(stream: Any = None) -> None:
    """Log to stderr or to `stream`: JSON lines with UTC times, or readable text on a terminal.

    Raises as `towline.logfile.log_settings`.
    """
    stream, (level, log_format) = stream or LogStream(sys.stderr), log_settings()
    is_text = stream.isatty() if log_format == "auto" else log_format == "text"
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="%H:%M:%S" if is_text else "iso", utc=not is_text),
            structlog.processors.format_exc_info,  # plain: a renderer's own would print the locals of frames [I12]
            *([_escape_event] if is_text else []),
            structlog.dev.ConsoleRenderer(
                colors=stream.isatty() and "NO_COLOR" not in os.environ,
                exception_formatter=structlog.dev.plain_traceback,
            )
            if is_text
            else structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(stream),
    )
    if not (thread_log := logging.getLogger("towline.threads")).handlers:
        thread_log.addHandler(_ThreadFaultHandler())


def return_free_memory() -> None:
    """Configure the allocators to return large buffers to the system as soon as they are free.

    Arrow's own pool keeps them. glibc raises its mmap threshold with each freed buffer, and each of its arenas keeps
    what the network threads allocated. Messages of 60 MB took 400 MB on the way up and 720 MB on the way down with all
    three, 280 MB and 550 MB without (measured). Without glibc only Arrow's part is set.
    """
    pa.set_memory_pool(pa.system_memory_pool())
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)
        libc.mallopt(_M_ARENA_MAX, 1)


class _ThreadFaultHandler(logging.Handler):
    """Log handler for faults of threads (`towline.threads`)."""

    def emit(self, record: logging.LogRecord) -> None:
        structlog.get_logger("towline.gateway").error(record.getMessage(), code="TL-B55")


def _escape_event(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Escape control characters in texts of brokers and devices for a terminal; JSON escapes by itself."""
    escaped_fields = {name: printable(value) if isinstance(value, str) else value for name, value in event.items()}
    return escaped_fields | {name: printable_lines(event[name]) for name in ("exception",) if name in event}


def oldest_waiting_time(journal: Journal, column: str) -> Callable[[], float | None]:
    """Return a function for the arrival time of a journal's oldest uncommitted row.

    The time is in seconds since 1970, None if no row waits. It is in `column` of the row, which is read once per
    position of the watermark.
    """
    time_of = lru_cache(maxsize=1)(lambda offset: row_time(journal, offset, column))
    return lambda: None if journal.committed >= journal.end else time_of(journal.committed)


class _Gateway:
    def __init__(self, settings: GatewaySettings, resources: contextlib.ExitStack) -> None:
        self._settings = settings
        self._log = structlog.get_logger("towline.gateway").bind(line=settings.name)
        self._failure: TowlineError | None = None
        self._service: GatewayService | None = None
        self._front: NetworkFront | None = None
        if settings.listen is not None:  # checked before a broker is connected; the network process reads them
            TokenFile(settings.listen.token_file)
            ServerCertificate.read(settings.listen.cert_file, settings.listen.key_file)
        #: Seconds since the last write to the journal; 0 at the first start.
        write_times = [stamp[0] / 1e9 for file in settings.inbox_dir.glob("*") if (stamp := files.file_version(file))]
        self._downtime_s = time.time() - max(write_times) if write_times else 0.0
        self._started_at = time.monotonic()
        inbox = Journal.open(settings.inbox_dir, schema=ROW_SCHEMA, limits=settings.journal)
        self._journal = resources.enter_context(inbox)
        if note := self._journal.repair_note:
            self._log.warning("journal repaired", note=note)
        session: Mapping[str, Any] = self._journal.session
        previous_filters = session["subscriptions"] if session.get("client_id") == settings.mqtt_client_id else ()
        if problem := settings.filter_change_error(previous_filters, settings.name):
            raise problem
        check_checkpoint(settings.name, self._journal, settings.checkpoint, is_only_gateway=settings.share is None)
        self._outbox: Outbox | None = None
        self._oldest_waiting = oldest_waiting_time(self._journal, "received_at")
        if settings.outbox is not None:
            limits = Limits(**settings.outbox.model_dump(exclude={"max_age_s", "checkpoint"}))
            outbox = Outbox.open(settings.outbox_dir, schema=OUTBOX_SCHEMA, limits=limits)
            self._outbox = resources.enter_context(outbox)
            if note := self._outbox.repair_note:
                self._log.warning("outbox repaired", note=note)
            check_outbox(settings.name, self._outbox, settings.outbox.checkpoint)
            self._oldest_waiting = oldest_waiting_time(self._outbox, "arrived_at")
        self._start_offset = self._journal.end
        self._pump = Pump(settings, self._journal, self._outbox, on_progress=self._notify)

    def run(self) -> None:
        # A chunk makes some ten thousand lists that die with it: collecting among them cost a tenth of the CPU.
        gc.freeze()
        gc.set_threshold(ALLOCATIONS_PER_COLLECTION)
        with _signal_handlers(self._pump.stop, self._pump.wake_fd):
            if self._settings.owner_pid is not None:
                guarded_thread(self._watch_owner, "owner", self._settings.owner_pid, retry_s=1.0).start()
            serve_thread = guarded_thread(self._serve, "serve", on_fault=self._fail)
            serve_thread.start()
            try:
                self._pump.run()
            finally:
                notify(STOPPING="1")
                serve_thread.join()
                if self._service is not None:
                    self._service.close()  # ends the waiting calls, on the network too
                if self._front is not None:
                    self._front.close()
        if self._failure:
            raise self._failure
        if self._settings.drain_s is not None and not self._pump.is_drained:
            problem, remedy = "it ended before it was drained", "Nothing is lost. Run the same command again."
            raise GatewayError("TL-G58", self._settings.name, problem, remedy)

    def _serve(self) -> None:
        """Publish the endpoint once a broker has answered, so that a wrong password is reported to the starter."""
        self._pump.broker_answered.wait()
        if self._pump.has_ended:
            return
        service = partial(GatewayService, outbox=self._outbox, status=self._status, report_failure=self._fail)
        self._service = service(self._settings, self._journal, self._pump)
        self._log.info("serving", location=self._service.endpoint.location, journal=self._journal.journal_id)
        if self._settings.listen is not None:
            self._front = NetworkFront(self._settings, self._service.endpoint.location)
            self._log.info("listening", **self._front.status())
        notify(READY="1")

    def _notify(self) -> None:
        if self._service is not None:
            self._service.notify()

    def _status(self) -> Mapping[str, object]:
        journal = self._journal
        return {
            **self._pump.status(),
            "guarantee": self._settings.guarantee.value,
            "journaled": journal.end,
            "waiting": journal.end - journal.committed,
            "recovered": journal.repair_note or None,
            "absent_s": self._downtime_s,
            "up_s": time.monotonic() - self._started_at,
            "arrived": journal.end - self._start_offset,
            "oldest": self._oldest_waiting(),
            "measured": {"inbox": journal.disk_status()}
            | ({} if self._outbox is None else {"outbox": self._outbox.disk_status()}),
            **({"listen": self._front.status()} if self._front else {}),
        }

    def _watch_owner(self, pid: int) -> None:
        """Stop the gateway when its owner's process has ended; a pidfd is safe against reuse of the pid."""
        with contextlib.suppress(OSError):  # it is not there any more
            select.select([os.pidfd_open(pid)], [], [])
        self._log.info("owner ended, ending too", owner=pid)
        self._pump.stop()

    def _fail(self, error: BaseException) -> None:
        """Stop the gateway if its journal or service fails: unreachable, it would receive until the disk is full."""
        self._failure = error if isinstance(error, TowlineError) else unexpected_error(self._settings.name, error)
        self._pump.stop()


@contextlib.contextmanager
def _signal_handlers(stop: Callable[[], None], wake_fd: int) -> Iterator[None]:
    """Handle SIGTERM and SIGINT: the first stops cleanly, the second exits at once and loses nothing acknowledged."""
    received_signals: list[int] = []

    def on_signal(number: int, _frame: object) -> None:
        if received_signals:
            os._exit(128 + number)
        received_signals.append(number)
        stop()

    # An ignored signal stays ignored: nohup, or a shell's background job.
    numbers = [number for number in (signal.SIGTERM, signal.SIGINT) if signal.getsignal(number) is not signal.SIG_IGN]
    # The kernel may hand the signal to a thread of Arrow's; the pump must wake up all the same.
    signal.set_wakeup_fd(wake_fd, warn_on_full_buffer=False)
    for number in numbers:
        signal.signal(number, on_signal)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)


#: Timeout for the network process to listen, in seconds: the start of Python, and a port that is not free yet.
_FRONT_START_TIMEOUT_S: Final = 30.0
#: Timeout for the network process to end running calls, in seconds.
FRONT_STOP_TIMEOUT_S: Final = 5.0


class NetworkFront:
    """Supervisor of `towline.gateway.front`; raises the error if the first process can't listen, such as TL-G45.

    Args:
        settings: Settings of the gateway, with ``listen``.
        gateway_location: Location of its unix socket.
        max_bytes: Memory limit; default a quarter of the machine's, 2 GB at least.
    """

    def __init__(self, settings: GatewaySettings, gateway_location: str, *, max_bytes: int | None = None) -> None:
        assert settings.listen is not None
        self._log = structlog.get_logger("towline.gateway").bind(line=settings.name)
        self._front_settings: dict[str, Any] = {
            "name": settings.name,
            "state_dir": str(settings.state_dir),
            "gateway": gateway_location,
            "most_bytes": max_bytes,
            "listen": settings.listen.model_dump(mode="json"),
        }
        self._location = settings.listen.location
        #: Refused calls of earlier processes.
        self._previous_refused = 0
        self._status: dict[str, Any] = {}
        self._closing = threading.Event()
        self._backoff = Backoff(first_s=0.1, max_s=10.0)
        self._thread = guarded_thread(self._supervise, "network", retry_s=1.0)
        self._start()
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], _FRONT_START_TIMEOUT_S)[0] or not self._read_report():
            _stop_process(self._process).close()
            raise self._failure
        self._thread.start()

    def status(self) -> dict[str, Any]:
        """Return the process's last status report; ``running`` says whether it is alive."""
        return {**self._status, "running": self._process.poll() is None}

    def close(self) -> None:
        """Stop the process; waits `FRONT_STOP_TIMEOUT_S` seconds at most for running calls."""
        self._closing.set()
        _stop_process(self._process)
        self._thread.join(FRONT_STOP_TIMEOUT_S)
        _stop_process(self._process).close()  # it may be a process that was started meanwhile

    def _silent_error(self, problem: str) -> GatewayError:
        return GatewayError("TL-G45", self._location, problem, "See the gateway's log.")

    def _start(self) -> None:
        #: Error to raise or log if the process ends or does not report.
        self._failure: TowlineError = self._silent_error("nothing listens yet")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "towline.gateway.front"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # gRPC logs each failed handshake to standard error: strangers would fill the disk.
            env={**os.environ, "GRPC_VERBOSITY": "NONE"},
        )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(self._front_settings) + "\n")
            self._process.stdin.flush()

    def _supervise(self) -> None:
        """Read reports until the process ends, then restart it; only the first one has to start successfully."""
        while True:
            while self._read_report():
                self._backoff.reset()
            _stop_process(self._process).close()
            if self._closing.is_set():
                return
            code, reason = self._process.returncode, self._failure.problem
            self._log.warning("the network's process ended", code="TL-G49", exit=code, reason=reason)
            self._previous_refused = int(self._status["refused"])
            if self._closing.wait(self._backoff.next_pause()):
                return
            self._start()

    def _read_report(self) -> bool:
        """Read the next JSON report of the process; return False when it ends or fails."""
        assert self._process.stdout is not None
        report = json.loads(self._process.stdout.readline() or "{}")
        if "error" in report:
            self._failure = error_from(report["error"])
        if "location" not in report:
            return False
        self._failure = self._silent_error("it was killed")
        self._status = report | {"refused": report["refused"] + self._previous_refused}
        # The next process listens on the same port, also if it was chosen by the system.
        self._front_settings["listen"]["address"] = report["location"].partition("://")[2]
        return True


def _stop_process(process: subprocess.Popen[str]) -> IO[str]:
    """Close the process's standard input, which ends it, and kill it after a timeout; return its standard output."""
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(OSError):
        process.stdin.close()
    try:
        process.wait(FRONT_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    return process.stdout
