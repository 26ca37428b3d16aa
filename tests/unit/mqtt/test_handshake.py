"""What opens a connection, the authenticator's part, and what CONNACK and DISCONNECT say."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
from mqtt5 import (
    AuthPacket,
    AuthReasonCode,
    ConnAckPacket,
    ConnAckReasonCode,
    DisconnectPacket,
    DisconnectReasonCode,
    QoS,
    Will,
)
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.reasoncodes import ReasonCode

from tests.unit.mqtt.sessions import Method, challenge, online, only, receive
from towline.errors import BrokerRefused, TakenOver, Unreachable
from towline.mqtt import reasons
from towline.mqtt.events import BrokerProtocolError, Close, Filter, SessionConfig
from towline.mqtt.handshake import (
    answer_challenge,
    authenticate,
    check_connack,
    connect_packet,
    connection_ended,
    connection_refused,
    unsupported_subscription,
)

CONFIG = SessionConfig("me", "here", session_expiry_s=600)
#: A CONNACK of a broker that knows the password too.
PROVEN = {"authentication_method": "PLAIN", "authentication_data": b"proof"}


@pytest.mark.parametrize(
    ("protocol", "expiry", "discarding", "clean"),
    [(5, 600, False, False), (5, 0, False, False), (5, 600, True, True), (4, 0, False, True), (4, 600, False, False)],
)
def test_clean_start_is_for_a_session_that_is_given_up(
    protocol: int, expiry: int, discarding: bool, clean: bool
) -> None:
    """[MQTT-3.1.2-6 of 3.1.1]: CleanSession says that there is no old state, and that none stays.

    The will is as it was given, with its QoS [MQTT-3.1.2-12].
    """
    config = replace(CONFIG, protocol=protocol, session_expiry_s=expiry, will=Will("state", qos=QoS(2)))
    packet = connect_packet(config, b"first", discard_session=discarding)
    assert packet.will == config.will
    assert (packet.clean_start, packet.authentication_data) == (clean, b"first")
    assert packet.session_expiry_interval == (0 if discarding else expiry)


@pytest.mark.parametrize("packet", [challenge("OTHER"), challenge(reason=AuthReasonCode.SUCCESS)])
def test_an_auth_that_nobody_asked_for_breaks_the_protocol(packet: AuthPacket) -> None:
    with pytest.raises(BrokerProtocolError, match=r"MQTT-4\.12\.0-5"):
        answer_challenge(challenge(), CONFIG)
    with pytest.raises(BrokerProtocolError, match=r"MQTT-4\.12"):
        answer_challenge(packet, replace(CONFIG, authenticator=Method()))


@pytest.mark.parametrize(
    ("failure", "words"), [(ValueError("not you"), "failed: not you"), (KeyError("secret"), r"failed \(KeyError\)")]
)
def test_whatever_fails_is_one_line_without_a_secret(failure: Exception, words: str) -> None:
    config = replace(CONFIG, authenticator=Method(failure))
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
    ("connack", "given", "discarding", "refusal"),
    [
        ({}, {}, False, ""),
        ({"max_packet_size": 4}, {}, False, ""),
        ({"max_packet_size": 3}, {}, False, "TL-M16"),  # an acknowledgement has to fit
        ({"session_expiry_interval": 0}, {}, False, "TL-M12"),
        ({"session_expiry_interval": 0}, {"session_expiry_s": 0}, False, ""),
        ({"session_expiry_interval": 0}, {"durable": False}, False, ""),
        ({"session_expiry_interval": 0}, {}, True, ""),
        ({"session_present": True}, {}, False, ""),
        ({"session_present": True}, {}, True, "after Clean Start"),  # [MQTT-3.2.2-2]
        ({"assigned_client_id": "x"}, {}, False, "assigned a client id"),
        (PROVEN, {"authenticator": Method()}, False, ""),
        (PROVEN, {}, False, "did not ask for"),
        ({"authentication_method": "OTHER"}, {"authenticator": Method()}, False, "did not ask for"),
        (PROVEN | {"authentication_data": b"other"}, {"authenticator": Method()}, False, "TL-M28"),
        (PROVEN | {"authentication_data": None}, {"authenticator": Method()}, False, "TL-M28"),
        ({}, {"authenticator": Method()}, False, "without the Authentication Method PLAIN"),
    ],
)
def test_a_connack_is_refused_that_nobody_asked_for_or_that_can_not_be_lived_with(
    connack: dict[str, Any], given: dict[str, Any], discarding: bool, refusal: str
) -> None:
    error = BrokerRefused if refusal.startswith("TL-") else BrokerProtocolError
    with pytest.raises(error, match=refusal) if refusal else nullcontext():
        check_connack(ConnAckPacket(**connack), replace(CONFIG, **given), discard_session=discarding)


@pytest.mark.parametrize(
    ("wanted", "server", "what"),
    [
        (Filter("$share/g/a"), ConnAckPacket(shared_subscription_available=False), "no shared subscriptions"),
        (Filter("a", identifier=1), ConnAckPacket(subscription_id_available=False), "no subscription identifiers"),
        (Filter("+/a"), ConnAckPacket(wildcard_subscription_available=False), "no wildcards"),
    ],
)
def test_what_a_server_offers_not_is_refused_where_it_is_wanted(
    wanted: Filter, server: ConnAckPacket, what: str
) -> None:
    error = unsupported_subscription(server, [Filter("plain"), wanted], "line")
    assert what in str(error)
    assert wanted.pattern in str(error)
    assert unsupported_subscription(server, [Filter("plain")], "line") is None
    assert unsupported_subscription(ConnAckPacket(), [wanted], "line") is None


def codes(kind: Any) -> dict[str, int]:
    """The codec's name of each code of a packet."""
    return {name: int(code) for name, code in vars(kind).items() if name.isupper()}


