"""``towline message``: tells the story of one message."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from towline.cli.screen import AsJson, BridgeFile, load_bridge, print_result
from towline.errors import ConfigError
from towline.timing import local_time


def message(
    file: BridgeFile = Path("bridge.toml"),
    line: Annotated[str | None, typer.Option(help="Its uplink, if there are several.")] = None,
    offset: Annotated[int | None, typer.Option(min=0, help="Its offset in the journal of the gateway.")] = None,
    gateway: Annotated[str, typer.Option(help="With --offset, if the line has several.")] = "",
    kafka: Annotated[str, typer.Option(metavar="TOPIC/PARTITION/OFFSET", help="Its record in Kafka.")] = "",
    device: Annotated[str, typer.Option(help="List its newest messages: record key, or topic level.")] = "",
    receipt: Annotated[str, typer.Option(metavar="PUBLISHER/NUMBER", help="With receipts.")] = "",
    as_json: AsJson = False,
) -> None:
    """Tell where one message of an uplink is: journal, batch, record in Kafka; and what is unknown.

    Example:  towline message bridge.toml --line telemetry --offset 4711
    """
    from towline.monitor.message import Tracer  # noqa: PLC0415

    tracer = Tracer(load_bridge(file), line)
    is_one = [offset is not None, bool(kafka), bool(device), bool(receipt)].count(True) == 1
    if is_one and offset is not None:
        story = tracer.by_offset(offset, gateway)
    elif is_one and device:
        story = tracer.by_device(device)
    elif is_one and (match := re.fullmatch(r"([^/]+)/([0-9]{1,9})/([0-9]{1,18})", kafka)):
        story = tracer.by_record(match[1], int(match[2]), int(match[3]))
    elif is_one and (match := re.fullmatch("([^/]+)/([0-9]{1,18})", receipt)):
        story = tracer.by_receipt(match[1], int(match[2]))
    else:
        remedy = "Give one of --offset, --kafka, --device and --receipt, in the form that --help shows."
        raise ConfigError("TL-C21", "towline message", "which message is not said", remedy)
    print_result(vars(story), _lines(vars(story)), as_json=as_json)


def _lines(story: dict[str, Any]) -> Iterator[str]:
    place = "" if story["offset"] is None else f", gateway {story['gateway']}, offset {story['offset']:,}"
    yield f"line {story['line']}{place}: {story['state'].replace('_', ' ')}"
    for step in story["steps"]:
        yield f"  {step['name']:<13}{local_time(step['at']) if step['at'] else '':<21}{step['text']}"
    for entry in story["candidates"] if story["state"] == "listed" else ():
        yield f"  {entry['kafka'] or 'journal':<13}  {local_time(entry['at'])}  {entry['text']}"
