"""Reload of a changed bridge file: comparison with the running bridge (pure), and the steps that apply it.

A reload applies all changes of a file or none. Keys that need a restart are refused with one error each.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from towline.bridge.config.model import AnyLine, Bridge, Downlink, Uplink
from towline.bridge.lines.identity import assign_identities, record_lines, removed_lines
from towline.bridge.runtime.child_supervisors import (
    DriverSupervisor,
    GatewaySupervisor,
    ensure_topics,
    unexpected_error,
)
from towline.bridge.runtime.state import APPLIED, REFUSED, UNCHANGED, UNDER_WAY, BridgeState, file_digest
from towline.errors import ConfigError, ConfigErrors, TowlineError
from towline.guarantee import policy
from towline.timing import poll_until

#: Fields that are not compared: of the file, and the lines, which are compared one by one.
_NOT_COMPARED: Final = {"file", "lines", "leave_waiting"}
_RESTART_REMEDY: Final = "Undo the change and reload again; or restart the bridge, which applies the whole file."


@dataclass(frozen=True, slots=True)
class LineChange:
    """Change of a line, or a new line.

    Attributes:
        old_line: Running settings; None for a new line.
        new_line: Settings of the file.
        forces_restart: Restart the gateway even if its settings are unchanged.
    """

    old_line: Uplink | Downlink | None
    new_line: Uplink | Downlink
    forces_restart: bool = False

    @property
    def starts_gateway(self) -> bool:
        """True if the gateway has to be started: a new line, or changed settings of the gateway, filters included."""
        if self.old_line is None or self.forces_restart:
            return True
        return _gateway_identity(self.old_line) != _gateway_identity(self.new_line)

    def summary(self) -> str:
        """Return the change in one line of text."""
        parts = "gateway and query" if self.starts_gateway else "query"
        return f'line "{self.new_line.name}": {"new" if self.old_line is None else f"{parts} restarted"}'


def line_changes(running_bridge: Bridge, new_bridge: Bridge) -> list[LineChange]:
    """Return the changed lines and the new lines.

    Args:
        running_bridge: The file as the running bridge has read it.
        new_bridge: The same file, read again.

    Raises:
        ConfigErrors: TL-C169, keys that need a restart; TL-C170, filters that can't change without a restart.
    """
    if restart_keys := list(_restart_keys(running_bridge, new_bridge)):
        problem, location = "needs a restart, and is unchanged until then", str(new_bridge.file)
        errors = [ConfigError("TL-C169", location, f"{key} {problem}", _RESTART_REMEDY) for key in restart_keys]
        raise ConfigErrors(errors)
    old_lines = {line.name: line for line in running_bridge.lines}
    pairs = ((old_lines.get(line.name), line) for line in new_bridge.lines)
    changes = [LineChange(old_line, new_line) for old_line, new_line in pairs if old_line != new_line]
    errors = []
    for change in changes:
        gateway, location = change.new_line.gateway, f'{new_bridge.file}  uplink "{change.new_line.name}"'
        # With another client id the gateway has another session.
        if change.old_line and change.old_line.gateway.mqtt_client_id == gateway.mqtt_client_id:
            old_patterns = (subscription.pattern for subscription in change.old_line.gateway.subscriptions)
            if error := gateway.filter_change_error(old_patterns, location):
                errors.append(error)
    if errors:
        raise ConfigErrors(errors)
    return changes


def _restart_keys(running_bridge: Bridge, new_bridge: Bridge) -> Iterator[str]:
    """Yield the keys and tables of the file with a changed value that need a restart; no values [I12]."""
    bridges = (running_bridge, new_bridge)
    old_values, new_values = (bridge.model_dump(mode="json", exclude=_NOT_COMPARED) for bridge in bridges)
    changed_keys = (key for key, value in new_values.items() if old_values.get(key) != value)
    yield from (f"[{key}]" if isinstance(new_values[key], dict) else key for key in changed_keys)
    new_kinds = {line.name: line.kind for line in new_bridge.lines}
    for line in running_bridge.lines:
        if new_kinds.get(line.name) != line.kind:
            yield f'{line.kind} "{line.name}", which was removed,'
    old_session, new_session = map(_session_settings, bridges)
    changed = (key for key, value in new_session.items() if value != old_session[key])
    yield from (f"{key} (fixed when Spark's session starts)" for key in changed)


def _session_settings(bridge: Bridge) -> dict[str, object]:
    """Return properties of the lines that are fixed at the start of a Spark session (`session_settings`)."""
    settings = {name: value for line in bridge.lines for name, value in policy(line.guarantee).spark_settings.items()}
    return {
        "the first or the last downlink": bool(bridge.downlinks),
        "the first or the last dedupe": any(line.dedupe_window for line in bridge.uplinks),
        "a guarantee that no line had before": settings,
    }


def _gateway_identity(line: Uplink | Downlink) -> tuple[object, ...]:
    """Return what makes a line's gateway another one: its settings, or the endpoints of remote gateways."""
    remote = tuple(getattr(line, name, ()) for name in ("gateways", "removed_gateways", "members"))
    return remote if _is_remote(line) else (*remote, line.gateway.digest())


