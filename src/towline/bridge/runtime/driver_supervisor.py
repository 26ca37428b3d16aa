"""Keeps the driver process running, and takes its reports."""

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
import uuid
from collections.abc import Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Final

from towline.bridge.config.model import AnyLine, Bridge
from towline.bridge.runtime.failures import MAX_TEXT, NO_JVM
from towline.bridge.runtime.kafka_supervisor import KafkaSupervisor
from towline.bridge.runtime.line_requests import PAUSED_FILE
from towline.bridge.runtime.state import PAUSED, BridgeState
from towline.bridge.runtime.supervision import ChildSupervisor, unforeseen
from towline.bridge.runtime.surroundings import check_java, environment, scratch
from towline.errors import ConfigError, SetupError, TowlineError
from towline.spark.session import is_cluster
from towline.text import printable

#: Seconds after which a command that was not carried out is given once more.
_AGAIN_S: Final = 1.0
#: Seconds between two looks whether queries have stopped.
_LOOK_S: Final = 0.1


class DriverSupervisor(ChildSupervisor):
    """Keeps the driver process running and takes its reports.

    Args:
        bridge: What it runs.
        state: Where the reports go.
        kafka: Queries begin when it is ready.
        stopping: Set when the bridge ends.
    """

    what = "Spark's driver"
    where = "spark"
    command: Sequence[str] = (sys.executable, "-m", "towline.bridge.runtime.driver")

    def __init__(self, bridge: Bridge, state: BridgeState, kafka: KafkaSupervisor, stopping: threading.Event) -> None:
        super().__init__("driver", state, stopping, 30.0)
        #: Where the driver's standard error goes, Spark's included.
        self.log = bridge.logs / "driver.log"
        #: Lines whose query was given up, with the reason.
        self.given_up: dict[str, str] = {}
        self._bridge = bridge
        self._kafka = kafka
        kafka.on_ready = lambda: self._command("go")
        self._process: subprocess.Popen[str] | None = None
        #: Held by whoever starts a process, or writes to it: each command is a line, and none is for the one before.
        self._writing = threading.RLock()
        #: Lines whose query is to stop and stay so, each set when it has: those that are paused, and for a reload.
        self._holding: dict[str, threading.Event] = {}
        #: The lines that are judged last, and where the answer goes.
        self._judging: tuple[str, SimpleQueue[list[ConfigError]]] = "", SimpleQueue()
        self._last_word = ""
        #: Why it ended last; said in full only once.
        self._why = ""

    @property
    def wanted(self) -> bool:
        """Until the bridge ends, no line is left, or Spark can't start."""
        return super().wanted and len(self.given_up) < len(self._bridge.lines)

    def _round(self) -> None:
        self._last_word = ""
        begun, heard = self.log.stat().st_size if self.log.exists() else 0, False
        with self._writing:
            started, place = self._start()
            self._process = started
        with started as process:
            assert process.stdout is not None
            for line in process.stdout:
                self._take(line)
                heard = True
            code = process.wait()
        shutil.rmtree(place, ignore_errors=True)  # a JVM that is still ending may write: the next start sees to it
        if NO_JVM in self._last_word:
            self._look_at_java()
        if self.wanted:
            self._ended(self._last_word or _how(code) + ("" if heard else self._last_line(begun)))

    def _last_line(self, begun: int) -> str:
        """What the driver's log says last, behind a place in it, as the end of a sentence."""
        with contextlib.suppress(OSError), self.log.open("rb") as log:
            log.seek(max(begun, log.seek(0, os.SEEK_END) - (MAX_TEXT << 2)))
            lines = [line for line in log.read().decode(errors="replace").splitlines() if line.strip()]
            return f": {printable(lines[-1].strip(), MAX_TEXT)}" if lines else ""
        return ""

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

    def hold(self, lines: Sequence[str], patience_s: float) -> bool:
        """Have the queries of lines stop between two batches, and stay so until `take`; whether they did in time.

        A driver that is started meanwhile does not start them.
        """
        with self._writing:  # a process that is started from here on is told at its start
            events = [self._holding.setdefault(line, threading.Event()) for line in lines]
            for line in lines:
                self._command(json.dumps({"hold": line}))
        deadline = time.monotonic() + patience_s
        while not all(event.is_set() for event in events):
            if self._stopping.wait(_LOOK_S) or time.monotonic() >= deadline:
                return False
        return True

    def judge(self, lines: Sequence[AnyLine], patience_s: float) -> list[ConfigError] | None:
        """The mistakes that Spark finds in the SQL of lines as they are to be; None if it does not answer in time."""
        of, answer = uuid.uuid4().hex, SimpleQueue[list[ConfigError]]()
        self._judging = of, answer
        order = json.dumps({"judge": [line.model_dump(mode="json", by_alias=True) for line in lines], "of": of})
        deadline = time.monotonic() + patience_s
        while not self._stopping.is_set() and time.monotonic() < deadline:
            self._command(order)  # the process before may have had the last one
            with contextlib.suppress(Empty):
                return answer.get(timeout=_AGAIN_S)
        return None

    def give_up(self, name: str, why: str) -> None:
        """Leave the query of a line out, and say why."""
        with self._state.lock:
            self._on_failed({"line": name, "text": why})

    def heed_pauses(self) -> None:
        """Stop the queries of lines that were paused, let those of the others go on; while no reload is under way."""
        for name in (line.name for line in self._bridge.lines):
            if self._is_paused(name) and name not in self._holding:
                self._state.say(f'line "{name}": paused; towline resume carries on what comes meanwhile')
                self._pause(name)
            elif name in self._holding and not self._is_paused(name):
                self._state.say(f'line "{name}": resumed')
                self.take(self._bridge, [name])

    def _is_paused(self, name: str) -> bool:
        return (self._bridge.state_dir / name / PAUSED_FILE).exists()

    def _pause(self, name: str) -> None:
        with self._writing, self._state.lock:
            self._holding.setdefault(name, threading.Event())
            if self._state.spark != "running":  # the next driver is told before it starts a query
                self._state.lines[name].query = PAUSED
            self._command(json.dumps({"hold": name}))

    def take(self, bridge: Bridge, lines: Sequence[str]) -> None:
        """Run another bridge from now on.

        Args:
            bridge: What is to run.
            lines: Names of those whose query goes on, or begins, as the bridge says; of one that is paused once it is
                resumed.
        """
        with self._writing:
            self._bridge = self._kafka.bridge = bridge
            for name in lines:
                self.given_up.pop(name, None)
                if self._is_paused(name):
                    self._pause(name)
                    continue
                self._holding.pop(name, None)
                with self._state.lock:
                    view = self._state.lines[name]
                    view.query, view.query_error = "starting", None
                self._command(json.dumps({"take": bridge.line(name).model_dump(mode="json", by_alias=True)}))

    def kill(self) -> None:
        """End the driver, its JVM and its workers at once; the batch in work comes again after the next start."""
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _start(self) -> tuple[subprocess.Popen[str], Path]:
        """The driver, and the directory where Spark drops files."""
        self._bridge.logs.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._state.lock:
            self._state.spark = "starting"
        with contextlib.ExitStack() as opened:
            handle = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            opened.callback(os.close, handle)
            place, lock = scratch(self._bridge.state_dir)
            opened.callback(os.close, lock)
            process = subprocess.Popen(
                self.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=handle,
                encoding="utf-8",
                errors="replace",
                # Spark drops files where it stands; `environment` says what a cluster needs there.
                cwd=place if is_cluster(self._bridge.spark.master) else self._bridge.state_dir,
                env=environment(self._bridge, place),
                pass_fds=(lock,),
                start_new_session=True,  # a Ctrl-C at the terminal is for the supervisor alone
            )
        lines = [line for line in self._bridge.lines if line.name not in self.given_up]
        going = self._bridge.model_copy(update={"lines": tuple(lines)})
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            # In ASCII: PYTHONIOENCODING may give the driver's end of the pipe any other encoding.
            bridge = json.dumps(going.model_dump(mode="json", by_alias=True))
            held = [json.dumps({"hold": name}) for name in self._holding]
            go = ["go"] if self._kafka.ready.is_set() else []  # else it is told when Kafka has answered
            process.stdin.write("\n".join((bridge, *held, *go, "")))
            process.stdin.flush()
        return process, place

    def _command(self, word: str) -> None:
        with self._writing, contextlib.suppress(BrokenPipeError, ValueError):
            process = self._process
            if process is not None and process.stdin is not None:
                process.stdin.write(word + "\n")
                process.stdin.flush()

    def _ended(self, why: str) -> None:
        pause = self._pauses.next()
        with self._state.lock:
            self._state.spark = "starting again"
            self._state.spark_restarts += 1
            for name in self._state.lines.keys() - self.given_up:
                self._state.lines[name].query = PAUSED if self._is_paused(name) else "starting"
        again = f"starting again in {pause:.1f} s, messages go on being received"
        self._state.say(f"spark: {'the same' if why == self._why else why}; {again} (log: {self.log})")
        self._why = why
        self._stopping.wait(pause)

    def _take(self, text: str) -> None:
        try:
            report = json.loads(text)
            handler = getattr(self, f"_on_{report['kind']}", None)
            if handler is not None:
                with self._state.lock:
                    handler(report)
        except Exception as error:  # noqa: BLE001 - a report that is not understood must not end the others
            self._state.say(str(unforeseen("spark's report", error)))

    def _on_ready(self, report: dict[str, Any]) -> None:
        self._why = ""
        self._state.spark = "running"
        self._state.say(f"spark: {report['spark']} is up after {report['seconds']:.1f} s")

    def _on_jvm(self, report: dict[str, Any]) -> None:
        self._last_word = report["text"]

    def _on_started(self, report: dict[str, Any]) -> None:
        view = self._state.lines[report["line"]]
        view.query = "running"
        before, view.remarks = view.remarks, report.get("remarks", ())
        for text in (one for one in view.remarks if one not in before):
            self._state.say(f'line "{view.name}": {text}')

    def _on_noted(self, report: dict[str, Any]) -> None:
        self._state.say(report["text"])

    def _on_progress(self, report: dict[str, Any]) -> None:
        view = self._state.lines[report["line"]]
        view.took(report)
        view.batch_ms = int(report.get("millis", {}).get("triggerExecution", 0))
        if view.query_error is not None:
            self._state.say(f'line "{view.name}": goes on')
        view.query_error = None
        if view.name not in self._holding:
            view.query = "running"
        self._pauses.reset()

    def _on_failed(self, report: dict[str, Any]) -> None:
        view = self._state.lines[report["line"]]
        again = report.get("again_in")
        fresh = view.query_error != report["text"]
        view.query_error = report["text"]
        view.restarts += 1
        view.query = "stopped" if again is None else "waiting to retry"
        if again is None:
            self.given_up[view.name] = report["text"]
        if fresh or again is None:
            waits = "messages wait on disk" if view.direction == "up" else "what is not read yet stays in Kafka"
            then = "this line stops" if again is None else f"{waits}; trying again"
            self._state.say(f'{report["text"]}\nline "{view.name}": {then}')

    def _on_held(self, report: dict[str, Any]) -> None:
        query = PAUSED if self._is_paused(report["line"]) else "held for a reload"
        self._state.lines[report["line"]].query = query
        if event := self._holding.get(report["line"]):
            event.set()

    def _on_judged(self, report: dict[str, Any]) -> None:
        of, answer = self._judging
        if report["of"] == of:
            answer.put([ConfigError(*one) for one in report["mistakes"]])

    def _on_stopped(self, report: dict[str, Any]) -> None:
        self._state.lines[report["line"]].query = "stopped"


def _how(code: int) -> str:
    return f"its driver was ended by signal {-code}" if code < 0 else f"its driver ended with code {code}"
