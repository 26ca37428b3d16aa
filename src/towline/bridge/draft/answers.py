"""A first bridge file: the template (``template.toml``), filled by the answers to five questions, and written.

The judge of an answer is the reader of bridge files: what an answer makes is read, and its first mistake is told.

A Mosquitto's configuration answers for the broker. A ``connection`` with ``topic ... in`` fetches messages from a
remote broker: a line takes them from there. With ``out`` or ``both`` it takes what clients publish here: a line takes
that from this broker. What a line has no setting for is named in a note; what the broker's own settings end, and what
it asks of a client, is doctor's to say.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import socket
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

from towline import files
from towline.bridge.config.file import parse
from towline.bridge.patterns import Pattern
from towline.errors import ConfigError, ConfigErrors, SetupError
from towline.guarantee import Guarantee
from towline.mosquitto_conf import ConfSection, MosquittoConf, in_uri
from towline.version import ROOT

_TEMPLATE: Final = Path(__file__).with_name("template.toml")
_EXAMPLES: Final = Path(__file__).parents[2] / "examples"
_WIDTH: Final = 110
#: Question, as the option that answers it → as it is asked, and its default, in this order. Brokers and topic filters
#: may be several with commas between; the Kafka topic is a template over the wildcards of each filter.
_ASKED: Final = {
    "broker": ("MQTT broker", "mqtt://localhost:1883"),
    "topics": ("MQTT topics", "telemetry/{device}/#"),
    "kafka": ("Kafka bootstrap servers", "localhost:9092"),
    "topic": ("Kafka topic", "telemetry"),
    "guarantee": (f"Guarantee ({', '.join(Guarantee)})", Guarantee.AT_LEAST_ONCE.value),
}
QUESTIONS: Final = {key: words for key, (words, _) in _ASKED.items()}
DEFAULTS: Final = {key: default for key, (_, default) in _ASKED.items()}
Answers: TypeAlias = Mapping[str, str]


class DraftLine(NamedTuple):
    """An uplink.

    Attributes:
        filters: Topic filters, with named wildcards; a route for each.
        broker: Keys of ``[mqtt]``.
    """

    name: str
    filters: Sequence[str]
    broker: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What is known of a bridge without an answer.

    Attributes:
        broker: Keys of ``[mqtt]``; none for the broker that is answered.
        lines: In place of the one that broker and answers make.
        notes: What has to be known of the file; they stand at its head too.
        secrets: Files to be written beside it: name and content.
    """

    broker: Mapping[str, Any] = field(default_factory=dict)
    lines: Sequence[DraftLine] = ()
    notes: Sequence[str] = ()
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)


def draft_of(answers: Answers, file: Path, head: Mapping[str, str], known: Known | None = None) -> str:
    """The text of a bridge file: the template, filled with its own keys, `head`, and what is `known` or answered.

    The commands at its head name the `file`.
    """
    known = known or Known()
    name = legal_name(re.sub(r"[.\-_]?\{[^{}]*\}", "", answers["topic"]), "telemetry")
    broker = known.broker or {"brokers": _listed(answers["broker"])}
    lines = known.lines or [DraftLine(name, _listed(answers["topics"]), broker)]
    first, mqtt, kafka, uplink, route = re.split(r"\n(?=\[)", _TEMPLATE.read_text(encoding="utf-8"))
    wrapped = partial(textwrap.wrap, width=_WIDTH, subsequent_indent="  ", break_on_hyphens=False)
    said = "".join(f"# {row}\n" for note in known.notes for row in wrapped(f"- {note}"))
    shared = all(line.broker == lines[0].broker for line in lines)
    own = "[mqtt]\n# Each line has a broker of its own, below.\n"
    parts = [
        _filled(first.replace("FILE", str(file)).replace("\n\n", f"\n\n{said}{chr(10) * bool(said)}", 1), head),
        _filled(mqtt, lines[0].broker) if shared else own,
        _filled(kafka, {"bootstrap_servers": answers["kafka"]}),
    ]
    for line in lines:
        parts.append(_filled(uplink, {"name": line.name, "guarantee": answers["guarantee"]}))
        parts += [] if shared else [_filled("[uplink.mqtt]\n", line.broker)]
        for one in line.filters:
            parts.append(_filled(route, {"from": one, "topic": answers["topic"], "key": _key(one)}))
            route = re.sub(r"^#.*\n", "", route, flags=re.MULTILINE)  # said once
    return "\n".join(parts)


