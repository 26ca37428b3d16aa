"""From Hono's Kafka topics to devices: commands, and errors about what devices have sent, as tables of downlinks.

[Hono: Command & Control API for Kafka; KafkaBasedCommand, CommandSubscription, Commands, KafkaBasedCommandContext,
AbstractCommandContext, ErrorSubscription]
"""

from __future__ import annotations

from typing import Any, Final

from towline.bridge.config.hono import topics
from towline.bridge.config.hono.settings import HonoSettings, Mount
from towline.bridge.config.hono.topics import case, level, parameter
from towline.bridge.config.hono.up import ERROR_ENDPOINTS
from towline.bridge.config.sqltext import literal

__all__ = ["DELIVERY_FAILURE", "commands", "errors"]

#: A response that says that a command could not be delivered (CommandConstants).
DELIVERY_FAILURE: Final = "application/vnd.eclipse-hono-delivery-failure-notification+json"
#: Headers of a command that begin so go back with that (KafkaRecordHelper).
_METADATA: Final = "delivery-failure-notification-metadata*"
_COMMANDS: Final = "hono.command."
_RESPONSES: Final = "hono.command_response."
#: How a refusal begins; the rest is what a client is told.
_STATUS: Final = "^status ([0-9]{3}): "
#: Request ids of Kafka: messaging type 1 in bits 1 and 2, and no reply id (Commands.encodeRequestIdParameters).
_KAFKA: Final = "2"
#: What no level of a topic may hold, and characters of which a Java string has two, which would be counted twice.
_NO_LEVEL: Final = r"[/+#\x{10000}-\x{10FFFF}]"
#: What can be a level of a topic.
_LEVEL: Final = r"^[^/+#\x{0}]+\z"


def commands(settings: HonoSettings) -> dict[str, Any]:
    """The table of a downlink that brings commands to devices."""
    return {
        "from": [_COMMANDS + tenant for tenant in settings.tenants] or {"pattern": r"hono\.command\..+"},
        "fields": {
            "hono_tenant": f"substr(topic, {len(_COMMANDS) + 1})",
            "hono_device": _header("device_id"),
            "hono_gateway": _header("via"),
            "hono_subject": _header("subject"),
            "hono_correlation": _header("correlation-id"),
            "hono_asked": f"coalesce({_header('response-required')} = 'true', false)",
            "hono_addressed": "coalesce(hono_device = try_validate_utf8(CAST(key AS STRING)), false)",
            "hono_request": _request_id(),
        },
        "topic": {"sql": _command_topic(settings)},
        "content_type": "{header.content-type}",
        "retain": False,
        "properties": "none",
        "reject": case(_refusals(), "CAST(NULL AS STRING)"),
        "failure_notice": {
            "topic": f"{_RESPONSES}{{hono_tenant}}",
            "key": "{hono_device}",
            "payload": {"sql": f"to_json(named_struct('error', regexp_replace(fault, {literal(_STATUS)}, '')))"},
            "headers": {
                "content-type": DELIVERY_FAILURE,
                "correlation-id": "{hono_correlation}",
                "creation-time": {"sql": "CAST(unix_millis(current_timestamp()) AS STRING)"},
                "device_id": "{hono_device}",
                "status": {"sql": f"coalesce(nullif(regexp_extract(fault, {literal(_STATUS)}, 1), ''), '400')"},
                "tenant_id": "{hono_tenant}",
            },
            "copy_headers": [_METADATA],
            "where": "hono_asked AND hono_correlation IS NOT NULL AND hono_addressed",
            "allowed_topics": [_RESPONSES + tenant for tenant in settings.tenants],
        },
    }


def _header(name: str) -> str:
    """The first header of a name, null where there is none, or no text (KafkaRecordHelper.getHeaderValue)."""
    first = f"get(filter(headers, h -> h.key = {literal(name)}), 0).value"
    return f"nullif(try_validate_utf8(CAST({first} AS STRING)), '')"


def _request_id() -> str:
    """What the device repeats in its response; empty for a one-way command."""
    length = "lpad(lower(hex(length(hono_correlation))), 2, '0')"
    return f"IF(hono_asked, concat({literal(_KAFKA)}, {length}, hono_correlation), '')"


def _refusals() -> list[tuple[str, str]]:
    """Why a record can't be a command, with the status and the words of Hono where it has them."""
    no_level = literal(_NO_LEVEL)
    tests = {
        "hono_device IS NULL": "device identifier is not set",
        "NOT hono_addressed": "device identifier not set as record key",
        f"hono_device RLIKE {no_level}": "the device identifier can't be a level of a topic",
        f"hono_gateway RLIKE {no_level}": "the gateway identifier can't be a level of a topic",
        "hono_subject IS NULL": "malformed command message: subject not set",
        "hono_asked AND hono_correlation IS NULL": "malformed command message: correlation-id is not set",
        f"hono_asked AND (length(hono_correlation) > 255 OR hono_correlation RLIKE {no_level})": (
            "malformed command message: correlation-id has /, + or #, or more than 255 characters"
        ),
    }
    return [(test, literal(f"status 400: {words}")) for test, words in tests.items()]


