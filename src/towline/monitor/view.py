"""What the page shows of a bridge: a table of its lines, and all that status knows of one.

It comes from `towline.bridge.runtime.status`; nothing is counted here. What is not known is null.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, TypeAlias

from towline.bridge.config.document import Document
from towline.bridge.config.model import Bridge, Uplink
from towline.bridge.config.tables import KafkaPattern, Sql
from towline.bridge.runtime.status import advice, severity_mark, state_text
from towline.guarantee import policy
from towline.text import count_text, printable

#: Levels of a state, the worst first: a promise is in danger, something needs attention, not known, as it should be.
BAD, WARN, UNKNOWN, GOOD = "bad", "warn", "unknown", "good"
_LEVELS: Final = (BAD, WARN, UNKNOWN, GOOD)
_MARK_LEVELS: Final = {"✗": BAD, "!": WARN, "▸": GOOD}
#: Name of a line → source and target of each of its routes, as in the file.
RouteTexts: TypeAlias = Mapping[str, list[tuple[str, str]]]


def overview(status: Mapping[str, Any], routes: RouteTexts) -> dict[str, Any]:
    """Return the state of a bridge, and a row for each of its lines, the worst first."""
    rows = [_row(name, line, status, routes) for name, line in status["lines"].items()]
    rows.sort(key=lambda row: _LEVELS.index(row["level"]))
    level, verdict = _verdict(status, rows)
    names = ("bridge", "version", "revision", "updated", "spark", "kafka", "running", "state_dir")
    values = {name: status.get(name) for name in names}
    return {**values, "level": level, "verdict": verdict, "notes": [*map(printable, _notes(status))], "lines": rows}


def detail(bridge: Bridge, status: Mapping[str, Any], name: str, routes: RouteTexts) -> dict[str, Any] | None:
    """Return the row of a line with its status, its advice and what its guarantee says; None if there is none."""
    if (line := status["lines"].get(name)) is None:
        return None
    row = _row(name, line, status, routes)
    rules = policy(row["guarantee"]) if row["guarantee"] else None
    return {
        **row,
        "promise": rules and {"lost": rules.loss_text, "doubled": rules.duplicates_text},
        "routes": routes.get(name, []),
        "advice": [*map(printable, advice(line, running=status["running"]))],
        "status": line,
        "kafka": status["kafka"],
        "spark": status["spark"],
        "broker_queue_messages": bridge.monitor.broker_queue_messages,
    }


def _row(name: str, line: Mapping[str, Any], status: Mapping[str, Any], routes: RouteTexts) -> dict[str, Any]:
    account, gateway = line["account"], line["gateway"] or (line.get("last") or {}).get("gateway") or {}
    level = _MARK_LEVELS[severity_mark(line, [*advice(line, running=status["running"])])]
    return {
        "name": name,
        "direction": line["direction"],
        "guarantee": str(gateway.get("guarantee") or ""),
        "topics": [f"{source} → {target}" for source, target in routes.get(name, [])[:1]],
        "level": level if account or level == BAD else UNKNOWN,
        "state": printable(state_text(line, status["spark"])),
        "paused": line["paused"],
        "waiting": account and account["waiting"] + account.get("arriving", 0),
        "adds_up": account and account["adds_up"],
        "dead_lettered": account and account.get("dead_lettered"),
        **{key: line[key] for key in ("rate_in", "rate_out", "lag_s", "batch_s")},
    }


def _verdict(status: Mapping[str, Any], rows: list[dict[str, Any]]) -> tuple[str, str]:
    """Return the level and one sentence on the whole bridge."""
    wrong = [row["name"] for row in rows if row["adds_up"] is False]
    bad, warned = (sum(row["level"] == level for row in rows) for level in (BAD, WARN))
    if wrong:
        return BAD, f"The account of {', '.join(wrong[:3])} does not add up"
    if bad:
        return BAD, f"{count_text(bad, 'line')} need{'s' if bad == 1 else ''} help"
    if not status["running"]:
        return WARN, "No bridge runs; gateways that run go on receiving, and messages wait on disk"
    if any(row["adds_up"] is None for row in rows):
        return UNKNOWN, "Not every account is known"
    if warned:
        text = f"{count_text(warned, 'line')} need{'s' if warned == 1 else ''} attention"
        return WARN, f"Every message is accounted for; {text}"
    return GOOD, "Every message is accounted for"


def _notes(status: Mapping[str, Any]) -> Iterator[str]:
    """Yield remarks on the whole bridge."""
    if status["silent"]:
        yield f"The bridge is there and silent (pid {status['pid']}): is its disk full?"
    if status["file_changed"]:
        yield f"{status['file']} has changed since it was read. Apply it with towline reload."
    if status["kafka_error"] and status["running"]:
        yield str(status["kafka_error"])
    yield from (f"insecure: [kafka] {text}" for text in status["kafka_insecure"])
    yield from (str(leftover["text"]) for leftover in status.get("left", ()))


def route_texts(bridge: Bridge) -> RouteTexts:
    """Return source and target of each line's routes as in its file, with references to the environment [I12]."""
    written = Document.reread(bridge.file, bridge.file).restore_references
    texts: dict[str, list[tuple[str, str]]] = {}
    for line in bridge.lines:
        if isinstance(line, Uplink):
            texts[line.name] = [(written(r.from_, "from"), written(r.topic, "topic")) for r in line.route]
        else:
            names = [line.from_.pattern] if isinstance(line.from_, KafkaPattern) else line.topics
            topic = "by SQL" if isinstance(line.topic, Sql) else written(line.topic, "topic")
            texts[line.name] = [(written(name, "from", "pattern"), topic) for name in names]
    return texts
