"""Live account of a running bridge: redrawn on a terminal, plain lines elsewhere."""

from __future__ import annotations

import io
import json
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, TextIO, TypeAlias

from towline.bridge.runtime.live import LiveView, bridge_values, line_values
from towline.bridge.runtime.state import BridgeState, LineView
from towline.bridge.runtime.status import state_text
from towline.errors import codes_in
from towline.logfile import log_settings
from towline.text import encodable, fit_terminal, lag_text, printable, printable_lines

#: Seconds between two summaries of a line whose account changes; an idle line is not repeated.
PLAIN_INTERVAL_S = 10.0


def line_state(view: LineView, spark: str) -> str:
    """Return `state_text` of a line of the running bridge."""
    return state_text(line_values(view), spark)


def line_summary(view: LineView, spark: str) -> str:
    """Return state, account and rates of a line as one line of text."""
    account = view.account
    if account is None:
        return f'line "{view.name}"   {line_state(view, spark)}'
    rate_in, rate_out = view.rates()
    rates_text = f"in {rate_in:,.0f}/s   out {rate_out:,.0f}/s   lag {lag_text(view.lag_s())}"
    return f'line "{view.name}"   {line_state(view, spark)}   {account.sum_text()}   {rates_text}'


def _add_time(text: str, *, use_local_time: bool) -> str:
    """Return a text with the time before each line: local time on a terminal, UTC in a log."""
    now = datetime.now(UTC)
    time_text = f"{now.astimezone():%H:%M:%S}" if use_local_time else f"{now:%Y-%m-%dT%H:%M:%SZ}"
    return "\n".join(f"{time_text}  {line}" for line in printable_lines(text).split("\n"))


class PlainScreen:
    """Plain text output for a log or a pipe: events, and changed accounts every `PLAIN_INTERVAL_S` seconds."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._last_shown: dict[str, tuple[float, tuple[object, ...]]] = {}

    def print_event(self, text: str) -> None:
        """Write an event with its time."""
        self.write(fit_terminal(_add_time(text, use_local_time=self._stream.isatty()), self._stream))

    def write(self, text: str) -> None:
        """Write lines unchanged; errors such as a full disk are ignored, a broken pipe is raised."""
        try:
            self._stream.write(f"{text}\n")
            self._stream.flush()
        except BrokenPipeError:
            raise  # the reader of the pipe has ended
        except OSError:
            return

    def show(self, state: BridgeState) -> None:
        """Write the summary of each line whose account or state changed."""
        now = time.monotonic()
        for name, view in state.lines.items():
            account = view.account
            snapshot = (account, line_state(view, state.spark))
            shown_at, last_snapshot = self._last_shown.get(name, (-PLAIN_INTERVAL_S, ()))
            if account is not None and snapshot != last_snapshot and now - shown_at >= PLAIN_INTERVAL_S:
                self._last_shown[name] = (now, snapshot)
                self.print_event(printable(line_summary(view, state.spark)))


class JsonScreen:
    """JSON output for a log, one object a line: events, and changed states of lines."""

    def __init__(self, stream: TextIO, level: int = logging.INFO) -> None:
        self._plain, self._level = PlainScreen(stream), level
        self._states: dict[str, str] = {}

    def print_event(self, text: str) -> None:
        """Write an event; an event with an error code is a warning."""
        if codes := codes_in(text):
            self._write(logging.WARNING, text, code=codes[0])
        else:
            self._write(logging.INFO, text)

    def show(self, state: BridgeState) -> None:
        """Write the state of each line whose state changed."""
        for name, view in state.lines.items():
            new_state = line_state(view, state.spark)
            if self._states.get(name) != new_state:
                self._states[name] = new_state
                self._write(logging.INFO, "state", bridge=state.name, line=name, state=new_state)

    def _write(self, level: int, event: str, **fields: str) -> None:
        if level >= self._level:
            timestamp = datetime.now(UTC).isoformat().replace("+00:00", "Z")
            level_name = logging.getLevelName(level).lower()
            fields |= {"event": event, "level": level_name, "timestamp": timestamp}
            self._plain.write(json.dumps(fields))


class LiveScreen:
    """Terminal output while `live` is open: the rows of `LiveView` below the events, or on the `whole` terminal."""

    def __init__(self, *, whole: bool = False) -> None:
        from rich.console import Console  # noqa: PLC0415 - loaded when there is a terminal
        from rich.live import Live  # noqa: PLC0415

        self._console, self._view = Console(), LiveView()
        self.live = Live(console=self._console, refresh_per_second=4, transient=True, screen=whole)

    def print_event(self, text: str) -> None:
        """Print an event above the rows."""
        rows = fit_terminal(_add_time(text, use_local_time=True), self._console.file)
        self._console.print(rows, markup=False, highlight=False, soft_wrap=True)

    def show(self, state: BridgeState) -> None:
        """Redraw the rows from the running bridge."""
        self.draw(bridge_values(state), "Ctrl-C ends it")

    def draw(self, values: dict[str, Any], hint: str = "") -> None:
        """Redraw the rows from `towline.bridge.runtime.status.collect_status`, with `hint` in the title."""
        from rich.text import Text  # noqa: PLC0415 - see above

        # A Text, not a str: rich reads [brackets] of a str as markup.
        text = Text("\n".join(self._view.rows(values, self._console.width, self._console.height - 1, hint)))
        for pattern, style in ((r"\A.*", "bold"), (r"✗", "red"), (r"(?m)^ *! ", "yellow"), (r"(?m)^▸|✓", "green")):
            text.highlight_regex(pattern, style)
        text.plain = encodable(text.plain, self._console.encoding)
        self.live.update(text)


Screen: TypeAlias = LiveScreen | PlainScreen | JsonScreen


@contextmanager
def make_screen(*, live: bool) -> Iterator[Screen]:
    """Yield the output for standard output; characters outside its encoding, such as in topic names, are escaped.

    Raises:
        ConfigError: TL-C147, `towline.logfile.log_settings`.
    """
    level, log_format = log_settings()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    if log_format == "json":
        yield JsonScreen(sys.stdout, level)
    elif live and log_format == "auto":
        screen = LiveScreen()
        with screen.live:
            yield screen
    else:
        yield PlainScreen(sys.stdout)
