"""Command line of the proof harness: one thin function a command."""

from __future__ import annotations

import inspect
import re
import signal
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from towline.errors import TowlineError
from towline_prove.evidence import RunDisplay, append_record, revision
from towline_prove.load import LoadPlan, publish_with_receipts, run_load
from towline_prove.rig import OUTAGES
from towline_prove.scenario import KILLABLE_ROLES, RECEIPT_FAULTS, Scenario, prove

F = TypeVar("F", bound=Callable[..., None])

app = typer.Typer(
    help="Load a line, inject faults, and count what is lost.", no_args_is_help=True, pretty_exceptions_enable=False
)


def _options(options_class: type, *excluded_fields: str) -> Callable[[F], F]:
    """Give a command with ``**fields`` an option for each field of a dataclass; its docstring is the help."""
    field_help = dict(re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", inspect.getdoc(options_class) or "", re.MULTILINE))
    hints = get_type_hints(options_class)
    parameters = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=Annotated[hints[field.name], typer.Option(help=" ".join(field_help[field.name].split()))],
        )
        for field in fields(options_class)
        if field.name not in excluded_fields
    ]

    def add_options(command: F) -> F:
        signature = inspect.signature(command, eval_str=True)
        own = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        command.__signature__ = signature.replace(parameters=[*own, *parameters])  # type: ignore[attr-defined] # typer reads it
        return command

    return add_options


@app.command()
@_options(LoadPlan)
def load(
    history: Annotated[Path, typer.Argument(help="New file for the claims of the senders.")],
    outbox: Annotated[
        Path | None, typer.Option(help="Publish with receipts, by a Publisher that keeps its messages here.")
    ] = None,
    key_file: Annotated[Path | None, typer.Option(help="The line's key for receipts.")] = None,
    **plan: Any,
) -> None:
    """Publish numbered messages. Example: python -m towline_prove load claims.bin --port 1883 --messages 20000."""
    if outbox is not None and key_file is not None:
        raise typer.Exit(publish_with_receipts(LoadPlan(**plan), history, outbox, key_file))
    result = run_load(LoadPlan(**plan), history)
    typer.echo(
        f"attempted {result.attempted:,}   acknowledged {result.acked:,}   refused {result.refused:,}   "
        f"sent again {result.resent:,}   {result.attempted / max(result.seconds, 1e-9):,.0f} msg/s"
    )
    all_sent = result.attempted == plan["messages"]
    all_answered = plan["qos"] == 0 or result.acked + result.refused == plan["messages"]
    raise typer.Exit(0 if all_sent and all_answered else 1)


@app.command()
@_options(Scenario, "targets", "faults")
def soak(
    directory: Annotated[Path | None, typer.Option(help="Kept afterwards; one that is removed when not given.")] = None,
    roles: Annotated[str, typer.Option(help=f"Roles to kill, with commas: {', '.join(KILLABLE_ROLES)}; or none.")] = (
        "gateway,jvm,driver,bridge"
    ),
    outages: Annotated[str, typer.Option(help=f"Outages, with commas: {', '.join(OUTAGES)}.")] = "",
    record: Annotated[Path | None, typer.Option(help="File of JSON lines that each run is added to.")] = None,
    **options: Any,
) -> None:
    """Inject faults into a line under load and count what arrives. Exit code 1 after a broken promise or growth."""
    names = [word.strip() for text in (roles.replace("none", ""), outages) for word in text.split(",")]
    if options["receipts"]:
        scenario = Scenario(**{**options, "own_limits": True, "runs": 1}, faults=RECEIPT_FAULTS)
    else:
        scenario = Scenario(**options, targets=tuple(filter(None, names)))
    revision()
    finished_runs = []
    for run in prove(scenario, directory, RunDisplay()):
        finished_runs.append(run)
        typer.echo(run.summary_text())
        if record is not None:
            append_record(run.record(), record)
    verdicts = [run.account.verdict for run in finished_runs if run.account]
    lost_count, doubled_count = (sum(getattr(verdict, name) for verdict in verdicts) for name in ("lost", "doubled"))
    failed_runs = sum(not run.ok for run in finished_runs)
    typer.echo(
        f"{len(finished_runs)} runs, {sum(len(run.faults) for run in finished_runs)} kills and outages, "
        f"{sum(verdict.attempted for verdict in verdicts):,} messages: lost {lost_count:,}, doubled {doubled_count:,}, "
        f"{failed_runs} runs broke the promise"
    )
    raise typer.Exit(1 if failed_runs else 0)


def main() -> None:
    """Run the commands; an error is one line on stderr and exit code 2."""
    # Ended by a signal, everything that was started still ends with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        app()
    except TowlineError as error:
        typer.echo(str(error), err=True)
        sys.exit(2)
