"""Hono's conventions as routes and mappings under one word, ``profile = "hono"`` (docs/hono.md).

Lines of ``hono.toml`` are written as in a bridge file, and name parameters of the table ``[hono]``. The code that
reads, checks, runs and counts lines does not depend on profiles.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, Field

from towline.bridge.config.document import REFERENCE, KeyPath, replace_references
from towline.bridge.patterns import sql_literal
from towline.validation import SettingsModel

#: Keys with Spark SQL, beside all below ``fields``.
_SQL_KEYS: Final = frozenset({"where", "reject", "sql", "header_map"})

# -- the table [hono] ------------------------------------------------------------------------------------------------

#: Headers that a message has, or the profile makes: no default stands for them.
_MADE_HEADER: Final = re.compile(
    r"correlation-id|creation-time|device_id|orig_adapter|orig_address|qos|status|tenant_id|ttd|x-opt-retain"
    r"|(?:mqtt|towline)\..*"
)
_LEVEL: Final = r"(\{tenant\}|\{device\}|\{device\}@\{tenant\}|[^{}+#/]+)"
#: Ids as Hono's device registry takes them by default (DEFAULT_TENANT_ID_PATTERN, DEFAULT_DEVICE_ID_PATTERN).
_TenantId = Annotated[str, Field(pattern=r"^[a-zA-Z0-9._-]+$")]
_DeviceId = Annotated[str, Field(pattern=r"^[a-zA-Z0-9._:=-]+$")]


def _check_defaults(defaults: dict[str, Any]) -> dict[str, Any]:
    for name, value in defaults.items():
        if _MADE_HEADER.fullmatch(name):
            raise ValueError(f'"{name}" is a header that the profile makes; remove it')
        if name.startswith("ttl") and not re.fullmatch("[0-9]+", str(value)):
            raise ValueError(f'"{name}" is a time in whole seconds; write a number')
    return defaults


_Defaults = Annotated[dict[str, str | bool | int | float], AfterValidator(_check_defaults)]
#: Longest times to live in seconds, and that of messages which give none.
_Limit = Literal["max-ttl", "max-ttl-telemetry-qos0", "max-ttl-telemetry-qos1", "max-ttl-command-response"]


class HonoTenant(SettingsModel):
    """A tenant, in the words of Hono's device registry.

    Attributes:
        defaults: Headers of messages that the message itself does not give, such as content-type and ttl.
        resource_limits: The longest times to live, in seconds.
        devices: Devices with ``defaults`` of their own, which go before the tenant's; others need not be named.
        gateways: Clients that may publish for other devices of the tenant, where a mount says who publishes.
    """

    defaults: _Defaults = Field(default_factory=dict)
    resource_limits: dict[_Limit, Annotated[int, Field(ge=0)]] = Field(default_factory=dict, alias="resource-limits")
    devices: dict[_DeviceId, dict[Literal["defaults"], _Defaults]] = Field(default_factory=dict)
    gateways: tuple[_DeviceId, ...] = ()


class HonoSection(SettingsModel):
    """What Hono's device registry would know, and where devices publish.

    Attributes:
        tenants: Those that may send and be sent to; none for all whose Kafka topics are there.
        tenant: Of topics that name none.
        device: Of topics that name none.
        mount: Levels by which the broker says which client it was, before every topic: ``{device}@{tenant}``.
        topic_names: Whether commands and errors are sent with the long names of endpoints (``command``, ``req``,
            ``error``) or the short ones (``c``, ``q``, ``e``). What devices publish may have either.
        command_ids: Ids in the topic of a command, as the devices' filters have them: ``both`` for
            ``command/TENANT/DEVICE/req/#``, ``device`` for ``command//DEVICE/req/#``, ``none`` for
            ``command///req/#``. Default ``both``, with a mount ``none``. A gateway (header ``via``) always sees the
            device's.
        adapter: The header ``orig_adapter``.
    """

    tenants: dict[_TenantId, HonoTenant] = Field(default_factory=dict)
    tenant: _TenantId | None = None
    device: _DeviceId | None = None
    mount: Annotated[str, Field(pattern=rf"^/?({_LEVEL}(/{_LEVEL})*)?/?$")] = ""
    topic_names: Literal["long", "short"] = "long"
    command_ids: Literal["both", "device", "none"] | None = None
    adapter: str = Field(default="hono-mqtt", min_length=1)

    def parameters(self, bridge: str) -> dict[str, Any]:
        """Return the parameters of ``hono.toml`` by name; text parameters are "" without a value."""
        values = self.model_dump(mode="json", by_alias=True, exclude_none=True)
        mount = self.mount.strip("/")
        prefix = f"{mount}/" if mount else ""
        derived = {"prefix": prefix, "filter": re.sub(r"[^/]*\{[^/]*", "+", prefix), "bridge": bridge}
        return dict.fromkeys(type(self).model_fields, "") | values | derived


# -- the lines -------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def profile_lines() -> dict[str, dict[str, dict[str, Any]]]:
    """Return the tables of the profile's lines by direction and name."""
    content = tomllib.loads(Path(__file__).with_name("hono.toml").read_text(encoding="utf-8"))
    return {kind: {line["name"]: line for line in content[kind]} for kind in ("uplink", "downlink")}


def apply_profile(
    line_table: Mapping[str, Any], profile: Mapping[str, Any], values: Mapping[str, Any]
) -> dict[str, Any]:
    """Merge a line's table with a line of the profile: the line's keys win, its routes come first."""
    profile_table = _expand(profile, (), values)
    common, own_routes = profile_table.pop("common", {}), line_table.get("route", [])
    if {**profile_table, **line_table}.get("guarantee") != "exactly_once":
        common.pop("promise", None)  # only such a line has routes with a weaker promise
    routes = [{**common, **route} for route in profile_table.pop("route", ())]
    del profile_table["name"]
    merged = {**profile_table, **line_table}
    del merged["profile"]
    return merged | ({"route": [*own_routes, *routes]} if routes and isinstance(own_routes, list) else {})


def _expand(value: Any, path: KeyPath, values: Mapping[str, Any]) -> Any:
    """Replace the parameters in a value of the profile; ``each`` and ``none`` as in the head of ``hono.toml``."""
    if isinstance(value, dict) and value.keys() == {"each", "none"}:
        (name,) = (name for _, name in REFERENCE.findall(value["each"]))
        texts = [_fill_text(value["each"], path, {name: entry}) for entry in values[name]]
        return texts or _expand(value["none"], path, values)
    if isinstance(value, dict):
        return {key: _expand(item, (*path, key), values) for key, item in value.items()}
    if isinstance(value, list):
        return [_expand(item, (*path, index), values) for index, item in enumerate(value)]
    return _fill_text(value, path, values) if isinstance(value, str) else value


def _fill_text(text: str, path: KeyPath, values: Mapping[str, Any]) -> str:
    """Replace the parameters in a text: constants in Spark SQL, tables as JSON."""
    is_sql = path[-1] in _SQL_KEYS or "fields" in path[-2:-1]

    def lookup(name: str) -> str:
        value = values[name]
        text_value = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        return sql_literal(text_value) if is_sql else text_value

    return replace_references(text, lookup)
