"""Enhanced authentication with Towline's MQTT client: SCRAM-SHA-256 (RFC 5802, RFC 7677) as an `Authenticator`.

    python examples/mqtt_scram.py mqtts://broker.example device-1 password-file

Neither side shows the password: the client proves that it knows it, and the broker proves the same in its CONNACK. A
broker that can't is refused (TL-M28).
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import hmac
import secrets
from pathlib import Path

from towline import Client, ClientSettings


class ScramSha256:
    """The client's side of one exchange after another; `start` begins a new one with each connection."""

    method = "SCRAM-SHA-256"

    def __init__(self, user: str, password: bytes) -> None:
        self._user = user.replace("=", "=3D").replace(",", "=2C")
        self._password = password
        self._first = ""
        self._proof_of_server: bytes | None = None

    def start(self) -> bytes:
        """The client's first message."""
        self._proof_of_server = None
        self._first = f"n={self._user},r={secrets.token_urlsafe(18)}"
        return b"n,," + self._first.encode()

    def challenge(self, data: bytes) -> bytes:
        """Salt and rounds of the server → our proof."""
        told = data.decode()
        fields = dict(part.split("=", 1) for part in told.split(","))
        if not fields["r"].startswith(self._first.partition("r=")[2]):
            raise ValueError("the server did not repeat our nonce")
        if int(fields["i"]) < 4096:
            raise ValueError("the server wants fewer than 4,096 rounds")
        salted = hashlib.pbkdf2_hmac("sha256", self._password, base64.b64decode(fields["s"]), int(fields["i"]))
        client_key = hmac.digest(salted, b"Client Key", "sha256")
        answer = f"c=biws,r={fields['r']}"
        signed = f"{self._first},{told},{answer}".encode()
        signature = hmac.digest(hashlib.sha256(client_key).digest(), signed, "sha256")
        proof = bytes(a ^ b for a, b in zip(client_key, signature, strict=True))
        self._proof_of_server = hmac.digest(hmac.digest(salted, b"Server Key", "sha256"), signed, "sha256")
        return f"{answer},p={base64.b64encode(proof).decode()}".encode()

    def finish(self, data: bytes) -> None:
        """Check that the server knows the password too."""
        if self._proof_of_server is None:
            raise ValueError("the server asked for no proof")
        expected = b"v=" + base64.b64encode(self._proof_of_server)
        if not hmac.compare_digest(data, expected):
            raise ValueError("the server has not proved that it knows the password")


def main() -> None:
    """Connect and say so."""
    parser = argparse.ArgumentParser(description="Log in with SCRAM-SHA-256.")
    parser.add_argument("uri")
    parser.add_argument("user")
    parser.add_argument("password_file", type=Path)
    given = parser.parse_args()
    password = given.password_file.read_bytes().rstrip(b"\r\n")
    with Client(
        given.uri, client_id=given.user, settings=ClientSettings(authenticator=ScramSha256(given.user, password))
    ):
        print(f"online at {given.uri}")


if __name__ == "__main__":
    main()
