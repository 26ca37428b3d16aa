"""``towline dlq``: shows dead letters and replays them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from towline.cli import screen
from towline.cli.screen import AsJson, BridgeFile, command_app, load_bridge, print_result
from towline.errors import ConfigError
from towline.kafka.deadletters import DeadLetter, Reason
from towline.timing import local_time

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from towline.bridge import deadletters
    from towline.bridge.config.model import Bridge

#: Signatures of other bridges that are listed, for each topic.
_MAX_SIGNATURES = 10
#: Name of a letter; the topic may be left out where there is one.
_NAME = "[TOPIC/]PARTITION/OFFSET"

app = command_app(
    name="dlq",
    help="Dead letters: show messages that could not be mapped or written, and replay them.",
    epilog="Example:  towline dlq show bridge.toml && towline dlq replay bridge.toml --dry-run",
    no_args_is_help=True,
)

Line = Annotated[str | None, typer.Option(help="Only those of this line.", show_default=False)]
LetterReason = Annotated[
    Reason | None, typer.Option(metavar="REASON", help="Only those with this reason.", show_default=False)
]


@app.command(epilog="Example:  towline dlq show bridge.toml --reason topic_illegal --limit 5")
def show(
    file: BridgeFile = Path("bridge.toml"),
    line: Line = None,
    reason: LetterReason = None,
    limit: Annotated[int, typer.Option(min=0, help="List so many of them; all are counted.")] = 20,
    at: Annotated[str | None, typer.Option(metavar=_NAME, help="Show this one whole.", show_default=False)] = None,
    as_json: AsJson = False,
) -> None:
    """Count the waiting dead letters by line and reason, and list the first ones without payload; or show one whole."""
    from towline.bridge import deadletters  # noqa: PLC0415

    bridge = load_bridge(file)
    line = bridge.line(line).name if line else None
    counts: Counter[tuple[str, str, str]] = Counter()
    first_letters: list[dict[str, Any]] = []
    topics = deadletters.dead_letter_topics(bridge)
    names = _letter_names(topics, [] if at is None else [at])
    for topic in topics:
        for entry in topic.waiting_letters(line, reason, names):
            owner = topic.line_of(entry.dead_letter)
            facts = _facts(topic.topic, owner.name if owner else "", entry)
            if at is not None:
                _print_letter(facts, entry.dead_letter, as_json=as_json)
                return
            counts[topic.topic, facts["line"], facts["reason"]] += 1
            if len(first_letters) < limit:
                first_letters.append(facts)
    if at is not None:
        problem = "no such letter waits: it was replayed, or there is none"
        raise ConfigError("TL-C76", f"--at {at}", problem, "Take one that towline dlq show lists.")
    waiting = [{"topic": t, "line": n, "reason": r, "letters": c} for (t, n, r), c in sorted(counts.items())]
    result = {"waiting": waiting, "first": first_letters, **_unowned_records(topics)}
    print_result(result, _show_lines(result), as_json=as_json)


@app.command(epilog="Example:  towline dlq replay bridge.toml --line telemetry --dry-run")
def replay(
    file: BridgeFile = Path("bridge.toml"),
    line: Line = None,
    reason: LetterReason = None,
    limit: Annotated[int | None, typer.Option(min=1, help="At most so many letters.", show_default=False)] = None,
    at: Annotated[
        list[str] | None, typer.Option(metavar=_NAME, help="Only this; repeatable.", show_default=False)
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Write nothing, only print what would be done.")] = False,
    as_json: AsJson = False,
) -> None:
    """Map the dead letters again with the present bridge file, and write the fixed ones to their topics.

    Each letter is replayed at most once: its records and the replay mark are one transaction. Letters that still can't
    be mapped stay. Exit code 1 when some stayed.
    """
    from towline.bridge import deadletters  # noqa: PLC0415

    bridge = load_bridge(file)
    options: dict[str, Any] = {"line": bridge.line(line).name if line else None, "reason": reason, "dry_run": dry_run}
    topics, replayed, dead, filtered = deadletters.dead_letter_topics(bridge), Counter[str](), Counter[str](), 0
    if names := _letter_names(topics, at or ()):
        limit = min(limit or len(names), len(names))
        options["names"] = names
    for topic in topics:
        remaining = None if limit is None else limit - replayed.total() - dead.total() - filtered
        for letter_result in deadletters.replay(topic, partial(_session, bridge), limit=remaining, **options):
            if letter_result is None:
                filtered += 1
            elif isinstance(letter_result, str):
                dead[letter_result] += 1
            else:
                replayed[letter_result[0]] += 1
    result = {"dry_run": dry_run, "replayed": replayed, "filtered": filtered, "dead": dead, **_unowned_records(topics)}
    result["left_out"] = len(names) - replayed.total() - dead.total() - filtered if names else 0
    print_result(result, _replay_lines(result), as_json=as_json)
    if dead:
        raise typer.Exit(1)


def _session(bridge: Bridge) -> SparkSession:
    """Return the bridge's own Spark session, needed for a ``where``."""
    from towline.bridge.runtime.session import create_session  # noqa: PLC0415 - Spark is loaded only where it is needed

    return create_session(bridge)


