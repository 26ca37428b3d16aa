"""`towline run`: one process without Spark that starts everything else, keeps it running and shows the account.

The gateways come first and go last: they receive while Spark or Kafka is down. The driver is told to go only when Kafka
has answered; a line whose topics are not there then waits for them by itself.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from towline import files
from towline.bridge.config.file import load
from towline.bridge.config.model import AnyLine, Bridge, DownLine, Line
from towline.bridge.kafka_source import equipped, source_text
from towline.bridge.lines.identity import left_lines, left_texts, remember, settle
from towline.bridge.runtime.reload import LineChange, changes
from towline.bridge.runtime.screen import Screen, line_state
from towline.bridge.runtime.session import check_java, check_python
from towline.bridge.runtime.state import APPLIED, REFUSED, UNCHANGED, UNDER_WAY, BridgeState, digest_of, take_restart
from towline.bridge.runtime.supervisors import DriverSupervisor, GatewaySupervisor, KafkaSupervisor, see_to, unforeseen
from towline.errors import ConfigError, ConfigErrors, GatewayUnreachable, TowlineError
from towline.gateway.launch import discover, state_lock
from towline.gateway.sessions import ChangeState
from towline.guarantee import Guarantee
from towline.kafka.clientconfig import insecurities
from towline.logfile import trim
from towline.mqtt.events import Filter
from towline.processes import fields, notify
from towline.spark.java import cache_directory
from towline.spark.session import check_pyspark
from towline.text import counted, printable, span
from towline.threads import later
from towline.timing import until
from towline.version import release

EXIT_INTERRUPTED = 130
#: Seconds between two looks at the children.
TICK_S = 0.25
#: A SIGHUP so many seconds after the terminal was last there is about its end; shells wait for nothing.
_JUST_GONE_S: Final = 3.0
#: Longest wait for a reload to be given up, in seconds.
GIVE_UP_S = 2.0
#: Longest wait for the driver to finish its batches, in seconds; then it is killed, and the batch comes again.
FINISH_S = 13.0
#: Longest wait for the gateways to end, in seconds; the whole stays below the 30 s that service managers give.
END_S = 8.0
#: The same after a second interrupt.
END_AT_ONCE_S = 2.0


def _has_terminal() -> bool:
    """By tty_nr of proc(5), which is 0 without one."""
    return (fields(os.getpid()) or ["0"] * 5)[4] != "0"


class Terminal:
    """The controlling terminal of this process, if it has one: it tells which of its two meanings a SIGHUP has.

    A process whose terminal goes away is told so with SIGHUP, by the kernel or by its shell, and has none from then on.
    Any other SIGHUP is meant as a reload.
    """

    def __init__(self, there: Callable[[], bool] = _has_terminal, clock: Callable[[], float] = time.monotonic) -> None:
        self._there, self._clock = there, clock
        #: When it was there last.
        self._seen = -math.inf
        self.look()

    def look(self) -> None:
        """Note whether it is there; call it every second or so."""
        if self._there():
            self._seen = self._clock()

    def just_gone(self) -> bool:
        """Whether it went away a moment ago, so that a SIGHUP tells that."""
        return self._clock() - self._seen <= _JUST_GONE_S and not self._there()


class Supervisor:
    """Runs a bridge until it is stopped; `observe` takes its state before anything is started."""

    def __init__(
        self,
        bridge: Bridge,
        screen: Screen,
        observe: Callable[[BridgeState], None] = lambda _: None,
        read: Callable[[], Bridge] | None = None,
    ) -> None:
        self._bridge = bridge
        self._read = read or (lambda: load(bridge.file))
        self._screen = screen
        self._observe = observe
        self._interrupts = 0
        #: A reload was asked for and has not begun.
        self._reload_asked = False
        #: The last reload or restart; one that does not exist is done.
        self._reload = Future[None]()
        self._reload.set_result(None)
        #: What the service manager was told last.
        self._notified: dict[str, str] = {}
        self._terminal = Terminal()
        #: What a second interrupt does; None before anything was started, when there is nothing to finish.
        self._at_once: Callable[[], None] | None = None
        self._ending = threading.Event()
        self._spark_ending = threading.Event()

    def run(self) -> int:
        """Run until Ctrl-C, SIGTERM, the end of the terminal, or until no line can go on; SIGHUP reloads the file.

        Returns:
            0 when it was asked to end, 130 when it was interrupted twice.

        Raises:
            ConfigError: TL-B10 another bridge runs in this state directory; TL-B20, TL-B21 a line may have been
                renamed or copied; TL-C.. what is wrong with every line.
            TowlineError: What keeps every line from running, in its own words.
        """
        file = bridge = self._bridge
        with alone(bridge), _signals(self._interrupted, self._hung_up):
            _check_members(bridge)
            check_pyspark()
            check_java()
            cache_directory()  # TL-C193, before anything of it is on a class path
            check_python(bridge.spark.master)
            self._screen.say(f"towline {release()}")
            bridge.logs.mkdir(mode=0o700, parents=True, exist_ok=True)
            unequipped: ConfigError | None = None
            try:
                bridge = self._bridge = equipped(bridge)
            except ConfigError as error:
                if not bridge.uplinks:
                    raise
                unequipped = error  # of the lines from Kafka; the others need no jar
            if not unequipped and (jars := source_text(bridge)):
                self._screen.say(jars)
            if not any(line.gateway.drain_s is not None for line in bridge.lines):  # else it ends (`retiring`)
                for text in (*settle(bridge), *left_texts(bridge)):
                    self._screen.say(text)
                remember(bridge)
            insecure = insecurities(bridge.kafka.client())
            for text in insecure:
                self._screen.say(f"insecure: [kafka] {text}")
            directions = {line.name: line.direction for line in bridge.lines}
            self._state = BridgeState(bridge.name, bridge.state_dir, directions, insecure, bridge.file)
            self._observe(self._state)
            self._kafka = KafkaSupervisor(bridge, self._state, self._spark_ending)
            self._driver = DriverSupervisor(bridge, self._state, self._kafka, self._spark_ending)
            for line in bridge.downlinks if unequipped else ():
                self._driver.give_up(line.name, str(unequipped))
            self._gateways = {line.name: self._gateway_of(line) for line in bridge.lines}
            parts = self._state, self._driver, self._gateways, self._gateway_of, self._spark_ending
            self._reloading = Reloading(file, bridge, lambda: _check_members(self._read()), *parts)
            self._driver.heed_pauses()
            self._at_once = self._driver.kill
            for child in (*self._gateways.values(), self._kafka, self._driver):
                child.start()
            fatal: TowlineError | None = None
            try:
                fatal = self._watch()
            finally:
                self._finish()
            if fatal is not None:
                raise fatal
        return EXIT_INTERRUPTED if self._interrupts > 1 else 0

    def _gateway_of(self, line: AnyLine) -> GatewaySupervisor:
        return GatewaySupervisor(line, self._bridge, self._state, self._ending)

    def _watch(self) -> TowlineError | None:
        """Show the account until the end is asked for, or nothing can go on."""
        saved = 0.0
        for name in self._gateways:  # this start is the restart that somebody may have asked for
            take_restart(self._bridge.state_dir / name)
        while not self._interrupts:
            now = time.monotonic()
            if now - saved >= 1.0:
                saved = now
                self._state.save()
                self._terminal.look()
                trim(self._driver.log)
            self._refresh()
            if self._reload.done():
                self._heed()
            if fatal := self._fatal():
                return fatal
            self._ending.wait(TICK_S)
        return None

    def _heed(self) -> None:
        """Begin what was asked for; what comes while a reload is under way waits, and several of a kind are one."""
        self._driver.heed_pauses()
        asked, self._reload_asked = self._reload_asked, False
        restarts = (name for name in self._state.lines if take_restart(self._bridge.state_dir / name))
        if (line := "" if asked else next(restarts, None)) is not None:
            self._reload = later(partial(self._reloading.reload, line), "reload")

    def _refresh(self) -> None:
        self._state.beat = time.monotonic()
        for text in self._state.heard():
            self._screen.say(text)
        with self._state.lock:
            self._screen.show(self._state)
            views = self._state.lines.values()
            states = [f"{view.name}: {line_state(view, self._state.spark)}" for view in views]
            answered = all(view.status or view.gateway_error for view in views)
        news = ({"READY": "1"} if answered else {}) | {"STATUS": printable("; ".join(states))}
        if news != self._notified:
            self._notified = news
            notify(**news)

    def _fatal(self) -> TowlineError | None:
        """What ends the bridge: Kafka as configured can't serve, no line is left, or a child is gone."""
        for child in (*self._gateways.values(), self._kafka, self._driver):
            if child.wanted and not child.is_alive():
                return unforeseen(child.where)
        if fatal := self._kafka.fatal or self._driver.fatal:
            return fatal
        gateways = [*self._gateways.values()]
        dead = [child for child in gateways if child.fatal is not None]
        if len(dead) == len(gateways):
            return dead[0].fatal
        broken = {child.line.name for child in dead} | self._driver.given_up
        if len(broken) == len(gateways):
            names = ", ".join(sorted(broken))
            do = "Correct what was told above and start again; what was received waits on disk."
            return ConfigError("TL-B04", str(self._bridge.file), f"no line can go on ({names})", do)
        return None

    def _interrupted(self) -> None:
        self._interrupts += 1
        if self._at_once is None:
            raise KeyboardInterrupt  # Maven may be at work
        if self._interrupts > 1:
            self._at_once()

    def _hung_up(self, *, ignored: bool) -> None:
        """SIGHUP has come; `ignored` where the bridge was started with ``nohup``."""
        if not self._terminal.just_gone():
            self._reload_asked = True
        elif not ignored:
            self._interrupted()

    def _finish(self) -> None:
        """Spark first, so that its last batch can be committed at the gateways; then they, all at the same time."""
        notify(STOPPING="1")
        deadline = time.monotonic() + FINISH_S
        working = any(view.query == "running" for view in self._state.lines.values())
        if self._interrupts == 1 and working:
            self._screen.say("stopping: the batch in work is finished first (Ctrl-C again ends at once)")
        self._spark_ending.set()
        wait([self._reload], GIVE_UP_S)
        if working:
            later(self._driver.stop, "stop")  # a driver that stands still takes no command
        else:
            self._driver.kill()
        while self._driver.is_alive() and self._interrupts < 2 and time.monotonic() < deadline:
            self._driver.join(TICK_S)
            self._state.save()
            self._refresh()
        if self._driver.is_alive() and self._interrupts < 2:
            self._screen.say(f"Spark did not end within {FINISH_S:.0f} s: its batch comes again with the next start")
        self._driver.kill()
        self._driver.join(2.0)
        self._ending.set()
        interrupts = self._interrupts
        deadline = time.monotonic() + (END_AT_ONCE_S if interrupts > 1 else END_S)
        ends = [
            later(partial(child.end, deadline, look=True), f"end {child.name}") for child in self._gateways.values()
        ]
        while self._interrupts == interrupts and wait(ends, 0.02).not_done and time.monotonic() < deadline + TICK_S:
            self._state.save()
        self._refresh()
        self._state.save(ended=True)
        for text in self._farewell():
            self._screen.say(text)

    def _farewell(self) -> Iterator[str]:
        for name, view in self._state.lines.items():
            if (account := view.account) is None:
                if view.status:
                    yield f'line "{name}": no gateway answers, so what waits on disk is not known; it stays there'
                continue
            yield f'line "{name}": {account.sentence()}'
            if account.pending:
                yield f'line "{name}": {counted(account.pending)} on disk; the next start carries on'
            goes_on = "its gateways go on" if view.gateways else kept_by_broker(view.status)
            yield f'line "{name}": {goes_on}'


