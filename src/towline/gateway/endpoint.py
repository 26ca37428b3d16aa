"""Where a gateway listens, who it is, and how its errors travel: plain files and values, no gRPC.

Import-light on purpose: Spark's Python workers load this module before they fork or read.
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
from towline.processes import ProcessMark

if TYPE_CHECKING:
    from collections.abc import Mapping

ENDPOINT_FILE = "endpoint.json"
ERROR_FILE = "gateway-error.json"
LOG_FILE = "gateway.log"

#: Escaped in a location, they end or change the path in gRPC 1.x all the same (measured, pyarrow 26).
_NOT_IN_A_LOCATION = frozenset("#?%")

#: sun_path holds 108 bytes with its end mark (unix(7)). gRPC takes 107 of them, Java 106 (UnixDomainSockets.c).
MAX_SOCKET_BYTES = 106


@dataclass(frozen=True, slots=True)
class GatewayEndpoint:
    """What ``<state_dir>/endpoint.json`` says: enough to find a gateway and to see that it is the one.

    Attributes:
        location: ``grpc+unix:///...``.
        started: As `ProcessMark` has it, with `pid` and `host`.
        since: UTC time of the start, ISO 8601.
        settings: Digest of the settings (`GatewaySettings.digest`), "" when unknown.
        owner_pid: Process whose end ends the gateway, None for a gateway of its own.
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
    def process(self) -> ProcessMark:
        """The gateway's process."""
        return ProcessMark(self.pid, self.started, self.host)

    def write(self, state_dir: Path) -> None:
        """Publish the endpoint atomically, mode 0600."""
        files.replace(state_dir / ENDPOINT_FILE, json.dumps(asdict(self), indent=1), synced=False)

    @classmethod
    def read(cls, state_dir: Path) -> Self | None:
        """Read the endpoint; None when there is none, or it is not one of ours. Raises as `text_of`."""
        try:
            return cls(**json.loads(text_of(state_dir / ENDPOINT_FILE) or ""))
        except (ValueError, TypeError):
            return None


def text_of(path: Path) -> str | None:
    """The text of a file in a state directory; None where there is none, or it can't be read.

    Raises:
        NotAllowed: TL-B59, this user may not read it: whether it is there is not known [I19].
    """
    try:
        return path.read_text(encoding="utf-8")
    except PermissionError:
        raise not_allowed(path) from None
    except (OSError, ValueError):
        return None


def not_allowed(path: Path) -> errors.NotAllowed:
    """TL-B59: whose the place is that this user may not look into."""
    try:
        owner = files.user_name(path.stat().st_uid)
    except OSError:
        return not_allowed(path.parent)
    do = "What is there is not known. Run the command as that user, or as root."
    return errors.NotAllowed("TL-B59", str(path), f"not allowed to look: it belongs to {owner}", do)


def socket_path(state_dir: Path) -> Path:
    """Choose where the socket lives: in the state directory, or in a private one where that path can't be said."""
    near = state_dir.absolute() / "gateway.sock"
    if len(os.fsencode(near)) <= MAX_SOCKET_BYTES and not _NOT_IN_A_LOCATION.intersection(str(near)):
        return near
    elsewhere = short_place(len("/towline-abcdefgh/gateway.sock"), tempfile.gettempdir())
    return Path(tempfile.mkdtemp(prefix="towline-", dir=elsewhere)) / "gateway.sock"


def short_place(name: int, *places: str) -> str:
    """The first directory in which a socket whose name has so many bytes can be bound, ``/tmp`` where there is none."""
    return next((one for one in places if len(os.fsencode(one)) + name <= MAX_SOCKET_BYTES), "/tmp")  # noqa: S108


def location_of(socket: Path) -> str:
    """A socket as a location of Arrow Flight, which is a URI: spaces and other scripts in a path are escaped."""
    return f"grpc+unix://{quote(os.fsencode(socket))}"


def error_fields(error: errors.TowlineError) -> dict[str, Any]:
    """Write an error as JSON values, for the wire and for ``gateway-error.json``."""
    several = {"errors": [*map(error_fields, error.errors)]} if isinstance(error, errors.ConfigErrors) else {}
    fields = {"code": error.code, "where": error.where, "what": error.what, "do": error.do}
    return {"type": type(error).__name__, **fields, **several}


def error_from(fields: Mapping[str, Any]) -> errors.TowlineError:
    """Make the error again that `error_fields` wrote; an unknown type becomes a `GatewayError`."""
    several = fields.get("errors")
    if found := [one for one in map(error_from, several or ()) if isinstance(one, errors.ConfigError)]:
        return errors.ConfigErrors(found)
    named = vars(errors).get(str(fields.get("type")))
    kind: type[errors.TowlineError] = errors.GatewayError
    if isinstance(named, type) and issubclass(named, errors.TowlineError):
        kind = named
    while "__init__" in vars(kind) and kind is not errors.TowlineError:
        kind = kind.__bases__[0]  # a subclass with arguments of its own: its base takes the same line
    return kind(*(str(fields.get(name, "")) for name in ("code", "where", "what", "do")))
