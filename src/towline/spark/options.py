"""The options of ``format("mqtt")``: from Spark's text map to validated values.

Every mistake is one `ConfigError` line that names the option as the user writes it. Spark gives option names in lower
case and values as text, so names are compared without case. Secrets are refused: options stand in Spark's plans, UI
and logs [I12].
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

from pydantic import ValidationError

from towline.errors import ConfigError, did_you_mean
from towline.gateway.settings import GatewaySettings
from towline.guarantee import Guarantee, low_subscription, policy, sharing_problem
from towline.text import printable

__all__ = [
    "DEFAULT_MAX_BYTES",
    "DEFAULT_MAX_ROWS",
    "OPTIONS",
    "SourceOptions",
    "in_options",
    "parse_options",
    "parse_subscriptions",
]

#: Rows of one micro-batch unless told otherwise: about 40 MB of small messages, 0.3 to 0.7 s of Spark's time.
DEFAULT_MAX_ROWS = 200_000

#: Bytes of one micro-batch unless told otherwise: what a crash repeats, and what the sink keeps until it is written.
DEFAULT_MAX_BYTES = 256 << 20

#: Longest wait for a message in one call of ``latestOffset``, in milliseconds: other sources of the query wait too.
DEFAULT_POLL_MS = 5_000

_T = TypeVar("_T")

_WHERE = 'format("mqtt")'

_POSITIONS = ("committed", "earliest", "latest")


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """What a source was told.

    Attributes:
        settings: The gateway to find or to start, None when one is named.
        state_dir: Directory whose running gateway is used.
        location: Flight location of a running gateway, when it was given as such.
        consumer: Name under which rows are committed.
        guarantee: The promise (`towline.guarantee`); ``at_most_once`` serves replayed batches empty.
        max_rows: Most rows of a micro-batch.
        max_bytes: Most bytes of a micro-batch, as the rows lie in the journal; more by one frame at most.
        starting: ``committed``, ``earliest``, ``latest`` or an offset: where a new checkpoint begins; None for
            ``committed`` in a stream and ``earliest`` in a batch read.
        ending: Offset after the last one, batch reads only; None for all there is.
        poll_ms: Longest wait for a message, in milliseconds.
        checkpoint: Location of the query's checkpoint, as the writer has it; "" when it was not told.
        event_time: Whether rows have the column `towline.schema.EVENT_TIME`.
    """

    settings: GatewaySettings | None
    state_dir: Path | None
    location: str | None
    consumer: str
    guarantee: Guarantee
    max_rows: int
    max_bytes: int
    starting: str | int | None
    ending: int | None
    poll_ms: int
    checkpoint: str
    event_time: bool


class _Setting(NamedTuple):
    """Where an option goes in `GatewaySettings`, and how its text is read."""

    path: tuple[str, ...]
    read: Callable[[str], object] = str


def _truth(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError("it is true or false")
    return text.lower() == "true"


def _number(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise ValueError("it is a whole number from 0")
    return int(text)


def _milliseconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError("it is a number of milliseconds") from None


def _bytes(text: str) -> int:
    """Read a size: ``1048576``, ``512m``, ``2g`` (powers of 1024, as Spark's own sizes)."""
    match = re.fullmatch(r"([0-9]{1,15}) ?([kmgt]?)i?b?", text.lower())
    if not match:
        raise ValueError("it is a size such as 1048576, 512m or 2g")
    return int(match[1]) << (10 * " kmgt".index(match[2] or " "))


def _path(text: str) -> str:
    try:
        return str(Path(text).expanduser().absolute())
    except RuntimeError:
        raise ValueError("it names the home of a user who is not known here") from None


def _brokers(text: str) -> str:
    if not text.strip(" ,"):
        raise ValueError("it is mqtt://HOST[:PORT], several with a comma between them")
    return text


def _label(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", text):
        raise ValueError("it is 1 to 64 letters, digits, dots, dashes or underscores, the first a letter or digit")
    return text


def parse_subscriptions(text: str, qos: int = 1) -> list[dict[str, object]]:
    """Read ``telemetry/#:1, alarms/+`` or a JSON list of the same texts (for filters with a comma).

    Args:
        text: Filters, each with ``:QOS`` behind it or not.
        qos: QoS of a filter without one.

    Raises:
        ValueError: For an empty list, or JSON that is no list of texts.
    """
    parts: object = text.split(",")
    if text.lstrip().startswith("["):
        try:
            parts = json.loads(text)
        except ValueError:
            parts = None
    if not isinstance(parts, list) or not all(isinstance(part, str) for part in parts):
        raise ValueError('it is filters with a comma between them, or a JSON list of texts such as ["a,b/#:1"]')
    found = [_subscription(part.strip(), qos) for part in parts if part.strip()]
    if not found:
        raise ValueError("it has no topic filter")
    return found


def _subscription(text: str, qos: int) -> dict[str, object]:
    match = re.fullmatch(r"(.*):([0-9]+)", text, re.DOTALL)
    return {"filter": match[1], "qos": int(match[2])} if match else {"filter": text, "qos": qos}


#: Options that describe the gateway; they make no sense beside ``gateway``, where one runs already.
_GATEWAY_OPTIONS: Mapping[str, _Setting] = {
    "broker": _Setting(("brokers",), _brokers),
    "subscribe": _Setting(("subscriptions",)),
    "name": _Setting(("name",), _label),
    "clientId": _Setting(("client_id",)),
    "username": _Setting(("username",)),
    "passwordFile": _Setting(("password_file",), _path),
    "ackAfter": _Setting(("ack_after",)),
    "keepAlive": _Setting(("keep_alive_s",), _number),
    "sessionExpiry": _Setting(("session_expiry_s",), _number),
    "receiveMaximum": _Setting(("receive_maximum",), _number),
    "maxPacketBytes": _Setting(("max_packet_bytes",), _bytes),
    "lingerMs": _Setting(("linger_ms",), _milliseconds),
    "brokersShareSessions": _Setting(("brokers_share_sessions",), _truth),
    "retainHandling": _Setting(("retain_handling",), _number),
    "unknownSession": _Setting(("unknown_session",)),
    "abandonSession": _Setting(("abandon_session",)),
    "protocol": _Setting(("protocol",)),
    "topicAliasMaximum": _Setting(("topic_alias_maximum",), _number),
    "connectTimeout": _Setting(("connect_timeout_s",), _number),
    "proxy": _Setting(("proxy",)),
    "proxyPasswordFile": _Setting(("proxy_password_file",), _path),
    "tlsCaFile": _Setting(("tls", "ca_file"), _path),
    "tlsCertFile": _Setting(("tls", "cert_file"), _path),
    "tlsKeyFile": _Setting(("tls", "key_file"), _path),
    "tlsKeyPasswordFile": _Setting(("tls", "key_password_file"), _path),
    "tlsAlpn": _Setting(("tls", "alpn")),
    "tlsMinVersion": _Setting(("tls", "min_version")),
    "tlsServerName": _Setting(("tls", "server_name")),
    "tlsInsecure": _Setting(("tls", "insecure"), _truth),
    "journalMaxBytes": _Setting(("journal", "max_bytes"), _bytes),
    "journalMinFreeBytes": _Setting(("journal", "min_free_bytes"), _bytes),
    "journalRetainBytes": _Setting(("journal", "retain_bytes"), _bytes),
}

_SOURCE_OPTIONS = (
    "stateDir",
    "gateway",
    "consumer",
    "guarantee",
    "maxMessagesPerTrigger",
    "maxBytesPerTrigger",
    "startingOffset",
    "endingOffset",
    "pollMs",
    "checkpointLocation",
    "eventTime",
)

#: Every option, as users write it.
OPTIONS: tuple[str, ...] = (*_GATEWAY_OPTIONS, *_SOURCE_OPTIONS)

_SPELLING = {name.lower(): name for name in OPTIONS}

#: Options that people expect and that can't be: the reason and the way out.
_REFUSED = {
    "password": (
        "a password in an option would stand in Spark's plans, web UI and logs",
        "Write it to a file of mode 0600 and give its path as passwordFile.",
    ),
    "asyncProgressTrackingEnabled": (
        "asynchronous progress tracking makes Spark report batches as done that are not, and messages would be lost",
        "Leave it out, of the writer's options too.",
    ),
    "path": (
        "a path is no MQTT broker",
        'Call load() without an argument and give option("broker", "mqtt://HOST").',
    ),
}


def parse_options(given: Mapping[str, str]) -> SourceOptions:
    """Validate the options of a source.

    Args:
        given: Option names in any case, values as text.

    Raises:
        ConfigError: TL-C01 unknown option, TL-C12 a promise that the other options can't keep, TL-C20 a missing
            option, TL-C21 a value that can't be, TL-C22 an option that is refused, TL-C23 two that contradict
            each other.
    """
    options = _spelled(given)
    with value_told(options):
        return _parse(options)


def _parse(options: Mapping[str, str]) -> SourceOptions:
    guarantee = _guarantee(options)
    state_dir, location = _place(options)
    max_rows, max_bytes = _limits(options)
    return SourceOptions(
        settings=None if "gateway" in options else _settings(options, guarantee),
        state_dir=state_dir,
        location=location,
        consumer=_consumer(options),
        guarantee=guarantee,
        max_rows=max_rows,
        max_bytes=max_bytes,
        starting=_starting(options.get("startingOffset")),
        ending=_read(options, "endingOffset", _number) if "endingOffset" in options else None,
        poll_ms=_read(options, "pollMs", _poll) if "pollMs" in options else DEFAULT_POLL_MS,
        checkpoint=options.get("checkpointLocation", ""),
        event_time=_event_time(options),
    )


#: What may hold a password: an address does, where a user put it in a place that is none.
_ADDRESSES = ("broker", "gateway", "proxy", "username")


@contextlib.contextmanager
def value_told(options: Mapping[str, str]) -> Iterator[None]:
    """Add to the error of a value what the value was, but for one that may hold a password."""
    try:
        yield
    except ConfigError as error:
        name = error.where.removeprefix(f'{_WHERE} option "').rstrip('"')
        value = options.get(name)
        if error.code == "TL-C21" and value and name not in _ADDRESSES:
            error.where += f' = "{printable(value, 60)}"'
        raise


def _spelled(given: Mapping[str, str]) -> dict[str, str]:
    """Bring names into the spelling of the documentation; refuse what is unknown or must not be."""
    options: dict[str, str] = {}
    for key, value in given.items():
        name = _SPELLING.get(key.lower())
        if name is None:
            _refuse(key)
        else:
            options[name] = str(value).strip()
    return options


def _refuse(key: str) -> None:
    for name, (what, do) in _REFUSED.items():
        if key.lower() == name.lower():
            raise ConfigError("TL-C22", f'{_WHERE} option "{name}"', what, do)
    hint = did_you_mean(key, _SPELLING.values(), f"The options are {', '.join(OPTIONS)}.")
    raise ConfigError("TL-C01", _WHERE, f'unknown option "{_one_line(key)}"', hint)


def _guarantee(options: Mapping[str, str]) -> Guarantee:
    text = options.get("guarantee", Guarantee.AT_LEAST_ONCE.value)
    try:
        return Guarantee(text)
    except ValueError:
        raise _wrong("guarantee", "it is at_most_once, at_least_once or exactly_once") from None


def _place(options: Mapping[str, str]) -> tuple[Path | None, str | None]:
    """Where the gateway is: ``(state directory, None)`` or ``(None, location)``."""
    gateway, state_dir = options.get("gateway"), options.get("stateDir")
    if gateway is None:
        if not state_dir:
            raise _missing("stateDir", "It is the directory on a local disk where messages wait until they are safe.")
        return Path(_read(options, "stateDir", _path)), None
    beside = [name for name in (*_GATEWAY_OPTIONS, "stateDir") if name in options]
    if beside:
        raise ConfigError(
            "TL-C23",
            f'{_WHERE} option "{beside[0]}"',
            "it belongs to the gateway, and the option gateway names one that runs already",
            "Give one of the two.",
        )
    if not gateway:
        raise _wrong("gateway", "it is the state directory of a running gateway, or its location grpc+unix://...")
    if "://" in gateway:
        if not gateway.startswith("grpc+unix:///"):
            raise _wrong("gateway", "a location is grpc+unix:///PATH")
        return None, gateway
    return Path(_read(options, "gateway", _path)), None


def _event_time(options: Mapping[str, str]) -> bool:
    wanted = _read({"eventTime": options.get("eventTime", "false")}, "eventTime", _truth)
    if wanted and not options.get("checkpointLocation"):
        raise ConfigError(
            "TL-C23",
            f'{_WHERE} option "eventTime"',
            "it follows the query's watermark, and without checkpointLocation nobody knows it",
            "Give checkpointLocation, the same as the writer's, on a file system of this machine.",
        )
    return wanted


def _limits(options: Mapping[str, str]) -> tuple[int, int]:
    """Most rows and most bytes of a batch; both hold."""
    given = {"maxMessagesPerTrigger": str(DEFAULT_MAX_ROWS), "maxBytesPerTrigger": str(DEFAULT_MAX_BYTES), **options}
    rows = _read(given, "maxMessagesPerTrigger", _positive)
    return rows, _read(given, "maxBytesPerTrigger", lambda text: _at_least_one(_bytes(text)))


def _settings(options: Mapping[str, str], guarantee: Guarantee) -> GatewaySettings:
    for name, meaning in (("broker", "mqtt://HOST[:PORT]"), ("subscribe", "topic filters such as telemetry/#:1")):
        if not options.get(name):
            raise _missing(name, f"It is {meaning}.")
    state_dir = _path(options["stateDir"])
    values: dict[str, object] = {"state_dir": state_dir, "guarantee": guarantee, "name": _name(options, state_dir)}
    for name, setting in _GATEWAY_OPTIONS.items():
        if name in options and name != "name":
            _put(values, setting.path, _read(options, name, _reader(name, setting, guarantee)))
    try:
        settings = GatewaySettings.model_validate(values)
    except ValidationError as error:
        raise _translated(error) from None
    _kept(settings)
    return settings


def _kept(settings: GatewaySettings) -> None:
    """Refuse what is valid by itself and yet less than the guarantee needs (`towline.guarantee`)."""
    guarantee, table = settings.guarantee, policy(settings.guarantee)
    if settings.acks not in table.acks:
        what = f"guarantee {guarantee} acknowledges after {' or '.join(table.acks)}, not {settings.acks}"
        raise ConfigError("TL-C12", f'{_WHERE} option "ackAfter"', what, "Leave it out.")
    if low := low_subscription(guarantee, settings.subscriptions):
        what = f'guarantee {guarantee} needs QoS {table.least_qos}, "{low.filter}" is subscribed with QoS {low.qos}'
        do = "Raise it, or take at_least_once and drop repeats by a key of your own."
        raise ConfigError("TL-C12", f'{_WHERE} option "subscribe"', what, do)
    if guarantee is Guarantee.EXACTLY_ONCE:
        shares(settings, _WHERE)


def shares(settings: GatewaySettings, where: str, publish_qos: int | None = None) -> None:
    """Refuse brokers that would break the promise as they take over from each other.

    Raises:
        ConfigError: TL-C90.
    """
    if problem := sharing_problem(settings, publish_qos):
        raise ConfigError("TL-C90", f'{where} option "broker"', *map(in_options, problem))


def _reader(name: str, setting: _Setting, guarantee: Guarantee) -> Callable[[str], object]:
    if name == "subscribe":
        return lambda text: parse_subscriptions(text, policy(guarantee).qos)
    return setting.read


def _name(options: Mapping[str, str], state_dir: str) -> str:
    """The gateway's name: as given, else from the client id, else from the directory."""
    if "name" in options:
        return _read(options, "name", _label)
    likely = re.sub(r"[^A-Za-z0-9._-]+", "-", options.get("clientId") or Path(state_dir).name).strip("-._")
    return likely[:64] or "mqtt"


def _put(values: dict[str, object], path: tuple[str, ...], value: object) -> None:
    for part in path[:-1]:
        inner = values.setdefault(part, {})
        assert isinstance(inner, dict)
        values = inner
    values[path[-1]] = value


def _translated(error: ValidationError) -> ConfigError:
    """Make pydantic's first finding a line about the option it came from."""
    first = error.errors(include_url=False)[0]
    place = tuple(part for part in first["loc"] if isinstance(part, str))
    message = _named(_SETTINGS, _one_line(first["msg"].removeprefix("Value error, ")))
    for name, setting in _GATEWAY_OPTIONS.items():
        if place[: len(setting.path)] == setting.path:
            return _wrong(name, message.replace("Input should", "it should"))
    return ConfigError("TL-C12", _WHERE, message)


def _one_line(text: str) -> str:
    """What came from outside, without line breaks and not for pages."""
    return " ".join(text.split())[:200]


def _settings_of(names: Mapping[str, str]) -> re.Pattern[str]:
    """Settings as a message names them, with what they are set to; not such words in a path."""
    return re.compile(rf'(?<![\w/.-])(?:tls\.|journal\.)?({"|".join(names)})(?![\w/-]|\.\w)(?: = (?:"([^"]*)"|(\w+)))?')


_SPOKEN = {setting.path[-1]: name for name, setting in _GATEWAY_OPTIONS.items()}
#: All of them, for a message that speaks of settings alone; and those that are no English word.
_SETTINGS = _settings_of(_SPOKEN)
_SETTING = _settings_of({setting: name for setting, name in _SPOKEN.items() if "_" in setting})


def in_options(message: str) -> str:
    """Name a gateway's settings in its words as the options that hold them: ``x_y = "z"`` is ``xY=z`` here."""
    return _named(_SETTING, message)


def _named(settings: re.Pattern[str], message: str) -> str:
    return settings.sub(lambda m: _SPOKEN[m[1]] + (f"={m[2] or m[3]}" if m[2] or m[3] else ""), message)


def _consumer(options: Mapping[str, str]) -> str:
    return _read({"consumer": options.get("consumer", "default")}, "consumer", _label)


def _starting(text: str | None) -> str | int | None:
    if text is None:
        return None
    if text.lower() in _POSITIONS:
        return text.lower()
    if re.fullmatch(r"[0-9]{1,18}", text):
        return int(text)
    raise _wrong("startingOffset", "it is committed, earliest, latest or an offset from 0")


def _positive(text: str) -> int:
    return _at_least_one(_number(text))


def _at_least_one(value: int) -> int:
    if value < 1:
        raise ValueError("it is at least 1")
    return value


def _poll(text: str) -> int:
    value = _number(text)
    if value > 30_000:
        raise ValueError("it is at most 30000, or Spark's idle Python workers end meanwhile")
    return value


def _read(options: Mapping[str, str], name: str, read: Callable[[str], _T]) -> _T:
    try:
        return read(options[name])
    except ValueError as error:
        raise _wrong(name, str(error)) from None


def _wrong(name: str, what: str) -> ConfigError:
    return ConfigError("TL-C21", f'{_WHERE} option "{name}"', what)


def _missing(name: str, do: str) -> ConfigError:
    return ConfigError("TL-C20", _WHERE, f'the option "{name}" is missing', do)
