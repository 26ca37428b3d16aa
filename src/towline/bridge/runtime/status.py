"""`towline status`: the account of a bridge from outside, from its gateways and its last ``bridge.json``."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from datetime import datetime
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.request import ProxyHandler, build_opener

from towline import files
from towline.bridge.config.model import Bridge
from towline.bridge.lines.account import remark
from towline.bridge.lines.evidence import (
    AWAY,
    away_trouble,
    combined,
    each,
    gateway_status,
    parts_of,
    places_of,
    stale,
    status_of,
)
from towline.bridge.lines.identity import (
    former_topics,
    is_drained,
    left_lines,
    left_sessions,
    places_in,
    wanted_clients,
)
from towline.bridge.runtime.screen import lag_text
from towline.bridge.runtime.state import (
    PAUSED,
    REFUSED,
    SILENT_S,
    LineView,
    digest_of,
    is_there,
    paused,
    read_state,
)
from towline.errors import ConfigError, GatewayError
from towline.gateway.access import Access
from towline.gateway.identity import MEMBERS
from towline.mqtt.reasons import KEEP_SESSIONS
from towline.text import counted, printable
from towline.timing import local_time
from towline.version import release

#: Exit codes of `towline status`: an account does not add up, or its guarantee was not kept; a line does not run, or
#: its account is not known.
WRONG, NOT_KNOWN = 1, 3


def collect(
    state_dir: Path,
    lines: list[str] | None = None,
    clients: Mapping[str, Mapping[str, str]] | None = None,
) -> dict[str, Any]:
    """Ask every gateway and read what the bridge wrote last, by default of the lines that it has; Spark is not needed.

    `clients` are those of each line, as the file says (`wanted_clients`).

    Raises:
        ConfigError: TL-B11 if no bridge has ever run there.
    """
    state = read_state(state_dir)
    if state is None and not lines:
        do = "Name the bridge file, or its state_dir with --state-dir; start it with towline run."
        raise ConfigError("TL-B11", str(state_dir), "no bridge has run here", do)
    state = state or {"lines": {}}
    names = lines or list(state["lines"])
    there = is_there(state)
    running = there and time.time() - float(state.get("updated", 0)) < SILENT_S
    return {
        **{name: state.get(name) for name in ("bridge", "version", "revision", "pid", "updated", "kafka_error")},
        "state_dir": str(state_dir),
        "running": running,
        "silent": there and not running,
        "file": (read := state.get("file") or {}).get("path"),
        "reload": state.get("outcomes", {}).get("", {}),
        "file_changed": running and bool(read) and digest_of(Path(read["path"])) != read["sha256"],
        "spark": state.get("spark", "not started") if running else "not running",
        "kafka": state.get("kafka", "unknown") if running else "unknown",
        "kafka_insecure": state.get("kafka_insecure", []),
        "lines": {name: _line(state_dir / name, state, (clients or {}).get(name), running=running) for name in names},
    }


def collect_bridge(bridge: Bridge) -> dict[str, Any]:
    """`collect` the lines of a bridge file, and what files before it have left behind."""
    clients = {line.name: wanted_clients(line) for line in bridge.lines}
    parts = ("waiting", "sessions", "elsewhere")
    left = [
        {"line": one.directory.name, "text": str(one.error)} | {name: getattr(one, name) for name in parts}
        for one in left_lines(bridge)
    ]
    status = collect(bridge.state_dir, [*clients], clients)
    return {**status, "left": left, "former_dead_letter_topics": former_topics(bridge)}


def collect_from(url: str) -> dict[str, Any]:
    """What a bridge's monitor, or a proxy before it, says, as `collect_bridge` has it, and ``monitor``: the URL.

    Raises:
        ConfigError: TL-C205, it is no such URL.
        GatewayError: TL-B75, no bridge of this version answers there within 10 s.
    """
    if not url.startswith(("http://", "https://")):
        raise ConfigError("TL-C205", "--url", f'"{url}" is no URL of a monitor', 'Write "http://HOST:PORT".')
    try:
        with build_opener(ProxyHandler({})).open(f"{url.rstrip('/')}/lines", timeout=10) as answer:
            status: dict[str, Any] = {**json.loads(answer.read(32 << 20)), "monitor": url}
        render(status), code_of(status)  # whoever has that port may answer anything, of any length
    except (OSError, HTTPException, ValueError, LookupError, TypeError, AttributeError) as error:
        reason = getattr(error, "reason", error if isinstance(error, OSError) else "what answers is something else")
        why = files.why(reason) if isinstance(reason, OSError) else str(reason)
        do = "Is this [monitor] listen, or --metrics, of a bridge that runs, and of this version?"
        raise GatewayError("TL-B75", url, f"no bridge's monitor answers ({why})", do) from None
    return status


def code_of(status: dict[str, Any]) -> int:
    """The exit code for what `collect` found: 0 if every line runs or is paused, adds up and keeps its promise."""
    accounts = [line["account"] for line in status["lines"].values()]
    if any(account and (account["adds_up"] is False or account.get("broken")) for account in accounts):
        return WRONG
    if any(line.get("markers", {}).get("agrees") is False for line in status["lines"].values()):
        return WRONG
    carried = all(one["waiting"] == 0 and not one["elsewhere"] for one in status.get("left", ()))
    runs = carried and all(line["query"] in ("running", PAUSED) for line in status["lines"].values())
    known = all(account and not account.get("away") for account in accounts)
    return 0 if runs and known else NOT_KNOWN


def _line(
    state_dir: Path, state: Mapping[str, Any], wanted: Mapping[str, str] | None, *, running: bool
) -> dict[str, Any]:
    """What is known of a line now, null for what is not; what was known last stands under ``last``, with its time.

    ``members`` are on this machine; none for one gateway, null where one does not answer.
    """
    saved: dict[str, Any] = {"query": _UNKNOWN_LINE, **state["lines"].get(state_dir.name, {})}
    view = LineView.read(state_dir, saved)
    if view.gateways:
        places = places_of(view.gateways, Access(**view.access))
        together = combined(each(places, status_of), saved.get("gateway") or {})
        status = None if together["state"] == "away" else together
    else:
        status = gateway_status(state_dir)
    if not (running and status):
        view.behind = view.hidden = None
    names = dict(places_in(state_dir)) if wanted is None else wanted
    now: dict[str, Any] = {
        **{name: getattr(view, name) for name in ("direction", "query_error", "gateway_error", "remarks", "gateways")},
        "gateway_running": status is not None,
        "query": view.query if running else "not running",
        "paused": paused(state_dir),
        **{name: saved.get(name) if running and status else None for name in ("rate_in", "rate_out", "lag_s")},
        "fallback": view.notes.counts["fallback"] if view.notes else 0,
        "account": None,
        "gateway": status,
        "members": {name: gateway_status(state_dir / MEMBERS / name) for name in names if name},
        "left_sessions": left_sessions(state_dir, wanted),
        "drained": is_drained(state_dir, wanted),
    }
    if status and (account := view.account_by(status)):
        now["account"], now["sentence"] = account.as_json(), account.sentence()
    elif (last := saved.get("gateway")) and (account := view.account_by(stale(last))):
        heard = saved.get("heard") or state.get("updated")
        now["last"] = {"heard": heard, "account": account.as_json(), "sentence": account.sum(), "gateway": last}
    return now


def advice(line: dict[str, Any], *, running: bool) -> Iterator[str]:
    """What to do about what is wrong with a line, or what weakens its promise."""
    gateway, last = line["gateway"] or {}, line.get("last") or {}
    yield from _stopped(line, running=running)
    for error in dict.fromkeys((line["gateway_error"], line["query_error"])):
        if error:
            yield str(error) if running else f"before the bridge ended: {error}"
    yield from line.get("remarks", ())
    for name, part in parts_of(gateway).items():
        if AWAY in part:
            yield away_trouble(name, part)
        elif trouble := (part.get("last_error") or {}).get("text"):
            yield str(trouble)
    yield from _told_of_sharing(line)
    account = line["account"] or last.get("account") or {}  # these only grow
    yield from (f"sources disagree: {each}   [TL-K61]" for each in account.get("disagreements") or ())
    yield from _told_of(_BROKER, gateway)
    yield from _told_of(_OUTBOX, (gateway or last.get("gateway") or {}).get("outbox") or {})
    yield from _told_of(_RECEIPTS, gateway.get("receipts") or {})
    yield from _told_of(_ACCOUNT, {**account, "fallback": line["fallback"]})


def _told_of_sharing(line: Mapping[str, Any]) -> Iterator[str]:
    """What of a line's members, and of sessions that it left, a person has to know."""
    statuses = [line["gateway"] or {}, *(status or {} for status in line.get("members", {}).values())]
    if any((status.get("share") or {}).get("way") == "subscription" for status in statuses):
        yield 'the order of a device\'s messages is not kept: share = "subscription".'
    for one in line.get("left_sessions", ()):
        where = f"at {', '.join(one['brokers'])}" if one["brokers"] else "at its broker"
        what = f'the session "{one["client_id"]}" {where} was not ended, and nobody fetches what comes to it'
        if one["member"]:
            way = f'Put member "{one["member"]}" back into the file and drain it; or give it up with what it holds'
        else:
            way = "Drain it with the file as it was; or give it up with what it holds"
        yield f'{what}. {way}: mqtt = {{ abandon_session = "{one["client_id"]}" }}.   [TL-M51]'


