"""The options of ``format("mqtt")``: of the gateway that both directions need, of a source, and of a sink.

Secrets are refused: options stand in Spark's plans, UI and logs [I12].
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final

from annotated_types import Ge, Le
from pydantic import ValidationError

from towline import processes
from towline.errors import ConfigError, ConfigErrors
from towline.gateway.access import LONGEST_VALID_S, REMOTE, Access, gateway_location, is_remote
from towline.gateway.settings import GatewaySettings
from towline.guarantee import Guarantee, policy, qos_problem, sharing_problem
from towline.options import SPARKS, Format, Given, Option, OptionText, directory, options_of, path
from towline.processes import ProcessMark
from towline.spark.link import GatewayPlace, ReadPlan
from towline.spark.sink import Retry
from towline.validation import requirement

_WHERE: Final = 'format("mqtt")'

# -- the gateway -------------------------------------------------------------------------------------------------------


def _error(code: str, option: str, what: str, do: str) -> ConfigError:
    return ConfigError(code, f'{_WHERE} option "{option}"', what, do)


def _refused(option: str, what: str, do: str) -> dict[str, tuple[str, str, str, str]]:
    """An option that has an error of its own, as `Format` takes it."""
    return {option.lower(): ("TL-C22", f'{_WHERE} option "{option}"', what, do)}


_PASSWORD: Final = _refused(
    "password",
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
_ACCESS: Final = (
    Option("gatewayTokenFile", ("access", "token_file"), read=path),
    Option("gatewayCaFile", ("access", "ca_file"), read=path),
    Option("gatewayServerName", ("access", "server_name")),
    Option("gatewayTicketValidity", ("ticket_s",), Annotated[float, Ge(60), Le(LONGEST_VALID_S)]),
)
#: Where the gateway is: the directory of one to start or to find, or one that runs already.
_PLACE: Final = (
    Option("stateDir", (), read=directory),
    Option("gateway", (), read=gateway_location, hidden=True),
    *_ACCESS,
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


def _missing(name: str, meaning: str) -> ConfigError:
    """The error for an option that has to be there."""
    return ConfigError("TL-C20", _WHERE, f'the option "{name}" is missing', f"It is {meaning}.")


def _gateway_place(given: Given, options: Iterable[Option]) -> GatewayPlace:
    """Where the gateway is; of several only how they are reached. `options` describe one to start."""
    several = "gateways" in given
    places = given.value("gateways", ()) or (given.value("gateway", ""),)
    remote = any(map(is_remote, places))
    if remote and not given.text("gatewayTokenFile"):
        raise _missing("gatewayTokenFile", "a file of mode 0600 on the driver, with a token of the gateway")
    if not remote and (named := next((option.name for option in _ACCESS if option.name in given), "")):
        what = "it belongs to a gateway on a network, and this one is on this machine"
        raise _error("TL-C23", named, what, f"Leave it out, or give gateway={REMOTE}.")
    if not several and "gateway" not in given:
        if not given.text("stateDir"):
            raise _missing("stateDir", "the directory on a local disk where messages wait until they are safe")
        return GatewayPlace(given.value("stateDir"), owner=ProcessMark.of(driver_pid()))
    one = ("gateway",) if several else ()
    if beside := next((name for name in (*one, *(option.name for option in options), "stateDir") if name in given), ""):
        what = "it belongs to the gateway, and the option gateway names one that runs already"
        if several:
            what = "it is of one gateway, and the option gateways names those that run already"
        raise _error("TL-C23", beside, what, "Give one of the two.")
    values = given.values(_ACCESS)
    return GatewayPlace("" if several else places[0], **{**values, "access": Access(**values.get("access", {}))})


#: What a gateway that is started needs to be told, and what that is.
_NEEDED: Final = {"broker": "mqtt://HOST[:PORT]", "subscribe": "topic filters such as telemetry/#:1"}


def _gateway_values(given: Given, guarantee: Guarantee, options: Iterable[Option]) -> dict[str, Any]:
    """What the options say of a gateway to start, and what follows from them: it has a name."""
    for option in options:
        if option.name in _NEEDED and not given.text(option.name):
            raise _missing(option.name, _NEEDED[option.name])
    values = given.values(options)
    state_dir = given.value("stateDir")
    likely = re.sub(r"[^A-Za-z0-9._-]+", "-", given.text("clientId") or Path(state_dir).name).strip("-._")
    return {"name": likely[:64] or "mqtt", "state_dir": state_dir, "guarantee": guarantee, **values}


def _gateway_settings(
    given: Given, values: Mapping[str, Any], options: Iterable[Option], publish_qos: int | None = None
) -> GatewaySettings:
    """The settings, or each of pydantic's findings as a line about the option it came from."""
    errors = []
    try:
        settings = GatewaySettings.model_validate(values)
    except ValidationError as error:
        for one in error.errors(include_url=False):
            place = tuple(part for part in one["loc"] if isinstance(part, str))
            message = in_options(requirement(one), _SETTINGS)[:200]
            option = next((option for option in options if place[: len(option.path)] == option.path), None)
            errors.append(given.wrong(option.name, message) if option else ConfigError("TL-C12", _WHERE, message))
    ConfigErrors.check(errors)
    # Brokers would break the promise as they take over from each other.
    if settings.connection.several_sessions and (settings.guarantee is Guarantee.EXACTLY_ONCE or publish_qos == 2):
        problem = sharing_problem(settings.guarantee, len(settings.brokers), publish_qos)
        raise _error("TL-C90", "broker", *map(in_options, problem))
    return settings


