"""The gateway process: a journal, a Flight service and a pump, from start to the last frame.

The pump has the main thread; the service runs on Arrow's own.
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
from functools import lru_cache
from typing import IO, Any, Final

import pyarrow as pa
import structlog
from pydantic import ValidationError

from towline import files
from towline.errors import ConfigError, GatewayError, TowlineError
from towline.gateway.access import ServerCertificate, TokenFile
from towline.gateway.endpoint import ERROR_FILE, error_fields, error_from
from towline.gateway.identity import check_checkpoint, check_outbox
from towline.gateway.pump import Pump, time_of_row
from towline.gateway.service import InboxService, unforeseen
from towline.gateway.settings import GatewaySettings
from towline.journal import Journal, Limits, Outbox
from towline.journal.disk import Disk, prepare
from towline.logfile import MOST_BYTES, LogStream, log_settings
from towline.processes import notify
from towline.schema import OUTBOX_SCHEMA, ROW_SCHEMA
from towline.text import printable, printable_lines
from towline.threads import guarded_thread
from towline.timing import Backoff
from towline.version import revision, version

#: Allocations between two collections: a few dozen chunks instead of a fraction of one.
ALLOCATIONS_PER_COLLECTION = 200_000
#: mallopt(3), and the bytes of a buffer from which on it is mapped: larger than what a chunk needs.
_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8
_MAPPED_FROM: Final = 4 << 20
EXIT_FAILED = 1
EXIT_CONFIG = 2


def main() -> int:
    """Read the settings from standard input, run the gateway, return its exit code."""
    os.environ.pop("NOTIFY_SOCKET", None)  # the service is who started it
    try:
        configure_logging(LogStream(sys.stderr, MOST_BYTES))  # the file is ours, and nobody else looks after it
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_CONFIG
    try:
        settings = GatewaySettings.model_validate_json(sys.stdin.buffer.read())
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "settings"
        sys.stderr.write(f"{place}: {first['msg']}.   [TL-C01]\n")
        return EXIT_CONFIG
    return run(settings)


def run(settings: GatewaySettings) -> int:
    """Run one gateway until SIGTERM, SIGINT, the end of its owner, or the end of its drain; return the exit code.

    A fatal error is one line on stderr, a record in ``<state_dir>/gateway-error.json``, and a code other than 0.
    """
    log = structlog.get_logger("towline.gateway").bind(line=settings.name)
    log.info("begins", version=version(), revision=revision())
    try:
        give_memory_back()
        prepare(settings.state_dir, Disk())
        with contextlib.suppress(PermissionError):  # a volume of root's that lets this user write
            settings.state_dir.chmod(0o700)
        (settings.state_dir / ERROR_FILE).unlink(missing_ok=True)
        with contextlib.ExitStack() as opened:
            _Gateway(settings, opened).run()
    except Exception as error:  # noqa: BLE001 - whoever started us learns why, whatever it was
        failure = error if isinstance(error, TowlineError) else unforeseen(settings.name, error)
        log.error("ended", code=failure.code, reason=str(failure))  # noqa: TRY400  # one line, no traceback
        if failure.code != "TL-J23":  # nothing is written where another user's state is
            with contextlib.suppress(OSError):  # the log has it
                files.replace(settings.state_dir / ERROR_FILE, json.dumps(error_fields(failure)), synced=False)
        return EXIT_CONFIG if isinstance(failure, ConfigError) else EXIT_FAILED
    log.info("ended", reason="as asked" if settings.drain_s is None else "drained")
    return 0


def configure_logging(stream: Any = None) -> None:
    """Log to stderr, or to another stream: JSON lines with UTC times, or for people when it is a terminal.

    Raises as `towline.logfile.log_settings`.
    """
    stream, (level, form) = stream or LogStream(sys.stderr), log_settings()
    text = stream.isatty() if form == "auto" else form == "text"
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="%H:%M:%S" if text else "iso", utc=not text),
            structlog.processors.format_exc_info,  # plain: a renderer's own would print the locals of frames [I12]
            *([_escaped] if text else []),
            structlog.dev.ConsoleRenderer(
                colors=stream.isatty() and "NO_COLOR" not in os.environ,
                exception_formatter=structlog.dev.plain_traceback,
            )
            if text
            else structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(stream),
    )
    if not (threads := logging.getLogger("towline.threads")).handlers:
        threads.addHandler(_Faults())


def give_memory_back() -> None:
    """Let large buffers go back to the system as soon as they are free.

    Arrow's own pool keeps them, glibc raises the size from which on it maps buffers with each one that is freed, and
    each of its arenas keeps what the network's threads took piece by piece. Messages of 60 MB took 400 MB on the way
    up and 720 MB on the way down with all three, 280 MB and 550 MB without (measured). Where there is no glibc, its
    part is left out.
    """
    pa.set_memory_pool(pa.system_memory_pool())
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _MAPPED_FROM)
        libc.mallopt(_M_ARENA_MAX, 1)


class _Faults(logging.Handler):
    """Faults of threads (`towline.threads`), as lines of this log."""

    def emit(self, record: logging.LogRecord) -> None:
        structlog.get_logger("towline.gateway").error(record.getMessage(), code="TL-B55")


def _escaped(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """What brokers and devices said, fit for a terminal; JSON escapes by itself."""
    shown = {name: printable(value) if isinstance(value, str) else value for name, value in event.items()}
    return shown | {name: printable_lines(event[name]) for name in ("exception",) if name in event}


def waiting_since(journal: Journal, column: str) -> Callable[[], float | None]:
    """Says when the first message came that still waits in a journal, in seconds since 1970; None when nothing waits.

    A row, which has that time in `column`, is read once for each place the watermark comes to.
    """
    time_of = lru_cache(maxsize=1)(lambda offset: time_of_row(journal, offset, column))
    return lambda: None if journal.committed >= journal.end else time_of(journal.committed)


class _Gateway:
    def __init__(self, settings: GatewaySettings, opened: contextlib.ExitStack) -> None:
        self._settings = settings
        self._log = structlog.get_logger("towline.gateway").bind(line=settings.name)
        self._failure: TowlineError | None = None
        self._service: InboxService | None = None
        self._front: NetworkFront | None = None
        if settings.listen is not None:  # judged before a broker is asked; they are read by a process of its own
            TokenFile(settings.listen.token_file)
            ServerCertificate.read(settings.listen)
        #: How long nothing had been written here, in seconds; 0 at the first start.
        written = [version[0] / 1e9 for file in settings.inbox.glob("*") if (version := files.version(file))]
        self._absent_s = time.time() - max(written) if written else 0.0
        self._started = time.monotonic()
        self._journal = opened.enter_context(Journal.open(settings.inbox, schema=ROW_SCHEMA, limits=settings.journal))
        if note := self._journal.repair:
            self._log.warning("journal repaired", note=note)
        session: Mapping[str, Any] = self._journal.session
        former = session["subscriptions"] if session.get("client_id") == settings.mqtt_client_id else ()
        if problem := settings.passing_problem(former, settings.name):
            raise problem
        check_checkpoint(settings.name, self._journal, settings.checkpoint, alone=settings.share is None)
        self._outbox: Outbox | None = None
        self._oldest = waiting_since(self._journal, "received_at")
        if settings.outbox is not None:
            limits = Limits(**settings.outbox.model_dump(exclude={"max_age_s", "checkpoint", "number"}))
            self._outbox = opened.enter_context(Outbox.open(settings.outgoing, schema=OUTBOX_SCHEMA, limits=limits))
            if note := self._outbox.repair:
                self._log.warning("outbox repaired", note=note)
            check_outbox(settings.name, self._outbox, settings.outbox.checkpoint, settings.outbox.number)
            self._oldest = waiting_since(self._outbox, "arrived_at")
        self._began = self._journal.end
        self._pump = Pump(settings, self._journal, self._outbox, news=self._notify)

    def run(self) -> None:
        # A chunk makes some ten thousand lists that die with it: collecting among them cost a tenth of the CPU.
        gc.freeze()
        gc.set_threshold(ALLOCATIONS_PER_COLLECTION)
        with _signals(self._pump.stop, self._pump.wake_fd):
            if self._settings.owner_pid is not None:
                guarded_thread(self._watch_owner, "owner", self._settings.owner_pid, again_s=1.0).start()
            serving = guarded_thread(self._serve, "serve", ended=self._unserved)
            serving.start()
            try:
                self._pump.run()
            finally:
                notify(STOPPING="1")
                serving.join()
                if self._service is not None:
                    self._service.close()  # who waits is answered by it, on the network too
                if self._front is not None:
                    self._front.close()
        if self._failure:
            raise self._failure
        if self._settings.drain_s is not None and not self._pump.drained:
            what, do = "it ended before it was drained", "Nothing is lost. Run the same command again."
            raise GatewayError("TL-G58", self._settings.name, what, do)

    def _serve(self) -> None:
        """Publish the endpoint once a broker has answered: whoever started us learns of a wrong password."""
        self._pump.heard.wait()
        if self._pump.ended:
            return
        self._service = InboxService(
            self._settings, self._journal, self._pump, outbox=self._outbox, status=self._status, failed=self._failed
        )
        self._log.info("serving", location=self._service.endpoint.location, journal=self._journal.journal_id)
        if self._settings.listen is not None:
            self._front = NetworkFront(self._settings, self._service.endpoint.location)
            self._log.info("listening", **self._front.status())
        notify(READY="1")

    def _unserved(self, error: BaseException) -> None:
        """A gateway that nobody can reach must end, not receive until its disk is full; raised by `run`."""
        self._failed(error if isinstance(error, TowlineError) else unforeseen(self._settings.name, error))

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
            "recovered": journal.repair or None,
            "absent_s": self._absent_s,
            "up_s": time.monotonic() - self._started,
            "arrived": journal.end - self._began,
            "oldest": self._oldest(),
            "measured": {"inbox": journal.measured()}
            | ({} if self._outbox is None else {"outbox": self._outbox.measured()}),
            **({"listen": self._front.status()} if self._front else {}),
        }

    def _watch_owner(self, pid: int) -> None:
        """End when the process has ended; a pidfd can't be fooled by a pid that is used again."""
        with contextlib.suppress(OSError):  # it is not there any more
            select.select([os.pidfd_open(pid)], [], [])
        self._log.info("owner ended, ending too", owner=pid)
        self._pump.stop()

    def _failed(self, error: TowlineError) -> None:
        self._failure = error
        self._pump.stop()


