"""Options of ``format("mqtt")``: of the gateway, for both directions, of a source, and of a sink.

Secrets are refused: options appear in Spark's plans, UI and logs [I12].
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import psutil
from annotated_types import Ge, Le
from pydantic import ValidationError

from towline.errors import ConfigError, ConfigErrors
from towline.gateway.access import MAX_TICKET_S, REMOTE_SCHEME, ClientAccess, is_remote, parse_gateway
from towline.gateway.settings import GatewaySettings
from towline.guarantee import Guarantee, policy, qos_problem, sharing_problem
from towline.options import (
    FormatOptions,
    Option,
    OptionValues,
    options_of,
    parse_directory,
    parse_path,
)
from towline.processes import ProcessIdentity
from towline.spark.link import GatewayAddress, ReadPlan
from towline.validation import requirement

_FORMAT: Final = 'format("mqtt")'

# -- the gateway -------------------------------------------------------------------------------------------------------


def _option_error(code: str, option: str, problem: str, remedy: str) -> ConfigError:
    return ConfigError(code, f'{_FORMAT} option "{option}"', problem, remedy)


#: Code, location, problem and remedy of an option with an error of its own.
_REJECTED: Final = {
    "password": (
        *("TL-C22", f'{_FORMAT} option "password"'),
        "a password in an option would stand in Spark's plans, web UI and logs",
        "Write it to a file of mode 0600 and give its path as passwordFile.",
    )
}
#: Gateway settings without an option: a query that starts a gateway sets them itself.
_SETTINGS_WITHOUT_OPTION: Final = frozenset(
    {
        "state_dir", "guarantee", "receipts", "linger_after_silence_ms", "owner_pid", "drain_s", "checkpoint", "listen",
        "share", "repeatable", "journal.segment_bytes", "outbox.segment_bytes", "outbox.checkpoint",
    }
)  # fmt: skip
#: Settings that only a receiving gateway needs.
_RECEIVER_SETTINGS: Final = frozenset(
    {"subscriptions", "ack_after", "receive_maximum", "topic_alias_maximum", "retain_handling", "linger_ms", "journal"}
)
#: Their values are validated together, by the model.
_GATEWAY_OPTIONS: Final = tuple(
    replace(option, value_type=Any) for option in options_of(GatewaySettings, exclude=_SETTINGS_WITHOUT_OPTION)
)
#: Options that only a receiving gateway needs.
RECEIVER_OPTIONS: Final = tuple(option for option in _GATEWAY_OPTIONS if option.path[0] in _RECEIVER_SETTINGS)
#: Options that only a sending gateway needs.
SENDER_OPTIONS: Final = tuple(option for option in _GATEWAY_OPTIONS if option.path[0] == "outbox")
#: Options of any gateway: its connection to the brokers.
CONNECTION_OPTIONS: Final = tuple(
    option for option in _GATEWAY_OPTIONS if option.path[0] not in _RECEIVER_SETTINGS | {"outbox"}
)


#: Credentials for a gateway on a network, as fields of `GatewayAddress`.
_ACCESS_OPTIONS: Final = (
    Option("gatewayTokenFile", ("access", "token_file"), parse=parse_path),
    Option("gatewayCaFile", ("access", "ca_file"), parse=parse_path),
    Option("gatewayServerName", ("access", "server_name")),
    Option("gatewayTicketValidity", ("ticket_s",), Annotated[float, Ge(60), Le(MAX_TICKET_S)]),
)
#: Location of the gateway: the directory of one to start, or a running one.
_LOCATION_OPTIONS: Final = (
    Option("stateDir", (), parse=parse_directory),
    Option("gateway", (), parse=parse_gateway, secret=True),
    *_ACCESS_OPTIONS,
)


def driver_pid() -> int:
    """Return the pid of the driver's JVM: the nearest ancestor named ``java``, else the parent.

    Spark starts a streaming source's process as a child of the JVM, others as children of a daemon.
    """
    with contextlib.suppress(psutil.Error):  # one has ended meanwhile
        return next((parent.pid for parent in psutil.Process().parents() if parent.name() == "java"), os.getppid())
    return os.getppid()


def _missing_option(name: str, meaning: str) -> ConfigError:
    return ConfigError("TL-C20", _FORMAT, f'the option "{name}" is missing', f"It is {meaning}.")


def _gateway_address(values: OptionValues, options: Iterable[Option]) -> GatewayAddress:
    """Return the gateway's address; for several gateways only the access to them. `options` describe one to start."""
    has_several = "gateways" in values
    locations = values.value("gateways", ()) or (values.value("gateway", ""),)
    on_network = any(map(is_remote, locations))
    if on_network and not values.text("gatewayTokenFile"):
        raise _missing_option("gatewayTokenFile", "a file of mode 0600 on the driver, with a token of the gateway")
    access_options = [option.name for option in _ACCESS_OPTIONS if option.name in values]
    if access_options and not on_network:
        problem = "it is for a gateway on a network, and this one is on this machine"
        raise _option_error("TL-C23", access_options[0], problem, f"Leave it out, or give gateway={REMOTE_SCHEME}.")
    if not has_several and "gateway" not in values:
        if not values.text("stateDir"):
            raise _missing_option("stateDir", "the directory on a local disk where messages wait to be written")
        return GatewayAddress(values.value("stateDir"), owner=ProcessIdentity.of(driver_pid()))
    excluded = [*(["gateway"] if has_several else []), *(option.name for option in options), "stateDir"]
    if conflicts := [name for name in excluded if name in values]:
        location_option = "gateways" if has_several else "gateway"
        problem = f"it is a setting of one gateway, and the option {location_option} names a running one"
        raise _option_error("TL-C23", conflicts[0], problem, "Give one of the two.")
    fields = values.values(_ACCESS_OPTIONS)
    fields["access"] = ClientAccess(**fields.get("access", {}))
    return GatewayAddress("" if has_several else locations[0], **fields)


