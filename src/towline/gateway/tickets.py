"""Signed tickets: what a Spark executor shows a gateway in place of the token.

A ticket is ``BODY.CODE``, both base64url: BODY is JSON with sorted keys, CODE is HMAC-SHA256 of it with a key that only
the gateway has. It says its version, its kind, what it opens, and until when, by the gateway's own clock; it opens
nothing else. The code is made over the bytes that came, so that no second way to write a body matters, and is compared
in constant time.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import json
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from towline import files
from towline.errors import GatewayError, JournalError

#: In the state directory: 64 hex digits. A new file makes every ticket worthless.
KEY_FILE: Final = "ticket.key"
#: A batch, its retries and a restart of the gateway between them fit in.
DEFAULT_VALID_S: Final = 3600.0
LONGEST_VALID_S: Final = 7 * 86400.0

_VERSION: Final = 1
_KEY_BYTES: Final = 32
#: Keeps the codes apart from whatever else a key may ever sign.
_PURPOSE: Final = b"towline ticket\0"
#: Longer ones are none: names have at most 256 characters.
_LONGEST: Final = 4096


@dataclass(frozen=True, slots=True)
class Ticket:
    """What a ticket says, once it was found genuine.

    Attributes:
        kind: ``read`` for the rows of a range, ``write`` for the batches of a writer.
        expires: Seconds since 1970 by the clock of the gateway, the first second at which it is worth nothing.
        journal: Id of the journal, of a reader's ticket.
        start: Offset of the first row; reading may begin later, as after a broken connection.
        end: Offset after the last row.
        incarnation: What ``end`` came with [I14].
        writer: A writer's ticket: the query or job; its writers are ``<writer>/<part>``.
    """

    kind: str
    expires: int
    journal: str = ""
    start: int = 0
    end: int = 0
    incarnation: str = ""
    writer: str = ""


class TicketKey:
    """Signs and checks the tickets of one gateway.

    Args:
        where: The gateway, as errors name it.
        key: 32 random bytes.
        clock: Seconds since 1970.
    """

    def __init__(self, where: str, key: bytes, clock: Callable[[], float] = time.time) -> None:
        self._where = where
        self._key = key
        self._clock = clock

    @classmethod
    def of(cls, where: str, state_dir: Path) -> Self:
        """The key of a state directory, made at the first call: tickets outlive a restart of the gateway.

        Raises:
            JournalError: TL-J01, the directory does not take or give the file.
        """
        path = state_dir / KEY_FILE
        try:
            if not path.exists():
                files.replace_durably(path, secrets.token_hex(_KEY_BYTES))
            text = path.read_bytes().strip()
        except OSError as error:
            what = f"the key of the tickets can't be kept ({files.why(error)})"
            raise JournalError("TL-J01", str(path), what, "Look at the directory's rights and room.") from error
        if not re.fullmatch(rb"[0-9a-f]{%d}" % (2 * _KEY_BYTES), text):
            what, do = "this is no key of tickets", "Remove the file; the gateway makes another, and old tickets end."
            raise JournalError("TL-J01", str(path), what, do)
        return cls(where, bytes.fromhex(text.decode()))

    def sign(self, valid_s: float, **claims: object) -> str:
        """Make a ticket.

        Args:
            valid_s: Seconds until it is worth nothing; at most a week.
            claims: Fields of `Ticket` but ``expires``.
        """
        ticket = Ticket(expires=int(self._clock() + min(valid_s, LONGEST_VALID_S)) + 1, **claims)  # type: ignore[arg-type]
        body = {"v": _VERSION, **{name: getattr(ticket, name) for name in Ticket.__slots__}}
        content = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
        return f"{_text(content)}.{_text(self._code(content))}"

    def opened(self, text: str) -> Ticket:
        """What a ticket says.

        Raises:
            GatewayError: TL-G41 for one that this gateway did not sign, TL-G42 for one that has expired.
        """
        ticket = self._genuine(text)
        if ticket is None:
            raise GatewayError(
                "TL-G41",
                self._where,
                "the ticket is none that this gateway has signed",
                "Run the batch again: the driver asks for a new one. Is the location that of another gateway?",
            )
        if self._clock() >= ticket.expires:
            raise GatewayError(
                "TL-G42",
                self._where,
                f"the ticket expired {int(self._clock() - ticket.expires) + 1:,} s ago",
                "Start the query again, it gets a new one; where tasks wait longer, raise gatewayTicketValidity.",
            )
        return ticket

    def _genuine(self, text: str) -> Ticket | None:
        if len(text) > _LONGEST:
            return None
        content, code = (_bytes(part) for part in (text.split(".") if text.count(".") == 1 else ("", "")))
        if not hmac.compare_digest(code, self._code(content)):
            return None
        fields: dict[str, Any] = json.loads(content)  # ours: the code says so
        return Ticket(**fields) if fields.pop("v") == _VERSION else None

    def _code(self, content: bytes) -> bytes:
        return hmac.digest(self._key, _PURPOSE + content, "sha256")


def _text(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).decode().rstrip("=")


def _bytes(text: str) -> bytes:
    """The bytes of base64url in its one spelling; nothing where it is none."""
    try:
        content = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        return b""
    return content if _text(content) == text else b""
