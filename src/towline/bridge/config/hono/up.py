"""From devices to Hono's Kafka topics: telemetry, events and command responses as routes.

[Hono: Telemetry, Event and Command & Control API for Kafka; VertxBasedMqttProtocolAdapter, MqttContext,
AbstractKafkaBasedDownstreamSender, DownstreamMessageProperties, CommandResponse, Commands]
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from towline.bridge.config.hono import topics
from towline.bridge.config.hono.settings import HonoSettings, HonoTenant, Mount
from towline.bridge.config.hono.topics import NAMES, case, level, parameter
from towline.bridge.config.sqltext import literal

__all__ = ["EMPTY_NOTIFICATION", "ERROR_ENDPOINTS", "routes"]

#: A message without payload that only says until when the device listens (EventConstants).
EMPTY_NOTIFICATION: Final = "application/vnd.eclipse-hono-empty-notification"
#: Endpoint of a message → what an error's topic calls it (ErrorSubscription).
ERROR_ENDPOINTS: Final = {
    "telemetry": "telemetry",
    "t": "t",
    "event": "event",
    "e": "e",
    "command": "command-response",
    "c": "c-s",
}
_OCTETS: Final = "application/octet-stream"
#: Defaults that decide about other headers and are none themselves.
_DECIDING: Final = frozenset(
    ("content-type", "content-encoding", "ttl", "ttl-telemetry-qos0", "ttl-telemetry-qos1", "ttl-command-response")
)
#: Java's regular expressions, in which ``$`` would also match before a line feed at the end.
_DIGITS: Final = r"^[+-]?[0-9]{1,15}\z"
_STATUS: Final = r"^[0-9]{3}\z"
_NO_TEXT: Final = "CAST(NULL AS STRING)"
_NO_NUMBER: Final = "CAST(NULL AS BIGINT)"


def routes(settings: HonoSettings) -> list[dict[str, Any]]:
    """The tables ``[[uplink.route]]``."""
    return [route for endpoint in NAMES for name in NAMES[endpoint] for route in [_route(endpoint, name, settings)]]


def _route(endpoint: str, name: str, settings: HonoSettings) -> dict[str, Any]:
    mount = Mount(settings.mount)
    response = endpoint == "command"
    below = f"/+/+/{'res' if name == 'command' else 's'}/#" if response else "/#"
    kind = "command_response" if response else endpoint
    route = {
        "from": f"{mount.filter}{name}{below}",
        "topic": f"hono.{kind}.{{hono_tenant}}",
        "allowed_topics": [f"hono.{kind}.{tenant}" for tenant in settings.tenants or ["*"]],
        "key": "{hono_device}",
        "key_required": True,
        "headers": _headers(endpoint, settings),
        "missing_headers": "omit",
        "properties": "none",
        "fields": dict(_fields(endpoint, settings)),
        "reject": case(_refusals(endpoint, settings), _NO_TEXT),
    }
    if name == "e":  # an error is no event, and nobody is told of it
        error = f"coalesce({_own_error(mount)}, false)"
        route |= {"where": f"NOT {error}", "reject": f"IF({error}, NULL, {route['reject']})"}
    return route


def _fields(endpoint: str, settings: HonoSettings) -> Iterator[tuple[str, str]]:
    """The fields of a route, each made of those before it."""
    mount = Mount(settings.mount)
    yield "hono_query", topics.query("topic")
    yield "hono_levels", topics.levels(topics.path("topic", "hono_query"))
    yield "hono_bag", topics.bag("hono_query")
    for name, sql in topics.identity("hono_levels", settings).items():
        yield f"hono_{name}", sql
    yield "hono_type", f"nullif(coalesce({parameter('hono_bag', 'content-type')}, content_type), '')"
    yield "hono_content_type", f"coalesce(hono_type, {_default('content-type', settings)}, {literal(_OCTETS)})"
    yield "hono_created", "unix_millis(received_at)"
    yield "hono_ttl", _ttl(endpoint, settings)
    for number, name in enumerate(_extras(settings)):
        yield f"hono_default_{number}", _default(name, settings)
    if endpoint == "command":
        yield from _response(mount)
        return
    yield "hono_qos", "least(qos, 1)"
    yield "hono_ttd", _whole(parameter("hono_bag", "hono-ttd"), -1)
    yield "hono_retain", "IF(retain, true, NULL)"
    encoding = f"get(filter(user_properties, p -> p.key = {literal('content-encoding')}), 0).value"
    yield "hono_encoding", f"coalesce({encoding}, {_default('content-encoding', settings)})"


def _response(mount: Mount) -> Iterator[tuple[str, str]]:
    """What the topic of a response says: ``command/TENANT/DEVICE/res/REQUEST/STATUS``.

    A request id is a digit of flags, the length of the correlation id in two hexadecimal digits, the correlation id,
    and whatever follows (Commands.decodeRequestIdParameters).
    """
    yield "hono_request", level("hono_levels", 4, mount)
    yield "hono_status", _whole(level("hono_levels", 5, mount), 0)
    begins = f"hono_request RLIKE {literal('^[0-9][0-9A-Fa-f]{2}')}"
    yield "hono_length", f"IF({begins}, CAST(conv(substr(hono_request, 2, 2), 16, 10) AS INT), NULL)"
    whole = "hono_length > 0 AND length(hono_request) >= hono_length + 3"
    yield "hono_correlation", f"IF({whole}, substr(hono_request, 4, hono_length), NULL)"


def _headers(endpoint: str, settings: HonoSettings) -> dict[str, str]:
    """Header → template; strings are raw UTF-8, all else JSON text, which numbers and true are (KafkaRecordHelper)."""
    common = {
        "content-type": "{hono_content_type}",
        "creation-time": "{hono_created}",
        "device_id": "{hono_device}",
        "ttl": "{hono_ttl}",
        **{name: f"{{hono_default_{number}}}" for number, name in enumerate(_extras(settings))},
    }
    if endpoint == "command":
        own = {"tenant_id": "{hono_tenant}", "correlation-id": "{hono_correlation}", "status": "{hono_status}"}
        return common | own
    own = {
        "qos": "{hono_qos}",
        "ttd": "{hono_ttd}",
        "orig_adapter": settings.adapter.replace("{", "{{").replace("}", "}}"),
        "orig_address": "{mqtt.topic}",
        "content-encoding": "{hono_encoding}",
        "x-opt-retain": "{hono_retain}",
    }
    return common | own


def _extras(settings: HonoSettings) -> list[str]:
    """Headers that only defaults give."""
    tenants = settings.tenants.values()
    devices = [device.defaults for tenant in tenants for device in tenant.devices.values()]
    return sorted(set().union(*(tenant.defaults for tenant in tenants), *devices) - _DECIDING)


def _ttl(endpoint: str, settings: HonoSettings) -> str:
    """The time to live in milliseconds; null for none (DownstreamMessageProperties.applyLimits)."""
    if endpoint == "event":
        said = f"coalesce({_whole(parameter('hono_bag', 'hono-ttl'), 0)}, {_seconds('ttl', settings)})"
        return _capped(said, _limit("max_ttl", settings))
    if endpoint == "command":
        return _capped(_first_of("ttl-command-response", settings), _limit("max_ttl_command_response", settings))
    by_level = (
        _capped(_first_of(f"ttl-telemetry-qos{qos}", settings), _limit(f"max_ttl_telemetry_qos{qos}", settings))
        for qos in (0, 1)
    )
    return "IF(qos = 0, {}, {})".format(*by_level)


def _first_of(name: str, settings: HonoSettings) -> str:
    return f"coalesce({_seconds('ttl', settings)}, {_seconds(name, settings)})"


def _capped(said: str, most: str) -> str:
    return f"coalesce(least({said}, {most}), {said}, {most}) * 1000L"


def _whole(text: str, least: int) -> str:
    """A whole number of at least so much, null for anything else; of 15 digits, so that it can become milliseconds."""
    number = f"CAST({text} AS BIGINT)"
    return f"IF({text} RLIKE {literal(_DIGITS)} AND {number} >= {least}, {number}, NULL)"


def _seconds(name: str, settings: HonoSettings) -> str:
    return f"CAST({_default(name, settings)} AS BIGINT)"


def _default(name: str, settings: HonoSettings) -> str:
    """What a device's or tenant's defaults give; the device's go before the tenant's."""
    devices = [
        (f"{_is_tenant(tenant)} AND hono_device = {literal(device)}", _json(one.defaults[name]))
        for tenant, said in settings.tenants.items()
        for device, one in said.devices.items()
        if name in one.defaults
    ]
    tenants = [
        (_is_tenant(tenant), _json(said.defaults[name]))
        for tenant, said in settings.tenants.items()
        if name in said.defaults
    ]
    return case([*devices, *tenants], _NO_TEXT)


def _limit(name: str, settings: HonoSettings) -> str:
    limits = [(tenant, getattr(said.limits, name)) for tenant, said in settings.tenants.items()]
    return case([(_is_tenant(tenant), f"{most}L") for tenant, most in limits if most is not None], _NO_NUMBER)


def _is_tenant(tenant: str) -> str:
    return f"hono_tenant = {literal(tenant)}"


def _json(value: str | float) -> str:
    """A value as Hono writes it into a header: a string as it is, anything else as JSON."""
    return literal(value if isinstance(value, str) else str(value).lower())


def _refusals(endpoint: str, settings: HonoSettings) -> list[tuple[str, str]]:
    """Why Hono's adapter would refuse a message, in its words and with its status, the first that holds counts."""
    tests = [("exists(hono_bag, p -> p.name IS NULL OR p.value IS NULL)", 400, "malformed topic name")]
    if endpoint == "event":
        tests.append(("qos = 0", 400, "Only QoS 1 supported for event messages"))
    tests += _strangers(settings)
    refusals = [(test, literal(f"status {status}: {words}")) for test, status, words in tests]
    if endpoint == "command":
        return [*refusals, *_bad_responses(Mount(settings.mount))]
    empty = "octet_length(payload) = 0"
    mismatch = literal("status 400: Content-Type null does not match payload")
    wrong = literal(f"status 400: Content-Type {EMPTY_NOTIFICATION} does not match payload")
    return [
        *refusals,
        (f"{empty} AND hono_type IS NULL", mismatch),
        (f"NOT {empty} AND hono_type = {literal(EMPTY_NOTIFICATION)}", wrong),
    ]


