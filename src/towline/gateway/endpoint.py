"""Endpoint file of a gateway, and JSON form of its errors; plain files and values, no gRPC.

Imports little on purpose: Spark's Python workers load this module before they fork or read.
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import quote

from towline import errors, files
from towline.processes import ProcessIdentity

if TYPE_CHECKING:
    from collections.abc import Mapping

ENDPOINT_FILE = "endpoint.json"
ERROR_FILE = "gateway-error.json"
LOG_FILE = "gateway.log"

#: gRPC 1.x ends or changes the path at these characters even when they are escaped (measured, pyarrow 26).
_UNSAFE_URI_CHARS = frozenset("#?%")

#: sun_path holds 108 bytes with its end mark (unix(7)). gRPC takes 107 of them, Java 106 (UnixDomainSockets.c).
MAX_SOCKET_BYTES = 106


@dataclass(frozen=True, slots=True)
class GatewayEndpoint:
    """Content of ``<state_dir>/endpoint.json``: location, process and journal of a running gateway.

    Attributes:
        location: ``grpc+unix:///...``.
        started: Start time as in `ProcessIdentity`, with `pid` and `host`.
        since: UTC time of the start, ISO 8601.
        settings: Digest of the settings (`GatewaySettings.digest`), "" if unknown.
        owner_pid: Process whose end ends the gateway, None if there is no owner.
    """

    location: str
    pid: int
    started: int
    host: str
    name: str
    journal: str
    since: str
    settings: str = ""
    owner_pid: int | None = None

    @property
    def process(self) -> ProcessIdentity:
        """Process of the gateway."""
        return ProcessIdentity(self.pid, self.started, self.host)

    def write(self, state_dir: Path) -> None:
        """Write the endpoint file atomically, mode 0600."""
        files.replace(state_dir / ENDPOINT_FILE, json.dumps(asdict(self), indent=1), sync=False)

    @classmethod
    def read(cls, state_dir: Path) -> Self | None:
        """Read the endpoint file; None if it is missing or invalid. Raises as `read_state_file`."""
        try:
            return cls(**json.loads(read_state_file(state_dir / ENDPOINT_FILE) or ""))
        except (ValueError, TypeError):
            return None


def read_state_file(path: Path) -> str | None:
    """Return the text of a file in a state directory; None if it is missing or can't be read.

    Raises:
        StateAccessDenied: TL-B59, this user may not read it: it may or may not exist [I19].
    """
    try:
        return path.read_text(encoding="utf-8")
    except PermissionError:
        raise not_allowed_error(path) from None
    except (OSError, ValueError):
        return None


def not_allowed_error(path: Path) -> errors.StateAccessDenied:
    """Return TL-B59 with the owner of the directory that this user may not read."""
    try:
        owner = files.user_name(path.stat().st_uid)
    except OSError:
        return not_allowed_error(path.parent)
    remedy = "What is there is not known. Run the command as that user, or as root."
    return errors.StateAccessDenied("TL-B59", str(path), f"not allowed to look: it belongs to {owner}", remedy)


def socket_path(state_dir: Path) -> Path:
    """Choose the socket path: in the state directory, or in a new temporary directory if that path is unusable."""
    default_path = state_dir.absolute() / "gateway.sock"
    if len(os.fsencode(default_path)) <= MAX_SOCKET_BYTES and not _UNSAFE_URI_CHARS.intersection(str(default_path)):
        return default_path
    directory = short_directory(len("/towline-abcdefgh/gateway.sock"), tempfile.gettempdir())
    return Path(tempfile.mkdtemp(prefix="towline-", dir=directory)) / "gateway.sock"


def short_directory(name_bytes: int, *directories: str) -> str:
    """Return the first directory short enough for a socket whose name has `name_bytes` bytes; ``/tmp`` if none is."""
    room_bytes = MAX_SOCKET_BYTES - name_bytes
    return next((directory for directory in directories if len(os.fsencode(directory)) <= room_bytes), "/tmp")  # noqa: S108


def socket_location(socket: Path) -> str:
    """Return the Arrow Flight location of a socket, a URI: spaces and non-ASCII characters of the path are escaped."""
    return f"grpc+unix://{quote(os.fsencode(socket))}"


def error_fields(error: errors.TowlineError) -> dict[str, Any]:
    """Convert an error to JSON values, for the wire and for ``gateway-error.json``."""
    fields = {"code": error.code, "where": error.location, "what": error.problem, "do": error.remedy}
    return {"type": type(error).__name__, **fields}


def error_from(fields: Mapping[str, Any]) -> errors.TowlineError:
    """Rebuild the error from `error_fields`; an unknown type becomes a `GatewayError`."""
    error_class = vars(errors).get(str(fields.get("type")))
    base_class: type[errors.TowlineError] = errors.GatewayError
    if isinstance(error_class, type) and issubclass(error_class, errors.TowlineError):
        base_class = error_class
    while "__init__" in vars(base_class) and base_class is not errors.TowlineError:
        base_class = base_class.__bases__[0]  # a subclass with arguments of its own: its base takes the same line
    return base_class(*(str(fields.get(name, "")) for name in ("code", "where", "what", "do")))
