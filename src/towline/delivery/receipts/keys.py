"""Who may say what about a publisher's messages: keys shared by publishers and gateway, and the codes made with them.

    line's key          32 bytes, known to the gateway and to publishers that are trusted with each other's messages
    publisher's key     HMAC-SHA256(line's key, "towline publisher" NUL id): all that one publisher has to know
    code                the first 16 bytes of HMAC-SHA256(publisher's key, what is said), as 32 hex digits

A file holds one key a line, the newest first: all of them are accepted, so that a key can be changed without a gap.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Final, Self

from towline import files
from towline.errors import ConfigError

#: A truncated code has half of the hash or more, and no fewer than 80 bits [RFC 2104 section 5].
_CODE_BYTES: Final = 16
_LINE: Final = re.compile(r"(?:([A-Za-z0-9][A-Za-z0-9._-]{0,63})[ \t]+)?([0-9A-Fa-f]{64})\Z")
#: Publishers whose keys are at hand; more are derived anew, which costs some 5 µs.
_REMEMBERED: Final = 10_000
_MOST_KEYS: Final = 16
_READABLE_BY_OTHERS: Final = 0o007


class ReceiptKeys:
    """The keys of a file.

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
        return cls(cls._in(path), path)

    def refresh(self) -> bool:
        """Read the file again where it has changed; whether other keys count now."""
        if self._path is None or (version := files.version(self._path)) == self._version:
            return False
        self._version = version
        try:
            self._keys, self.problem = tuple(self._in(self._path)), None
        except ConfigError as error:
            self.problem = error
            return False
        self._keyed.cache_clear()
        return True

    @staticmethod
    def _in(path: Path) -> Sequence[tuple[str, bytes]]:
        try:
            if path.stat().st_mode & _READABLE_BY_OTHERS:
                raise _unusable(path, "every user of this machine may read or write it", "chmod 600 it.")
            lines = path.read_text("ascii").splitlines()
        except OSError as error:
            reason = files.why(error)
            raise _unusable(path, f"it can't be read ({reason})", "Check its name and rights.") from error
        except UnicodeDecodeError:
            lines = ["?"]
        matches = [_LINE.match(line.strip()) for line in lines if line.strip() and not line.startswith("#")]
        keys = [(match[1] or "", bytes.fromhex(match[2])) for match in matches if match]
        if len(keys) != len(matches) or not 0 < len(keys) <= _MOST_KEYS:
            what = f"it holds something other than 1 to {_MOST_KEYS} keys of 64 hex digits, one a line"
            raise _unusable(path, what, "Make one with: openssl rand -hex 32")
        return keys

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


def _unusable(path: Path, what: str, do: str) -> ConfigError:
    return ConfigError("TL-C85", str(path), f"no file of receipt keys: {what}", do)
