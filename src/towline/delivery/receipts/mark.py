"""The mark that a publisher writes on a message, as user properties, and the keys that its code is made with.

    towline-id     who publishes, `NAME`
    towline-n      EPOCH.NUMBER.LOW, decimal; nothing below LOW is asked for any more; ?NONCE asks for an answer
    towline-auth   OPENING.CODE: which opening of its journal gave out the number, and the code of mark and content;
                   .LENGTH.COUNT.DIGEST of a larger message's content, which a gateway may not take in whole

A publisher's numbers grow by one a message; a new epoch begins them anew. The first two, each once, or the message has
no mark.
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
from towline.mqtt.fence import MAX_PROPERTIES
from towline.providers import secret_of

#: A truncated code has half of the hash or more, and no fewer than 80 bits [RFC 2104 section 5].
_CODE_BYTES: Final = 16
_LINE: Final = re.compile(r"(?:([A-Za-z0-9][A-Za-z0-9._-]{0,63})[ \t]+)?([0-9A-Fa-f]{64})\Z")
#: Publishers whose keys are at hand; more are derived anew, which costs some 5 µs.
_REMEMBERED: Final = 10_000
_MOST_KEYS: Final = 16


class ReceiptKeys:
    """The keys of a file, one a line, the newest first: all are accepted, so that a key can be changed without a gap.

        line's key          32 bytes, known to the gateway and to publishers that are trusted with each other's messages
        publisher's key     HMAC-SHA256(line's key, "towline publisher" NUL id): all that one publisher has to know
        code                the first 16 bytes of HMAC-SHA256(publisher's key, what is said), as 32 hex digits

    Args:
        keys: The publisher each key belongs to, "" for a line's key, and its 32 bytes; the newest first.
        path: The file that has them; None for no file.

    Attributes:
        problem: Why the keys that the file has now are not taken, and those before are; None where they are.
    """

    def __init__(self, keys: Sequence[tuple[str, bytes]], path: Path | None = None) -> None:
        self._keys = tuple(keys)
        self._path, self._version = path, path and files.version(path)
        self.problem: ConfigError | None = None
        self._keyed = lru_cache(maxsize=_REMEMBERED)(self._prepare)

    @classmethod
    def read(cls, path: Path) -> Self:
        """The keys of a file: a key a line, 64 hex digits; before one publisher's own key its id and a space.

        Raises:
            ConfigError: TL-C85, the file can't be read, others may read it, or it holds something else.
        """
        return cls(_keys_of(path), path)

    def refresh(self) -> bool:
        """Read the file again where it has changed; whether other keys count now."""
        if self._path is None or (version := files.version(self._path)) == self._version:
            return False
        self._version = version
        try:
            self._keys, self.problem = tuple(_keys_of(self._path)), None
        except ConfigError as error:
            self.problem = error
            return False
        self._keyed.cache_clear()
        return True

    def speaks_for(self, publisher: str) -> bool:
        """Whether there is a key of a publisher, or of its line."""
        return bool(self._keyed(publisher))

    def derived(self, publisher: str) -> list[str]:
        """The lines of a file that lets one publisher speak for itself alone."""
        return [f"{publisher} {_derive(key, publisher).hex()}" for owner, key in self._keys if not owner]

    def codes(self, publisher: str, *said: bytes) -> list[str]:
        """The code of what is said, with each of the keys; `said` is taken as one text."""
        return [_code(keyed, said) for keyed in self._keyed(publisher)]

    def code(self, publisher: str, *said: bytes) -> str:
        """The code with the newest key."""
        return _code(self._keyed(publisher)[0], said)

    def genuine(self, publisher: str, codes: Sequence[str], *said: bytes) -> bool:
        """Whether one of the codes was made with one of the keys."""
        own = self.codes(publisher, *said)
        return any(hmac.compare_digest(code, one) for one in own for code in codes)

    def _prepare(self, publisher: str) -> tuple[hmac.HMAC, ...]:
        """HMAC-SHA256 with each key taken in beforehand."""
        keys = [_derive(key, publisher) if not owner else key for owner, key in self._keys if owner in ("", publisher)]
        return tuple(hmac.new(key, digestmod=hashlib.sha256) for key in keys)


def _derive(key: bytes, publisher: str) -> bytes:
    return hmac.digest(key, b"towline publisher\0" + publisher.encode(), "sha256")


def _code(keyed: hmac.HMAC, said: Sequence[bytes]) -> str:
    code = keyed.copy()
    for part in said:
        code.update(part)
    return code.digest()[:_CODE_BYTES].hex()


def _keys_of(path: Path) -> Sequence[tuple[str, bytes]]:
    do = "Make one with: openssl rand -hex 32"
    return secret_of("receipt_key_file", path, _keys_in, "TL-C85", do, private=True)


def _keys_in(content: bytes) -> Sequence[tuple[str, bytes]]:
    lines = (line.strip() for line in content.decode("ascii", "replace").splitlines() if not line.startswith("#"))
    matches = [_LINE.match(line) for line in lines if line]
    keys = [(match[1] or "", bytes.fromhex(match[2])) for match in matches if match]
    if len(keys) != len(matches) or not 0 < len(keys) <= _MOST_KEYS:
        raise ValueError(f"it holds something other than 1 to {_MOST_KEYS} keys of 64 hex digits, one a line")
    return keys


ID_KEY: Final = "towline-id"
NUMBER_KEY: Final = "towline-n"
AUTH_KEY: Final = "towline-auth"
_KEYS: Final = frozenset((ID_KEY, NUMBER_KEY, AUTH_KEY))
#: Ids become part of a topic: no slash, no wildcard, nothing to escape.
NAME: Final = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z"

_NAME: Final = re.compile(NAME)
_NUMBER: Final = re.compile(r"([0-9]{1,10})\.([0-9]{1,18})\.([0-9]{1,18})(?:\?([0-9a-f]{1,16}))?\Z")
_AUTH: Final = re.compile(r"([0-9a-f]{0,16})\.([0-9a-f]{32})?(?:\.([0-9]{1,9}\.[0-9]{1,9}\.[0-9a-f]{32}))?\Z")
#: The content of a message above so many bytes is named by its digest: every gateway takes smaller ones in whole.
_NAMED: Final = 512
#: Bytes that a packet may have more than its publisher knows of.
_MORE_BYTES: Final = 1_024
#: Publisher and gateway are never that far apart: numbers, and epochs.
FARTHEST: Final = 1 << 40
MOST_EPOCHS: Final = 1 << 20
#: Bytes that the properties of a mark take in a PUBLISH, at most.
MARK_BYTES: Final = 512


class Mark(NamedTuple):
    """What a publisher wrote on a message.

    Attributes:
        epoch: Grows when numbers begin anew.
        number: Names the message for ever, with publisher, epoch and opening.
        low: Every number below has its receipt, or was given up.
        nonce: The publisher wants an answer that carries this; "" for none.
        opening: The opening of its journal that gave out the number.
        code: Shows that the publisher wrote it, on this content; "" for none.
        shape: Length, count of user properties and digest of a larger content, each with a dot before the next.
    """

    publisher: str
    epoch: int
    number: int
    low: int
    nonce: str = ""
    opening: str = ""
    code: str = ""
    shape: str = ""

    def properties(self) -> list[tuple[str, str]]:
        """As user properties."""
        shape = f".{self.shape}" if self.shape else ""
        auth = f"{self.opening}.{self.code}{shape}"
        return [(ID_KEY, self.publisher), (NUMBER_KEY, self._numbers()), (AUTH_KEY, auth)]

    def _numbers(self) -> str:
        asked = f"?{self.nonce}" if self.nonce else ""
        return f"{self.epoch}.{self.number}.{self.low}{asked}"

    def said(self, content: Content) -> tuple[bytes, bytes]:
        """What its code is about: this mark, and all of a message that a broker must hand on as it came."""
        head = self.head(content.topic)
        return (head, b"") if self.shape else (head + content.properties(), content.payload)

    def head(self, topic: str) -> bytes:
        """The part of it that is not the content."""
        # None of these has a U+0000 [MQTT-1.5.4-2]: no other message makes the same text.
        named = f"{self._numbers()}\0{self.opening}\0{self.shape}\0{topic}"
        return f"towline mark\0{self.publisher}\0{named}\0".encode()

    def signed(self, keys: ReceiptKeys, content: Content) -> Self:
        """With its code."""
        mark = self._replace(shape=content.shape()) if content.large else self
        return mark._replace(code=keys.code(self.publisher, *mark.said(content)))

    def tells_of_too_much(self, largest: int) -> bool:
        """Whether the publisher says that a gateway with packets of at most `largest` bytes can't take it in whole."""
        length, count = self.shape.split(".")[:2] if self.shape else ("0", "0")
        return int(length) + _MORE_BYTES > largest or int(count) + len(_KEYS) > MAX_PROPERTIES


class Content(NamedTuple):
    """What a mark is bound to [MQTT-3.3.2-4, -15, -16, -17, -18, -20]; QoS, RETAIN and expiry may change on the way.

    Attributes:
        content_type: None, or "", for none; so for all that follow.
        response_topic: Where an answer is expected.
        correlation_data: Goes into the answer.
        pairs: User properties but those of the mark, in order.
    """

    topic: str
    payload: bytes
    content_type: str | None = None
    payload_is_utf8: bool = False
    response_topic: str | None = None
    correlation_data: bytes | None = None
    pairs: Sequence[tuple[str, str]] = ()

    @property
    def large(self) -> bool:
        """Whether it is named by its digest."""
        return len(self.payload) > _NAMED or (any(self[2:]) and len(self.properties()) > _NAMED)

    def shape(self) -> str:
        """Its length, how many user properties it has, and its digest."""
        properties = self.properties()
        digest = hashlib.sha256(properties)
        digest.update(self.payload)
        length = len(properties) + len(self.payload) + len(self.topic.encode())
        return f"{length}.{len(self.pairs)}.{digest.hexdigest()[:32]}"

    def properties(self) -> bytes:
        """All but topic and payload: how many fields, and each with its length before it."""
        if not any(self[2:]):
            return _NO_PROPERTIES
        texts = [self.content_type or "", "1" if self.payload_is_utf8 else "", self.response_topic or ""]
        texts += [text for pair in self.pairs for text in pair]
        return _fields([self.correlation_data or b"", *(text.encode() for text in texts)])


def _fields(fields: Sequence[bytes]) -> bytes:
    return len(fields).to_bytes(4, "big") + b"".join(len(field).to_bytes(4, "big") + field for field in fields)


_NO_PROPERTIES: Final = _fields([b""] * 4)


def mark_of(properties: Sequence[tuple[str, str]]) -> Mark | None:
    """The mark among the user properties of a message; None for none, or one that says nothing sensible."""
    texts: dict[str, str] = {}
    for key, value in properties:
        if key in _KEYS:
            if key in texts:
                return None
            texts[key] = value
    publisher, number, auth = texts.get(ID_KEY), texts.get(NUMBER_KEY), texts.get(AUTH_KEY, ".")
    if publisher is None or number is None:
        return None
    numbers, parts = _NUMBER.match(number), _AUTH.match(auth)
    if numbers is None or parts is None or not _NAME.match(publisher):
        return None
    low = int(numbers[3])
    named = (parts[1], parts[2] or "", parts[3] or "")
    mark = Mark(publisher, int(numbers[1]), int(numbers[2]), low, numbers[4] or "", *named)
    return mark if low <= mark.number else None


def is_genuine(mark: Mark, keys: ReceiptKeys, packet: Any, topic: str, largest: int) -> bool:
    """Whether a publisher with one of the keys wrote this mark on this message.

    Of a message that was not taken in whole there is no payload. Then the publisher has to say that it is too large for
    `largest`, the bytes of a packet that this gateway takes, or somebody could let a message vanish by adding to it.
    """
    if packet.payload is None:
        too_much = mark.tells_of_too_much(largest)
        return too_much and keys.genuine(mark.publisher, [mark.code], mark.head(topic))
    content = Content(
        topic,
        packet.payload,
        packet.content_type,
        packet.payload_format_indicator == 1,
        packet.response_topic,
        packet.correlation_data,
        unmarked(packet.user_properties) if len(packet.user_properties) > len(_KEYS) else (),
    )
    if not keys.genuine(mark.publisher, [mark.code], *mark.said(content)):
        return False
    return not mark.shape or mark.shape == content.shape()


def unmarked(properties: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """The user properties without the mark, which is between a publisher and its gateway alone."""
    return [pair for pair in properties if pair[0] not in _KEYS]
