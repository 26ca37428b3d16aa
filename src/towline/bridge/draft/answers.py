"""Draft of a bridge file: the template (``template.toml``), filled with the answers to five questions.

Answers are checked by the reader of bridge files: the draft is parsed, and its first error is shown.
"""

from __future__ import annotations

import json
import re
import shutil
import socket
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias

from towline import files
from towline.bridge.config.file import parse
from towline.bridge.patterns import Pattern
from towline.errors import ConfigError, ConfigErrors, SetupError
from towline.guarantee import Guarantee
from towline.version import SOURCE_ROOT

_TEMPLATE: Final = Path(__file__).with_name("template.toml")
_EXAMPLES: Final = Path(__file__).parents[2] / "examples"
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


def draft_text(answers: Answers, file: Path, head: Mapping[str, str]) -> str:
    """Return the text of a bridge file: the template, filled with answers and top-level keys.

    The commands in its first lines name the `file`.
    """
    name = legal_name(re.sub(r"[.\-_]?\{[^{}]*\}", "", answers["topic"]), "telemetry")
    head_part, mqtt, kafka, uplink, route = re.split(r"\n(?=\[)", _TEMPLATE.read_text(encoding="utf-8"))
    parts = [
        _fill_keys(head_part.replace("FILE", str(file)), head),
        _fill_keys(mqtt, {"brokers": _split_list(answers["broker"])}),
        _fill_keys(kafka, {"bootstrap_servers": answers["kafka"]}),
        _fill_keys(uplink, {"name": name, "guarantee": answers["guarantee"]}),
    ]
    for pattern in _split_list(answers["topics"]):
        parts.append(_fill_keys(route, {"from": pattern, "topic": answers["topic"], "key": _key_template(pattern)}))
        route = re.sub(r"^#.*\n", "", route, flags=re.MULTILINE)  # comments only once
    return "\n".join(parts)


def _fill_keys(part: str, values: Mapping[str, Any]) -> str:
    """Replace the values of keys in a part of the template."""
    for key, value in values.items():
        row = f"{key} = {json.dumps(value, ensure_ascii=False)}\n".replace("\x7f", "\\u007f")
        part = re.sub(rf"^{key} = .*\n", row.replace("\\", r"\\"), part, count=1, flags=re.MULTILINE)
    return part


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
    """Return the first error in the text of a bridge file; None if it is valid."""
    try:
        parse(text, file)
    except ConfigError as error:
        return error.errors[0] if isinstance(error, ConfigErrors) else error
    return None


#: Returns the error of an answer; None if it is valid.
AnswerCheck: TypeAlias = Callable[[str], ConfigError | None]
#: Asks the user a question, with its default, until the answer is valid.
Prompt: TypeAlias = Callable[[str, str, AnswerCheck], str]


def collect_answers(
    options: Mapping[str, str | None], file: Path, head: Mapping[str, str], prompt: Prompt | None
) -> Answers:
    """Collect the answers: from `options`, by question, else from `prompt` if there is one, else the defaults.

    Raises:
        ConfigError: TL-C163, an option has an invalid value.
    """
    answers = dict(DEFAULTS)

    def check_answer(key: str, text: str) -> ConfigError | None:
        return first_error(draft_text(answers | {key: text}, file, head), file)

    def raise_if_wrong(location: str, error: ConfigError | None) -> None:
        if error is not None:
            raise ConfigError("TL-C163", location, error.problem, error.remedy)

    raise_if_wrong("towline init", first_error(draft_text(answers, file, head), file))
    for key, question in QUESTIONS.items():
        if (option := options[key]) is not None:
            raise_if_wrong(f"--{key}", check_answer(key, option))
            answers[key] = option
        elif prompt is not None:
            answers[key] = prompt(question, answers[key], partial(check_answer, key))
    return answers


def refuse_existing(file: Path, *, force: bool) -> None:
    """Raise TL-C162 if the file exists."""
    if not force and (file.exists() or file.is_symlink()):
        raise ConfigError("TL-C162", str(file), "the file exists", "Name another file, or replace it with --force.")


def write(text: str, file: Path, *, force: bool) -> None:
    """Write a bridge file, mode 0600, durably; `force` replaces an existing one.

    Raises:
        ConfigError: TL-C162, it exists; TL-C164, the directory is not writable. Nothing was written then.
    """
    refuse_existing(file, force=force)
    try:
        files.replace_durably(file, text)
    except OSError as error:
        raise _write_error(file, error) from error


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
