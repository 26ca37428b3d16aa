"""The options of ``format("mqtt")`` as a source: those of its gateway, and how Spark reads from it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar

from towline import options as read
from towline.errors import ConfigError
from towline.gateway.access import Access
from towline.gateway.settings import GatewaySettings
from towline.gateway.tickets import DEFAULT_VALID_S
from towline.guarantee import Guarantee, policy, qos_problem
from towline.options import Format, Given, Option
from towline.spark import gateway_options as gateway
from towline.spark.gateway_options import WHERE, at_least_one

__all__ = ["DEFAULT_MAX_BYTES", "DEFAULT_MAX_ROWS", "OPTIONS", "SourceOptions", "parse_options"]

_T = TypeVar("_T")

#: Rows of one micro-batch unless told otherwise: about 40 MB of small messages, 0.3 to 0.7 s of Spark's time.
DEFAULT_MAX_ROWS = 200_000

#: Bytes of one micro-batch unless told otherwise: what a crash repeats, and what the sink keeps until it is written.
DEFAULT_MAX_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    """What a source was told.

    Attributes:
        settings: The gateway to find or to start, None when one is named.
        state_dir: Directory whose running gateway is used.
        location: Flight location of a running gateway, when it was given as such.
        access: The files that let us in, where that is on a network.
        ticket_s: Seconds that a ticket of the workers is worth something.
        consumer: Name under which rows are committed.
        guarantee: The promise (`towline.guarantee`); it says which rows of a repeated batch are served again.
        max_rows: Most rows of a micro-batch.
        max_bytes: Most bytes of a micro-batch, as the rows lie in the journal; more by one frame at most.
        repeated_below: Rows below this offset may have been served before, to a query with another checkpoint.
        starting: ``committed``, ``earliest``, ``latest`` or an offset: where a new checkpoint begins; None for
            ``committed`` in a stream and ``earliest`` in a batch read.
        ending: Offset after the last one, batch reads only; None for all there is.
        poll_ms: Longest wait for a message in one call of ``latestOffset``: other sources of the query wait too.
        checkpoint: Location of the query's checkpoint, as the writer has it; "" when it was not told.
        event_time: Whether rows have the column `towline.schema.EVENT_TIME`.
        gateways: State directories and locations of several gateways that run already, each once.
        removed: Names of gateways that may leave the checkpoint without being asked what waits there.
        min_partitions: Wanted number of partitions of a batch; None for one for each gateway.
        max_records: Most rows of a partition; None for no limit.
        target_ms: Longest time that a micro-batch is to take; None for what the limits make of it.
    """

    settings: GatewaySettings | None
    state_dir: Path | None
    location: str | None
    access: Access = field(default_factory=Access)
    ticket_s: float = DEFAULT_VALID_S
    consumer: str = "default"
    guarantee: Guarantee = Guarantee.AT_LEAST_ONCE
    max_rows: int = DEFAULT_MAX_ROWS
    max_bytes: int = DEFAULT_MAX_BYTES
    repeated_below: int | Mapping[str, int] = 0
    starting: str | int | Mapping[str, str | int] | None = None
    ending: int | Mapping[str, int] | None = None
    poll_ms: int = 5_000
    checkpoint: str = ""
    event_time: bool = False
    gateways: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    min_partitions: int | None = None
    max_records: int | None = None
    target_ms: int | None = None


def _starting(text: str) -> str | int:
    if text.lower() in ("committed", "earliest", "latest"):
        return text.lower()
    if re.fullmatch(r"[0-9]{1,18}", text):
        return int(text)
    raise ValueError("it is committed, earliest, latest or an offset from 0")


def _by_gateway(read_one: Callable[[str], _T]) -> Callable[[str], _T | dict[str, _T]]:
    """Reads a value, or a JSON object of one for each gateway by its name."""

    def read_all(text: str) -> _T | dict[str, _T]:
        if not text.startswith("{"):
            return read_one(text)
        try:
            values = json.loads(text)
            return {read.label(name): read_one(str(value)) for name, value in values.items()}
        except (ValueError, AttributeError) as error:
            why = "" if isinstance(error, json.JSONDecodeError) else f"; {error}"
            raise ValueError(f'of several gateways it is JSON such as {{"g1": "earliest", "g2": 4711}}{why}') from None

    return read_all


def _names(text: str) -> tuple[str, ...]:
    return tuple(read.label(part.strip()) for part in text.split(",") if part.strip())


def _poll(text: str) -> int:
    value = read.whole()(text)
    if value > 30_000:
        raise ValueError("it is at most 30000, or Spark's idle Python workers end meanwhile")
    return value


def _target(text: str) -> int:
    value = read.milliseconds(text)
    if not 50 <= value <= 3_600_000:
        raise ValueError("it is from 50 ms to 60 min")
    return value


_GATEWAY: Final = (*gateway.CONNECTION, *gateway.RECEIVING)
#: `Option.into` names fields of `SourceOptions`.
_READING: Final = (
    Option("consumer", read.label, "consumer"),
    Option("guarantee", read.promise, "guarantee"),
    Option("maxMessagesPerTrigger", lambda text: at_least_one(read.whole()(text)), "max_rows"),
    Option("maxBytesPerTrigger", lambda text: at_least_one(read.size(text)), "max_bytes"),
    Option("targetBatchDuration", _target, "target_ms"),
    Option("minPartitions", read.whole(1), "min_partitions"),
    Option("maxRecordsPerPartition", read.whole(1), "max_records"),
    Option("repeatedBelow", _by_gateway(read.whole()), "repeated_below"),
    Option("startingOffset", _by_gateway(_starting), "starting"),
    Option("endingOffset", _by_gateway(read.whole()), "ending"),
    Option("pollMs", _poll, "poll_ms"),
    Option("checkpointLocation", into="checkpoint"),
    Option("eventTime", read.truth, "event_time"),
    Option("gateways", gateway.gateway_list, "gateways", address=True),
    Option("removedGateways", _names, "removed"),
)
_UNTRUE_PROGRESS: Final = (
    "asynchronous progress tracking makes Spark report batches as done that are not, and messages would be lost"
)
_FORMAT: Final = Format(
    WHERE,
    (*_GATEWAY, *gateway.PLACE, *_READING),
    gateway.wrong,
    # What people expect and that can't be: the reason and the way out.
    refused={
        "password": gateway.PASSWORD,
        "asyncprogresstrackingenabled": (
            "TL-C22",
            f'{WHERE} option "asyncProgressTrackingEnabled"',
            _UNTRUE_PROGRESS,
            "Leave it out, of the writer's options too.",
        ),
        "path": (
            "TL-C22",
            f'{WHERE} option "path"',
            "a path is no MQTT broker",
            'Call load() without an argument and give option("broker", "mqtt://HOST").',
        ),
    },
)
#: Every option, as users write it.
OPTIONS: Final = _FORMAT.names


def parse_options(texts: Mapping[str, str]) -> SourceOptions:
    """Validate the options of a source.

    Args:
        texts: Option names in any case, values as text.

    Raises:
        ConfigError: TL-C01 unknown option, TL-C12 a promise that the other options can't keep, TL-C20 a missing
            option, TL-C21 a value that can't be, TL-C22 an option that is refused, TL-C23 two that contradict
            each other.
    """
    given = _FORMAT.read(texts)
    guarantee = given.value("guarantee", Guarantee.AT_LEAST_ONCE)
    state_dir, location = gateway.gateway_place(given, _GATEWAY)
    settings = None if "gateway" in given or "gateways" in given else _settings(given, guarantee)
    said = {**gateway.access_values(given), **given.values(_READING)}
    options = SourceOptions(settings=settings, state_dir=state_dir, location=location, **said)
    if options.event_time and not options.checkpoint:
        raise ConfigError(
            "TL-C23",
            f'{WHERE} option "eventTime"',
            "it follows the query's watermark, and without checkpointLocation nobody knows it",
            "Give checkpointLocation, the same as the writer's, on a file system of this machine.",
        )
    _check_offsets(given, options)
    return options


def _check_offsets(given: Given, options: SourceOptions) -> None:
    """An offset is one of a journal: of several gateways each has its own."""
    values = {
        "startingOffset": options.starting,
        "endingOffset": options.ending,
        "repeatedBelow": options.repeated_below,
    }
    for name, value in values.items():
        if options.gateways and isinstance(value, int) and name in given:
            what, do = "an offset is one of a single journal", 'Give one for each gateway by its name: {"g1": 4711}.'
            raise ConfigError("TL-C23", f'{WHERE} option "{name}"', what, do)
        if not options.gateways and isinstance(value, Mapping):
            what = "it names gateways, and the source has only one"
            raise ConfigError(
                "TL-C23", f'{WHERE} option "{name}"', what, "Give it without a name, or the option gateways."
            )
    if options.removed and not options.gateways:
        what = "it belongs to the option gateways"
        raise ConfigError("TL-C23", f'{WHERE} option "removedGateways"', what, "Leave it out.")


def _settings(given: Given, guarantee: Guarantee) -> GatewaySettings:
    for name, meaning in (("broker", "mqtt://HOST[:PORT]"), ("subscribe", "topic filters such as telemetry/#:1")):
        if not given.text(name):
            raise gateway.missing(name, f"It is {meaning}.")
    values = gateway.gateway_values(given, guarantee, _GATEWAY)
    values["subscriptions"] = [{"qos": policy(guarantee).qos, **one} for one in values["subscriptions"]]
    settings = gateway.gateway_settings(given, values, _GATEWAY)
    _check_promise(settings)
    return settings


def _check_promise(settings: GatewaySettings) -> None:
    """Refuse what is valid by itself and yet less than the guarantee needs without a key (`qos_problem`)."""
    guarantee, table = settings.guarantee, policy(settings.guarantee)
    if settings.acks not in table.acks:
        what = f"guarantee {guarantee} acknowledges after {' or '.join(table.acks)}, not {settings.acks}"
        raise ConfigError("TL-C12", f'{WHERE} option "ackAfter"', what, "Leave it out.")
    for one in settings.subscriptions:
        if problem := qos_problem(guarantee, one.qos):
            what = f'{problem[0]}, "{one.pattern}" is subscribed with QoS {one.qos}'
            do = "Raise it, or take at_least_once and drop repeats by a key of your own."
            raise ConfigError("TL-C12", f'{WHERE} option "subscribe"', what, do)
    if guarantee is Guarantee.EXACTLY_ONCE:
        gateway.check_sharing(settings)
