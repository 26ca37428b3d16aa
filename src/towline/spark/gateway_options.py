"""The options of ``format("mqtt")`` that describe a gateway: one table for the source and the sink.

Secrets are refused: options stand in Spark's plans, UI and logs [I12].
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final

from annotated_types import Ge, Le
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from towline import processes
from towline.errors import ConfigError, ConfigErrors
from towline.gateway.access import LONGEST_VALID_S, REMOTE, Access, gateway_location, is_remote
from towline.gateway.settings import GatewaySettings
from towline.guarantee import Guarantee, sharing_problem
from towline.options import Given, Option, directory, options_of, path
from towline.processes import ProcessMark
from towline.spark.link import GatewayPlace
from towline.validation import requirement

__all__ = [
    "ACCESS",
    "CONNECTION",
    "PASSWORD",
    "PLACE",
    "RECEIVING",
    "SENDING",
    "WHERE",
    "check_sharing",
    "gateway_place",
    "gateway_settings",
    "gateway_values",
    "in_options",
    "missing",
]

WHERE: Final = 'format("mqtt")'

#: Why neither direction takes a password.
PASSWORD: Final = (
    "TL-C22",
    f'{WHERE} option "password"',
    "a password in an option would stand in Spark's plans, web UI and logs",
    "Write it to a file of mode 0600 and give its path as passwordFile.",
)


#: Settings of a gateway that are no options of a query that starts it.
_NO_OPTIONS: Final = frozenset(
    {
        "state_dir", "guarantee", "receipts", "linger_after_silence_ms", "owner_pid", "drain_s", "checkpoint", "listen",
        "share", "repeatable", "journal.segment_bytes", "outbox.segment_bytes", "outbox.checkpoint", "outbox.number",
    }
)  # fmt: skip
#: Of them, what only a gateway that receives needs.
_RECEIVING: Final = frozenset(
    {"subscriptions", "ack_after", "receive_maximum", "topic_alias_maximum", "retain_handling", "linger_ms", "journal"}
)
#: Their values are judged together, by the model.
_ALL: Final = tuple(replace(option, kind=Any) for option in options_of(GatewaySettings, leave_out=_NO_OPTIONS))
#: What only a gateway that receives needs.
RECEIVING: Final = tuple(option for option in _ALL if option.path[0] in _RECEIVING)
#: What only a gateway that sends needs.
SENDING: Final = tuple(option for option in _ALL if option.path[0] == "outbox")
#: What both need: how the gateway reaches its brokers.
CONNECTION: Final = tuple(option for option in _ALL if option.path[0] not in _RECEIVING | {"outbox"})


#: The files that let Spark in to a gateway on a network, in fields of `GatewayPlace`.
ACCESS: Final = (
    Option("gatewayTokenFile", ("access", "token_file"), read=path),
    Option("gatewayCaFile", ("access", "ca_file"), read=path),
    Option("gatewayServerName", ("access", "server_name")),
    Option("gatewayTicketValidity", ("ticket_s",), Annotated[float, Ge(60), Le(LONGEST_VALID_S)]),
)
#: Where the gateway is: the directory of one to start or to find, or one that runs already.
PLACE: Final = (
    Option("stateDir", (), read=directory),
    Option("gateway", (), read=gateway_location, hidden=True),
    *ACCESS,
)


def driver_pid() -> int:
    """The driver's JVM: the nearest ancestor named ``java``, else the parent.

    Spark starts a streaming source's process right below the JVM, others below a daemon.
    """
    pid = os.getppid()
    while pid > 1:
        if processes.name(pid) == "java":
            return pid
        pid = processes.parent(pid)
    return os.getppid()


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
        return GatewayPlace(given.value("stateDir"), owner=ProcessMark.of(driver_pid()))
    several = "gateways" in given
    beside = [name for name in (*(option.name for option in options), "stateDir") if name in given]
    if several and "gateway" in given:
        beside = ["gateway"]
    if beside:
        what = "it belongs to the gateway, and the option gateway names one that runs already"
        if several:
            what = "it is of one gateway, and the option gateways names those that run already"
        raise ConfigError("TL-C23", f'{WHERE} option "{beside[0]}"', what, "Give one of the two.")
    place = GatewayPlace("") if several else GatewayPlace(places[0])
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
    """The settings, or each of pydantic's findings as a line about the option it came from.

    Raises:
        ConfigError: TL-C21 for one option, TL-C12 for several that don't go together.
    """
    try:
        return GatewaySettings.model_validate(values)
    except ValidationError as error:
        details = error.errors(include_url=False)
    ConfigErrors.check(_option_error(given, one, options) for one in details)
    raise AssertionError(details)


def _option_error(given: Given, details: ErrorDetails, options: Iterable[Option]) -> ConfigError:
    """One of pydantic's findings as the error of an option; TL-C12 for settings that don't go together."""
    place = tuple(part for part in details["loc"] if isinstance(part, str))
    message = _named(_SETTINGS, requirement(details))[:200]
    option = next((one for one in options if place[: len(one.path)] == one.path), None)
    return given.wrong(option.name, message) if option else ConfigError("TL-C12", WHERE, message)


def check_sharing(settings: GatewaySettings, publish_qos: int | None = None) -> None:
    """Refuse brokers that would break the promise as they take over from each other.

    Raises:
        ConfigError: TL-C90.
    """
    if settings.several_sessions:
        problem = sharing_problem(settings.guarantee, len(settings.brokers), publish_qos)
        raise ConfigError("TL-C90", f'{WHERE} option "broker"', *map(in_options, problem))


def _settings_of(names: Iterable[str]) -> re.Pattern[str]:
    """Settings as a message names them, with what they are set to; not such words in a path."""
    return re.compile(rf'(?<![\w/.-])(?:tls\.|journal\.)?({"|".join(names)})(?![\w/-]|\.\w)(?: = (?:"([^"]*)"|(\w+)))?')


#: Settings of a gateway, and the options that hold them.
_SPOKEN: Final = {option.path[-1]: option.name for option in (*CONNECTION, *RECEIVING) if option.path[0] != "will"}
#: All of them, for a message that speaks of settings alone; and those that are no English word.
_SETTINGS: Final = _settings_of(_SPOKEN)
_SETTING: Final = _settings_of(setting for setting in _SPOKEN if "_" in setting)


def in_options(message: str) -> str:
    """Name a gateway's settings in its words as the options that hold them: ``x_y = "z"`` is ``xY=z`` here."""
    return _named(_SETTING, message)


def _named(settings: re.Pattern[str], message: str) -> str:
    return settings.sub(lambda m: _SPOKEN[m[1]] + (f"={m[2] or m[3]}" if m[2] or m[3] else ""), message)
