"""`towline devstack`: a real Mosquitto, a real Kafka and a real Spark cluster on this machine, to try things on."""

from __future__ import annotations

import json
import shlex
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from towline.cli.screen import AsJson, command_app
from towline.errors import SetupError
from towline_prove.devstack import Server, Stack
from towline_prove.devstack.secured import CONNECTION_STRING, USER, SecuredKafka, SecuredMosquitto, gateway_files
from towline_prove.devstack.stack import StackForm

app = command_app(
    name="devstack",
    help="A real Mosquitto, a real Kafka and a real Spark cluster on this machine, to try things on.",
    epilog="Example:   towline devstack up   ·   towline devstack kill kafka   ·   towline devstack down",
    no_args_is_help=True,
)

Directory = Annotated[
    Path | None,
    typer.Option("--dir", help="Where they keep data, logs and ports.", show_default="~/.local/state/towline/devstack"),
]
_SERVERS = "mosquitto or kafka; of three kafka-1 to kafka-3; spark-master, spark-worker-1 ..."
Name = Annotated[str, typer.Argument(help=_SERVERS, metavar="SERVER")]


@app.command(
    epilog="Example:   towline devstack up --kafka-brokers 3   ·   towline devstack up --secure --dir /tmp/stack"
)
def up(
    directory: Directory = None,
    *,
    kafka_brokers: Annotated[
        int | None, typer.Option(min=1, max=3, help="1, or 3: everything thrice, min.insync.replicas 2.")
    ] = None,
    secure: Annotated[
        bool | None, typer.Option("--secure", help="TLS, SASL and passwords; a client certificate for MQTT.")
    ] = None,
    spark: Annotated[
        bool | None, typer.Option("--spark", help="A Spark master and workers, whose files nobody else sees.")
    ] = None,
    spark_workers: Annotated[int | None, typer.Option(min=1, max=9, help="With --spark.", show_default="2")] = None,
    spark_bare: Annotated[
        bool | None, typer.Option("--spark-bare", help="Workers with a Python that has nothing of Towline's.")
    ] = None,
) -> None:
    """Start the servers, wait until they answer, and leave them running."""
    workers = (spark_workers or 2) if spark or spark_workers or spark_bare else None
    stack = Stack(directory, form=_requested_form(kafka_brokers, secure=secure, workers=workers, bare=spark_bare))
    began_at = time.monotonic()
    status_text = "starting Mosquitto and Kafka" + ", and Spark" * bool(stack.spark)
    with warnings.catch_warnings(record=True) as caught_warnings, Console(stderr=True).status(status_text):
        warnings.simplefilter("always")
        stack.start()
    for warning in caught_warnings:
        typer.echo(f"warning: {warning.message}", err=True)
    typer.echo(f"mosquitto  {stack.mosquitto.uri}   version {stack.mosquitto.version}")
    typer.echo(f"kafka      {stack.kafka.bootstrap}   version {stack.kafka.version}")
    for text in [*_login_lines(stack), *_submit_lines(stack)]:
        typer.echo(text)
    typer.echo(f"ready after {time.monotonic() - began_at:.1f} s; data and logs in {stack.directory}")
    typer.echo("End them with: towline devstack down" + (f" --dir {directory}" if directory else ""))


@app.command(epilog="Example:   towline devstack down")
def down(directory: Directory = None) -> None:
    """Stop all servers gently; data and ports stay for the next start."""
    stack = Stack(directory)
    names = [server.label for server in stack.servers if server.running]
    stack.stop()
    typer.echo(f"stopped {' and '.join(names)}; data stays in {stack.directory}" if names else "nothing was running")


@app.command(epilog="Example:   towline devstack status --json")
def status(directory: Directory = None, *, as_json: AsJson = False) -> None:
    """Show all servers; the exit code is 0 when all run, else 1."""
    servers = [server.status() for server in Stack(directory).servers]
    if as_json:
        typer.echo(json.dumps(servers))
    else:
        table = Table("server", "state", "address", "pid", "directory", box=None, pad_edge=False)
        for server in servers:
            table.add_row(*(Text(str(cell or "-"), overflow="fold") for cell in server.values()))  # str: markup
        Console().print(table)
    if any(server["state"] != "running" for server in servers):
        raise typer.Exit(1)


@app.command(epilog='Example:   eval "$(towline devstack env)"')
def env(directory: Directory = None) -> None:
    """Print where everything is, as variables for a shell; a bridge file may name them, as ${STACK_KAFKA}."""
    for name, value in Stack(directory).variables().items():
        typer.echo(f"export {name}={shlex.quote(value)}")