def _strangers(settings: HonoSettings) -> list[tuple[str, int, str]]:
    """Tenants and devices that no message can be taken for."""
    tests = [
        ("hono_tenant IS NULL", 400, "the topic names no tenant"),
        ("hono_device IS NULL", 400, "the topic names no device"),
    ]
    mount = Mount(settings.mount)
    if mount.level_of("tenant"):
        tests.append(("NOT hono_client_tenant <=> hono_tenant", 403, "can only publish for device of same tenant"))
    if settings.tenants:
        names = ", ".join(map(literal, settings.tenants))
        tests.append((f"hono_tenant NOT IN ({names})", 404, "no such tenant"))
    if mount.level_of("device"):
        gateways = _gateways(settings.tenants)
        test = f"NOT hono_client_device <=> hono_device AND NOT coalesce({gateways}, false)"
        tests.append((test, 403, "device is not authorized to act on behalf of another"))
    return tests


def _gateways(tenants: dict[str, HonoTenant]) -> str:
    """Whether the client may publish for others."""
    listed = [
        f"({_is_tenant(tenant)} AND hono_client_device IN ({', '.join(map(literal, said.gateways))}))"
        for tenant, said in tenants.items()
        if said.gateways
    ]
    return " OR ".join(listed) or "false"


def _bad_responses(mount: Mount) -> list[tuple[str, str]]:
    few = f"size(hono_levels) < {6 + len(mount.levels)}"
    return [
        (few, literal("status 400: command response topic has too few segments")),
        ("hono_status IS NULL", literal("status 400: invalid status code")),
        (
            "hono_status < 200 OR hono_status >= 600 OR hono_correlation IS NULL",
            literal("status 400: command response topic contains invalid data"),
        ),
    ]


def _own_error(mount: Mount) -> str:
    """Whether a topic below ``e`` is that of an error message, which only the bridge publishes."""
    names = ", ".join(map(literal, [*ERROR_ENDPOINTS.values(), "unknown"]))
    parts = "hono_levels"
    return (
        f"size({parts}) = {6 + len(mount.levels)} AND {level(parts, 3, mount)} IN ({names}) "
        f"AND {level(parts, 5, mount)} RLIKE {literal(_STATUS)}"
    )
