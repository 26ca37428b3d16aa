"""Mark of a message, which its publisher adds as user properties, and the keys of its code.

    towline-id     id of the publisher, `NAME`
    towline-n      EPOCH.NUMBER.LOW, decimal; numbers below LOW are never sent again; ?NONCE requests an answer
    towline-auth   INCARNATION.CODE: the incarnation of the publisher's journal, and the code of mark and content;
                   .LENGTH.COUNT.DIGEST of a larger message's content, which a gateway may truncate

A publisher's numbers grow by one per message; a new epoch restarts them. Without the first two there is no mark.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

from towline import files
from towline.errors import ConfigError
from towline.mqtt.checks import MAX_PROPERTIES
from towline.providers import read_secret

#: A truncated code has half of the hash or more, and no fewer than 80 bits [RFC 2104 section 5].
_CODE_BYTES: Final = 16
_KEY_LINE: Final = re.compile(r"(?:([A-Za-z0-9][A-Za-z0-9._-]{0,63})[ \t]+)?([0-9A-Fa-f]{64})\Z")
#: Publishers whose keys are cached; others are derived again, which costs some 5 µs.
_CACHED_PUBLISHERS: Final = 10_000
_MAX_KEYS: Final = 16


class ReceiptKeys:
    """Keys of a file, one a line, the newest first: all are accepted, so that keys can be rotated without a gap.

        line's key          32 bytes, known to the gateway and to publishers that trust each other
        publisher's key     HMAC-SHA256(line's key, "towline publisher" NUL id): known to one publisher
        code                the first 16 bytes of HMAC-SHA256(publisher's key, signed bytes), as 32 hex digits

    Args:
        keys: Publisher, "" for a line's key, and 32 bytes of each key; the newest first.
        path: The key file; None for no file.

    Attributes:
        problem: Error of the key file's newest version, while the previous keys stay in use; else None.
    """

    def __init__(self, keys: Sequence[tuple[str, bytes]], path: Path | None = None) -> None:
        self._keys = tuple(keys)
        self._path, self._version = path, path and files.file_version(path)
        self.problem: ConfigError | None = None
        self._publisher_hmacs = lru_cache(maxsize=_CACHED_PUBLISHERS)(self._create_hmacs)

    @classmethod
    def read_file(cls, path: Path) -> Self:
        """Return the keys of a file: 64 hex digits a line; a publisher's own key has its id and a space in front.

        Raises:
            ConfigError: TL-C85, the file can't be read, others may read it, or a line is no key.
        """
        return cls(_read_keys(path), path)

    def refresh(self) -> bool:
        """Read the key file again if it has changed; return whether the keys have changed."""
        if self._path is None or (version := files.file_version(self._path)) == self._version:
            return False
        self._version = version
        try:
            self._keys, self.problem = tuple(_read_keys(self._path)), None
        except ConfigError as error:
            self.problem = error
            return False
        self._publisher_hmacs.cache_clear()
        return True

    def has_key_for(self, publisher: str) -> bool:
        """Return whether there is a key of this publisher, or of its line."""
        return bool(self._publisher_hmacs(publisher))

    def derive_key_lines(self, publisher: str) -> list[str]:
        """Return the lines of a key file for this publisher only."""
        return [f"{publisher} {_derive_key(key, publisher).hex()}" for owner, key in self._keys if not owner]

    def compute_codes(self, publisher: str, *signed_parts: bytes) -> list[str]:
        """Return the code of `signed_parts`, concatenated, with each of the publisher's keys."""
        return [_compute_code(publisher_hmac, signed_parts) for publisher_hmac in self._publisher_hmacs(publisher)]

    def compute_code(self, publisher: str, *signed_parts: bytes) -> str:
        """Return the code of `signed_parts` with the publisher's newest key."""
        return _compute_code(self._publisher_hmacs(publisher)[0], signed_parts)

    def verify_codes(self, publisher: str, codes: Sequence[str], *signed_parts: bytes) -> bool:
        """Return whether one of the codes was computed with one of the publisher's keys."""
        expected_codes = self.compute_codes(publisher, *signed_parts)
        return any(hmac.compare_digest(code, expected) for expected in expected_codes for code in codes)

    def _create_hmacs(self, publisher: str) -> tuple[hmac.HMAC, ...]:
        """Return an HMAC-SHA256 for each key of the publisher, ready to copy."""
        keys = [key if owner else _derive_key(key, publisher) for owner, key in self._keys if owner in ("", publisher)]
        return tuple(hmac.new(key, digestmod=hashlib.sha256) for key in keys)


def _derive_key(key: bytes, publisher: str) -> bytes:
    return hmac.digest(key, b"towline publisher\0" + publisher.encode(), "sha256")


def _compute_code(publisher_hmac: hmac.HMAC, signed_parts: Sequence[bytes]) -> str:
    hmac_copy = publisher_hmac.copy()
    for part in signed_parts:
        hmac_copy.update(part)
    return hmac_copy.digest()[:_CODE_BYTES].hex()


def _read_keys(path: Path) -> Sequence[tuple[str, bytes]]:
    remedy = "Make one with: openssl rand -hex 32"
    return read_secret("receipt_key_file", path, _parse_keys, "TL-C85", remedy, private=True)


def _parse_keys(content: bytes) -> Sequence[tuple[str, bytes]]:
    lines = (line.strip() for line in content.decode("ascii", "replace").splitlines() if not line.startswith("#"))
    matches = [_KEY_LINE.match(line) for line in lines if line]
    keys = [(match[1] or "", bytes.fromhex(match[2])) for match in matches if match]
    if len(keys) != len(matches) or not 0 < len(keys) <= _MAX_KEYS:
        raise ValueError(f"it must hold 1 to {_MAX_KEYS} keys of 64 hex digits, one a line")
    return keys


ID_KEY: Final = "towline-id"
NUMBER_KEY: Final = "towline-n"
AUTH_KEY: Final = "towline-auth"
_KEYS: Final = frozenset((ID_KEY, NUMBER_KEY, AUTH_KEY))
#: Ids become part of a topic: no slash, no wildcard, nothing to escape.
NAME: Final = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z"

_NAME_PATTERN: Final = re.compile(NAME)
_NUMBER_PATTERN: Final = re.compile(r"([0-9]{1,10})\.([0-9]{1,18})\.([0-9]{1,18})(?:\?([0-9a-f]{1,16}))?\Z")
_AUTH_PATTERN: Final = re.compile(r"([0-9a-f]{0,16})\.([0-9a-f]{32})?(?:\.([0-9]{1,9}\.[0-9]{1,9}\.[0-9a-f]{32}))?\Z")
#: The mark of a larger content holds its digest: every gateway stores smaller messages whole.
_MAX_INLINE_BYTES: Final = 512
#: Bytes of a packet that its publisher may not know of.
_EXTRA_PACKET_BYTES: Final = 1_024
#: Largest plausible distance between publisher and gateway: numbers, and epochs.
MAX_NUMBER_GAP: Final = 1 << 40
MAX_EPOCH_GAP: Final = 1 << 20
#: Most bytes of a mark's properties in a PUBLISH.
MARK_BYTES: Final = 512


class Mark(NamedTuple):
    """Mark of a publisher on a message.

    Attributes:
        publisher: Id of the publisher.
        epoch: Grows when numbers restart.
        number: With publisher, epoch and incarnation it identifies the message for ever.
        low: Every number below has its receipt, or was dropped.
        nonce: Requests an answer with this nonce; "" for none.
        incarnation: Incarnation of the publisher's journal that assigned the number.
        code: Authenticates publisher and content; "" for none.
        content_summary: Length, count of user properties and digest of a larger content, joined by dots.
    """

    publisher: str
    epoch: int
    number: int
    low: int
    nonce: str = ""
    incarnation: str = ""
    code: str = ""
    content_summary: str = ""

    def properties(self) -> list[tuple[str, str]]:
        """Return the mark as user properties."""
        summary_suffix = f".{self.content_summary}" if self.content_summary else ""
        auth = f"{self.incarnation}.{self.code}{summary_suffix}"
        return [(ID_KEY, self.publisher), (NUMBER_KEY, self._numbers_text()), (AUTH_KEY, auth)]

    def _numbers_text(self) -> str:
        nonce_suffix = f"?{self.nonce}" if self.nonce else ""
        return f"{self.epoch}.{self.number}.{self.low}{nonce_suffix}"

    def signed_parts(self, content: Content) -> tuple[bytes, bytes]:
        """Return the bytes covered by the HMAC: the mark, and the content that a broker must forward unchanged."""
        header = self.signed_header(content.topic)
        return (header, b"") if self.content_summary else (header + content.properties(), content.payload)

    def signed_header(self, topic: str) -> bytes:
        """Return the signed bytes before the content: the mark and the topic."""
        # None of these has a U+0000 [MQTT-1.5.4-2]: no other message has the same bytes.
        fields = f"{self._numbers_text()}\0{self.incarnation}\0{self.content_summary}\0{topic}"
        return f"towline mark\0{self.publisher}\0{fields}\0".encode()

    def sign(self, keys: ReceiptKeys, content: Content) -> Self:
        """Return the mark with its code."""
        mark = self._replace(content_summary=content.summary()) if content.is_large else self
        return mark._replace(code=keys.compute_code(self.publisher, *mark.signed_parts(content)))

    def declares_oversize(self, max_packet_bytes: int) -> bool:
        """Return whether the signed length or property count exceeds a gateway's limit, `max_packet_bytes`."""
        length, count = self.content_summary.split(".")[:2] if self.content_summary else ("0", "0")
        return int(length) + _EXTRA_PACKET_BYTES > max_packet_bytes or int(count) + len(_KEYS) > MAX_PROPERTIES


class Content(NamedTuple):
    """Signed content of a message [MQTT-3.3.2-4, -15, -16, -17, -18, -20]; a broker may change QoS, RETAIN and expiry.

    Attributes:
        content_type: None, or "", for none; so for all that follow.
        response_topic: Topic for an answer.
        correlation_data: Part of the answer.
        user_properties: User properties without those of the mark, in order.
    """

    topic: str
    payload: bytes
    content_type: str | None = None
    payload_is_utf8: bool = False
    response_topic: str | None = None
    correlation_data: bytes | None = None
    user_properties: Sequence[tuple[str, str]] = ()

    @property
    def is_large(self) -> bool:
        """Whether the mark holds a digest of this content."""
        return len(self.payload) > _MAX_INLINE_BYTES or (any(self[2:]) and len(self.properties()) > _MAX_INLINE_BYTES)

    def summary(self) -> str:
        """Return length, count of user properties and digest of the content."""
        properties = self.properties()
        digest = hashlib.sha256(properties)
        digest.update(self.payload)
        length = len(properties) + len(self.payload) + len(self.topic.encode())
        return f"{length}.{len(self.user_properties)}.{digest.hexdigest()[:32]}"

    def properties(self) -> bytes:
        """Return the content without topic and payload: the number of fields, and each with its length in front."""
        if not any(self[2:]):
            return _NO_PROPERTIES
        field_texts = [self.content_type or "", "1" if self.payload_is_utf8 else "", self.response_topic or ""]
        field_texts += [text for pair in self.user_properties for text in pair]
        return _encode_fields([self.correlation_data or b"", *(text.encode() for text in field_texts)])


def _encode_fields(fields: Sequence[bytes]) -> bytes:
    return len(fields).to_bytes(4, "big") + b"".join(len(field).to_bytes(4, "big") + field for field in fields)


_NO_PROPERTIES: Final = _encode_fields([b""] * 4)


def parse_mark(properties: Sequence[tuple[str, str]]) -> Mark | None:
    """Return the mark among the user properties of a message; None without a valid one."""
    texts: dict[str, str] = {}
    for key, value in properties:
        if key in _KEYS:
            if key in texts:
                return None
            texts[key] = value
    publisher, number, auth = texts.get(ID_KEY), texts.get(NUMBER_KEY), texts.get(AUTH_KEY, ".")
    if publisher is None or number is None:
        return None
    numbers, auth_parts = _NUMBER_PATTERN.match(number), _AUTH_PATTERN.match(auth)
    if numbers is None or auth_parts is None or not _NAME_PATTERN.match(publisher):
        return None
    low = int(numbers[3])
    auth_fields = (auth_parts[1], auth_parts[2] or "", auth_parts[3] or "")
    mark = Mark(publisher, int(numbers[1]), int(numbers[2]), low, numbers[4] or "", *auth_fields)
    return mark if low <= mark.number else None


def verify_mark(mark: Mark, keys: ReceiptKeys, packet: Any, topic: str, max_packet_bytes: int) -> bool:
    """Return whether a publisher with one of the keys wrote this mark on this message.

    A truncated message has no payload. Then the mark must declare that it exceeds `max_packet_bytes`, the gateway's
    limit: otherwise anybody could make a message disappear by enlarging it.
    """
    if packet.payload is None:
        is_oversize = mark.declares_oversize(max_packet_bytes)
        return is_oversize and keys.verify_codes(mark.publisher, [mark.code], mark.signed_header(topic))
    pairs = strip_mark(packet.user_properties) if len(packet.user_properties) > len(_KEYS) else ()
    request, is_utf8 = (packet.response_topic, packet.correlation_data), packet.payload_format_indicator == 1
    content = Content(topic, packet.payload, packet.content_type, is_utf8, *request, pairs)
    if not keys.verify_codes(mark.publisher, [mark.code], *mark.signed_parts(content)):
        return False
    return not mark.content_summary or mark.content_summary == content.summary()


def strip_mark(properties: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the user properties without the mark, which concerns only a publisher and its gateway."""
    return [pair for pair in properties if pair[0] not in _KEYS]