def _filled(part: str, values: Mapping[str, Any]) -> str:
    """A part of the template with other values; a key that it does not have comes last."""
    for key, value in values.items():
        row, there = f"{key} = {_toml(value)}\n", re.search(rf"^(?:# )?{key} = .*\n", part, re.MULTILINE)
        start, end = there.span() if there else (len(part), len(part))
        part = part[:start] + row + part[end:]
    return part


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{key} = {_toml(one)}' for key, one in value.items())} }}"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _key(source: str) -> str:
    """Of the records: the named wildcards, or the whole topic."""
    try:
        names = Pattern.parse(source).names
    except ValueError:
        names = {}
    return "/".join(f"{{{name}}}" for name in names) or "{mqtt.topic}"


def legal_name(text: str, otherwise: str) -> str:
    """A name of a bridge or line that is like a text, and leaves room for the other in a client id."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._")[:40].rstrip("-._")
    return name or otherwise


def default_name() -> str:
    """Of the bridge: this machine's, since two bridges with one name would end each other's sessions at a broker."""
    return legal_name(socket.gethostname().partition(".")[0], "bridge")


def _listed(text: str) -> list[str]:
    return [part for one in text.split(",") if (part := one.strip())] or [text]


def mistake_in(text: str, file: Path) -> ConfigError | None:
    """The first mistake that reading the file would find, its password files aside; None if it is right."""
    try:
        parse(re.sub(r"^(?=password_file = )", "# ", text, flags=re.MULTILINE), file)
    except ConfigError as found:
        return found.errors[0] if isinstance(found, ConfigErrors) else found
    return None


#: Says what is wrong with an answer; None if nothing is.
Judge: TypeAlias = Callable[[str], ConfigError | None]
#: Asks a person a question in words, with its default, until the answer is right.
Ask: TypeAlias = Callable[[str, str, Judge], str]


def answered(
    said: Mapping[str, str | None],
    file: Path,
    head: Mapping[str, str],
    ask: Ask | None,
    known: Known | None = None,
) -> Answers:
    """All answers: those of options, `said` by question, of a person where there is one to `ask`, and defaults.

    Raises:
        ConfigError: TL-C163, an option says what can't be, or answers what is known.
    """
    answers = dict(DEFAULTS)
    of_file = {"broker": known.broker, "topics": known.lines} if known else {}

    def judge(key: str, text: str) -> ConfigError | None:
        return mistake_in(draft_of(answers | {key: text}, file, head, known), file)

    def refuse(where: str, mistake: ConfigError | None) -> None:
        if mistake is not None:
            raise ConfigError("TL-C163", where, mistake.what, mistake.do)

    refuse("towline init", mistake_in(draft_of(answers, file, head, known), file))
    for key, words in QUESTIONS.items():
        given = said[key]
        if given is not None and of_file.get(key):
            do = "Leave out the option, or --from."
            raise ConfigError("TL-C163", f"--{key}", "the file that --from names says this", do)
        if given is not None:
            refuse(f"--{key}", judge(key, given))
            answers[key] = given
        elif ask is not None and not of_file.get(key):
            answers[key] = ask(words, answers[key], partial(judge, key))
    return answers


def refuse_present(file: Path, *, force: bool) -> None:
    """Say that a file is there, TL-C162, before anything is asked."""
    if not force and (file.exists() or file.is_symlink()):
        raise _present(file)


def write(text: str, file: Path, secrets: Mapping[str, str], *, force: bool) -> list[Path]:
    """Write a bridge file and the `secrets` beside it, mode 0600: whole or not at all, durable; the bridge file first.

    What is there is replaced by `force`.

    Raises:
        ConfigError: TL-C162, one of them is there; TL-C164, the directory does not take them. Nothing was written then.
    """
    contents = {file.parent / name: f"{secret}\n" for name, secret in secrets.items()} | {file: text}
    written: list[Path] = []
    for path, content in contents.items():  # the file last: what it names is there
        try:
            files.replace_durably(path, content, new=not force)
        except OSError as error:
            for one in () if force else written:
                with contextlib.suppress(OSError):
                    one.unlink()
            raise (_present(path) if isinstance(error, FileExistsError) else _unwritable(path, error)) from error
        written.append(path)
    return written[::-1]


def write_examples(directory: Path, *, force: bool) -> list[Path]:
    """Write out the examples, alert rules and units of the package; return the files. `force` replaces what is there.

    Raises:
        ConfigError: TL-C162, one of them is there, and nothing was written; TL-C164, the directory does not take them.
        SetupError: TL-S70, this installation has none.
    """
    source = _EXAMPLES if _EXAMPLES.is_dir() else ROOT / "examples"
    found = (one for one in sorted(source.rglob("*")) if one.is_file() and one.suffix != ".pyc")
    copies = {directory / one.relative_to(source): one for one in found}
    if not copies:
        do = "Install the wheel as it is built: pip install --force-reinstall towline"
        raise SetupError("TL-S70", str(_EXAMPLES), "this installation has no examples", do)
    for path in copies:
        refuse_present(path, force=force)
    for path, example in copies.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(example, path)
        except OSError as error:
            raise _unwritable(path, error) from error
    return list(copies)


def _unwritable(path: Path, error: OSError) -> ConfigError:
    do = "Name one in a directory that is there and that this user may write."
    return ConfigError("TL-C164", str(path), f"it can't be written ({files.why(error)})", do)


def _present(path: Path) -> ConfigError:
    return ConfigError("TL-C162", str(path), "it is there already", "Name another file, or replace it with --force.")


# -- from Mosquitto's configuration ----------------------------------------------------------------------------------

_TLS: Final = {"ca_file": "bridge_cafile", "cert_file": "bridge_certfile", "key_file": "bridge_keyfile"}
#: What makes a connection secure; the last one if it is true.
_SECURE: Final = ("bridge_cafile", "bridge_capath", "bridge_psk", "bridge_tls_use_os_certs")
#: Settings of a connection that are carried over.
_CARRIED: Final = {
    *("address", "topic", "remote_username", "remote_password", "bridge_alpn", "bridge_tls_use_os_certs"),
    *_TLS.values(),
}
_SIDES: Final = (
    "A line reads one broker, with that one's topics: for in the remote one, for out and both this one. The messages "
    "go to Kafka; from Kafka to a broker goes a [[downlink]]: docs/downlink.md."
)


def known_of(conf: MosquittoConf, file: Path) -> Known:
    """What a Mosquitto's configuration says of a bridge file: a line for each side of a connection, or the broker.

    Password files are to lie beside the `file`, and begin with its stem.

    Raises:
        ConfigError: TL-C165, a connection has no address; TL-C156, a value can't be read.
    """
    here, of_here = _of_listener(conf)
    lines: list[DraftLine] = []
    secrets: dict[str, str] = {}
    notes = [f"Made from {conf.file}."]
    for connection in (one for one in conf.connections if one.topics):
        base = legal_name(connection.name, "mosquitto")
        if left := [one for one in connection.settings if one.name not in _CARRIED]:
            places = ", ".join(f"{one.name} ({one.where})" for one in left)
            notes.append(f'Not carried over of connection "{connection.name}": {places}. docs/options.md: [mqtt].')
        if out := _filters(local for direction, local, _ in connection.topics if direction != "in"):
            lines.append(DraftLine(_apart(f"{base}-out", lines), out, here))
            notes += [f"line {lines[-1].name}: {note}" for note in of_here]
        if came := _filters(remote for direction, _, remote in connection.topics if direction == "in"):
            (broker, said), name = _remote(connection), _apart(f"{base}-in", lines)
            if connection.get("remote_password"):
                broker["password_file"] = f"{file.stem}.{name}.password"
                secrets[broker["password_file"]] = connection.text("remote_password")
            lines.append(DraftLine(name, came, broker))
            notes += [f"line {name}: {note}" for note in said]
    return Known(broker=here, lines=lines, notes=[*notes, *([_SIDES] if lines else of_here)], secrets=secrets)


def _filters(patterns: Iterable[str]) -> tuple[str, ...]:
    """Each once, with braces as a route writes them."""
    return tuple(dict.fromkeys(one.replace("{", "{{").replace("}", "}}") for one in patterns))


def _literal(text: str) -> str:
    """Text that no variable of the environment is meant by."""
    return text.replace("${", "$${")


def _apart(name: str, lines: list[DraftLine]) -> str:
    """A name that legal letters made like another one's gets a number."""
    taken = [line.name for line in lines]
    return next(one for one in chain([name], (f"{name}-{number}" for number in count(2))) if one not in taken)


