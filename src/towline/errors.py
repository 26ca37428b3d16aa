"""Every error Towline raises on purpose, and what the reader can do about it.

    TowlineError
    ├── ConfigError        TL-C..  you wrote something that can't be; change it and start again
    ├── SetupError         TL-S..  a tool this machine needs is missing or too old
    ├── BrokerError        TL-M..  the MQTT broker, or the way to it
    │   ├── Unreachable            no connection; Towline tries again by itself
    │   ├── Refused                the broker said no and will say no again; change credentials, rights or names
    │   ├── TakenOver              another client uses our client id
    │   ├── SessionUnknown         the broker knows a session that the journal does not; the operator decides
    │   └── ProtocolViolation      the broker broke the standard; connection dropped and made anew
    ├── JournalError       TL-J..  the disk under the promise
    │   ├── JournalLocked          another process owns the directory
    │   ├── JournalFull            no room; back-pressure until there is, nothing is lost
    │   ├── JournalFailed          a write or sync failed; the process must end and recover [I6]
    │   └── JournalDamaged         frames that were durable no longer read back; the operator decides
    ├── GatewayError       TL-G..  between Spark and a gateway
    │   ├── GatewayUnreachable     no gateway answers
    │   │   └── NotAllowed         this user may not look there: what is there is unknown [I19]
    │   └── Fenced                 somebody newer reads this journal; this reader must stop [I8]
    ├── PublisherError     TL-O..  an application's outbox
    └── KafkaError         TL-K..  Kafka, or the way to it

An error is one line for a person: where, what is wrong, what to do, and a code that has a paragraph in
docs/errors.md. No secret is ever part of it [I12]; what came from outside is escaped in it [I13].
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
_LONGEST = 4000


#: The code at the end of an error's line.
_CODE = re.compile(r"\[(TL-[A-Z]\d{2,3})\]")


def codes_in(text: str) -> list[str]:
    """The codes of the errors that a text tells, in order."""
    return _CODE.findall(text)


def did_you_mean(word: str, choices: Iterable[str], otherwise: str | None = None) -> str:
    """A hint for an unknown word: what another system's word is called here (foreign.toml), else the nearest choice.

    Args:
        word: What was written; upper and lower case, and what stands between its words, are alike.
        choices: What may be written. What gives up messages or a check is suggested for no other word.
        otherwise: The hint when nothing is near; the list of all choices by default.
    """
    names = {_letters(name): name for name in sorted(choices)}
    words, dangerous = _foreign()
    for ours, sentence in words.get(_letters(word), {}).items():
        if ours == "*" or _letters(ours) in names:
            return sentence or f'Did you mean "{names[_letters(ours)]}"?'
    near = difflib.get_close_matches(_letters(word), names.keys() - dangerous, n=1, cutoff=0.6)
    if near:
        return f'Did you mean "{names[near[0]]}"?'
    return f"Known here: {', '.join(names.values())}." if otherwise is None else otherwise


def _letters(word: str) -> str:
    return re.sub(r"[^a-z0-9]", "", word.lower())


@functools.cache
def _foreign() -> tuple[dict[str, dict[str, str]], frozenset[str]]:
    """Words of other systems, and those of ours that are dangerous, by their letters."""
    table = _read("foreign.toml")
    words = {_letters(word): meant for word, meant in table["words"].items()}
    return words, frozenset(map(_letters, table["dangerous"]))


@functools.cache
def explanations() -> dict[str, dict[str, Any]]:
    """The row of each code in explanations.toml, whose head says what is in one."""
    return _read("explanations.toml")


def _read(name: str) -> dict[str, Any]:
    import pkgutil  # noqa: PLC0415 - every process imports this module, and few make a mistake
    import tomllib  # noqa: PLC0415

    return tomllib.loads((pkgutil.get_data("towline", name) or b"").decode())


def stays(code: str) -> bool:
    """Whether another try finds the same, until somebody has changed something: as the code's row says."""
    return bool(explanations().get(code, {}).get("stays"))


