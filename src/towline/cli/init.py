"""``towline init``: writes a first bridge file, from five questions or from a mosquitto.conf."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from towline.cli.screen import print_lines

if TYPE_CHECKING:
    from towline.bridge.draft.answers import AnswerCheck, ImportedSettings


def init(
    file: Annotated[Path, typer.Argument(help="The bridge file to write.", show_default=True)] = Path("bridge.toml"),
    broker: Annotated[str | None, typer.Option(help="MQTT broker, as mqtt://HOST:PORT.", show_default=False)] = None,
    topics: Annotated[
        str | None, typer.Option(help="MQTT topics: filters, commas between.", show_default=False)
    ] = None,
    kafka: Annotated[str | None, typer.Option(help="Kafka bootstrap servers.", show_default=False)] = None,
    topic: Annotated[str | None, typer.Option(help="Kafka topic.", show_default=False)] = None,
    guarantee: Annotated[str | None, typer.Option(help="What is promised.", show_default=False)] = None,
    name: Annotated[
        str | None, typer.Option(help="Of the bridge; begins its client ids.", show_default="this machine's")
    ] = None,
    state_dir: Annotated[str, typer.Option(help="Directory of the journals; beside the file by default.")] = "state",
    source: Annotated[
        Path | None,
        typer.Option("--from", help="Take the broker's settings from a mosquitto.conf.", show_default=False),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
    examples: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write out examples and unit files instead.", show_default=False)
    ] = None,
) -> None:
    """Ask five questions and write a commented bridge file, which runs as it is.

    Without a terminal nothing is asked: what no option says is the default. No password is written into the file.

    Example:  towline init      or:  towline init --from /etc/mosquitto/mosquitto.conf
    """
    from towline.bridge.draft import answers as draft  # noqa: PLC0415 - loaded when it is called
    from towline.mosquitto_conf import read_conf  # noqa: PLC0415

    if examples is not None:
        print_lines(f"wrote {path}" for path in draft.write_examples(examples, force=force))
        return
    draft.refuse_existing(file, force=force)
    conf = None if source is None else draft.settings_from_conf(read_conf(source), file)
    head = {"name": draft.default_name() if name is None else name, "state_dir": state_dir}
    given = {"broker": broker, "topics": topics, "kafka": kafka, "topic": topic, "guarantee": guarantee}
    ask = _prompt if sys.stdin.isatty() and sys.stdout.isatty() else None
    text = draft.draft_text(draft.collect_answers(given, file, head, ask, conf), file, head, conf)
    written_files = draft.write(text, file, conf.secrets if conf else {}, force=force)
    print_lines(_next_steps(conf, file, written_files, source))


def _prompt(question: str, default: str, check_answer: AnswerCheck) -> str:
    def parse_answer(text: str) -> str:
        if (error := check_answer(text)) is not None:
            raise typer.BadParameter(f"{error.problem}. {error.remedy}")
        return text

    return str(typer.prompt(question, default=default, value_proc=parse_answer))


def _next_steps(conf: ImportedSettings | None, file: Path, files: list[Path], source: Path | None) -> Iterator[str]:
    yield f"wrote {' and '.join(map(str, files))}, mode 0600"
    yield from (f"  {note}" for note in (conf.notes if conf else ()))
    conf_option = "" if source is None else f" --mosquitto-conf {source}"
    yield f"Next: towline doctor {file}{conf_option}   what broker, Kafka and this machine can keep"
    yield f"      towline run {file}      until Ctrl-C; what waits stays on disk"
