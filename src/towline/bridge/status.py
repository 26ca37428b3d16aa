"""`towline status`: the account of a bridge from outside, from its gateways and its last ``bridge.json``."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from towline.bridge.board import account_of, counts_of, read_board
from towline.errors import ConfigError, GatewayError
from towline.gateway.client import discover

__all__ = ["advice", "collect", "render"]

#: A bridge that has not written for this long, in seconds, is called silent.
SILENT_S = 10.0


def collect(state_dir: Path, lines: list[str] | None = None) -> dict[str, Any]:
    """Ask every gateway and read what the bridge wrote last; Spark is not needed.

    Args:
        state_dir: Of the bridge.
        lines: Names of the lines; from ``bridge.json`` when not given.

    Raises:
        ConfigError: TL-B11 if no bridge has ever run there.
    """
    board = read_board(state_dir)
    if board is None and not lines:
        do = "Name the bridge file, or its state_dir with --state-dir; start it with towline run."
        raise ConfigError("TL-B11", str(state_dir), "no bridge has run here", do)
    board = board or {"lines": {}}
    names = lines or list(board["lines"])
    updated = board.get("updated")
    return {
        "bridge": board.get("bridge"),
        "state_dir": str(state_dir),
        "running": _alive(board),
        "pid": board.get("pid"),
        "updated": updated,
        "spark": board.get("spark", "not started"),
        "kafka": board.get("kafka", "unknown"),
        "kafka_error": board.get("kafka_error"),
        "lines": {name: _line(state_dir / name, board["lines"].get(name, {})) for name in names},
    }


def _alive(board: dict[str, Any]) -> bool:
    pid = board.get("pid")
    return bool(pid) and Path(f"/proc/{pid}").exists() and time.time() - float(board.get("updated", 0)) < SILENT_S


def _line(state_dir: Path, known: dict[str, Any]) -> dict[str, Any]:
    counts = counts_of(known.get("direction", "up"), known.get("counts", {}))
    status = _ask(state_dir)
    gateway = status or known.get("gateway") or None
    made: dict[str, Any] = {
        "direction": known.get("direction", "up"),
        "gateway_running": status is not None,
        "query": known.get("query", "not started"),
        "query_error": known.get("query_error"),
        "gateway_error": known.get("gateway_error"),
        "rate_in": known.get("rate_in", 0.0),
        "rate_out": known.get("rate_out", 0.0),
        "lag_s": known.get("lag_s", 0.0),
        "fallback": counts.fallback,
        "account": None,
        "gateway": gateway,
    }
    if gateway:
        made["account"] = account_of(gateway, counts).as_json()
        made["sentence"] = account_of(gateway, counts).sentence()
    return made


def _ask(state_dir: Path) -> dict[str, Any] | None:
    """The gateway's own words; None when none answers."""
    try:
        client = discover(state_dir)
        if client is None:
            return None
        with client:
            return client.status(timeout_s=5.0)
    except GatewayError:
        return None


def advice(line: dict[str, Any], *, running: bool) -> Iterator[str]:
    """What to do about what is wrong with a line, or what weakens its promise."""
    gateway = line["gateway"] or {}
    if not line["gateway_running"]:
        yield _NO_GATEWAY[line["direction"]]
    elif not running and line["direction"] == "down":
        yield "what is in the outbox is delivered; nothing more comes from Kafka. Start towline run."
    elif not running:
        yield "messages are received and wait on disk; nothing carries them to Kafka. Start towline run."
    for error in (line["gateway_error"], line["query_error"], (gateway.get("last_error") or {}).get("text")):
        if error:
            yield str(error)
    yield from _broker_advice(gateway)
    yield from _outbox_advice(gateway)
    if unrouted := (line["account"] or {}).get("unrouted"):
        yield f"{unrouted:,} messages were taken by no route and are not in Kafka. Add a route, or subscribe to less."
    if dead := (line["account"] or {}).get("dead_lettered"):
        yield f"{dead:,} messages are dead letters: towline dlq show tells why, towline dlq replay carries them on."
    if line["fallback"]:
        yield f"{line['fallback']:,} messages went to a fallback topic, because their own was not legal or not allowed."


