"""A bridge file before it is written: its values, and its text with comments. Pure."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from towline.guarantee import Guarantee, policy

__all__ = ["Draft", "DraftBroker", "DraftLine", "DraftRoute", "quoted", "render"]

_WIDTH: Final = 110

_HEAD: Final = """\
# Made by towline init{origin}. Every key is explained in docs/options.md.
# A comment that begins with a key, as in "# username = ...", is a setting to use: take its # away.
#
#   towline check {file}      is it right, and what would it do? No network
#   towline doctor {file}     can broker, Kafka and this machine keep what it promises?
#   towline run {file}        runs it until Ctrl-C; what waits stays on disk
"""
_NAME: Final = (
    "Begins the MQTT client ids. At one broker no other bridge may have this name: the two would end each other's "
    "sessions."
)
_STATE: Final = (
    "On a local disk, relative to this file. Here lies what the broker was told is safe and Kafka does not have yet: "
    "who loses this directory loses that."
)
_BROKERS: Final = (
    "The broker; several are tried in this order. mqtts:// encrypts: without it messages and password can be read and "
    "changed on the way."
)
_KAFKA: Final = "HOST:PORT of some of Kafka's brokers, with commas between."
_CREATE: Final = (
    "Makes the topics of this file that are missing, and one for dead letters: what can't be mapped or written. "
    "Without it all have to be there, and such a message stops the line."
)
_LINE: Final = (
    "Ends the client id, {client_id}: the broker keeps a session for it, and queues in it what comes while Towline is "
    "away, up to the broker's own limits. Rename it only when nothing waits."
)
_FROM: Final = "Which messages: {name} or + is one level of the topic, # all that follow."
_KEY: Final = "The same key is the same partition, and so in order."


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftBroker:
    """An MQTT broker and how to get to it.

    Attributes:
        uris: Tried in this order.
        username: "" for none.
        password_file: Relative to the bridge file; "" for none.
        tls: Keys of the table ``tls``.
        more: Further keys of ``[mqtt]``.
        notes: What has to be known of it.
    """

    uris: tuple[str, ...]
    username: str = ""
    password_file: str = ""
    tls: Mapping[str, str | bool] = field(default_factory=dict)
    more: Mapping[str, str | int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRoute:
    """Messages and where they go.

    Attributes:
        source: Topic filter, with named wildcards.
        topic: Kafka topic, a template.
        key: Of the records, a template.
    """

    source: str
    topic: str
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftLine:
    """An uplink.

    Attributes:
        name: Unique in the file.
        routes: At least one.
        broker: Where its messages come from.
        notes: What has to be known of it.
    """

    name: str
    routes: tuple[DraftRoute, ...]
    broker: DraftBroker
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A whole file.

    Attributes:
        name: Of the bridge.
        state_dir: Relative to the file, or absolute.
        kafka: Bootstrap servers.
        guarantee: Of every line, as the user says it.
        lines: At least one.
        origin: What it was made from; "" for answers.
        notes: What could not be carried over, and what of the other side's settings breaks the promise.
        secrets: Files to be written beside it: name and content.
    """

    name: str
    state_dir: str
    kafka: str
    guarantee: str
    lines: tuple[DraftLine, ...]
    origin: str = ""
    notes: tuple[str, ...] = ()
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def broker(self) -> DraftBroker | None:
        """The broker of all lines; None where they have different ones."""
        first = self.lines[0].broker
        return first if all(line.broker == first for line in self.lines) else None

    def without_secrets(self) -> Draft:
        """The same without the password files that are written with it."""
        lines = tuple(replace(line, broker=replace(line.broker, password_file="")) for line in self.lines)
        return replace(self, lines=lines, secrets={})


