"""The record of the broker's session as a journal holds it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from towline.errors import ConfigError
from towline.mqtt.events import SessionConfig, SessionRecord


def recall(stored: Mapping[str, Any], where: str, config: SessionConfig, abandoned: str = "") -> SessionRecord | None:
    """The session record as it was made durable; None on a new journal, and for a session that is given up.

    Args:
        stored: As the journal has it.
        where: The state directory, for messages.
        config: Of the session to be.
        abandoned: Client id whose session is given up, with all that waits in it.

    Raises:
        ConfigError: TL-M23, the session is another client id's: nobody would fetch what the broker holds for it.
    """
    if not stored:
        return None
    subscriptions = {str(k): int(v) for k, v in stored["subscriptions"].items()}
    servers = tuple(map(str, stored["servers"]))
    record = SessionRecord(str(stored["client_id"]), bool(stored["established"]), subscriptions, servers)
    if record.client_id == config.client_id:
        return record
    # What no broker has accepted holds nothing, and a session that ends with its connection keeps nothing.
    if record.established and config.session_expiry_s and record.client_id != abandoned:
        raise ConfigError(
            "TL-M23",
            where,
            f'the MQTT session of this directory is that of client id "{record.client_id}", and client_id is '
            f'"{config.client_id}" now: what the broker holds for the first would never be fetched',
            f'Set client_id (option clientId) back to "{record.client_id}"; or give that session up, with what waits '
            f'in it and what is under way with QoS 2: abandon_session (option abandonSession) = "{record.client_id}".',
        )
    return None