def _stopped(line: dict[str, Any], *, running: bool) -> Iterator[str]:
    """What of a line does not run, and what to do."""
    if pause := line.get("paused"):
        where = "stays in Kafka" if line["direction"] == "down" else "waits"
        yield f"paused by {pause['by'] or 'somebody'} {_moment(pause['at'])}: what comes {where} until towline resume."
    if line["query"] == _UNKNOWN_LINE:
        yield "the file has changed since it was read. towline reload takes this line in."
    elif not line["gateway_running"] and line.get("gateways"):
        yield f"none of its gateways answers: {', '.join(line['gateways'])}. What they took in waits there."
    elif line.get("members") and not line.get("gateways"):
        if not any(line["members"].values()):
            yield "no member of the line answers on this machine. Start it with towline gateway --member."
    elif not line["gateway_running"] and line.get("drained"):
        yield "it is drained: it takes nothing, and the broker has no session for it. Started again, it takes part."
    elif not line["gateway_running"]:
        yield _NO_GATEWAY[line["direction"]] + (" towline run starts it again." if running else " Start towline run.")
    elif not running and line["direction"] == "down":
        yield "what is in the outbox is delivered; nothing more comes from Kafka. Start towline run."
    elif not running:
        yield "messages are received and wait on disk; nothing carries them to Kafka. Start towline run."


