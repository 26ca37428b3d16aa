"""What opens a connection, the authenticator's part, and what of CONNACK can't be lived with."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import pytest
from mqtt5 import AuthPacket, AuthReasonCode, ConnAckPacket

from tests.unit.mqtt.sessions import Method, challenge
from towline.errors import BrokerRefused
from towline.mqtt.events import BrokerProtocolError, SessionConfig
from towline.mqtt.handshake import answer_challenge, authenticate, check_connack, connect_packet

CONFIG = SessionConfig("me", "here", session_expiry_s=600)


@pytest.mark.parametrize(
    ("protocol", "expiry", "discarding", "clean"),
    [(5, 600, False, False), (5, 0, False, False), (5, 600, True, True), (4, 0, False, True), (4, 600, False, False)],
)
def test_clean_start_is_for_a_session_that_is_given_up(
    protocol: int, expiry: int, discarding: bool, clean: bool
) -> None:
    """[MQTT-3.1.2-6 of 3.1.1]: CleanSession says that there is no old state, and that none stays."""
    packet = connect_packet(
        replace(CONFIG, protocol=protocol, session_expiry_s=expiry), b"first", discard_session=discarding
    )
    assert (packet.clean_start, packet.authentication_data) == (clean, b"first")
    assert packet.session_expiry_interval == (0 if discarding else expiry)


def config_with(failure: Exception | None = None) -> SessionConfig:
    return replace(CONFIG, authenticator=Method(failure))


@pytest.mark.parametrize("packet", [challenge("OTHER"), challenge(reason=AuthReasonCode.SUCCESS)])
def test_an_auth_that_nobody_asked_for_breaks_the_protocol(packet: AuthPacket) -> None:
    with pytest.raises(BrokerProtocolError, match=r"MQTT-4\.12\.0-5"):
        answer_challenge(challenge(), CONFIG)
    with pytest.raises(BrokerProtocolError, match=r"MQTT-4\.12"):
        answer_challenge(packet, config_with())


@pytest.mark.parametrize(
    ("failure", "words"), [(ValueError("not you"), "failed: not you"), (KeyError("secret"), r"failed \(KeyError\)")]
)
def test_whatever_fails_is_one_line_without_a_secret(failure: Exception, words: str) -> None:
    config = config_with(failure)
    steps: tuple[Callable[[], object], ...] = (
        lambda: authenticate(config, lambda method: method.start()),
        lambda: answer_challenge(challenge(), config),
        lambda: authenticate(config, lambda method: method.finish(b"proof")),
    )
    for step in steps:
        with pytest.raises(BrokerRefused, match=f"authentication with PLAIN {words}.*TL-M28") as caught:
            step()
        assert "secret" not in str(caught.value)


@pytest.mark.parametrize(("size", "code"), [(None, None), (4, None), (3, "TL-M16")])
def test_an_acknowledgement_has_to_fit(size: int | None, code: str | None) -> None:
    with pytest.raises(BrokerRefused, match=code) if code else nullcontext():
        check_connack(ConnAckPacket(max_packet_size=size), CONFIG, discard_session=False)


@pytest.mark.parametrize(
    ("granted", "wanted", "durable", "discarding", "refused"),
    [
        (0, 600, True, False, True),
        (None, 600, True, False, False),
        (0, 0, True, False, False),
        (0, 600, False, False, False),
        (0, 600, True, True, False),
    ],
)
def test_a_session_that_is_not_kept_is_refused_where_one_is_needed(
    granted: int | None, wanted: int, durable: bool, discarding: bool, refused: bool
) -> None:
    config = replace(CONFIG, session_expiry_s=wanted, durable=durable)
    packet = ConnAckPacket(session_expiry_interval=granted)
    with pytest.raises(BrokerRefused, match="TL-M12") if refused else nullcontext():
        check_connack(packet, config, discard_session=discarding)