_NO_GATEWAY = {
    "up": "no gateway runs: nothing is received, and the broker keeps only what it is told to. Start towline run.",
    "down": "no gateway runs: nothing is delivered; what is in Kafka and in the outbox waits. Start towline run.",
}


def _outbox_advice(gateway: dict[str, Any]) -> Iterator[str]:
    outbox = gateway.get("outbox") or {}
    if refused := outbox.get("refused"):
        yield f"the broker refuses {refused:,} messages for good; they are kept in refused/ with reason codes."
    if again := outbox.get("resent_after_lost_session"):
        yield f"{again:,} messages were sent again, because the broker lost the session: they may be doubled."
    if unsure := outbox.get("unsure_after_lost_session"):
        yield f"{unsure:,} messages had been released to a broker that lost its session: it may have lost them."


def _broker_advice(gateway: dict[str, Any]) -> Iterator[str]:
    if held := gateway.get("held_back"):
        yield f"the broker is held back: {held}. Nothing is lost; make room, or bring Kafka back."
    if lost := gateway.get("sessions_lost"):
        yield f"the broker lost this client's session ({lost} times) and what only it held. See its persistence."
    if overruns := gateway.get("window_overruns"):
        yield f"the broker sent more than Receive Maximum allows ({overruns} times); its window is broken, update it."
    if gateway.get("insecure"):
        yield "tls.insecure: the broker's certificate is not verified."


def render(status: dict[str, Any]) -> str:
    """The status as text; times are local."""
    state = f"running (pid {status['pid']})" if status["running"] else "not running"
    moment = datetime.fromtimestamp(status["updated"]).astimezone() if status["updated"] else None
    seen = f"{moment:%H:%M:%S}" if moment else "never"
    head = f'bridge "{status["bridge"] or "?"}"   {state}'
    out = [f"{head}   spark {status['spark']}   kafka {status['kafka']}   last word {seen}"]
    if status["kafka_error"] and status["running"]:
        out.append(f"  {status['kafka_error']}")
    for name, line in status["lines"].items():
        out += _render_line(name, line, running=status["running"])
    return "\n".join(out) + "\n"


def _render_line(name: str, line: dict[str, Any], *, running: bool) -> list[str]:
    gateway = line["gateway"] or {}
    out = [f'▸ line "{name}"   {gateway.get("guarantee", "")}   query {line["query"] if running else "not running"}']
    if line["account"]:
        out.append(f"  account   {line['sentence']}")
    if line["gateway_running"]:
        out += _render_outbox(gateway, line) if line["direction"] == "down" else _render_gateway(gateway)
    if running:
        out.append(
            f"  pace      in {line['rate_in']:,.0f}/s   out {line['rate_out']:,.0f}/s   lag {line['lag_s']:.1f} s"
        )
    return [*out, *(f"  ! {text}" for text in advice(line, running=running))]


def _render_outbox(gateway: dict[str, Any], line: dict[str, Any]) -> list[str]:
    outbox = gateway.get("outbox") or {}
    place = f"{gateway.get('client_id')} at {gateway.get('broker') or 'no broker'}   {gateway.get('state')}"
    parts = [f"queued {outbox.get('queued', 0):,}", f"in flight {outbox.get('in_flight', 0):,}"]
    parts.append(f"{outbox.get('bytes_on_disk', 0) / 1e6:,.1f} MB on disk")
    behind = (line["account"] or {}).get("behind", 0)
    return [f"  session   {place}", f"  outbox    {'   '.join(parts)}   {behind:,} offsets behind in Kafka"]


def _render_gateway(gateway: dict[str, Any]) -> list[str]:
    place = f"{gateway.get('client_id')} at {gateway.get('broker') or 'no broker'}   {gateway.get('state')}"
    flight = f"unacknowledged {gateway.get('unacknowledged', 0):,}   acks after {gateway.get('ack_after')}"
    offsets = f"offsets {gateway.get('first', 0):,} to {gateway.get('end', 0):,}"
    return [
        f"  session   {place}   {flight}",
        f"  journal   {gateway.get('bytes_on_disk', 0) / 1e6:,.1f} MB on disk   {offsets}",
    ]