def _check_members(bridge: Bridge) -> Bridge:
    """The gateways of a line with members are no children of a bridge, which has to know where each is: TL-C127."""
    for line in bridge.uplinks:
        if line.members and not line.gateways:
            what = f'line "{line.name}" has {len(line.members)} gateways, and nothing says where they are'
            do = 'Start each with towline gateway --member NAME, and give gateways = ["grpc+tls://HOST:PORT", ...].'
            raise ConfigError("TL-C127", str(bridge.file), what, do)
    return bridge


def kept_by_broker(status: Mapping[str, Any]) -> str:
    """What is known of the session that a gateway leaves at its broker."""
    if status.get("drain"):
        return "its gateway leaves it, and ends its session at the broker"
    if not status.get("connects"):
        return "no broker was reached"
    seconds = int(status.get("session_kept_s", 0))
    if not seconds:
        return "the broker keeps no session: what is published before the next start is not received"
    # 0xFFFFFFFF means for ever [MQTT 5 section 3.1.2.11.2].
    limited = status.get("protocol") == "5" and seconds != 0xFFFFFFFF
    session = f"the session {status.get('client_id')}{f' for {span(seconds)}' if limited else ''}"
    if status.get("state") == "online":
        return f"the broker keeps {session}"
    return f"the broker is not reachable now; it was asked to keep {session}"


