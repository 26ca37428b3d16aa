"""Status of a line's gateways, single and combined."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any, Final, TypeVar

from towline.bridge.config.tables import with_file_keys
from towline.errors import GatewayError, GatewayUnreachable, StateAccessDenied
from towline.gateway.access import ACCESS_ERROR_CODES, ClientAccess
from towline.gateway.client import GatewayClient
from towline.spark.link import GatewayAddress, retry_while_unreachable

#: Time to wait for a gateway, in seconds; the query retries afterwards.
_ANSWER_TIMEOUT_S: Final = 20.0


def request_status(gateway: GatewayClient) -> dict[str, Any]:
    """Request the status of a line's gateway (Flight action ``status``)."""
    return gateway.status(timeout_s=5.0)


def gateway_status(state_dir: Path) -> dict[str, Any] | None:
    """Return the status of a gateway by its state directory; None if it does not answer. Raises NotAllowed."""
    try:
        with GatewayAddress(str(state_dir)).attach() as client:
            return request_status(client)
    except StateAccessDenied:
        raise
    except GatewayError:
        return None


#: Key of an unavailable gateway: start of the outage, in seconds since 1970.
AWAY_SINCE: Final = "away_since"
_Answer = TypeVar("_Answer")


def endpoints_of(gateways: Iterable[str], access: ClientAccess) -> list[GatewayAddress]:
    """Return the endpoints of gateways, given as in a bridge file or a checkpoint."""
    return [GatewayAddress(gateway, access=access) for gateway in gateways]


def ask_each(
    endpoints: Sequence[GatewayAddress], request: Callable[[GatewayClient], _Answer]
) -> dict[str, _Answer | GatewayError]:
    """Ask all gateways at the same time; return the answer or the error of each."""

    def ask_one(endpoint: GatewayAddress) -> _Answer | GatewayError:
        try:
            with endpoint.attach() as client:
                return request(client)
        except GatewayError as error:
            return error

    with ThreadPoolExecutor(max(1, len(endpoints)), "gateways") as pool:
        return dict(zip([endpoint.location for endpoint in endpoints], pool.map(ask_one, endpoints), strict=True))


def wait_for_answers(
    endpoints: Sequence[GatewayAddress], request: Callable[[GatewayClient], _Answer], *, require_all: bool = True
) -> list[_Answer]:
    """Wait for the answers of gateways; skip unavailable ones, unless `require_all`.

    Raises:
        GatewayError: The error of a required gateway that does not answer within the timeout.
    """

    def ask_all() -> list[_Answer]:
        answers = ask_each(endpoints, request).values()
        received_answers = [answer for answer in answers if not isinstance(answer, GatewayError)]
        failure = next((answer for answer in answers if isinstance(answer, GatewayError)), None)
        if failure is not None and (require_all or not received_answers):
            raise failure
        return received_answers

    try:
        return retry_while_unreachable(ask_all, timeout_s=_ANSWER_TIMEOUT_S)
    except GatewayUnreachable as error:
        remedy = "The query continues when it answers; a gateway of this bridge is restarted automatically."
        raise GatewayUnreachable(error.code, error.location, error.problem, remedy) from None


def combine_statuses(
    answers: Mapping[str, Mapping[str, Any] | GatewayError], previous: Mapping[str, Any]
) -> dict[str, Any]:
    """Combine the statuses of a line's gateways, with the parts by name; an unavailable one has its last status.

    Args:
        answers: Status or error by the endpoint of each gateway.
        previous: Result of the previous call; it has the last statuses.
    """
    previous_parts = {part["at"]: (name, part) for name, part in (previous.get("gateways") or {}).items()}
    parts: dict[str, dict[str, Any]] = {}
    for endpoint, answer in answers.items():
        if isinstance(answer, GatewayError):
            name, status = previous_parts.get(endpoint, (endpoint, {}))
            away_since = status.get(AWAY_SINCE) or time.time()
            is_refused = answer.code in ACCESS_ERROR_CODES  # only the user can fix that
            problem, remedy = with_file_keys(answer.problem), with_file_keys(answer.remedy) if is_refused else ""
            code = answer.code if is_refused else "TL-G54"
            parts[name] = {**status, "at": endpoint, AWAY_SINCE: away_since, "why": problem, "do": remedy, "code": code}
        else:
            parts[str(answer["name"])] = {**answer, "at": endpoint}
    available = [part for part in parts.values() if AWAY_SINCE not in part]
    ages = [part["oldest"] for part in available if part.get("oldest") is not None]
    states = [str(part.get("state")) for part in available]
    first_available = next(iter(available), {})
    return {
        "gateways": dict(sorted(parts.items())),
        "received": sum(int(part.get("received") or 0) for part in parts.values()),
        "oldest": min(ages, default=None),
        "state": next((state for state in states if state != "online"), "online" if states else "away"),
        "held_back": next((part["held_back"] for part in available if part.get("held_back")), ""),
        "guarantee": first_available.get("guarantee", ""),
    }


def statuses_by_gateway(status: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    """Return the statuses of a line's remote gateways by name; that of its local gateway under ""."""
    statuses: Mapping[str, Mapping[str, Any]] | None = status.get("gateways")
    return {"": status} if statuses is None else statuses


def mark_stale(status: Mapping[str, Any]) -> dict[str, Any]:
    """Mark a status as outdated: batches may have been committed since."""
    parts = {name: {AWAY_SINCE: 0.0, **part} for name, part in (status.get("gateways") or {}).items()}
    return {**status, AWAY_SINCE: 0.0} | ({"gateways": parts} if parts else {})


def outage_text(name: str, status: Mapping[str, Any]) -> str:
    """Describe an unavailable gateway; times are local."""
    away_since = datetime.fromtimestamp(float(status[AWAY_SINCE])).astimezone()
    state = "refuses access" if status.get("code") in ACCESS_ERROR_CODES else "unavailable"
    return f"gateway {name} {state} since {away_since:%H:%M}, its messages wait there"


def outage_problem(name: str, status: Mapping[str, Any]) -> str:
    """Describe an unavailable gateway, with the reason and the remedy."""
    remedy = f" {status['do']}" if status.get("do") else ""
    return f"{outage_text(name, status)}: {status.get('why', 'no answer')}.{remedy}   [{status.get('code', 'TL-G54')}]"
