"""The gateways of a line that run elsewhere: how they are reached, asked, and what they say together."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, TypeVar

from towline.bridge.config.services import in_the_file
from towline.errors import GatewayError
from towline.gateway.access import REFUSALS, Access
from towline.spark.link import GatewayPlace

if TYPE_CHECKING:
    from towline.gateway.client import GatewayClient

__all__ = ["AWAY", "away_text", "away_trouble", "combined", "each", "is_refused", "places_of", "stale"]

#: Key of a gateway that does not answer: since when, in seconds since 1970.
AWAY: Final = "away_since"
#: Summed over gateways; what one does not tell is nothing.
_SUMS: Final = (
    "received",
    "journaled",
    "committed",
    "end",
    "first",
    "deduplicated",
    "bytes_on_disk",
    "unacknowledged",
    "sessions_lost",
    "window_overruns",
    "packets_too_large",
    "too_many_properties",
    "lower_qos",
)
_Answer = TypeVar("_Answer")


def places_of(gateways: Iterable[str], access: Access) -> list[GatewayPlace]:
    """Where gateways are, as a bridge file or a checkpoint names them."""
    return [GatewayPlace.of(one, access) for one in gateways]


def each(places: Sequence[GatewayPlace], ask: Callable[[GatewayClient], _Answer]) -> dict[str, _Answer | GatewayError]:
    """What each gateway answers, or why it does not; they are asked at the same time."""

    def one(place: GatewayPlace) -> _Answer | GatewayError:
        try:
            with place.attach() as client:
                return ask(client)
        except GatewayError as error:
            return error

    with ThreadPoolExecutor(max(1, len(places)), "gateways") as pool:
        return dict(zip([place.text for place in places], pool.map(one, places), strict=True))


def combined(
    answers: Mapping[str, Mapping[str, Any] | GatewayError],
    before: Mapping[str, Any],
    now: float | None = None,
) -> dict[str, Any]:
    """The statuses of a line's gateways as one, with the parts by name; of one that is away what it said last.

    Args:
        answers: By where each gateway is.
        before: What this made of the answers before; its parts are remembered.
        now: Seconds since 1970.
    """
    known = {part["at"]: (name, part) for name, part in (before.get("gateways") or {}).items()}
    parts: dict[str, dict[str, Any]] = {}
    for at, answer in answers.items():
        if isinstance(answer, GatewayError):
            name, last = known.get(at, (at, {}))
            since = last.get(AWAY) or (time.time() if now is None else now)
            parts[name] = {**last, "at": at, AWAY: since, **_reason(answer)}
        else:
            parts[str(answer["name"])] = {**answer, "at": at}
    there = [part for part in parts.values() if AWAY not in part]
    sums = {key: sum(int(part.get(key) or 0) for part in parts.values()) for key in _SUMS}
    ages = [part["oldest"] for part in there if part.get("oldest") is not None]
    states = [str(part.get("state")) for part in there]
    plain = next(iter(there), {})
    return {
        **sums,
        "gateways": dict(sorted(parts.items())),
        "oldest": min(ages, default=None),
        "state": next((state for state in states if state != "online"), "online" if states else "away"),
        "held_back": next((part["held_back"] for part in there if part.get("held_back")), ""),
        "last_error": next((part["last_error"] for part in there if part.get("last_error")), None),
        "guarantee": plain.get("guarantee", ""),
        "insecure": any(part.get("insecure") for part in there),
    }


def _reason(error: GatewayError) -> dict[str, str]:
    """Why a gateway is away; of one that refuses what to do, too: only a person can end that."""
    refused = error.code in REFUSALS
    do = in_the_file(error.do) if refused else ""
    return {"why": in_the_file(error.what), "do": do, "code": error.code if refused else "TL-G54"}


def stale(status: Mapping[str, Any]) -> dict[str, Any]:
    """A status as the last word of whoever gave it: batches may have been committed since."""
    parts = {name: {AWAY: 0.0, **part} for name, part in (status.get("gateways") or {}).items()}
    return {**status, AWAY: 0.0} | ({"gateways": parts} if parts else {})


def is_refused(part: Mapping[str, Any]) -> bool:
    """Whether a gateway and the bridge do not let each other in."""
    return AWAY in part and part.get("code") in REFUSALS


def away_text(name: str, part: Mapping[str, Any]) -> str:
    """One gateway that is away, in words; times are local."""
    since = datetime.fromtimestamp(float(part[AWAY])).astimezone()
    how = "held back" if is_refused(part) else "away"
    return f"gateway {name} {how} since {since:%H:%M}, its messages wait there"


def away_trouble(name: str, part: Mapping[str, Any]) -> str:
    """The same, with the reason and what to do."""
    do = f" {part['do']}" if part.get("do") else ""
    return f"{away_text(name, part)}: {part.get('why', 'no answer')}.{do}   [{part.get('code', 'TL-G54')}]"
