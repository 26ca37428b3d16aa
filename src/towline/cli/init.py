"""``towline init``: writes a first bridge file, from five questions."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from towline.cli.screen import print_lines

if TYPE_CHECKING:
    from towline.bridge.draft.answers import AnswerCheck


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
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
    examples: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write out examples and unit files instead.", show_default=False)
    ] = None,
) -> None:
    """Ask five questions and write a commented bridge file, which runs as it is.

    Without a terminal nothing is asked: what no option says is the default. No password is written into the file.

    Example:  towline init      or:  towline init --topics "plant/{machine}/#" --guarantee exactly_once
    """
    from towline.bridge.draft import answers as draft  # noqa: PLC0415 - loaded when it is called

    if examples is not None:
        print_lines(f"wrote {path}" for path in draft.write_examples(examples, force=force))
        return
    draft.refuse_existing(file, force=force)
    head = {"name": draft.default_name() if name is None else name, "state_dir": state_dir}
    given = {"broker": broker, "topics": topics, "kafka": kafka, "topic": topic, "guarantee": guarantee}
    ask = _prompt if sys.stdin.isatty() and sys.stdout.isatty() else None
    draft.write(draft.draft_text(draft.collect_answers(given, file, head, ask), file, head), file, force=force)
    print_lines(
        [
            f"wrote {file}, mode 0600",
            f"Next: towline doctor {file}   what broker, Kafka and this machine can keep",
            f"      towline run {file}      until Ctrl-C; what waits stays on disk",
        ]
    )


def _prompt(question: str, default: str, check_answer: AnswerCheck) -> str:
    def parse_answer(text: str) -> str:
        if (error := check_answer(text)) is not None:
            raise typer.BadParameter(f"{error.problem}. {error.remedy}")
        return text

    return str(typer.prompt(question, default=default, value_proc=parse_answer))
