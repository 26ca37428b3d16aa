"""What a checkpoint and gateways say of themselves: one, several together, and for whoever asks whether they fit."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar

from towline.bridge.config.tables import in_the_file
from towline.checkpoint import Checkpoint, kafka_offsets_in
from towline.errors import GatewayError, GatewayUnreachable, NotAllowed
from towline.gateway.access import REFUSALS, Access
from towline.gateway.client import GatewayClient
from towline.spark.link import GatewayPlace

#: How long a gateway is waited for, in seconds; the query tries again afterwards.
_PATIENCE_S: Final = 20.0

#: By topic and partition.
KafkaOffsets: TypeAlias = Mapping[str, Mapping[str, int]]


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a checkpoint says of itself."""

    #: Id of the query in the checkpoint; "" when there is none.
    query: str = ""
    #: Newest batch in the offset log, and in the commit log; None when there is none.
    planned: int | None = None
    done: int | None = None
    #: Whether the checkpoint holds state, which is what repeats are recognised by.
    stateful: bool = False
    #: First line of the newest planned batch in the offset log; "" when there is none.
    form: str = ""

    @property
    def decided(self) -> bool:
        """Whether no batch was begun that is not done."""
        return self.planned == self.done


def read_checkpoint(checkpoint: Path) -> Evidence:
    """What a checkpoint says."""
    logs = Checkpoint(str(checkpoint))
    return Evidence(logs.query, logs.last_offsets_batch(), logs.last_commit_batch(), logs.stateful, logs.form)


def status_of(gateway: GatewayClient) -> dict[str, Any]:
    """The answer of a line's gateway to the action ``status``."""
    return gateway.status(timeout_s=5.0)


def gateway_status(state_dir: Path) -> dict[str, Any] | None:
    """What the gateway of a state directory says of itself; None when none answers; raises NotAllowed."""
    try:
        with GatewayPlace(str(state_dir)).attach() as client:
            return status_of(client)
    except NotAllowed:
        raise
    except GatewayError:
        return None


def kafka_offsets(checkpoint: Path, batch: int | None) -> KafkaOffsets:
    """Where a batch of Spark's Kafka source ends; without a batch, where the query began.

    Returns:
        Offsets by topic and partition; nothing where that can't be read, or the line goes the other way.
    """
    logs = Checkpoint(str(checkpoint))
    return kafka_offsets_in([logs.first_offsets()] if batch is None else logs.offsets(batch))


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
    return [GatewayPlace(one, access=access) for one in gateways]


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


def awaited(
    places: Sequence[GatewayPlace], ask: Callable[[GatewayClient], _Answer], *, every: bool = True, own: bool = False
) -> list[_Answer]:
    """What gateways answer, which are waited for; nothing of those that are away, unless `every` one has to answer.

    With `own` it is the line's own gateway, which the bridge starts again.

    Raises:
        GatewayError: What one says that is needed, when it does not answer for a while.
    """
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        answers = each(places, ask).values()
        told = [one for one in answers if not isinstance(one, GatewayError)]
        lost = next((one for one in answers if isinstance(one, GatewayError)), None)
        if lost is None or (told and not every):
            return told
        if time.monotonic() >= deadline:
            if own and lost.code == "TL-G01":
                do = "It is started again by itself; the query then goes on."
                raise GatewayUnreachable("TL-G01", lost.where, "no gateway answers", do)
            raise lost
        time.sleep(0.2)


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
            refused = answer.code in REFUSALS  # only a person can end that
            what, do = in_the_file(answer.what), in_the_file(answer.do) if refused else ""
            code = answer.code if refused else "TL-G54"
            parts[name] = {**last, "at": at, AWAY: since, "why": what, "do": do, "code": code}
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


def parts_of(status: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    """The statuses of a line's gateways elsewhere by their names; that of its own gateway under ""."""
    parts: Mapping[str, Mapping[str, Any]] | None = status.get("gateways")
    return {"": status} if parts is None else parts


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
