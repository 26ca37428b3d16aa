"""``towline dlq``: the messages that could not be mapped or written, and their way on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from towline.cli.screen import AsJson, BridgeFile, command_app, load_bridge, print_result
from towline.errors import ConfigError, did_you_mean
from towline.timing import local_time

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from towline.bridge import deadletters
    from towline.bridge.config.model import Bridge

#: Signs of other bridges that are listed, for each topic.
_MOST_NAMES = 10

app = command_app(
    name="dlq",
    help="Dead letters: the messages that could not be mapped or written, and their way on.",
    epilog="Example:  towline dlq show bridge.toml && towline dlq replay bridge.toml --dry-run",
    no_args_is_help=True,
)

Line = Annotated[str | None, typer.Option(help="Only those of this line.", show_default=False)]
Reason = Annotated[str | None, typer.Option(help="Only those with this reason.", show_default=False)]


@app.command(epilog="Example:  towline dlq show bridge.toml --reason topic_illegal --limit 5")
def show(
    file: BridgeFile = Path("bridge.toml"),
    line: Line = None,
    reason: Reason = None,
    limit: Annotated[int, typer.Option(min=0, help="List so many of them; all are counted.")] = 20,
    as_json: AsJson = False,
) -> None:
    """Count the dead letters that wait, by line and reason, and list the first ones. No payload is shown."""
    from towline.bridge import deadletters  # noqa: PLC0415

    bridge = load_bridge(file)
    counts: Counter[tuple[str, str, str]] = Counter()
    first: list[dict[str, Any]] = []
    ledgers = deadletters.shelves(bridge)
    for shelf in ledgers:
        for entry in shelf.entries(_wanted(bridge, line, reason)):
            owner = shelf.line_of(entry.dead_letter)
            counts[shelf.topic, owner.name if owner else "", entry.dead_letter.reason.value] += 1
            if len(first) < limit:
                first.append(_facts(shelf.topic, owner.name if owner else "", entry))
    waiting = [{"topic": t, "line": n, "reason": r, "letters": c} for (t, n, r), c in sorted(counts.items())]
    found = {"waiting": waiting, "first": first, **_besides(ledgers)}
    print_result(found, _shown(found), as_json=as_json)


@app.command(epilog="Example:  towline dlq replay bridge.toml --line telemetry --dry-run")
def replay(
    file: BridgeFile = Path("bridge.toml"),
    line: Line = None,
    reason: Reason = None,
    limit: Annotated[int | None, typer.Option(min=1, help="At most so many letters.", show_default=False)] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Write nothing, only tell what would be done.")] = False,
    as_json: AsJson = False,
) -> None:
    """Map the dead letters again, with the bridge file as it is now, and write the mended ones to their topics.

    Each letter is replayed at most once: records and the mark that says so are one transaction. Those that still can't
    be mapped stay. Exit code 1 when some stayed.
    """
    from towline.bridge import deadletters  # noqa: PLC0415

    bridge = load_bridge(file)
    wanted, total = _wanted(bridge, line, reason), deadletters.Replay()
    ledgers = deadletters.shelves(bridge)
    for shelf in ledgers:
        left = None if limit is None else limit - total.letters
        total.include(deadletters.replay(shelf, wanted, partial(_session, bridge), limit=left, dry_run=dry_run))
    done = {"mended": dict(total.mended), "filtered": total.filtered, "dead": dict(total.dead)}
    found = {"dry_run": dry_run, **done, **_besides(ledgers)}
    print_result(found, _told(total, found, dry_run=dry_run), as_json=as_json)
    if total.dead:
        raise typer.Exit(1)


def _wanted(bridge: Bridge, line: str | None, reason: str | None) -> deadletters.Wanted:
    from towline.bridge import deadletters  # noqa: PLC0415 - loaded when it is called
    from towline.kafka.deadletters import Reason as KnownReason  # noqa: PLC0415

    known = set(KnownReason)
    if reason is not None and reason not in known:
        raise ConfigError("TL-C21", "--reason", f'there is no reason "{reason}"', did_you_mean(reason, known))
    return deadletters.Wanted(bridge.line(line).name if line else None, reason)


def _session(bridge: Bridge) -> SparkSession:
    """The bridge's own session, when a ``where`` has to be asked."""
    from towline.bridge.runtime.session import session  # noqa: PLC0415 - Spark is loaded only where it is needed

    return session(bridge)


def _facts(topic: str, line: str, entry: deadletters.Entry) -> dict[str, Any]:
    dead_letter = entry.dead_letter
    origin = next((value for name, value in dead_letter.headers if name == "mqtt.topic"), None)
    return {
        "dead_letter_topic": topic,
        "partition": entry.partition,
        "offset": entry.offset,
        "at": entry.timestamp,
        "line": line,
        "reason": dead_letter.reason.value,
        "detail": dead_letter.detail,
        "topic": dead_letter.topic,
        "mqtt_topic": None if origin is None else origin.decode("utf-8", "replace"),
        "bytes": len(dead_letter.value or b""),
    }


def _besides(ledgers: list[deadletters.DeadLetterTopic]) -> dict[str, Any]:
    """What is no letter of a line: topics that are not there, letters that no line here has signed, and the rest."""
    nobodys = [
        {"topic": ledger.topic, "signed": name, "letters": count}
        for ledger in ledgers
        for name, count in ledger.nobodys.most_common(_MOST_NAMES)
    ]
    strange = [{"topic": ledger.topic, "records": ledger.strange} for ledger in ledgers if ledger.strange]
    return {"absent": [ledger.topic for ledger in ledgers if ledger.absent], "nobodys": nobodys, "strange": strange}


def _none(found: dict[str, Any]) -> list[str]:
    return [f"none yet: topic {topic} is not there" for topic in found["absent"]] or ["no dead letters wait"]


def _of_nobody(found: dict[str, Any]) -> Iterator[str]:
    for row in found["nobodys"]:
        yield f'{row["letters"]:>10,}  of no line of this bridge, signed "{row["signed"]}"   in {row["topic"]}'
    for row in found["strange"]:
        count = f"{row['records']:>10,}"
        yield f"{count}  records that are no letter, or pieces of one that is not whole   in {row['topic']}"


def _shown(found: dict[str, Any]) -> Iterator[str]:
    if not found["waiting"]:
        yield from _none(found)
    for row in found["waiting"]:
        yield f"{row['letters']:>10,}  {row['reason']:<18} line {row['line']}   in {row['topic']}"
    yield from _of_nobody(found)
    for row in found["first"]:
        target = f"→ {row['topic']}" if row["topic"] else "→ no topic"
        yield (
            f"{local_time(row['at'] / 1000)}  {row['partition']}/{row['offset']}  {row['reason']}  "
            f"{row['mqtt_topic'] or '(not from MQTT)'} {target}  {row['bytes']:,} B  {row['detail']}"
        )


def _told(done: deadletters.Replay, found: dict[str, Any], *, dry_run: bool) -> Iterator[str]:
    would = "would be " if dry_run else ""
    if not (done.mended or done.filtered or done.dead):
        yield from _none(found)
    for topic, count in sorted(done.mended.items()):
        yield f"{count:>10,}  {would}written to {topic}"
    if done.filtered:
        yield f"{done.filtered:>10,}  {would}settled: a where leaves them out now"
    for why, count in sorted(done.dead.items()):
        yield f"{count:>10,}  stay dead letters: {why}"
    yield from _of_nobody(found)
