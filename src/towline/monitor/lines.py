"""HTTP routes of a bridge: its lines, requests to pause, resume and restart them, and its page."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from towline import files
from towline.bridge.config.file import load
from towline.bridge.config.model import Bridge
from towline.bridge.runtime.state import BRIDGE_FILE, pause, read_state, request_restart, resume
from towline.bridge.runtime.status import collect_bridge_status
from towline.errors import ConfigError, GatewayError, TowlineError, did_you_mean
from towline.monitor.history import MAX_POINTS, History, line_history
from towline.monitor.page import COMMANDS, MAX_STREAMS, StateFeed, document_response, run_command
from towline.monitor.server import PAGE_PREFIX, json_response
from towline.monitor.sessions import SessionStore
from towline.text import printable

#: Last part of the path → operation on a line's directory, by a person.
_REQUESTS: Final[dict[str, Callable[[Path, str], object]]] = {
    "pause": pause,
    "resume": lambda directory, _: resume(directory),
    "restart": lambda directory, _: request_restart(directory),
}
#: Code of an error → status of the answer; every other one is 503.
_HTTP_STATUS: Final = {"TL-B73": 403, "TL-B74": 401, "TL-C73": 404}
#: Interval of the log line with the number of refused requests, in seconds.
_LOG_INTERVAL_S: Final = 60.0
#: Last report of doctor, in the bridge's state directory; not written before the first start of the bridge.
_DOCTOR_FILE: Final = "doctor.json"
#: Longest time of the page's charts, in seconds.
_MAX_HISTORY_S: Final = 24 * 3600.0
#: Seconds for which an answer about a line's history serves all pages.
_HISTORY_AGE_S: Final = 2.0
#: Longest form with a token.
_MAX_FORM_BYTES: Final = 4096
#: The bridge file as `towline status` reads it, loaded again after a change.
_load_bridge = lru_cache(maxsize=1)(lambda file, _version: load(file))


class BridgeRoutes:
    """HTTP routes of a bridge.

    Args:
        bridge: The bridge; its file is read again after a change.
        sessions: Who may act.
        announce: Receives one line of text for the log, for each action and about refused requests.
        actor: Who acts on the page, for the log; the client's address is added where it is not this machine.
        has_page: Whether the page is served, under ``/``.
        is_open: Whether everybody who reaches the address may read the lines; payloads and actions need a session.
        read_only: Whether actions are refused.
    """

    def __init__(
        self,
        bridge: Bridge,
        sessions: SessionStore,
        announce: Callable[[str], object],
        *,
        actor: str = "[monitor]",
        has_page: bool = False,
        is_open: bool = True,
        read_only: bool = False,
    ) -> None:
        self._file, self._state_dir, self._name = bridge.file, bridge.state_dir, bridge.name
        self._sessions, self._announce, self._actor = sessions, announce, actor
        self._has_page, self._is_open, self._read_only = has_page, is_open, read_only
        self._history = History(bridge.state_dir)
        self._feed = StateFeed(self._load)
        #: Line and seconds → time and value of the last answers.
        self._histories: dict[tuple[str, float], tuple[float, dict[str, Any]]] = {}
        self._refused_requests, self._next_log_at = 0, 0.0

    def routes(self) -> list[Route]:
        """Return the routes for `towline.monitor.server.serve`."""
        requests = {verb: partial(self._respond, partial(self._submit, verb), 202) for verb in _REQUESTS}
        routes = [
            Route("/lines", partial(self._respond, self._status, 200)),
            *(Route(f"/lines/{{line}}/{verb}", handler, methods=["POST"]) for verb, handler in requests.items()),
        ]
        if not self._has_page:
            return routes
        return [
            Route("/", self._document),
            Route(f"{PAGE_PREFIX}session", self._sign_in, methods=["POST"]),
            Route(f"{PAGE_PREFIX}leave", self._sign_out, methods=["POST"]),
            Route(f"{PAGE_PREFIX}events", self._events),
            Route(f"{PAGE_PREFIX}access", partial(self._respond, self._access, 200)),
            Route(f"{PAGE_PREFIX}history", partial(self._respond, self._line_history, 200)),
            Route(f"{PAGE_PREFIX}call/{{command}}", partial(self._respond, self._call, 200), methods=["POST"]),
            *routes,
        ]

    def _load(self) -> Bridge:
        return _load_bridge(self._file, files.file_version(self._file))

    def _respond(self, handler: Callable[[Request], dict[str, Any]], status: int, request: Request) -> Response:
        try:
            return json_response(handler(request), status)
        except TowlineError as error:
            headers = {"WWW-Authenticate": "Bearer"}
            raise HTTPException(_HTTP_STATUS.get(error.code, 503), f"{error}\n", headers) from None

    # -- lines

    def _status(self, request: Request) -> dict[str, Any]:
        self._require_reader(request)
        return collect_bridge_status(self._load())

    def _submit(self, verb: str, request: Request) -> dict[str, Any]:
        """Submit a request as `towline pause` does; return the line's state."""
        self._require_actor(request)
        name, state = str(request.path_params["line"]), read_state(self._state_dir)
        lines = state["lines"] if state else {line.name: {"query": "not running"} for line in self._load().lines}
        if name not in lines:
            hint = did_you_mean(name, lines, "GET /lines has their names.")
            raise ConfigError("TL-C73", "[monitor]", f'no line is named "{name}"', hint)
        _REQUESTS[verb](self._state_dir / name, self._actor_of(request))
        self._record(request, verb, name)
        return {"line": name, "state": lines[name]["query"]}

    # -- the page

    def _document(self, request: Request) -> Response:
        """Answer the page; the sign-in to those who may not read it; a link's key opens a session."""
        if key := request.query_params.get("key"):
            response: Response = RedirectResponse("/", 303)
            return response if self._sessions.open(request, response, key) else self._refuse_sign_in()
        if self._is_open or self._sessions.is_signed_in(request):
            return document_response("index.html", self._name)
        return document_response("signin.html", self._name, 401)

    async def _sign_in(self, request: Request) -> Response:
        """Open a session for a token of the form."""
        body = b""
        async for chunk in request.stream():
            body += chunk
            if len(body) > _MAX_FORM_BYTES:
                return self._refuse_sign_in()
        token = parse_qs(body.decode("ascii", "replace")).get("token", [""])[0]
        response = RedirectResponse("/", 303)
        return response if self._sessions.open(request, response, token.strip()) else self._refuse_sign_in()

    def _refuse_sign_in(self) -> Response:
        self._count_refused()
        return document_response("signin.html", self._name, 401)

    def _sign_out(self, request: Request) -> Response:
        response = RedirectResponse("/", 303)
        if self._sessions.is_signed_in(request):
            self._sessions.close(request, response)
        return response

    async def _events(self, request: Request) -> Response:
        if not (self._is_open or self._sessions.is_signed_in(request)):
            return Response(status_code=401)
        if self._feed.streams >= MAX_STREAMS:
            return Response(f"{MAX_STREAMS} pages are open\n", 503)
        events = self._feed.events(request.query_params.get("line", ""))
        return StreamingResponse(events, media_type="text/event-stream")

    def _access(self, request: Request) -> dict[str, Any]:
        """Return what the client may do: ``signed_in``, ``read_only``, and whether it ``can_sign_in``."""
        self._require_reader(request)
        signed_in = self._sessions.is_signed_in(request)
        return {"signed_in": signed_in, "read_only": self._read_only, "can_sign_in": self._sessions.can_open}

    def _line_history(self, request: Request) -> dict[str, Any]:
        self._require_reader(request)
        try:
            seconds = max(60.0, min(float(request.query_params.get("seconds", "3600")), _MAX_HISTORY_S))
        except ValueError:
            seconds = 3600.0
        key = request.query_params.get("line", ""), seconds
        at, answer = self._histories.get(key, (0.0, {}))
        if time.monotonic() - at > _HISTORY_AGE_S:  # all pages of a line share one
            answer = line_history(self._history, key[0], time.time() - seconds, seconds / MAX_POINTS)
            self._histories = {key: (time.monotonic(), answer)} | {
                k: v for k, v in [*self._histories.items()][:16] if k != key
            }
        return answer

    def _call(self, request: Request) -> dict[str, Any]:
        """Run a command for the page; a POST, so that no other page can make a browser ask for it."""
        name = str(request.path_params["command"])
        command = COMMANDS.get(name)
        if command is None:
            raise ConfigError("TL-C73", "page", f'there is no command "{printable(name, 40)}"', "Reload the page.")
        (self._require_actor if command.acts else self._require_session)(request)
        answer = run_command(command, self._file, iter(request.query_params.multi_items()))
        if name == "doctor" and answer["result"] is not None:
            answer["result"]["previous"] = self._exchange_report(answer["result"]["findings"])
        if command.acts and "dry_run" not in request.query_params:
            words = " ".join(command.words)
            self._record(request, words, request.query_params.get("line", ""))
        return answer

    def _exchange_report(self, findings: list[Any]) -> Any:
        """Store a report of doctor for the next one to be compared with; return the one before, None for none."""
        path, previous = self._state_dir / _DOCTOR_FILE, None
        with contextlib.suppress(OSError, ValueError):
            previous = json.loads(path.read_text(encoding="utf-8"))
        if self._is_owner():
            with contextlib.suppress(OSError):
                files.replace(path, json.dumps({"at": time.time(), "findings": findings}), sync=False)
        return previous

    def _is_owner(self) -> bool:
        """Return True if this user runs the bridge: files of another one would stop its next start (TL-J23)."""
        with contextlib.suppress(OSError):
            return (self._state_dir / BRIDGE_FILE).stat().st_uid == os.geteuid()
        return False

    # -- who may

    def _require_reader(self, request: Request) -> None:
        if not self._is_open:
            self._require_session(request)

    def _require_session(self, request: Request) -> None:
        if not self._sessions.can_open:
            remedy = "Name a file of tokens there and start the bridge again, or use towline ui, or the commands."
            raise ConfigError("TL-B73", "[monitor]", "token_file is not set, and without it POST is refused", remedy)
        if not self._sessions.is_signed_in(request):
            self._count_refused()
            remedy = (
                'Send the header "Authorization: Bearer TOKEN" with a line of the file that [monitor] token_file names.'
            )
            raise GatewayError("TL-B74", "[monitor]", "the request has no token, or another one", remedy)

    def _require_actor(self, request: Request) -> None:
        self._require_session(request)
        if self._read_only:
            remedy = "Set read_only = false there and start the bridge again, or use the command line."
            raise ConfigError("TL-B73", "[monitor]", "read_only is set: actions are refused", remedy)

    def _count_refused(self) -> None:
        self._refused_requests += 1
        if time.monotonic() >= self._next_log_at:
            self._next_log_at = time.monotonic() + _LOG_INTERVAL_S
            count = f"{self._refused_requests:,}"
            self._announce(f"[monitor]: requests refused that had no token of token_file: {count}   [TL-B74]")

    def _actor_of(self, request: Request) -> str:
        host = request.client.host if request.client else ""
        return self._actor if host in ("", "127.0.0.1", "::1") else f"{self._actor} {host}"

    def _record(self, request: Request, action: str, line: str) -> None:
        """Record an action in the history and the log."""
        actor = self._actor_of(request)
        if self._is_owner():
            self._history.append(action={"line": line, "action": action, "by": actor})
        location = f'line "{line}"' if line else "page"
        self._announce(f"{location}: {action} by {actor}")
