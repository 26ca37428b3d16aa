"""Exceptions that Towline raises on purpose: each is one line with location, problem, remedy and a code.

docs/errors.md explains every code. No secret is ever part of an error [I12]; text from outside is escaped in it [I13].
"""

from __future__ import annotations

import difflib
import functools
import os
import re
import weakref
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

from towline.text import printable

_P = ParamSpec("_P")
_R = TypeVar("_R")


#: Characters of a part of an error: a topic alone may have 65,535.
_MAX_LENGTH = 4000


#: The code at the end of an error's line.
_CODE = re.compile(r"\[(TL-[A-Z]\d{2,3})\]")


def codes_in(text: str) -> list[str]:
    """Return the error codes in a text, in order."""
    return _CODE.findall(text)


def did_you_mean(word: str, choices: Iterable[str], otherwise: str | None = None) -> str:
    """Return a hint for an unknown name: its translation from another system (foreign.toml), else the nearest choice.

    Args:
        word: The name as written; case and separators are ignored.
        choices: Valid names. Names that drop messages or disable a check are suggested for an exact match only.
        otherwise: Hint when no choice is near; by default the list of all choices.
    """
    choice_by_letters = {_normalized(name): name for name in sorted(choices)}
    translations, unsafe_names = _foreign_names()
    for option_name, sentence in translations.get(_normalized(word), {}).items():
        if option_name == "*" or _normalized(option_name) in choice_by_letters:
            return sentence or f'Did you mean "{choice_by_letters[_normalized(option_name)]}"?'
    matches = difflib.get_close_matches(_normalized(word), choice_by_letters.keys() - unsafe_names, n=1, cutoff=0.6)
    if matches:
        return f'Did you mean "{choice_by_letters[matches[0]]}"?'
    return f"Known here: {', '.join(choice_by_letters.values())}." if otherwise is None else otherwise


def _normalized(word: str) -> str:
    return re.sub(r"[^a-z0-9]", "", word.lower())


@functools.cache
def _foreign_names() -> tuple[dict[str, dict[str, str]], frozenset[str]]:
    """Return names of other systems with their translations, and our unsafe names; all normalized."""
    table = _load_table("foreign.toml")
    translations = {_normalized(word): sentences for word, sentences in table["words"].items()}
    return translations, frozenset(map(_normalized, table["dangerous"]))


@functools.cache
def explanations() -> dict[str, dict[str, Any]]:
    """Return the rows of explanations.toml by error code; the head of that file describes a row."""
    return _load_table("explanations.toml")


def _load_table(name: str) -> dict[str, Any]:
    import pkgutil  # noqa: PLC0415 - every process imports this module, and few make a mistake
    import tomllib  # noqa: PLC0415

    return tomllib.loads((pkgutil.get_data("towline", name) or b"").decode())


def is_permanent(code: str) -> bool:
    """Return True if a retry gives the same error until somebody changes something, as the code's row says."""
    return bool(explanations().get(code, {}).get("stays"))


class TowlineError(Exception):
    """Error with a one-line text for the person who has to act, and a stable code.

    Args:
        code: Stable error code such as ``TL-M07``; docs/errors.md explains each.
        location: File and line, option, broker or directory that the error is about.
        problem: The fault, and the promise at stake, without a full stop at the end.
        remedy: The next step for the user, as whole sentences.
    """

    def __init__(self, code: str, location: str, problem: str, remedy: str = "") -> None:
        super().__init__(code, location, problem, remedy)
        self.code = code
        self.location = location
        self.problem = problem
        self.remedy = remedy

    def __str__(self) -> str:
        # Topics, client ids and reasons of brokers are in it: no character of theirs may act on a terminal [I13].
        location, problem = printable(self.location, _MAX_LENGTH), printable(self.problem, _MAX_LENGTH)
        remedy = printable(self.remedy)
        return f"{location}: {problem}.{f' {remedy}' if remedy else ''}   [{self.code}]"