def _settings_of(names: Iterable[str]) -> re.Pattern[str]:
    """Settings as a message names them, with what they are set to; not such words in a path."""
    return re.compile(rf'(?<![\w/.-])(?:tls\.|journal\.)?({"|".join(names)})(?![\w/-]|\.\w)(?: = (?:"([^"]*)"|(\w+)))?')


#: Settings of a gateway, and the options that hold them.
_SPOKEN: Final = {option.path[-1]: option.name for option in (*CONNECTION, *RECEIVING) if option.path[0] != "will"}
#: All of them, for a message that speaks of settings alone; and those that are no English word.
_SETTINGS: Final = _settings_of(_SPOKEN)
_SETTING: Final = _settings_of(setting for setting in _SPOKEN if "_" in setting)


def in_options(message: str, settings: re.Pattern[str] = _SETTING) -> str:
    """Name a gateway's settings in its words as the options that hold them: ``x_y = "z"`` is ``xY=z`` here."""
    return settings.sub(lambda m: _SPOKEN[m[1]] + (f"={m[2] or m[3]}" if m[2] or m[3] else ""), message)


# -- a source ----------------------------------------------------------------------------------------------------------

_SOURCES_GATEWAY: Final = (*CONNECTION, *RECEIVING)
_READING: Final = tuple(options_of(ReadPlan, leave_out={"place", "serves_again", "refused"}))
_GUARANTEE: Final = Option("guarantee", (), Guarantee, str.lower)
_SOURCE: Final = Format(
    _WHERE,
    (*_SOURCES_GATEWAY, *_PLACE, _GUARANTEE, *_READING),
    # What people expect and that can't be: the reason and the way out.
    refused={
        **_PASSWORD,
        **_refused(
            "asyncProgressTrackingEnabled",
            "asynchronous progress tracking makes Spark report batches as done that are not, and messages would be "
            "lost",
            "Leave it out, of the writer's options too.",
        ),
        **_refused(
            "path",
            "a path is no MQTT broker",
            'Call load() without an argument and give option("broker", "mqtt://HOST").',
        ),
    },
)
#: Every option of a source, as users write it.
SOURCE_OPTIONS: Final = _SOURCE.names


def parse_options(texts: Mapping[str, str]) -> ReadPlan:
    """Validate the options of a source, and put them into plain values.

    Args:
        texts: Option names in any case, values as text.

    Raises:
        ConfigError: TL-C01 unknown option, TL-C12 a promise that the other options can't keep, TL-C20 a missing
            option, TL-C21 a value that can't be, TL-C22 an option that is refused, TL-C23 two that contradict
            each other.
    """
    given = _SOURCE.read(texts)
    if not texts:  # of a table: Spark keeps its options, and gives a Python source those of the reader (4.3)
        do = "Of a table too: spark.readStream.options(...).table(NAME)."
        raise ConfigError("TL-C20", _WHERE, 'the option "stateDir" is missing', do)
    guarantee = given.value("guarantee", Guarantee.AT_LEAST_ONCE)
    place = _gateway_place(given, _SOURCES_GATEWAY)
    if place.owner:
        place = replace(place, settings=_source_settings(given, guarantee).model_dump_json())
    plan = ReadPlan(place, serves_again=policy(guarantee).serves_again, **given.values(_READING))
    if plan.event_time and not plan.checkpoint:
        what = "it follows the query's watermark, and without checkpointLocation nobody knows it"
        do = "Give checkpointLocation, the same as the writer's, on a file system of this machine."
        raise _error("TL-C23", "eventTime", what, do)
    _check_offsets(given, plan)
    return plan


