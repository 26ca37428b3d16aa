"""The options of ``format("mqtt")`` as a source: those of its gateway, and how Spark reads from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from towline.errors import ConfigError
from towline.gateway.settings import GatewaySettings
from towline.guarantee import Guarantee, policy, qos_problem
from towline.options import Format, Given, Option, options_of
from towline.spark import gateway_options as gateway
from towline.spark.gateway_options import WHERE
from towline.spark.readplan import ReadPlan

#: Rows of one micro-batch unless told otherwise: about 40 MB of small messages, 0.3 to 0.7 s of Spark's time.
DEFAULT_MAX_ROWS = 200_000

#: Bytes of one micro-batch unless told otherwise: what a crash repeats, and what the sink keeps until it is written.
DEFAULT_MAX_BYTES = 256 << 20


_GATEWAY: Final = (*gateway.CONNECTION, *gateway.RECEIVING)
_READING: Final = tuple(options_of(ReadPlan, leave_out={"place", "serves_again", "refused"}))
_GUARANTEE: Final = Option("guarantee", (), Guarantee, str.lower)
_UNTRUE_PROGRESS: Final = (
    "asynchronous progress tracking makes Spark report batches as done that are not, and messages would be lost"
)
_FORMAT: Final = Format(
    WHERE,
    (*_GATEWAY, *gateway.PLACE, _GUARANTEE, *_READING),
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


def parse_options(texts: Mapping[str, str]) -> ReadPlan:
    """Validate the options of a source, and put them into plain values.

    Args:
        texts: Option names in any case, values as text.

    Raises:
        ConfigError: TL-C01 unknown option, TL-C12 a promise that the other options can't keep, TL-C20 a missing
            option, TL-C21 a value that can't be, TL-C22 an option that is refused, TL-C23 two that contradict
            each other.
    """
    given = _FORMAT.read(texts)
    if not texts:  # of a table: Spark keeps its options, and gives a Python source those of the reader (4.3)
        raise gateway.missing("stateDir", "Of a table too: spark.readStream.options(...).table(NAME).")
    guarantee = given.value("guarantee", Guarantee.AT_LEAST_ONCE)
    place = gateway.gateway_place(given, _GATEWAY)
    if "gateway" not in given and "gateways" not in given:
        told = _settings(given, guarantee).model_copy(update={"checkpoint": given.text("checkpointLocation")})
        place = replace(place, settings=told.model_dump_json())
    limits = {"max_rows": DEFAULT_MAX_ROWS, "max_bytes": DEFAULT_MAX_BYTES}
    plan = ReadPlan(place, serves_again=policy(guarantee).serves_again, **{**limits, **given.values(_READING)})
    if plan.event_time and not plan.checkpoint:
        raise ConfigError(
            "TL-C23",
            f'{WHERE} option "eventTime"',
            "it follows the query's watermark, and without checkpointLocation nobody knows it",
            "Give checkpointLocation, the same as the writer's, on a file system of this machine.",
        )
    _check_offsets(given, plan)
    return plan


def _check_offsets(given: Given, plan: ReadPlan) -> None:
    """An offset is one of a journal: of several gateways each has its own."""
    values = {
        "startingOffset": plan.starting,
        "endingOffset": plan.ending,
    }
    for name, value in values.items():
        if plan.gateways and isinstance(value, int) and name in given:
            what, do = "an offset is one of a single journal", 'Give one for each gateway by its name: {"g1": 4711}.'
            raise ConfigError("TL-C23", f'{WHERE} option "{name}"', what, do)
        if not plan.gateways and isinstance(value, Mapping):
            what = "it names gateways, and the source has only one"
            raise ConfigError(
                "TL-C23", f'{WHERE} option "{name}"', what, "Give it without a name, or the option gateways."
            )
    if plan.removed and not plan.gateways:
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
    """Refuse what is valid by itself, and less than the guarantee needs without the key or promise of a route."""
    guarantee = settings.guarantee
    for one in settings.subscriptions:
        if problem := qos_problem(guarantee, one.qos):
            what = f'{problem[0]}, "{one.pattern}" is subscribed with QoS {one.qos}'
            weaker = "at_least_once and drop repeats by a key of your own" if one.qos else "at_most_once"
            raise ConfigError("TL-C12", f'{WHERE} option "subscribe"', what, f"Raise it, or take {weaker}.")
    if guarantee is Guarantee.EXACTLY_ONCE:
        gateway.check_sharing(settings)