#: Options that a started gateway requires, with their meaning.
_REQUIRED_OPTIONS: Final = {"broker": "mqtt://HOST[:PORT]", "subscribe": "topic filters such as telemetry/#:1"}


def _gateway_values(values: OptionValues, guarantee: Guarantee, options: Iterable[Option]) -> dict[str, Any]:
    """Return the settings of a gateway to start from the options, with a default name."""
    for option in options:
        if option.name in _REQUIRED_OPTIONS and not values.text(option.name):
            raise _missing_option(option.name, _REQUIRED_OPTIONS[option.name])
    fields = values.values(options)
    state_dir = values.value("stateDir")
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", values.text("clientId") or Path(state_dir).name).strip("-._")
    return {"name": name[:64] or "mqtt", "state_dir": state_dir, "guarantee": guarantee, **fields}


def _gateway_settings(
    values: OptionValues, fields: Mapping[str, Any], options: Iterable[Option], publish_qos: int | None = None
) -> GatewaySettings:
    """Validate the settings; each pydantic error becomes one about its option."""
    errors = []
    try:
        settings = GatewaySettings.model_validate(fields)
    except ValidationError as error:
        for issue in error.errors(include_url=False):
            setting = tuple(part for part in issue["loc"] if isinstance(part, str))
            message = _with_option_names(requirement(issue))[:200]
            option = next((option for option in options if setting[: len(option.path)] == option.path), None)
            errors.append(values.error(option.name, message) if option else ConfigError("TL-C12", _FORMAT, message))
    ConfigErrors.raise_any(errors)
    # A failover to a broker without the session would lose or duplicate messages.
    if settings.connection.several_sessions and (settings.guarantee is Guarantee.EXACTLY_ONCE or publish_qos == 2):
        raise _option_error("TL-C90", "broker", *map(_with_option_names, sharing_problem(len(settings.brokers))))
    return settings


#: Options by the name of their gateway setting.
_OPTION_NAMES: Final = {
    option.path[-1]: option.name for option in (*CONNECTION_OPTIONS, *RECEIVER_OPTIONS) if option.path[0] != "will"
}
#: Names with an underscore, which are no English words, but not inside paths.
_SETTING_NAME: Final = re.compile(r"(?<![\w/.-])(?:tls\.|journal\.)?([a-z]+(?:_[a-z]+)+)(?![\w/-]|\.\w)")


