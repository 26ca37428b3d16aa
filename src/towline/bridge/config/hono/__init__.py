"""``profile = "hono"``: Eclipse Hono's conventions for MQTT topics and Kafka records, as ordinary routes and mappings.

A line with the profile is what a user could write by hand: the functions here give the tables, and all that reads,
checks, runs and counts lines knows nothing of Hono.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from towline.bridge.config.hono import down, up
from towline.bridge.config.hono.settings import HonoSettings

__all__ = ["PROFILES", "HonoSettings", "with_profile"]


def _uplink(settings: HonoSettings, _: str) -> dict[str, Any]:
    return {"guarantee": "exactly_once", "route": up.routes(settings)}


def _commands(settings: HonoSettings, _: str) -> dict[str, Any]:
    return down.commands(settings)


#: Kind of line → profile → what it says, given the settings and the bridge's topic of dead letters.
PROFILES: Final[Mapping[str, Mapping[str, Callable[[HonoSettings, str], dict[str, Any]]]]] = {
    "uplink": {"hono": _uplink},
    "downlink": {"hono": _commands, "hono-errors": down.errors},
}


def with_profile(kind: str, table: Mapping[str, Any], settings: HonoSettings, dead_letters: str) -> dict[str, Any]:
    """The table of a line with all that its profile says; what the line says itself goes before that.

    Args:
        kind: ``uplink`` or ``downlink``.
        table: As written; its ``profile`` is one of `PROFILES`.
        settings: ``[hono]``.
        dead_letters: The topic of the bridge's dead letters.
    """
    own = {key: value for key, value in table.items() if key != "profile"}
    said = PROFILES[kind][table["profile"]](settings, dead_letters)
    merged = {**said, **own}
    if kind == "uplink" and isinstance(own.get("route", []), list):
        # Hono's devices publish with QoS 1 or 0, each as it means it, on the same topics.
        subscribed = {"promise": "at_least_once"} if merged["guarantee"] == "exactly_once" else {"qos": 1}
        merged["route"] = [*own.get("route", []), *(route | subscribed for route in said["route"])]
    return merged
