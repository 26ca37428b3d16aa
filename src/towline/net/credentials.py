"""Credentials of a connection: read, or asked for, at each one, so that a renewed one is used without a restart."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from towline import files
from towline.errors import ConfigError, Unreachable
from towline.mqtt.events import Authenticator, Login
from towline.net.options import ConnectionOptions
from towline.net.transport import header_problem, query_problem
from towline.net.transport.patience import Patience
from towline.providers import credential

__all__ = ["Credentials", "read_credentials"]

#: MQTT's password is binary data with a length of two bytes [MQTT 5 section 3.1.3.6].
_LONGEST_PASSWORD: Final = 0xFFFF
_URL: Final = re.compile(r"wss?://[^?]*\?")


class Credentials(NamedTuple):
    """What one connection shows.

    Attributes:
        login: For MQTT.
        headers: Of the request that opens a WebSocket.
        query: Of the same; "" for that of the broker's URI, or none.
    """

    login: Login
    headers: tuple[tuple[str, str], ...]
    query: str


def read_credentials(options: ConnectionOptions, cancelled: Callable[[], bool]) -> Credentials:
    """The credentials as they are now.

    Args:
        options: Where they are.
        cancelled: Ends the wait for a provider, which has as long as a connection.

    Raises:
        ConfigError: TL-C31, TL-C38, a file can't be read, is empty, or holds something else. TL-C179, the
            authenticator can't be had.
        Unreachable: TL-C179, the provider gave no password: it may do better with the next try.
    """
    session = options.session
    password = session.password
    if options.password_file is not None:
        password = _secret("password_file", Path(options.password_file), "TL-C31")
        if len(password) > _LONGEST_PASSWORD:
            what = f"password_file has {len(password):,} bytes, and a password of MQTT at most 65,535"
            raise ConfigError("TL-C31", str(options.password_file), what, "Check that it is the right file.")
    elif options.token_provider is not None:
        password = _provided(options.token_provider, session.where, Patience(session.connect_timeout_s, cancelled))
    authenticator = session.authenticator
    if options.authenticator is not None:
        what = "an authenticator (towline.mqtt.Authenticator)"
        authenticator = credential(
            options.authenticator, session.where, _authenticator, what, session.username, password
        )
    headers = (*options.websocket_headers, *_headers(options.websocket_headers_file))
    return Credentials(Login(password, authenticator), headers, _query(options.websocket_query_file))


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
        raise ValueError
    return password


def _authenticator(given: Any) -> Authenticator:
    given.method, given.start, given.challenge, given.finish  # noqa: B018 - AttributeError for what is none
    authenticator: Authenticator = given
    return authenticator


def _headers(path: str | Path | None) -> Sequence[tuple[str, str]]:
    """The headers of a file, ``Name: value`` a line; an error never shows a value."""
    if path is None:
        return ()
    text = _secret("websocket_headers_file", Path(path), "TL-C38").decode("latin-1")
    headers = []
    for number, line in enumerate((line for line in text.splitlines() if line.strip()), start=1):
        name, colon, value = (part.strip() for part in line.partition(":"))
        if problem := header_problem(name, value) if colon else "it is no header":
            raise ConfigError("TL-C38", f"{path}:{number}", problem, "Write one header a line, as Name: value.")
        headers.append((name, value))
    return headers


def _query(path: str | Path | None) -> str:
    """The query in a file, or that of a whole presigned URL there."""
    if path is None:
        return ""
    query = _URL.sub("", _secret("websocket_query_file", Path(path), "TL-C38").decode("latin-1").strip(), count=1)
    query = query.removeprefix("?")
    if problem := query_problem(query):
        raise ConfigError("TL-C38", str(path), problem, "Write the query alone, or the whole presigned URL.")
    return query


def _secret(key: str, path: Path, code: str) -> bytes:
    """The content of a file that a setting names."""
    try:
        if content := files.secret(path.expanduser()):
            return content
        what = f"{key} is empty: is it being written?"
    except OSError as error:
        what = f"{key} can't be read ({files.why(error)})"
    raise ConfigError(code, str(path), what, "Check its name, rights and content; it is read at each connection.")
