"""``towline doctor``: checks which promises the broker, Kafka and this machine can keep."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from towline.cli.screen import AsJson, BridgeFile, load_bridge, print_lines, print_result

if TYPE_CHECKING:
    from towline.doctor.inputs import Inputs

#: Printed before any probe.
_NOTICE: Final = """\
doctor asks the broker, Kafka and the disk. It creates only MQTT sessions,
messages and files of its own, named "towline-doctor-...", which no line
receives, and removes them again. Kafka keeps the transactional ids that it
tries (towline.BRIDGE.LINE.towline-doctor) until they expire."""


def doctor(
    file: BridgeFile = Path("bridge.toml"),
    mosquitto_conf: Annotated[
        Path | None, typer.Option(show_default=False, help="The broker's own mosquitto.conf, where it can be read.")
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(min=0.001, max=1e9, show_default=False, help="Messages a second; measured by default."),
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.5, max=600, help="How long the rate is measured.")] = 5.0,
    probe_messages: Annotated[
        int, typer.Option(min=10, max=100_000, help="Messages that are queued to find the broker's limit.")
    ] = 1500,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Also show kept promises.")] = False,
    as_json: AsJson = False,
) -> None:
    """Check which promises of a bridge file the broker, Kafka and this machine can keep.

    Exit codes: 0 all are kept, 1 one is not kept, 3 one is kept up to a near limit or is unknown.

    Example:  towline doctor bridge.toml --mosquitto-conf /etc/mosquitto/mosquitto.conf
    """
    from towline.doctor import examine, mosquitto, table  # noqa: PLC0415 - loaded when it is called
    from towline.doctor.inputs import Inputs  # noqa: PLC0415

    def print_progress(text: str) -> None:
        if not as_json:
            print_lines(text.split("\n"), sys.stderr)

    if mosquitto_conf is not None:
        mosquitto.read_conf(mosquitto_conf)  # report an error in the command at once
    case = Inputs(load_bridge(file), rate, seconds, mosquitto_conf, probe_messages=probe_messages)
    print_progress(_NOTICE)
    findings = examine(case, lambda step: print_progress(f"▸ {step}"))
    loads = {
        name: {"messages_s": round(load.messages_s, 3), "bytes_s": round(load.bytes_s, 1), "how": load.source}
        for name, load in case.loads.items()
    }
    rows = table.report_lines(findings, _loads(case), verbose=verbose)
    print_result({"load": loads, **table.as_json(findings)}, rows, as_json=as_json)
    if code := table.exit_code(findings):
        raise typer.Exit(code)


def _loads(case: Inputs) -> Iterator[str]:
    for line in case.bridge.uplinks:
        load = case.loads.get(line.name)
        if load is None:
            yield f"load of {line.name}: no message came in {case.measure_seconds:g} s; --rate N tells limits as times"
        else:
            yield f"load of {line.name}: {load.messages_s:,.1f} msg/s, {load.bytes_s / 1000:,.1f} kB/s ({load.source})"
