"""What a gateway's settings say to its MQTT session, and to what works on it."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path

from mqtt5 import QoS, Will

from towline import files
from towline.delivery.inbound import InboundConfig
from towline.delivery.receipts.sender import ReceiptConfig
from towline.errors import ConfigError
from towline.gateway.settings import GatewaySettings, WillSettings
from towline.guarantee import AckAfter, Guarantee, policy
from towline.mqtt.events import Authenticator, Filter, SessionConfig
from towline.net.options import ConnectionOptions
from towline.net.transport import header_problem

__all__ = ["connection_options", "filters_of", "headers_of", "inbound_config", "password_of", "receipt_config"]


def connection_options(
    settings: GatewaySettings,
    password: bytes | None,
    headers: tuple[tuple[str, str], ...] = (),
) -> ConnectionOptions:
    """The part of the connection and its session.

    Args:
        settings: The gateway's.
        password: Read from its file; None without one.
        headers: Read from theirs.

    Raises:
        ConfigError: TL-C37, the authenticator can't be had.
    """
    delivers = settings.outbox is not None
    session = SessionConfig(
        client_id=settings.mqtt_client_id,
        where=settings.name,
        filters=filters_of(settings),
        username=settings.username,
        password=password,
        session_expiry_s=settings.session_expiry_s,
        receive_maximum=settings.window,
        keep_alive_s=settings.keep_alive_s,
        connect_timeout_s=settings.connect_timeout_s,
        unknown_session=settings.unknown_session or ("adopt" if settings.acks is AckAfter.KAFKA else "refuse"),
        durable=policy(settings.guarantee).persistent,
        durable_ids=delivers,
        exactly_once=delivers and settings.guarantee is Guarantee.EXACTLY_ONCE,
        topic_alias_maximum=settings.topic_alias_maximum,
        will=_will(settings.will) if settings.will else None,
        authenticator=_authenticator(settings, password),
    )
    return ConnectionOptions(
        session=session,
        brokers=settings.brokers,
        tls=settings.tls,
        proxy=settings.way,
        protocol=settings.protocol,
        max_packet_bytes=settings.max_packet_bytes,
        follow_redirects=settings.follow_redirects,
        brokers_share_sessions=settings.brokers_share_sessions,
        linger_s=settings.linger_ms / 1000,
        reconnect_delay_s=settings.reconnect_delay_s,
        reconnect_max_delay_s=settings.reconnect_max_delay_s,
        websocket_headers=headers,
    )


def filters_of(settings: GatewaySettings) -> tuple[Filter, ...]:
    """What the session is to be subscribed to; the gateway's own retain handling where a filter has none."""
    return tuple(
        replace(one, retain_handling=settings.retain_handling) if one.retain_handling is None else one
        for one in settings.subscriptions
    )


def _authenticator(settings: GatewaySettings, password: bytes | None) -> Authenticator | None:
    """What the user's factory gives."""
    if settings.authenticator is None:
        return None
    module, _, name = settings.authenticator.partition(":")
    try:
        made: Authenticator = getattr(importlib.import_module(module), name)(settings.username, password)
    except Exception as error:  # noqa: BLE001 - of any code
        what = f'authenticator "{settings.authenticator}" can\'t be had ({type(error).__name__})'
        do = "It is package.module:factory, called with user name and password; the module has to be on PYTHONPATH."
        raise ConfigError("TL-C37", settings.name, what, do) from None
    return made


def inbound_config(settings: GatewaySettings) -> InboundConfig:
    """The part of what receives."""
    # With a dedupe key a line may subscribe with less than its promise takes otherwise.
    subscribed = min((one.qos for one in settings.subscriptions), default=0)
    return InboundConfig(
        settings.name,
        settings.acks,
        settings.max_packet_bytes,
        settings.journal.max_bytes,
        min(policy(settings.guarantee).least_qos, subscribed),
    )


def receipt_config(settings: GatewaySettings) -> ReceiptConfig | None:
    """The part of receipts; None for a gateway that gives none."""
    if settings.receipts is None:
        return None
    values = settings.receipts.model_dump()
    return ReceiptConfig(gateway=settings.name, max_packet_bytes=settings.max_packet_bytes, **values)


def _will(settings: WillSettings) -> Will:
    return Will(
        settings.topic,
        payload=settings.payload.encode(),
        qos=QoS(settings.qos),
        retain=settings.retain,
        payload_format_indicator=int(settings.payload_is_utf8),
        message_expiry_interval=settings.expiry_s,
        content_type=settings.content_type,
        response_topic=settings.response_topic,
        correlation_data=None if settings.correlation_data is None else settings.correlation_data.encode(),
        will_delay_interval=settings.delay_s,
        user_properties=list(settings.user_properties),
    )


def password_of(settings: GatewaySettings) -> bytes | None:
    """MQTT's password; None without one.

    Raises:
        ConfigError: TL-C31, its file can't be read.
    """
    path = settings.password_file
    return None if path is None else _secret("password_file", path, "TL-C31")


def headers_of(settings: GatewaySettings) -> tuple[tuple[str, str], ...]:
    """Further headers of the request that opens a WebSocket; an error never shows a value.

    Raises:
        ConfigError: TL-C38, their file can't be read, or a line of it is no header.
    """
    path = settings.websocket_headers_file
    if path is None:
        return ()
    text = _secret("websocket_headers_file", path, "TL-C38").decode("latin-1")
    lines = [line for line in text.splitlines() if line.strip()]
    headers = []
    for number, line in enumerate(lines, start=1):
        name, colon, value = line.partition(":")
        problem = header_problem(name.strip(), value.strip()) if colon else "it is no header"
        if problem:
            raise ConfigError("TL-C38", f"{path}:{number}", problem, "Write one header a line, as Name: value.")
        headers.append((name.strip(), value.strip()))
    return tuple(headers)


def _secret(key: str, path: Path, code: str) -> bytes:
    """What is in a file that a setting names."""
    try:
        return files.secret(path)
    except OSError as error:
        what = f"{key} can't be read ({files.why(error)})"
        raise ConfigError(code, str(path), what, "Check its name and rights.") from error
