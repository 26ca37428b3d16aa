"""From CONNECT to CONNACK: what we open with, the authenticator's part, and what of the answer we can't live with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

from mqtt5 import AuthPacket, AuthReasonCode, ConnAckPacket, ConnectPacket

from towline.errors import Refused
from towline.mqtt.events import Authenticator, SessionConfig

__all__ = ["Authentication", "Unasked", "connect_packet", "forgetful", "too_narrow"]

_T = TypeVar("_T")

#: PUBACK, PUBREC, PUBREL and PUBCOMP in their short form.
_SMALLEST_ANSWER: Final = 4


class Unasked(Exception):
    """An AUTH that breaks the protocol; its text says how."""


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
            Unasked: There is no such method, or the reason is not 0x18.
            Refused: TL-M28.
        """
        method = self._method
        if method is None or packet.authentication_method != method.method:
            raise Unasked("sent AUTH for a method we did not ask for [MQTT-4.12.0-5, -6]")
        if packet.reason_code != AuthReasonCode.CONTINUE_AUTHENTICATION:
            raise Unasked("sent AUTH with a reason other than 0x18 [MQTT-4.12.0-2]")
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
