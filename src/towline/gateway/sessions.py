"""What a gateway's settings say to its MQTT session, and to what works on it."""

from __future__ import annotations

from dataclasses import fields, replace

from mqtt5 import QoS, Will

from towline.delivery.inbound import InboundConfig
from towline.delivery.receipts.keys import ReceiptKeys
from towline.delivery.receipts.ledger import Ledger
from towline.gateway.settings import GatewaySettings, WillSettings
from towline.guarantee import AckAfter, Guarantee, policy
from towline.journal import Journal
from towline.mqtt.events import Filter, SessionConfig
from towline.net.options import NOT_READ_YET, Connecting, ConnectionOptions

__all__ = ["connection_options", "filters_of", "inbound_config", "receipt_ledger"]


def connection_options(settings: GatewaySettings) -> ConnectionOptions:
    """The part of the connection and its session; secrets are read at each connection."""
    delivers = settings.outbox is not None
    session = SessionConfig(
        client_id=settings.mqtt_client_id,
        where=settings.name,
        filters=filters_of(settings),
        username=settings.username,
        password=NOT_READ_YET if settings.password_file or settings.token_provider else None,
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
    )
    return ConnectionOptions(
        session=session,
        brokers=settings.brokers,
        linger_s=settings.linger_ms / 1000,
        linger_after_silence_s=settings.linger_after_silence_ms / 1000 if settings.linger_ms else 0.0,
        authenticator=settings.authenticator,
        **{one.name: getattr(settings, one.name) for one in fields(Connecting)} | {"proxy": settings.way},
    )


def filters_of(settings: GatewaySettings) -> tuple[Filter, ...]:
    """What the session is to be subscribed to; the gateway's own retain handling where a filter has none."""
    return tuple(
        replace(one, retain_handling=settings.retain_handling) if one.retain_handling is None else one
        for one in settings.subscriptions
    )


def inbound_config(settings: GatewaySettings) -> InboundConfig:
    """The part of what receives."""
    # With a dedupe key a line may subscribe with less than its promise takes otherwise.
    subscribed = min((one.qos for one in settings.subscriptions), default=0)
    return InboundConfig(
        settings.name,
        settings.acks,
        settings.max_packet_bytes,
        min(policy(settings.guarantee).least_qos, subscribed),
    )


def receipt_ledger(settings: GatewaySettings, inbox: Journal) -> Ledger | None:
    """The publishers that want receipts, as the inbox knows them; None for a gateway that gives none.

    Raises:
        ConfigError: TL-C85, the file of keys can't be used.
    """
    if (receipts := settings.receipts) is None:
        return None
    ledger = Ledger(
        inbox.notes,
        inbox.end,
        gateway=settings.name,
        most_publishers=receipts.max_publishers,
        most_ranges=receipts.max_ranges,
        keep_s=receipts.keep_s,
        keys=ReceiptKeys.read(receipts.key_file),
        largest=settings.max_packet_bytes,
    )
    ledger.commit(inbox.committed)
    return ledger


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
