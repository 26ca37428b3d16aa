"""Comparison of a changed bridge file with the running bridge: changed lines and new lines. Pure.

A reload applies all changes of a file or none. Keys that need a restart are refused with one error each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from towline.bridge.config.model import Bridge, Downlink, Uplink
from towline.errors import ConfigError, ConfigErrors
from towline.gateway.settings import SubscribedFilter
from towline.guarantee import Guarantee, policy
from towline.mqtt.events import Filter

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
    def added_filters(self) -> list[str]:
        """Patterns of filters to subscribe, including filters with changed options."""
        old_terms = {subscription.pattern: subscription.encoded_options for subscription in self.old_filters}
        return [
            subscription.pattern
            for subscription in self.new_line.gateway.subscriptions
            if old_terms.get(subscription.pattern) != subscription.encoded_options
        ]

    @property
    def removed_filters(self) -> list[str]:
        """Patterns of filters to unsubscribe."""
        new_patterns = {subscription.pattern for subscription in self.new_line.gateway.subscriptions}
        return [subscription.pattern for subscription in self.old_filters if subscription.pattern not in new_patterns]

    @property
    def starts_gateway(self) -> bool:
        """True if the gateway has to be started: a new line, or settings that a running gateway can't change."""
        if self.old_line is None or self.forces_restart:
            return True
        old_settings, new_settings = (
            (line.gateway.model_copy(update={"subscriptions": (), "repeatable": ()}).digest(), _remote_gateways(line))
            for line in (self.old_line, self.new_line)
        )
        return old_settings != new_settings

    @property
    def changes_filters(self) -> bool:
        """True if the running gateway has to change its filters; remote gateways have settings of their own."""
        is_local = not self.starts_gateway and not _remote_gateways(self.new_line)[0]
        return is_local and bool(self.added_filters or self.removed_filters)

    @property
    def old_filters(self) -> Sequence[SubscribedFilter]:
        """Filters of the running line."""
        return self.old_line.gateway.subscriptions if self.old_line else ()

    @property
    def transition_filters(self) -> tuple[Filter, ...]:
        """Filters during the change of a line.

        Old and new filters together, so that no message is lost; removed filters are unsubscribed afterwards. With
        ``at_most_once`` only the filters in both: a broker may send a message for each of two overlapping filters
        [MQTT-3.3.4-2], and such a line may lose messages but not duplicate them.
        """
        old_subscriptions = {subscription.pattern: subscription for subscription in self.old_filters}
        new_subscriptions = {subscription.pattern: subscription for subscription in self.new_line.gateway.subscriptions}
        if self.new_line.guarantee is Guarantee.AT_MOST_ONCE:
            return tuple(new_subscriptions[pattern] for pattern in new_subscriptions if pattern in old_subscriptions)
        return tuple((old_subscriptions | new_subscriptions).values())

    def summary(self) -> str:
        """Return the change in one line of text."""
        if self.old_line is None:
            return f'line "{self.new_line.name}": new'
        old_routes, new_routes = (getattr(line, "route", ()) for line in (self.old_line, self.new_line))
        routes_text = f"{len(old_routes)} route{'s' * (len(old_routes) != 1)} → {len(new_routes)}"
        parts = [routes_text] if old_routes != new_routes else []
        if not _remote_gateways(self.new_line)[0]:
            parts += [f"subscribed {', '.join(self.added_filters)}"] if self.added_filters else []
            parts += [f"unsubscribed {', '.join(self.removed_filters)}"] if self.removed_filters else []
        parts += ["restarted"] if self.starts_gateway else []
        return f'line "{self.new_line.name}": {"; ".join(parts) or "changed settings of its query"}'


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
            old_patterns = (subscription.pattern for subscription in change.old_filters)
            if error := gateway.filter_change_error(old_patterns, location):
                errors.append(error)
    if errors:
        raise ConfigErrors(errors)
    return changes


def _restart_keys(running_bridge: Bridge, new_bridge: Bridge) -> Iterator[str]:
    """Yield the keys of the file with a changed value that need a restart."""
    bridges = (running_bridge, new_bridge)
    old_values, new_values = (bridge.model_dump(mode="json", exclude=_NOT_COMPARED) for bridge in bridges)
    for table, _, key in (path.partition(".") for path in _differing_keys(old_values, new_values)):
        yield f"[{table}] {key}" if key else table
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


def _remote_gateways(line: Uplink | Downlink) -> tuple[object, ...]:
    """Return the gateways of a line that the bridge does not start."""
    return tuple(getattr(line, name, ()) for name in ("gateways", "removed_gateways", "members"))


def _differing_keys(old_value: Any, new_value: Any, prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys of two tables with different values; never the values, which may be secrets [I12]."""
    if isinstance(old_value, Mapping) and isinstance(new_value, Mapping):
        for key in dict.fromkeys((*old_value, *new_value)):
            path = f"{prefix}.{key}" if prefix else str(key)
            yield from _differing_keys(old_value.get(key), new_value.get(key), path)
    elif old_value != new_value:
        yield prefix
