"""``[gateway]`` of a bridge file: where gateways listen on a network, and what lets Spark in to gateways elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from towline.bridge.config.section import Section
from towline.gateway.access import Access
from towline.gateway.tickets import DEFAULT_VALID_S, LONGEST_VALID_S

__all__ = ["GatewaySection"]


class GatewaySection(Section):
    """The table as written.

    Attributes:
        listen: ``HOST:PORT`` of the gateway on a network; None for its unix socket alone. A line may have its own.
        cert_file: Certificate chain (PEM): of a gateway that listens, and where none does, of Spark as a client (mTLS).
        key_file: Its private key (PEM).
        client_ca_file: A gateway that listens asks its clients for certificates of these authorities (mTLS).
        token_file: Tokens, one a line; a gateway takes each, Spark shows the first.
        ca_file: Authorities that Spark trusts in gateways elsewhere; None for the system's.
        server_name: Name in their certificates, where it is not the host that is named.
        ticket_valid_s: Seconds that a ticket of Spark's workers is worth something.
    """

    listen: str | None = None
    cert_file: Path | None = None
    key_file: Path | None = None
    client_ca_file: Path | None = None
    token_file: Path | None = None
    ca_file: Path | None = None
    server_name: str = Field(default="", max_length=253)
    ticket_valid_s: Annotated[float, Field(ge=60, le=LONGEST_VALID_S)] = DEFAULT_VALID_S

    def access(self) -> Access:
        """What lets Spark in."""
        files = {name: str(getattr(self, name) or "") for name in ("token_file", "ca_file", "cert_file", "key_file")}
        return Access(**files, server_name=self.server_name)
