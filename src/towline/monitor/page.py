"""The page of a bridge: one document, a stream of states, and commands behind its buttons.

The document holds its style sheet and scripts, which the Content-Security-Policy names by their SHA-256: nothing else
runs, and nothing is loaded from anywhere. States come as server-sent events (HTML standard, section 9.2): one reader of
the bridge's status serves all pages, and none runs while no page is open. What asks Kafka, a broker or a gateway is the
command of the command line in a process of its own.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import html
import json
import re
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, NamedTuple

from starlette.responses import HTMLResponse, Response

from towline.bridge.config.model import Bridge
from towline.bridge.runtime.status import collect_bridge_status
from towline.errors import GatewayError, TowlineError
from towline.monitor.view import RouteTexts, detail, overview, route_texts
from towline.text import error_text, printable

_FILES: Final = Path(__file__).parent / "page"
#: Time between two states, in seconds, and what each line adds: reading them stays near 1 % of a core.
_STATE_INTERVAL_S: Final = 1.0
_LINE_INTERVAL_S: Final = 0.02
#: Most pages that read states at the same time, and most commands that run for them.
MAX_STREAMS: Final = 32
_MAX_COMMANDS: Final = 2
#: Longest parameter of a command.
_MAX_PARAMETER_CHARS: Final = 300
_POLICY: Final = (
    "default-src 'none'; connect-src 'self'; img-src data:; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'; script-src {scripts}; style-src {styles}"
)
_SECURITY_HEADERS: Final = {
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}

# -- documents ---------------------------------------------------------------------------------------------------------


@lru_cache
def _document(name: str, title: str) -> tuple[str, str]:
    """Return a document with its parts inlined, and the policy that permits these parts only."""
    hashes: dict[str, list[str]] = {"script": [], "style": []}

    def inline(match: re.Match[str]) -> str:
        element, file_name = match[1], match[2]
        text = (_FILES / file_name).read_text(encoding="utf-8")
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        hashes[element].append(f"'sha256-{digest}'")
        return f"<{element}>{text}</{element}>"

    text = re.sub(r"<!-- (script|style): (\S+) -->", inline, (_FILES / name).read_text(encoding="utf-8"))
    sources = {key: " ".join(values) or "'none'" for key, values in hashes.items()}
    return text.replace("{{title}}", html.escape(title)), _POLICY.format(
        scripts=sources["script"], styles=sources["style"]
    )


def document_response(name: str, bridge_name: str, status: int = 200) -> Response:
    """Return a document of the page: ``index.html`` or ``signin.html``."""
    text, policy_text = _document(name, bridge_name)
    return HTMLResponse(text, status, {"Content-Security-Policy": policy_text, **_SECURITY_HEADERS})


# -- states ------------------------------------------------------------------------------------------------------------


class State:
    """One state of a bridge as JSON: its table, and the lines that pages ask for."""

    def __init__(self, table: Mapping[str, Any], make_detail: Callable[[str], Any]) -> None:
        self.table, self.line_count = json.dumps(table), len(table.get("lines", ()))
        self._make_detail, self._details = make_detail, dict[str, str]()

    def detail(self, line: str) -> str:
        """Return a line."""
        if line not in self._details:
            self._details[line] = json.dumps(self._make_detail(line))
        return self._details[line]


class StateFeed:
    """Reads the status of a bridge while pages are open, and sends each page the table and the line it shows.

    Args:
        load_bridge: Returns the bridge file as it is now; the same object while it is the same.
    """

    def __init__(self, load_bridge: Callable[[], Bridge]) -> None:
        self._load_bridge = load_bridge
        self._bridge: Bridge | None = None
        self._routes: RouteTexts = {}
        #: Number of open streams.
        self.streams = 0
        self._task: asyncio.Task[None] | None = None
        #: The last state; None while no page is open.
        self._state: State | None = None
        self._changed = asyncio.Condition()

    async def events(self, line: str) -> AsyncIterator[str]:
        """Yield the states as server-sent events, with the details of a line; "" for none."""
        self.streams += 1
        try:
            if self._task is None or self._task.done():
                self._task = asyncio.create_task(self._poll())
            sent: State | None = None
            yield "retry: 1000\n\n"
            while True:
                async with self._changed:
                    while (state := self._state) is None or state is sent:
                        await self._changed.wait()
                sent = state
                yield f"event: state\ndata: {state.table}\n\n"
                if line:
                    yield f"event: line\ndata: {state.detail(line)}\n\n"
        finally:
            self.streams -= 1

    async def _poll(self) -> None:
        while self.streams:
            state = await asyncio.to_thread(self._read_state)
            async with self._changed:
                self._state = state
                self._changed.notify_all()
            await asyncio.sleep(_STATE_INTERVAL_S + _LINE_INTERVAL_S * state.line_count)
        self._state = None

    def _read_state(self) -> State:
        """Read the status; a file with an error is a state, too."""
        try:
            bridge = self._load_bridge()
            if bridge is not self._bridge:
                self._bridge, self._routes = bridge, route_texts(bridge)
            status, routes = collect_bridge_status(bridge, ask=False), self._routes
            return State(overview(status, routes), lambda line: detail(bridge, status, line, routes))
        except TowlineError as error:
            return State({"error": str(error)}, lambda _: None)
        except Exception as error:  # noqa: BLE001 - the page says it, and the next state may be sound
            return State({"error": f"unexpected {error_text(error)}   [TL-X01]"}, lambda _: None)


# -- commands ----------------------------------------------------------------------------------------------------------


class PageCommand(NamedTuple):
    """Command of the command line that the page calls.

    Attributes:
        words: The command, in front of the bridge file.
        options: Parameter of the request → option of the command; a flag ends with ``?``.
        acts: Whether it changes something.
    """

    words: tuple[str, ...]
    options: Mapping[str, str]
    acts: bool = False


COMMANDS: Final[Mapping[str, PageCommand]] = {
    "letters": PageCommand(("dlq", "show"), {"line": "--line", "reason": "--reason", "limit": "--limit"}),
    "letter": PageCommand(("dlq", "show"), {"at": "--at"}),
    "replay": PageCommand(
        ("dlq", "replay"), {"line": "--line", "reason": "--reason", "at": "--at", "dry_run": "--dry-run?"}, acts=True
    ),
    "refused": PageCommand(("refused", "show"), {"line": "--line", "limit": "--limit"}),
    "refused-message": PageCommand(("refused", "show"), {"line": "--line", "at": "--at"}),
    "refused-replay": PageCommand(("refused", "replay"), {"line": "--line"}, acts=True),
    "message": PageCommand(
        ("message",), {name: f"--{name}" for name in ("line", "offset", "gateway", "kafka", "device", "receipt")}
    ),
    "doctor": PageCommand(("doctor",), {}, acts=True),
}
_COMMAND_TIMEOUT_S: Final = 240.0
#: Seconds that a command waits for others.
_COMMAND_WAIT_S: Final = 5.0
_running_commands = threading.BoundedSemaphore(_MAX_COMMANDS)


def run_command(command: PageCommand, file: Path, parameters: Iterator[tuple[str, str]]) -> dict[str, Any]:
    """Run a command with ``--json``; return its exit code, its JSON or its error.

    Raises:
        GatewayError: TL-B76, a parameter is invalid, or too many commands run.
    """
    words = [*_words(command, parameters)]
    if not _running_commands.acquire(timeout=_COMMAND_WAIT_S):
        remedy = "Wait for their answers, and try again."
        raise GatewayError("TL-B76", "page", f"{_MAX_COMMANDS} commands of the page run already", remedy)
    try:
        process = subprocess.run(
            [sys.executable, "-m", "towline", *command.words, str(file), "--json", *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_COMMAND_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        remedy = "Run the command in a terminal: it shows its progress."
        raise GatewayError("TL-B76", "page", f"no answer in {_COMMAND_TIMEOUT_S:.0f} s", remedy) from None
    finally:
        _running_commands.release()
    try:
        result = json.loads(process.stdout)
    except ValueError:
        result = None
    error = "" if result is not None else process.stderr.strip() or f"exit code {process.returncode}"
    return {"code": process.returncode, "result": result, "error": error}


def _words(command: PageCommand, parameters: Iterator[tuple[str, str]]) -> Iterator[str]:
    for name, value in parameters:
        flag = command.options.get(name)
        if flag is None or len(value) > _MAX_PARAMETER_CHARS or not value.isprintable():
            raise GatewayError("TL-B76", "page", f'"{printable(name, 40)}" is not valid here', "Reload the page.")
        if flag.endswith("?"):
            yield flag.removesuffix("?")
        else:
            yield f"{flag}={value}"
