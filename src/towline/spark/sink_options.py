"""The options of ``format("mqtt")`` as a sink.

Those of the gateway are the source's own; the rest says what to send and when a batch counts as written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Final

from annotated_types import Ge, Le

from towline.errors import ConfigError
from towline.gateway.settings import GatewaySettings
from towline.guarantee import Guarantee, policy
from towline.options import SPARKS, Format, Given, OptionText, options_of
from towline.spark import gateway_options as gateway
from towline.spark import options as source
from towline.spark.gateway_options import WHERE
from towline.spark.link import GatewayPlace
from towline.spark.sink import Retry


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


_GATEWAY: Final = (*gateway.CONNECTION, *gateway.SENDING)
_SENDING: Final = tuple(options_of(SinkOptions, leave_out={"place", "levels"}))
_OPTIONS: Final = (*_GATEWAY, *gateway.PLACE, *_SENDING)
#: Every option, as users write it; Spark adds two of its own.
OPTIONS: Final = tuple(option.name for option in _OPTIONS)

_FORMAT: Final = Format(
    WHERE,
    _OPTIONS,
    refused={
        "password": gateway.PASSWORD,
        **{
            name.lower(): ("TL-C01", WHERE, f'option "{name}" is for reading, this is a sink', "Leave it out.")
            for name in source.OPTIONS
            if name not in OPTIONS
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
    given = _FORMAT.read(texts)
    guarantee, qos = _promise(given)
    place = gateway.gateway_place(given, _GATEWAY)
    settings = None if "gateway" in given else _settings(given, guarantee, qos, checkpoint)
    if settings is None and "clients" in given:
        where, what = f'{WHERE} option "clients"', "the option gateway names one client that runs already"
        raise ConfigError("TL-C23", where, what, "Give one of the two.")
    several = settings is not None and settings.several_sessions  # no row may ask for QoS 2 then
    values = given.values(_SENDING)
    retry = Retry(**values.get("retry", {}))
    return SinkOptions(
        place=replace(place, settings=settings.model_dump_json() if settings else ""),
        levels=tuple(level for level in policy(guarantee).publish_levels if level < 2 or not several),
        **{**values, "guarantee": guarantee, "qos": qos, "retry": retry},
    )


def _promise(given: Given) -> tuple[Guarantee, int]:
    """The guarantee and the QoS; each decides about the other when only one is given."""
    qos = given.value("qos")
    implied = {0: Guarantee.AT_MOST_ONCE, 2: Guarantee.EXACTLY_ONCE}.get(qos, Guarantee.AT_LEAST_ONCE)
    guarantee: Guarantee = given.value("guarantee", implied)
    levels = policy(guarantee).publish_levels
    if qos is not None and qos not in levels:
        wanted = " or ".join(map(str, levels))
        raise ConfigError(
            "TL-C12", f'{WHERE} option "qos"', f"guarantee {guarantee} publishes with QoS {wanted}", "Change one."
        )
    return guarantee, levels[0] if qos is None else qos


def _settings(given: Given, guarantee: Guarantee, qos: int, checkpoint: str) -> GatewaySettings:
    if not given.text("broker"):
        raise gateway.missing("broker", "It is mqtt://HOST[:PORT].")
    values = gateway.gateway_values(given, guarantee, _GATEWAY)
    values["outbox"] = {"checkpoint": checkpoint, **values.get("outbox", {})}
    settings = gateway.gateway_settings(given, values, _GATEWAY)
    if qos == 2:
        gateway.check_sharing(settings, publish_qos=2)
    return settings


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
        raise ConfigError("TL-C28", f'{WHERE} option "clients" = "{clients}"', what, do)
    return (place,) if clients == 1 else tuple(_numbered(place, number, clients) for number in range(clients))


def _numbered(place: GatewayPlace, number: int, clients: int) -> GatewayPlace:
    """As Jet's sink names its clients: the id and a number."""
    told = json.loads(place.settings)
    directory = str(Path(place.text) / f"{number}-of-{clients}")
    told |= {"client_id": f"{told['client_id'] or told['name']}-{number}", "name": f"{told['name']}-{number}"}
    told |= {"state_dir": directory, "outbox": {**told["outbox"], "number": number}}
    return replace(place, text=directory, settings=json.dumps(told))
