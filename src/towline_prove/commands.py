"""The command line of prove: one thin function a command."""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from towline.errors import ConfigError, TowlineError
from towline_prove.account import RunAccount
from towline_prove.batches import BatchesPlan, BatchesRun, run_batches
from towline_prove.evidence import evidence, revision, write_evidence
from towline_prove.gateway_soak import GatewaySoak, GatewaySoakPlan
from towline_prove.history import read_history
from towline_prove.large import LargePlan, LargeRun, run_large
from towline_prove.load import LoadPlan, run_load
from towline_prove.processes import Role
from towline_prove.reader import read_topic
from towline_prove.referee import judge
from towline_prove.soak import EVERYBODY, ROLES, Soak, SoakPlan

__all__ = ["app", "main"]

app = typer.Typer(
    help="Load, judge and hurt a line, and see what is lost.", no_args_is_help=True, pretty_exceptions_enable=False
)


@app.command()
def load(
    history: Annotated[Path, typer.Argument(help="New file for the claims of the senders.")],
    port: Annotated[int, typer.Option(help="Broker's port.")] = 1883,
    host: Annotated[str, typer.Option(help="Broker's host.")] = "127.0.0.1",
    run: Annotated[str, typer.Option(help="Name put into every payload.")] = "run",
    publishers: Annotated[int, typer.Option(help="MQTT connections.")] = 8,
    devices: Annotated[int, typer.Option(help="Keys, spread over the publishers.")] = 50,
    messages: Annotated[int, typer.Option(help="All messages.")] = 20_000,
    rate: Annotated[float, typer.Option(help="Messages a second in all; 0: as fast as the broker takes them.")] = 0.0,
    qos: Annotated[int, typer.Option(help="0, 1 or 2.")] = 1,
    size: Annotated[int, typer.Option(help="Payload bytes.")] = 150,
    topic: Annotated[str, typer.Option(help="Topic with {device}.")] = "telemetry/{device}/data",
    window: Annotated[int, typer.Option(help="Most unacknowledged messages of a connection.")] = 1000,
    seconds: Annotated[float, typer.Option(help="End after this time.")] = 600.0,
) -> None:
    """Publish numbered messages. Example: python -m towline_prove load claims.bin --port 1883 --messages 20000."""
    plan = LoadPlan(
        host=host,
        port=port,
        run=run,
        publishers=publishers,
        devices=devices,
        messages=messages,
        rate=rate,
        qos=qos,
        size=size,
        topic=topic,
        window=window,
        seconds=seconds,
    )
    result = run_load(plan, history)
    typer.echo(
        f"attempted {result.attempted:,}   acknowledged {result.acked:,}   refused {result.refused:,}   "
        f"sent again {result.resent:,}   {result.attempted / max(result.seconds, 1e-9):,.0f} msg/s"
    )
    finished = result.attempted == plan.messages and (qos == 0 or result.acked + result.refused == plan.messages)
    raise typer.Exit(0 if finished else 1)


@app.command(name="judge")
def judge_command(
    history: Annotated[Path, typer.Argument(help="Claims of a load.")],
    topic: Annotated[str, typer.Argument(help="Kafka topic to read back.")],
    bootstrap: Annotated[str, typer.Option(help="Kafka's bootstrap servers.")] = "127.0.0.1:9092",
    guarantee: Annotated[str, typer.Option(help="at_most_once, at_least_once or exactly_once.")] = "at_least_once",
    reader: Annotated[str, typer.Option(help="confluent or kcat.")] = "confluent",
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Everything, for scripts.")] = False,
) -> None:
    """Compare claims with what a Kafka topic holds. Exit code 1 when the promise was broken."""
    way: Literal["confluent", "kcat"] = "kcat" if reader == "kcat" else "confluent"
    verdict = judge(read_history(history), read_topic(bootstrap, topic, reader=way))
    account = RunAccount(verdict, guarantee)
    typer.echo(json.dumps(account.as_json()) if as_json else account.line())
    if not as_json:
        for line in [*map(str, verdict.stories), *account.problems()]:
            typer.echo(f"  {line}")
    raise typer.Exit(0 if account.ok else 1)


@app.command()
def soak(
    directory: Annotated[Path | None, typer.Option(help="Kept afterwards; a temporary one when not given.")] = None,
    roles: Annotated[str, typer.Option(help="Who is killed, with commas.")] = ",".join(ROLES),
    runs: Annotated[int, typer.Option(help="Runs per role, one kill each.")] = 20,
    messages: Annotated[int, typer.Option(help="Messages per run.")] = 100_000,
    rate: Annotated[float, typer.Option(help="Messages a second.")] = 10_000.0,
    seed: Annotated[int, typer.Option(help="Decides the moments.")] = 1,
    guarantee: Annotated[str, typer.Option(help="Of the line; exactly_once with QoS 2.")] = "at_least_once",
    record: Annotated[Path | None, typer.Option(help="File of JSON lines that each kill's run is added to.")] = None,
    *,
    quick: Annotated[bool, typer.Option("--quick", help="One small run per role.")] = False,
) -> None:
    """Kill -9 each role at random moments under load. Exit code 1 when a promise was broken."""
    plan = SoakPlan.quick() if quick else SoakPlan(runs=runs, messages=messages, rate=rate)
    plan = replace(plan, roles=_roles(roles), seed=seed, guarantee=guarantee)
    with _place(directory) as place:
        revision()
        outcomes = Soak(plan, place, typer.echo).run()
    if record is not None:
        for outcome in outcomes:
            write_evidence(outcome.evidence(plan), record)
    bad = sum(not outcome.ok for outcome in outcomes)
    messages = sum(outcome.account.verdict.attempted for outcome in outcomes)
    lost = sum(outcome.account.verdict.lost for outcome in outcomes)
    doubled = sum(outcome.account.verdict.doubled for outcome in outcomes)
    typer.echo(
        f"{len(outcomes)} runs, {len(outcomes)} kills, {messages:,} messages: lost {lost:,}, doubled {doubled:,}, "
        f"{bad} runs broke the promise"
    )
    raise typer.Exit(1 if bad else 0)