class ConfigError(TowlineError):
    """Invalid setting, or two settings that contradict each other."""


class ConfigErrors(ConfigError):
    """Several invalid settings, reported together so that all can be corrected at once; a line of text for each."""

    def __init__(self, errors: Iterable[ConfigError]) -> None:
        self.errors = tuple(errors)
        first = self.errors[0]
        super().__init__(first.code, first.location, first.problem, first.remedy)

    def __str__(self) -> str:
        return "\n".join(map(str, self.errors))

    @classmethod
    def raise_any(cls, errors: Iterable[ConfigError]) -> None:
        """Raise the errors, if there are any: a single one as itself, several as one `ConfigErrors`."""
        if unique_errors := list(dict.fromkeys(errors)):
            raise unique_errors[0] if len(unique_errors) == 1 else cls(unique_errors)


class SetupError(TowlineError):
    """Missing or outdated program or library on this machine."""


class BrokerError(TowlineError):
    """Error of an MQTT broker or of the connection to it."""


class Unreachable(BrokerError):
    """No connection to the broker; a retry may succeed."""


class BrokerRefused(BrokerError):
    """Connection or subscription that the broker refuses permanently."""


class TakenOver(BrokerError):
    """Another client connected with our client id [reason code 0x8E]."""


class SessionUnknown(BrokerError):
    """Session Present 1 for a session that is not in the journal [MQTT-3.2.2-4]."""


class ProtocolViolation(BrokerError):
    """Packet of the broker that violates the MQTT standard.

    Attributes:
        reason: MQTT 5 reason code for our DISCONNECT (0x81 malformed, 0x82 protocol error, 0x95 too large ...).
    """

    def __init__(self, location: str, problem: str, *, reason: int = 0x82) -> None:
        remedy = "The connection is closed and opened again; nothing acknowledged is lost."
        super().__init__("TL-M30", location, problem, remedy)
        self.reason = reason


class JournalError(TowlineError):
    """Error of the journal on disk."""


class JournalLocked(JournalError):
    """Another process owns the journal directory [I8]."""


class JournalFull(JournalError):
    """No room for the next frame; nothing was written, try again when there is room [I7]."""


class JournalFailed(JournalError):
    """A write or sync failed; this journal object must not be used again [I6]."""


class JournalDamaged(JournalError):
    """Durable frames that no longer read back as they were written."""


class GatewayError(TowlineError):
    """Error between Spark and a gateway."""


class GatewayUnreachable(GatewayError):
    """No gateway answers at this endpoint."""


class StateAccessDenied(GatewayUnreachable):
    """State directory that this user may not read: its content, and whether a gateway runs there, is unknown [I19]."""


class ReaderFenced(GatewayError):
    """Reader replaced by a newer one, or a gateway whose journal is another one [I8]."""


class PublisherError(TowlineError):
    """Error of a publisher's outbox: full, closed, or a message that will not be delivered."""


class KafkaError(TowlineError):
    """Error of Kafka or of the connection to it."""


#: PySpark's processes show Spark an error without frames where it is set (``pyspark.util.handle_worker_exception``).
_HIDE_TRACEBACK = "SPARK_HIDE_TRACEBACK"
#: And the locals of each frame where this is: ours hold what clients are told, passwords among it [I12].
_SHOW_LOCALS = "SPARK_TRACEBACK_WITH_LOCALS"


def without_traceback(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorate a method that Spark calls: a `TowlineError` leaves it without traceback and cause."""

    @functools.wraps(method)
    def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return method(*args, **kwargs)
        except TowlineError as error:
            failure = error
        except Exception:
            os.environ.pop(_SHOW_LOCALS, None)
            raise
        if _HIDE_TRACEBACK not in os.environ:
            os.environ[_HIDE_TRACEBACK] = "1"
            weakref.finalize(failure, os.environ.pop, _HIDE_TRACEBACK, None)  # an error that is caught hides no other
        raise failure.with_traceback(None) from None

    return wrapper
