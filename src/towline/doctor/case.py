"""What is examined: the bridge, the load, and the brokers that its lines go to. Pure but for the sessions on disk."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from towline.bridge.config.model import Bridge, DownLine, Line
from towline.bridge.config.tables import NAME
from towline.gateway.identity import MEMBERS
from towline.gateway.settings import GatewaySettings
from towline.guarantee import Guarantee, policy
from towline.journal.recovery import session_in
from towline.mqtt.filters import unshared
from towline.net.endpoint import Endpoint
from towline.text import counted, span

#: How everything begins or ends that doctor makes: client ids, topics, transactional ids.
PROBE: Final = "towline-doctor"
#: Settings by which one way to a broker differs from another.
WAY: Final = (
    *("username", "password_file", "token_provider", "authenticator", "tls", "proxy", "proxy_password_file"),
    *("protocol", "websocket_headers_file", "websocket_query_file"),
)


@dataclass(frozen=True)
class LineLoad:
    """What comes in: messages, and bytes of topics, payloads and properties, a second (> 0); and who says so."""

    messages_s: float
    bytes_s: float
    how: str

    def __str__(self) -> str:
        """``at 200 msg/s``."""
        rate = self.messages_s
        return f"at {rate:,.0f} msg/s" if rate >= 10 else f"at {rate:.2g} msg/s"


def within(messages: float, load: LineLoad | None) -> str:
    """``1,000 messages, 5 s at 200 msg/s``; only the messages where no load is known."""
    return counted(int(messages)) + ("" if load is None else f", {span(messages / load.messages_s)} {load}")


@dataclass(frozen=True)
class Case:
    """One examination.

    Attributes:
        bridge: As `towline.bridge.config.file.load` read it.
        rate: Messages a second of the whole bridge, as told with ``--rate``; None to measure it at the broker.
        seconds: How long the rate is measured.
        mosquitto_conf: The broker's configuration file, where it can be read; None otherwise.
        patience: Seconds to wait for an answer of a server.
        probe_messages: Messages published to find out how many a broker keeps for a session that is away.
        loads: Load of each uplink by its name, once it is known; a line on which nothing came is missing.
    """

    bridge: Bridge
    rate: float | None = None
    seconds: float = 5.0
    mosquitto_conf: Path | None = None
    patience: float = 10.0
    probe_messages: int = 1500
    loads: dict[str, LineLoad] = field(default_factory=dict)

    def load_of(self, lines: Iterable[str]) -> LineLoad | None:
        """Load of some lines together; None if that of none is known."""
        each = [self.loads[name] for name in lines if name in self.loads]
        if not each:
            return None
        return LineLoad(sum(one.messages_s for one in each), sum(one.bytes_s for one in each), each[0].how)


@dataclass(frozen=True, slots=True)
class LineGateway:
    """One gateway of a line, and what it is told."""

    line: Line | DownLine
    settings: GatewaySettings

    @property
    def kept(self) -> bool:
        """It promises what only a broker can keep that keeps its session."""
        return policy(self.line.guarantee).persistent

    @property
    def exactly(self) -> bool:
        """It promises exactly once, and by QoS 2: a route may promise less, and a key needs less."""
        return self.line.guarantee is Guarantee.EXACTLY_ONCE and self.qos == 2

    @property
    def qos(self) -> int:
        """Highest QoS that it subscribes or publishes with."""
        if isinstance(self.line, DownLine):
            return self.line.qos
        return max((one.qos for one in self.settings.subscriptions), default=0)


@dataclass(frozen=True, slots=True)
class Target:
    """A broker, and the gateways that go there in one way, at least one; `alone` where the bridge has no other."""

    endpoint: Endpoint
    gateways: tuple[LineGateway, ...] = field(repr=False)
    alone: bool = True

    @property
    def settings(self) -> GatewaySettings:
        """What the gateways have in common: credentials and the way."""
        return self.gateways[0].settings

    @property
    def names(self) -> str:
        """Names of the lines, for a row; empty where it is all of the bridge."""
        return "" if self.alone else ", ".join(self.lines)

    @property
    def lines(self) -> dict[str, LineGateway]:
        """A gateway of each line, by the line's name."""
        return {one.line.name: one for one in reversed(self.gateways)}


def targets_of(bridge: Bridge) -> tuple[Target, ...]:
    """Each broker of a bridge once for each way to it; gateways that run elsewhere by another file are not known."""
    found: dict[tuple[Endpoint, *tuple[object, ...]], list[LineGateway]] = {}
    for line in bridge.lines:
        for settings in line.each_gateway:
            for endpoint in settings.brokers:
                key = (endpoint, *(getattr(settings, name) for name in WAY))
                found.setdefault(key, []).append(LineGateway(line, settings))
    return tuple(Target(key[0], tuple(gateways), len(found) == 1) for key, gateways in found.items())


def filters_of(bridge: Bridge) -> set[str]:
    """Every topic filter that a line receives by: of the file, and of each session that a journal here has.

    A session keeps its subscriptions when the file is narrowed, or its line or member taken out, and queues by them.

    Raises:
        JournalError: A journal is damaged, or foreign.
        OSError: A directory or file below the state directory can't be read.
    """
    said = {route.pattern.filter for line in bridge.uplinks for route in line.routes}
    asked = {one.pattern for line in bridge.uplinks for gateway in line.each_gateway for one in gateway.subscriptions}
    return {unshared(pattern) for pattern in said | asked | _subscribed(bridge.state_dir)}


def _subscribed(state_dir: Path) -> set[str]:
    """What the sessions of all gateways below a state directory are subscribed to."""
    lines = _named(state_dir)
    gateways = [*lines, *(member for line in lines for member in _named(line / MEMBERS))]
    return {pattern for one in gateways for pattern in session_in(one / "inbox").get("subscriptions", ())}


def _named(directory: Path) -> list[Path]:
    """What may be of a line, or a member, in a directory; nothing where there is none."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return [one for one in directory.iterdir() if re.fullmatch(NAME, one.name)]  # not lost+found, of root
    return []
