"""Who may come in over a network, and for what: a token opens everything, a ticket what it says.

Judged from a call's headers alone, before anything of its content is looked at.
"""

from __future__ import annotations

import hashlib
import hmac
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import structlog

from towline import files
from towline.errors import ConfigError, GatewayError
from towline.gateway.access import tokens
from towline.gateway.request import Request
from towline.gateway.tickets import Ticket, TicketKey

__all__ = ["Gatekeeper", "Refusals", "TokenFile", "check_read", "check_write"]

#: A header longer than any token or ticket is not looked at.
_LONGEST: Final = 8192
#: Refused calls are told once in so many seconds, with their number.
_QUIET_S: Final = 60.0
_READABLE_BY_OTHERS: Final = 0o007


class TokenFile:
    """The tokens of a file, as they are now: it is read again when it has changed.

    Args:
        path: The file.

    Raises:
        ConfigError: TL-C98, it can't be used; later, while it can't, it lets nobody in.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: tuple[tuple[int, ...], tuple[bytes, ...]] = ((), ())
        self._read()

    def allows(self, token: str) -> bool:
        """Whether it is one of them; takes as long for a wrong one as for a right one."""
        try:
            known = self._read()
        except ConfigError:
            return False
        shown = _digest(token)
        return sum(hmac.compare_digest(shown, one) for one in known) > 0  # each is compared

    def _read(self) -> tuple[bytes, ...]:
        try:
            state = self._path.stat()
            version = (state.st_mtime_ns, state.st_size, state.st_ino, state.st_mode)
            if version != self._known[0]:
                if state.st_mode & _READABLE_BY_OTHERS:
                    raise self._unusable("every user of this machine may read or write it", "chmod 600 it.")
                self._known = (version, tuple(map(_digest, tokens(self._path.read_bytes()))))
        except OSError as error:
            raise self._unusable(f"it can't be read ({files.why(error)})", "Check its name and rights.") from error
        except ValueError as error:
            raise self._unusable(str(error), "Make one with: openssl rand -hex 32") from None
        return self._known[1]

    def _unusable(self, what: str, do: str) -> ConfigError:
        return ConfigError("TL-C98", str(self._path), f"no file of tokens: {what}", do)


class Refusals:
    """Counts the calls that were not let in, and tells it once a minute.

    Args:
        where: The gateway.
        clock: Seconds.

    Attributes:
        count: So many since the start.
    """

    def __init__(self, where: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.count = 0
        self._log = structlog.get_logger("towline.gateway").bind(line=where)
        self._clock = clock
        self._lock = threading.Lock()
        self._told = 0
        self._at = float("-inf")

    def refused(self) -> None:
        """One more; the first is told at once, further ones by `tell`."""
        with self._lock:
            self.count += 1
        self.tell()

    def tell(self) -> None:
        """Say how many there were since it was said last, once a minute at most."""
        with self._lock:
            now, new = self._clock(), self.count - self._told
            if not new or now - self._at < _QUIET_S:
                return
            self._at, self._told = now, self.count
        self._log.warning("calls refused", code="TL-G47", count=new, total=self.count)


class Gatekeeper:
    """Judges the headers of a call.

    Args:
        where: The gateway, as errors name it.
        allowed: The tokens.
        key: Of the tickets.
        refusals: Is told of each call that does not come in.
    """

    def __init__(self, where: str, allowed: TokenFile, key: TicketKey, refusals: Refusals) -> None:
        self._where = where
        self._allowed = allowed
        self._key = key
        self._refusals = refusals

    def judge(self, headers: Mapping[str, Sequence[str | bytes]]) -> Ticket | None:
        """Let a call in: None for one with a token, which may do everything, else its ticket.

        Raises:
            GatewayError: TL-G40 without a token that is known, TL-G41 and TL-G42 for a ticket that is worth nothing.
        """
        try:
            return self._judged(headers)
        except GatewayError:
            self._refusals.refused()
            raise

    def _judged(self, headers: Mapping[str, Sequence[str | bytes]]) -> Ticket | None:
        said = headers.get("authorization", [])
        text = said[0] if len(said) == 1 and isinstance(said[0], str) and len(said[0]) <= _LONGEST else ""
        kind, _, shown = text.partition(" ")
        if kind == "Ticket":
            return self._key.opened(shown)
        if kind != "Bearer" or not self._allowed.allows(shown):
            raise GatewayError(
                "TL-G40",
                self._where,
                "the token is missing or is none of this gateway's",
                "gatewayTokenFile has to hold a line of the file that the gateway's token_file names.",
            )
        return None


def check_read(where: str, ticket: Ticket, request: Request) -> None:
    """See that a ticket is for the rows that are asked for.

    Reading may begin later than the ticket says, as after a broken connection, and has to end where it says: only
    there it is known which rows are meant [I14].

    Raises:
        GatewayError: TL-G43, it is not.
    """
    asked = (request.text("journal"), request.number("end"), request.incarnation())
    fits = asked == (ticket.journal, ticket.end, ticket.incarnation) and request.number("start") >= ticket.start
    if ticket.kind != "read" or not fits:
        raise _other(where, "these rows")


def check_write(where: str, ticket: Ticket, writer: str | None) -> None:
    """See that a ticket is for the writer whose batch it is; None for what is no writer's own.

    Raises:
        GatewayError: TL-G43, it is not.
    """
    if ticket.kind != "write" or not (writer is None or writer.startswith(f"{ticket.writer}/")):
        raise _other(where, "this writer")


def _other(where: str, what: str) -> GatewayError:
    do = "A driver asks for a ticket for each slice and each query. Everything else needs the token."
    return GatewayError("TL-G43", where, f"the ticket is for something else than {what}", do)


def _digest(token: str) -> bytes:
    """As long for every token, so that comparing tells nothing of its length."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
