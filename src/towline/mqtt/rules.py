"""What a configuration may ask of a protocol version and of a server, and what a CONNACK may say to it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from mqtt5 import ConnAckPacket

from towline.errors import ConfigError, Refused
from towline.mqtt.events import Filter, SessionConfig

__all__ = ["check_config", "connack_problem", "filter_problem", "topic_problem", "unsupported"]

#: A variable byte integer, 0 excluded [MQTT 5 section 3.8.2.1.2].
_LARGEST_IDENTIFIER = 268_435_455


def filter_problem(value: str) -> str | None:
    """Say what is wrong with a topic filter, or None [MQTT-4.7.1-1, -2, MQTT-1.5.4-2, MQTT-4.8.2-1, -2]."""
    if "\0" in value:
        return "a topic filter has no U+0000"
    levels = value.split("/")
    if levels[0] == "$share":
        if len(levels) < 3 or not levels[1] or any(c in levels[1] for c in "+#") or not "/".join(levels[2:]):
            return "a shared subscription is $share/NAME/FILTER, the name without + and #"
        levels = levels[2:]
    if any("#" in level and level != "#" for level in levels) or "#" in levels[:-1]:
        return "# stands alone and last in a topic filter"
    if any("+" in level and level != "+" for level in levels):
        return "+ stands alone between two / in a topic filter"
    return None


#: Characters that are no more than 65,535 bytes, whichever they are.
_SURELY_SHORT: Final = 0xFFFF // 4


def topic_problem(value: str) -> str | None:
    """Say what is wrong with a topic name, or None [MQTT-3.3.2-2, MQTT-4.7.3-1, -2, -3]."""
    if not value or (len(value) > _SURELY_SHORT and len(value.encode(errors="replace")) > 0xFFFF):
        return "a topic has 1 to 65535 bytes"
    if "+" in value or "#" in value or "\0" in value:
        return "a topic has no +, no # and no U+0000"
    return None


def check_config(config: SessionConfig) -> None:
    """Refuse what the standard, or the protocol version, has no way to say.

    Raises:
        ConfigError: TL-C50, with the setting's name.
    """
    for broken, rule in [*_always(config), *(_before_5(config) if config.protocol < 5 else ())]:
        if broken:
            raise ConfigError("TL-C50", config.where, f"not possible with this protocol version: {rule}", "Change one.")


def _always(config: SessionConfig) -> Iterable[tuple[bool, str]]:
    filters = config.filters
    yield any(f.no_local and _shared(f) for f in filters), "no_local with a shared subscription [MQTT-3.8.3-4]"
    wrong = any(f.identifier is not None and not 0 < f.identifier <= _LARGEST_IDENTIFIER for f in filters)
    yield wrong, "a subscription identifier is a number from 1 to 268,435,455"


def _before_5(config: SessionConfig) -> Iterable[tuple[bool, str]]:
    will, filters = config.will, config.filters
    yield config.password is not None and config.username is None, "a password needs a username"
    yield any(f.no_local or f.retain_handling for f in filters), "no_local and retain_handling need MQTT 5"
    yield any(f.identifier is not None for f in filters), "a subscription identifier needs MQTT 5"
    yield will is not None and bool(will.will_delay_interval), "a will's delay needs MQTT 5"
    yield config.clean_start and config.session_expiry_s > 0, "a clean start ends with the connection (expiry 0)"
    yield config.authenticator is not None, "enhanced authentication needs MQTT 5"
    too_long = config.protocol == 3 and not 0 < len(config.client_id) <= 23
    yield too_long, "MQTT 3.1 takes client ids of 1 to 23 characters"


def connack_problem(packet: ConnAckPacket, config: SessionConfig, *, clean_start: bool) -> str | None:
    """Say what a CONNACK tells us that it must not, as what "the broker" did, or None.

    Args:
        packet: It takes us in.
        config: What our CONNECT was made of.
        clean_start: That CONNECT had Clean Start.
    """
    if packet.session_present and clean_start:
        return "kept a session after Clean Start [MQTT-3.2.2-2]"
    if packet.assigned_client_id is not None:
        return "assigned a client id though we named ours [MQTT 5 section 3.2.2.3.7]"
    method = config.authenticator.method if config.authenticator else None
    if packet.authentication_method == method:
        return None
    if packet.authentication_method is None:
        return f"took us in without the Authentication Method {method} [MQTT-4.12.0-5]"
    return "answered with an Authentication Method we did not ask for [MQTT-4.12.0-5, -6]"


def unsupported(server: ConnAckPacket, filters: Iterable[Filter], where: str) -> Refused | None:
    """The first subscription a server has said it can't take, as an error [MQTT 5 sections 3.2.2.3.11 to .13].

    Args:
        server: Its CONNACK.
        filters: Wanted.
        where: The line as errors name it.
    """
    for wanted in filters:
        what = None
        if _shared(wanted) and not server.shared_subscription_available:
            what = "no shared subscriptions"
        elif wanted.identifier is not None and not server.subscription_id_available:
            what = "no subscription identifiers"
        elif any(c in wanted.pattern for c in "+#") and not server.wildcard_subscription_available:
            what = "no wildcards in subscriptions"
        if what:
            said = f'the broker offers {what}, which "{wanted.pattern}" needs'
            return Refused("TL-M17", where, said, "Change the subscription, or the broker's settings.")
    return None


def _shared(wanted: Filter) -> bool:
    return wanted.pattern.startswith("$share/")
