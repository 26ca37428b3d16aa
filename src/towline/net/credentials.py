"""Credentials of a connection: read, or asked for, at each one, so that a renewed one is used without a restart."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

from towline.errors import ConfigError, Unreachable
from towline.mqtt.events import Authenticator
from towline.net.connecting import Patience
from towline.net.endpoint import query_problem
from towline.net.settings import BrokerConnection
from towline.net.websocket import header_problem
from towline.providers import credential, secret_of

Headers = tuple[tuple[str, str], ...]

#: MQTT's password is binary data with a length of two bytes [MQTT 5 section 3.1.3.6].
_LONGEST_PASSWORD: Final = 0xFFFF
_URL: Final = re.compile(r"wss?://[^?]*\?")


def read_credentials(
    connection: BrokerConnection, cancelled: Callable[[], bool]
) -> tuple[dict[str, Any], Headers, str]:
    """The credentials as they are now: fields of `SessionConfig`, and headers and query of a WebSocket's request.

    Args:
        connection: Where they are.
        cancelled: Ends the wait for a provider, which has as long as a connection.

    Raises:
        ConfigError: TL-C31, a file can't be read, is empty, or holds something else. TL-C179, the authenticator.
        Unreachable: TL-C179, the provider gave no password: it may do better with the next try.
    """
    settings, session = connection.settings, connection.session
    headers, query = connection.websocket_headers, ""
    password, authenticator = session.password, session.authenticator
    if settings.password_file is not None:
        password = secret_of("password_file", settings.password_file, _password)
    elif settings.token_provider is not None:
        password = _provided(settings.token_provider, session.where, Patience(session.connect_timeout_s, cancelled))
    if isinstance(settings.authenticator, str):
        given = (session.username, password)
        authenticator = credential(settings.authenticator, session.where, _authenticator, "an Authenticator", *given)
    if settings.websocket_headers_file is not None:
        headers += secret_of("websocket_headers_file", settings.websocket_headers_file, _headers)
    if settings.websocket_query_file is not None:
        query = secret_of("websocket_query_file", settings.websocket_query_file, _query)
    return {"password": password, "authenticator": authenticator}, headers, query


def _provided(name: str, where: str, patience: Patience) -> bytes:
    try:
        return patience.call(lambda: credential(name, where, _password, "a password, text or bytes"))
    except ConfigError as error:
        raise Unreachable(error.code, error.where, error.what, error.do) from None
    except TimeoutError as error:
        raise Unreachable("TL-C179", where, f'"{name}" gave no password: {error}', "Trying again.") from None


def _password(given: Any) -> bytes:
    password = given.encode() if isinstance(given, str) else given
    if not isinstance(password, bytes) or not 0 < len(password) <= _LONGEST_PASSWORD:
        raise ValueError("a password of MQTT has 1 to 65,535 bytes")
    return password


def _authenticator(given: Any) -> Authenticator:
    if not all(hasattr(given, name) for name in ("method", "start", "challenge", "finish")):
        raise TypeError
    made: Authenticator = given
    return made


def _headers(content: bytes) -> Headers:
    """One header a line, as ``Name: value``."""
    lines = (line for line in content.decode("latin-1").splitlines() if line.strip())
    parts = [[part.strip() for part in line.partition(":")] for line in lines]
    for number, (name, colon, value) in enumerate(parts, start=1):
        if problem := header_problem(name, value) if colon else "it is no header, written as Name: value":
            raise ValueError(f"line {number}: {problem}")
    return tuple((name, value) for name, _, value in parts)


def _query(content: bytes) -> str:
    """The query alone, or that of a whole presigned URL."""
    query = _URL.sub("", content.decode("latin-1").strip(), count=1).removeprefix("?")
    if problem := query_problem(query):
        raise ValueError(problem)
    return query
