"""What a publisher says: its log and its errors."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from towline.errors import ConfigError, PublisherError
from towline.gateway.downlink import Outcome
from towline.gateway.outrows import packet
from towline.mqtt.rules import topic_problem
from towline.mqtt.transport import Endpoint
from towline.publisher.receipt import LOG

__all__ = ["Log", "check", "closed", "endpoints_of", "given_up", "not_sent", "without_receipts", "wrong"]


class Log:
    """The application's own logging: a library does not choose where its words go."""

    def info(self, event: str, **facts: object) -> None:
        """Say it at level INFO."""
        logging.getLogger(LOG).info("%s%s", event, _told(facts))

    def warning(self, event: str, **facts: object) -> None:
        """Say it at level WARNING."""
        logging.getLogger(LOG).warning("%s%s", event, _told(facts))


def _told(facts: Mapping[str, object]) -> str:
    return "".join(f" {name}={value}" for name, value in facts.items())


def not_sent(where: str, number: int, outcome: Outcome) -> PublisherError:
    """The error of a message that the broker will not have."""
    if outcome is Outcome.EXPIRED:
        return PublisherError("TL-O05", where, f"message {number} expired before it was sent")
    return PublisherError("TL-O04", where, f"the broker refused message {number}", "It is kept aside; see the log.")


#: What a plain message has none of.
_MORE: Final = (
    "content_type",
    "response_topic",
    "correlation_data",
    "user_properties",
    "message_expiry_seconds",
)


def check(fields: Mapping[str, Any]) -> None:
    """See that MQTT can say a message.

    Raises:
        ConfigError: TL-C52, it can't.
    """
    topic, fine = fields["topic"], fields["qos"] in (0, 1, 2)
    if any(map(fields.get, _MORE)):
        fine = fine and not isinstance(packet(**fields), int)
    else:
        fine = fine and topic_problem(topic) is None
    if not fine:
        raise ConfigError("TL-C52", f'message to "{topic[:80]}"', "MQTT has no way to say this message", "Change it.")


def closed(directory: Path) -> PublisherError:
    """The error of a call that comes too late."""
    return PublisherError("TL-O02", str(directory), "the publisher is closed", "Make a new one.")


def endpoints_of(brokers: str | Sequence[str]) -> tuple[Endpoint, ...]:
    """The brokers, as the transport takes them.

    Raises:
        ConfigError: TL-C52.
    """
    uris = (brokers,) if isinstance(brokers, str) else tuple(brokers)
    if not uris:
        raise wrong("no broker is named")
    try:
        return tuple(Endpoint.parse(uri) for uri in uris)
    except ValueError as error:
        raise wrong(str(error)) from None


def given_up(where: str, number: int, outcome: Outcome) -> PublisherError:
    """The error of a message that has no receipt and is not sent any more."""
    what = f"message {number} was {outcome.value} before its receipt came; whether it arrived is not known"
    return PublisherError("TL-O06", where, what)


def without_receipts(where: str) -> ConfigError:
    """The error of a stage that can't be reached."""
    return ConfigError("TL-C52", where, "this publisher asks for no receipts", "Open it with receipts=True.")


def wrong(what: str) -> ConfigError:
    """The error of an argument that can't be."""
    return ConfigError("TL-C52", "Publisher", what, "Change it.")