def _is_remote(line: Uplink | Downlink) -> bool:
    """Return True if the bridge does not start the line's gateways: they have filters of their own."""
    return bool(getattr(line, "gateways", ()))


# -- steps of a reload -------------------------------------------------------------------------------------------------

#: Files with secrets are not part of a reload: a connection keeps the secret that it was opened with.
_SECRETS_NOTE: Final = "files with secrets are read at each new connection, Kafka's by each new client"
#: Longest wait for the end and the start of a gateway, in seconds; it starts when a broker has answered, or can't.
_GATEWAY_TIMEOUT_S: Final = 30.0


@dataclass
class Reloader:
    """Reload of a changed bridge file, as a whole or not at all; or restart of one line.

        read the file, compare it with the running bridge (`line_changes`), check its SQL, check new topics
        stop the queries of changed lines between two batches
        restart the gateways with changed settings; the broker keeps their sessions and queues messages meanwhile
        start the queries with the new settings: from here on the new file is in force

    While a query is stopped nothing reads the journal, so only the new routes read messages of the new filters. A
    gateway unsubscribes removed filters when the broker has granted the new ones; if it refuses one, all gateways start
    again with the settings of before. The routes of each message after that, and after a kill between two steps, are
    described in `towline.bridge.uplink.query`. A paused line stays paused, with its new settings.
    """

    #: The bridge as its file was read; and the running bridge, with the changes of its start, such as jars.
    file_bridge: Bridge
    running_bridge: Bridge
    read_file: Callable[[], Bridge]
    state: BridgeState
    driver: DriverSupervisor
    gateways: dict[str, GatewaySupervisor]
    create_gateway: Callable[[AnyLine], GatewaySupervisor]
    #: Set when the bridge ends.
    stopping: threading.Event

    def reload(self, line: str = "") -> None:
        """Reload the file and record the outcome; errors are reported, not raised.

        Args:
            line: Reload and restart only this line, with its gateway, even if it is unchanged; "" for the whole file.
        """
        started_at = time.monotonic()
        self.state.set_outcome(line, began=started_at, outcome=UNDER_WAY)
        try:
            digest = file_digest(self.file_bridge.file)  # first: a change during the read counts as a later change
            new_bridge = self.read_file()
            outcome, texts = APPLIED, self._apply(new_bridge, line)
            if not texts:
                outcome, texts = UNCHANGED, [f"{self.file_bridge.file} is unchanged; {_SECRETS_NOTE}"]
            if self.file_bridge == new_bridge:
                self.state.digest = digest
        except TowlineError as error:
            outcome, texts = REFUSED, str(error).splitlines()
        except Exception as error:  # noqa: BLE001 - a failed reload does not end the bridge
            outcome, texts = REFUSED, str(unexpected_error("reload", error)).splitlines()
        action = "restart" if line else "reload"
        head = f"{action} refused, the bridge continues unchanged:\n" if outcome == REFUSED else f"{action}: "
        self.state.set_outcome(line, began=started_at, outcome=outcome, at=time.time(), texts=texts)
        self.state.add_event(head + "\n".join(texts))

    def _apply(self, new_bridge: Bridge, only_line: str) -> list[str]:
        if only_line:
            new_line = new_bridge.line(only_line)
            lines = tuple(new_line if line.name == only_line else line for line in self.file_bridge.lines)
            new_bridge = new_bridge.model_copy(update={"lines": lines})
        for leftover in removed_lines(new_bridge):
            if leftover.blocks_start or leftover.directory.name in self.gateways:
                raise leftover.error
        changes = line_changes(self.file_bridge, new_bridge)
        if only_line:
            changes = [LineChange(self.file_bridge.line(only_line), new_bridge.line(only_line), forces_restart=True)]
        if changes:
            bridge = self.running_bridge.model_copy(update={"lines": new_bridge.lines})
            self.driver.check_sql([change.new_line for change in changes])
            new_topics = sorted({*bridge.required_topics()} - {*self.running_bridge.required_topics()})
            if new_topics and (created_text := ensure_topics(bridge, new_topics)):
                self.state.add_event(created_text)
            self._switch_lines(bridge, changes)
            self.running_bridge = bridge
            for change in changes:
                self.gateways[change.new_line.name].line = change.new_line
            self.driver.start_queries(bridge, [change.new_line.name for change in changes])
        self.file_bridge = new_bridge
        return [change.summary() for change in changes]

    def _switch_lines(self, bridge: Bridge, changes: Sequence[LineChange]) -> None:
        """Prepare lines for their new queries; roll all of them back after an error."""
        running, restarts = [change.new_line.name for change in changes if change.old_line], list[LineChange]()
        try:
            self._record_identities(bridge)
            self.driver.hold_queries(running)
            for change in (change for change in changes if change.starts_gateway):
                restarts.append(change)
                self._start_gateway(change.new_line, _GATEWAY_TIMEOUT_S)
        except BaseException:
            for change in restarts:
                self._roll_back(change)
            self.driver.start_queries(self.running_bridge, running)
            self._record_identities(self.running_bridge)
            raise

    def _record_identities(self, bridge: Bridge) -> None:
        """Write identity and settings of each line to disk, as a start does. Raises as `assign_identities`."""
        for text in assign_identities(bridge):
            self.state.add_event(text)
        record_lines(bridge)

    def _start_gateway(self, line: Uplink | Downlink, timeout_s: float) -> None:
        """Replace a line's gateway by a new one; a slow start is left to its supervisor."""
        if former := self.gateways.get(line.name):
            former.is_replaced = True
            former.join(_GATEWAY_TIMEOUT_S)
            if _is_remote(line):
                former.end(time.monotonic() + _GATEWAY_TIMEOUT_S)
        self.state.add_line(line.name, line.direction)
        child = self.create_gateway(line)
        child.replaces_gateway = True
        child.start()
        poll_until(lambda: child.ready.is_set() or child.fatal_error, timeout_s, self.stopping.wait)
        if child.fatal_error is not None and timeout_s:
            raise child.fatal_error
        self.gateways[line.name] = child

    def _roll_back(self, change: LineChange) -> None:
        if change.old_line is not None:
            self._start_gateway(change.old_line, 0.0)
            return
        name = change.new_line.name
        if child := self.gateways.pop(name, None):
            child.is_replaced = True
            child.end(time.monotonic() + _GATEWAY_TIMEOUT_S)
        self.state.lines = {other: view for other, view in self.state.lines.items() if other != name}
