"""What a changed bridge file changes while its bridge runs: lines that change, and lines that come. Pure.

A change is taken up as a whole or not at all. What else differs needs a new start, and the file is refused with a line
for each such key, so that nobody takes half of a file for the whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from towline.bridge.config.model import Bridge, DownLine, Line
from towline.errors import ConfigError, ConfigErrors
from towline.gateway.settings import SubscribedFilter
from towline.guarantee import Guarantee, policy
from towline.mqtt.events import Filter

#: What is said of the file, and what is compared line by line.
_READ: Final = {"file", "lines", "leave_waiting"}
_DO: Final = "Set it back and reload again; or stop the bridge and start it again, which changes all of the file."


@dataclass(frozen=True, slots=True)
class LineChange:
    """A line that changes, or comes.

    Attributes:
        before: As it runs; None for a line that comes.
        after: As the file says it.
        again: Its gateway is started again even where nothing of it has changed.
    """

    before: Line | DownLine | None
    after: Line | DownLine
    again: bool = False

    @property
    def added(self) -> list[str]:
        """Filters that are to be subscribed, those with other options included."""
        known = {one.pattern: one.terms for one in self.former}
        return [one.pattern for one in self.after.gateway.subscriptions if known.get(one.pattern) != one.terms]

    @property
    def removed(self) -> list[str]:
        """Filters that are to be unsubscribed."""
        wanted = {one.pattern for one in self.after.gateway.subscriptions}
        return [one.pattern for one in self.former if one.pattern not in wanted]

    @property
    def starts(self) -> bool:
        """Whether its gateway has to be started, with settings that one which runs does not take up."""
        if self.before is None or self.again:
            return True
        before, after = (
            (line.gateway.model_copy(update={"subscriptions": (), "repeatable": ()}).digest(), _elsewhere(line))
            for line in (self.before, self.after)
        )
        return before != after

    @property
    def refilters(self) -> bool:
        """Whether a gateway that runs has to want other filters; those of gateways elsewhere are theirs."""
        return not self.starts and not _elsewhere(self.after)[0] and bool(self.added or self.removed)

    @property
    def former(self) -> Sequence[SubscribedFilter]:
        """The filters that it had."""
        return self.before.gateway.subscriptions if self.before else ()

    @property
    def between(self) -> tuple[Filter, ...]:
        """The filters wanted while the line passes from one file to the other.

        First what comes, then without what goes: in between nothing is lost. With ``at_most_once`` without either:
        where two filters take the same topics a broker may send a message for each [MQTT-3.3.4-2], and what may be lost
        is not doubled.
        """
        old = {one.pattern: one for one in self.former}
        new = {one.pattern: one for one in self.after.gateway.subscriptions}
        if self.after.guarantee is Guarantee.AT_MOST_ONCE:
            return tuple(one for pattern, one in new.items() if pattern in old)
        return tuple((old | new).values())

    def told(self) -> str:
        """The change in one line."""
        if self.before is None:
            return f'line "{self.after.name}": new'
        old, new = (getattr(line, "route", ()) for line in (self.before, self.after))
        parts = [f"{len(old)} route{'s' * (len(old) != 1)} → {len(new)}"] if old != new else []
        if not _elsewhere(self.after)[0]:
            parts += [f"subscribed {', '.join(self.added)}"] if self.added else []
            parts += [f"unsubscribed {', '.join(self.removed)}"] if self.removed else []
        parts += ["restarted"] if self.starts else []
        return f'line "{self.after.name}": {"; ".join(parts) or "other settings of its query"}'


def changes(running: Bridge, wanted: Bridge) -> list[LineChange]:
    """The lines that change, and those that come.

    Args:
        running: What the bridge was read as.
        wanted: The same file, read anew.

    Raises:
        ConfigErrors: TL-C169, each key that needs a new start; TL-C170, filters that can't pass into each other.
    """
    if fixed := list(_fixed(running, wanted)):
        what, where = "needs a restart, and is unchanged until then", str(wanted.file)
        raise ConfigErrors([ConfigError("TL-C169", where, f"{key} {what}", _DO) for key in fixed])
    before = {line.name: line for line in running.lines}
    found = [LineChange(before.get(line.name), line) for line in wanted.lines if line != before.get(line.name)]
    problems = []
    for one in found:
        if one.before and one.before.gateway.mqtt_client_id == one.after.gateway.mqtt_client_id:  # else another session
            former, where = (each.pattern for each in one.former), f'{wanted.file}  uplink "{one.after.name}"'
            problems.append(one.after.gateway.passing_problem(former, where))
    if passing := [problem for problem in problems if problem]:
        raise ConfigErrors(passing)
    return found


def _fixed(running: Bridge, wanted: Bridge) -> Iterator[str]:
    """Every key with another value that a running bridge can't take up, as the file calls it."""
    old, new = (bridge.model_dump(mode="json", exclude=_READ) for bridge in (running, wanted))
    for table, _, key in (path.partition(".") for path in _differing(old, new)):
        yield f"[{table}] {key}" if key else table
    lines = {line.name: line.kind for line in wanted.lines}
    for line in running.lines:
        if lines.get(line.name) != line.kind:
            yield f'{line.kind} "{line.name}", which is gone,'
    before, after = _of_session(running), _of_session(wanted)
    yield from (f"{key}, for which Spark's session is made," for key, value in after.items() if value != before[key])


def _of_session(bridge: Bridge) -> dict[str, object]:
    """What of the lines a session of Spark is started with (`towline.bridge.runtime.session`)."""
    settings = {name: value for line in bridge.lines for name, value in policy(line.guarantee).spark.items()}
    return {
        "a first downlink, or none": bool(bridge.downlinks),
        "a first dedupe, or none": any(line.within for line in bridge.uplinks),
        "a guarantee that no line had": settings,
    }


def _elsewhere(line: Line | DownLine) -> tuple[object, ...]:
    """The gateways of a line that the bridge does not start."""
    return tuple(getattr(line, name, ()) for name in ("gateways", "removed_gateways", "members"))


def _differing(old: Any, new: Any, prefix: str = "") -> Iterator[str]:
    """The dotted keys of two tables that have other values; never the values, which may be secrets [I12]."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in [*old, *(one for one in new if one not in old)]:
            yield from _differing(old.get(key), new.get(key), f"{prefix}.{key}" if prefix else str(key))
    elif old != new:
        yield prefix
