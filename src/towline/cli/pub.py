"""``towline pub``: publish test messages and see each of them acknowledged."""

from __future__ import annotations

import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.progress import Progress

from towline.errors import ConfigError, Refused, Unreachable
from towline.mqtt.reasons import reason_words
from towline.mqtt.rules import message_problem
from towline.net.client import Client, PublishResult
from towline.net.endpoint import Endpoint
from towline.net.settings import ClientSettings
from towline.net.tls import Tls
from towline.text import counted

#: Seconds without any answer of the broker after which we give up.
_PATIENCE: Final = 30.0


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
    cert_file: Annotated[Path | None, typer.Option(help="This client's certificate, PEM.")] = None,
    key_file: Annotated[Path | None, typer.Option(help="Its key.")] = None,
    durable: Annotated[
        Path | None, typer.Option(metavar="STATE_DIR", help="Store each message here first; deliver it from there.")
    ] = None,
    receipts: Annotated[
        bool, typer.Option("--receipts", help="With --durable: wait until each message is in Kafka.")
    ] = False,
    receipt_key_file: Annotated[
        Path | None, typer.Option(help="With --receipts: the key that the gateway has, too.")
    ] = None,
    timeout: Annotated[float, typer.Option(min=0, help="With --durable: seconds to wait for all of that.")] = 30.0,
) -> None:
    """Publish test messages; ends when the broker has acknowledged all of them.

    With --durable no message is lost by an end before that: the next start on the same directory sends what waits.
    With --receipts it ends when all of them are in Kafka, and what a broker loses on the way is sent again.

    Example:  towline pub mqtt://127.0.0.1:1883 'telemetry/d{n}' '21.5' --count 1000
    """
    try:
        place = str(Endpoint.parse(broker))
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="BROKER") from None
    properties = [_pair(text) for text in user_property or []]
    tls = Tls(ca_file=ca_file, cert_file=cert_file, key_file=key_file)
    settings = ClientSettings(username=username, password_file=password_file, tls=tls)
    more = {"qos": qos, "retain": retain, "user_properties": properties}
    messages = _messages(topic, message, count, rate)
    if durable is not None:
        more["wait"] = bool(rate)
        _pub_durably(
            broker, messages, more, durable, timeout, settings=settings, receipts=receipts,
            receipt_key_file=receipt_key_file,
        )  # fmt: skip
        return
    if receipts:
        raise typer.BadParameter("it needs --durable", param_hint="--receipts")
    name, payload = next(_messages(topic, message, 1, 0))
    if problem := message_problem(name, payload, qos, user_properties=properties):  # before a connection is made
        raise ConfigError("TL-C51", f"message to {name[:80]!r}", problem, "Change it.")
    started = time.monotonic()
    screen = Console(stderr=True)
    plain = not screen.is_terminal or screen.is_dumb_terminal  # where a bar could not be taken away again
    with _open(broker, settings) as client, Progress(console=screen, transient=True, disable=plain) as progress:
        task = progress.add_task("publishing", total=count)
        refused = _published(client, messages, more, place, lambda: progress.advance(task))
        client.close(_PATIENCE)
    word = "acknowledged by" if qos else "sent to"
    took = f"in {time.monotonic() - started:.1f} s"
    typer.echo(f"{count - len(refused):,} of {counted(count)} {word} {place} {took}")
    if refused:
        typer.echo(f"{len(refused):,} refused: {reason_words(refused[0])} (0x{refused[0]:02X})", err=True)
        raise typer.Exit(1)


def _messages(topic: str, message: str, count: int, rate: float) -> Iterator[tuple[str, bytes]]:
    """Topic and payload of each message, in its time; the bytes as they were given, which need not be text."""
    started = time.monotonic()
    for number in range(count):
        if rate:
            time.sleep(max(0.0, started + number / rate - time.monotonic()))
        name, payload = (text.replace("{n}", str(number)) for text in (topic, message))
        yield name, os.fsencode(payload)


def _open(broker: str, settings: ClientSettings) -> Client:
    """A client that is online; where the broker keeps no sessions, which is no reason not to publish, without one."""
    client_id = f"towline-pub-{os.getpid()}"
    try:
        return Client(broker, client_id=client_id, settings=settings)
    except Refused as error:
        if error.code != "TL-M12":
            raise
        return Client(broker, client_id=client_id, settings=settings.model_copy(update={"session_expiry_s": 0}))


def _published(
    client: Client, messages: Iterator[tuple[str, bytes]], more: dict[str, Any], where: str, on_each: Callable[[], None]
) -> list[int]:
    """The reason codes of the messages that the broker has dropped, once it has answered all of them."""
    waiting, refused = deque[PublishResult](), list[int]()
    try:
        for name, payload in messages:
            while waiting and waiting[0].done:
                refused += _reason(waiting.popleft())
            waiting.append(client.publish(name, payload, timeout_s=_PATIENCE, **more))
            on_each()
        while waiting:
            refused += _reason(waiting[0])
            waiting.popleft()
    except Unreachable as error:
        if error.code != "TL-M33":
            raise
        what = f"no acknowledgement for {_PATIENCE:g} s, {counted(len(waiting))} without an answer"
        advice = "Is the broker alive? Publish again what was not confirmed."
        raise client.last_error or Unreachable("TL-M33", where, what, advice) from None
    return refused


def _reason(result: PublishResult) -> list[int]:
    """The reason code of a message that the broker has dropped; none of one that it took."""
    try:
        result.wait(_PATIENCE)
    except Refused:
        if result.reason is None:  # it is the client that was refused
            raise
        return [result.reason]
    return []


def _pub_durably(
    broker: str,
    messages: Iterator[tuple[str, bytes]],
    more: dict[str, Any],
    state_dir: Path,
    timeout: float,
    *,
    receipts: bool,
    **options: Any,
) -> None:
    from towline.publisher import Publisher  # noqa: PLC0415 - loads pyarrow

    outcomes, last = Counter[str](), None
    publisher = Publisher(
        broker, state_dir=state_dir, on_outcome=lambda _n, end: outcomes.update([end]), receipts=receipts, **options
    )
    started, waited, count = time.monotonic(), publisher.waiting, 0
    try:
        for count, (name, payload) in enumerate(messages, 1):  # noqa: B007 - how many there were
            last = publisher.publish(name, payload, **more)
        if last is not None:
            last.on_disk.result()
        typer.echo(f"{counted(count)} on disk in {state_dir} in {time.monotonic() - started:.1f} s", err=True)
    except BaseException:
        publisher.close(0)
        raise
    left = publisher.close(timeout)  # what is left is told by the publisher
    before = f", {waited:,} of them from before" if waited else ""
    typer.echo(f"{counted(outcomes['delivered'])} {'acknowledged by' if more['qos'] else 'sent to'} {broker}{before}")
    if receipts:
        typer.echo(f"{counted(outcomes['arrived'])} in Kafka")
    if outcomes["refused"] or outcomes["expired"]:
        typer.echo(f"{outcomes['refused']:,} refused, {outcomes['expired']:,} expired", err=True)
    if left or outcomes["refused"]:
        raise typer.Exit(1)


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals:
        raise typer.BadParameter(f"{text!r} is not KEY=VALUE", param_hint="--property")
    return key, value
