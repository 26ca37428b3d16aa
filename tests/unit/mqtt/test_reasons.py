"""Reason codes that decide what is done have the numbers of the standard, which a foreign codec knows."""

from __future__ import annotations

from typing import Any

import pytest
from mqtt5 import ConnAckPacket, ConnAckReasonCode, DisconnectPacket, DisconnectReasonCode
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.reasoncodes import ReasonCode

from tests.unit.mqtt.sessions import online, only, receive
from towline.errors import TakenOver, Unreachable
from towline.mqtt import reasons
from towline.mqtt.events import Close
from towline.mqtt.handshake import connection_ended, connection_refused


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