def _remote(connection: ConfSection) -> tuple[dict[str, Any], list[str]]:
    """The broker of a connection as keys of ``[mqtt]``, and what to say of it."""
    tls, notes = _tls_files(connection, _TLS)
    if alpn := connection.text("bridge_alpn"):
        tls["alpn"] = _literal(alpn)
    secure = any(map(connection.get, _SECURE[:-1])) or connection.flag(_SECURE[-1])
    scheme = "mqtts" if secure else "mqtt"
    made: dict[str, Any] = {"brokers": [_literal(f"{scheme}://{one}") for one in connection.addresses]}
    if not made["brokers"]:
        where = connection.begun.where if connection.begun else connection.name
        what = f'connection "{connection.name}" has no address'
        raise ConfigError("TL-C165", where, what, "Add it, or leave it out.")
    if user := connection.text("remote_username"):
        made["username"] = _literal(user)
    return made | ({"tls": tls} if secure and tls else {}), notes if secure else []


def _tls_files(settings: ConfSection, names: Mapping[str, str]) -> tuple[dict[str, Any], list[str]]:
    """The files of a table ``tls`` that are there, and what to say of the others."""
    found: dict[str, Any] = {}
    notes: list[str] = []
    for key, name in names.items():
        if (one := settings.get(name)) is None:
            continue
        path = one.file.parent.absolute() / one.value
        if path.is_file():
            found[key] = _literal(str(path))
        else:
            notes.append(f"tls.{key} is missing: {path} ({name}, {one.where}) is not there, or this user can't see it.")
    return found, notes