def quoted(text: str) -> str:
    """A basic string of TOML."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def render(draft: Draft, file: Path) -> str:
    """The text of the file.

    Args:
        draft: What it says.
        file: Its name, for the commands in its head.
    """
    origin = f" from {draft.origin}" if draft.origin else ""
    parts = [
        _HEAD.format(origin=origin, file=file),
        "\n".join(_notes(draft.notes)),
        "\n".join([*_comment(_NAME), f"name = {quoted(draft.name)}"]),
        "\n".join([*_comment(_STATE), f"state_dir = {quoted(draft.state_dir)}"]),
        "\n".join(_mqtt(draft)),
        "\n".join(_of_kafka(draft)),
        *("\n".join(_line(draft, line)) for line in draft.lines),
    ]
    return "\n\n".join(part.rstrip("\n") for part in parts if part) + "\n"


def _comment(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)


def _notes(notes: tuple[str, ...]) -> Iterator[str]:
    for note in notes:
        yield from textwrap.wrap(note, _WIDTH, initial_indent="# - ", subsequent_indent="#   ", break_on_hyphens=False)


def _mqtt(draft: Draft) -> Iterator[str]:
    yield "[mqtt]"
    if draft.broker is None:
        yield from _comment("Each line has a broker of its own, below.")
        return
    yield from _comment(_BROKERS)
    yield from _broker(draft.broker)


def _broker(broker: DraftBroker) -> Iterator[str]:
    yield f"brokers = [{', '.join(map(quoted, broker.uris))}]"
    yield from _notes(broker.notes)
    if broker.username:
        yield f"username = {quoted(broker.username)}"
    else:
        yield '# username = "towline"'
    yield from _comment("A file beside this one, mode 0600: no password stands here, where a copy would show it.")
    yield (
        f"password_file = {quoted(broker.password_file)}"
        if broker.password_file
        else ('# password_file = "mqtt.password"')
    )
    if broker.tls:
        pairs = (
            f"{key} = {str(value).lower() if value is True else quoted(str(value))}"
            for key, value in broker.tls.items()
        )
        yield f"tls = {{ {', '.join(pairs)} }}"
    else:
        yield '# tls = { ca_file = "ca.pem" }              # with mqtts://, in place of the system\'s authorities'
    for key, value in broker.more.items():
        yield f"{key} = {value if isinstance(value, int) else quoted(value)}"


def _of_kafka(draft: Draft) -> Iterator[str]:
    yield "[kafka]"
    yield from _comment(_KAFKA)
    yield f"bootstrap_servers = {quoted(draft.kafka)}"
    yield from _comment(_CREATE)
    yield "create_topics = { partitions = 6 }"
    yield (
        '# settings = { "security.protocol" = "SASL_SSL", "sasl.mechanism" = "SCRAM-SHA-512", '
        '"sasl.username" = "towline" }'
    )
    yield '# password_file = "kafka.password"'


def _line(draft: Draft, line: DraftLine) -> Iterator[str]:
    yield "[[uplink]]"
    yield from _notes(line.notes)
    yield from _comment(_LINE.format(client_id=f"{draft.name}-{line.name}"))
    yield f"name = {quoted(line.name)}"
    yield from _comment(_promise(draft.guarantee))
    yield f"guarantee = {quoted(draft.guarantee)}"
    if draft.broker is None:
        yield "[uplink.mqtt]"
        yield from _broker(line.broker)
    for number, route in enumerate(line.routes):
        yield ""
        yield "[[uplink.route]]"
        if not number:
            yield from _comment(_FROM)
        yield f"from = {quoted(route.source)}"
        yield f"topic = {quoted(route.topic)}"
        if not number:
            yield from _comment(_KEY)
        yield f"key = {quoted(route.key)}"


def _promise(guarantee: str) -> str:
    others = ", ".join(one for one in Guarantee if one != guarantee)
    if guarantee not in set(Guarantee):
        return f"One of {', '.join(Guarantee)}."
    promise = policy(Guarantee(guarantee))
    return f"Lost: {promise.lost}. Doubled: {promise.doubled}. Or {others}: docs/guarantees.md."
