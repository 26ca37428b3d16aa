"""Live view of a bridge, for `towline run` and `towline status --watch`: a few rows a line, the worst line first."""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from typing import Any, Final

from towline.bridge.lines.statuses import mark_stale
from towline.bridge.runtime import status
from towline.bridge.runtime.state import PAUSED, BridgeState, LineView, read_pause
from towline.errors import StateAccessDenied
from towline.text import count_text, lag_text, printable, wrap_line

#: Seconds of a sparkline and of each of its characters, and characters of a bar.
_SPARK_S, _STEP_S, _BAR_SIZE = 60, 3, 8
_LEVELS: Final = "▁▂▃▄▅▆▇█"


def line_values(view: LineView) -> dict[str, Any]:
    """Return the values of a line of the running bridge, with the keys of `collect_status`."""
    account, gateway = view.account, None if view.is_silent else view.status or None
    line = view.as_json() | {"gateway": gateway, "gateway_running": not view.is_silent}
    if view.rate_meter.rates is None:
        line["rate_in"] = line["rate_out"] = None
    if account is None and (last := view.account_from(mark_stale(view.status))):
        report = {"heard": view.heard, "gateway": view.status, "account": last.as_json(), "sentence": last.sum_text()}
        line["last"] = report
    return line


def bridge_values(state: BridgeState) -> dict[str, Any]:
    """Return the values of the running bridge that `LiveView` shows, with the keys of `collect_status`."""
    lines = {name: line_values(view) for name, view in state.lines.items()}
    for name in (name for name, line in lines.items() if line["query"] == PAUSED):
        with suppress(StateAccessDenied):
            lines[name]["paused"] = read_pause(state.lines[name].directory)
    fields = {name: getattr(state, name) for name in ("spark", "kafka", "kafka_insecure", "kafka_error")}
    fields |= {"running": True, "silent": False, "pid": None, "updated": None, "file_changed": False}
    return {**fields, "bridge": state.name, "reload": state.outcomes.get("", {}), "lines": lines}


class LiveView:
    """Rows of a bridge; keeps rates by second of the monotonic clock, and the largest number waiting since it began."""

    def __init__(self) -> None:
        self._rates: dict[str, dict[int, float]] = defaultdict(dict)
        self._peaks: dict[str, int] = defaultdict(int)

    def rows(self, values: dict[str, Any], width: int, height: int, hint: str = "") -> list[str]:
        """Return at most `height` rows of `width` columns for a status, and sample it; `hint` ends the title."""
        title, *remarks = status.render({**values, "version": None, "lines": {}}).splitlines()
        if values["running"]:
            kafka = f"{values['kafka']}{' (insecure)' if values['kafka_insecure'] else ''}"
            title = printable(f'bridge "{values["bridge"]}"   spark {values["spark"]}   kafka {kafka}')
        texts = (f"{title}   {datetime.now().astimezone():%H:%M:%S}   {hint}", *remarks)
        rows, shown = [row for text in texts for row in wrap_line(text, width)], 0
        lines = [self._line_texts(name, line, values) for name, line in values["lines"].items()]
        lines.sort(key=lambda line: status.SEVERITY_MARKS.index(line[0][0][0]))
        fitting = [cells for cells, _ in lines if len("   ".join(cells)) <= width]
        columns = [max(map(len, column)) for column in zip(*fitting, strict=True)]
        columns = columns if columns and sum(columns) + 3 * len(columns) <= width else [0] * 6
        for cells, notes in lines:
            # A row ends between two cells, unless one is wider than the terminal.
            unbroken = (cell.replace(" ", "\xa0") for cell in cells)
            packed = wrap_line("   ".join(filter(None, map(str.ljust, unbroken, columns))), width)
            block = [row for text in (*packed, *notes) for row in wrap_line(text.replace("\xa0", " "), width)]
            if shown and len(rows) + len(block) + (shown + 1 < len(lines)) > height:
                break
            rows, shown = rows + block, shown + 1
        if states := Counter(cells[1] for cells, _ in lines[shown:]):
            counts = (f"{'all' if len(states) == 1 else count} {state}" for state, count in states.most_common())
            text = f"and {count_text(states.total(), 'more line')}: {', '.join(counts)}"
            rows[height - 1 :] = [printable(text, width)]
        return rows[:height]

    def _line_texts(self, name: str, line: dict[str, Any], values: Mapping[str, Any]) -> tuple[list[str], list[str]]:
        """Return the cells of a line, its mark and its state first; and rows below them."""
        notes = [f"  ! {text}" for text in status.advice(line, running=values["running"] or values["silent"])]
        mark, gateway = status.severity_mark(line, notes), line["gateway"] or (line.get("last") or {}).get("gateway")
        notes += [status.member_text(*member) for member in (line.get("members") or {}).items()]
        account, second = line["account"], int(time.monotonic())
        rates = self._rates[name] = {at: rate for at, rate in self._rates[name].items() if at > second - _SPARK_S}
        rate_text = "rate unknown {}"
        if account and line["rate_in"] is not None:
            rates[second] = line["rate_in"]
            rate_text = f"in {line['rate_in']:,.0f}/s {{}} out {line['rate_out']:,.0f}/s"
        cells = [
            f"{mark} {name}",
            status.state_text(line, values["spark"]),
            (gateway or {}).get("guarantee") or "",
            ("" if account else "account ") + status.account_text(line),
            rate_text.format(sparkline(rates, second)),
            self._waiting_text(name, line, account) if account else "waiting unknown",
        ]
        return [*map(printable, cells)], [*map(printable, notes)]

    def _waiting_text(self, name: str, line: Mapping[str, Any], account: Mapping[str, Any]) -> str:
        waiting = account["waiting"] + account.get("arriving", 0)
        peak = self._peaks[name] = max(self._peaks[name], waiting)
        bar = "█" * math.ceil(waiting / (peak or 1) * _BAR_SIZE)
        text = f"waiting {waiting:,} {bar:░<{_BAR_SIZE}} peak {peak:,}   lag {lag_text(line['lag_s'])}"
        behind = "unknown" if account.get("behind") is None else f"{account['behind']:,}"
        return f"{text}   {behind} behind in Kafka" if line["direction"] == "down" else text


def sparkline(rates: Mapping[int, float], second: int) -> str:
    """Return the last minute: the largest rate of each step, scaled to the largest of all; "·" is unknown."""
    end = second - second % _STEP_S + _STEP_S
    steps = [range(start, start + _STEP_S) for start in range(end - _SPARK_S, end, _STEP_S)]
    maxima = [max((rates[at] for at in step if at in rates), default=None) for step in steps]
    largest = max(filter(None, maxima), default=1.0)
    return "".join("·" if rate is None else _LEVELS[math.ceil(rate / largest * 7)] for rate in maxima)
