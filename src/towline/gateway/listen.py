"""Where a gateway listens besides its unix socket: over a network, and there with TLS and a token, or not at all."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, field_validator, model_validator

from towline.gateway.access import REMOTE

__all__ = ["ListenSettings"]

#: ``HOST:PORT``, an address of IP version 6 in brackets.
_ADDRESS: Final = re.compile(r"(?P<host>\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._-]+):(?P<port>[0-9]{1,5})")
_NEEDED: Final = ("cert_file", "key_file", "token_file")


class ListenSettings(BaseModel):
    """A network address of a gateway.

    There is no form without TLS and token, not on loopback either: whoever is on this machine has the unix socket,
    which the rights of a file protect and which needs neither.

    Attributes:
        address: ``HOST:PORT`` to listen on; ``0.0.0.0`` or ``[::]`` for every address of the machine, port 0 for one
            that is free.
        cert_file: Certificate chain of the gateway (PEM).
        key_file: Its private key (PEM).
        token_file: Tokens, one a line; each of them lets a client in, so that one can be replaced without a stop.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    address: str
    cert_file: Path
    key_file: Path
    token_file: Path

    @model_validator(mode="before")
    @classmethod
    def _secured(cls, value: Any) -> Any:
        missing = [name for name in _NEEDED if not value.get(name)] if isinstance(value, Mapping) else []
        if missing:
            raise ValueError(f"what listens on a network has TLS and a token, and {' and '.join(missing)} is missing")
        return value

    @field_validator("address")
    @classmethod
    def _parsed(cls, value: str) -> str:
        match = _ADDRESS.fullmatch(value.strip())
        if match is None or int(match["port"]) > 65535:
            raise ValueError("it is HOST:PORT")
        return value.strip()

    @property
    def location(self) -> str:
        """As a location of Arrow Flight."""
        return f"{REMOTE}{self.address}"