#: The query of a line that the running bridge does not have.
_UNKNOWN_LINE = "not in the running bridge"
_NO_GATEWAY = {
    "up": "no gateway runs: nothing is received; the broker keeps what it can for this client's session.",
    "down": "no gateway runs: nothing is delivered; what is in Kafka and in the outbox waits.",
}
#: In front of a line, the worst first: something is broken, there is something to look at, all is well.
_MARKS = "✗!▸"
#: Where records of Kafka's are that nobody gets: no client of Python's can ask whose transaction it is (KIP-664).
_HIDDEN = "behind an open transaction of an unknown id, which kafka-transactions.sh find-hanging or list may name"
#: What is counted or said → what it means for the operator. {n} is a number of messages, {times} how often, {why} what
#: was said.
_ACCOUNT = {
    "degraded": "published with QoS 2 and taken by the broker as QoS 1, so perhaps doubled: {n}.   [TL-B58]",
    "unrouted": "taken by no route, and so not in Kafka: {n}. Add a route, or subscribe to less.",
    "dead_lettered": "in the dead-letter topic: {n}. towline dlq show tells why, towline dlq replay carries them on.",
    "fallback": "sent to a fallback topic, because their own was not legal or not allowed: {n}.",
}
_OUTBOX = {
    "refused": "refused by the broker for good: {n}. See towline refused show, and towline refused replay.",
    "held_back": "nothing is sent, there is no room for what the broker refuses: {why}",
    "resent_after_lost_session": "sent again because the broker lost the session, so perhaps doubled: {n}.",
    "unsure_after_lost_session": "handed over to a broker that then lost the session, so perhaps lost: {n}.",
}
_BROKER = {
    "held_back": "the broker is held back ({why}). Nothing is lost; make room, or bring Kafka back.",
    "sessions_lost": "the broker lost this client's session ({times}), and every message that only the session held. "
    "{do}   [TL-M22]",
    "window_overruns": "the broker sent more than Receive Maximum allows ({times}): its window is broken, update it.",
    "packets_too_large": "larger than max_packet_bytes: {n}. Their payload is not kept, only what they were.",
    "too_many_properties": "with more than 1,000 properties: {n}. They are kept as packets, not as messages.",
    "lower_qos": "published with a lower QoS than the promise needs: {n}. Before they were on disk QoS 0 could be "
    "lost, and on a line exactly_once QoS 1 could come twice.",
    "insecure": "tls.insecure: the broker's certificate is not verified.",
}
_RECEIPTS = {
    "forged": "with marks of a publisher but without its key: {n}. They are stored, and get no receipts.",
    "foreign": "with numbers of other messages: {n}. A publisher's directory was restored from an older copy.",
}


