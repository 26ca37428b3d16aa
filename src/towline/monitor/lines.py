"""The lines of a bridge over HTTP: `towline status` for whoever reaches the address, requests for who has a token."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Final

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from towline import files
from towline.bridge.config.file import load
from towline.bridge.config.model import Bridge
from towline.bridge.runtime import line_requests
from towline.bridge.runtime.status import collect_bridge
from towline.errors import ConfigError, GatewayError, TowlineError, did_you_mean
from towline.gateway.listen import TokenFile
from towline.monitor.bridge import BridgeMonitor
from towline.monitor.server import as_json

#: What may be asked for of a line, by the last part of the path.
_REQUESTS: Final[dict[str, Callable[[Path], object]]] = {
    "pause": partial(line_requests.pause, by="[monitor]"),
    "resume": line_requests.resume,
    "restart": line_requests.request_restart,
}
#: Code of an error → status of the answer; every other one is 503.
_STATUS: Final = {"TL-B73": 403, "TL-B74": 401, "TL-C73": 404}
#: Refused requests are logged once in so many seconds, with their number.
_QUIET_S: Final = 60.0
#: The file as `towline status` reads it, again when it has changed.
_bridge = lru_cache(maxsize=1)(lambda file, _version: load(file))


class BridgeLines:
    """The endpoints ``/lines`` of a bridge.

    Args:
        bridge: What its file says.
        monitor: Has the bridge's state.

    Raises:
        ConfigError: TL-C98, the file of tokens can't be used.
    """

    def __init__(self, bridge: Bridge, monitor: BridgeMonitor) -> None:
        self._bridge, self._monitor = bridge, monitor
        self._tokens = None if bridge.monitor.token_file is None else TokenFile(bridge.monitor.token_file)
        self._refused, self._quiet_until = 0, 0.0

    def routes(self) -> list[Route]:
        """What `towline.monitor.server.serve` answers besides."""
        asks = [
            Route(f"/lines/{{line}}/{verb}", partial(_answer, partial(self._ask, call), 202), methods=["POST"])
            for verb, call in _REQUESTS.items()
        ]
        return [Route("/lines", partial(_answer, self._status, 200)), *asks]

    def _status(self, _: Request) -> dict[str, Any]:
        file = self._bridge.file
        return collect_bridge(_bridge(file, files.version(file)))

    def _ask(self, call: Callable[[Path], object], request: Request) -> dict[str, Any]:
        """Write a request as `towline pause` does; how the line is now."""
        self._let_in(request.headers.get("authorization", ""))
        line, state = str(request.path_params["line"]), self._monitor.state
        lines = {} if state is None else state.lines
        if line not in lines:
            hint = did_you_mean(line, lines, "GET /lines has their names.")
            raise ConfigError("TL-C73", "[monitor]", f'no line is named "{line}"', hint)
        call(self._bridge.state_dir / line)
        return {"line": line, "state": lines[line].query}

    def _let_in(self, authorization: str) -> None:
        if self._tokens is None:
            do = "Name a file of tokens there and start the bridge again, or use towline pause, resume and restart."
            raise ConfigError("TL-B73", "[monitor]", "token_file is not set, and without it POST is refused", do)
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() == "bearer" and self._tokens.allows(token.strip()):
            return
        self._refused += 1
        if (state := self._monitor.state) is not None and time.monotonic() >= self._quiet_until:
            self._quiet_until = time.monotonic() + _QUIET_S
            state.say(f"[monitor]: requests refused that had no token of token_file: {self._refused:,}   [TL-B74]")
        do = 'Send the header "Authorization: Bearer TOKEN" with a line of the file that [monitor] token_file names.'
        raise GatewayError("TL-B74", "[monitor]", "the request has no token, or another one", do)


def _answer(make: Callable[[Request], dict[str, Any]], status: int, request: Request) -> Response:
    try:
        return as_json(make(request), status)
    except TowlineError as error:
        raise HTTPException(_STATUS.get(error.code, 503), f"{error}\n", {"WWW-Authenticate": "Bearer"}) from None
