"""``towline init``: a first bridge file, from five questions or from a Mosquitto's configuration."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from towline.cli.screen import print_lines

if TYPE_CHECKING:
    from towline.bridge.draft.answers import Judge, Known


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
    state_dir: Annotated[str, typer.Option(help="Where journals lie; beside the file by default.")] = "state",
    source: Annotated[
        Path | None, typer.Option("--from", help="Take what a mosquitto.conf says of the broker.", show_default=False)
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
    from towline.mosquitto_conf import read  # noqa: PLC0415

    if examples is not None:
        print_lines(f"wrote {path}" for path in draft.write_examples(examples, force=force))
        return
    draft.refuse_present(file, force=force)
    known = None if source is None else draft.known_of(read(source), file)
    head = {"name": draft.default_name() if name is None else name, "state_dir": state_dir}
    said = {"broker": broker, "topics": topics, "kafka": kafka, "topic": topic, "guarantee": guarantee}
    ask = _prompt if sys.stdin.isatty() and sys.stdout.isatty() else None
    text = draft.draft_of(draft.answered(said, file, head, ask, known), file, head, known)
    written = draft.write(text, file, known.secrets if known else {}, force=force)
    print_lines(_told(known, file, written, source))


def _prompt(words: str, default: str, judge: Judge) -> str:
    def judged(text: str) -> str:
        if (mistake := judge(text)) is not None:
            raise typer.BadParameter(f"{mistake.what}. {mistake.do}")
        return text

    return str(typer.prompt(words, default=default, value_proc=judged))


def _told(known: Known | None, file: Path, written: list[Path], conf: Path | None) -> Iterator[str]:
    yield f"wrote {' and '.join(map(str, written))}, mode 0600"
    yield from (f"  {note}" for note in (known.notes if known else ()))
    measured = "" if conf is None else f" --mosquitto-conf {conf}"
    yield f"Next: towline doctor {file}{measured}   what broker, Kafka and this machine can keep"
    yield f"      towline run {file}      until Ctrl-C; what waits stays on disk"