class TowlineError(Exception):
    """One thing that went wrong, in words for the person who has to act.

    Args:
        code: A stable name such as ``TL-M07``; docs/errors.md has a paragraph for each.
        where: The file, line, option, broker or directory it is about.
        what: What is wrong, and which promise is at stake, without a full stop at the end.
        do: What to do next, as whole sentences.
    """

    def __init__(self, code: str, where: str, what: str, do: str = "") -> None:
        super().__init__(code, where, what, do)
        self.code = code
        self.where = where
        self.what = what
        self.do = do

    def __str__(self) -> str:
        # Topics, client ids and reasons of brokers are in it: no character of theirs may act on a terminal [I13].
        where, what, do = printable(self.where, _LONGEST), printable(self.what, _LONGEST), printable(self.do)
        return f"{where}: {what}.{f' {do}' if do else ''}   [{self.code}]"


class ConfigError(TowlineError):
    """A setting that can't be, or two that contradict each other."""


class ConfigErrors(ConfigError):
    """Several settings that can't be, so that a person corrects all of them at once; its text has a line for each."""

    def __init__(self, errors: Iterable[ConfigError]) -> None:
        self.errors = tuple(errors)
        first = self.errors[0]
        super().__init__(first.code, first.where, first.what, first.do)

    def __str__(self) -> str:
        return "\n".join(map(str, self.errors))

    @classmethod
    def check(cls, errors: Iterable[ConfigError]) -> None:
        """Raise what there is: nothing, the one error, or all of them."""
        if found := list(dict.fromkeys(errors)):
            raise found[0] if len(found) == 1 else cls(found)


class SetupError(TowlineError):
    """A program or library this machine needs is missing or too old."""


class BrokerError(TowlineError):
    """The MQTT broker, or the way to it."""


class Unreachable(BrokerError):
    """No connection to the broker; another try may succeed."""


class Refused(BrokerError):
    """The broker refused the connection or a subscription for good."""


class TakenOver(BrokerError):
    """Another client connected with our client id [reason code 0x8E]."""


class SessionUnknown(BrokerError):
    """Session Present 1 for a session that is not in the journal [MQTT-3.2.2-4]."""


class ProtocolViolation(BrokerError):
    """The broker sent what the standard forbids.

    Attributes:
        reason: The MQTT 5 reason code for our DISCONNECT (0x81 malformed, 0x82 protocol error, 0x95 too large ...).
    """

    def __init__(self, where: str, what: str, *, reason: int = 0x82) -> None:
        super().__init__(
            "TL-M30", where, what, "The connection is dropped and made anew; nothing acknowledged is lost."
        )
        self.reason = reason


class JournalError(TowlineError):
    """The disk under the promise."""


class JournalLocked(JournalError):
    """Another process owns the journal directory [I8]."""


class JournalFull(JournalError):
    """No room for the next frame; nothing was written, try again when there is room [I7]."""


class JournalFailed(JournalError):
    """A write or sync failed; this journal object must not be used again [I6]."""


class JournalDamaged(JournalError):
    """Durable frames no longer read back as they were written."""


class GatewayError(TowlineError):
    """Between Spark and a gateway."""


class GatewayUnreachable(GatewayError):
    """No gateway answers at this place."""


class NotAllowed(GatewayUnreachable):
    """This user may not look into a state directory: what is there, and what runs there, is unknown [I19]."""


class Fenced(GatewayError):
    """A newer reader has taken over, or the journal behind the gateway is another one [I8]."""


class PublisherError(TowlineError):
    """An application's outbox: it is full or closed, or a message of it will not be delivered."""


class KafkaError(TowlineError):
    """Kafka, or the way to it."""


#: PySpark's processes show Spark an error without frames where it is set (``pyspark.util.handle_worker_exception``).
_HIDE = "SPARK_HIDE_TRACEBACK"
#: And the locals of each frame where this is: ours hold what clients are told, passwords among it [I12].
_LOCALS = "SPARK_TRACEBACK_WITH_LOCALS"


def one_line(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """For what Spark calls: our own errors reach it without frames and causes, since their message says it all."""

    @functools.wraps(method)
    def bordered(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return method(*args, **kwargs)
        except TowlineError as error:
            failure = error
        except Exception:
            os.environ.pop(_LOCALS, None)
            raise
        if _HIDE not in os.environ:
            os.environ[_HIDE] = "1"
            weakref.finalize(failure, os.environ.pop, _HIDE, None)  # an error that is caught hides no other
        raise failure.with_traceback(None) from None

    return bordered
