"""The supervisor's keepers: one thread for each child, which starts it, watches it and starts it again."""

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
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from towline.bridge.runtime.backoff import Backoff
from towline.bridge.runtime.downaccount import DownCounts
from towline.bridge.runtime.failures import NO_JVM
from towline.bridge.runtime.recovery import PERMANENT, refused
from towline.bridge.runtime.surroundings import check_java, environment, scratch
from towline.errors import (
    ConfigError,
    GatewayError,
    JournalDamaged,
    JournalLocked,
    KafkaError,
    Refused,
    SessionUnknown,
    SetupError,
    TowlineError,
)
from towline.gateway.client import GatewayClient
from towline.gateway.endpoint import GatewayEndpoint
from towline.gateway.launch import ensure

if TYPE_CHECKING:
    from towline.bridge.config.model import AnyLine, Bridge
    from towline.bridge.runtime.board import BridgeState, LineView

__all__ = ["DriverKeeper", "GatewayKeeper", "KafkaKeeper", "grown", "unforeseen"]

#: Seconds between two questions to a gateway.
ASK_S = 0.5
#: A gateway that leaves questions unanswered this often is looked for again.
_SILENCES = 3
#: What a person has to mend before another try makes sense.
_FATAL = (ConfigError, Refused, SessionUnknown, JournalLocked, JournalDamaged)


class _Keeper(threading.Thread, ABC):
    """A thread that goes on whatever happens in it: what it keeps running would end with it, and nobody would know."""

    #: What it starts, and whose that is, for messages.
    what = ""
    where = ""

    def run(self) -> None:
        """Do a round after the other until there is nothing left to do."""
        while self.wanted:
            try:
                self._round()
            except TowlineError as error:
                self._failed(error)
            except OSError as error:
                self._failed(_no_start(self.where, self.what, error))
            except Exception as error:  # noqa: BLE001 - told, and tried again
                self._failed(unforeseen(self.where, error))

    @property
    @abstractmethod
    def wanted(self) -> bool:
        """Whether there is still something to do; a thread that has ended before is a fault."""

    @abstractmethod
    def _round(self) -> None:
        """Start what is kept and stay with it until it ends."""

    @abstractmethod
    def _failed(self, error: TowlineError) -> None:
        """Tell what ended a round, and wait."""


class GatewayKeeper(_Keeper):
    """Keeps one line's gateway running and knows its account.

    Args:
        line: Whose gateway.
        file: The bridge file, for messages.
        board: Where its status goes.
        log: File for its standard error.
        stopping: Set when the bridge ends.
    """

    what = "the gateway"

    def __init__(self, line: AnyLine, file: Path, board: BridgeState, log: Path, stopping: threading.Event) -> None:
        super().__init__(name=f"gateway {line.name}", daemon=True)
        self.line = line
        self.where = f'line "{line.name}"'
        self._file = file
        #: The error that only a person can mend, or None.
        self.fatal: TowlineError | None = None
        #: Set once the gateway has answered.
        self.up = threading.Event()
        self._board = board
        self._log = log
        self._stopping = stopping
        self._backoff = Backoff(first=0.5, most=15.0)
        self._told: str | None = None

    @property
    def wanted(self) -> bool:
        """Until the bridge ends, or only a person can help."""
        return self.fatal is None and not self._stopping.is_set()

    def _round(self) -> None:
        with ensure(self.line.gateway, owner_pid=os.getpid(), log=self._log) as client:
            self._online()
            self._ask(client)

    def end(self, *, at_once: bool = False) -> None:
        """Ask a gateway that is ours to end: it acknowledges what is safe and leaves its session alive."""
        endpoint = GatewayEndpoint.read(self.line.gateway.state_dir)
        if endpoint is None or endpoint.owner_pid != os.getpid() or endpoint.process.gone():
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(endpoint.pid, signal.SIGTERM)
        deadline = time.monotonic() + (0 if at_once else 15)
        while not endpoint.process.gone() and time.monotonic() < deadline:
            time.sleep(0.02)

    @property
    def _view(self) -> LineView:
        return self._board.lines[self.line.name]

    def _online(self) -> None:
        again = self.up.is_set()
        self.up.set()
        with self._board.lock:
            self._view.gateway_error = None
            self._view.gateway_restarts += again
        if again:
            self._say("the gateway is back; what it had acknowledged is on disk")

    def _ask(self, client: GatewayClient) -> None:
        silent = 0
        while not self._stopping.wait(ASK_S):
            try:
                status = client.status(timeout_s=5.0)
            except GatewayError:
                silent += 1
                if silent >= _SILENCES or self._gone():
                    if not self._stopping.is_set():
                        self._say("the gateway has ended; starting it again")
                    return
                continue
            silent = 0
            self._backoff.reset()
            self._take(status)

    def _say(self, text: str) -> None:
        """Tell an event, and whose it is; a gateway begins its errors with the name of its line."""
        text = text.removeprefix(f"{self.line.name} at ").removeprefix(f"{self.line.name}: ")
        self._board.say(text if self.where in text else f"{self.where}: {text}")

    def _gone(self) -> bool:
        endpoint = GatewayEndpoint.read(self.line.gateway.state_dir)
        return endpoint is None or endpoint.process.gone()

    def _take(self, status: dict[str, Any]) -> None:
        with self._board.lock:
            self._view.hear(status)
        trouble = (status.get("last_error") or {}).get("text", "")
        if trouble != self._told and (trouble or status.get("state") == "online"):
            full = "[TL-J" in (self._told or "")
            self._told = trouble
            again = "there is room again, and messages are received"
            self._say(trouble or (again if full else f"connected to {status.get('broker')}"))
        for told in grown(self._view.before, status):
            self._say(told)
        self._view.before = status

    def _failed(self, error: TowlineError) -> None:
        if self._stopping.is_set():
            return
        error = refused(self.line, self._file, error) or error
        if error.code in PERMANENT or (isinstance(error, _FATAL) and not self.up.is_set()):
            self.fatal = error
        with self._board.lock:
            fresh = self._view.gateway_error != str(error)
            self._view.gateway_error = str(error)
        if fresh:
            self._say(str(error))
        if self.fatal is None:
            self._stopping.wait(self._backoff.next())