def _check_offsets(given: Given, plan: ReadPlan) -> None:
    """An offset is one of a journal: of several gateways each has its own."""
    for name, value in {"startingOffset": plan.starting, "endingOffset": plan.ending}.items():
        if plan.gateways and isinstance(value, int) and name in given:
            do = 'Give one for each gateway by its name: {"g1": 4711}.'
            raise _error("TL-C23", name, "an offset is one of a single journal", do)
        if not plan.gateways and isinstance(value, Mapping):
            do = "Give it without a name, or the option gateways."
            raise _error("TL-C23", name, "it names gateways, and the source has only one", do)
    if plan.removed and not plan.gateways:
        raise _error("TL-C23", "removedGateways", "it belongs to the option gateways", "Leave it out.")


def _source_settings(given: Given, guarantee: Guarantee) -> GatewaySettings:
    values = _gateway_values(given, guarantee, _SOURCES_GATEWAY)
    values["checkpoint"] = given.text("checkpointLocation")
    values["subscriptions"] = [{"qos": policy(guarantee).qos, **one} for one in values["subscriptions"]]
    settings = _gateway_settings(given, values, _SOURCES_GATEWAY)
    for one in settings.subscriptions:  # without the key or promise that a route may have
        if problem := qos_problem(guarantee, one.qos):
            what = f'{problem[0]}, "{one.pattern}" is subscribed with QoS {one.qos}'
            weaker = "at_least_once and drop repeats by a key of your own" if one.qos else "at_most_once"
            raise _error("TL-C12", "subscribe", what, f"Raise it, or take {weaker}.")
    return settings


# -- a sink ------------------------------------------------------------------------------------------------------------


def _topic(text: str) -> str:
    if not text or re.search(r"[+#\0]", text):
        raise ValueError("a topic is not empty and has no +, # or U+0000 [MQTT-3.3.2-2]")
    return text


def _confirmed(text: str) -> bool:
    """Whether it is the broker that confirms a batch."""
    if text.lower() not in ("outbox", "broker"):
        raise ValueError("must be outbox or broker")
    return text.lower() == "broker"


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkOptions:
    """What a sink was told.

    Attributes:
        place: Where the gateway is, or that of the first of several clients' would be.
        guarantee: ``at_most_once`` publishes with QoS 0, ``at_least_once`` with 1 (or 2), ``exactly_once`` with 2.
            Default by ``qos``, else ``at_least_once``.
        levels: QoS that the promise allows.
        topic: Of rows without one; without it each row has to have its own.
        qos: Of rows without one; default by guarantee.
        retain: Of rows without one.
        to_broker: When a batch counts as written: on the disk of the outbox (``outbox``, the default), or when the
            broker has it (``broker``).
        confirm_s: Seconds a task waits for the broker.
        retry: Patience with a full outbox.
        clients: MQTT clients, ``<clientId>-0`` and so on, each with an outbox in ``<number>-of-<n>`` of the state
            directory; a part of a batch always goes to the same one (docs/jet.md#several-clients).
    """

    place: GatewayPlace
    guarantee: Guarantee
    levels: tuple[int, ...]
    topic: Annotated[str, OptionText(read=_topic)] | None = None
    qos: Annotated[int, Ge(0), Le(2)]
    retain: bool = False
    to_broker: Annotated[bool, OptionText("confirm", _confirmed)] = False
    confirm_s: Annotated[float, Ge(0.001), OptionText("confirmTimeout")] = 600.0
    retry: Retry
    clients: Annotated[int, Ge(1), Le(64)] = 1


_SINKS_GATEWAY: Final = (*CONNECTION, *SENDING)
_SENDING: Final = tuple(options_of(SinkOptions, leave_out={"place", "levels"}))
_OPTIONS: Final = (*_SINKS_GATEWAY, *_PLACE, *_SENDING)
#: Every option of a sink, as users write it; Spark adds two of its own.
SINK_OPTIONS: Final = tuple(option.name for option in _OPTIONS)

