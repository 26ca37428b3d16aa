"""Subject of an examination: bridge, load and broker targets. Pure, except for sessions read from journals."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from towline.bridge.config.model import Bridge, Downlink, Uplink
from towline.bridge.config.tables import NAME
from towline.gateway.identity import MEMBERS_DIR
from towline.gateway.settings import GatewaySettings
from towline.guarantee import Guarantee, policy
from towline.journal.recovery import read_state
from towline.mqtt.filters import without_share
from towline.net.endpoint import Endpoint
from towline.text import count_text, duration_text

#: Prefix or suffix of doctor's client ids, topics and transactional ids.
PROBE_PREFIX: Final = "towline-doctor"
#: Names of the settings that distinguish connections to one broker.
CLIENT_KEYS: Final = (
    *("username", "password_file", "token_provider", "authenticator", "tls", "proxy", "proxy_password_file"),
    *("protocol", "websocket_headers_file", "websocket_query_file"),
)


@dataclass(frozen=True)
class LineLoad:
    """Load of a line: messages a second, bytes of topics, payloads and properties a second (> 0), and their source."""

    messages_s: float
    bytes_s: float
    source: str

    def __str__(self) -> str:
        """Return the rate as ``at 200 msg/s``."""
        rate = self.messages_s
        return f"at {rate:,.0f} msg/s" if rate >= 10 else f"at {rate:.2g} msg/s"


def queue_text(count: float, load: LineLoad | None) -> str:
    """Return ``1,000 messages, 5 s at 200 msg/s``; without a load only the messages."""
    return count_text(int(count)) + ("" if load is None else f", {duration_text(count / load.messages_s)} {load}")


@dataclass(frozen=True)
class Inputs:
    """Input of one doctor run.

    Attributes:
        bridge: As returned by `towline.bridge.config.file.load`.
        rate: Messages a second of the whole bridge, from ``--rate``; None to measure them at the broker.
        measure_seconds: Duration of the measurement.
        mosquitto_conf: Configuration file of the broker, if it can be read; else None.
        timeout_s: Seconds to wait for an answer of a server.
        probe_messages: Messages published to find the queue limit of an offline session.
        loads: Load of each uplink by its name, once measured; a line without messages is missing.
    """

    bridge: Bridge
    rate: float | None = None
    measure_seconds: float = 5.0
    mosquitto_conf: Path | None = None
    timeout_s: float = 10.0
    probe_messages: int = 1500
    loads: dict[str, LineLoad] = field(default_factory=dict)

    def load_of(self, lines: Iterable[str]) -> LineLoad | None:
        """Return the total load of some lines; None if no load is known."""
        loads = [self.loads[name] for name in lines if name in self.loads]
        if not loads:
            return None
        return LineLoad(sum(load.messages_s for load in loads), sum(load.bytes_s for load in loads), loads[0].source)


@dataclass(frozen=True, slots=True)
class LineGateway:
    """One gateway of a line, with its settings."""

    line: Uplink | Downlink
    settings: GatewaySettings

    @property
    def needs_session(self) -> bool:
        """Whether the line's guarantee needs a persistent session at the broker."""
        return policy(self.line.guarantee).persistent_session

    @property
    def exactly_once(self) -> bool:
        """Whether the line promises exactly once by QoS 2; a route may promise less, and a key needs less."""
        return self.line.guarantee is Guarantee.EXACTLY_ONCE and self.qos == 2

    @property
    def qos(self) -> int:
        """Highest QoS of its subscriptions or publications."""
        if isinstance(self.line, Downlink):
            return self.line.qos
        return max((subscription.qos for subscription in self.settings.subscriptions), default=0)


@dataclass(frozen=True, slots=True)
class Target:
    """Broker with its gateways (at least one) of equal connection settings."""

    endpoint: Endpoint
    gateways: tuple[LineGateway, ...] = field(repr=False)

    @property
    def settings(self) -> GatewaySettings:
        """Settings shared by the gateways: credentials and connection."""
        return self.gateways[0].settings

    @property
    def by_line(self) -> dict[str, LineGateway]:
        """One gateway of each line, by the name of the line."""
        return {gateway.line.name: gateway for gateway in reversed(self.gateways)}


def broker_targets(bridge: Bridge) -> tuple[Target, ...]:
    """Return each broker of a bridge once per set of connection settings; gateways of other files are not known."""
    groups: dict[tuple[Endpoint, *tuple[object, ...]], list[LineGateway]] = {}
    for line in bridge.lines:
        for settings in line.all_gateways:
            for endpoint in settings.brokers:
                key = (endpoint, *(getattr(settings, name) for name in CLIENT_KEYS))
                groups.setdefault(key, []).append(LineGateway(line, settings))
    return tuple(Target(key[0], tuple(gateways)) for key, gateways in groups.items())


def topic_filters(bridge: Bridge) -> set[str]:
    """Return all topic filters of the bridge file and of the sessions in its journals.

    A session keeps its subscriptions and queues for them, even after a filter, line or member is removed from the file.

    Raises:
        JournalError: A journal is damaged or belongs to another program.
        OSError: A directory or file below the state directory can't be read.
    """
    patterns = {route.pattern.filter for line in bridge.uplinks for route in line.routes}
    for gateway in (gateway for line in bridge.uplinks for gateway in line.all_gateways):
        patterns |= {subscription.pattern for subscription in gateway.subscriptions}
    return {without_share(pattern) for pattern in patterns | _journaled_filters(bridge.state_dir)}


def _journaled_filters(state_dir: Path) -> set[str]:
    """Return the subscriptions of all gateway sessions below a state directory."""
    line_dirs = _named_directories(state_dir)
    member_dirs = [member_dir for line_dir in line_dirs for member_dir in _named_directories(line_dir / MEMBERS_DIR)]
    states = (read_state(directory / "inbox") for directory in line_dirs + member_dirs)
    return {pattern for state in states if state for pattern in state.session.get("subscriptions", ())}


def _named_directories(directory: Path) -> list[Path]:
    """Return entries with a valid name of a line or member, unlike ``lost+found``; empty without the directory."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return [entry for entry in directory.iterdir() if re.fullmatch(NAME, entry.name)]
    return []