@contextlib.contextmanager
def _signals(stop: Callable[[], None], wake_fd: int) -> Iterator[None]:
    """SIGTERM and SIGINT ask for a clean end; a second one ends at once, which loses nothing acknowledged."""
    asked: list[int] = []

    def on_signal(number: int, _frame: object) -> None:
        if asked:
            os._exit(128 + number)
        asked.append(number)
        stop()

    # One that is ignored stays so: nohup, or a shell's background job.
    numbers = [one for one in (signal.SIGTERM, signal.SIGINT) if signal.getsignal(one) is not signal.SIG_IGN]
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


#: Longest time for it to listen, in seconds: the start of Python, and a port that is not free yet.
_START_S: Final = 30.0
#: Longest time for the process that faces the network to end calls that run, in seconds.
END_S: Final = 5.0


class NetworkFront:
    """Keeps `towline.gateway.front` running, and raises what keeps the first one from listening, such as TL-G45.

    Args:
        settings: Of the gateway; it listens.
        gateway: Location of its unix socket.
        most_bytes: What it may have in memory; default a quarter of the machine's, 2 GB at least.
    """

    def __init__(self, settings: GatewaySettings, gateway: str, *, most_bytes: int | None = None) -> None:
        assert settings.listen is not None
        self._log = structlog.get_logger("towline.gateway").bind(line=settings.name)
        self._told: dict[str, Any] = {
            "name": settings.name,
            "state_dir": str(settings.state_dir),
            "gateway": gateway,
            "most_bytes": most_bytes,
            "listen": settings.listen.model_dump(mode="json"),
        }
        self._status: dict[str, Any] = {}
        self._where = settings.listen.location
        #: What is to be told where the process ends, or says nothing.
        self._failure: TowlineError = self._silent("nothing listens yet")
        self._heard = threading.Event()
        self._closing = threading.Event()
        self._pauses = Backoff(first=0.1, most=10.0)
        self._process = self._start()
        self._thread = guarded_thread(self._keep, "network", again_s=1.0)
        self._thread.start()
        self._heard.wait(_START_S)
        if not self._status:
            self.close()
            raise self._failure

    def _silent(self, what: str) -> GatewayError:
        return GatewayError("TL-G45", self._where, what, "See the gateway's log.")

    def status(self) -> dict[str, Any]:
        """What it said last; ``running`` tells whether it is there."""
        return {**self._status, "running": self._process.poll() is None}

    def close(self) -> None:
        """Let it end; calls that hang are not waited for."""
        self._closing.set()
        _end(self._process)
        self._thread.join(END_S)
        _end(self._process).close()  # it may be one that was started meanwhile

    def _start(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "towline.gateway.front"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # gRPC has a line on standard error for each handshake that fails: strangers would fill the disk.
            env={**os.environ, "GRPC_VERBOSITY": "NONE"},
        )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(self._told) + "\n")
            process.stdin.flush()
        return process

    def _keep(self) -> None:
        """Hear it until it ends, and start another; only the first one has to come up."""
        while True:
            self._hear(self._process, int(self._status.get("refused", 0)))
            output = _end(self._process)
            self._heard.set()
            if self._closing.is_set() or not self._status:
                return
            code, reason = self._process.returncode, self._failure.what
            self._log.warning("the network's process ended", code="TL-G49", exit=code, reason=reason)
            if self._closing.wait(self._pauses.next()):
                return
            self._failure = self._silent("it was killed")
            self._process = self._start()
            output.close()

    def _hear(self, process: subprocess.Popen[str], refused_before: int) -> None:
        """Hear it until it ends."""
        assert process.stdout is not None
        for line in iter(process.stdout.readline, ""):
            words = json.loads(line)
            if "error" in words:
                self._failure = error_from(words["error"])
                return
            words["refused"] += refused_before
            self._status, self._failure = words, self._silent("it was killed")
            self._pauses.reset()
            # Another one listens on the same port, whichever was free at first.
            self._told["listen"]["address"] = words["location"].partition("://")[2]
            self._heard.set()


def _end(process: subprocess.Popen[str]) -> IO[str]:
    """Close its standard input, which ends it, in a while by force; its standard output."""
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(OSError):
        process.stdin.close()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    return process.stdout