def test_every_code_has_a_name() -> None:
    """Those that a foreign codec knows."""
    foreign = ReasonCode(PacketTypes.PUBACK).names
    assert len(foreign) > 40
    assert "unknown reason" not in map(reasons.reason_name, foreign.keys() - {1, 2})  # granted QoS, which is no reason
    assert reasons.reason_name(0x97) == "quota exceeded"
    assert reasons.reason_name(0x7E) == "unknown reason"
    assert "ends the connection" in reasons.reason_name(reasons.CONNECTION_CUT)


#: What MQTT 5 section 3.14.2.1 lets a server say of a packet of ours; of the others no message is to blame.
ABOUT_A_PACKET = {"UNSPECIFIED_ERROR", "MALFORMED_PACKET", "PROTOCOL_ERROR", "IMPLEMENTATION_SPECIFIC_ERROR"}
ABOUT_A_PACKET |= {"NOT_AUTHORIZED", "TOPIC_NAME_INVALID", "TOPIC_ALIAS_INVALID", "PACKET_TOO_LARGE"}
ABOUT_A_PACKET |= {"PAYLOAD_FORMAT_INVALID", "RETAIN_NOT_SUPPORTED", "QOS_NOT_SUPPORTED"}


@pytest.mark.parametrize(("name", "code"), codes(DisconnectReasonCode).items())
def test_a_disconnect_counts_against_a_message_where_it_may_be_about_one(name: str, code: int) -> None:
    """One that makes the broker end the connection is found by it (`towline.mqtt.outbound.CulpritFinder`)."""
    session = online()
    close = only(receive(session, DisconnectPacket(reason_code=DisconnectReasonCode(code))), Close)
    assert session.ended_by_broker is (name in ABOUT_A_PACKET)
    assert (close.fatal, close.reconnect_at_once) == (name == "SERVER_MOVED", False)
    assert isinstance(close.error, TakenOver) is (name == "SESSION_TAKEN_OVER")


#: What the next try would meet again.
FOR_GOOD = {"MALFORMED_PACKET", "PROTOCOL_ERROR", "UNSUPPORTED_PROTOCOL_VERSION", "CLIENT_ID_NOT_VALID"}
FOR_GOOD |= {"BAD_USER_NAME_OR_PASSWORD", "NOT_AUTHORIZED", "BANNED", "BAD_AUTHENTICATION_METHOD"}
FOR_GOOD |= {"PACKET_TOO_LARGE", "SERVER_MOVED"}
#: What a user has to look at.
ADVICE = {"CLIENT_ID_NOT_VALID": "client_id", "BAD_USER_NAME_OR_PASSWORD": "password_file", "BANNED": "operator"}
ADVICE |= {"NOT_AUTHORIZED": "access rules", "UNSUPPORTED_PROTOCOL_VERSION": "protocol =", "PACKET_TOO_LARGE": "Size"}


@pytest.mark.parametrize(("name", "code"), [one for one in codes(ConnAckReasonCode).items() if one[1]])
def test_a_refused_connect_is_tried_again_unless_it_is_for_good(name: str, code: int) -> None:
    packet = ConnAckPacket(reason_code=ConnAckReasonCode(code), reason_str="it says\nso")
    close = connection_refused(packet, "line")
    assert (close.fatal, close.reconnect_at_once) == (name in FOR_GOOD, False)
    assert close.version_refused is (name == "UNSUPPORTED_PROTOCOL_VERSION")
    assert isinstance(close.error, Unreachable) is not close.fatal
    assert close.error is not None
    assert close.error.code == ("TL-M26" if code in {0x9C, 0x9D} else "TL-M08" if close.fatal else "TL-M06")
    assert ADVICE.get(name, "") in str(close.error)
    assert f"(0x{code:02X})" in str(close.error)
    assert "\n" not in str(close.error)


@pytest.mark.parametrize(("name", "moved"), [("USE_ANOTHER_SERVER", False), ("SERVER_MOVED", True)])
@pytest.mark.parametrize("reference", ["other:1883", None])
def test_a_server_that_names_another_is_left_for_now_or_for_good(name: str, moved: bool, reference: str | None) -> None:
    """[MQTT 5 section 4.11]: in CONNACK or in DISCONNECT."""
    refused = ConnAckPacket(reason_code=getattr(ConnAckReasonCode, name), server_reference=reference)
    ended = DisconnectPacket(reason_code=getattr(DisconnectReasonCode, name), server_reference=reference)
    for close in (connection_refused(refused, "line"), connection_ended(ended, "c", "line")):
        assert (close.server_reference, close.permanent_redirect, close.fatal) == (reference or "", moved, moved)
        assert (reference or "does not say which") in str(close.error)
