"""From CONNECT to CONNACK: what we open with, the authenticator's part, and what of the answer we can't live with.

And what any "no" of a broker means for the line: an error to show, and whether another try may succeed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, TypeVar

from mqtt5 import AuthPacket, AuthReasonCode, ConnAckPacket, ConnectPacket, DisconnectPacket, TopicFilter

from towline.errors import BrokerError, Refused, TakenOver, Unreachable
from towline.mqtt.events import Authenticator, Breach, Close, Filter, SessionConfig
from towline.mqtt.reasons import CONNECT_ADVICE, MOVED, SUBSCRIBE_ADVICE, TAKEN_OVER, USE_ANOTHER, reason_words
from towline.text import printable

_T = TypeVar("_T")

#: Characters of a peer's text that are shown.
_SHOWN: Final = 200
#: PUBACK, PUBREC, PUBREL and PUBCOMP in their short form.
_SMALLEST_ANSWER: Final = 4
#: format("mqtt") has no such option.
_FOLLOW: Final = "Name that server, or let a bridge or a Client go there by itself (follow_redirects)."


def authenticate(config: SessionConfig, step: Callable[[Authenticator], _T]) -> _T | None:
    """One step of the enhanced authentication [MQTT-4.12]; None without an authenticator.

    Raises:
        Refused: TL-M28, the authenticator can't, or does not believe the broker.
    """
    method = config.authenticator
    if method is None:
        return None
    try:
        return step(method)
    except Exception as error:  # noqa: BLE001  # whatever it is, it ends this attempt and nothing else
        reason = f": {error}" if isinstance(error, ValueError) else f" ({type(error).__name__})"
    what = f"authentication with {method.method} failed{reason}"
    raise Refused("TL-M28", config.where, what, "Check the credentials, and that this is the right broker.")


def answered_challenge(packet: AuthPacket, config: SessionConfig) -> AuthPacket:
    """The answer to the broker's challenge.

    Raises:
        Breach: There is no such method, or the reason is not 0x18.
        Refused: TL-M28.
    """
    method = config.authenticator.method if config.authenticator else None
    if method is None or packet.authentication_method != method:
        raise Breach("sent AUTH for a method we did not ask for [MQTT-4.12.0-5, -6]")
    if packet.reason_code != AuthReasonCode.CONTINUE_AUTHENTICATION:
        raise Breach("sent AUTH with a reason other than 0x18 [MQTT-4.12.0-2]")
    data = authenticate(config, lambda ours: ours.challenge(packet.authentication_data or b""))
    return AuthPacket(reason_code=packet.reason_code, authentication_method=method, authentication_data=data)


def connect_packet(config: SessionConfig, first: bytes | None, *, discarding: bool) -> ConnectPacket:
    """The CONNECT of a session.

    Args:
        config: What does not change.
        first: The authenticator's first data.
        discarding: The broker's session is given up.
    """
    # Clean Start 0 always, also the first time: Mosquitto saves only sessions whose last CONNECT had it.
    clean = discarding or config.clean_start
    if config.protocol < 5:  # one flag says both: no session at the start, none after the end
        clean = clean or config.session_expiry_s == 0
    return ConnectPacket(
        config.client_id,
        username=config.username,
        password=config.password,
        clean_start=clean,
        will=config.will,
        keep_alive=config.keep_alive_s,
        session_expiry_interval=0 if discarding else config.session_expiry_s,
        authentication_method=config.authenticator.method if config.authenticator else None,
        authentication_data=first,
        receive_max=config.receive_maximum,
        topic_alias_max=config.topic_alias_maximum,
    )


def check_connack(packet: ConnAckPacket, config: SessionConfig, *, discarding: bool) -> None:
    """Take a CONNACK that takes us in.

    Args:
        packet: Its reason is 0.
        config: What our CONNECT was made of.
        discarding: That CONNECT gave the broker's session up.

    Raises:
        Breach: It says what it must not.
        Refused: TL-M28; or what it grants is too little for what is promised (TL-M12, TL-M16).
    """
    if packet.session_present and (discarding or config.clean_start):
        raise Breach("kept a session after Clean Start [MQTT-3.2.2-2]")
    if packet.assigned_client_id is not None:
        raise Breach("assigned a client id though we named ours [MQTT 5 section 3.2.2.3.7]")
    method = config.authenticator.method if config.authenticator else None
    if packet.authentication_method is None and method is not None:
        raise Breach(f"took us in without the Authentication Method {method} [MQTT-4.12.0-5]")
    if packet.authentication_method != method:
        raise Breach("answered with an Authentication Method we did not ask for [MQTT-4.12.0-5, -6]")
    authenticate(config, lambda ours: ours.finish(packet.authentication_data or b""))
    if packet.max_packet_size is not None and packet.max_packet_size < _SMALLEST_ANSWER:
        what = f"the broker takes packets of {packet.max_packet_size} bytes, an acknowledgement has 4 [MQTT-3.2.2-15]"
        raise Refused("TL-M16", config.where, what, "Raise its maximum packet size.")
    lasting = config.durable and config.session_expiry_s and not discarding
    if lasting and packet.session_expiry_interval == 0:
        what = "the broker keeps no session (Session Expiry Interval 0), so at least once can't hold"
        raise Refused("TL-M12", config.where, what, "Allow persistent sessions.")


def unsupported(server: ConnAckPacket, filters: Iterable[Filter], where: str) -> Refused | None:
    """The first subscription a server has said it can't take, as an error [MQTT 5 sections 3.2.2.3.11 to .13]."""
    for wanted in filters:
        what = None
        if wanted.shared and not server.shared_subscription_available:
            what = "no shared subscriptions"
        elif wanted.identifier is not None and not server.subscription_id_available:
            what = "no subscription identifiers"
        elif any(c in wanted.pattern for c in "+#") and not server.wildcard_subscription_available:
            what = "no wildcards in subscriptions"
        if what:
            said = f'the broker offers {what}, which "{wanted.pattern}" needs'
            return Refused("TL-M17", where, said, "Change the subscription, or the broker's settings.")
    return None