def _command_topic(settings: HonoSettings) -> str:
    """``command/TENANT/DEVICE/req/REQUEST/NAME`` (CommandSubscription.getCommandPublishTopic)."""
    endpoint, request = ("command", "req") if settings.topic_names == "long" else ("c", "q")
    ids = settings.command_ids or ("none" if settings.mount else "both")
    tenant = "hono_tenant" if ids == "both" else "''"
    device = "IF(hono_gateway IS NULL, '', hono_device)" if ids == "none" else "hono_device"
    parts = [literal(endpoint), tenant, device, literal(request), "hono_request", "hono_subject"]
    return _joined([*_mounted(settings, "hono_tenant", "coalesce(hono_gateway, hono_device)"), *parts])


def _mounted(settings: HonoSettings, tenant: str, device: str) -> list[str]:
    """The levels that stand before the topics of a client, as SQL."""
    both = f"concat({device}, {literal('@')}, {tenant})"
    said = {"{tenant}": tenant, "{device}": device, "{device}@{tenant}": both}
    return [said.get(part) or literal(part) for part in Mount(settings.mount).levels]


def _joined(levels: list[str]) -> str:
    """Levels with slashes between them; null where one is."""
    slash = f", {literal('/')}, "
    return f"concat({slash.join(levels)})"


def errors(settings: HonoSettings, dead_letters: str) -> dict[str, Any]:
    """The table of a downlink that tells devices why what they have sent was refused.

    Args:
        settings: As the uplink has them.
        dead_letters: The topic of its dead letters.
    """
    mount = Mount(settings.mount)
    detail = _header("towline.dlq.detail")
    return {
        "from": dead_letters,
        "guarantee": "at_most_once",
        "dead_letter_topic": False,
        "fields": {
            "hono_topic": _header("mqtt.topic"),
            "hono_query": topics.query("hono_topic"),
            "hono_levels": topics.levels(topics.path("hono_topic", "hono_query")),
            "hono_correlation": parameter(f"({topics.bag('hono_query')})", "correlation-id"),
            **{f"hono_{name}": sql for name, sql in topics.identity("hono_levels", settings).items()},
            "hono_endpoint": level("hono_levels", 0, mount),
            "hono_status": f"nullif(regexp_extract({detail}, {literal(_STATUS)}, 1), '')",
            "hono_message": f"regexp_replace({detail}, {literal(_STATUS)}, '')",
            "hono_error_topic": _error_topic(settings),
        },
        "topic": "{hono_error_topic}",
        "payload": {"sql": _error_body()},
        "content_type": "application/json",
        "retain": False,
        "properties": "none",
        # Only what a route has refused, and only of a client that is known.
        "where": f"{_header('towline.dlq.reason')} = 'rejected' AND octet_length(hono_error_topic) <= 65535",
    }


def _error_topic(settings: HonoSettings) -> str:
    """``error/TENANT/DEVICE/ENDPOINT/CORRELATION/STATUS`` (ErrorSubscription.getErrorPublishTopic)."""
    cases = [(f"hono_endpoint = {literal(name)}", literal(word)) for name, word in ERROR_ENDPOINTS.items()]
    parts = [
        literal("error" if settings.topic_names == "long" else "e"),
        "''" if settings.mount else "hono_tenant",
        "IF(hono_device <=> hono_client_device, '', hono_device)" if settings.mount else "hono_device",
        case([*cases, ("true", "'unknown'")], "'unknown'"),
        f"IF(hono_correlation RLIKE {literal(_LEVEL)}, hono_correlation, {literal('-1')})",
        "hono_status",
    ]
    client = "coalesce(hono_client_tenant, hono_tenant)", "coalesce(hono_client_device, hono_device)"
    return _joined([*_mounted(settings, *client), *parts])


def _error_body() -> str:
    """(AbstractVertxBasedMqttProtocolAdapter.publishError)."""
    fields = {
        "code": "CAST(hono_status AS INT)",
        "message": "hono_message",
        "timestamp": f"date_format(timestamp, {literal(_INSTANT)})",
        "correlation-id": "coalesce(hono_correlation, '-1')",
    }
    return f"to_json(named_struct({', '.join(f'{literal(name)}, {value}' for name, value in fields.items())}))"


#: ISO 8601 with milliseconds, as Java's ISO_INSTANT writes it; the session is in UTC.
_INSTANT: Final = "yyyy-MM-dd'T'HH:mm:ss.SSS'Z'"
