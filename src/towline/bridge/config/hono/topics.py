"""What a topic of Hono's MQTT adapter says, in Spark SQL: path, property bag, tenant and device.

[Hono: MQTT Adapter user guide; PropertyBag, ResourceIdentifier, MqttContext]
"""

from __future__ import annotations

from typing import Final

from towline.bridge.config.hono.settings import HonoSettings, Mount
from towline.bridge.config.sqltext import literal

__all__ = ["NAMES", "bag", "case", "identity", "level", "levels", "parameter", "path", "query"]

#: Endpoint → its long and its short name.
NAMES: Final = {"telemetry": ("telemetry", "t"), "event": ("event", "e"), "command": ("command", "c")}


def query(topic: str) -> str:
    """The property bag of a topic as text: what follows the last ``/?``; null without one."""
    mark = literal("/?")
    return f"IF(contains({topic}, {mark}), substring_index({topic}, {mark}, -1), NULL)"


def path(topic: str, bag_text: str) -> str:
    """A topic without its property bag."""
    return f"IF({bag_text} IS NULL, {topic}, left({topic}, length({topic}) - length({bag_text}) - 2))"


def levels(topic_path: str) -> str:
    """The levels of a path, those of the mount among them."""
    return f"split({topic_path}, '/')"


def level(parts: str, number: int, mount: Mount) -> str:
    """A level behind the mount; null beyond the end."""
    return f"get({parts}, {number + len(mount.levels)})"


def bag(bag_text: str) -> str:
    """The property bag as an array of names, in small letters, and values; one that is no URL query has nulls.

    [Netty's QueryStringDecoder, to which PropertyBag gives it]
    """
    name = f"lower(try_url_decode(substring_index(p, {literal('=')}, 1)))"
    value = f"try_url_decode(IF(contains(p, {literal('=')}), substr(p, instr(p, {literal('=')}) + 1), ''))"
    pairs = f"split({bag_text}, {literal('[&;]')})"
    return f"transform({pairs}, p -> named_struct('name', {name}, 'value', {value}))"


def parameter(properties: str, name: str) -> str:
    """The first value of a name in a property bag, null without one."""
    return f"get(filter({properties}, p -> p.name = {literal(name)}), 0).value"


def identity(parts: str, settings: HonoSettings) -> dict[str, str]:
    """``tenant`` and ``device`` a message is for, and ``client_tenant`` and ``client_device``, who published it.

    What the topic names goes before what the mount says, and that before what is configured; null for unknown.
    """
    mount = Mount(settings.mount)
    fixed = {"tenant": settings.tenant, "device": settings.device}
    said = {}
    for number, (name, value) in enumerate(fixed.items(), start=1):
        client = _mounted(parts, name, mount)
        otherwise = "CAST(NULL AS STRING)" if value is None else literal(value)
        said[f"client_{name}"] = client if client is not None else otherwise
        said[name] = f"coalesce(nullif({level(parts, number, mount)}, ''), {said[f'client_{name}']})"
    return said


def _mounted(parts: str, name: str, mount: Mount) -> str | None:
    """What the mount says of a name; None where it says nothing."""
    found = mount.level_of(name)
    if found is None:
        return None
    position, both = found
    whole, at = f"get({parts}, {position})", literal("@")
    if not both:
        return f"nullif({whole}, '')"
    tenant = f"substring_index({whole}, {at}, -1)"
    device = f"left({whole}, length({whole}) - length({tenant}) - 1)"
    return f"IF(contains({whole}, {at}), nullif({tenant if name == 'tenant' else device}, ''), NULL)"


def case(cases: list[tuple[str, str]], otherwise: str) -> str:
    """The value of the first test that holds, null where none does.

    Args:
        cases: Tests and values.
        otherwise: In place of a ``CASE`` without cases.
    """
    if not cases:
        return otherwise
    return f"CASE {' '.join(f'WHEN {test} THEN {value}' for test, value in cases)} END"
