"""Names of MQTT 5 reason codes [MQTT 5 section 2.4], and advice for a refused CONNECT or SUBSCRIBE."""

from __future__ import annotations

from typing import Final

import mqtt5

#: Accepted, but nobody is subscribed to the topic [MQTT 5 section 3.4.2.1].
NO_SUBSCRIBERS: Final = 0x10
#: Another client has connected with our client id [MQTT 5 section 3.14.2.1].
TAKEN_OVER: Final = 0x8E
#: Advice after a lost session, if nothing more is known.
KEEP_SESSIONS_ADVICE: Final = "Let the broker keep sessions on disk."
#: About the packet id of the request, not its content [MQTT 5 section 3.9.3].
PACKET_ID_IN_USE: Final = 0x91
#: The server may take the message later [MQTT 5 section 3.4.2.1].
QUOTA_EXCEEDED: Final = 0x97
#: The server's maximum QoS is lower.
QOS_NOT_SUPPORTED: Final = 0x9B
#: Reason codes that come with a Server Reference [MQTT 5 section 4.11].
USE_ANOTHER: Final = 0x9C
SERVER_MOVED: Final = 0x9D
#: Reason codes of a DISCONNECT that may be about a packet of ours [MQTT 5 section 3.14.2.1].
PACKET_ERROR_CODES: Final = frozenset({0x80, 0x81, 0x82, 0x83, 0x87, 0x90, 0x94, 0x95, 0x99, 0x9A, 0x9B})
#: Towline's own reason, beyond MQTT's: the broker ended the connection each time the message was sent.
CONNECTION_CUT: Final = 0x100

_REASON_NAMES: Final[dict[int, str]] = {
    int(code): name.replace("_", " ").lower()
    for kind, codes in vars(mqtt5).items()
    if kind.endswith("ReasonCode")
    for name, code in vars(codes).items()
    if name.isupper() and not name.startswith("GRANTED")
}
_REASON_NAMES[CONNECTION_CUT] = "the broker ends the connection at this message"

#: CONNACK reason that every attempt would meet → advice.
CONNECT_ADVICE: Final = {
    0x81: "The broker could not read our CONNECT; is it an MQTT 5 broker?",
    0x82: "The broker could not read our CONNECT; is it an MQTT 5 broker?",
    0x84: 'Set protocol = "3.1.1", or "auto" to let the gateway find out.',
    0x85: "Choose another client_id.",
    0x86: "Check username and password_file.",
    0x87: "Check username and password_file, and the broker's access rules for this client.",
    0x8A: "The broker has banned this client; ask its operator.",
    0x8C: "The broker wants an authentication method that is not configured.",
    0x95: "The broker's Maximum Packet Size is too small for our CONNECT.",
}

#: SUBACK reason → advice.
SUBSCRIBE_ADVICE: Final = {
    0x80: "Grant this client the right to read it, or see the broker's log.",  # the only one of MQTT 3.x
    0x83: "The reason is in the broker's log.",
    0x87: "Grant this client the right to read it, or change the filter.",
    0x8F: "Change the filter.",
    PACKET_ID_IN_USE: "Trying again with a new connection.",
    QUOTA_EXCEEDED: "Raise the broker's limit of subscriptions, or subscribe to fewer filters.",
    0x9E: "Subscribe without $share, or choose a broker that has shared subscriptions.",
    0xA1: "Subscribe without an identifier, or choose a broker that has them.",
    0xA2: "Subscribe without wildcards, or choose a broker that has them.",
}


def reason_name(code: int) -> str:
    """Return the name of a reason code, or "unknown reason"."""
    return _REASON_NAMES.get(code, "unknown reason")
