"""Draft of a bridge file: the template (``template.toml``), filled with the answers to five questions.

Answers are checked by the reader of bridge files: the draft is parsed, and its first error is shown.

The configuration of a Mosquitto can answer for the broker. A ``connection`` with ``topic ... in`` fetches messages from
a remote broker: a line reads them from there. With ``out`` or ``both`` it sends what clients publish here: a line reads
that from this broker. A note names each setting that a line has no key for. Limits and access rules of the broker
itself are checked by `towline doctor`.
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
from towline.mosquitto_conf import ConfSection, MosquittoConf, uri_host
from towline.version import SOURCE_ROOT

_TEMPLATE: Final = Path(__file__).with_name("template.toml")
_EXAMPLES: Final = Path(__file__).parents[2] / "examples"
_COMMENT_WIDTH: Final = 110
#: Option -> its question and default, in the order of asking. Brokers and topic filters may be lists with commas; the
#: Kafka topic is a template over the wildcards of each filter.
_QUESTION_TABLE: Final = {
    "broker": ("MQTT broker", "mqtt://localhost:1883"),
    "topics": ("MQTT topics", "telemetry/{device}/#"),
    "kafka": ("Kafka bootstrap servers", "localhost:9092"),
    "topic": ("Kafka topic", "telemetry"),
    "guarantee": (f"Guarantee ({', '.join(Guarantee)})", Guarantee.AT_LEAST_ONCE.value),
}
QUESTIONS: Final = {key: words for key, (words, _) in _QUESTION_TABLE.items()}
DEFAULTS: Final = {key: default for key, (_, default) in _QUESTION_TABLE.items()}
Answers: TypeAlias = Mapping[str, str]


class DraftLine(NamedTuple):
    """Uplink of a draft.

    Attributes:
        filters: Topic filters, with named wildcards; a route for each.
        broker: Keys of ``[mqtt]``.
    """

    name: str
    filters: Sequence[str]
    broker: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedSettings:
    """Settings imported from a Mosquitto configuration.

    Attributes:
        broker: Keys of ``[mqtt]``; empty: the broker is asked for.
        lines: Lines in place of the one made of the answers.
        notes: Remarks for the user; they are also written at the head of the file.
        secrets: Files to write beside it: name and content.
    """

    broker: Mapping[str, Any] = field(default_factory=dict)
    lines: Sequence[DraftLine] = ()
    notes: Sequence[str] = ()
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)


def draft_text(answers: Answers, file: Path, head: Mapping[str, str], imported: ImportedSettings | None = None) -> str:
    """Return the text of a bridge file: the template, filled with answers, top-level keys and imported settings.

    The commands in its first lines name the `file`.
    """
    imported = imported or ImportedSettings()
    name = legal_name(re.sub(r"[.\-_]?\{[^{}]*\}", "", answers["topic"]), "telemetry")
    broker = imported.broker or {"brokers": _split_list(answers["broker"])}
    lines = imported.lines or [DraftLine(name, _split_list(answers["topics"]), broker)]
    head_part, mqtt, kafka, uplink, route = re.split(r"\n(?=\[)", _TEMPLATE.read_text(encoding="utf-8"))
    wrapped = partial(textwrap.wrap, width=_COMMENT_WIDTH, subsequent_indent="  ", break_on_hyphens=False)
    notes_text = "".join(f"# {row}\n" for note in imported.notes for row in wrapped(f"- {note}"))
    same_broker = all(line.broker == lines[0].broker for line in lines)
    mqtt_note = "[mqtt]\n# Each line has a broker of its own, below.\n"
    parts = [
        _fill_keys(
            head_part.replace("FILE", str(file)).replace("\n\n", f"\n\n{notes_text}{chr(10) * bool(notes_text)}", 1),
            head,
        ),
        _fill_keys(mqtt, lines[0].broker) if same_broker else mqtt_note,
        _fill_keys(kafka, {"bootstrap_servers": answers["kafka"]}),
    ]
    for line in lines:
        parts.append(_fill_keys(uplink, {"name": line.name, "guarantee": answers["guarantee"]}))
        parts += [] if same_broker else [_fill_keys("[uplink.mqtt]\n", line.broker)]
        for pattern in line.filters:
            parts.append(_fill_keys(route, {"from": pattern, "topic": answers["topic"], "key": _key_template(pattern)}))
            route = re.sub(r"^#.*\n", "", route, flags=re.MULTILINE)  # comments only once
    return "\n".join(parts)


def _fill_keys(part: str, values: Mapping[str, Any]) -> str:
    """Set keys of a part of the template; a key that it does not have is appended."""
    for key, value in values.items():
        row, match = f"{key} = {_toml(value)}\n", re.search(rf"^(?:# )?{key} = .*\n", part, re.MULTILINE)
        start, end = match.span() if match else (len(part), len(part))
        part = part[:start] + row + part[end:]
    return part


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{key} = {_toml(item)}' for key, item in value.items())} }}"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _key_template(source: str) -> str:
    """Return the template of a record's key: the named wildcards, or the whole topic."""
    try:
        names = Pattern.parse(source).wildcards
    except ValueError:
        names = {}
    return "/".join(f"{{{name}}}" for name in names) or "{mqtt.topic}"


