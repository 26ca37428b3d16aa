"""What a changed bridge file may change while its bridge runs: the routes of uplinks, and how large batches are. Pure.

A change is taken up as a whole or not at all. What else differs needs a new start, and the file is refused with a line
for each such key, so that nobody takes half of a file for the whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from towline.bridge.config.mistakes import ConfigMistakes
from towline.bridge.config.model import AnyLine, Bridge, Line
from towline.errors import ConfigError
from towline.gateway.filters import passing_problem
from towline.guarantee import Guarantee
from towline.mqtt.events import Filter

__all__ = ["LineChange", "changes"]

#: Keys of an uplink that its query alone knows: it is stopped between two batches and started again.
_OF_ITS_QUERY: Final = frozenset(
    {
        "sections",
        "dedupe",
        "dead_letter_topic",
        "dead_letter_topics",
        "max_messages_per_trigger",
        "max_bytes_per_trigger",
        "trigger_interval_s",
    }
)
#: What a gateway's settings are made of that stands elsewhere in the file, or follows from what does.
_DERIVED: Final = frozenset(
    {"name", "state_dir", "checkpoint", "guarantee", "subscriptions", "repeatable", "client", "owner_pid"}
)
#: Keys of a gateway that stand beside the table ``mqtt`` of its line.
_BESIDE_MQTT: Final = frozenset({"ack_after", "journal", "outbox", "receipts", "listen", "share"})
#: What is said of the file, and what is compared line by line.
_READ: Final = ("file", "lines", "leave_waiting")
_DO: Final = "Set it back and reload again; or stop the bridge and start it again, which changes all of the file."


@dataclass(frozen=True, slots=True)
class LineChange:
    """A line whose routes change.

    Attributes:
        before: As it runs.
        after: As the file says it.
    """

    before: Line
    after: Line

    @property
    def added(self) -> list[str]:
        """Filters that are to be subscribed, those with other options included."""
        known = {one.pattern: one.terms for one in self.before.gateway.subscriptions}
        return [one.pattern for one in self.after.gateway.subscriptions if known.get(one.pattern) != one.terms]

    @property
    def removed(self) -> list[str]:
        """Filters that are to be unsubscribed."""
        wanted = {one.pattern for one in self.after.gateway.subscriptions}
        return [one.pattern for one in self.before.gateway.subscriptions if one.pattern not in wanted]

    @property
    def refilters(self) -> bool:
        """Whether the line's own gateway has to want other filters; those of gateways elsewhere are theirs."""
        return not self.after.gateways and bool(self.added or self.removed)

    @property
    def between(self) -> tuple[Filter, ...]:
        """The filters wanted while the line passes from one file to the other.

        First what comes, then without what goes: in between nothing is lost. With ``at_most_once`` without either:
        where two filters take the same topics a broker may send a message for each [MQTT-3.3.4-2], and what may be lost
        is not doubled.
        """
        old = {one.pattern: one for one in self.before.gateway.subscriptions}
        new = {one.pattern: one for one in self.after.gateway.subscriptions}
        if self.after.guarantee is Guarantee.AT_MOST_ONCE:
            return tuple(one for pattern, one in new.items() if pattern in old)
        return tuple((old | new).values())

    def told(self) -> str:
        """The change in one line."""
        old, new = self.before.sections, self.after.sections
        parts = [f"{len(old)} route{'s' * (len(old) != 1)} → {len(new)}" if old != new else "other batches"]
        if self.refilters:
            parts += [f"subscribed {', '.join(self.added)}"] if self.added else []
            parts += [f"unsubscribed {', '.join(self.removed)}"] if self.removed else []
        return f'line "{self.after.name}": {"; ".join(parts)}'


def changes(running: Bridge, wanted: Bridge) -> list[LineChange]:
    """The lines that change.

    Args:
        running: What the bridge was read as.
        wanted: The same file, read anew.

    Raises:
        ConfigMistakes: TL-C169, each key that needs a new start; TL-C170, filters that can't pass into each other.
    """
    fixed = [_needs_a_start(wanted, key) for key in _fixed(running, wanted)]
    if fixed:
        raise ConfigMistakes(fixed)
    before = {line.name: line for line in running.uplinks}
    changed = [LineChange(before[line.name], line) for line in wanted.uplinks if line != before[line.name]]
    passing = [_passing_problem(wanted, one) for one in changed if one.refilters]
    if problems := [problem for problem in passing if problem]:
        raise ConfigMistakes(problems)
    return changed


def _fixed(running: Bridge, wanted: Bridge) -> Iterator[str]:
    """Every key with another value that a running bridge can't take up, as the file calls it."""
    old, new = (bridge.model_dump(mode="json", exclude=set(_READ)) for bridge in (running, wanted))
    for key in ("name", "state_dir"):
        if old.pop(key) != new.pop(key):
            yield key
    for table in old:
        yield from (f"[{table}] {key}" for key in _differing(old[table], new[table]))
    before, after = ({(line.kind, line.name): line for line in bridge.lines} for bridge in (running, wanted))
    for kind, name in [*before, *(one for one in after if one not in before)]:
        subject = f'{kind} "{name}"'
        if (kind, name) not in after:
            yield f"{subject}, which is gone,"
        elif (kind, name) not in before:
            yield f"{subject}, which is new,"
        else:
            yield from (f"{subject}: {key}" for key in _fixed_keys(before[kind, name], after[kind, name]))


def _fixed_keys(before: AnyLine, after: AnyLine) -> Iterator[str]:
    old, new = (line.model_dump(mode="json", exclude={"gateway"}) for line in (before, after))
    if isinstance(before, Line) and isinstance(after, Line):
        if (before.within is None) != (after.within is None):
            yield "dedupe"  # Spark keeps state for it, or none
        old, new = ({key: value for key, value in one.items() if key not in _OF_ITS_QUERY} for one in (old, new))
    yield from (key.removeprefix("section.") for key in _differing(old, new))
    old, new = (one.gateway.model_dump(mode="json", exclude=set(_DERIVED)) for one in (before, after))
    for key in _differing(old, new):
        if key == "outbox.checkpoint":
            continue
        yield key if key.partition(".")[0] in _BESIDE_MQTT else f"mqtt.{key}"


def _differing(old: Any, new: Any, prefix: str = "") -> Iterator[str]:
    """The dotted keys of two tables that have other values; never the values, which may be secrets [I12]."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in [*old, *(one for one in new if one not in old)]:
            yield from _differing(old.get(key), new.get(key), f"{prefix}.{key}" if prefix else str(key))
    elif old != new:
        yield prefix


def _needs_a_start(wanted: Bridge, key: str) -> ConfigError:
    return ConfigError("TL-C169", str(wanted.file), f"{key} needs a restart, and is unchanged until then", _DO)


def _passing_problem(wanted: Bridge, change: LineChange) -> ConfigError | None:
    former, where = change.before.gateway.subscriptions, f'{wanted.file}  uplink "{change.after.name}"'
    return passing_problem(change.after.gateway, (one.pattern for one in former), where)
