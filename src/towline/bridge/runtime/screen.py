"""The live account: redrawn on a terminal, plain lines elsewhere."""

from __future__ import annotations

import io
import json
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TextIO, TypeAlias

from towline.bridge.runtime.state import PAUSED, BridgeState, LineView
from towline.errors import codes_in
from towline.logfile import log_settings
from towline.text import fitted, printable, printable_lines, wrapped

#: Seconds between two plain lines of a line that moves; one that stands still says nothing.
PLAIN_S = 10.0


def line_state(view: LineView, spark: str) -> str:
    """One word or two on a line, the worst news first."""
    if view.silent:
        return "no gateway" if view.gateway_error else "gateway silent"
    if not view.status:
        return "starting"
    if trouble := _gateway_trouble(view):
        return trouble
    if view.account is not None and view.account.disagreements:
        return "does not add up ✗, see towline status"
    if spark != "running" and view.query != PAUSED:
        return f"receiving, spark {spark}"
    return view.query if view.query in ("running", PAUSED) else f"receiving, query {view.query}"


def _gateway_trouble(view: LineView) -> str:
    """What keeps messages from coming, in the words of the gateway; "" for nothing."""
    account = view.account
    if account is not None and account.away:
        return "; ".join(account.away)
    if view.status.get("state") != "online":
        return f"broker {view.status.get('state', 'offline')}"
    return f"held back: {view.status['held_back']}" if view.status.get("held_back") else ""


def summary(view: LineView, spark: str) -> str:
    """A line in one line; the numbers add up as those of the account do."""
    account = view.account
    if account is None:
        return f'line "{view.name}"   {line_state(view, spark)}'
    rate_in, rate_out = view.rates()
    pace = f"in {rate_in:,.0f}/s   out {rate_out:,.0f}/s   lag {lag_text(view.lag_s())}"
    return f'line "{view.name}"   {line_state(view, spark)}   {account.sum()}   {pace}'


def _timed(text: str, *, local: bool) -> str:
    """Each line of a text that stays with its time: local on a terminal, UTC in a log."""
    now = datetime.now(UTC)
    at = f"{now.astimezone():%H:%M:%S}" if local else f"{now:%Y-%m-%dT%H:%M:%SZ}"
    return "\n".join(f"{at}  {line}" for line in printable_lines(text).split("\n"))


class PlainScreen:
    """Lines for a log or a pipe: events, and the numbers every `PLAIN_S` seconds while they change."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._last: dict[str, tuple[float, tuple[object, ...]]] = {}

    def say(self, text: str) -> None:
        """Write an event with its time."""
        self.write(fitted(_timed(text, local=self._stream.isatty()), self._stream))

    def write(self, text: str) -> None:
        """Write lines as they are; a disk too full for them is no reason to end what carries messages."""
        try:
            self._stream.write(f"{text}\n")
            self._stream.flush()
        except BrokenPipeError:
            raise  # whoever listened has gone, and the bridge was started for them
        except OSError:
            return

    def show(self, state: BridgeState) -> None:
        """Write the lines whose numbers changed."""
        now = time.monotonic()
        for name, view in state.lines.items():
            account = view.account
            mark = (account, line_state(view, state.spark))
            at, former = self._last.get(name, (-PLAIN_S, ()))
            if account is not None and mark != former and now - at >= PLAIN_S:
                self._last[name] = (now, mark)
                self.say(printable(summary(view, state.spark)))


class JsonScreen:
    """One JSON object a line, for a log that programs read: events, and each line's state when it changes."""

    def __init__(self, stream: TextIO, level: int = logging.INFO) -> None:
        self._out, self._level = PlainScreen(stream), level
        self._states: dict[str, str] = {}

    def say(self, text: str) -> None:
        """Write an event; one with a code is a warning."""
        if codes := codes_in(text):
            self._write(logging.WARNING, text, code=codes[0])
        else:
            self._write(logging.INFO, text)

    def show(self, state: BridgeState) -> None:
        """Write what has another state than before."""
        for name, view in state.lines.items():
            now = line_state(view, state.spark)
            if self._states.get(name) != now:
                self._states[name] = now
                self._write(logging.INFO, "state", bridge=state.name, line=name, state=now)

    def _write(self, level: int, event: str, **facts: str) -> None:
        if level >= self._level:
            at = datetime.now(UTC).isoformat().replace("+00:00", "Z")
            named = logging.getLevelName(level).lower()
            facts |= {"event": event, "level": named, "timestamp": at}
            self._out.write(json.dumps(facts).replace("\x7f", "\\u007f"))  # JSON escapes all but DEL


class LiveScreen:
    """The lines of a log, redrawn by `live` as long as its context is open, and events above them."""

    def __init__(self) -> None:
        from rich.console import Console  # noqa: PLC0415 - loaded when there is a terminal
        from rich.live import Live  # noqa: PLC0415

        self._console = Console()
        self.live = Live(console=self._console, refresh_per_second=4, transient=True)

    def say(self, text: str) -> None:
        """Print an event above the lines."""
        rows = fitted(_timed(text, local=True), self._console.file)
        self._console.print(rows, markup=False, highlight=False, soft_wrap=True)

    def show(self, state: BridgeState) -> None:
        """Redraw."""
        from rich.text import Text  # noqa: PLC0415 - see above

        kafka = f"{state.kafka}{' (insecure)' if state.kafka_insecure else ''}"
        title = f"bridge {state.name}   spark {state.spark}   kafka {kafka}   Ctrl-C ends it cleanly"
        texts, width = [(title, "bold")], self._console.width
        for view in state.lines.values():
            batch = f"   batch {view.batch_ms:,} ms" if view.batch_ms else ""
            texts.append((f"{summary(view, state.spark)}{batch}", ""))
            if wrong := view.gateway_error or view.query_error:
                texts.append((f"  ! {wrong}", "red"))
        # Not a str: rich would read [brackets] in one as markup.
        self.live.update(Text("\n").join(Text("\n".join(wrapped(printable(text), width)), how) for text, how in texts))


def lag_text(seconds: float) -> str:
    """A lag in seconds; tenths where they matter."""
    return f"{seconds:,.{1 if seconds < 100 else 0}f} s"


Screen: TypeAlias = LiveScreen | PlainScreen | JsonScreen


@contextmanager
def make_screen(*, live: bool) -> Iterator[Screen]:
    """The screen that fits standard output; what its encoding does not have is escaped, a device may have named it.

    Raises:
        ConfigError: TL-C147, `towline.logfile.log_settings`.
    """
    level, form = log_settings()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    if form == "json":
        yield JsonScreen(sys.stdout, level)
    elif live and form == "auto":
        screen = LiveScreen()
        with screen.live:
            yield screen
    else:
        yield PlainScreen(sys.stdout)