def grown(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """What a gateway counts only when a promise is at stake, told when it happens: once for what may come in crowds."""
    if now.get("sessions_lost", 0) > before.get("sessions_lost", 0):
        what = "the broker lost this client's session, and every message that only the session held"
        yield f"{what}. Let the broker keep sessions on disk.   [TL-M22]"
    first, degraded = ((told.get("outbox") or {}).get("degraded", 0) for told in (before, now))
    if degraded and not first:
        what = "the broker answers QoS 2 as if it were QoS 1: from now on a message may be doubled"
        yield f'{what}. Take a broker with QoS 2, or guarantee = "at_least_once".   [TL-B58]'


class KafkaKeeper(_Keeper):
    """Waits for Kafka and sees that the fixed topics are there, before any query begins.

    Args:
        bridge: Its Kafka and its topics.
        board: Where Kafka's state goes.
        stopping: Set when the bridge ends.
    """

    what = "Kafka's client"
    where = "kafka"

    def __init__(self, bridge: Bridge, board: BridgeState, stopping: threading.Event) -> None:
        super().__init__(name="kafka", daemon=True)
        #: Set once every fixed topic is there.
        self.ready = threading.Event()
        #: What only a person can mend: a missing topic, a wrong setting.
        self.fatal: TowlineError | None = None
        self._bridge = bridge
        self._board = board
        self._stopping = stopping
        self._backoff = Backoff(first=0.5, most=10.0)

    @property
    def wanted(self) -> bool:
        """Until Kafka has answered, and has all topics."""
        return self.fatal is None and not self.ready.is_set() and not self._stopping.is_set()

    def _round(self) -> None:
        self._look()

    def _look(self) -> None:
        from towline.kafka.admin import create_topics, missing_topics  # noqa: PLC0415 - loads librdkafka

        client, kafka = self._bridge.kafka.client(), self._bridge.kafka
        missing = missing_topics(client, self._bridge.topics, timeout=5.0)
        if missing and kafka.create_topics is not None:
            plan = kafka.create_topics
            made = create_topics(client, dict.fromkeys(missing, plan.partitions), replication=plan.replication_factor)
            self._board.say(f"kafka: created {', '.join(made)} with {plan.partitions} partitions each")
        elif missing:
            self.fatal = _missing(self._bridge, missing)
            return
        with self._board.lock:
            waited = self._board.kafka_error is not None
            self._board.kafka, self._board.kafka_error = "reachable", None
        if waited:
            self._board.say(f"kafka: {kafka.bootstrap_servers} answers")
        self.ready.set()

    def _failed(self, error: TowlineError) -> None:
        if not isinstance(error, KafkaError | GatewayError):
            self.fatal = error
            return
        with self._board.lock:
            first = self._board.kafka_error is None
            self._board.kafka, self._board.kafka_error = "unreachable", str(error)
        if first:
            self._board.say(f"{error}\nkafka: messages go on being received and wait on disk; trying again")
        self._stopping.wait(self._backoff.next())


def _no_start(where: str, what: str, error: OSError) -> GatewayError:
    """What a machine without room, processes or file handles says; a keeper that ended by it would keep nothing."""
    do = "It is tried again by itself: free disk, memory, processes or open files (ulimit)."
    return GatewayError("TL-B32", where, f"{what} can't be started ({error.strerror or error})", do)


def _how(code: int) -> str:
    """How a process ended."""
    return f"its driver was ended by signal {-code}" if code < 0 else f"its driver ended with code {code}"


def unforeseen(name: str, error: BaseException | None = None) -> GatewayError:
    """What ended one of the supervisor's threads, or a round of it, though nothing should [TL-B55]."""
    if error is not None and os.environ.get("TOWLINE_DEBUG"):
        traceback.print_exception(error)
    first = next(iter(str(error or "").splitlines()), "").rstrip(". ")
    why = "" if error is None else f" ({type(error).__name__}{': ' if first else ''}{first})"
    do = "It is tried again. Please report it with the output of TOWLINE_DEBUG=1."
    return GatewayError("TL-B55", name, f"this part of the bridge ended in an unexpected way{why}", do)


def _missing(bridge: Bridge, missing: list[str]) -> KafkaError:
    names = ", ".join(f'"{name}"' for name in missing)
    what = f"the topic{'s' if len(missing) > 1 else ''} {names} {'are' if len(missing) > 1 else 'is'} not there"
    do = "Create it, or let Towline do it with create_topics = { partitions = 6 } in [kafka]."
    return KafkaError("TL-B03", bridge.kafka.bootstrap_servers, what, do)


class DriverKeeper(_Keeper):
    """Keeps the driver process running and takes its reports.

    Args:
        bridge: What it runs.
        board: Where the reports go.
        kafka: Queries begin when it is ready.
        stopping: Set when the bridge ends.
    """

    what = "Spark's driver"
    where = "spark"
    command: Sequence[str] = (sys.executable, "-m", "towline.bridge.runtime.driver")

    def __init__(self, bridge: Bridge, board: BridgeState, kafka: KafkaKeeper, stopping: threading.Event) -> None:
        super().__init__(name="driver", daemon=True)
        #: What only a person can mend: there is no Java that Spark can use.
        self.fatal: TowlineError | None = None
        #: Where the driver's standard error goes, Spark's included.
        self.log = bridge.logs / "driver.log"
        #: Lines whose query was given up, with the reason.
        self.given_up: dict[str, str] = {}
        self._bridge = bridge
        self._board = board
        self._kafka = kafka
        self._stopping = stopping
        self._backoff = Backoff(first=0.5, most=30.0)
        self._process: subprocess.Popen[str] | None = None
        self._last_word = ""
        self._told = ""
        #: Lines whose first dead letters were told.
        self._lettered: set[str] = set()

    @property
    def wanted(self) -> bool:
        """Until the bridge ends, no line is left, or Spark can't start."""
        return self.fatal is None and len(self.given_up) < len(self._bridge.lines) and not self._stopping.is_set()

    def _round(self) -> None:
        self._last_word = ""
        started, place = self._start()
        with started as process:
            self._process = process
            threading.Thread(target=self._go, args=(process,), name="go", daemon=True).start()
            assert process.stdout is not None
            for line in process.stdout:
                self._take(line)
            code = process.wait()
        shutil.rmtree(place, ignore_errors=True)  # a JVM that is still ending may write: the next start sees to it
        if NO_JVM in self._last_word:
            self._look_at_java()
        if self.wanted:
            self._ended(self._last_word or _how(code))

    def _look_at_java(self) -> None:
        """Why a JVM did not start: one that is too old starts no better at the next try."""
        try:
            check_java(version=True)
        except SetupError as error:
            self.fatal = error

    def _failed(self, error: TowlineError) -> None:
        if self.wanted:
            self._ended(str(error).removeprefix("spark: "))

    def stop(self) -> None:
        """Ask the driver to finish its batches and end."""
        self._command("stop")

    def kill(self) -> None:
        """End the driver, its JVM and its workers at once; the batch in work comes again after the next start."""
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _start(self) -> tuple[subprocess.Popen[str], Path]:
        """The driver, and the directory where Spark drops files."""
        self._bridge.logs.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._board.lock:
            self._board.spark = "starting"
        handle = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            place, lock = scratch(self._bridge.state_dir)
        except BaseException:
            os.close(handle)
            raise
        try:
            process = subprocess.Popen(
                self.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=handle,
                encoding="utf-8",
                errors="replace",
                cwd=self._bridge.state_dir,  # Spark drops files where it stands
                env=environment(self._bridge, place),
                pass_fds=(lock,),
                start_new_session=True,  # a Ctrl-C at the terminal is for the supervisor alone
            )
        finally:
            os.close(handle)
            os.close(lock)
        lines = [line for line in self._bridge.lines if line.name not in self.given_up]
        told = self._bridge.model_copy(update={"lines": tuple(lines)})
        with self._board.lock:
            views = [self._board.lines[line.name] for line in lines]
            counts = {view.name: view.counts.as_json() for view in views if isinstance(view.counts, DownCounts)}
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            # In ASCII: PYTHONIOENCODING may give the driver's end of the pipe any other encoding.
            bridge = json.dumps(told.model_dump(mode="json", by_alias=True))
            process.stdin.write(f"{bridge}\n{json.dumps(counts)}\n")
            process.stdin.flush()
        return process, place

    def _go(self, process: subprocess.Popen[str]) -> None:
        while process.poll() is None and not self._stopping.is_set():
            if self._kafka.ready.wait(0.2):
                self._command("go")
                return

    def _command(self, word: str) -> None:
        process = self._process
        if process is not None and process.stdin is not None:
            with contextlib.suppress(BrokenPipeError, ValueError):
                process.stdin.write(word + "\n")
                process.stdin.flush()

    def _ended(self, why: str) -> None:
        pause = self._backoff.next()
        with self._board.lock:
            self._board.spark = "starting again"
            self._board.spark_restarts += 1
            for view in self._board.lines.values():
                view.query = "starting"
        again = f"starting again in {pause:.1f} s, messages go on being received"
        self._board.say(f"spark: {'the same' if why == self._told else why}; {again} (log: {self.log})")
        self._told = why
        self._stopping.wait(pause)

    def _take(self, text: str) -> None:
        try:
            report = json.loads(text)
            handler = getattr(self, f"_on_{report['kind']}", None)
            if handler is not None:
                with self._board.lock:
                    handler(report)
        except Exception as error:  # noqa: BLE001 - a report that is not understood must not end the others
            self._board.say(str(unforeseen("spark's report", error)))

    def _on_ready(self, report: dict[str, Any]) -> None:
        self._told = ""
        self._board.spark = "running"
        self._board.say(f"spark: {report['spark']} is up after {report['seconds']:.1f} s")

    def _on_jvm(self, report: dict[str, Any]) -> None:
        self._last_word = report["text"]

    def _on_counted(self, report: dict[str, Any]) -> None:
        view = self._board.lines[report["line"]]
        view.counts = view.counts.add(report)

    def _on_started(self, report: dict[str, Any]) -> None:
        self._board.lines[report["line"]].query = "running"

    def _on_progress(self, report: dict[str, Any]) -> None:
        view = self._board.lines[report["line"]]
        before = view.counts.dead_lettered
        view.counts = view.counts.add(report)
        letters = view.counts.dead_lettered
        if new := letters - before if letters >= before else letters:  # another journal's count begins anew
            self._letters(view.name, new)
        view.batch_ms = int(report.get("millis", {}).get("triggerExecution", 0))
        if view.query_error is not None:
            self._board.say(f'line "{view.name}": goes on')
        view.query, view.query_error = "running", None
        self._backoff.reset()

    def _letters(self, line: str, new: int) -> None:
        """Tell the first dead letters of a run; the others are in the account."""
        if line not in self._lettered:
            self._lettered.add(line)
            messages = f"{new:,} message{'s' if new != 1 else ''}"
            self._board.say(f'line "{line}": {messages} went to the dead-letter topic; towline dlq show tells why')

    def _on_failed(self, report: dict[str, Any]) -> None:
        view = self._board.lines[report["line"]]
        again = report.get("again_in")
        fresh = view.query_error != report["text"]
        view.query_error = report["text"]
        view.restarts += 1
        view.query = "stopped" if again is None else "waiting to retry"
        if again is None:
            self.given_up[view.name] = report["text"]
        if fresh or again is None:
            then = "this line stops" if again is None else "messages wait on disk; trying again"
            self._board.say(f'{report["text"]}\nline "{view.name}": {then}')

    def _on_stopped(self, report: dict[str, Any]) -> None:
        self._board.lines[report["line"]].query = "stopped"
