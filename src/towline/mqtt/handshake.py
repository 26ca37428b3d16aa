"""Connection handshake from CONNECT to CONNACK, with enhanced authentication, and the meaning of refusals.

A refusal by the broker becomes an error to show, and whether another attempt may succeed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, TypeVar

from mqtt5 import AuthPacket, AuthReasonCode, ConnAckPacket, ConnectPacket, DisconnectPacket, TopicFilter

from towline.errors import BrokerRefused, TakenOver, Unreachable
from towline.mqtt.events import Authenticator, BrokerProtocolError, Close, Filter, SessionConfig
from towline.mqtt.reasons import CONNECT_ADVICE, SERVER_MOVED, SUBSCRIBE_ADVICE, TAKEN_OVER, USE_ANOTHER, reason_name
from towline.text import printable

_T = TypeVar("_T")

#: Most characters of a peer's text in an error.
_MAX_SHOWN_CHARACTERS: Final = 200
#: Size of PUBACK, PUBREC, PUBREL and PUBCOMP in their short form.
_SHORT_ACK_BYTES: Final = 4
#: format("mqtt") has no such option.
_FOLLOW_ADVICE: Final = "Name that server, or let a bridge or a Client go there by itself (follow_redirects)."


def authenticate(config: SessionConfig, step: Callable[[Authenticator], _T]) -> _T | None:
    """Run one step of enhanced authentication [MQTT-4.12]; None without an authenticator.

    Raises:
        Refused: TL-M28, the authenticator failed or rejected the broker.
    """
    authenticator = config.authenticator
    if authenticator is None:
        return None
    try:
        return step(authenticator)
    except Exception as error:  # noqa: BLE001  # whatever it is, it ends this attempt and nothing else
        reason = f": {error}" if isinstance(error, ValueError) else f" ({type(error).__name__})"
    problem = f"authentication with {authenticator.method} failed{reason}"
    raise BrokerRefused("TL-M28", config.location, problem, "Check the credentials, and that this is the right broker.")


def answer_challenge(packet: AuthPacket, config: SessionConfig) -> AuthPacket:
    """Return the AUTH packet that answers the broker's challenge.

    Raises:
        BrokerProtocolError: There is no such method, or the reason is not 0x18.
        Refused: TL-M28.
    """
    method = config.authenticator.method if config.authenticator else None
    if method is None or packet.authentication_method != method:
        raise BrokerProtocolError("sent AUTH for a method we did not ask for [MQTT-4.12.0-5, -6]")
    if packet.reason_code != AuthReasonCode.CONTINUE_AUTHENTICATION:
        raise BrokerProtocolError("sent AUTH with a reason other than 0x18 [MQTT-4.12.0-2]")
    data = authenticate(config, lambda authenticator: authenticator.challenge(packet.authentication_data or b""))
    return AuthPacket(reason_code=packet.reason_code, authentication_method=method, authentication_data=data)


def connect_packet(config: SessionConfig, auth_data: bytes | None, *, discard_session: bool) -> ConnectPacket:
    """Return the CONNECT of a session.

    Args:
        config: Settings of the session.
        auth_data: First Authentication Data of the authenticator.
        discard_session: True to discard the broker's session.
    """
    # Clean Start 0 always, also the first time: Mosquitto saves only sessions whose last CONNECT had it.
    clean_start = discard_session or config.clean_start
    if config.protocol < 5:  # one flag for both: no session at the start, none after the end
        clean_start = clean_start or config.session_expiry_s == 0
    return ConnectPacket(
        config.client_id,
        username=config.username,
        password=config.password,
        clean_start=clean_start,
        will=config.will,
        keep_alive=config.keep_alive_s,
        session_expiry_interval=0 if discard_session else config.session_expiry_s,
        authentication_method=config.authenticator.method if config.authenticator else None,
        authentication_data=auth_data,
        receive_max=config.receive_maximum,
        topic_alias_max=config.topic_alias_maximum,
    )


def check_connack(packet: ConnAckPacket, config: SessionConfig, *, discard_session: bool) -> None:
    """Check a CONNACK that accepts the connection.

    Args:
        packet: CONNACK with reason code 0.
        config: Settings of the session.
        discard_session: True if CONNECT discarded the broker's session.

    Raises:
        BrokerProtocolError: The CONNACK violates the standard.
        Refused: TL-M28; or the granted limits are too low for the guarantee (TL-M12, TL-M16).
    """
    if packet.session_present and (discard_session or config.clean_start):
        raise BrokerProtocolError("kept a session after Clean Start [MQTT-3.2.2-2]")
    if packet.assigned_client_id is not None:
        raise BrokerProtocolError("assigned a client id though we named ours [MQTT 5 section 3.2.2.3.7]")
    method = config.authenticator.method if config.authenticator else None
    if packet.authentication_method is None and method is not None:
        raise BrokerProtocolError(f"accepted us without the Authentication Method {method} [MQTT-4.12.0-5]")
    if packet.authentication_method != method:
        raise BrokerProtocolError("answered with an Authentication Method we did not ask for [MQTT-4.12.0-5, -6]")
    authenticate(config, lambda authenticator: authenticator.finish(packet.authentication_data or b""))
    if packet.max_packet_size is not None and packet.max_packet_size < _SHORT_ACK_BYTES:
        problem = f"the broker takes packets of {packet.max_packet_size} bytes, but a PUBACK has 4 [MQTT-3.2.2-15]"
        raise BrokerRefused("TL-M16", config.location, problem, "Raise its maximum packet size.")
    needs_session = config.durable and config.session_expiry_s and not discard_session
    if needs_session and packet.session_expiry_interval == 0:
        problem = "the broker keeps no session (Session Expiry Interval 0), so at least once can't hold"
        raise BrokerRefused("TL-M12", config.location, problem, "Allow persistent sessions.")


def unsupported_subscription(server: ConnAckPacket, filters: Iterable[Filter], location: str) -> BrokerRefused | None:
    """Return an error for the first subscription that the server can't take [MQTT 5 sections 3.2.2.3.11 to .13]."""
    for topic_filter in filters:
        missing_feature = None
        if topic_filter.is_shared and not server.shared_subscription_available:
            missing_feature = "no shared subscriptions"
        elif topic_filter.identifier is not None and not server.subscription_id_available:
            missing_feature = "no subscription identifiers"
        elif any(c in topic_filter.pattern for c in "+#") and not server.wildcard_subscription_available:
            missing_feature = "no wildcards in subscriptions"
        if missing_feature:
            problem = f'the broker offers {missing_feature}, which "{topic_filter.pattern}" needs'
            return BrokerRefused("TL-M17", location, problem, "Change the subscription, or the broker's settings.")
    return None