def _with_option_names(message: str) -> str:
    """Replace a gateway's setting names in a message by their options: ``session_expiry_s`` by ``sessionExpiry``."""
    return _SETTING_NAME.sub(lambda match: _OPTION_NAMES.get(match[1], match[0]), message)


# -- a source ----------------------------------------------------------------------------------------------------------

_SOURCE_GATEWAY_OPTIONS: Final = (*CONNECTION_OPTIONS, *RECEIVER_OPTIONS)
_READ_OPTIONS: Final = tuple(options_of(ReadPlan, exclude={"address", "replays_batches", "options_error"}))
_GUARANTEE_OPTION: Final = Option("guarantee", (), Guarantee, str.lower)
SOURCE_FORMAT: Final = FormatOptions(
    _FORMAT,
    (*_SOURCE_GATEWAY_OPTIONS, *_LOCATION_OPTIONS, _GUARANTEE_OPTION, *_READ_OPTIONS),
    rejected=_REJECTED,
)


def parse_options(texts: Mapping[str, str]) -> ReadPlan:
    """Validate the options of a source, and return them as plain values.

    Args:
        texts: Option names in any case, values as text.

    Raises:
        ConfigError: TL-C01 unknown option, TL-C12 a guarantee that contradicts other options, TL-C20 a missing option,
            TL-C21 an invalid value, TL-C22 a refused option, TL-C23 two contradicting options.
    """
    values = SOURCE_FORMAT.parse(texts)
    if not texts:  # of a table: Spark passes only the reader's options to a Python source (4.3)
        remedy = "Of a table too: spark.readStream.options(...).table(NAME)."
        raise ConfigError("TL-C20", _FORMAT, 'the option "stateDir" is missing', remedy)
    guarantee = values.value("guarantee", Guarantee.AT_LEAST_ONCE)
    address = _gateway_address(values, _SOURCE_GATEWAY_OPTIONS)
    if address.owner:
        address = replace(address, settings=_source_settings(values, guarantee).model_dump_json())
    plan = ReadPlan(address, replays_batches=policy(guarantee).replays_batches, **values.values(_READ_OPTIONS))
    if plan.event_time and not plan.checkpoint:
        problem = "it follows the query's watermark, which is unknown without checkpointLocation"
        remedy = "Give checkpointLocation, the same as the writer's, on a file system of this machine."
        raise _option_error("TL-C23", "eventTime", problem, remedy)
    _check_offsets(plan)
    return plan


def _check_offsets(plan: ReadPlan) -> None:
    """Check that offsets name gateways if there are several: an offset belongs to one journal."""
    for name, value in {"startingOffset": plan.start_offset, "endingOffset": plan.end_offset}.items():
        if isinstance(value, int if plan.gateways else Mapping):
            remedy = 'Give one for each gateway by its name, {"g1": 4711}; without the option gateways a number.'
            raise _option_error("TL-C23", name, "an offset belongs to a single journal", remedy)
    if plan.removed_gateways and not plan.gateways:
        problem = "it has no effect without the option gateways"
        raise _option_error("TL-C23", "removedGateways", problem, "Leave it out.")


def _source_settings(values: OptionValues, guarantee: Guarantee) -> GatewaySettings:
    fields = _gateway_values(values, guarantee, _SOURCE_GATEWAY_OPTIONS)
    fields["checkpoint"] = values.text("checkpointLocation")
    default = {"qos": policy(guarantee).qos}
    fields["subscriptions"] = [{**default, **subscription} for subscription in fields["subscriptions"]]
    settings = _gateway_settings(values, fields, _SOURCE_GATEWAY_OPTIONS)
    for subscription in settings.subscriptions:  # a route's key or promise does not apply here
        if problem := qos_problem(guarantee, subscription.qos):
            qos_error = f'{problem[0]}, "{subscription.pattern}" is subscribed with QoS {subscription.qos}'
            weaker = "at_least_once and drop duplicates by a key of your own" if subscription.qos else "at_most_once"
            raise _option_error("TL-C12", "subscribe", qos_error, f"Raise it, or choose {weaker}.")
    return settings


# -- a sink ------------------------------------------------------------------------------------------------------------


