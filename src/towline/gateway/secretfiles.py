"""What the files say that a gateway's settings name for its secrets."""

from __future__ import annotations

from pathlib import Path

from towline import files
from towline.errors import ConfigError
from towline.gateway.settings import GatewaySettings
from towline.net.transport import header_problem

__all__ = ["headers_of", "password_of"]


def password_of(settings: GatewaySettings) -> bytes | None:
    """MQTT's password; None without one.

    Raises:
        ConfigError: TL-C31, its file can't be read.
    """
    path = settings.password_file
    return None if path is None else _secret("password_file", path, "TL-C31")


def headers_of(settings: GatewaySettings) -> tuple[tuple[str, str], ...]:
    """Further headers of the request that opens a WebSocket; an error never shows a value.

    Raises:
        ConfigError: TL-C38, their file can't be read, or a line of it is no header.
    """
    path = settings.websocket_headers_file
    if path is None:
        return ()
    text = _secret("websocket_headers_file", path, "TL-C38").decode("latin-1")
    lines = [line for line in text.splitlines() if line.strip()]
    headers = []
    for number, line in enumerate(lines, start=1):
        name, colon, value = line.partition(":")
        problem = header_problem(name.strip(), value.strip()) if colon else "it is no header"
        if problem:
            raise ConfigError("TL-C38", f"{path}:{number}", problem, "Write one header a line, as Name: value.")
        headers.append((name.strip(), value.strip()))
    return tuple(headers)


def _secret(key: str, path: Path, code: str) -> bytes:
    """What is in a file that a setting names."""
    try:
        return files.secret(path)
    except OSError as error:
        what = f"{key} can't be read ({files.why(error)})"
        raise ConfigError(code, str(path), what, "Check its name and rights.") from error
