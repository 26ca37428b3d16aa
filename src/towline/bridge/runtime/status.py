"""Status of a bridge from its gateways and its last ``bridge.json``: `towline status`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from datetime import datetime
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from towline.bridge.config.model import Bridge
from towline.bridge.lines import identity, statuses
from towline.bridge.lines.account import remark_text
from towline.bridge.runtime import state
from towline.errors import ConfigError
from towline.gateway.access import ClientAccess
from towline.gateway.identity import MEMBERS_DIR
from towline.mqtt.reasons import KEEP_SESSIONS_ADVICE
from towline.text import count_text, lag_text, printable
from towline.timing import local_time
from towline.version import release

#: Exit codes of `towline status`: an account does not add up, or its guarantee was not kept; a line does not run, or
#: its account is not known.
EXIT_WRONG, EXIT_UNKNOWN = 1, 3


def collect_status(
    state_dir: Path,
    lines: list[str] | None = None,
    client_ids: Mapping[str, Mapping[str, str]] | None = None,
    *,
    ask: bool = True,
) -> dict[str, Any]:
    """Return the status of a bridge: each gateway's answer and the last ``bridge.json``; Spark is not needed.

    The lines are by default those of ``bridge.json``; their client ids those of the file (`configured_client_ids`).
    Without `ask` the gateways of a running bridge are not asked: their answers are the bridge's last, a second old.

    Raises:
        ConfigError: TL-B11, no bridge has ever run there.
    """
    saved_state = state.read_state(state_dir)
    if saved_state is None and not lines:
        remedy = "Name the bridge file, or its state_dir with --state-dir; start it with towline run."
        raise ConfigError("TL-B11", str(state_dir), "no bridge has run here", remedy)
    saved_state = saved_state or {"lines": {}}
    names = lines or list(saved_state["lines"])
    is_alive = state.is_bridge_alive(saved_state)
    running = is_alive and time.time() - float(saved_state.get("updated", 0)) < state.MAX_STATUS_AGE_S
    ids, bridge_file = client_ids or {}, saved_state.get("file") or {}
    has_changed = running and bool(bridge_file)
    has_changed = has_changed and state.file_digest(Path(bridge_file["path"])) != bridge_file["sha256"]
    make_status = partial(_line_status, running=running, ask=ask or not running)
    return {
        **{name: saved_state.get(name) for name in ("bridge", "version", "revision", "pid", "updated", "kafka_error")},
        "state_dir": str(state_dir),
        "running": running,
        "silent": is_alive and not running,
        "file": bridge_file.get("path"),
        "reload": saved_state.get("outcomes", {}).get("", {}),
        "file_changed": has_changed,
        "spark": saved_state.get("spark", "not started") if running else "not running",
        "kafka": saved_state.get("kafka", "unknown") if running else "unknown",
        "kafka_insecure": saved_state.get("kafka_insecure", []),
        "lines": {name: make_status(state_dir / name, saved_state, ids.get(name)) for name in names},
    }


def collect_bridge_status(bridge: Bridge, *, ask: bool = True) -> dict[str, Any]:
    """Return the status of the lines of a bridge file, and of removed lines whose state still exists.

    `ask` is that of `collect_status`.
    """
    client_ids = {line.name: identity.configured_client_ids(line) for line in bridge.lines}
    leftovers = []
    for line in identity.removed_lines(bridge):
        counts = {"waiting": line.waiting_messages, "sessions": line.client_ids, "elsewhere": line.remote_gateways}
        leftovers.append({"line": line.directory.name, "text": str(line.error), **counts})
    status = collect_status(bridge.state_dir, [*client_ids], client_ids, ask=ask)
    return {**status, "left": leftovers, "former_dead_letter_topics": identity.former_dead_letter_topics(bridge)}


def exit_code(status: dict[str, Any]) -> int:
    """Return the exit code of a status: 0 if every line runs or is paused, adds up and keeps its guarantee."""
    accounts = [line["account"] for line in status["lines"].values()]
    if any(account and (account["adds_up"] is False or account.get("broken")) for account in accounts):
        return EXIT_WRONG
    all_delivered = all(leftover["waiting"] == 0 and not leftover["elsewhere"] for leftover in status.get("left", ()))
    all_running = all_delivered and all(line["query"] in ("running", state.PAUSED) for line in status["lines"].values())
    all_known = all(account and not account.get("away") for account in accounts)
    return 0 if all_running and all_known else EXIT_UNKNOWN


def _line_status(
    state_dir: Path, saved_state: Mapping[str, Any], client_ids: Mapping[str, str] | None, *, running: bool, ask: bool
) -> dict[str, Any]:
    """Return the status of a line, null for unknown values; the last known account is under ``last``, with its time.

    ``members`` are those on this machine: empty for a single gateway, null for a member without an answer.
    """
    saved_line: dict[str, Any] = {"query": _UNKNOWN_LINE, **saved_state["lines"].get(state_dir.name, {})}
    view = state.LineView.from_saved(state_dir, saved_line)
    status = None if ask else _last_status(view, saved_line)
    if status is None:  # else the saved account is of the same moment, and the notes are newer
        view.notes = state.read_notes(state_dir)
        status = _ask_gateways(view, saved_line) if ask else None
    if not (running and status):
        view.behind = view.hidden = None
    member_names = dict(identity.gateway_directories(state_dir)) if client_ids is None else client_ids
    line_status: dict[str, Any] = {
        **{name: getattr(view, name) for name in ("direction", "query_error", "gateway_error", "remarks", "gateways")},
        "gateway_running": status is not None,
        "query": view.query if running else "not running",
        "paused": state.read_pause(state_dir),
        **{name: saved_line.get(name) if running and status else None for name in _RUNNING_FIELDS},
        "account": None,
        "gateway": status,
        "members": {name: statuses.gateway_status(state_dir / MEMBERS_DIR / name) for name in member_names if name},
        "left_sessions": identity.open_sessions(state_dir, client_ids),
        "drained": identity.is_drained(state_dir, client_ids),
    }
    last_status = saved_line.get("gateway")
    if status and not ask:
        line_status["account"], line_status["sentence"] = saved_line.get("account"), saved_line.get("sentence")
    elif status and (account := view.account_from(status)):
        line_status["account"], line_status["sentence"] = account.as_json(), account.sentence()
    elif last_status and (account := view.account_from(statuses.mark_stale(last_status))):
        heard_at, sentence = saved_line.get("heard") or saved_state.get("updated"), account.sum_text()
        values = {"heard": heard_at, "account": account.as_json(), "sentence": sentence, "gateway": last_status}
        line_status["last"] = values
    return line_status


def _ask_gateways(view: state.LineView, saved_line: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the status of a line's gateways, None if none answers."""
    if not view.gateways:
        return statuses.gateway_status(view.directory)
    endpoints = statuses.endpoints_of(view.gateways, ClientAccess(**view.access))
    answers = statuses.ask_each(endpoints, statuses.request_status)
    combined = statuses.combine_statuses(answers, saved_line.get("gateway") or {})
    return None if combined["state"] == "away" else combined