def _letter_names(topics: list[deadletters.DeadLetterTopic], values: Sequence[str]) -> frozenset[str] | None:
    """Return the values of ``--at`` with their topic; None if there are none."""
    prefix = f"{topics[0].topic}/" if len(topics) == 1 else ""
    return frozenset(value if value.count("/") > 1 else prefix + value for value in values) or None


def _print_letter(facts: dict[str, Any], letter: DeadLetter, *, as_json: bool) -> None:
    values = {**facts, "key": screen.payload_values(letter.key), "headers": screen.header_values(letter.headers)}
    values["payload"] = screen.payload_values(letter.value)
    print_result(values, screen.message_lines(values | {"at": local_time(facts["at"] / 1000)}), as_json=as_json)


def _facts(topic: str, line: str, entry: deadletters.StoredLetter) -> dict[str, Any]:
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


def _unowned_records(topics: list[deadletters.DeadLetterTopic]) -> dict[str, Any]:
    """Return missing topics, letters signed by no line of this bridge, and records that are no letters."""
    unowned_letters = [
        {"topic": topic.topic, "signed": name, "letters": count}
        for topic in topics
        for name, count in topic.unknown_sources.most_common(_MAX_SIGNATURES)
    ]
    invalid = [{"topic": t.topic, "records": t.unreadable_records} for t in topics if t.unreadable_records]
    missing = [topic.topic for topic in topics if topic.is_missing and not topic.is_former]
    return {"missing": missing, "unowned": unowned_letters, "invalid": invalid}


def _no_letters_lines(result: dict[str, Any]) -> list[str]:
    return [f"none yet: topic {topic} is not there" for topic in result["missing"]] or ["no dead letters wait"]


def _unowned_lines(result: dict[str, Any]) -> Iterator[str]:
    for row in result["unowned"]:
        yield f'{row["letters"]:>10,}  of no line of this bridge, signed "{row["signed"]}"   in {row["topic"]}'
    for row in result["invalid"]:
        count = f"{row['records']:>10,}"
        yield f"{count}  records that are no letter, or pieces of one that is not whole   in {row['topic']}"


def _show_lines(result: dict[str, Any]) -> Iterator[str]:
    if not result["waiting"]:
        yield from _no_letters_lines(result)
    for row in result["waiting"]:
        yield f"{row['letters']:>10,}  {row['reason']:<18} line {row['line']}   in {row['topic']}"
    yield from _unowned_lines(result)
    for row in result["first"]:
        target = f"→ {row['topic']}" if row["topic"] else "→ no topic"
        yield (
            f"{local_time(row['at'] / 1000)}  {row['dead_letter_topic']}/{row['partition']}/{row['offset']}  "
            f"{row['reason']}  {row['mqtt_topic'] or '(not from MQTT)'} {target}  {row['bytes']:,} B  {row['detail']}"
        )


def _replay_lines(result: dict[str, Any]) -> Iterator[str]:
    prefix = "would be " if result["dry_run"] else ""
    if not (result["replayed"] or result["filtered"] or result["dead"] or result["left_out"]):
        yield from _no_letters_lines(result)
    for topic, count in sorted(result["replayed"].items()):
        yield f"{count:>10,}  {prefix}written to {topic}"
    if result["filtered"]:
        yield f"{result['filtered']:>10,}  {prefix}closed: a where filters them now"
    for reason, count in sorted(result["dead"].items()):
        yield f"{count:>10,}  stay dead letters: {reason}"
    if result["left_out"]:
        yield f"{result['left_out']:>10,}  of --at left out: replayed before, not there, or excluded by another option"
    yield from _unowned_lines(result)
