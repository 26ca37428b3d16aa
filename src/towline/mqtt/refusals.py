"""What a broker's "no" means for the line: an error to show, and whether another try may succeed."""

from __future__ import annotations

from typing import Final

from mqtt5 import ConnAckPacket, DisconnectPacket

from towline.errors import BrokerError, Refused, TakenOver, Unreachable
from towline.mqtt.events import Close, Filter
from towline.mqtt.reasons import CONNECT_ADVICE, MOVED, SUBSCRIBE_ADVICE, USE_ANOTHER, reason_words, shown

__all__ = ["connection_ended", "connection_refused", "subscription_refused"]

#: format("mqtt") has no such option.
_FOLLOW: Final = "Name that server, or let a bridge or a Client go there by itself (follow_redirects)."


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
    if reason == 0x8E:
        what = f'another client took over the client id "{client_id}"'
        return Close(TakenOver("TL-M21", where, what, "Two lines with one id? Give each its own."))
    what = f"the broker ended the connection: {_told(reason, packet.reason_str)}"
    return Close(Unreachable("TL-M05", where, what, "Trying again."))


def _told(reason: int, text: str | None) -> str:
    said = f" ({shown(text)})" if text else ""
    return f"{reason_words(reason)}{said} (0x{reason:02X})"


def _redirected(reason: int, reference: str | None, where: str) -> Close:
    """Where the broker wants us; the driver decides whether to go there [MQTT 5 section 4.11]."""
    moved = reason == MOVED
    place = f": {shown(reference)}" if reference else ", and does not say which"
    verb = "says that it has moved to another server" if moved else "asks us to use another server for now"
    what = f"the broker {verb}{place} (0x{reason:02X})"
    if moved:
        error: BrokerError = Refused("TL-M26", where, what, _FOLLOW)
    else:
        error = Unreachable("TL-M26", where, what, f"It is asked again. {_FOLLOW}")
    return Close(error, fatal=moved, reference=reference or "", moved=moved)


def subscription_refused(wanted: Filter, code: int, where: str) -> Refused | None:
    """What is wrong with the answer to one filter of a SUBSCRIBE, None for nothing."""
    if code >= 0x80:
        what = f'the broker refused the subscription "{wanted.pattern}": {reason_words(code)} (0x{code:02X})'
        return Refused("TL-M10", where, what, SUBSCRIBE_ADVICE.get(code, "Change the filter, or the broker."))
    if code < wanted.qos:
        what = f'the broker grants "{wanted.pattern}" QoS {code} instead of {wanted.qos}, so the promise can\'t hold'
        return Refused("TL-M11", where, what, "Raise the broker's maximum QoS, or choose a weaker guarantee.")
    return None