def legal_name(text: str, default: str) -> str:
    """Return a text as a legal name of a bridge or line, at most 40 characters so that both fit into a client id."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._")[:40].rstrip("-._")
    return name or default


def default_name() -> str:
    """Return the host's name as the bridge's: bridges with equal names would take over each other's sessions."""
    return legal_name(socket.gethostname().partition(".")[0], "bridge")


def _split_list(text: str) -> list[str]:
    return [part for item in text.split(",") if (part := item.strip())] or [text]


def first_error(text: str, file: Path) -> ConfigError | None:
    """Return the first error in the text of a bridge file, missing password files aside; None if it is valid."""
    try:
        parse(re.sub(r"^(?=password_file = )", "# ", text, flags=re.MULTILINE), file)
    except ConfigError as error:
        return error.errors[0] if isinstance(error, ConfigErrors) else error
    return None


#: Returns the error of an answer; None if it is valid.
AnswerCheck: TypeAlias = Callable[[str], ConfigError | None]
#: Asks the user a question, with its default, until the answer is valid.
Prompt: TypeAlias = Callable[[str, str, AnswerCheck], str]


def collect_answers(
    options: Mapping[str, str | None],
    file: Path,
    head: Mapping[str, str],
    prompt: Prompt | None,
    imported: ImportedSettings | None = None,
) -> Answers:
    """Collect the answers: from `options`, by question, else from `prompt` if there is one, else the defaults.

    Raises:
        ConfigError: TL-C163, an option has an invalid value, or the imported settings answer the question.
    """
    answers = dict(DEFAULTS)
    imported_answers = {"broker": imported.broker, "topics": imported.lines} if imported else {}

    def check_answer(key: str, text: str) -> ConfigError | None:
        return first_error(draft_text(answers | {key: text}, file, head, imported), file)

    def raise_if_wrong(location: str, error: ConfigError | None) -> None:
        if error is not None:
            raise ConfigError("TL-C163", location, error.problem, error.remedy)

    raise_if_wrong("towline init", first_error(draft_text(answers, file, head, imported), file))
    for key, question in QUESTIONS.items():
        option = options[key]
        if option is not None and imported_answers.get(key):
            remedy = "Omit the option, or --from."
            raise ConfigError("TL-C163", f"--{key}", "the file named by --from sets this", remedy)
        if option is not None:
            raise_if_wrong(f"--{key}", check_answer(key, option))
            answers[key] = option
        elif prompt is not None and not imported_answers.get(key):
            answers[key] = prompt(question, answers[key], partial(check_answer, key))
    return answers


def refuse_existing(file: Path, *, force: bool) -> None:
    """Raise TL-C162 if the file exists, before any question is asked."""
    if not force and (file.exists() or file.is_symlink()):
        raise _exists_error(file)


def write(text: str, file: Path, secrets: Mapping[str, str], *, force: bool) -> list[Path]:
    """Write a bridge file and the `secrets` beside it, mode 0600: all or none, durably; return the bridge file first.

    `force` replaces existing files.

    Raises:
        ConfigError: TL-C162, a file exists; TL-C164, the directory is not writable. Nothing was written then.
    """
    contents = {file.parent / name: f"{secret}\n" for name, secret in secrets.items()} | {file: text}
    written_files: list[Path] = []
    for path, content in contents.items():  # the bridge file last, after the files that it names
        try:
            files.replace_durably(path, content, exclusive=not force)
        except OSError as error:
            for written_path in () if force else written_files:
                with contextlib.suppress(OSError):
                    written_path.unlink()
            raise (_exists_error(path) if isinstance(error, FileExistsError) else _write_error(path, error)) from error
        written_files.append(path)
    return written_files[::-1]


