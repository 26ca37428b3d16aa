"""MQTT 5 reason codes in words [MQTT 5 section 2.4], and what to do about a refused CONNECT."""

from __future__ import annotations

from typing import Final

__all__ = [
    "BLAMING",
    "CONNECT_ADVICE",
    "CUT",
    "ID_IN_USE",
    "KEEP_SESSIONS",
    "MOVED",
    "NO_SUBSCRIBERS",
    "QOS_NOT_SUPPORTED",
    "QUOTA_EXCEEDED",
    "SUBSCRIBE_ADVICE",
    "TAKEN_OVER",
    "USE_ANOTHER",
    "reason_words",
]

#: The server took the message, and nobody is subscribed to its topic [MQTT 5 section 3.4.2.1].
NO_SUBSCRIBERS: Final = 0x10
#: Another client has connected with our client id [MQTT 5 section 3.14.2.1].
TAKEN_OVER: Final = 0x8E
#: What to do where a session was lost, if nothing more is known.
KEEP_SESSIONS: Final = "Let the broker keep sessions on disk."
#: About the packet id of the request, not about what it asks for [MQTT 5 section 3.9.3].
ID_IN_USE: Final = 0x91
#: The server may take the message later [MQTT 5 section 3.4.2.1].
QUOTA_EXCEEDED: Final = 0x97
#: The server has said that it takes less, or none of this one.
QOS_NOT_SUPPORTED: Final = 0x9B
#: Reason codes that come with a Server Reference [MQTT 5 section 4.11].
USE_ANOTHER: Final = 0x9C
MOVED: Final = 0x9D
#: Reason codes of a DISCONNECT that may be about a packet of ours [MQTT 5 section 3.14.2.1].
BLAMING: Final = frozenset({0x80, 0x81, 0x82, 0x83, 0x87, 0x90, 0x94, 0x95, 0x99, 0x9A, 0x9B})
#: A reason of ours, beyond MQTT's: each time the message was sent, the broker ended the connection.
CUT: Final = 0x100

_WORDS: Final = {
    0x00: "success",
    0x04: "disconnect with will message",
    0x10: "no matching subscribers",
    0x11: "no subscription existed",
    0x18: "continue authentication",
    0x19: "re-authenticate",
    0x80: "unspecified error",
    0x81: "malformed packet",
    0x82: "protocol error",
    0x83: "implementation specific error",
    0x84: "unsupported protocol version",
    0x85: "client identifier not valid",
    0x86: "bad user name or password",
    0x87: "not authorized",
    0x88: "server unavailable",
    0x89: "server busy",
    0x8A: "banned",
    0x8B: "server shutting down",
    0x8C: "bad authentication method",
    0x8D: "keep alive timeout",
    0x8E: "session taken over",
    0x8F: "topic filter invalid",
    0x90: "topic name invalid",
    0x91: "packet identifier in use",
    0x92: "packet identifier not found",
    0x93: "receive maximum exceeded",
    0x94: "topic alias invalid",
    0x95: "packet too large",
    0x96: "message rate too high",
    0x97: "quota exceeded",
    0x98: "administrative action",
    0x99: "payload format invalid",
    0x9A: "retain not supported",
    0x9B: "QoS not supported",
    0x9C: "use another server",
    0x9D: "server moved",
    0x9E: "shared subscriptions not supported",
    0x9F: "connection rate exceeded",
    0xA0: "maximum connect time",
    0xA1: "subscription identifiers not supported",
    0xA2: "wildcard subscriptions not supported",
    CUT: "the broker ends the connection at this message",
}

#: CONNACK reasons that another try will meet again, and what to change.
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

#: SUBACK reasons, and what to change.
SUBSCRIBE_ADVICE: Final = {
    0x80: "Grant this client the right to read it, or see the broker's log.",  # all that MQTT 3.x can say
    0x83: "The reason is in the broker's log.",
    0x87: "Grant this client the right to read it, or change the filter.",
    0x8F: "Change the filter.",
    ID_IN_USE: "It is tried again with a new connection.",
    QUOTA_EXCEEDED: "Raise the broker's limit of subscriptions, or subscribe to fewer filters.",
    0x9E: "Subscribe without $share, or choose a broker that has shared subscriptions.",
    0xA1: "Subscribe without an identifier, or choose a broker that has them.",
    0xA2: "Subscribe without wildcards, or choose a broker that has them.",
}


def reason_words(code: int) -> str:
    """The name the standard gives a reason code; a code it does not know is told as such."""
    return _WORDS.get(code, "unknown reason")
