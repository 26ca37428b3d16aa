"""What a gateway's settings say to its MQTT session, and to what works on it."""

from __future__ import annotations

from dataclasses import replace

from towline.delivery.inbound import InboundConfig
from towline.delivery.receipts.keys import ReceiptKeys
from towline.delivery.receipts.ledger import Ledger
from towline.gateway.settings import GatewaySettings
from towline.guarantee import AckAfter, Guarantee, policy
from towline.journal import Journal
from towline.mqtt.events import Filter
from towline.net.settings import BrokerConnection

__all__ = ["connection_of", "filters_of", "inbound_config", "receipt_ledger"]


def connection_of(settings: GatewaySettings) -> BrokerConnection:
    """The gateway's connection and its session; secrets are read at each connection."""
    delivers = settings.outbox is not None
    session = settings.session(
        settings.mqtt_client_id,
        settings.name,
        filters_of(settings),
        session_expiry_s=settings.session_expiry_s,
        receive_maximum=settings.window,
        unknown_session=settings.unknown_session or ("adopt" if settings.acks is AckAfter.KAFKA else "refuse"),
        durable=policy(settings.guarantee).persistent,
        durable_ids=delivers,
        exactly_once=delivers and settings.guarantee is Guarantee.EXACTLY_ONCE,
    )
    return BrokerConnection(
        settings=settings,
        session=session,
        brokers=settings.brokers,
        linger_s=settings.linger_ms / 1000,
        linger_after_silence_s=settings.linger_after_silence_ms / 1000 if settings.linger_ms else 0.0,
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
