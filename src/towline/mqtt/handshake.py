"""From CONNECT to CONNACK: what we open with, the authenticator's part, and what of the answer we can't live with.

And what any "no" of a broker means for the line: an error to show, and whether another try may succeed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

from mqtt5 import AuthPacket, AuthReasonCode, ConnAckPacket, ConnectPacket, DisconnectPacket, TopicFilter

from towline.errors import BrokerError, Refused, TakenOver, Unreachable
from towline.mqtt.events import Authenticator, Breach, Close, SessionConfig
from towline.mqtt.reasons import CONNECT_ADVICE, MOVED, SUBSCRIBE_ADVICE, TAKEN_OVER, USE_ANOTHER, reason_words
from towline.text import printable

_T = TypeVar("_T")

#: Characters of a peer's text that are shown.
_SHOWN: Final = 200
#: PUBACK, PUBREC, PUBREL and PUBCOMP in their short form.
_SMALLEST_ANSWER: Final = 4
#: format("mqtt") has no such option.
_FOLLOW: Final = "Name that server, or let a bridge or a Client go there by itself (follow_redirects)."


class Authentication:
    """The enhanced authentication of a connection [MQTT-4.12]; without a method every step is done.

    Args:
        method: The authenticator; None for user name and password alone.
        where: The line as errors name it.
    """

    def __init__(self, method: Authenticator | None, where: str) -> None:
        self._method = method
        self._where = where

    def start(self) -> bytes | None:
        """The first data, for CONNECT; None without a method.

        Raises:
            Refused: TL-M28, the authenticator can't.
        """
        return None if self._method is None else self._step(self._method.start)

    def answer(self, packet: AuthPacket) -> AuthPacket:
        """The answer to the broker's challenge.

        Raises:
            Breach: There is no such method, or the reason is not 0x18.
            Refused: TL-M28.
        """
        method = self._method
        if method is None or packet.authentication_method != method.method:
            raise Breach("sent AUTH for a method we did not ask for [MQTT-4.12.0-5, -6]")
        if packet.reason_code != AuthReasonCode.CONTINUE_AUTHENTICATION:
            raise Breach("sent AUTH with a reason other than 0x18 [MQTT-4.12.0-2]")
        challenge = packet.authentication_data or b""
        data = self._step(lambda: method.challenge(challenge))
        return AuthPacket(
            reason_code=AuthReasonCode.CONTINUE_AUTHENTICATION,
            authentication_method=method.method,
            authentication_data=data,
        )

    def finish(self, proof: bytes) -> None:
        """Take the broker's own proof, from CONNACK.

        Raises:
            Refused: TL-M28.
        """
        method = self._method
        if method is not None:
            self._step(lambda: method.finish(proof))

    def _step(self, call: Callable[[], _T]) -> _T:
        try:
            return call()
        except Exception as error:  # noqa: BLE001  # whatever it is, it ends this attempt and nothing else
            reason = f": {error}" if isinstance(error, ValueError) else f" ({type(error).__name__})"
        method = self._method.method if self._method else "nothing"
        what = f"authentication with {method} failed{reason}"
        raise Refused("TL-M28", self._where, what, "Check the credentials, and that this is the right broker.")


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


def too_narrow(packet: ConnAckPacket, where: str) -> Refused | None:
    """Why no acknowledgement of ours fits into what the broker takes; None if it does."""
    if packet.max_packet_size is None or packet.max_packet_size >= _SMALLEST_ANSWER:
        return None
    what = f"the broker takes packets of {packet.max_packet_size} bytes, an acknowledgement has 4 [MQTT-3.2.2-15]"
    return Refused("TL-M16", where, what, "Raise its maximum packet size.")


def forgetful(packet: ConnAckPacket, config: SessionConfig) -> Refused | None:
    """Why the broker's session can't keep what we promise; None if it can."""
    if not (config.durable and packet.session_expiry_interval == 0 and config.session_expiry_s):
        return None
    what = "the broker keeps no session (Session Expiry Interval 0), so at least once can't hold"
    return Refused("TL-M12", config.where, what, "Allow persistent sessions.")


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