def write_examples(directory: Path, *, force: bool) -> list[Path]:
    """Copy the examples, alert rules and systemd units of the package; return the files. `force` overwrites.

    Raises:
        ConfigError: TL-C162, a file exists, and nothing was written; TL-C164, the directory is not writable.
        SetupError: TL-S70, the installation has no examples.
    """
    source = _EXAMPLES if _EXAMPLES.is_dir() else SOURCE_ROOT / "examples"
    sources = (file for file in sorted(source.rglob("*")) if file.is_file() and file.suffix != ".pyc")
    copies = {directory / file.relative_to(source): file for file in sources}
    if not copies:
        remedy = "Install the wheel as it is built: pip install --force-reinstall towline"
        raise SetupError("TL-S70", str(_EXAMPLES), "this installation has no examples", remedy)
    for path in copies:
        refuse_existing(path, force=force)
    for path, example in copies.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(example, path)
        except OSError as error:
            raise _write_error(path, error) from error
    return list(copies)


def _write_error(path: Path, error: OSError) -> ConfigError:
    remedy = "Name a file in an existing directory that this user may write to."
    return ConfigError("TL-C164", str(path), f"it can't be written ({files.os_error_text(error)})", remedy)


def _exists_error(path: Path) -> ConfigError:
    return ConfigError("TL-C162", str(path), "the file exists", "Name another file, or replace it with --force.")


# -- from Mosquitto's configuration ----------------------------------------------------------------------------------

_TLS_SETTINGS: Final = {"ca_file": "bridge_cafile", "cert_file": "bridge_certfile", "key_file": "bridge_keyfile"}
#: Settings that enable TLS; the last one only with the value true.
_TLS_INDICATORS: Final = ("bridge_cafile", "bridge_capath", "bridge_psk", "bridge_tls_use_os_certs")
#: Settings of a connection that are imported.
_IMPORTED_NAMES: Final = {
    *("address", "topic", "remote_username", "remote_password", "bridge_alpn", "bridge_tls_use_os_certs"),
    *_TLS_SETTINGS.values(),
}
_DIRECTION_NOTE: Final = (
    "A line reads one broker, with that one's topics: for in the remote one, for out and both this one. The messages "
    "go to Kafka; from Kafka to a broker goes a [[downlink]]: docs/kafka.md#downlink-kafka-to-mqtt."
)


def settings_from_conf(conf: MosquittoConf, file: Path) -> ImportedSettings:
    """Return the settings in a Mosquitto configuration: a line for each direction of a connection, or only the broker.

    Password files are placed beside `file`; their names begin with its stem.

    Raises:
        ConfigError: TL-C165, a connection has no address; TL-C156, a value can't be read.
    """
    broker_here, listener_notes = _local_broker(conf)
    lines: list[DraftLine] = []
    secrets: dict[str, str] = {}
    notes = [f"Made from {conf.file}."]
    for connection in (section for section in conf.connections if section.topics):
        base_name = legal_name(connection.name, "mosquitto")
        if unsupported := [setting for setting in connection.settings if setting.name not in _IMPORTED_NAMES]:
            locations = ", ".join(f"{setting.name} ({setting.location})" for setting in unsupported)
            notes.append(f'Not imported of connection "{connection.name}": {locations}. docs/options.md: [mqtt].')
        if local_filters := _route_filters(local for direction, local, _ in connection.topics if direction != "in"):
            lines.append(DraftLine(_unique_name(f"{base_name}-out", lines), local_filters, broker_here))
            notes += [f"line {lines[-1].name}: {note}" for note in listener_notes]
        if remote_filters := _route_filters(remote for direction, _, remote in connection.topics if direction == "in"):
            (broker, broker_notes), name = _remote_broker(connection), _unique_name(f"{base_name}-in", lines)
            if connection.get("remote_password"):
                broker["password_file"] = f"{file.stem}.{name}.password"
                secrets[broker["password_file"]] = connection.text("remote_password")
            lines.append(DraftLine(name, remote_filters, broker))
            notes += [f"line {name}: {note}" for note in broker_notes]
    notes += [_DIRECTION_NOTE] if lines else listener_notes
    return ImportedSettings(broker=broker_here, lines=lines, notes=notes, secrets=secrets)


