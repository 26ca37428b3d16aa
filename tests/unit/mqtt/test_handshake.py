"""What opens a connection, the authenticator's part, and what of CONNACK can't be lived with."""

from __future__ import annotations

from dataclasses import replace

import pytest
from mqtt5 import AuthPacket, AuthReasonCode, ConnAckPacket

from towline.errors import Refused
from towline.mqtt.events import Breach, SessionConfig
from towline.mqtt.handshake import Authentication, connect_packet, forgetful, too_narrow

CONFIG = SessionConfig("me", "here", session_expiry_s=600)


class Method:
    """An authenticator that fails where it is told to."""

    method = "PLAIN"

    def __init__(self, failure: Exception | None = None) -> None:
        self._failure = failure

    def _step(self, data: bytes) -> bytes:
        if self._failure is not None:
            raise self._failure
        return data

    def start(self) -> bytes:
        return self._step(b"first")

    def challenge(self, data: bytes) -> bytes:
        return self._step(b"to " + data)

    def finish(self, data: bytes) -> None:
        self._step(data)


def challenge(method: str = "PLAIN", reason: AuthReasonCode = AuthReasonCode.CONTINUE_AUTHENTICATION) -> AuthPacket:
    return AuthPacket(reason_code=reason, authentication_method=method, authentication_data=b"you")


@pytest.mark.parametrize(
    ("protocol", "expiry", "discarding", "clean"),
    [(5, 600, False, False), (5, 0, False, False), (5, 600, True, True), (4, 0, False, True), (4, 600, False, False)],
)
def test_clean_start_is_for_a_session_that_is_given_up(
    protocol: int, expiry: int, discarding: bool, clean: bool
) -> None:
    packet = connect_packet(
        replace(CONFIG, protocol=protocol, session_expiry_s=expiry), b"first", discarding=discarding
    )
    assert (packet.clean_start, packet.authentication_data) == (clean, b"first")
    assert packet.session_expiry_interval == (0 if discarding else expiry)


def test_an_exchange_is_carried_on() -> None:
    exchange = Authentication(Method(), "here")
    assert exchange.start() == b"first"
    answer = exchange.answer(challenge())
    assert (answer.authentication_method, answer.authentication_data) == ("PLAIN", b"to you")
    exchange.finish(b"proof")


def test_without_a_method_there_is_nothing_to_do() -> None:
    exchange = Authentication(None, "here")
    assert exchange.start() is None
    exchange.finish(b"")
    with pytest.raises(Breach, match=r"MQTT-4\.12\.0-5"):
        exchange.answer(challenge())


@pytest.mark.parametrize("packet", [challenge("OTHER"), challenge(reason=AuthReasonCode.SUCCESS)])
def test_an_auth_that_nobody_asked_for_breaks_the_protocol(packet: AuthPacket) -> None:
    with pytest.raises(Breach, match=r"MQTT-4\.12"):
        Authentication(Method(), "here").answer(packet)


@pytest.mark.parametrize(
    ("failure", "words"), [(ValueError("not you"), "failed: not you"), (KeyError("secret"), r"failed \(KeyError\)")]
)
def test_whatever_fails_is_one_line_without_a_secret(failure: Exception, words: str) -> None:
    exchange = Authentication(Method(failure), "here")
    steps = (exchange.start, lambda: exchange.answer(challenge()), lambda: exchange.finish(b"proof"))
    for step in steps:
        with pytest.raises(Refused, match=f"authentication with PLAIN {words}.*TL-M28") as caught:
            step()
        assert "secret" not in str(caught.value)


@pytest.mark.parametrize(("size", "narrow"), [(None, False), (4, False), (3, True)])
def test_an_acknowledgement_has_to_fit(size: int | None, narrow: bool) -> None:
    assert (too_narrow(ConnAckPacket(max_packet_size=size), "here") is not None) is narrow


@pytest.mark.parametrize(
    ("granted", "wanted", "durable", "refused"),
    [(0, 600, True, True), (None, 600, True, False), (0, 0, True, False), (0, 600, False, False)],
)
def test_a_session_that_is_not_kept_is_refused_where_one_is_needed(
    granted: int | None, wanted: int, durable: bool, refused: bool
) -> None:
    config = replace(CONFIG, session_expiry_s=wanted, durable=durable)
    assert (forgetful(ConnAckPacket(session_expiry_interval=granted), config) is not None) is refused
