"""``towline size``: calculates gateways, disks, Spark cores and partitions for a load."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Final

import typer

from towline.cli.screen import AsJson, print_result
from towline.errors import ConfigError
from towline.guarantee import Guarantee
from towline.sizing import Load, Requirement, large_payload_warning, requirements

_RATE: Final = typer.Option(min=0.001, max=1e9, show_default=False, help="Messages a second, in the busiest minutes.")
#: Default a second; None shows that ``--every`` was not given.
_INTERVAL_OPTION: Final = typer.Option(
    min=0.001, max=31_536_000, show_default="1.0", help="... each with a message in so many seconds."
)
#: Most bytes of an MQTT packet [MQTT-1.5.5].
_MAX_PACKET_BYTES: Final = 268_435_455


def size(
    rate: Annotated[float | None, _RATE] = None,
    devices: Annotated[
        int | None, typer.Option(min=1, max=10**9, show_default=False, help="Devices, in place of a rate ...")
    ] = None,
    every: Annotated[float | None, _INTERVAL_OPTION] = None,
    payload: Annotated[int, typer.Option("--bytes", min=0, max=_MAX_PACKET_BYTES, help="Bytes of a payload.")] = 150,
    topic: Annotated[int, typer.Option("--topic-bytes", min=1, max=65_535, help="Bytes of a topic.")] = 40,
    properties: Annotated[
        int, typer.Option("--property-bytes", min=0, max=_MAX_PACKET_BYTES, help="Bytes of user properties.")
    ] = 0,
    outage: Annotated[float, typer.Option(min=0, max=525_600, help="Minutes Kafka or Spark may be down.")] = 60.0,
    guarantee: Annotated[Guarantee, typer.Option(help="The promise.")] = Guarantee.AT_LEAST_ONCE,
    sql: Annotated[bool, typer.Option("--sql", help="A where, fields, a dedupe key, or several writers.")] = False,
    as_json: AsJson = False,
) -> None:
    """Calculate the resources for a load, from figures measured on two cores (docs/scaling.md#sizing). No network.

    Example:  towline size --rate 20000 --bytes 200 --outage 120 --guarantee exactly_once
    """
    load = Load(
        rate=_message_rate(rate, devices, every),
        payload_bytes=payload,
        topic_bytes=topic,
        property_bytes=properties,
        outage_min=outage,
        guarantee=guarantee,
        sql=sql,
    )
    needs = requirements(load)
    lines = filter(None, [*map(_line, needs), large_payload_warning(load)])
    print_result([asdict(need) for need in needs], lines, as_json=as_json)


def _message_rate(rate: float | None, devices: int | None, interval_s: float | None) -> float:
    """Return messages per second from --rate or --devices; raises TL-C01 unless exactly one is given."""
    if (rate is None) == (devices is None):
        problem = "it takes --rate or --devices, one of them"
    elif devices is not None:
        return devices / (1.0 if interval_s is None else interval_s)
    elif rate is not None and interval_s is None:
        return rate
    else:
        problem = "--every belongs to --devices"
    raise ConfigError("TL-C01", "towline size", problem, "See towline size --help.")


def _line(need: Requirement) -> str:
    amount = f"{need.amount:,.{1 if need.unit else 0}f} {need.unit}".rstrip()
    return f"{need.resource:<20}{amount:>12}   {need.basis}"
