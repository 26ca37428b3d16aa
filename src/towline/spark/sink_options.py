"""The options of ``format("mqtt")`` as a sink.

Those of the gateway are the source's own; the rest says what to send and when a batch counts as written.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from pydantic import ValidationError

from towline.errors import ConfigError, did_you_mean
from towline.gateway.settings import GatewaySettings
from towline.guarantee import Guarantee, policy
from towline.spark import options as shared
from towline.spark.link import Retry

__all__ = ["OPTIONS", "SinkOptions", "parse_sink_options"]

_WHERE: Final = 'format("mqtt")'

#: Of the gateway's options those that only a receiver needs; their values would do nothing here.
_RECEIVING: Final = frozenset(
    {
        "subscribe",
        "retainHandling",
        "ackAfter",
        "receiveMaximum",
        "topicAliasMaximum",
        "lingerMs",
        "journalMaxBytes",
        "journalMinFreeBytes",
        "journalRetainBytes",
    }
)
#: Options of the outbox → its settings, and how their text is read.
_OUTBOX: Final[Mapping[str, tuple[str, Callable[[str], object]]]] = {
    "outboxMaxBytes": ("max_bytes", shared._bytes),  # noqa: SLF001 - one way to read a size
    "outboxMinFreeBytes": ("min_free_bytes", shared._bytes),  # noqa: SLF001
    "outboxMaxAge": ("max_age_s", float),
}
_SINK: Final = (
    "stateDir",
    "gateway",
    "guarantee",
    "topic",
    "qos",
    "retain",
    "confirm",
    "confirmTimeout",
    "retryStrategy",
    "retryInterval",
    "retryMultiplier",
    "retryCap",
    "retryAttempts",
)
_GATEWAY: Final = {n: s for n, s in shared._GATEWAY_OPTIONS.items() if n not in _RECEIVING}  # noqa: SLF001 - one table
#: Every option, as users write it; Spark adds two of its own.
OPTIONS: Final = (*_GATEWAY, *_OUTBOX, *_SINK)
_SPARKS: Final = frozenset({"checkpointlocation", "queryname"})
_SPELLING: Final = {name.lower(): name for name in OPTIONS}

_STRATEGIES: Final = ("never", "constant", "exponential", "capped")


@dataclass(frozen=True, slots=True)
class SinkOptions:
    """What a sink was told.

    Attributes:
        settings: The gateway to find or to start, as JSON; empty when one is named.
        state_dir: Directory whose running gateway is used, or empty.
        location: Flight location of a running gateway, or empty.
        guarantee: The promise.
        levels: QoS that the promise allows.
        topic: Of rows without one; None when each row has to have its own.
        qos: Of rows without one.
        retain: Of rows without one.
        to_broker: A batch counts as written when the broker has it, not already when the outbox has it.
        confirm_s: Longest wait for the broker.
        retry: Patience with a full outbox.
    """

    settings: str
    state_dir: str
    location: str
    guarantee: Guarantee
    levels: tuple[int, ...]
    topic: str | None
    qos: int
    retain: bool
    to_broker: bool
    confirm_s: float
    retry: Retry


def parse_sink_options(given: Mapping[str, str], checkpoint: str = "") -> SinkOptions:
    """Validate the options of a sink.

    Args:
        given: Option names in any case, values as text.
        checkpoint: Where the checkpoint of the query is; "" for a batch query.

    Raises:
        ConfigError: TL-C01 unknown option, TL-C12 a contradiction to the guarantee, TL-C20 a missing option, TL-C21 a
            value that can't be, TL-C22 an option that is refused, TL-C23 two that contradict each other.
    """
    options = _spelled(given)
    with shared.value_told(options):
        return _parse(options, checkpoint)


def _parse(options: Mapping[str, str], checkpoint: str) -> SinkOptions:
    guarantee, qos = _promise(options)
    state_dir, location = shared._place(options)  # noqa: SLF001 - the same two ways to a gateway
    settings = None if "gateway" in options else _settings(options, guarantee, qos, checkpoint)
    several = settings is not None and settings.several_sessions  # no row may ask for QoS 2 then
    return SinkOptions(
        settings=settings.model_dump_json() if settings else "",
        state_dir=str(state_dir or ""),
        location=location or "",
        guarantee=guarantee,
        levels=tuple(level for level in policy(guarantee).publish_levels if level < 2 or not several),
        topic=_topic(options.get("topic")),
        qos=qos,
        retain=_word(options, "retain", ("false", "true")) == "true",
        to_broker=_word(options, "confirm", ("outbox", "broker")) == "broker",
        confirm_s=_number(options, "confirmTimeout", 600.0, low=0.001),
        retry=_retry(options),
    )


def _spelled(given: Mapping[str, str]) -> dict[str, str]:
    options = {}
    for key, value in given.items():
        if key.lower() in _SPARKS:
            continue
        name = _SPELLING.get(key.lower())
        if name is None:
            raise _unknown(key)
        options[name] = str(value).strip()
    return options


def _unknown(key: str) -> ConfigError:
    if key.lower() == "password":
        what, do = shared._REFUSED["password"]  # noqa: SLF001 - one reason for both directions
        return ConfigError("TL-C22", f'{_WHERE} option "password"', what, do)
    receiving = next((name for name in shared.OPTIONS if name.lower() == key.lower()), None)
    if receiving:
        return ConfigError("TL-C01", _WHERE, f'option "{receiving}" is for reading, this is a sink', "Leave it out.")
    hint = did_you_mean(key, _SPELLING.values(), f"The options are {', '.join(OPTIONS)}.")
    return ConfigError("TL-C01", _WHERE, f'unknown option "{key[:80]}"', hint)


def _promise(options: Mapping[str, str]) -> tuple[Guarantee, int]:
    """The guarantee and the QoS; each decides about the other when only one is given."""
    qos = None if "qos" not in options else int(_word(options, "qos", ("0", "1", "2")))
    if "guarantee" not in options:
        meant = {None: Guarantee.AT_LEAST_ONCE, 0: Guarantee.AT_MOST_ONCE, 2: Guarantee.EXACTLY_ONCE}
        guarantee = meant.get(qos, Guarantee.AT_LEAST_ONCE)
    else:
        guarantee = Guarantee(_word(options, "guarantee", tuple(g.value for g in Guarantee)))
    levels = policy(guarantee).publish_levels
    if qos is not None and qos not in levels:
        wanted = " or ".join(map(str, levels))
        raise ConfigError(
            "TL-C12", f'{_WHERE} option "qos"', f"guarantee {guarantee} publishes with QoS {wanted}", "Change one."
        )
    return guarantee, levels[0] if qos is None else qos


def _settings(options: Mapping[str, str], guarantee: Guarantee, qos: int, checkpoint: str) -> GatewaySettings:
    if not options.get("broker"):
        raise shared._missing("broker", "It is mqtt://HOST[:PORT].")  # noqa: SLF001
    state_dir = shared._path(options["stateDir"])  # noqa: SLF001
    name = shared._name(options, state_dir)  # noqa: SLF001
    outbox = {"checkpoint": checkpoint}
    values: dict[str, object] = {"state_dir": state_dir, "guarantee": guarantee, "name": name, "outbox": outbox}
    for option, setting in _GATEWAY.items():
        if option in options and option != "name":
            shared._put(values, setting.path, shared._read(options, option, setting.read))  # noqa: SLF001
    for option, (field, read) in _OUTBOX.items():
        if option in options:
            shared._put(values, ("outbox", field), shared._read(options, option, read))  # noqa: SLF001
    try:
        settings = GatewaySettings.model_validate(values)
    except ValidationError as error:
        raise _named(error) or shared._translated(error) from None  # noqa: SLF001
    if qos == 2:
        shared.shares(settings, _WHERE, publish_qos=2)
    return settings


def _named(error: ValidationError) -> ConfigError | None:
    """The line for an option of the outbox, None when it is about another."""
    first = error.errors(include_url=False)[0]
    for option, (field, _) in _OUTBOX.items():
        if first["loc"][:2] == ("outbox", field):
            return _wrong(option, first["msg"].replace("Input should", "it should"))
    return None


def _topic(given: str | None) -> str | None:
    if given is not None and (not given or re.search(r"[+#\0]", given)):
        raise _wrong("topic", "a topic is not empty and has no +, # or U+0000 [MQTT-3.3.2-2]")
    return given


def _retry(options: Mapping[str, str]) -> Retry:
    plain = Retry()
    return Retry(
        strategy=_word(options, "retryStrategy", _STRATEGIES, plain.strategy),
        interval_s=_number(options, "retryInterval", plain.interval_s, low=0.001),
        multiplier=_number(options, "retryMultiplier", plain.multiplier, low=1),
        cap_s=_number(options, "retryCap", plain.cap_s, low=0.001),
        attempts=int(_number(options, "retryAttempts", plain.attempts, low=-1)),
    )


def _word(options: Mapping[str, str], name: str, words: tuple[str, ...], default: str = "") -> str:
    given = options.get(name, default or words[0]).lower()
    if given not in words:
        raise _wrong(name, f"it is {', '.join(words[:-1])} or {words[-1]}")
    return given


def _number(options: Mapping[str, str], name: str, default: float, *, low: float) -> float:
    try:
        value = float(options.get(name, default))
    except ValueError:
        value = float("nan")
    if not low <= value < 1e9:
        raise _wrong(name, f"it is a number from {low:g}")
    return value


def _wrong(name: str, what: str) -> ConfigError:
    return ConfigError("TL-C21", f'{_WHERE} option "{name}"', what)