def _of_listener(conf: MosquittoConf) -> tuple[dict[str, Any], list[str]]:
    """The listener that asks least of a client here as keys of ``[mqtt]``, and what it does ask."""
    asks = ("psk_hint", "require_certificate", "protocol", "certfile")
    listener = min(conf.listeners, key=lambda one: [one.text(name) not in ("", "false", "mqtt") for name in asks])
    secure, notes = listener.get("certfile") is not None, list[str]()
    host = listener.address if listener.address not in ("", "0.0.0.0", "::", "*") else "localhost"  # noqa: S104
    scheme = f"{'ws' if listener.text('protocol') == 'websockets' else 'mqtt'}{'s' * secure}"
    place = f"{scheme}://{in_uri(host)}:{listener.port}" if listener.port else f"unix://{host}"
    made: dict[str, Any] = {"brokers": [_literal(place)]}
    if secure:
        tls, notes = _tls_files(listener, {"ca_file": "cafile"})
        made |= {"tls": tls} if tls else {}
    if listener.flag("require_certificate"):
        notes.append("The listener asks for a certificate of ours: set tls.cert_file and tls.key_file.")
    known = next((one for one in (listener, conf) if one.get("allow_anonymous")), None)
    if not (conf.local_only if known is None else known.flag("allow_anonymous")):
        notes.append("The listener lets nobody in without a password: set username and password_file.")
    return made, notes