@contextlib.contextmanager
def alone(bridge: Bridge) -> Iterator[None]:
    """One bridge per state directory, as long as this process lives."""
    handle = state_lock(bridge.state_dir, "bridge.lock")
    try:
        if not files.locked(handle):
            pid = os.pread(handle, 32, 0).decode(errors="replace").strip() or "unknown"
            do = "Stop that one first, or give this bridge a state_dir of its own."
            raise ConfigError("TL-B10", str(bridge.state_dir), f"a bridge runs here (pid {pid})", do)
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(handle)


@contextlib.contextmanager
def _signals(asked: Callable[[], None], hung_up: Callable[..., None]) -> Iterator[None]:
    """Call on SIGINT and SIGTERM, but for those that are ignored; the former handlers come back afterwards.

    SIGHUP is heard even so: `hung_up` is told whether it was ``ignored`` (``nohup``).
    """
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    ignored = [number for number in numbers if signal.getsignal(number) is signal.SIG_IGN]  # a script's job &
    calls = dict.fromkeys((number for number in numbers if number not in ignored), asked)
    calls[signal.SIGHUP] = partial(hung_up, ignored=signal.SIGHUP in ignored)
    former = {number: signal.signal(number, lambda *_, call=call: call()) for number, call in calls.items()}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


# -- a reload ---------------------------------------------------------------------------------------------------------

