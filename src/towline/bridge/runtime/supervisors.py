"""What keeps the parts of a bridge running: one thread for each, which starts its part and starts it again.

A part is Kafka, which is waited for and looked at every few seconds; the gateway of a line, or its gateways elsewhere,
which are only asked; and Spark's driver, whose reports are taken.
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

from towline.bridge.config.model import AnyLine, Bridge, Line
from towline.bridge.lines.account import LineNotes
from towline.bridge.lines.evidence import (
    AWAY,
    away_text,
    away_trouble,
    combined,
    each,
    gateway_status,
    is_refused,
    kafka_offsets,
    parts_of,
    places_of,
    read_checkpoint,
    status_of,
)
from towline.bridge.lines.identity import is_drained, wanted_clients
from towline.bridge.lines.recovery import refused
from towline.bridge.runtime.failures import MAX_TEXT, NO_JVM
from towline.bridge.runtime.session import check_java, environment, scratch
from towline.bridge.runtime.state import HELD, PAUSED, PAUSED_FILE, STOPPED, BridgeState, LineView, notes_of
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
    stays,
)
from towline.gateway.client import GatewayClient
from towline.gateway.endpoint import GatewayEndpoint
from towline.gateway.launch import ensure
from towline.guarantee import AckAfter
from towline.mqtt.reasons import KEEP_SESSIONS
from towline.spark.link import GatewayPlace
from towline.spark.session import is_cluster
from towline.text import cause, counted, printable
from towline.timing import Backoff, until

if TYPE_CHECKING:
    from towline.kafka.admin import KafkaAdmin


class ChildSupervisor(threading.Thread, ABC):
    """A thread that goes on whatever happens in it: what it supervises would end with it, and nobody would know.

    It reports to `state`, ends when `stopping` is set, and pauses `longest_pause_s` seconds at most between two rounds
    that failed.
    """

    #: What it starts, and whose that is, for messages.
    what = ""
    where = ""

    def __init__(self, name: str, state: BridgeState, stopping: threading.Event, longest_pause_s: float) -> None:
        super().__init__(name=name, daemon=True)
        #: What only a person can mend, and nothing is tried again after; or None.
        self.fatal: TowlineError | None = None
        self._state = state
        self._stopping = stopping
        self._pauses = Backoff(first=0.5, most=longest_pause_s)

    def run(self) -> None:
        """Do a round after the other until there is nothing left to do."""
        while self.wanted:
            try:
                self._round()
            except TowlineError as error:
                self._failed(error)
            except OSError as error:
                self._failed(no_start(self.where, self.what, error))
            except Exception as error:  # noqa: BLE001 - reported, and tried again
                self._failed(unforeseen(self.where, error))

    @property
    def wanted(self) -> bool:
        """Whether there is still something to do; a thread that has ended before is a fault."""
        return self.fatal is None and not self._stopping.is_set()

    @abstractmethod
    def _round(self) -> None:
        """Start what is supervised and stay with it until it ends."""

    @abstractmethod
    def _failed(self, error: TowlineError) -> None:
        """Report what ended a round, and wait."""


def no_start(where: str, what: str, error: OSError) -> GatewayError:
    """What a machine without room, processes or file handles says; that must not end the supervisor."""
    do = "It is tried again by itself: free disk, memory, processes or open files (ulimit)."
    return GatewayError("TL-B32", where, f"{what} can't be started ({error.strerror or error})", do)


def unforeseen(name: str, error: BaseException | None = None) -> GatewayError:
    """What ended one of these threads, or a round of it, though nothing should [TL-B55]."""
    if error is not None and os.environ.get("TOWLINE_DEBUG"):
        traceback.print_exception(error)
    why = "" if error is None else f" ({cause(error)})"
    do = "It is tried again. Please report it with the output of TOWLINE_DEBUG=1."
    return GatewayError("TL-B55", name, f"this part of the bridge ended in an unexpected way{why}", do)


# -- Kafka -------------------------------------------------------------------------------------------------------------

#: Seconds between two looks at Kafka, for what is measured in one, and for its answer, which a busy one takes time for:
#: one that is gone, or stands still, shows within 10 s.
_KAFKA_S, _ANSWER_S = 2.0, 5.0


class KafkaSupervisor(ChildSupervisor):
    """Waits for Kafka before any query begins, then follows how it is; a query looks at its topics when it starts."""

    what = "Kafka's client"
    where = "kafka"

    def __init__(self, bridge: Bridge, state: BridgeState, stopping: threading.Event) -> None:
        super().__init__("kafka", state, stopping, 5.0)
        #: Set once Kafka has answered.
        self.ready = threading.Event()
        #: Called once then.
        self.on_ready: Callable[[], object] = lambda: None
        self.bridge = bridge

    def _round(self) -> None:
        """Look until Kafka does not answer, with one client: it goes where brokers tell clients to come, as all do."""
        from towline.kafka.admin import KafkaAdmin  # noqa: PLC0415 - loads librdkafka

        cluster = KafkaAdmin(self.bridge.kafka.client(), _ANSWER_S)
        while self.wanted:
            cluster.answers()
            self._answers()
            self._measure(cluster)
            self._stopping.wait(_KAFKA_S)

    def _answers(self) -> None:
        self._pauses.reset()
        with self._state.lock:
            waited = self._state.kafka_error is not None
            self._state.kafka, self._state.kafka_error = "reachable", None
        if waited:
            self._state.say(f"kafka: {self.bridge.kafka.bootstrap_servers} answers")
        if not self.ready.is_set():
            self.ready.set()
            self.on_ready()

    def _measure(self, cluster: KafkaAdmin | None) -> None:
        """Measure how far each downlink is behind, by its checkpoint.

        It is unknown without a client, and for a line that was stopped: it may stand in a topic that is gone [I19].
        """
        deadline = time.monotonic() + _KAFKA_S
        for line in self.bridge.downlinks:
            taken, found = kafka_offsets(line.checkpoint, read_checkpoint(line.checkpoint).done), None
            stopped = self._state.lines[line.name].query == STOPPED
            if cluster is not None and taken and not stopped and (left := deadline - time.monotonic()) > 0:
                with contextlib.suppress(KafkaError):
                    found = cluster.backlog(taken, left)
            hidden = found and (found[1] if line.isolation_level == "read_committed" else 0)
            with self._state.lock:
                view = self._state.lines[line.name]
                view.behind, view.hidden = found and found[0], hidden

    @property
    def _meanwhile(self) -> str:
        """What becomes of messages while Kafka is away."""
        at_broker = [f'"{line.name}"' for line in self.bridge.lines if line.gateway.acks is AckAfter.KAFKA]
        if at_broker and len(at_broker) == len(self.bridge.lines):
            return "intake stops at the broker's window, and the brokers keep what comes"
        apart = f", but those of {', '.join(at_broker)}, which the broker keeps" if at_broker else ""
        return f"messages go on being received and wait on disk{apart}"

    def _failed(self, error: TowlineError) -> None:
        if not isinstance(error, KafkaError | GatewayError) and not self.ready.is_set():
            self.fatal = error  # a wrong setting
            return
        self._measure(None)
        with self._state.lock:
            if self._state.kafka_error is None:
                self._state.say(f"{error}\nkafka: {self._meanwhile}; trying again")
            self._state.kafka, self._state.kafka_error = "unreachable", str(error)
        self._stopping.wait(self._pauses.next())


def see_to(bridge: Bridge, topics: Iterable[str]) -> str:
    """See that topics are there, and make them where the file says so; what was made, in words.

    Raises:
        KafkaError: TL-B03, one is not there; TL-K01, Kafka does not answer; TL-K09, one can't be made.
    """
    from towline.kafka.admin import KafkaAdmin  # noqa: PLC0415 - loads librdkafka

    cluster, plan = KafkaAdmin(bridge.kafka.client()), bridge.kafka.create_topics
    missing = sorted(set(topics) - set(cluster.info().topics))
    if not missing:
        return ""
    if plan is None:
        names, several = ", ".join(f'"{name}"' for name in missing), len(missing) > 1
        what = f"the topic{'s' if several else ''} {names} {'are' if several else 'is'} not there"
        do = "Create it, or let Towline do it with create_topics = { partitions = 6 } in [kafka]."
        raise KafkaError("TL-B03", bridge.kafka.bootstrap_servers, what, do)
    created = cluster.create(dict.fromkeys(missing, plan.partitions), replication=plan.replication_factor)
    return f"kafka: created {', '.join(created)} with {plan.partitions} partitions each"


# -- the gateways of a line --------------------------------------------------------------------------------------------

#: Seconds between two questions to a gateway.
ASK_S: Final = 0.5
#: A gateway that leaves questions unanswered this often is looked for again.
_SILENCES: Final = 3
#: What a person has to mend before another try makes sense.
_FATAL: Final = (ConfigError, Refused, SessionUnknown, JournalLocked, JournalDamaged)
_TAKES_PART: Final = "Start towline run again, and it takes part."
#: A gateway that lets nobody in is told of again after so many seconds: only a person ends that.
_REMIND_S: Final = 60.0


class GatewaySupervisor(ChildSupervisor):
    """Keeps a line's gateway running, and knows the account of the line; gateways elsewhere it asks, and ends none."""

    what = "the gateway"

    def __init__(self, line: AnyLine, bridge: Bridge, state: BridgeState, stopping: threading.Event) -> None:
        super().__init__(f"gateway {line.name}", state, stopping, 15.0)
        self.line, self._bridge = line, bridge
        self.where = f'line "{line.name}"'
        #: Set once the gateway has answered.
        self.up = threading.Event()
        #: Another supervisor looks after the line's gateways from now on.
        self.replaced = False
        #: By gateway, "" for the line's own: what was wrong with it when it was said last, and when that was.
        self._trouble: dict[str, tuple[str, float]] = {}
        self._elsewhere: list[GatewayPlace] = []
        if elsewhere := line.gateways if isinstance(line, Line) else ():
            access = bridge.gateway.access()
            self._view.gateways, self._view.access = elsewhere, asdict(access)
            self._elsewhere = places_of(elsewhere, access)

    @property
    def wanted(self) -> bool:
        """Until another takes its place, too."""
        return super().wanted and not self.replaced

    @property
    def _view(self) -> LineView:
        return self._state.lines[self.line.name]

    def _round(self) -> None:
        if self._elsewhere:
            self.look()
            self.up.set()
            self._pauses.reset()
            self._stopping.wait(ASK_S)
            return
        if not self.up.is_set():  # nothing was taken in yet; Kafka may be away [I7]
            from towline.bridge.runtime.reconciling import foreign_marker  # noqa: PLC0415 - loads librdkafka

            with contextlib.suppress(KafkaError):
                if (error := foreign_marker(self._bridge, self.line)) is not None:
                    raise error
        log = self._bridge.logs / f"gateway-{self.line.name}.log"
        with ensure(self.line.gateway, owner_pid=os.getpid(), log=log) as client:
            self._online()
            self._ask(client)

    def look(self) -> None:
        """Ask once; without an answer of the line's own gateway nothing has changed."""
        notes = notes_of(self._view.directory)
        if self._elsewhere:
            answers = each(self._elsewhere, status_of)
            status = combined(answers, self._view.status or self._view.before)
            silent = next((one for one in answers.values() if isinstance(one, GatewayError)), None)
            with self._state.lock:
                self._view.gateway_error = str(silent) if status["state"] == "away" else None
            self._take(status, notes)
        elif own := gateway_status(self.line.gateway.state_dir):
            self._take(own, notes)

    def end(self, deadline: float, *, look: bool = False) -> None:
        """End a gateway that is ours: it acknowledges what is safe and leaves its session alive.

        Args:
            deadline: By `time.monotonic`; one that runs then is killed: what it has acknowledged is on disk [I2].
            look: Take one more answer before, which knows of Spark's last batch.
        """
        if look:
            self.look()
        endpoint = None if self._elsewhere else GatewayEndpoint.read(self.line.gateway.state_dir)
        if endpoint is None or endpoint.owner_pid != os.getpid() or not endpoint.process.runs_here():
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(endpoint.pid, signal.SIGTERM)
            if not until(endpoint.process.gone, deadline - time.monotonic()):
                os.kill(endpoint.pid, signal.SIGKILL)

    def _online(self) -> None:
        again = self.up.is_set()
        self.up.set()
        with self._state.lock:
            self._view.gateway_error = None
            self._view.gateway_restarts += again
        if again:
            place = "in Kafka" if self.line.gateway.acks is AckAfter.KAFKA else "on disk"
            self._say(f"the gateway is back; what it had acknowledged is {place}")

    def _ask(self, client: GatewayClient) -> None:
        """Ask until it has ended; one that has left its line is not started again, for it would take part: TL-G55."""
        silences, place = 0, self.line.gateway.state_dir
        while silences < _SILENCES and not self._stopping.wait(ASK_S):
            notes = notes_of(self._view.directory)
            try:
                status = client.status(timeout_s=5.0)
            except GatewayError:
                endpoint = GatewayEndpoint.read(place)
                gone = endpoint is None or endpoint.process.gone()
                if gone and self._view.status.get("drain") and is_drained(place, wanted_clients(self.line)):
                    what, do = "its gateway was drained while it ran, and is not started again", _TAKES_PART
                    raise GatewayError("TL-G55", self.where, what, do) from None
                silences = _SILENCES if gone else silences + 1
            else:
                silences = 0
                self._pauses.reset()
                self._take(status, notes)
        if self.wanted:
            self._say("the gateway has ended; starting it again")

    def _take(self, status: Mapping[str, Any], notes: LineNotes | None) -> None:
        """Take an answer, and say what has changed at each gateway since it was said last."""
        if status.get("state") != "away":
            with self._state.lock:
                letters = self._view.hear(status, notes)
            if letters:  # the first of a run are mentioned, the others are in the account
                self._say(f"{counted(letters)} went to the dead-letter topic; towline dlq show tells why")
        before = parts_of(self._view.before)
        for name, part in parts_of(status).items():
            said, at = self._trouble.get(name, (None, 0.0))
            trouble = away_text(name, part) if AWAY in part else str((part.get("last_error") or {}).get("text", ""))
            if trouble != said or (is_refused(part) and time.monotonic() - at > _REMIND_S):
                text = away_trouble(name, part) if AWAY in part else trouble or _well(name, part, said or "")
                if text:
                    self._say(text)
                    self._trouble[name] = trouble, time.monotonic()
            for event in _grown(before.get(name, {}), part) if AWAY not in part else ():
                self._say(f"gateway {name}: {event}" if name else event)
        self._view.before = status

    def _say(self, text: str) -> None:
        """Tell an event, and whose it is; a gateway begins its errors with the name of its line."""
        text = text.removeprefix(f"{self.line.name} at ").removeprefix(f"{self.line.name}: ")
        self._state.say(text if self.where in text else f"{self.where}: {text}")

    def _failed(self, error: TowlineError) -> None:
        if not self.wanted:
            return
        error = refused(self.line, self._bridge.file, error) or error
        if stays(error.code) or (isinstance(error, _FATAL) and not self.up.is_set()):
            self.fatal = error
        if error.code == "TL-G55" and self.line.gateway.drain_s is not None:
            return  # as it was asked to
        with self._state.lock:
            fresh = self._view.gateway_error != str(error)
            self._view.gateway_error = str(error)
        if fresh:
            self._say(str(error))
        if self.fatal is None:
            self._stopping.wait(self._pauses.next())


