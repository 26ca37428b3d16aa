"""What opens a connection, the authenticator's part, and what of CONNACK can't be lived with."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

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


@pytest.mark.parametrize(
    ("connack", "given", "discarding", "code"),
    [
        ({"max_packet_size": None}, {}, False, None),
        ({"max_packet_size": 4}, {}, False, None),
        ({"max_packet_size": 3}, {}, False, "TL-M16"),  # an acknowledgement has to fit
        ({"session_expiry_interval": 0}, {}, False, "TL-M12"),
        ({"session_expiry_interval": None}, {}, False, None),
        ({"session_expiry_interval": 0}, {"session_expiry_s": 0}, False, None),
        ({"session_expiry_interval": 0}, {"durable": False}, False, None),
        ({"session_expiry_interval": 0}, {}, True, None),
    ],
)
def test_a_limit_that_can_not_be_lived_with_is_refused(
    connack: dict[str, Any], given: dict[str, Any], discarding: bool, code: str | None
) -> None:
    """A session that is not kept, where one is needed."""
    with pytest.raises(BrokerRefused, match=code) if code else nullcontext():
        check_connack(ConnAckPacket(**connack), replace(CONFIG, **given), discard_session=discarding)