_SINK: Final = Format(
    _WHERE,
    _OPTIONS,
    refused={
        **_PASSWORD,
        **{
            name.lower(): ("TL-C01", _WHERE, f'option "{name}" is for reading, this is a sink', "Leave it out.")
            for name in SOURCE_OPTIONS
            if name not in SINK_OPTIONS
        },
    },
    ignored=SPARKS,
)


def parse_sink_options(texts: Mapping[str, str], checkpoint: str = "") -> SinkOptions:
    """Validate the options of a sink.

    Args:
        texts: Option names in any case, values as text.
        checkpoint: Where the checkpoint of the query is; "" for a batch query.

    Raises:
        ConfigError: TL-C01 unknown option, TL-C12 a contradiction to the guarantee, TL-C20 a missing option, TL-C21 a
            value that can't be, TL-C22 an option that is refused, TL-C23 two that contradict each other.
    """
    given = _SINK.read(texts)
    guarantee, qos = _promise(given)
    place = _gateway_place(given, _SINKS_GATEWAY)
    levels = policy(guarantee).publish_levels
    if place.owner:
        values = _gateway_values(given, guarantee, _SINKS_GATEWAY)
        values["outbox"] = {"checkpoint": checkpoint, **values.get("outbox", {})}
        settings = _gateway_settings(given, values, _SINKS_GATEWAY, publish_qos=qos)
        place = replace(place, settings=settings.model_dump_json())
        if settings.connection.several_sessions:  # no row may ask for QoS 2 then
            levels = tuple(level for level in levels if level < 2)
    elif "clients" in given:
        what = "the option gateway names one client that runs already"
        raise _error("TL-C23", "clients", what, "Give one of the two.")
    values = {**given.values(_SENDING), "guarantee": guarantee, "qos": qos}
    return SinkOptions(place=place, levels=levels, **{**values, "retry": Retry(**values.get("retry", {}))})


def _promise(given: Given) -> tuple[Guarantee, int]:
    """The guarantee and the QoS; each decides about the other when only one is given."""
    qos = given.value("qos")
    implied = {0: Guarantee.AT_MOST_ONCE, 2: Guarantee.EXACTLY_ONCE}.get(qos, Guarantee.AT_LEAST_ONCE)
    guarantee: Guarantee = given.value("guarantee", implied)
    levels = policy(guarantee).publish_levels
    if qos is not None and qos not in levels:
        wanted = " or ".join(map(str, levels))
        raise _error("TL-C12", "qos", f"guarantee {guarantee} publishes with QoS {wanted}", "Change one.")
    return guarantee, levels[0] if qos is None else qos


def places_of(parsed: SinkOptions) -> tuple[GatewayPlace, ...]:
    """Where the gateways of the clients are: of one the state directory, of several ``<number>-of-<clients>`` in it.

    A part always goes to the same outbox [I10]: so the number stays as it was for a state directory.

    Raises:
        ConfigError: TL-C28, the state directory has another number of clients.
    """
    place, clients = parsed.place, parsed.clients
    if not place.settings:
        return (place,)
    directory = Path(place.text)
    matches = (re.fullmatch(r"\d+-of-(\d+)", entry.name) for entry in directory.glob("*-of-*"))
    totals = {int(match[1]) for match in matches if match}
    if other := ({1} if (directory / "outbox").exists() else totals) - {clients}:
        what = f"the state directory {directory} has {other.pop()}, and a batch that is run again meets what each has"
        do = "Set it back; for another number take a new stateDir and a new checkpoint, when all is delivered."
        raise ConfigError("TL-C28", f'{_WHERE} option "clients" = "{clients}"', what, do)
    return (place,) if clients == 1 else tuple(_numbered(place, number, clients) for number in range(clients))


def _numbered(place: GatewayPlace, number: int, clients: int) -> GatewayPlace:
    """As Jet's sink names its clients: the id and a number."""
    told = json.loads(place.settings)
    directory = str(Path(place.text) / f"{number}-of-{clients}")
    told |= {"client_id": f"{told['client_id'] or told['name']}-{number}", "name": f"{told['name']}-{number}"}
    told |= {"state_dir": directory, "outbox": {**told["outbox"], "number": number}}
    return replace(place, text=directory, settings=json.dumps(told))