def _well(name: str, part: Mapping[str, Any], said: str) -> str:
    """What there is to say of a gateway with which nothing is wrong; "" for nothing."""
    if name:
        return f"gateway {name} is there, and {part.get('state')}"
    again = "there is room again, and messages are received"
    return "" if part.get("state") != "online" else again if "[TL-J" in said else f"connected to {part.get('broker')}"


def _grown(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """What a gateway counts only when a promise is at stake, said when it happens: once for what may come in crowds."""
    if now.get("sessions_lost", 0) > before.get("sessions_lost", 0):
        what = "the broker lost this client's session, and every message that only the session held"
        yield f"{what}. {(now.get('session_lost') or {}).get('do', KEEP_SESSIONS)}   [TL-M22]"
    first, degraded = ((status.get("outbox") or {}).get("degraded", 0) for status in (before, now))
    if degraded and not first:
        what = "the broker answers QoS 2 as if it were QoS 1: from now on a message may be doubled"
        yield f'{what}. Take a broker with QoS 2, or guarantee = "at_least_once".   [TL-B58]'


# -- Spark's driver ----------------------------------------------------------------------------------------------------


class DriverSupervisor(ChildSupervisor):
    """Keeps the driver process running and takes its reports; queries begin when Kafka is ready."""

    what = "Spark's driver"
    where = "spark"
    command: Sequence[str] = (sys.executable, "-m", "towline.bridge.runtime.driver")

    def __init__(self, bridge: Bridge, state: BridgeState, kafka: KafkaSupervisor, stopping: threading.Event) -> None:
        super().__init__("driver", state, stopping, 30.0)
        #: Where the driver's standard error goes, Spark's included.
        self.log = bridge.logs / "driver.log"
        self._bridge = bridge
        self._kafka = kafka
        kafka.on_ready = lambda: self._command("go")
        self._process: subprocess.Popen[str] | None = None
        #: Held by whoever starts a process, or writes to it: each command is a line, and none is for the one before.
        self._writing = threading.RLock()
        #: Lines whose query is to stop and stay so: those that are paused, and for a reload.
        self._holding: set[str] = set()
        #: The order to judge lines, while it waits for its answer; and the answers.
        self._judging: list[str] = []
        self._mistakes: dict[str, list[ConfigError]] = {}
        self._last_word = ""
        #: Why it ended last; said in full only once.
        self._why = ""

    def _round(self) -> None:
        self._last_word = ""
        begun, heard = self.log.stat().st_size if self.log.exists() else 0, False
        with self._writing:
            started, place = self._start()
        with started as process:
            assert process.stdout is not None
            for line in process.stdout:
                self._take(line)
                heard = True
            code = process.wait()
        shutil.rmtree(place, ignore_errors=True)  # a JVM that is still ending may write: the next start sees to it
        if NO_JVM in self._last_word:
            try:  # one that is too old starts no better at the next try
                check_java(version=True)
            except SetupError as error:
                self.fatal = error
        if self.wanted:
            how = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
            self._ended(self._last_word or f"its driver {how}" + ("" if heard else self._last_line(begun)))

    def _last_line(self, begun: int) -> str:
        """What the driver's log says last, behind a place in it, as the end of a sentence."""
        text = ""
        with contextlib.suppress(OSError), self.log.open("rb") as log:
            log.seek(max(begun, log.seek(0, os.SEEK_END) - (MAX_TEXT << 2)))
            text = log.read().decode(errors="replace").rstrip().rpartition("\n")[2].strip()
        return f": {printable(text, MAX_TEXT)}" if text else ""

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
            self._holding.update(lines)
            self._command(*(json.dumps({"hold": line}) for line in lines))
        views = [self._state.lines[line] for line in lines]
        return until(lambda: all(view.query in (PAUSED, HELD) for view in views), patience_s, self._stopping.wait)

    def judge(self, lines: Sequence[AnyLine], patience_s: float) -> list[ConfigError] | None:
        """The mistakes that Spark finds in the SQL of lines as they are to be; None if it does not answer in time."""
        of, changed = uuid.uuid4().hex, [line.model_dump(mode="json", by_alias=True) for line in lines]
        with self._writing:  # a process that is started from here on is told at its start
            self._judging = [json.dumps({"judge": changed, "of": of})]
            self._command(*self._judging)
        until(lambda: of in self._mistakes, patience_s, self._stopping.wait)
        self._judging = []
        return self._mistakes.pop(of, None)

    @property
    def given_up(self) -> set[str]:
        """The lines whose query is not tried again."""
        return {name for name, view in self._state.lines.items() if view.query == STOPPED}

    def give_up(self, name: str, why: str) -> None:
        """Leave the query of a line out, and say why."""
        with self._state.lock:
            self._on_failed({"line": name, "text": why})

    def heed_pauses(self) -> None:
        """Stop the queries of lines that were paused, let those of the others go on; while no reload is under way."""
        for name in (line.name for line in self._bridge.lines):
            if self._is_paused(name) and name not in self._holding:
                self._state.say(f'line "{name}": paused; towline resume carries on what comes meanwhile')
                with self._writing, self._state.lock:
                    self._holding.add(name)
                    if self._state.spark != "running":  # the next driver is told before it starts a query
                        self._state.lines[name].query = PAUSED
                    self._command(json.dumps({"hold": name}))
            elif name in self._holding and not self._is_paused(name):
                self._state.say(f'line "{name}": resumed')
                self.take(self._bridge, [name])

    def _is_paused(self, name: str) -> bool:
        return (self._bridge.state_dir / name / PAUSED_FILE).exists()

    def take(self, bridge: Bridge, lines: Sequence[str]) -> None:
        """Run another bridge; the queries of `lines` go on, or begin, as it says, those of paused ones once resumed."""
        with self._writing, self._state.lock:
            self._bridge = self._kafka.bridge = bridge
            for name in lines:
                view = self._state.lines[name]
                if self._is_paused(name):  # it is held, and told what it is when it is resumed
                    self._holding.add(name)
                    view.query = PAUSED
                    continue
                self._holding.discard(name)
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
        self._process = process
        given_up = self.given_up
        lines = tuple(line for line in self._bridge.lines if line.name not in given_up)
        going = self._bridge.model_copy(update={"lines": lines})
        # In ASCII: PYTHONIOENCODING may give the driver's end of the pipe any other encoding.
        bridge = json.dumps(going.model_dump(mode="json", by_alias=True))
        held = [json.dumps({"hold": name}) for name in self._holding]
        go = ["go"] if self._kafka.ready.is_set() else []  # else it is told when Kafka has answered
        self._command(bridge, *held, *self._judging, *go)
        return process, place

    def _command(self, *words: str) -> None:
        with self._writing, contextlib.suppress(BrokenPipeError, ValueError):
            if self._process is not None and self._process.stdin is not None:
                self._process.stdin.write("".join(f"{word}\n" for word in words))
                self._process.stdin.flush()

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
        view.batch_ms = int(report["millis"].get("triggerExecution", 0))
        view.batch_at = float(report["at"])
        view.batches.observe(view.batch_ms / 1000)
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
        view.query = STOPPED if again is None else "waiting to retry"
        if fresh or again is None:
            waits = "messages wait on disk" if view.direction == "up" else "what is not read yet stays in Kafka"
            then = "this line stops" if again is None else f"{waits}; trying again"
            self._state.say(f'{report["text"]}\nline "{view.name}": {then}')

    def _on_held(self, report: dict[str, Any]) -> None:
        self._state.lines[report["line"]].query = PAUSED if self._is_paused(report["line"]) else HELD

    def _on_judged(self, report: dict[str, Any]) -> None:
        self._mistakes[report["of"]] = [ConfigError(*one) for one in report["mistakes"]]
