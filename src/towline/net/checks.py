"""What a client is given, read and refused in one line (TL-C51)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, NoReturn

from towline.errors import ConfigError
from towline.mqtt.events import Filter
from towline.mqtt.message import OutboundMessage
from towline.mqtt.rules import filter_problem, message_problem, whole_number_problem
from towline.mqtt.versions import LEVELS
from towline.net.options import connection_problem
from towline.net.transport import Endpoint

__all__ = ["check_connection", "content_of", "endpoints_of", "filters_of", "refuse"]

_LEVEL: Final = "qos and retain_handling are 0, 1 or 2"
#: MQTT ends here [MQTT-1.5.5-1], with the bytes of the length itself.
_LARGEST_PACKET: Final = 268_435_455 + 5
_FLAGS: Final = ("payload_format_indicator", "retain")


def refuse(where: str, what: str) -> NoReturn:
    """Raise ConfigError TL-C51."""
    raise ConfigError("TL-C51", where, what, "Change it.")


def check_connection(
    where: str,
    protocol: str,
    max_packet_bytes: int,
    delays: tuple[float, float],
    headers: Iterable[tuple[str, str]],
) -> None:
    """Refuse a version that is none, a size that no packet has, pauses and headers that can't be."""
    if problem := connection_problem(*delays, headers):
        refuse(where, problem)
    if protocol not in LEVELS:
        refuse(where, f'protocol "{protocol}" is none of {", ".join(LEVELS)}')
    if problem := whole_number_problem(max_packet_bytes, 1, _LARGEST_PACKET):
        refuse("max_packet_bytes", problem)


def endpoints_of(uri: str | Sequence[str]) -> tuple[Endpoint, ...]:
    """The brokers that one URI or several name."""
    uris = (uri,) if isinstance(uri, str) else tuple(uri)
    if not uris:
        refuse("uri", "no broker")
    try:
        return tuple(Endpoint.parse(one) for one in uris)
    except ValueError as error:
        refuse("uri", str(error))


def filters_of(given: str | Filter | Sequence[str | Filter], where: str) -> tuple[Filter, ...]:
    """The subscriptions that texts and filters name; a plain text means QoS 1."""
    several: Any = (given,) if isinstance(given, str | Filter) else given
    if not isinstance(several, Iterable) or not all(isinstance(one, str | Filter) for one in several):
        refuse("subscribe", 'it is a topic filter, or a list of them, each a text or a Filter("telemetry/#", qos=2)')
    filters = tuple(Filter(one) if isinstance(one, str) else one for one in several)
    if len({one.pattern for one in filters}) != len(filters):
        refuse(where, "a topic filter is subscribed twice")
    for one in filters:
        problem = filter_problem(one.pattern) if one.pattern else "a topic filter is not empty"
        if problem or one.qos not in range(3) or one.retain_handling not in (None, 0, 1, 2):
            refuse(f'subscription "{one.pattern}"', problem or f"{_LEVEL}, not {one.qos!r} and {one.retain_handling!r}")
    return filters


def content_of(topic: str, payload: bytes | str, qos: int, **properties: Any) -> OutboundMessage:
    """What is to be published, its properties as `OutboundMessage` has them."""
    said = {name: value for name, value in properties.items() if name not in _FLAGS}
    said["expiry_s"] = said.pop("message_expiry_interval")
    if problem := message_problem(topic, payload, qos, **said):
        refuse(f"message to {str(topic)[:80]!r}", problem)
    try:
        data = payload.encode() if isinstance(payload, str) else payload
        return OutboundMessage(topic, data, qos=qos, **properties)
    except (ValueError, TypeError, OverflowError) as error:
        refuse(f'message to "{topic}"', str(error))
