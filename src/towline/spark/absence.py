"""A gateway that a stream does without: it does not answer, or does not come together with this query.

Only what passes by itself, or by a file that a person changes, is done without. A journal that is not the checkpoint's,
or another reader's lease, stops a query: to go on would be to forget rows silently.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Final, Self

from towline.errors import GatewayError, GatewayUnreachable, JournalFailed, TowlineError
from towline.gateway.access import REFUSALS

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Absence", "is_absence", "is_refusal", "is_silence", "nobody_lets_in"]

#: What a gateway says, or does not say, while it is being started again.
_SILENT: Final = (GatewayUnreachable, JournalFailed)
#: Pause before a gateway that is away is asked again, in seconds.
_PAUSE_S: Final = 0.25
#: The same for one that refuses: each try is counted there, and a file has to be changed first.
_REFUSED_PAUSE_S: Final = 5.0
#: A refusal is told again after so many seconds: nobody but a person ends it.
_REMIND_S: Final = 60.0

_LOG = logging.getLogger("towline.spark")


def is_silence(error: BaseException | None) -> bool:
    """Whether an error passes by itself: the gateway may be being started again."""
    return isinstance(error, _SILENT)


def is_refusal(error: BaseException | None) -> bool:
    """Whether a gateway and this query do not let each other in, by token or certificate."""
    return isinstance(error, GatewayError) and error.code in REFUSALS


def is_absence(error: BaseException | None) -> bool:
    """Whether an error of one of several gateways holds back that gateway's rows only."""
    return is_silence(error) or is_refusal(error)


@dataclass(slots=True)
class Absence:
    """Since when a gateway is done without, and why.

    Attributes:
        since: Seconds since 1970.
        error: What it, or the way to it, said last: silence or a refusal.
        told_at: When a person was told last, on `time.monotonic`.
    """

    since: float
    error: TowlineError
    told_at: float = float("-inf")

    @classmethod
    def after(cls, before: Absence | None, error: TowlineError) -> Self:
        """The same absence with another error, or a new one; what is of another kind is told anew."""
        if before is None:
            return cls(time.time(), error)
        same = before.refused is is_refusal(error)
        return cls(before.since, error, before.told_at if same else float("-inf"))

    @property
    def refused(self) -> bool:
        """Whether only a person can end it."""
        return is_refusal(self.error)

    @property
    def why(self) -> str:
        """In words; of a refusal what to do about it, too."""
        return f"{self.error.what}. {self.error.do}" if self.refused else self.error.what

    @property
    def pause_s(self) -> float:
        """How long to wait before it is asked again."""
        return _REFUSED_PAUSE_S if self.refused else _PAUSE_S

    def tell(self, name: str) -> None:
        """Say it once, and a refusal once a minute."""
        now = time.monotonic()
        if now - self.told_at < (_REMIND_S if self.refused else float("inf")):
            return
        self.told_at = now
        if self.refused:
            what = "gateway %s is held back: %s; its messages wait there, the others' go on. %s   [%s]"
            _LOG.warning(what, name, self.error.what, self.error.do, self.error.code)
        else:
            what = "gateway %s is away: %s; its messages wait there, the others' go on   [TL-G54]"
            _LOG.warning(what, name, self.error.what)

    def over(self, name: str) -> None:
        """Say that the gateway is back."""
        since = datetime.fromtimestamp(self.since).astimezone()
        _LOG.warning("gateway %s is back; it was away since %s", name, f"{since:%H:%M:%S}")


def nobody_lets_in(absences: Sequence[tuple[str, Absence | None]]) -> GatewayError | None:
    """The error where each of a source's gateways refuses: only a person can help then; None otherwise.

    Args:
        absences: What each is called, and whether it is done without.
    """
    refusals = [(name, absence) for name, absence in absences if absence is not None and absence.refused]
    if not refusals or len(refusals) < len(absences):
        return None
    first = refusals[0][1].error
    why = "; ".join(f"{name}: {absence.error.what}" for name, absence in refusals)
    where = 'format("mqtt") option "gateways"'
    return GatewayError(first.code, where, f"no gateway of the list lets this query in ({why})", first.do)
