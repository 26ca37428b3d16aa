"""The options of ``format("mqtt")`` that describe a gateway: one table for the source and the sink.

Secrets are refused: options stand in Spark's plans, UI and logs [I12].
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, get_args, get_type_hints

from pydantic import ValidationError

from towline import options as read
from towline.errors import ConfigError
from towline.gateway.access import REMOTE, Access, is_remote
from towline.gateway.settings import GatewaySettings, OutboxLimits
from towline.gateway.tickets import LONGEST_VALID_S
from towline.guarantee import Guarantee, sharing_problem
from towline.net.settings import MqttSettings, WillSettings
from towline.net.transport import Tls
from towline.options import Given, Option
from towline.processes import ProcessMark
from towline.spark.link import GatewayPlace, driver_pid
from towline.text import printable

__all__ = [
    "ACCESS",
    "CONNECTION",
    "PASSWORD",
    "PLACE",
    "RECEIVING",
    "SENDING",
    "WHERE",
    "at_least_one",
    "check_sharing",
    "gateway_list",
    "gateway_place",
    "gateway_settings",
    "gateway_values",
    "in_options",
    "missing",
    "parse_subscriptions",
    "wrong",
]

WHERE: Final = 'format("mqtt")'

#: Why neither direction takes a password.
PASSWORD: Final = (
    "TL-C22",
    f'{WHERE} option "password"',
    "a password in an option would stand in Spark's plans, web UI and logs",
    "Write it to a file of mode 0600 and give its path as passwordFile.",
)


def _brokers(text: str) -> str:
    if not text.strip(" ,"):
        raise ValueError("it is mqtt://HOST[:PORT], several with a comma between them")
    if "?" in text:  # Spark shows its options, and a presigned query is a secret
        raise ValueError("a query is given as webSocketQueryFile")
    return text


def _number_of(setting: str) -> Callable[[str], float]:
    """Reads a number; the gateway's settings say how large it may be."""

    def read_number(text: str) -> float:
        try:
            return float(text)
        except ValueError:
            unit = "milliseconds" if setting.endswith("_ms") else "seconds"
            raise ValueError(f"it is a number of {unit}") from None

    return read_number


