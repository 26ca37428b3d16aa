"""``towline doctor``: which promises the broker, Kafka and this machine can keep."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from towline.cli.screen import AsJson, BridgeFile, command_app, json_text, plain

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.table import Table
    from rich.text import Text

    from towline.doctor.case import Case
    from towline.doctor.findings import Finding

__all__ = ["app", "doctor"]

app = command_app()

#: Said before anything is touched.
_MANNERS: Final = (
    "doctor connects to the broker and to Kafka and measures the disk. It makes nothing but MQTT sessions, topics, "
    'records and files of its own, named "towline-doctor-...", and removes them again. Kafka keeps the names of the '
    "transactional ids that it tries (towline.BRIDGE.LINE.towline-doctor) until they expire; nobody else has them."
)
#: Columns from which on there is room for a table.
_WIDE: Final = 110


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
    probe_messages: Annotated[
        int, typer.Option(min=10, max=100_000, help="Messages that are queued to find the broker's limit.")
    ] = 1500,
    as_json: AsJson = False,
) -> None:
    """Measure what the broker, Kafka and this machine can keep of what a bridge file promises.

    Exit codes: 0 all holds, 1 a promise does not hold, 3 one holds up to a near limit or is not known.
    """
    from towline.bridge.config.file import load  # noqa: PLC0415 - loaded when it is called
    from towline.doctor.case import Case  # noqa: PLC0415
    from towline.doctor.findings import as_json as json_of  # noqa: PLC0415
    from towline.doctor.findings import exit_code  # noqa: PLC0415
    from towline.mosquitto_conf import read  # noqa: PLC0415

    if mosquitto_conf is not None:
        read(mosquitto_conf)  # a mistake in the command is told at once
    bridge = load(file)
    case = Case(bridge, rate=rate, seconds=seconds, mosquitto_conf=mosquitto_conf, probe_messages=probe_messages)
    case, found = _examined(case, quiet=as_json)
    if as_json:
        sys.stdout.write(json_text({"load": _loads(case), **json_of(found)}, indent=2))
    else:
        _show(case, found)
    if code := exit_code(found):
        raise typer.Exit(code)


def _examined(case: Case, *, quiet: bool) -> tuple[Case, list[Finding]]:
    """The case with its load, and what all examiners find; on standard error who is looking, for one who waits."""
    from towline.doctor.broker.load import measured  # noqa: PLC0415 - loaded when it is called
    from towline.doctor.examination import EXAMINERS, examine  # noqa: PLC0415

    def say(text: str) -> None:
        if not quiet:
            sys.stderr.write(plain(text))
            sys.stderr.flush()

    say(f"{_MANNERS}\n")
    if case.rate is None:
        say(f"▸ load: listening for {case.seconds:g} s\n")
    case = measured(case)
    say(f"▸ examining: {', '.join(EXAMINERS)}\n")
    found: list[Finding] = []
    for name, rows in examine(case, EXAMINERS):
        found += rows
        say(f"▸ {name}: {len(rows)} answers\n")
    return case, found


def _loads(case: Case) -> dict[str, dict[str, float | str]]:
    """The load of each line, as JSON values."""
    return {
        name: {"messages_s": round(load.messages_s, 3), "bytes_s": round(load.bytes_s, 1), "how": load.how}
        for name, load in case.loads
    }


def _load_lines(case: Case) -> Iterator[str]:
    for line in case.bridge.uplinks:
        load = case.load_of(line.name)
        if load is None:
            yield f"load of {line.name}: no message came in {case.seconds:g} s; --rate N tells limits as times"
        else:
            yield f"load of {line.name}: {load.messages_s:,.1f} msg/s, {load.bytes_s / 1000:,.1f} kB/s ({load.how})"


def _show(case: Case, found: list[Finding]) -> None:
    from rich.console import Console  # noqa: PLC0415 - loaded when there is something to show

    from towline.doctor.findings import summary  # noqa: PLC0415

    console = Console(highlight=False, no_color=True)
    if console.width >= _WIDE:
        console.print(_table(found))
    else:
        for block in _blocks(found, console.width):
            sys.stdout.write(f"{block}\n\n")
    for line in _load_lines(case):
        console.print(plain(line), markup=False)
    console.print(plain(summary(found)), markup=False)


def _table(found: list[Finding]) -> Table:
    from rich.table import Table  # noqa: PLC0415 - see _show

    from towline.doctor.findings import HEADS, rows  # noqa: PLC0415

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for head in HEADS:
        table.add_column(head, overflow="fold")
    for cells in rows(found):
        table.add_row(*map(_text, cells))
    return table


def _text(cell: str) -> Text:
    from rich.text import Text  # noqa: PLC0415 - see _show

    return Text(plain(cell))


def _blocks(found: list[Finding], width: int) -> Iterator[str]:
    """The rows one below the other, for a terminal that is too narrow for columns."""
    import textwrap  # noqa: PLC0415 - see _show

    from towline.doctor.findings import HEADS, rows  # noqa: PLC0415

    indent = max(map(len, HEADS[1:])) + 4
    for promise, *cells in rows(found):
        lines = textwrap.wrap(plain(promise), max(20, width - 1))
        for head, cell in zip(HEADS[1:], cells, strict=True):
            if cell:
                first = f"  {head:<{indent - 2}}"
                lines += textwrap.wrap(
                    plain(cell), max(indent + 20, width - 1), initial_indent=first, subsequent_indent=" " * indent
                )
        yield "\n".join(lines)