@app.command(epilog="Example:   towline devstack topics readings alarms --partitions 3")
def topics(
    names: Annotated[list[str], typer.Argument(help="Topics of the Kafka", metavar="TOPIC...")],
    partitions: Annotated[int, typer.Option(min=1, help="Of each new topic.")] = 1,
    directory: Directory = None,
) -> None:
    """Create topics in the running Kafka; existing ones stay as they are."""
    from towline.kafka.admin import KafkaAdmin  # noqa: PLC0415 - loads librdkafka

    kafka = Stack(directory).kafka
    if not kafka.running:
        raise SetupError("TL-S17", f"kafka in {kafka.directory}", "does not run", "Start it: towline devstack up.")
    client = {name: value for name, value in kafka.client.items() if name != "sasl.password"}
    if isinstance(kafka, SecuredKafka):
        client["sasl.password.file"] = str(kafka.password_file)
    created = KafkaAdmin(client).create(dict.fromkeys(names, partitions))
    existing = sorted(set(names) - set(created))
    if created:
        typer.echo(f"kafka: created {', '.join(created)} with {partitions} partition{'s' * (partitions > 1)} each")
    if existing:
        typer.echo(f"kafka: {', '.join(existing)} existed already")


@app.command(epilog="Example:   towline devstack kill kafka")
def kill(name: Name, directory: Directory = None) -> None:
    """SIGKILL one server, as a crash would; data and port stay."""
    _run_action(name, directory, Server.kill, "killed; start it again with: towline devstack restart")


@app.command(epilog="Example:   towline devstack pause mosquitto")
def pause(name: Name, directory: Directory = None) -> None:
    """SIGSTOP one server: it answers no client, and its connections stay open."""
    _run_action(name, directory, Server.pause, "paused; go on with: towline devstack resume")


@app.command(epilog="Example:   towline devstack resume mosquitto")
def resume(name: Name, directory: Directory = None) -> None:
    """SIGCONT one server after a pause."""
    _run_action(name, directory, Server.resume, "runs")


@app.command(epilog="Example:   towline devstack restart kafka")
def restart(name: Name, directory: Directory = None) -> None:
    """Stop one server gently where it runs, start it, and wait until it answers."""
    _run_action(name, directory, Server.restart, "runs")


def _requested_form(
    brokers: int | None, *, secure: bool | None, workers: int | None = None, bare: bool | None = None
) -> StackForm | None:
    """Return the requested form of the stack; None for the existing one."""
    if brokers is None and secure is None and workers is None:
        return None
    if secure and (brokers or 1) > 1:
        raise SetupError("TL-S23", "--secure", "is for one broker of Kafka", "Leave out --kafka-brokers, or --secure.")
    return StackForm(brokers or 1, bool(secure), workers or 0, bool(bare))


def _login_lines(stack: Stack) -> list[str]:
    """Return the tables of a bridge file for brokers with credentials, without a secret."""
    mosquitto, kafka = stack.mosquitto, stack.kafka
    if not isinstance(kafka, SecuredKafka) or not isinstance(mosquitto, SecuredMosquitto):
        return []
    certs = mosquitto.certificates
    tls = f'{{ ca_file = "{certs.authority}", cert_file = "{certs.client}", key_file = "{certs.client_key}" }}'
    settings = ", ".join(f'"{name}" = "{value}"' for name, value in kafka.settings_of().items())
    return [
        "for a bridge file:",
        "  [mqtt]",
        f'  brokers = ["{mosquitto.uri}"]',
        f'  username = "{USER}"',
        f'  password_file = "{mosquitto.password_file}"',
        f"  tls = {tls}",
        "  [kafka]",
        f'  bootstrap_servers = "{kafka.bootstrap}"',
        f"  settings = {{ {settings} }}",
        f'  password_file = "{kafka.password_file}"',
        f"or as Azure Event Hubs: sasl.mechanism PLAIN, user {CONNECTION_STRING}, {kafka.connection_string_file}",
    ]


def _submit_lines(stack: Stack) -> list[str]:
    """Return Spark's address and the settings that a bridge and an application need, without a secret."""
    spark = stack.spark
    if spark is None:
        return []
    tls_files = gateway_files(stack.directory / "gateway")
    workers = ", ".join(f"{worker.label} at {worker.host}" for worker in spark.workers)
    return [
        f"spark      {spark.master.address}   version {spark.master.version}   {workers}",
        "for a bridge file:",
        "  [spark]",
        f'  master = "{spark.master.address}"',
        f'  secret_file = "{spark.secret_file}"',
        "  [gateway]",
        f'  listen = "{tls_files.addresses[0]}"',
        *(f'  {name} = "{getattr(tls_files, name)}"' for name in ("cert_file", "key_file", "ca_file", "token_file")),
        f"for an application: spark-submit --properties-file {spark.properties_file}",
    ]


def _run_action(name: str, directory: Path | None, action: Callable[[Server], object], outcome: str) -> None:
    server = Stack(directory).server(name)
    began_at = time.monotonic()
    action(server)
    name_suffix = f" {name}" if outcome.endswith(("restart", "resume")) else ""
    typer.echo(f"{name} {outcome}{name_suffix}   ({time.monotonic() - began_at:.1f} s)")
