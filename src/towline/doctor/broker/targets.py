"""Which brokers a bridge meets, with which credentials, and for which lines. Pure but for the files of secrets."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Final

from towline.bridge.config.model import Bridge, DownLine, Line
from towline.gateway.secretfiles import headers_of, password_of
from towline.gateway.sessions import connection_options
from towline.gateway.settings import GatewaySettings
from towline.guarantee import Guarantee, policy
from towline.mqtt.events import Filter
from towline.net.options import ConnectionOptions
from towline.net.transport import Endpoint

__all__ = ["LineGateway", "Target", "targets_of"]

#: Settings by which one way to a broker differs from another.
_WAY: Final = (
    "username",
    "password_file",
    "tls",
    "proxy",
    "proxy_password_file",
    "protocol",
    "websocket_headers_file",
    "authenticator",
)


@dataclass(frozen=True, slots=True)
class LineGateway:
    """One gateway of a line.

    Attributes:
        line: The line.
        settings: What its gateway is told.
    """

    line: Line | DownLine
    settings: GatewaySettings

    @property
    def name(self) -> str:
        """The line's name."""
        return self.line.name

    @property
    def up(self) -> bool:
        """From MQTT to Kafka."""
        return isinstance(self.line, Line)

    @property
    def kept(self) -> bool:
        """It promises what only a broker can keep that keeps its session."""
        return policy(self.line.guarantee).persistent

    @property
    def exactly(self) -> bool:
        """It promises exactly once."""
        return self.line.guarantee is Guarantee.EXACTLY_ONCE

    @property
    def qos(self) -> int:
        """Highest QoS that it subscribes or publishes with."""
        if isinstance(self.line, DownLine):
            return self.line.qos
        return max((one.qos for one in self.settings.subscriptions), default=0)

    @property
    def filters(self) -> tuple[Filter, ...]:
        """What it subscribes to."""
        return self.settings.subscriptions if self.up else ()

    @property
    def retains(self) -> bool:
        """It publishes retained messages, or may."""
        return isinstance(self.line, DownLine) and bool(self.line.section.retain)


@dataclass(frozen=True, slots=True)
class Target:
    """A broker, the way to it, and who goes there.

    Attributes:
        endpoint: The broker.
        gateways: Those that go there in this way, at least one.
        alone: It is the only one of the bridge.
    """

    endpoint: Endpoint
    gateways: tuple[LineGateway, ...] = field(repr=False)
    alone: bool = True

    @property
    def settings(self) -> GatewaySettings:
        """What the gateways have in common: credentials and the way."""
        return self.gateways[0].settings

    @property
    def lines(self) -> str:
        """Names of the lines, for a row; empty where it is all of the bridge."""
        return "" if self.alone else ", ".join(dict.fromkeys(one.name for one in self.gateways))

    def options(self) -> ConnectionOptions:
        """How to get there.

        Raises:
            ConfigError: A file of secrets, or the authenticator, can't be used.
        """
        settings = self.settings
        made = connection_options(settings, password_of(settings), headers_of(settings))
        return replace(made, brokers=(self.endpoint,))


def targets_of(bridge: Bridge) -> tuple[Target, ...]:
    """Each broker of a bridge once for each way to it; gateways that run elsewhere by another file are not known."""
    found: dict[object, list[LineGateway]] = {}
    where: dict[object, Endpoint] = {}
    for one in _gateways(bridge):
        for endpoint in one.settings.brokers:
            key = (endpoint, *(getattr(one.settings, name) for name in _WAY))
            found.setdefault(key, []).append(one)
            where[key] = endpoint
    alone = len(found) == 1
    return tuple(Target(where[key], tuple(gateways), alone) for key, gateways in found.items())


def _gateways(bridge: Bridge) -> Iterable[LineGateway]:
    for line in bridge.lines:
        for settings in line.each_gateway:
            yield LineGateway(line, settings)
