"""Takes up a changed bridge file while its bridge runs, as a whole or not at all; or one line of it, anew.

    read the file, compare it with what runs (`bridge.config.reload`), judge its SQL, see to new topics
    stop the queries of the lines that change, between two batches; their gateways go on receiving
    subscribe what comes, beside what goes; or start the gateway again, where a running one can't take it up
    start the queries as the file says: from here on the file is what runs
    unsubscribe what goes; asked again by the gateway at its next connection

While a query stands nothing reads the journal, so what the new filters bring is read by the new routes alone. Which
routes each message goes by after that, and after a kill between two of these steps, is said in
`towline.bridge.uplink.query`. A line that is paused stays so, as what it has become.
"""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from towline.bridge.config.model import AnyLine, Bridge, DownLine, Line
from towline.bridge.config.reload import LineChange, changes
from towline.bridge.lines.identity import left_lines, remember, settle
from towline.bridge.runtime.state import APPLIED, REFUSED, UNCHANGED, UNDER_WAY, BridgeState, digest_of
from towline.bridge.runtime.supervisors import DriverSupervisor, GatewaySupervisor, see_to, unforeseen
from towline.errors import ConfigError, ConfigErrors, GatewayUnreachable, KafkaError, TowlineError
from towline.gateway.launch import discover
from towline.gateway.sessions import ChangeState
from towline.guarantee import Guarantee
from towline.mqtt.events import Filter
from towline.timing import until

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
    """The reloads of one bridge, one after the other.

    Attributes:
        file: The bridge as its file was read.
        bridge: What runs: the same with what the start added.
        read: Reads the file anew.
        gateways: Of the lines, by their names.
        gateway_of: Makes one.
        stopping: Set when the bridge ends.
    """

    file: Bridge
    bridge: Bridge
    read: Callable[[], Bridge]
    state: BridgeState
    driver: DriverSupervisor
    gateways: dict[str, GatewaySupervisor]
    gateway_of: Callable[[AnyLine], GatewaySupervisor]
    stopping: threading.Event

    def reload(self, line: str = "") -> None:
        """Take the file up, or say why not; nothing is raised.

        Args:
            line: Only this line is taken up, and started again with its gateway whatever has changed; "" for all.
        """
        begun = {"began": time.monotonic()}
        self.state.outcomes[line] = {**begun, "outcome": UNDER_WAY}
        try:
            digest = digest_of(self.file.file)  # before it is read: what changes after that shows as a change
            wanted = self.read()
            outcome, texts = APPLIED, self._reload(wanted, line)
            if not texts:
                outcome, texts = UNCHANGED, [f"{self.file.file} says what runs; {_SECRETS}"]
            if self.file == wanted:
                self.state.file_read(digest)
        except TowlineError as error:
            outcome, texts = REFUSED, str(error).splitlines()
        except Exception as error:  # noqa: BLE001 - a reload that fails ends nothing
            outcome, texts = REFUSED, str(unforeseen("reload", error)).splitlines()
        what = "restart" if line else "reload"
        head = f"{what} refused, the bridge goes on as before:\n" if outcome == REFUSED else f"{what}: "
        self.state.outcomes[line] = {**begun, "outcome": outcome, "at": time.time(), "texts": texts}
        self.state.say(head + "\n".join(texts))

    def _reload(self, wanted: Bridge, only: str) -> list[str]:
        wanted, found = self._found(wanted, only)
        if not found:
            self.file = wanted
            return []
        bridge = self.bridge.model_copy(update={"lines": wanted.lines})
        self._judge([one.after for one in found])
        self._see_to_topics(bridge)
        change = uuid.uuid4().hex
        self._pass(bridge, found, change)
        self.file, self.bridge = wanted, bridge
        for one in found:
            self.gateways[one.after.name].line = one.after
        self.driver.take(bridge, [one.after.name for one in found])
        return [f"{one.told()}{self._unsubscribe(one, change)}" for one in found]

    def _found(self, wanted: Bridge, only: str) -> tuple[Bridge, list[LineChange]]:
        """What is to run by the file, of which one line is taken or all, and what that changes."""
        if only:
            lines = tuple(wanted.line(only) if one.name == only else one for one in self.file.lines)
            wanted = wanted.model_copy(update={"lines": lines})
        for left in left_lines(wanted):
            if left.refused or left.directory.name in self.gateways:
                raise left.error
        found = changes(self.file, wanted)
        return wanted, [LineChange(self.file.line(only), wanted.line(only), again=True)] if only else found

    def _pass(self, bridge: Bridge, found: Sequence[LineChange], change: str) -> None:
        """Bring lines to where their queries can start as the file says, or leave all as it was."""
        running, asked = [one.after.name for one in found if one.before], list[LineChange]()
        try:
            self._settle(bridge)
            self._hold(running)
            for one in found:
                asked.append(one)
                if one.starts:
                    self._start(one.after, _GRANT_S)
                elif one.refilters:
                    self._subscribe(one, change)
        except BaseException:
            for one in asked:
                with contextlib.suppress(TowlineError):
                    self._take_back(one, f"{change}-back")
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

    def _take_back(self, one: LineChange, change: str) -> None:
        if one.before is None:
            self._end(one.after.name)
            self.gateways.pop(one.after.name, None)
            self.state.lines = {name: view for name, view in self.state.lines.items() if name != one.after.name}
        elif one.starts:
            self._start(one.before, 0.0)
        elif one.refilters:
            self._want(one.before, one.before.gateway.subscriptions, change, _BACK_S)

    def _judge(self, lines: Sequence[AnyLine]) -> None:
        """Let Spark judge the SQL of the lines that change: TL-C74, as `towline check --spark` says it."""
        mistakes = self.driver.judge(lines, _HOLD_S)
        if mistakes is None:
            raise self._unanswered("the SQL of the routes was not looked at")
        if mistakes:
            raise ConfigErrors(mistakes)

    def _see_to_topics(self, bridge: Bridge) -> None:
        """See that the topics which the file names for the first time are there: TL-B03, TL-K09."""
        topics = sorted({*bridge.topics} - {*self.bridge.topics})
        if not topics:
            return
        try:
            if made := see_to(bridge, topics):
                self.state.say(made)
        except KafkaError as error:
            if error.code != "TL-K01":
                raise
            what = f"it is not known whether Kafka has {', '.join(topics)}: {error.what}"
            raise ConfigError("TL-C173", str(bridge.file), what, "Reload again when Kafka answers.") from error

    def _unanswered(self, what: str) -> ConfigError:
        why = "the bridge ends" if self.stopping.is_set() else "Spark does not answer"
        return ConfigError("TL-C174", str(self.file.file), f"{what}: {why}", "Reload again when Spark runs.")

    def _subscribe(self, one: LineChange, change: str) -> None:
        """Have a gateway want what comes: TL-C176; what keeps the gateway from running."""
        steps = [one.between, one.after.gateway.subscriptions]
        for number, filters in enumerate(steps if one.after.guarantee is Guarantee.AT_MOST_ONCE else steps[:1]):
            state, text = self._want(one.after, filters, f"{change}-{number}", _GRANT_S)
            if state is not ChangeState.GRANTED:
                status = self.state.lines[one.after.name].status
                text = text or (status.get("last_error") or {}).get("text") or status.get("held_back") or ""
                what = str(text or "the broker gave no answer in time").partition("   [TL-")[0].rstrip(".")
                do = "Correct the filter or the broker's access list, and reload again."
                do = do if state is ChangeState.REFUSED else "Reload again when it is there."
                raise ConfigError("TL-C176", f'line "{one.after.name}"', f"a filter is not subscribed: {what}", do)

    def _unsubscribe(self, one: LineChange, change: str) -> str:
        """Have a gateway want no more than the file says; what there is to say of it."""
        if not one.refilters:
            return ""
        try:
            state, _ = self._want(one.after, one.after.gateway.subscriptions, f"{change}-last", _GRANT_S)
        except TowlineError:
            state = ChangeState.ASKED
        return "" if state is ChangeState.GRANTED else "; unsubscribed when its broker answers again"

    def _want(
        self, line: AnyLine, filters: Sequence[Filter], change: str, patience_s: float
    ) -> tuple[ChangeState, str]:
        """Ask a line's gateway for filters until it says what became of them, or the time is over."""
        settings = line.gateway.model_copy(update={"subscriptions": tuple(filters)})
        named, digest = settings.model_dump(mode="json", include={"subscriptions"})["subscriptions"], settings.digest()
        answer = ChangeState.ASKED, "no gateway answers on this machine"

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
