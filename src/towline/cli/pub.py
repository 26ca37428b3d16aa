"""``towline pub``: publishes test messages and waits for their acknowledgements."""

from __future__ import annotations

import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Annotated, Any, Final, TypeAlias

import typer
from rich.console import Console
from rich.progress import Progress

from towline.errors import BrokerRefused, ConfigError, Unreachable
from towline.mqtt.events import PublishAcknowledged
from towline.mqtt.rules import message_problem
from towline.net.client import Client
from towline.net.endpoint import Endpoint, Tls
from towline.net.settings import ClientSettings
from towline.text import count_text

#: Topic and payload of each message.
_Messages: TypeAlias = Iterator[tuple[str, bytes]]
#: Timeout for any answer of the broker, in seconds.
_ANSWER_TIMEOUT_S: Final = 30.0


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

    With --durable no message is lost if it ends before that: the next start on the same directory sends the waiting
    ones. With --receipts it ends when all of them are in Kafka, and messages that a broker loses are sent again.

    Example:  towline pub mqtt://127.0.0.1:1883 'telemetry/d{n}' '21.5' --count 1000
    """
    try:
        endpoint = str(Endpoint.parse(broker))
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="BROKER") from None
    properties = [_parse_property(text) for text in user_property or []]
    tls = Tls(ca_file=ca_file, cert_file=cert_file, key_file=key_file)
    settings = ClientSettings(username=username, password_file=password_file, tls=tls)
    publish_options = {"qos": qos, "retain": retain, "user_properties": properties}
    messages = _messages(topic, message, count, rate)
    if durable is not None:
        publish_options["wait"] = bool(rate)
        options = {"state_dir": durable, "settings": settings, "receipts": receipts}
        options |= {"receipt_key_file": receipt_key_file}
        _publish_durably(broker, messages, publish_options, timeout, **options)
        return
    if receipts:
        raise typer.BadParameter("it needs --durable", param_hint="--receipts")
    name, payload = next(_messages(topic, message, 1, 0))
    if problem := message_problem(name, payload, qos, user_properties=properties):  # before a connection is made
        raise ConfigError("TL-C51", f"message to {name[:80]!r}", problem, "Change it.")
    started_at = time.monotonic()
    screen = Console(stderr=True)
    is_plain = not screen.is_terminal or screen.is_dumb_terminal  # a progress bar could not be erased
    with _open(broker, settings) as client, Progress(console=screen, transient=True, disable=is_plain) as progress:
        task = progress.add_task("publishing", total=count)
        reasons = _publish_all(client, messages, publish_options, endpoint, lambda: progress.advance(task))
        client.close(_ANSWER_TIMEOUT_S)
    result = f"{'acknowledged by' if qos else 'sent to'} {endpoint} in {time.monotonic() - started_at:.1f} s"
    typer.echo(f"{count - len(reasons):,} of {count_text(count)} {result}")
    if reasons:
        typer.echo(f"{len(reasons):,} refused: {reasons[0]}", err=True)
        raise typer.Exit(1)


def _messages(topic: str, message: str, count: int, rate: float) -> _Messages:
    """Yield topic and payload of each message at its time; the payload keeps its bytes, which need not be text."""
    started_at = time.monotonic()
    for number in range(count):
        if rate:
            time.sleep(max(0.0, started_at + number / rate - time.monotonic()))
        name, payload = (text.replace("{n}", str(number)) for text in (topic, message))
        yield name, os.fsencode(payload)


def _open(broker: str, settings: ClientSettings) -> Client:
    """Connect a client; without a session if the broker supports none."""
    client_id = f"towline-pub-{os.getpid()}"
    try:
        return Client(broker, client_id=client_id, settings=settings)
    except BrokerRefused as error:
        if error.code != "TL-M12":
            raise
        return Client(broker, client_id=client_id, settings=settings.model_copy(update={"session_expiry_s": 0}))


def _publish_all(
    client: Client, messages: _Messages, options: dict[str, Any], endpoint: str, on_message: Callable[[], None]
) -> list[str]:
    """Publish all messages; return the reasons of those that the broker refused."""
    results, reasons = deque[Future[PublishAcknowledged]](), list[str]()
    try:
        for name, payload in messages:
            while results and results[0].done():
                reasons += _refusal_reasons(results.popleft())
            results.append(client.publish(name, payload, timeout_s=_ANSWER_TIMEOUT_S, **options))
            on_message()
        while results:
            reasons += _refusal_reasons(results[0])
            results.popleft()
    except (Unreachable, TimeoutError) as error:
        if isinstance(error, Unreachable) and error.code != "TL-M33":
            raise
        problem = f"no acknowledgement for {_ANSWER_TIMEOUT_S:g} s, {count_text(len(results))} without an answer"
        remedy = "Is the broker alive? Publish again what was not confirmed."
        raise client.last_error or Unreachable("TL-M33", endpoint, problem, remedy) from None
    return reasons


def _refusal_reasons(result: Future[PublishAcknowledged]) -> list[str]:
    """Return the reason of a refused message in a list, empty for an accepted one."""
    try:
        result.result(_ANSWER_TIMEOUT_S)
    except BrokerRefused as error:
        if error.code != "TL-M31":  # it is the client that was refused
            raise
        return [error.problem]
    return []


def _publish_durably(
    broker: str, messages: _Messages, publish_options: dict[str, Any], timeout: float, **options: Any
) -> None:
    from towline.publisher import Publisher  # noqa: PLC0415 - loads pyarrow

    outcomes, last_message = Counter[str](), None
    publisher = Publisher(broker, on_outcome=lambda _n, outcome: outcomes.update([outcome]), **options)
    started_at, waiting_count, count = time.monotonic(), publisher.flush(0, end_to_end=False), 0
    try:
        for count, (name, payload) in enumerate(messages, 1):  # noqa: B007 - how many there were
            last_message = publisher.publish(name, payload, **publish_options)
        if last_message is not None:
            last_message.on_disk.result()
        typer.echo(
            f"{count_text(count)} on disk in {options['state_dir']} in {time.monotonic() - started_at:.1f} s", err=True
        )
    except BaseException:
        publisher.close(0)
        raise
    remaining_count = publisher.close(timeout)  # the publisher reports remaining messages
    waiting_text = f", {waiting_count:,} of them from before" if waiting_count else ""
    result = f"{'acknowledged by' if publish_options['qos'] else 'sent to'} {broker}{waiting_text}"
    typer.echo(f"{count_text(outcomes['delivered'])} {result}")
    if options["receipts"]:
        typer.echo(f"{count_text(outcomes['arrived'])} in Kafka")
    if outcomes["refused"] or outcomes["expired"]:
        typer.echo(f"{outcomes['refused']:,} refused, {outcomes['expired']:,} expired", err=True)
    if remaining_count or outcomes["refused"]:
        raise typer.Exit(1)


def _parse_property(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals:
        raise typer.BadParameter(f"{text!r} is not KEY=VALUE", param_hint="--property")
    return key, value
