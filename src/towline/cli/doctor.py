"""``towline doctor``: which promises the broker, Kafka and this machine can keep."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from towline.cli.screen import AsJson, BridgeFile, command_app, json_text, plain

if TYPE_CHECKING:
    from rich.table import Table

    from towline.doctor.case import Case
    from towline.doctor.findings import Finding

__all__ = ["app", "doctor"]

app = command_app()

#: Said before anything is touched.
_MANNERS: Final = (
    "doctor connects to the broker and to Kafka and measures the disk. It makes nothing but MQTT sessions, topics, "
    'records and files of its own, named "towline-doctor-...", and removes them again.'
)


@app.command(epilog="Example:  towline doctor bridge.toml --mosquitto-conf /etc/mosquitto/mosquitto.conf")
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
    as_json: AsJson = False,
) -> None:
    """Measure what the broker, Kafka and this machine can keep of what a bridge file promises.

    Exit codes: 0 all holds, 1 a promise does not hold, 3 one holds up to a near limit or is not known.
    """
    from towline.bridge.config.file import load  # noqa: PLC0415 - loaded when it is called
    from towline.doctor.case import Case  # noqa: PLC0415
    from towline.doctor.findings import as_json as json_of  # noqa: PLC0415
    from towline.doctor.findings import exit_code  # noqa: PLC0415

    case = Case(load(file), rate=rate, seconds=seconds, mosquitto_conf=mosquitto_conf)
    found = _examined(case, quiet=as_json)
    if as_json:
        sys.stdout.write(json_text(json_of(found), indent=2))
    else:
        _show(found)
    if code := exit_code(found):
        raise typer.Exit(code)


def _examined(case: Case, *, quiet: bool) -> list[Finding]:
    """What all examiners find; on standard error who is looking, for somebody who waits."""
    from towline.doctor.examination import EXAMINERS, examine  # noqa: PLC0415 - loaded when it is called

    found: list[Finding] = []
    if not quiet:
        sys.stderr.write(plain(f"{_MANNERS}\nexamining: {', '.join(EXAMINERS)}\n"))
    for name, rows in examine(case):
        found += rows
        if not quiet:
            sys.stderr.write(plain(f"▸ {name}: {len(rows)} answers\n"))
    return found


def _show(found: list[Finding]) -> None:
    from rich.console import Console  # noqa: PLC0415 - loaded when there is something to show

    from towline.doctor.findings import summary  # noqa: PLC0415

    console = Console(highlight=False)
    console.print(_table(found))
    console.print(summary(found), markup=False)


def _table(found: list[Finding]) -> Table:
    from rich.table import Table  # noqa: PLC0415 - see _show
    from rich.text import Text  # noqa: PLC0415

    from towline.doctor.findings import HEADS, rows  # noqa: PLC0415

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for head in HEADS:
        table.add_column(head, overflow="fold")
    for cells in rows(found):
        table.add_row(*(Text(plain(cell)) for cell in cells))
    return table