def connection_refused(packet: ConnAckPacket, where: str) -> Close:
    """The end of a connection whose CONNACK says no.

    Args:
        packet: Its reason is not 0.
        where: The line as errors name it.
    """
    reason = int(packet.reason_code)
    if reason in {USE_ANOTHER, MOVED}:
        return _redirected(reason, packet.server_reference, where)
    what = f"the broker refused the connection: {_told(reason, packet.reason_str)}"
    if reason in CONNECT_ADVICE:
        error = Refused("TL-M08", where, what, CONNECT_ADVICE[reason])
        return Close(error, fatal=True, version_refused=reason == 0x84)
    return Close(Unreachable("TL-M06", where, what, "Trying again."))


def connection_ended(packet: DisconnectPacket, client_id: str, where: str) -> Close:
    """The end of a connection by the broker's DISCONNECT."""
    reason = int(packet.reason_code)
    if reason in {USE_ANOTHER, MOVED}:
        return _redirected(reason, packet.server_reference, where)
    if reason == TAKEN_OVER:
        what = f'another client took over the client id "{client_id}"'
        return Close(TakenOver("TL-M21", where, what, "Two lines with one id? Give each its own."))
    what = f"the broker ended the connection: {_told(reason, packet.reason_str)}"
    return Close(Unreachable("TL-M05", where, what, "Trying again."))


def _told(reason: int, text: str | None) -> str:
    said = f" ({printable(text, _SHOWN)})" if text else ""
    return f"{reason_words(reason)}{said} (0x{reason:02X})"


def _redirected(reason: int, reference: str | None, where: str) -> Close:
    """Where the broker wants us; the driver decides whether to go there [MQTT 5 section 4.11]."""
    moved = reason == MOVED
    place = f": {printable(reference, _SHOWN)}" if reference else ", and does not say which"
    verb = "says that it has moved to another server" if moved else "asks us to use another server for now"
    what = f"the broker {verb}{place} (0x{reason:02X})"
    if moved:
        error: BrokerError = Refused("TL-M26", where, what, _FOLLOW)
    else:
        error = Unreachable("TL-M26", where, what, f"It is asked again. {_FOLLOW}")
    return Close(error, fatal=moved, reference=reference or "", moved=moved)


def subscription_refused(wanted: TopicFilter, code: int, where: str) -> Refused | None:
    """What is wrong with the answer to one filter of a SUBSCRIBE, None for nothing."""
    if code >= 0x80:
        what = f'the broker refused the subscription "{wanted.pattern}": {reason_words(code)} (0x{code:02X})'
        return Refused("TL-M10", where, what, SUBSCRIBE_ADVICE.get(code, "Change the filter, or the broker."))
    if code < (qos := int(wanted.max_qos)):
        what = f'the broker grants "{wanted.pattern}" QoS {code} instead of {qos}, so the promise can\'t hold'
        return Refused("TL-M11", where, what, "Raise the broker's maximum QoS, or choose a weaker guarantee.")
    return None