#: A file with a secret is no part of a reload: what is connected keeps what it was let in with.
_SECRETS: Final = "files with secrets are read at each new connection, Kafka's by each new client"
#: Longest wait for Spark, in seconds: it may be starting, and a batch be under way.
_HOLD_S: Final = 120.0
#: Longest wait for a broker's answer, in seconds.
_GRANT_S: Final = 30.0
#: And for the filters before, where a change is taken back.
_BACK_S: Final = 5.0


@dataclass
class Reloading:
    """Takes up a changed bridge file while its bridge runs, as a whole or not at all; or one line of it, anew.

        read the file, compare it with what runs (`bridge.runtime.reload`), judge its SQL, see to new topics
        stop the queries of the lines that change, between two batches; their gateways go on receiving
        subscribe what comes, beside what goes; or start the gateway again, where a running one can't take it up
        start the queries as the file says: from here on the file is what runs
        unsubscribe what goes; asked again by the gateway at its next connection

    While a query stands nothing reads the journal, so what the new filters bring is read by the new routes alone. Which
    routes each message goes by after that, and after a kill between two of these steps, is said in
    `towline.bridge.uplink.query`. A line that is paused stays so, as what it has become.
    """

    #: The bridge as its file was read; and what runs: the same with what the start added.
    file: Bridge
    bridge: Bridge
    read: Callable[[], Bridge]
    state: BridgeState
    driver: DriverSupervisor
    gateways: dict[str, GatewaySupervisor]
    gateway_of: Callable[[AnyLine], GatewaySupervisor]
    #: Set when the bridge ends.
    stopping: threading.Event

    def reload(self, line: str = "") -> None:
        """Take the file up, or say why not; nothing is raised.

        Args:
            line: Only this line is taken up, and started again with its gateway whatever has changed; "" for all.
        """
        began = time.monotonic()
        self.state.note(line, began=began, outcome=UNDER_WAY)
        try:
            digest = digest_of(self.file.file)  # before it is read: what changes after that shows as a change
            wanted = self.read()
            outcome, texts = APPLIED, self._reload(wanted, line)
            if not texts:
                outcome, texts = UNCHANGED, [f"{self.file.file} says what runs; {_SECRETS}"]
            if self.file == wanted:
                self.state.digest = digest
        except TowlineError as error:
            outcome, texts = REFUSED, str(error).splitlines()
        except Exception as error:  # noqa: BLE001 - a reload that fails ends nothing
            outcome, texts = REFUSED, str(unforeseen("reload", error)).splitlines()
        what = "restart" if line else "reload"
        head = f"{what} refused, the bridge goes on as before:\n" if outcome == REFUSED else f"{what}: "
        self.state.note(line, began=began, outcome=outcome, at=time.time(), texts=texts)
        self.state.say(head + "\n".join(texts))

    def _reload(self, wanted: Bridge, only: str) -> list[str]:
        if only:
            lines = tuple(wanted.line(only) if line.name == only else line for line in self.file.lines)
            wanted = wanted.model_copy(update={"lines": lines})
        for left in left_lines(wanted):
            if left.refused or left.directory.name in self.gateways:
                raise left.error
        changed = changes(self.file, wanted)
        if only:
            changed = [LineChange(self.file.line(only), wanted.line(only), again=True)]
        if changed:
            bridge = self.bridge.model_copy(update={"lines": wanted.lines})
            self._judge([change.after for change in changed])
            new_topics = sorted({*bridge.topics} - {*self.bridge.topics})
            if new_topics and (made := see_to(bridge, new_topics)):
                self.state.say(made)
            self._pass(bridge, changed)
            self.bridge = bridge
            for change in changed:
                self.gateways[change.after.name].line = change.after
            self.driver.take(bridge, [change.after.name for change in changed])
        self.file = wanted
        return [f"{change.told()}{self._unsubscribe(change)}" for change in changed]

    def _pass(self, bridge: Bridge, changed: Sequence[LineChange]) -> None:
        """Bring lines to where their queries can start as the file says, or leave all as it was."""
        running, begun = [change.after.name for change in changed if change.before], list[LineChange]()
        try:
            self._settle(bridge)
            self._hold(running)
            for change in changed:
                begun.append(change)
                if change.starts:
                    self._start(change.after, _GRANT_S)
                elif change.refilters:
                    self._subscribe(change)
        except BaseException:
            for change in begun:
                with contextlib.suppress(TowlineError):
                    self._take_back(change)
            self.driver.take(self.bridge, running)
            self._settle(self.bridge)
            raise

    def _hold(self, names: Sequence[str]) -> None:
        if not self.driver.hold(names, _HOLD_S):
            raise self._unanswered("the queries were not stopped between two batches")

    def _settle(self, bridge: Bridge) -> None:
        """Write down who the lines are and what they are, as a start does. Raises as `settle`."""
        for text in settle(bridge):
            self.state.say(text)
        remember(bridge)

    def _start(self, line: Line | DownLine, patience_s: float) -> None:
        """Start a line's gateway in the place of the one that runs; one that is slow is looked after as any other."""
        self._end(line.name)
        self.state.add(line.name, line.direction)
        child = self.gateway_of(line)
        child.start()
        until(lambda: child.up.is_set() or child.fatal, patience_s, self.stopping.wait)
        if child.fatal is not None and patience_s:
            raise child.fatal
        self.gateways[line.name] = child

    def _end(self, name: str) -> None:
        """End the gateway of a line, if it has one; who supervises it looks after it no more."""
        if child := self.gateways.get(name):
            child.replaced = True
            child.end(time.monotonic() + _GRANT_S)
            child.join(_GRANT_S)

    def _take_back(self, change: LineChange) -> None:
        name, former = change.after.name, change.before
        if former is None:
            self._end(name)
            self.gateways.pop(name, None)
            self.state.lines = {other: view for other, view in self.state.lines.items() if other != name}
        elif change.starts:
            self._start(former, 0.0)
        elif change.refilters:
            self._want(former, former.gateway.subscriptions, _BACK_S)

    def _judge(self, lines: Sequence[AnyLine]) -> None:
        """Let Spark judge the SQL of the lines that change: TL-C74, as `towline check --spark` says it."""
        mistakes = self.driver.judge(lines, _HOLD_S)
        if mistakes is None:
            raise self._unanswered("the SQL of the routes was not looked at")
        if mistakes:
            raise ConfigErrors(mistakes)

    def _unanswered(self, what: str) -> ConfigError:
        why = "the bridge ends" if self.stopping.is_set() else "Spark does not answer"
        return ConfigError("TL-C174", str(self.file.file), f"{what}: {why}", "Reload again when Spark runs.")

    def _subscribe(self, change: LineChange) -> None:
        """Have a gateway want what comes: TL-C176; what keeps the gateway from running."""
        line, steps = change.after, [change.between, change.after.gateway.subscriptions]
        for filters in steps if line.guarantee is Guarantee.AT_MOST_ONCE else steps[:1]:
            state, text = self._want(line, filters, _GRANT_S)
            if state is not ChangeState.GRANTED:
                status = self.state.lines[line.name].status
                text = text or (status.get("last_error") or {}).get("text") or status.get("held_back") or ""
                what = str(text or "the broker gave no answer in time").partition("   [TL-")[0].rstrip(".")
                do = "Correct the filter or the broker's access list, and reload again."
                do = do if state is ChangeState.REFUSED else "Reload again when it is there."
                raise ConfigError("TL-C176", f'line "{line.name}"', f"a filter is not subscribed: {what}", do)

    def _unsubscribe(self, change: LineChange) -> str:
        """Have a gateway want no more than the file says; what there is to say of it."""
        state = ChangeState.ASKED if change.refilters else ChangeState.GRANTED
        with contextlib.suppress(TowlineError):
            if change.refilters:
                state, _ = self._want(change.after, change.after.gateway.subscriptions, _GRANT_S)
        return "" if state is ChangeState.GRANTED else "; unsubscribed when its broker answers again"

    def _want(self, line: AnyLine, filters: Sequence[Filter], patience_s: float) -> tuple[ChangeState, str]:
        """Ask a line's gateway for filters until it says what became of them, or the time is over."""
        settings = line.gateway.model_copy(update={"subscriptions": tuple(filters)})
        named, digest = settings.model_dump(mode="json", include={"subscriptions"})["subscriptions"], settings.digest()
        answer, change = (ChangeState.ASKED, "no gateway answers on this machine"), uuid.uuid4().hex

        def is_answered() -> bool:
            nonlocal answer
            if fatal := self.gateways[line.name].fatal:
                raise fatal
            # One that has ended is started again, with the filters before, and asked anew.
            with contextlib.suppress(GatewayUnreachable):
                if (client := discover(line.gateway.state_dir)) is not None:
                    with client:
                        state, text = client.want(change, named, digest)
                        answer = ChangeState(state), text
            return answer[0] is not ChangeState.ASKED

        until(is_answered, patience_s, self.stopping.wait)
        return answer