@app.command("gateway-soak")
def gateway_soak(
    directory: Annotated[Path | None, typer.Option(help="Kept afterwards; a temporary one when not given.")] = None,
    messages: Annotated[int, typer.Option(help="All messages.")] = 100_000,
    kills: Annotated[int, typer.Option(help="How often the gateway is killed.")] = 40,
    rate: Annotated[float, typer.Option(help="Messages a second.")] = 2_000.0,
    qos: Annotated[int, typer.Option(help="2, or 1.", min=1, max=2)] = 2,
    seed: Annotated[int, typer.Option(help="Decides the moments.")] = 1,
    record: Annotated[Path | None, typer.Option(help="File of JSON lines that the run is added to.")] = None,
) -> None:
    """Kill -9 the gateway alone, many times, and count its journal. Exit code 1 when the promise was broken."""
    plan = GatewaySoakPlan(messages=messages, kills=kills, rate=rate, qos=qos, seed=seed)
    with _place(directory) as place:
        revision()
        began = time.monotonic()
        verdict = GatewaySoak(plan, place, typer.echo).run()
    ok = verdict.ok(plan.guarantee) and verdict.adds_up()
    if record is not None:
        details = {**asdict(plan), **verdict.counts()}
        write_evidence(evidence("gateway-soak", ok=ok, seconds=time.monotonic() - began, details=details), record)
    typer.echo("\n".join([f"{kills} kills   {verdict.line()}", *map(str, verdict.stories)]))
    raise typer.Exit(0 if ok else 1)


@app.command()
def large(
    directory: Annotated[Path | None, typer.Option(help="Kept afterwards; a temporary one when not given.")] = None,
    messages: Annotated[int, typer.Option(help="All messages.")] = 10_000,
    size: Annotated[int, typer.Option(help="Payload bytes of each.")] = 300_000,
    guarantee: Annotated[str, typer.Option(help="Of the line; exactly_once with QoS 2.")] = "at_least_once",
    away: Annotated[float, typer.Option(help="Seconds that Kafka is away; 0 for not at all.")] = 60.0,
    how: Annotated[str, typer.Option(help="kafka hangs, kafka killed or kafka stopped.")] = "kafka hangs",
    seconds: Annotated[float, typer.Option(help="Longest time to wait for everything.")] = 900.0,
    record: Annotated[Path | None, typer.Option(help="File of JSON lines that the run is added to.")] = None,
) -> None:
    """Send large messages while Kafka is away. Exit code 1 when a promise was broken or the gateway grew too large."""
    plan = LargePlan(messages=messages, size=size, guarantee=guarantee, away=away, how=how, seconds=seconds)
    with _place(directory) as place:
        revision()
        run = run_large(plan, place, typer.echo)
    typer.echo(run.account.line())
    raise _told("large", run, record)


@app.command()
def batches(
    directory: Annotated[Path | None, typer.Option(help="Kept afterwards; a temporary one when not given.")] = None,
    batches: Annotated[int, typer.Option(help="Micro-batches, at least.")] = 20_000,
    rate: Annotated[float, typer.Option(help="Messages a second.")] = 40.0,
    guarantee: Annotated[str, typer.Option(help="Of the line.")] = "exactly_once",
    seconds: Annotated[float, typer.Option(help="The run ends after this time, finished or not.")] = 7_200.0,
    record: Annotated[Path | None, typer.Option(help="File of JSON lines that the run is added to.")] = None,
) -> None:
    """Make very many small batches. Exit code 1 when a promise was broken or something has grown."""
    plan = BatchesPlan(batches=batches, rate=rate, guarantee=guarantee, seconds=seconds)
    with _place(directory) as place:
        revision()
        run = run_batches(plan, place, typer.echo)
    raise _told("batches", run, record)


def _told(program: str, run: LargeRun | BatchesRun, record: Path | None) -> typer.Exit:
    """Record a run that has ended, where that was asked for, and say what it counted; the end with its exit code."""
    if record is not None:
        write_evidence(evidence(program, ok=run.ok, seconds=run.seconds, details=run.as_json()), record)
    typer.echo(json.dumps(run.as_json()))
    return typer.Exit(0 if run.ok else 1)


@contextlib.contextmanager
def _place(directory: Path | None) -> Iterator[Path]:
    """The directory of a run; a temporary one where none is given."""
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
        yield directory
        return
    with tempfile.TemporaryDirectory(prefix="towline-prove-") as temporary:
        yield Path(temporary)


def _roles(text: str) -> tuple[Role, ...]:
    try:
        return tuple(Role(word.strip()) for word in text.split(","))
    except ValueError as error:
        raise ConfigError("TL-C83", "--roles", str(error), f"Choose from {', '.join(EVERYBODY)}.") from error


def main() -> None:
    """Run the commands; a mistake is one line on stderr and exit code 2."""
    try:
        app()
    except TowlineError as error:
        typer.echo(str(error), err=True)
        sys.exit(2)