def _told_of(words: Mapping[str, str], facts: Mapping[str, Any]) -> Iterator[str]:
    """What is there of a table's entries, in its order."""
    for name, text in words.items():
        if value := facts.get(name):
            number = value if isinstance(value, int) else 0
            times = "once" if number == 1 else f"{number:,} times"
            do = (facts.get("session_lost") or {}).get("do", KEEP_SESSIONS)
            yield text.format(n=counted(number), times=times, why=value, do=do)


def render(status: dict[str, Any]) -> str:
    """The status as text; times are local."""
    head = f'bridge "{status["bridge"]}"   ' if status["bridge"] else "bridge   "
    last = f"last word {_moment(status['updated'])}"
    if status["running"]:
        kafka = f"{status['kafka']}{' (insecure)' if status['kafka_insecure'] else ''}"
        out = [f"{head}running (pid {status['pid']})   spark {status['spark']}   kafka {kafka}   {last}"]
    elif status["silent"]:
        out = [f"✗ {head}there, and silent (pid {status['pid']}): is its disk full?   {last}"]
    else:  # what Spark and Kafka do then is not known
        killed = f", it was killed (pid {status['pid']})" if status["pid"] else ""
        out = [f"{'✗ ' if killed else ''}{head}not running{killed}   {last}"]
    if status["version"]:
        ran = f"{status['version']} (revision {status['revision']})"
        out.append(f"  version   {ran}{'' if ran == release() else f'; this command is {release()}'}")
    out += [f"  as its monitor says: {status['monitor']}"] if "monitor" in status else []
    out += [f"  ! insecure: [kafka] {text}" for text in status["kafka_insecure"]]
    if status["file_changed"]:
        what = "has changed since it was read: what runs is what it said then"
        out.append(f"  ! {status['file']} {what}. towline reload takes it up.")
    out += [f"  ! {one['text']}" for one in status.get("left", ())]
    for topic in status.get("former_dead_letter_topics", ()):
        out.append(f'  dead letters of former files may wait in "{topic}": towline dlq show counts them')
    if (reload := status.get("reload")) and status["running"]:
        when = f" {_moment(reload['at'])}" if "at" in reload else ""
        out.append(f"  reload    {reload['outcome']}{when}")
        out += [f"  ! {text}" for text in reload["texts"]] if reload["outcome"] == REFUSED else []
    if status["kafka_error"] and status["running"]:
        out.append(f"  ! {status['kafka_error']}")
    running = status["running"] or status["silent"]
    lines = [_render_line(name, line, running=running) for name, line in status["lines"].items()]
    out += [row for rows in sorted(lines, key=lambda rows: _MARKS.index(rows[0][0])) for row in rows]
    # Errors, broker names and states came over the network; each line stays one line.
    return "\n".join(map(printable, out)) + "\n"


def _moment(at: float | None) -> str:
    """A time of day, with the date if that is another one."""
    return local_time(at).removeprefix(f"{datetime.now().astimezone():%Y-%m-%d} ") if at else "never"


def _render_line(name: str, line: dict[str, Any], *, running: bool) -> list[str]:
    """A line, with what is wrong first."""
    last, members = line.get("last") or {}, line.get("members") or {}
    gateway = line["gateway"] or last.get("gateway") or {}
    told = [f"  ! {text}" for text in advice(line, running=running)]
    head = [f'{_mark(line, told)} line "{name}"', line["query"], gateway.get("guarantee")]
    out = ["   ".join(filter(None, head)), *told]
    out += [_render_member(each, status) for each, status in members.items()]
    if line["account"]:
        out.append(f"  account   {line['sentence']}")
    elif not members:
        why = "its gateway does not tell it" if line["gateway_running"] else "no gateway answers"
        word = f"   last word {_moment(last['heard'])}: {last['sentence']}" if last else ""
        out.append(f"  account   unknown: {why}{word}")
    if markers := line.get("markers"):
        out.append(f"  markers   {_markers(markers)}")
    for place, part in parts_of(line["gateway"]).items() if line["gateway"] else ():
        out += _render_gateway(place, part, line)
    if running and line["rate_in"] is not None:
        out.append(
            f"  pace      in {line['rate_in']:,.0f}/s   out {line['rate_out']:,.0f}/s   lag {lag_text(line['lag_s'])}"
        )
    return out


