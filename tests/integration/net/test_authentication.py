"""Enhanced authentication: SCRAM-SHA-256 of the example against a server that checks it, and servers that cheat."""

from __future__ import annotations

import base64
import hashlib
import hmac
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mqtt5 import AuthPacket, AuthReasonCode, ConnAckPacket, ConnAckReasonCode, ConnectPacket, DisconnectPacket, Packet

from tests.integration.net.scripted import Line, Scripted
from towline import Client, ClientSettings
from towline.errors import BrokerRefused, ProtocolViolation, TowlineError

EXAMPLE = Path(__file__).parents[3] / "examples" / "mqtt_scram.py"
SALT, ROUNDS, PASSWORD = b"0123456789abcdef", 4096, b"opensesame"
METHOD = "SCRAM-SHA-256"
MORE = AuthReasonCode.CONTINUE_AUTHENTICATION


def scram() -> Any:
    """The authenticator of the example."""
    return runpy.run_path(str(EXAMPLE))["ScramSha256"]("device,1", PASSWORD)


def auth(data: bytes, method: str = METHOD) -> AuthPacket:
    return AuthPacket(reason_code=MORE, authentication_method=method, authentication_data=data)


def challenged(line: Line) -> str:
    """Take CONNECT and answer with salt and rounds; what both sides have signed so far."""
    connect = line.expect(ConnectPacket)
    assert connect.authentication_method == METHOD
    assert connect.authentication_data is not None
    first = connect.authentication_data.decode().removeprefix("n,,")
    assert first.startswith("n=device=2C1,r=")
    asked = f"r={first.partition('r=')[2]}server,s={base64.b64encode(SALT).decode()},i={ROUNDS}"
    line.send(auth(asked.encode()))
    return f"{first},{asked}"


def judged(line: Line, signed: str) -> bytes | None:
    """The server's last update to the client's proof, None when that is wrong."""
    answer = line.expect(AuthPacket)
    assert (answer.reason_code, answer.authentication_method) == (MORE, METHOD)
    assert answer.authentication_data is not None
    told, _, proof = answer.authentication_data.decode().rpartition(",p=")
    salted = hashlib.pbkdf2_hmac("sha256", PASSWORD, SALT, ROUNDS)
    stored = hashlib.sha256(hmac.digest(salted, b"Client Key", "sha256")).digest()
    message = f"{signed},{told}".encode()
    signature = hmac.digest(stored, message, "sha256")
    key = bytes(a ^ b for a, b in zip(base64.b64decode(proof), signature, strict=True))
    if hashlib.sha256(key).digest() != stored:
        return None
    return b"v=" + base64.b64encode(hmac.digest(hmac.digest(salted, b"Server Key", "sha256"), message, "sha256"))


def honest(line: Line) -> None:
    word = judged(line, challenged(line))
    if word is None:
        line.send(ConnAckPacket(reason_code=ConnAckReasonCode.NOT_AUTHORIZED))
    else:
        line.send(ConnAckPacket(authentication_method=METHOD, authentication_data=word))
    assert line.closed()


def refused(script: Callable[[Line], object], **options: Any) -> TowlineError:
    with Scripted(script) as server, pytest.raises(TowlineError) as caught:
        Client(server.uri, client_id="x", settings=ClientSettings(**{"authenticator": scram(), **options}))
    assert PASSWORD.decode() not in str(caught.value)
    return caught.value


def test_scram_sha_256() -> None:
    """[MQTT-4.12.0-3], [MQTT-3.15.2-1], [MQTT-4.12.0-5]: AUTH is answered with AUTH, reason 0x18 and the method."""
    with (
        Scripted(honest) as server,
        Client(server.uri, client_id="x", settings=ClientSettings(authenticator=scram())) as client,
    ):
        assert client.online


@pytest.mark.parametrize("word", [b"v=AAAA", b"", None])
def test_a_server_without_a_proof_is_refused(word: bytes | None) -> None:
    """A server that accepts any password may be anybody's."""

    def script(line: Line) -> None:
        judged(line, challenged(line))
        line.send(ConnAckPacket(authentication_method=METHOD, authentication_data=word))
        assert line.closed()

    error = refused(script)
    assert (type(error), error.code) == (BrokerRefused, "TL-M28")
    assert "has not proved that it knows the password" in str(error)


@pytest.mark.parametrize(
    ("packet", "authenticates"),
    [
        (auth(b"x", "GS2-KRB5"), True),  # [MQTT-4.12.0-5]
        (ConnAckPacket(authentication_method=None), True),  # a server without authentication must not pass
        (ConnAckPacket(authentication_method="GS2-KRB5"), True),
        (auth(b"x"), False),  # [MQTT-4.12.0-6], [MQTT-4.12.0-7]: no AUTH leaves
    ],
)
def test_another_method_is_a_protocol_error(packet: Packet, authenticates: bool) -> None:
    def script(line: Line) -> None:
        assert (line.expect(ConnectPacket).authentication_method is not None) == authenticates
        line.send(packet)
        assert int(line.expect(DisconnectPacket).reason_code) == 0x82
        assert line.closed()

    options = {} if authenticates else {"authenticator": None}
    assert isinstance(refused(script, **options), ProtocolViolation)