def connection_refused(packet: ConnAckPacket, location: str) -> Close:
    """Return the end of a connection that CONNACK refused.

    Args:
        packet: CONNACK with a reason code other than 0.
        location: Name of the line in errors.
    """
    reason = int(packet.reason_code)
    if reason in {USE_ANOTHER, SERVER_MOVED}:
        return _redirect_close(reason, packet.server_reference, location)
    problem = f"the broker refused the connection: {_reason_text(reason, packet.reason_str)}"
    if reason in CONNECT_ADVICE:
        error = BrokerRefused("TL-M08", location, problem, CONNECT_ADVICE[reason])
        return Close(error, fatal=True, version_refused=reason == 0x84)
    return Close(Unreachable("TL-M06", location, problem, "Trying again."))


def connection_ended(packet: DisconnectPacket, client_id: str, location: str) -> Close:
    """Return the end of a connection after the broker's DISCONNECT."""
    reason = int(packet.reason_code)
    if reason in {USE_ANOTHER, SERVER_MOVED}:
        return _redirect_close(reason, packet.server_reference, location)
    if reason == TAKEN_OVER:
        problem = f'another client took over the client id "{client_id}"'
        return Close(TakenOver("TL-M21", location, problem, "Two lines with one id? Give each its own."))
    problem = f"the broker ended the connection: {_reason_text(reason, packet.reason_str)}"
    return Close(Unreachable("TL-M05", location, problem, "Trying again."))


def _reason_text(reason: int, text: str | None) -> str:
    peer_text = f" ({printable(text, _MAX_SHOWN_CHARACTERS)})" if text else ""
    return f"{reason_name(reason)}{peer_text} (0x{reason:02X})"


def _redirect_close(reason: int, reference: str | None, location: str) -> Close:
    """Return the end of a connection with a redirect; the driver decides whether to follow it [MQTT 5 section 4.11]."""
    is_permanent = reason == SERVER_MOVED
    target = f": {printable(reference, _MAX_SHOWN_CHARACTERS)}" if reference else ", and does not say which"
    request = "says that it has moved to another server" if is_permanent else "asks us to use another server for now"
    problem = f"the broker {request}{target} (0x{reason:02X})"
    error = (BrokerRefused if is_permanent else Unreachable)("TL-M26", location, problem, _FOLLOW_ADVICE)
    return Close(error, fatal=is_permanent, server_reference=reference or "", permanent_redirect=is_permanent)


def subscription_refused(topic_filter: TopicFilter, code: int, location: str) -> BrokerRefused | None:
    """Return the error of a refused or degraded subscription; None if it was granted."""
    if code >= 0x80:
        text = f'the broker refused the subscription "{topic_filter.pattern}": {reason_name(code)} (0x{code:02X})'
        return BrokerRefused("TL-M10", location, text, SUBSCRIBE_ADVICE.get(code, "Change the filter, or the broker."))
    if code < (qos := int(topic_filter.max_qos)):
        text = f'the broker grants "{topic_filter.pattern}" QoS {code} instead of {qos}, so the promise can\'t hold'
        return BrokerRefused("TL-M11", location, text, "Raise the broker's maximum QoS, or choose a weaker guarantee.")
    return None