def _markers(markers: Mapping[str, Any]) -> str:
    """What Kafka's markers of a line say, against what its sink has noted."""
    keys = {"rows": "rows", "dead letters": "dead_lettered"}
    said = [f"{what} {markers[key]:,}" for what, key in keys.items() if markers.get(key) is not None]
    sign = {True: "as the sink has noted ✓", False: "✗", None: "not compared"}[markers["agrees"]]
    return "   ".join((*said, f"{sign}{': ' if markers['why'] else ''}{markers['why']}"))


def _mark(line: Mapping[str, Any], told: list[str]) -> str:
    account = line["account"] or {}
    if account.get("adds_up") is False or account.get("broken") or line["query"] == "stopped" or line["gateway_error"]:
        return "✗"
    return "!" if told else "▸"


def _render_member(name: str, status: Mapping[str, Any] | None) -> str:
    """One line about a member."""
    if status is None:
        return f"  member    {name}   none answers on this machine"
    parts = [str(status.get("state")), f"{status.get('client_id')} at {status.get('broker') or 'no broker'}"]
    parts.append(f"received {status.get('received', 0):,}   waiting {status.get('waiting', 0):,}")
    if drain := status.get("drain"):
        parts.append(f"drain: {drain}")
    return f"  member    {name}   {'   '.join(parts)}"


def _told(value: float | None, digits: int = 0) -> str:
    return "unknown" if value is None else f"{value:,.{digits}f}"


def _megabytes(gateway: Mapping[str, Any]) -> str:
    size = gateway.get("bytes_on_disk")
    return f"{_told(None if size is None else size / 1e6, 1)} MB on disk"


def _render_gateway(name: str, gateway: Mapping[str, Any], line: Mapping[str, Any]) -> Iterator[str]:
    """A gateway, one of several with its name: what it has said last, if it ever did."""
    waiting = int(gateway.get("end", 0)) - int(gateway.get("committed", 0))
    last = f"   last word: {waiting:,} waiting" if "end" in gateway else ""
    away = AWAY in gateway
    if name:
        yield f"  gateway   {name}   {gateway['at']}{f'   away{last}' if away else ''}"
    if away:
        return
    if listen := gateway.get("listen"):
        until = str(listen.get("certificate_until", "unknown"))[:10]
        refused = f"   refused calls {listen['refused']:,}" if listen.get("refused") else ""
        state = "" if listen.get("running", True) else "   being started again"
        yield f"  network   {listen.get('location')}   token   certificate until {until}{refused}{state}"
    session = f"{gateway.get('state')}   {gateway.get('client_id')} at {gateway.get('broker') or 'no broker'}"
    if line["direction"] == "down":
        yield f"  session   {session}"
        yield _outbox(gateway.get("outbox") or {}, line["account"] or {})
        return
    flight = f"unacknowledged {_told(gateway.get('unacknowledged'))}   acks after {gateway.get('ack_after')}"
    yield f"  session   {session}   {flight}"
    offsets = f"offsets {_told(gateway.get('first'))} to {_told(gateway.get('end'))}"
    yield f"  journal   {_megabytes(gateway)}   {offsets}"
    if step := gateway.get("drain"):
        yield f"  drain     {step}"


def _outbox(outbox: Mapping[str, Any], account: Mapping[str, Any]) -> str:
    parts = [f"queued {_told(outbox.get('queued'))}", f"in flight {_told(outbox.get('in_flight'))}", _megabytes(outbox)]
    if incomplete := outbox.get("incomplete"):
        parts.append(f"{incomplete:,} of a batch that is not whole")
    behind = f"{_told(account.get('behind'))} offsets behind in Kafka{remark((account.get('hidden') or 0, _HIDDEN))}"
    return f"  outbox    {'   '.join(parts)}   {behind}"
