"""Who may read the page and act on it: tokens of clients, and sessions of browsers that have shown one.

A session is a random cookie (HttpOnly, SameSite=Strict, 12 h), in memory only. Its token is compared again at each
request, so a token that is removed from its file ends its sessions. A request that changes something must come from
the page's own origin: the cookie is sent to every port of a host.
"""

from __future__ import annotations

import hmac
import secrets
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import Response

from towline.gateway.access import TokenFile

SESSION_S: Final = 12 * 3600.0
#: Most sessions; the oldest ends for a new one.
_MAX_SESSIONS: Final = 64


@dataclass(frozen=True, slots=True)
class _Session:
    secret: str = field(repr=False)
    expires_at: float


class SessionStore:
    """Sessions of browsers.

    Args:
        token_file: Tokens that open a session; None for none.
        link_key: Key that opens a session too, of the link that `towline ui` prints; "" for none.
        is_tls: Whether browsers reach the server over TLS only.
    """

    def __init__(self, token_file: TokenFile | None, link_key: str = "", *, is_tls: bool = False) -> None:
        self._token_file, self._link_key, self._is_tls = token_file, link_key, is_tls
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        #: Whether there is anything that opens a session.
        self.can_open = token_file is not None or bool(link_key)

    def accepts(self, secret: str) -> bool:
        """Return True for the key of the link or a token of the file."""
        is_key = bool(self._link_key) and hmac.compare_digest(secret.encode(), self._link_key.encode())
        return is_key or (self._token_file is not None and self._token_file.accepts(secret))

    def open(self, request: Request, response: Response, secret: str) -> bool:
        """Open a session, and set its cookie in the response; return False for a wrong secret."""
        if not self.accepts(secret):
            return False
        session_id = secrets.token_urlsafe(32)
        self._sessions[session_id] = _Session(secret, time.monotonic() + SESSION_S)
        while len(self._sessions) > _MAX_SESSIONS:
            self._sessions.popitem(last=False)
        response.set_cookie(
            _cookie_name(request), session_id, int(SESSION_S), httponly=True, samesite="strict", secure=self._is_tls
        )
        return True

    def close(self, request: Request, response: Response) -> None:
        """End the session of a request."""
        self._sessions.pop(request.cookies.get(_cookie_name(request), ""), None)
        response.delete_cookie(_cookie_name(request), httponly=True, samesite="strict", secure=self._is_tls)

    def is_signed_in(self, request: Request) -> bool:
        """Return True for a request with the cookie of a session, or with a token as ``Bearer``.

        A cookie alone permits no request of another origin that changes something.
        """
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if scheme:
            return (
                scheme.lower() == "bearer" and self._token_file is not None and self._token_file.accepts(token.strip())
            )
        session_id = request.cookies.get(_cookie_name(request), "")
        session = self._sessions.get(session_id)
        if session is None or (request.method not in ("GET", "HEAD") and not is_same_origin(request)):
            return False
        if time.monotonic() < session.expires_at and self.accepts(session.secret):
            return True
        self._sessions.pop(session_id, None)
        return False


def is_same_origin(request: Request) -> bool:
    """Return True for a request of a page of this server, as the browser says.

    A browser that does not send Sec-Fetch-Site (W3C Fetch Metadata) sends Origin; behind a proxy only the first helps.
    """
    if site := request.headers.get("sec-fetch-site"):
        return site == "same-origin"
    origin = urlsplit(request.headers.get("origin", ""))
    return (origin.scheme, origin.netloc) == (request.url.scheme, request.headers.get("host"))


def _cookie_name(request: Request) -> str:
    """Return the cookie's name, which has the port: all ports of a host share their cookies."""
    return f"towline-{request.url.port or 443}"
