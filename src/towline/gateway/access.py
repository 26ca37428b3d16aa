"""How a client comes in to a gateway on another machine: which files hold its token and whom it trusts.

Plain strings, so that it travels to Spark's workers without a secret in it [I12]: the driver reads the token, a worker
shows a ticket (`towline.gateway.tickets`). Import-light, as everything that workers load.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from towline import files
from towline.errors import GatewayError

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Begins the location of a gateway that is reached over a network.
REMOTE: Final = "grpc+tls://"
#: Codes of the errors by which a gateway and its client do not come together until a person has changed a file: the
#: token is refused, the certificate is not accepted, or a file of the client's can't be used.
REFUSALS: Final = frozenset({"TL-G40", "TL-G44", "TL-G46"})
#: Characters of a token: as many hex digits hold 64 bits, which nobody guesses at a gateway's pace.
SHORTEST_TOKEN: Final = 16


def is_remote(location: str) -> bool:
    """Whether a location is reached over a network, where a token or a ticket is needed."""
    return location.startswith(REMOTE)


def tokens(content: bytes) -> tuple[str, ...]:
    """The tokens of a file, one a line; the first is the newest. Empty lines and those with ``#`` in front are none.

    Raises:
        ValueError: It holds none, or one that is no token; the text never shows it.
    """
    lines = [line.strip() for line in content.decode("ascii", "replace").splitlines()]
    found = tuple(line for line in lines if line and not line.startswith("#"))
    if not found:
        raise ValueError("it holds no token")
    if any(len(token) < SHORTEST_TOKEN or not all("!" <= each <= "~" for each in token) for token in found):
        raise ValueError(f"a token has at least {SHORTEST_TOKEN} letters, digits and signs of ASCII, one token a line")
    return found


@dataclass(frozen=True, slots=True)
class Access:
    """The files of a client, "" for none; each is read where and when it is needed.

    Attributes:
        token_file: Holds the gateway's token; of several lines the first counts. Read on the driver only.
        ca_file: The authorities that may have signed the gateway's certificate (PEM); the system's by default.
        server_name: Name in the gateway's certificate, where it is not the host of the location.
    """

    token_file: str = ""
    ca_file: str = ""
    server_name: str = ""

    def token(self) -> str:
        """The token, read fresh: one that was changed is used with the next call.

        Raises:
            GatewayError: TL-G46, the file can't be read or holds none.
        """
        if not self.token_file:
            raise _unusable(
                "gatewayTokenFile", "is not set, and this gateway is on a network", "Name the token's file."
            )
        try:
            return tokens(_content("gatewayTokenFile", self.token_file))[0]
        except ValueError as error:
            what = f"{self.token_file} can't be used: {error}"
            raise _unusable("gatewayTokenFile", what, "Make one with: openssl rand -hex 32") from None

    def authority(self) -> str:
        """The authorities as PEM text, which is no secret: it travels to the workers; "" for the system's.

        Raises:
            GatewayError: TL-G46, the file can't be read.
        """
        return _content("gatewayCaFile", self.ca_file).decode("ascii", "replace") if self.ca_file else ""

    def connection(self, authority: str = "") -> Mapping[str, object]:
        """What ``pyarrow.flight.connect`` takes, for one connection.

        Args:
            authority: The authorities, for a worker that has no file of them.

        Raises:
            GatewayError: TL-G46, a file can't be read on this machine.
        """
        trusted = authority or self.authority()
        given: dict[str, object] = {"tls_root_certs": trusted.encode()} if trusted else {}
        if self.server_name:
            given["override_hostname"] = self.server_name
        return given


def _content(option: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        do = "Put the file there, or correct the path."
        raise _unusable(option, f"{path} can't be read ({files.why(error)})", do) from error


def _unusable(option: str, what: str, do: str) -> GatewayError:
    return GatewayError("TL-G46", f"{option} on {socket.gethostname()}", what, do)