def _route_filters(patterns: Iterable[str]) -> tuple[str, ...]:
    """Return the distinct patterns, with braces escaped for a route."""
    return tuple(dict.fromkeys(pattern.replace("{", "{{").replace("}", "}}") for pattern in patterns))


def _escape_variables(text: str) -> str:
    """Escape ``${`` so that the text names no environment variable."""
    return text.replace("${", "$${")


def _unique_name(name: str, lines: list[DraftLine]) -> str:
    """Return a name, with a number appended if another line has it already."""
    used_names = [line.name for line in lines]
    return next(text for text in chain([name], (f"{name}-{number}" for number in count(2))) if text not in used_names)


def _remote_broker(connection: ConfSection) -> tuple[dict[str, Any], list[str]]:
    """Return the broker of a connection as keys of ``[mqtt]``, and notes for the user."""
    tls, notes = _tls_files(connection, _TLS_SETTINGS)
    if alpn := connection.text("bridge_alpn"):
        tls["alpn"] = _escape_variables(alpn)
    uses_tls = any(map(connection.get, _TLS_INDICATORS[:-1])) or connection.flag(_TLS_INDICATORS[-1])
    scheme = "mqtts" if uses_tls else "mqtt"
    keys: dict[str, Any] = {"brokers": [_escape_variables(f"{scheme}://{address}") for address in connection.addresses]}
    if not keys["brokers"]:
        location = connection.header.location if connection.header else connection.name
        problem = f'connection "{connection.name}" has no address'
        raise ConfigError("TL-C165", location, problem, "Add it, or leave it out.")
    if user := connection.text("remote_username"):
        keys["username"] = _escape_variables(user)
    return keys | ({"tls": tls} if uses_tls and tls else {}), notes if uses_tls else []


def _tls_files(settings: ConfSection, names: Mapping[str, str]) -> tuple[dict[str, Any], list[str]]:
    """Return the existing files for a table ``tls``, and notes on missing files."""
    tls_files: dict[str, Any] = {}
    notes: list[str] = []
    for key, name in names.items():
        if (setting := settings.get(name)) is None:
            continue
        path = setting.file.parent.absolute() / setting.value
        if path.is_file():
            tls_files[key] = _escape_variables(str(path))
        else:
            notes.append(f"tls.{key} is missing: {path} ({name}, {setting.location}) does not exist or is unreadable.")
    return tls_files, notes


def _local_broker(conf: MosquittoConf) -> tuple[dict[str, Any], list[str]]:
    """Return the listener with the fewest requirements as keys of ``[mqtt]``, and notes on its requirements."""
    demands = ("psk_hint", "require_certificate", "protocol", "certfile")
    listener = min(conf.listeners, key=lambda item: [item.text(name) not in ("", "false", "mqtt") for name in demands])
    uses_tls, notes = listener.get("certfile") is not None, list[str]()
    host = listener.address if listener.address not in ("", "0.0.0.0", "::", "*") else "localhost"  # noqa: S104
    scheme = f"{'ws' if listener.text('protocol') == 'websockets' else 'mqtt'}{'s' * uses_tls}"
    url = f"{scheme}://{uri_host(host)}:{listener.port}" if listener.port else f"unix://{host}"
    mqtt_keys: dict[str, Any] = {"brokers": [_escape_variables(url)]}
    if uses_tls:
        tls, notes = _tls_files(listener, {"ca_file": "cafile"})
        mqtt_keys |= {"tls": tls} if tls else {}
    if listener.flag("require_certificate"):
        notes.append("The listener requires a client certificate: set tls.cert_file and tls.key_file.")
    anonymous_section = next((section for section in (listener, conf) if section.get("allow_anonymous")), None)
    if not (conf.local_only if anonymous_section is None else anonymous_section.flag("allow_anonymous")):
        notes.append("The listener requires a password: set username and password_file.")
    return mqtt_keys, notes