def _pairs(text: str) -> list[tuple[str, str]]:
    """User properties: ``NAME=VALUE, ...``, or JSON pairs where a comma stands in one."""
    if text.lstrip().startswith("["):
        try:
            pairs = json.loads(text)
        except ValueError:
            pairs = None
        if isinstance(pairs, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
            return [(str(name), str(value)) for name, value in pairs]
    elif all("=" in part for part in text.split(",")):
        named = (part.strip().partition("=") for part in text.split(","))
        return [(name, value) for name, _, value in named]
    raise ValueError('it is NAME=VALUE with commas between them, or JSON such as [["a", "1, 2"]]')


def _parts(text: str) -> object:
    """What stands between commas, or what JSON holds where it begins as a list; None for broken JSON."""
    if not text.lstrip().startswith("["):
        return text.split(",")
    try:
        return json.loads(text)
    except ValueError:
        return None


def parse_subscriptions(text: str) -> list[dict[str, object]]:
    """Read ``telemetry/#:1, alarms/+`` or a JSON list of the same texts (for filters with a comma), or of objects.

    Args:
        text: Filters, each with ``:QOS`` behind it or not; an object has ``filter`` and any of `_SUBSCRIPTION`.

    Raises:
        ValueError: For an empty list, or JSON that is none of these.
    """
    parts = _parts(text)
    if not isinstance(parts, list) or not all(isinstance(part, str | dict) for part in parts):
        raise ValueError('it is filters with a comma between them, or a JSON list such as ["a,b/#:1"]')
    subscriptions = [_subscription(part) for part in parts if not isinstance(part, str) or part.strip()]
    if not subscriptions:
        raise ValueError("it has no topic filter")
    return subscriptions


#: Keys of a subscription as a JSON object, and what the gateway calls them [MQTT 5 section 3.8.3.1].
_SUBSCRIPTION: Final = {
    "filter": "filter",
    "qos": "qos",
    "noLocal": "no_local",
    "retainAsPublished": "retain_as_published",
    "retainHandling": "retain_handling",
    "subscriptionId": "identifier",
}


def _subscription(said: str | dict[str, object]) -> dict[str, object]:
    if isinstance(said, dict):
        unknown = next((name for name in said if name not in _SUBSCRIPTION), None)
        if unknown is not None or "filter" not in said:
            known = ", ".join(_SUBSCRIPTION)
            raise ValueError(f'a subscription has {known}, and no "{unknown}"' if unknown else "a filter is missing")
        return {_SUBSCRIPTION[name]: value for name, value in said.items()}
    text = said.strip()
    match = re.fullmatch(r"(.*):([0-9]+)", text, re.DOTALL)
    return {"filter": match[1], "qos": int(match[2])} if match else {"filter": text}


def at_least_one(value: int) -> int:
    """A number that has to be more than nothing.

    Raises:
        ValueError: It is 0.
    """
    if value < 1:
        raise ValueError("it is at least 1")
    return value


#: How a text becomes the value of a setting where its type does not say it.
_READERS: Final[Mapping[str, Callable[[str], object]]] = {
    "brokers": _brokers,
    "will.user_properties": _pairs,
}
#: Settings whose options have names of their own.
_NAMES: Final = {"brokers": "broker"}
#: Settings that may hold a password, where a user put one.
_ADDRESSES: Final = frozenset({"brokers", "proxy", "username"})
#: Of a `MqttSettings`, what only a gateway that receives needs.
_RECEIVING: Final = frozenset({"receive_maximum", "topic_alias_maximum", "retain_handling", "linger_ms"})


def _name_of(setting: str) -> str:
    """``tls.ca_file`` is ``tlsCaFile``; units of time are left out but for milliseconds."""
    words = setting.removesuffix("_s").replace("websocket", "web_socket").replace(".", "_").split("_")
    return words[0] + "".join(word.capitalize() for word in words[1:])


def _reader_of(setting: str, kind: Any) -> Callable[[str], Any]:
    """Reads a text as the type of a setting wants; how large a number may be the setting itself says."""
    kinds = {kind, *get_args(kind)} | {inner for one in get_args(kind) for inner in get_args(one)}
    if reader := _READERS.get(setting):
        return reader
    if setting.endswith("_bytes"):
        return read.size
    readers = {bool: read.truth, int: read.whole(), float: _number_of(setting), Path: read.path}
    return next((reader for type_, reader in readers.items() if type_ in kinds), str)


def _options(model: type, prefix: str = "", leave_out: Container[str] = ()) -> Iterator[Option]:
    """An option for each setting of a model, and of the tables in it."""
    for name, kind in get_type_hints(model, include_extras=True).items():
        setting = f"{prefix}{name}"
        table = next((one for one in (kind, *get_args(kind)) if one in (Tls, WillSettings)), None)
        if table is not None:
            yield from _options(table, f"{name}.")
        elif name not in leave_out and not name.startswith("model_"):
            option = _NAMES.get(setting) or _name_of(setting)
            yield Option(option, _reader_of(setting, kind), setting, address=setting in _ADDRESSES)


#: How the gateway reaches its brokers, whichever way messages go; `Option.into` names settings of the gateway.
CONNECTION: Final = (
    *_options(MqttSettings, leave_out=_RECEIVING),
    Option("name", read.label, "name"),
    Option("gatewayLife", lambda text: read.word("query", "detached")(text) == "detached", "detached"),
)
#: What only a gateway that receives needs.
RECEIVING: Final = (
    *(one for one in _options(MqttSettings) if one.into in _RECEIVING),
    Option("subscribe", parse_subscriptions, "subscriptions"),
    Option("ackAfter", into="ack_after"),
    *_options(type(GatewaySettings.model_fields["journal"].default), "journal.", {"segment_bytes"}),
)
#: What only a gateway that sends needs.
SENDING: Final = tuple(_options(OutboxLimits, "outbox.", {"segment_bytes"}))


_REMOTE: Final = re.compile(re.escape(REMOTE) + r"(\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._-]+):[0-9]{1,5}/?")


def _gateway(text: str) -> str:
    if not text:
        raise ValueError("it is the state directory of a running gateway, or its location grpc+tls://HOST:PORT")
    if "://" not in text:
        return read.path(text)
    if not text.startswith("grpc+unix:///") and not _REMOTE.fullmatch(text):
        raise ValueError("a location is grpc+unix:///PATH or grpc+tls://HOST:PORT; there is none without TLS")
    return text


def gateway_list(text: str) -> tuple[str, ...]:
    """Read several gateways: ``/var/lib/g1, grpc+tls://g2:8815``, or a JSON list of the same texts.

    Raises:
        ValueError: One is none, or stands there twice, or there is none.
    """
    parts = _parts(text)
    if not isinstance(parts, list) or not all(isinstance(part, str) for part in parts):
        raise ValueError('it is gateways with a comma between them, or a JSON list such as ["/var/lib/g1"]')
    named = [_gateway(part.strip()).rstrip("/") for part in parts if part.strip()]
    if not named:
        raise ValueError("it names no gateway")
    if twice := next((one for one in named if named.count(one) > 1), None):
        raise ValueError(f"{printable(twice, 200)} stands there twice")
    return tuple(named)


#: The files that let Spark in to a gateway on a network; `Option.into` names fields of `GatewayPlace`.
ACCESS: Final = (
    Option("gatewayTokenFile", read.path, "access.token_file"),
    Option("gatewayCaFile", read.path, "access.ca_file"),
    Option("gatewayServerName", into="access.server_name"),
    Option("gatewayTicketValidity", read.between(60, LONGEST_VALID_S, "60 to 604800 seconds"), "ticket_s"),
)
#: Where the gateway is: the directory of one to start or to find, or one that runs already.
PLACE: Final = (Option("stateDir", read.directory), Option("gateway", _gateway, address=True), *ACCESS)


def wrong(option: Option, text: str, problem: str) -> ConfigError:
    """The error for a text that can't be; it shows the text, but for one that may hold a password."""
    shown = f' = "{printable(text, 60)}"' if text and not option.address else ""
    return ConfigError("TL-C21", f'{WHERE} option "{option.name}"{shown}', problem)


def missing(name: str, do: str) -> ConfigError:
    """The error for an option that has to be there."""
    return ConfigError("TL-C20", WHERE, f'the option "{name}" is missing', do)


def gateway_place(given: Given, options: Iterable[Option]) -> GatewayPlace:
    """Where the gateway is, without the settings of one to start; of several only how they are reached.

    Args:
        given: By the user.
        options: Those that describe a gateway to start; they make no sense beside ``gateway``, where one runs already.

    Raises:
        ConfigError: TL-C20, TL-C21, TL-C23.
    """
    places = given.value("gateways", ()) or (given.value("gateway", ""),)
    _check_access(given, places)
    if "gateway" not in given and "gateways" not in given:
        if not given.text("stateDir"):
            raise missing("stateDir", "It is the directory on a local disk where messages wait until they are safe.")
        return GatewayPlace(given.value("stateDir"), "", owner=ProcessMark.of(driver_pid()))
    several = "gateways" in given
    beside = [name for name in (*(option.name for option in options), "stateDir") if name in given]
    if several and "gateway" in given:
        beside = ["gateway"]
    if beside:
        what = "it belongs to the gateway, and the option gateway names one that runs already"
        if several:
            what = "it is of one gateway, and the option gateways names those that run already"
        raise ConfigError("TL-C23", f'{WHERE} option "{beside[0]}"', what, "Give one of the two.")
    place = GatewayPlace("", "") if several else GatewayPlace.of(places[0])
    values = given.values(ACCESS)
    return replace(place, **{**values, "access": Access(**values.get("access", {}))})


def _check_access(given: Given, places: Sequence[str]) -> None:
    """See that what lets Spark in to a gateway is there for one on a network, and for no other."""
    said = [option.name for option in ACCESS if option.name in given]
    if not any(map(is_remote, places)):
        if said:
            what = "it belongs to a gateway on a network, and this one is on this machine"
            raise ConfigError("TL-C23", f'{WHERE} option "{said[0]}"', what, f"Leave it out, or give gateway={REMOTE}.")
        return
    if not given.text("gatewayTokenFile"):
        raise missing("gatewayTokenFile", "It is a file of mode 0600 on the driver, with a token of the gateway.")


def gateway_values(given: Given, guarantee: Guarantee, options: Iterable[Option]) -> dict[str, Any]:
    """What the options say for `gateway_settings`, and what follows from them: a gateway has a name."""
    values = given.values(options)
    state_dir = given.value("stateDir")
    likely = re.sub(r"[^A-Za-z0-9._-]+", "-", given.text("clientId") or Path(state_dir).name).strip("-._")
    return {"name": likely[:64] or "mqtt", "state_dir": state_dir, "guarantee": guarantee, **values}


def gateway_settings(given: Given, values: Mapping[str, Any], options: Iterable[Option]) -> GatewaySettings:
    """The settings, or pydantic's first finding as a line about the option it came from.

    Raises:
        ConfigError: TL-C21 for one option, TL-C12 for several that don't go together.
    """
    try:
        return GatewaySettings.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    place = tuple(part for part in first["loc"] if isinstance(part, str))
    message = _named(_SETTINGS, " ".join(first["msg"].removeprefix("Value error, ").split())[:200])
    for option in options:
        if place[: len(option.place)] == option.place:
            raise given.wrong(option.name, message.replace("Input should", "it should"))
    raise ConfigError("TL-C12", WHERE, message)


def check_sharing(settings: GatewaySettings, publish_qos: int | None = None) -> None:
    """Refuse brokers that would break the promise as they take over from each other.

    Raises:
        ConfigError: TL-C90.
    """
    if problem := sharing_problem(settings, publish_qos):
        raise ConfigError("TL-C90", f'{WHERE} option "broker"', *map(in_options, problem))


def _settings_of(names: Iterable[str]) -> re.Pattern[str]:
    """Settings as a message names them, with what they are set to; not such words in a path."""
    return re.compile(rf'(?<![\w/.-])(?:tls\.|journal\.)?({"|".join(names)})(?![\w/-]|\.\w)(?: = (?:"([^"]*)"|(\w+)))?')


#: Settings of a gateway, and the options that hold them.
_SPOKEN: Final = {option.place[-1]: option.name for option in (*CONNECTION, *RECEIVING) if option.place[0] != "will"}
#: All of them, for a message that speaks of settings alone; and those that are no English word.
_SETTINGS: Final = _settings_of(_SPOKEN)
_SETTING: Final = _settings_of(setting for setting in _SPOKEN if "_" in setting)


def in_options(message: str) -> str:
    """Name a gateway's settings in its words as the options that hold them: ``x_y = "z"`` is ``xY=z`` here."""
    return _named(_SETTING, message)


def _named(settings: re.Pattern[str], message: str) -> str:
    return settings.sub(lambda m: _SPOKEN[m[1]] + (f"={m[2] or m[3]}" if m[2] or m[3] else ""), message)