def _read_topic(text: str) -> str:
    if not text or re.search(r"[+#\0]", text):
        raise ValueError("a topic is not empty and has no +, # or U+0000 [MQTT-3.3.2-2]")
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkOptions:
    """Options of a sink.

    Attributes:
        address: Address of the gateway.
        guarantee: ``at_most_once`` publishes with QoS 0, ``at_least_once`` with 1 (or 2), ``exactly_once`` with 2.
            Default by ``qos``, else ``at_least_once``.
        qos_levels: QoS levels that the guarantee allows.
        topic: Default topic of rows; without it each row needs its own.
        qos: Default QoS of rows; by guarantee if not given.
        retain: Default retain flag of rows.
        confirm: When a batch counts as written: on the disk of the outbox (``outbox``), or
            acknowledged by the broker (``broker``).
        confirm_timeout_s: Seconds that a task waits for the broker.
        retry_timeout_s: Seconds that a task waits for room in a full outbox, or for an unreachable gateway; ``0`` tries
            once, ``inf`` never gives up.
    """

    address: GatewayAddress
    guarantee: Guarantee
    qos_levels: tuple[int, ...]
    topic: Annotated[str, Option(parse=_read_topic)] | None = None
    qos: Annotated[int, Ge(0), Le(2)]
    retain: bool = False
    confirm: Literal["outbox", "broker"] = "outbox"
    confirm_timeout_s: Annotated[float, Ge(0.001), Option("confirmTimeout")] = 600.0
    retry_timeout_s: Annotated[float, Ge(0)] = 600.0


_SINK_GATEWAY_OPTIONS: Final = (*CONNECTION_OPTIONS, *SENDER_OPTIONS)
_WRITE_OPTIONS: Final = tuple(options_of(SinkOptions, exclude={"address", "qos_levels"}))
SINK_FORMAT: Final = FormatOptions(
    _FORMAT,
    (*_SINK_GATEWAY_OPTIONS, *_LOCATION_OPTIONS, *_WRITE_OPTIONS),
    rejected=_REJECTED,
)


def parse_sink_options(texts: Mapping[str, str], checkpoint: str = "") -> SinkOptions:
    """Validate the options of a sink.

    Args:
        texts: Option names in any case, values as text.
        checkpoint: Location of the query's checkpoint; "" for a batch query.

    Raises:
        ConfigError: TL-C01 unknown option, TL-C12 a contradiction to the guarantee, TL-C20 a missing option, TL-C21 an
            invalid value, TL-C22 a refused option, TL-C23 two contradicting options.
    """
    values = SINK_FORMAT.parse(texts)
    guarantee, qos = _guarantee_and_qos(values)
    address = _gateway_address(values, _SINK_GATEWAY_OPTIONS)
    qos_levels = policy(guarantee).publish_qos_choices
    if address.owner:
        fields = _gateway_values(values, guarantee, _SINK_GATEWAY_OPTIONS)
        fields["outbox"] = {"checkpoint": checkpoint, **fields.get("outbox", {})}
        settings = _gateway_settings(values, fields, _SINK_GATEWAY_OPTIONS, publish_qos=qos)
        address = replace(address, settings=settings.model_dump_json())
        if settings.connection.several_sessions:  # then no row may have QoS 2
            qos_levels = tuple(qos for qos in qos_levels if qos < 2)
    fields = {**values.values(_WRITE_OPTIONS), "guarantee": guarantee, "qos": qos}
    return SinkOptions(address=address, qos_levels=qos_levels, **fields)


def _guarantee_and_qos(values: OptionValues) -> tuple[Guarantee, int]:
    """Return the guarantee and the QoS; each gives the default of the other."""
    qos = values.value("qos")
    default_guarantee = {0: Guarantee.AT_MOST_ONCE, 2: Guarantee.EXACTLY_ONCE}.get(qos, Guarantee.AT_LEAST_ONCE)
    guarantee: Guarantee = values.value("guarantee", default_guarantee)
    qos_levels = policy(guarantee).publish_qos_choices
    if qos is not None and qos not in qos_levels:
        problem = f"guarantee {guarantee} publishes with QoS {' or '.join(map(str, qos_levels))}"
        raise _option_error("TL-C12", "qos", problem, "Change one.")
    return guarantee, qos_levels[0] if qos is None else qos
