"""``[gateway]`` of a bridge file: where gateways listen on a network, and what lets Spark in to gateways elsewhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Final

from pydantic import Field

from towline.bridge.config.section import Section
from towline.gateway.access import Access
from towline.gateway.tickets import DEFAULT_VALID_S, LONGEST_VALID_S

__all__ = ["GatewaySection", "in_the_file"]

#: Keys that let Spark in, and the options of ``format("mqtt")`` that say the same.
_OPTIONS: Final = {
    "token_file": "gatewayTokenFile",
    "ca_file": "gatewayCaFile",
    "server_name": "gatewayServerName",
}
_KEYS: Final = {option: key for key, option in _OPTIONS.items()}


class GatewaySection(Section):
    """The table as written.

    Attributes:
        listen: ``HOST:PORT`` of the gateway on a network; None for its unix socket alone. A line may have its own.
        cert_file: Certificate chain of a gateway that listens (PEM).
        key_file: Its private key (PEM).
        token_file: Tokens, one a line; a gateway takes each, Spark shows the first.
        ca_file: Authorities that Spark trusts in gateways elsewhere; None for the system's.
        server_name: Name in their certificates, where it is not the host that is named.
        ticket_valid_s: Seconds that a ticket of Spark's workers is worth something.
    """

    listen: str | None = None
    cert_file: Path | None = None
    key_file: Path | None = None
    token_file: Path | None = None
    ca_file: Path | None = None
    server_name: str = Field(default="", max_length=253)
    ticket_valid_s: Annotated[float, Field(ge=60, le=LONGEST_VALID_S)] = DEFAULT_VALID_S

    def access(self) -> Access:
        """What lets Spark in."""
        return Access(str(self.token_file or ""), str(self.ca_file or ""), self.server_name)

    def options(self) -> dict[str, str]:
        """What lets Spark in, as options of its source and sink."""
        access = self.access()
        said = {option: getattr(access, key) for key, option in _OPTIONS.items()}
        said |= {"gatewayTicketValidity": f"{self.ticket_valid_s:g}"}
        return {option: value for option, value in said.items() if value}


def in_the_file(message: str) -> str:
    """Name options of Spark in an error as the keys of ``[gateway]`` that hold them."""
    return re.sub("|".join(_KEYS), lambda found: f"{_KEYS[found[0]]} of [gateway]", message)
