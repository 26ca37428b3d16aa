"""``towline pub``: publish test messages and see each of them acknowledged."""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from towline import files
from towline.text import counted

if TYPE_CHECKING:
    from mqtt5 import PublishPacket

__all__ = ["pub"]


def pub(
    broker: Annotated[str, typer.Argument(help="mqtt://HOST:PORT, mqtts://, ws://, wss:// or unix:///PATH")],
    topic: Annotated[str, typer.Argument(help="Topic; {n} is the number of the message.")],
    message: Annotated[str, typer.Argument(help="Payload; {n} is the number of the message.")] = "{n}",
    *,
    count: Annotated[int, typer.Option("--count", "-n", min=1, max=10_000_000, help="How many messages.")] = 1,
    rate: Annotated[float, typer.Option(min=0, help="Messages a second; 0 for as fast as the broker takes them.")] = 0,
    qos: Annotated[int, typer.Option(min=0, max=2, help="0, 1 or 2.")] = 1,
    retain: Annotated[bool, typer.Option("--retain", help="Set the RETAIN flag.")] = False,
    user_property: Annotated[list[str] | None, typer.Option("--property", help="KEY=VALUE; may be repeated.")] = None,
    username: Annotated[str | None, typer.Option(help="MQTT user name.")] = None,
    password_file: Annotated[Path | None, typer.Option(help="File that holds the password.")] = None,
    ca_file: Annotated[Path | None, typer.Option(help="Certificates to trust, PEM.")] = None,
    durable: Annotated[
        Path | None, typer.Option(metavar="STATE_DIR", help="Store each message here first; deliver it from there.")
    ] = None,
    receipts: Annotated[
        bool, typer.Option("--receipts", help="With --durable: wait until each message is in Kafka.")
    ] = False,
    receipt_key_file: Annotated[
        Path | None, typer.Option(help="With --receipts: the key that the gateway has, too.")
    ] = None,
    receipt_trust_all_clients: Annotated[
        bool, typer.Option("--receipt-trust-all-clients", help="With --receipts: no key; every client is trusted.")
    ] = False,
    timeout: Annotated[float, typer.Option(min=0, help="With --durable: seconds to wait for all of that.")] = 30.0,
) -> None:
    """Publish test messages; ends when the broker has acknowledged all of them.

    With --durable no message is lost by an end before that: the next start on the same directory sends what waits.
    With --receipts it ends when all of them are in Kafka, and what a broker loses on the way is sent again.

    Example: towline pub mqtt://127.0.0.1:1883 'telemetry/d{n}' '21.5' --count 1000
    """
    from towline.gateway.settings import Broker  # noqa: PLC0415  # heavy modules load when they are needed
    from towline.net.sender import Sender  # noqa: PLC0415
    from towline.net.transport import Tls  # noqa: PLC0415

    try:
        place = Broker.parse(broker)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="BROKER") from None
    properties = [_pair(text) for text in user_property or []]
    if durable is not None:
        _pub_durably(
            str(place), topic, message, count, rate, qos, properties, retain, durable, timeout,
            username=username, password=_secret(password_file), tls=Tls(ca_file=ca_file) if ca_file else None,
            receipts=receipts, receipt_key_file=receipt_key_file, receipt_trust_all_clients=receipt_trust_all_clients,
        )  # fmt: skip
        return
    if receipts:
        raise typer.BadParameter("it needs --durable", param_hint="--receipts")
    _packet(topic, message, 0, qos, properties, retain=retain)  # what can't be said is said before a connection is made
    refused: list[int] = []
    sender = Sender(
        place.endpoint,
        client_id=f"towline-pub-{os.getpid()}",
        tls=Tls(ca_file=ca_file),
        username=username,
        password=_secret(password_file),
        on_acknowledged=lambda _token, reason: refused.append(reason) if reason >= 0x80 else None,
    )
    started = time.monotonic()
    with sender, Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("publishing", total=count)
        for number in range(count):
            _pace(started, number, rate)
            sender.publish(_packet(topic, message, number, qos, properties, retain=retain))
            progress.update(task, completed=number + 1)
        sender.drain()
    _account(count, refused, time.monotonic() - started, place=str(place), qos=qos)


