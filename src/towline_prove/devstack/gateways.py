"""What gateways that listen on a network need: addresses that are free, a certificate, a token."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from towline import files
from towline_prove.devstack.certificates import certificates
from towline_prove.devstack.ports import LOOPBACK, free_port
from towline_prove.devstack.secured import secret_of

__all__ = ["GatewayFiles", "gateway_files"]

#: Gateways that may be started beside one stack.
_GATEWAYS: Final = 2


@dataclass(frozen=True, slots=True)
class GatewayFiles:
    """For ``[gateway]`` of a bridge file; the gateways themselves are the user's to start.

    Attributes:
        addresses: ``HOST:PORT`` of each.
        cert_file: Certificate for localhost and 127.0.0.1.
        key_file: Its key.
        ca_file: Who signed it.
        token_file: The token.
    """

    addresses: tuple[str, ...]
    cert_file: Path
    key_file: Path
    ca_file: Path
    token_file: Path


def gateway_files(directory: Path) -> GatewayFiles:
    """The files in a directory, made where they are missing.

    Raises:
        SetupError: TL-S22, a certificate can't be made.
    """
    made = certificates(directory)
    ports = directory / "ports.json"
    if not ports.exists():
        files.replace(ports, json.dumps([free_port() for _ in range(_GATEWAYS)]), synced=False)
    addresses = tuple(f"{LOOPBACK}:{port}" for port in json.loads(ports.read_text(encoding="ascii")))
    return GatewayFiles(addresses, made.server, made.server_key, made.authority, secret_of(directory / "token"))