def _last_status(view: state.LineView, saved_line: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the status that the running bridge has of a line's gateways, None if it has none or an old one."""
    return None if view.heard is None or view.is_silent else saved_line.get("gateway")


def advice(line: Mapping[str, Any], *, running: bool) -> Iterator[str]:
    """Yield remedies for the problems of a line and for weakened guarantees."""
    gateway, last_report = line["gateway"] or {}, line.get("last") or {}
    yield from _stopped_advice(line, running=running)
    for error in dict.fromkeys((line["gateway_error"], line["query_error"])):
        if error:
            yield str(error) if running else f"before the bridge ended: {error}"
    yield from line.get("remarks", ())
    for name, status in statuses.statuses_by_gateway(gateway).items():
        if statuses.AWAY_SINCE in status:
            yield statuses.outage_problem(name, status)
        elif problem := (status.get("last_error") or {}).get("text"):
            yield str(problem)
    yield from _session_advice(line)
    account = line["account"] or last_report.get("account") or {}  # its counts only grow
    yield from (f"sources disagree: {disagreement}   [TL-K61]" for disagreement in account.get("disagreements") or ())
    for name, status in statuses.statuses_by_gateway(gateway).items():
        # Whether an unavailable gateway is throttled now is unknown; its counts only grow.
        current = {**status, "held_back": None} if statuses.AWAY_SINCE in status else status
        texts = _table_advice(_BROKER_ADVICE, current), _table_advice(_RECEIPT_ADVICE, current.get("receipts") or {})
        yield from (f"gateway {name}: {text}" if name else text for text in chain(*texts))
    yield from _table_advice(_OUTBOX_ADVICE, (gateway or last_report.get("gateway") or {}).get("outbox") or {})
    yield from _table_advice(_ACCOUNT_ADVICE, account)


def _session_advice(line: Mapping[str, Any]) -> Iterator[str]:
    for session in line.get("left_sessions", ()):
        location = f"at {', '.join(session['brokers'])}" if session["brokers"] else "at its broker"
        client_id, member = session["client_id"], session["member"]
        problem = f'the session "{client_id}" {location} was not ended, and no gateway reads its messages'
        step = f'Put member "{member}" back into the file' if member else "Use the file as it was"
        remedy = f'drain it; or drop it with its messages: mqtt = {{ abandon_session = "{client_id}" }}'
        yield f"{problem}. {step}, and {remedy}.   [TL-M51]"


def _stopped_advice(line: Mapping[str, Any], *, running: bool) -> Iterator[str]:
    if pause := line.get("paused"):
        effect = "stay in Kafka" if line["direction"] == "down" else "wait"
        yield f"paused by {pause['by'] or 'somebody'} {_time(pause['at'])}: new messages {effect} until towline resume."
    if line["query"] == _UNKNOWN_LINE:
        yield "the file has changed since it was read. Add this line with towline reload."
    elif not line["gateway_running"] and line.get("gateways"):
        yield f"none of its gateways answers: {', '.join(line['gateways'])}. Their messages wait there."
    elif line.get("members") and not line.get("gateways"):
        if not any(line["members"].values()):
            yield "no member of the line answers on this machine. Start it with towline gateway --member."
    elif not line["gateway_running"] and line.get("drained"):
        yield "it is drained: it receives nothing, and the broker has no session for it. A restart undoes this."
    elif not line["gateway_running"]:
        yield _NO_GATEWAY[line["direction"]] + (" towline run starts it again." if running else " Start towline run.")
    elif not running and line["direction"] == "down":
        yield "the outbox is delivered; no records are read from Kafka. Start towline run."
    elif not running:
        yield "messages are received and wait on disk; they are not written to Kafka. Start towline run."


#: Fields of a running line in ``bridge.json``, unknown without its bridge or gateway.
_RUNNING_FIELDS = ("rate_in", "rate_out", "lag_s", "batch_s")
#: State of the query of a line that the running bridge does not have.
_UNKNOWN_LINE = "not in the running bridge"
_NO_GATEWAY = {
    "up": "no gateway runs: nothing is received; the broker queues what it can for this client's session.",
    "down": "no gateway runs: nothing is delivered; records wait in Kafka and in the outbox.",
}
#: Marks of a line, the worst first: broken, needs attention, fine.
SEVERITY_MARKS = "✗!▸"
#: Location of records above the LSO: no Python client can look up the transaction's id (KIP-664).
_OPEN_TRANSACTION = "behind an open transaction of an unknown id, see kafka-transactions.sh find-hanging or list"
#: Advice by key of a status. {n} is a number of messages, {times} a number of events, {why} the value as text, {do}
#: the remedy of a lost session.
_ACCOUNT_ADVICE = {
    "degraded": "published with QoS 2 and accepted by the broker as QoS 1, perhaps doubled: {n}.   [TL-B58]",
    "unrouted": "matched by no route, and so not in Kafka: {n}. Add a route, or subscribe to fewer topics.",
    "dead_lettered": "in the dead-letter topic: {n}. See towline dlq show, and towline dlq replay.",
}
_OUTBOX_ADVICE = {
    "refused": "refused by the broker permanently: {n}. See towline refused show, and towline refused replay.",
    "held_back": "nothing is sent, there is no disk space for refused messages: {why}",
    "resent_after_lost_session": "resent because the broker lost the session, perhaps doubled: {n}.",
    "unsure_after_lost_session": "sent to a broker that then lost the session, perhaps lost: {n}.",
}
_BROKER_ADVICE = {
    "held_back": "receiving is throttled ({why}). Nothing is lost; free disk space, or restore Kafka.",
    "sessions_lost": "the broker lost this client's session ({times}), and all messages queued in it. {do}   [TL-M22]",
    "window_overruns": "the broker sent more than Receive Maximum allows ({times}): it ignores the window, update it.",
    "packets_too_large": "larger than max_packet_bytes: {n}. Only their topic, size and digest are stored.",
    "too_many_properties": "with more than 1,000 properties: {n}. They are stored as packets, not as messages.",
    "lower_qos": "published with a lower QoS than the guarantee needs: {n}. Before they were on disk QoS 0 could be "
    "lost, and on a line exactly_once QoS 1 could come twice.",
    "insecure": "tls.insecure: the broker's certificate is not verified.",
}
_RECEIPT_ADVICE = {
    "forged": "with marks of a publisher but without its key: {n}. They are stored, and get no receipts.",
    "foreign": "with numbers of other messages: {n}. A publisher's directory was restored from an older copy.",
}


def _table_advice(texts: Mapping[str, str], values: Mapping[str, Any]) -> Iterator[str]:
    """Yield the advice of a table for each value that is set, in the table's order."""
    for name, text in texts.items():
        if value := values.get(name):
            number = value if isinstance(value, int) else 0
            times_text = "once" if number == 1 else f"{number:,} times"
            remedy = (values.get("session_lost") or {}).get("do", KEEP_SESSIONS_ADVICE)
            yield text.format(n=count_text(number), times=times_text, why=value, do=remedy)


def render(status: dict[str, Any]) -> str:
    """Return the status as text, with local times."""
    title = f'bridge "{status["bridge"]}"   ' if status["bridge"] else "bridge   "
    last_report = f"last update {_time(status['updated'])}"
    if status["running"]:
        kafka = f"{status['kafka']}{' (insecure)' if status['kafka_insecure'] else ''}"
        text_lines = [f"{title}running (pid {status['pid']})   spark {status['spark']}   kafka {kafka}   {last_report}"]
    elif status["silent"]:
        text_lines = [f"✗ {title}there, and silent (pid {status['pid']}): is its disk full?   {last_report}"]
    else:  # the states of Spark and Kafka are unknown then
        killed_text = f", it was killed (pid {status['pid']})" if status["pid"] else ""
        text_lines = [f"{'✗ ' if killed_text else ''}{title}not running{killed_text}   {last_report}"]
    if status["version"]:
        version_text = f"{status['version']} (revision {status['revision']})"
        version_text += "" if version_text == release() else f"; this command is {release()}"
        text_lines.append(f"  version   {version_text}")
    text_lines += [f"  ! insecure: [kafka] {text}" for text in status["kafka_insecure"]]
    if status["file_changed"]:
        problem = "has changed since it was read: the running version is the old one"
        text_lines.append(f"  ! {status['file']} {problem}. Apply it with towline reload.")
    text_lines += [f"  ! {leftover['text']}" for leftover in status.get("left", ())]
    for topic in status.get("former_dead_letter_topics", ()):
        text_lines.append(f'  dead letters of former files may wait in "{topic}": towline dlq show counts them')
    if (reload := status.get("reload")) and status["running"]:
        time_text = f" {_time(reload['at'])}" if "at" in reload else ""
        text_lines.append(f"  reload    {reload['outcome']}{time_text}")
        text_lines += [f"  ! {text}" for text in reload["texts"]] if reload["outcome"] == state.REFUSED else []
    if status["kafka_error"] and status["running"]:
        text_lines.append(f"  ! {status['kafka_error']}")
    running = status["running"] or status["silent"]
    blocks = [_render_line(name, line, running=running) for name, line in status["lines"].items()]
    blocks.sort(key=lambda rows: SEVERITY_MARKS.index(rows[0][0]))
    text_lines += [row for rows in blocks for row in rows]
    # Errors, broker names and states come from the network: control characters are escaped.
    return "\n".join(map(printable, text_lines)) + "\n"


def _time(at: float | None) -> str:
    """Return a local time of day, with the date if it is another day."""
    return local_time(at).removeprefix(f"{datetime.now().astimezone():%Y-%m-%d} ") if at else "never"


def _render_line(name: str, line: dict[str, Any], *, running: bool) -> list[str]:
    last_report, members = line.get("last") or {}, line.get("members") or {}
    gateway = line["gateway"] or last_report.get("gateway") or {}
    advice_texts = [f"  ! {text}" for text in advice(line, running=running)]
    title = [f'{severity_mark(line, advice_texts)} line "{name}"', line["query"], gateway.get("guarantee")]
    text_lines = ["   ".join(filter(None, title)), *advice_texts]
    text_lines += [member_text(member, status) for member, status in members.items()]
    if line["account"] or not members:
        text_lines.append(f"  account   {account_text(line)}")
    for gateway_name, status in statuses.statuses_by_gateway(line["gateway"]).items() if line["gateway"] else ():
        text_lines += _render_gateway(gateway_name, status, line)
    if running and line["rate_in"] is not None:
        rates = f"in {line['rate_in']:,.0f}/s   out {line['rate_out']:,.0f}/s"
        text_lines.append(f"  pace      {rates}   lag {lag_text(line['lag_s'])}")
    return text_lines


def account_text(line: Mapping[str, Any]) -> str:
    """Return the account with its verdict; if it is unknown the reason, and the last known account."""
    if line["account"]:
        return str(line["sentence"])
    last_report, is_silent = line.get("last"), line["gateway"] is None and not line.get("members")
    reason = "no gateway answers" if is_silent else "its gateway does not tell it"
    last_text = f"   last update {_time(last_report['heard'])}: {last_report['sentence']}" if last_report else ""
    return f"unknown: {reason}{last_text}"


def state_text(line: Mapping[str, Any], spark: str) -> str:
    """Return the state of a line in a few words, the worst problem first."""
    query, gateway, account = line["query"], line["gateway"] or {}, line["account"] or {}
    problems = (
        query if query in ("not running", _UNKNOWN_LINE) else "",
        "" if line["gateway_running"] else "no gateway" if line["gateway_error"] else "gateway silent",
        "starting" if line["gateway"] is None else "",
        "; ".join(account.get("away", ())),
        "" if gateway.get("state") == "online" else f"broker {gateway.get('state', 'offline')}",
        f"throttled: {gateway['held_back']}" if gateway.get("held_back") else "",
        "does not add up ✗" if account.get("disagreements") else "",
        f"receiving, spark {spark}" if spark != "running" and query != state.PAUSED else "",
        "" if query in ("running", state.PAUSED) else f"receiving, query {query}",
    )
    return str(next(filter(None, problems), query))


def severity_mark(line: Mapping[str, Any], advice_texts: list[str]) -> str:
    """Return the mark of a line: one of `SEVERITY_MARKS`."""
    account = line["account"] or {}
    if account.get("adds_up") is False or account.get("broken") or line["query"] == "stopped" or line["gateway_error"]:
        return "✗"
    return "!" if advice_texts else "▸"


def member_text(name: str, status: Mapping[str, Any] | None) -> str:
    """Return the state of a member on this machine in one line; None is no answer."""
    if status is None:
        return f"  member    {name}   none answers on this machine"
    parts = [str(status.get("state")), f"{status.get('client_id')} at {status.get('broker') or 'no broker'}"]
    parts.append(f"received {status.get('received', 0):,}   waiting {status.get('waiting', 0):,}")
    if drain := status.get("drain"):
        parts.append(f"drain: {drain}")
    return f"  member    {name}   {'   '.join(parts)}"


def _number(value: float | None, digits: int = 0) -> str:
    return "unknown" if value is None else f"{value:,.{digits}f}"


def _disk_size_text(gateway: Mapping[str, Any]) -> str:
    size = gateway.get("bytes_on_disk")
    return f"{_number(None if size is None else size / 1e6, 1)} MB on disk"


def _render_gateway(name: str, gateway: Mapping[str, Any], line: Mapping[str, Any]) -> Iterator[str]:
    waiting = int(gateway.get("end", 0)) - int(gateway.get("committed", 0))
    last_text = f"   last update: {waiting:,} waiting" if "end" in gateway else ""
    is_unavailable = statuses.AWAY_SINCE in gateway
    if name:
        yield f"  gateway   {name}   {gateway['at']}{f'   away{last_text}' if is_unavailable else ''}"
    if is_unavailable:
        return
    if listen := gateway.get("listen"):
        expiry_date = str(listen.get("certificate_until", "unknown"))[:10]
        notes = f"   refused calls {listen['refused']:,}" if listen.get("refused") else ""
        notes += "" if listen.get("running", True) else "   restarting"
        yield f"  network   {listen.get('location')}   token   certificate until {expiry_date}{notes}"
    session = f"{gateway.get('state')}   {gateway.get('client_id')} at {gateway.get('broker') or 'no broker'}"
    if line["direction"] == "down":
        yield f"  session   {session}"
        yield _outbox_text(gateway.get("outbox") or {}, line["account"] or {})
        return
    ack_text = f"unacknowledged {_number(gateway.get('unacknowledged'))}   acks after {gateway.get('ack_after')}"
    yield f"  session   {session}   {ack_text}"
    offsets_text = f"offsets {_number(gateway.get('first'))} to {_number(gateway.get('end'))}"
    yield f"  journal   {_disk_size_text(gateway)}   {offsets_text}"
    if step := gateway.get("drain"):
        yield f"  drain     {step}"


def _outbox_text(outbox: Mapping[str, Any], account: Mapping[str, Any]) -> str:
    queued, in_flight = (_number(outbox.get(key)) for key in ("queued", "in_flight"))
    parts = [f"queued {queued}", f"in flight {in_flight}", _disk_size_text(outbox)]
    if incomplete := outbox.get("incomplete"):
        parts.append(f"{incomplete:,} of an incomplete batch")
    remark = remark_text(account.get("hidden") or 0, _OPEN_TRANSACTION)
    return f"  outbox    {'   '.join(parts)}   {_number(account.get('behind'))} offsets behind in Kafka{remark}"