def _pub_durably(
    broker: str,
    topic: str,
    message: str,
    count: int,
    rate: float,
    qos: int,
    properties: list[tuple[str, str]],
    retain: bool,
    state_dir: Path,
    timeout: float,
    **login: Any,
) -> None:
    from towline.publisher import Publisher  # noqa: PLC0415

    outcomes: Counter[str] = Counter()
    publisher = Publisher(broker, state_dir=state_dir, on_outcome=lambda _n, told: outcomes.update([told]), **login)
    started = time.monotonic()
    waited = publisher.waiting
    last = None
    try:
        for number in range(count):
            _pace(started, number, rate)
            text = str(number)
            name, payload = topic.replace("{n}", text), _payload(message, number)
            last = publisher.publish(name, payload, qos=qos, retain=retain, user_properties=properties, wait=bool(rate))
        if last is not None:
            last.on_disk.result()
        typer.echo(f"{counted(count)} on disk in {state_dir} in {time.monotonic() - started:.1f} s", err=True)
    except BaseException:
        publisher.close(0)
        raise
    left = publisher.close(timeout)  # what is left is told by the publisher
    before = f", {waited:,} of them from before" if waited else ""
    typer.echo(f"{counted(outcomes['delivered'])} {'acknowledged by' if qos else 'sent to'} {broker}{before}")
    if login["receipts"]:
        typer.echo(f"{counted(outcomes['arrived'])} in Kafka")
    if outcomes["refused"] or outcomes["expired"]:
        typer.echo(f"{outcomes['refused']:,} refused, {outcomes['expired']:,} expired", err=True)
    if left or outcomes["refused"]:
        raise typer.Exit(1)


def _account(count: int, refused: list[int], seconds: float, *, place: str, qos: int) -> None:
    word = "acknowledged by" if qos else "sent to"
    typer.echo(f"{count - len(refused):,} of {counted(count)} {word} {place} in {seconds:.1f} s")
    if refused:
        from towline.mqtt.reasons import reason_words  # noqa: PLC0415

        typer.echo(f"{len(refused):,} refused: {reason_words(refused[0])} (0x{refused[0]:02X})", err=True)
        raise typer.Exit(1)


def _packet(
    topic: str, message: str, number: int, qos: int, properties: list[tuple[str, str]], *, retain: bool
) -> PublishPacket:
    from mqtt5 import PublishPacket, QoS  # noqa: PLC0415

    from towline.errors import ConfigError  # noqa: PLC0415
    from towline.mqtt.rules import message_problem  # noqa: PLC0415

    name = topic.replace("{n}", str(number))
    payload = _payload(message, number)
    if problem := message_problem(name, payload, qos, user_properties=properties):
        raise ConfigError("TL-C51", f"message to {name[:80]!r}", problem, "Change it.")
    return PublishPacket(
        name,
        payload,
        qos=QoS(qos),
        retain=retain,
        user_properties=properties,
        packet_id=1 if qos else None,  # the session gives each message its own
    )


def _payload(message: str, number: int) -> bytes:
    """The bytes as they were given to the command, which need not be text."""
    return os.fsencode(message.replace("{n}", str(number)))


def _pace(started: float, number: int, rate: float) -> None:
    if rate:
        time.sleep(max(0.0, started + number / rate - time.monotonic()))


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals:
        raise typer.BadParameter(f"{text!r} is not KEY=VALUE", param_hint="--property")
    return key, value


def _secret(path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        return files.secret(path)
    except OSError as error:
        raise typer.BadParameter(f"{path}: {files.why(error)}", param_hint="--password-file") from None
