"""The table: checks, what they answer, and how a person or a script reads it. Pure: no network, disk or clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any, Final, Generic, TypeVar

from towline.errors import TowlineError
from towline.text import printable

_F = TypeVar("_F")
_T = TypeVar("_T")


class Standing(StrEnum):
    """How a promise stands; from the best to the worst."""

    HOLDS = "holds"
    LIMITED = "limited"  # up to a limit that is far enough away to be told and no more
    UNKNOWN = "unknown"  # it could not be measured (no right, no answer): nobody knows [I19]
    WARNS = "warns"  # until a limit that is near, or as long as something goes well that need not
    BROKEN = "broken"


HOLDS, LIMITED, UNKNOWN, WARNS, BROKEN = Standing
_ORDER: Final = {verdict: place for place, verdict in enumerate(Standing)}
_KEPT: Final = frozenset({Standing.HOLDS, Standing.LIMITED})
_MARKS: Final = dict(zip(Standing, "✓✓?!✗", strict=True))
#: Exit code by the worst row; 2 is for a mistake in the bridge file, as in every command.
_EXIT_CODES: Final = dict(zip(Standing, (0, 0, 3, 3, 1), strict=True))
_HEADS: Final = ("holds until", "because", "what to do")
_AGAIN: Final = "Mend that, and ask again."


@dataclass(frozen=True)
class Answer:
    """What a rule says of its promise.

    Attributes:
        verdict: How it stands.
        because: The measured or read fact, with its number and unit and the setting's name.
        until: When or where the promise ends: "1,000 messages, 5 s at 200 msg/s"; empty where nothing ends it.
        mend: What to do; empty where nothing is to be done.
        line: Name of the line it concerns; empty for all of the bridge.
        promise: In two or three words; empty for that of the check.
        code: Of a row of the table: that of its check, which names the paragraph of docs/errors.md.
    """

    verdict: Standing
    because: str
    until: str = ""
    mend: str = ""
    line: str = ""
    promise: str = ""
    code: str = ""

    def __post_init__(self) -> None:
        assert self.because, "a row without a fact proves nothing"
        assert self.mend or self.verdict in _KEPT, "a row that is not kept says what to do"


@dataclass(frozen=True)
class Check(Generic[_F]):
    """One question: the code of its rows, what they are about, and what makes answers of facts, or none."""

    code: str
    promise: str
    rule: Callable[[_F], Iterable[Answer]]


class NotAsked(Exception):
    """A fact that is left unasked, because asking would do harm, or could not be answered: why, and what to do."""

    def __init__(self, why: str, mend: str = _AGAIN) -> None:
        super().__init__(why)
        self.mend = mend


class fact(Generic[_T]):  # noqa: N801 - it stands where property and cached_property do
    """An attribute that is asked for once, when it is first wanted; an error is its answer too, and not asked again."""

    def __init__(self, ask: Callable[[Any], _T]) -> None:
        self._ask = ask
        self.__doc__ = ask.__doc__

    def __set_name__(self, _owner: type, name: str) -> None:
        self._name = name

    def __get__(self, owner: Any, _kind: type | None = None) -> _T:
        known = vars(owner)
        if (error := known.get(f"no {self._name}")) is not None:
            raise error
        try:
            known[self._name] = found = self._ask(owner)
        except Exception as error:
            known[f"no {self._name}"] = error
            raise
        return found


def answers(checks: Iterable[Check[_F]], facts: _F, line: str = "") -> Iterator[Answer]:
    """The rows of checks, of `line` where they name none; one that raises is a row too, and the others go on."""
    for check in checks:
        found: list[Answer] = []
        try:
            found.extend(check.rule(facts))  # what it has said before it raises stays
        except NotAsked as error:
            found.append(Answer(Standing.UNKNOWN, f"not asked: {error}", mend=error.mend))
        except Exception as error:  # noqa: BLE001 - whatever it is, the other rows are told
            told = f"{type(error).__name__}: {error}"
            mend = _AGAIN if isinstance(error, OSError) else "Report it, with this row; the others hold."
            if isinstance(error, TowlineError):
                told, mend = f"{error.where}: {error.what} ({error.code})", error.do or _AGAIN
            found.append(Answer(Standing.UNKNOWN, f"could not be asked: {told}", mend=mend))
        for one in found:
            because, until, mend = map(printable, (one.because, one.until, one.mend))
            promise, where = one.promise or check.promise, one.line or line
            yield Answer(one.verdict, because, until, mend, where, promise, check.code)


def _ordered(findings: Iterable[Answer]) -> list[Answer]:
    """The worst first; of one verdict by code and line."""
    return sorted(findings, key=lambda one: (-_ORDER[one.verdict], one.code, one.line))


def exit_code(findings: Iterable[Answer]) -> int:
    """By the worst row; nothing found at all is not known.

    Returns:
        0 all holds, 1 a promise does not hold, 3 one has a near limit or is not known.
    """
    return _EXIT_CODES[max((one.verdict for one in findings), key=_ORDER.__getitem__, default=Standing.UNKNOWN)]


def as_json(findings: Iterable[Answer]) -> dict[str, Any]:
    """The table as JSON values: ``findings`` (the worst first), ``worst`` verdict and ``exit_code``."""
    rows = _ordered(findings)
    worst = rows[0].verdict if rows else Standing.UNKNOWN
    return {"findings": [asdict(one) for one in rows], "worst": worst.value, "exit_code": exit_code(rows)}


def screen(findings: Iterable[Answer], load: Iterable[str], *, verbose: bool = False) -> Iterator[str]:
    """The table for a person: the worst as a headline, the rows with the worst last, and a summary.

    Args:
        findings: All rows.
        load: Lines about what comes in.
        verbose: Show what is kept too.
    """
    found = _merged(_ordered(findings))
    if found and found[0].verdict not in _KEPT:
        yield f"{_title(found[0])}: {found[0].because}{_code(found[0])}"
    yield from load
    for one in reversed(found):
        if verbose or one.verdict not in _KEPT:
            yield ""
            yield _title(one)
            mend = f"{one.mend}{_code(one)}" if one.mend else ""
            for head, cell in zip(_HEADS, (one.until, one.because, mend), strict=True):
                if cell:
                    yield f"  {head:<13}{cell}"
    yield ""
    yield _summary(findings, verbose=verbose)


def _merged(found: list[Answer]) -> list[Answer]:
    """Rows that differ in their promise only are one row on the screen, such as all that one probe would have shown."""
    alike: dict[tuple[str, ...], Answer] = {}
    for one in found:
        key = (one.verdict, one.because, one.until, one.mend, one.line)
        before = alike.setdefault(key, one)
        if one.promise not in before.promise.split(", "):
            alike[key] = replace(before, code="", promise=f"{before.promise}, {one.promise}")
    return list(alike.values())


def _title(one: Answer) -> str:
    return f"{_MARKS[one.verdict]} {one.promise}{f' ({one.line})' if one.line else ''}"


def _code(one: Answer) -> str:
    return f"   [{one.code}]" if one.code else ""


def _summary(findings: Iterable[Answer], *, verbose: bool) -> str:
    verdicts = [one.verdict for one in findings]
    words = {Standing.BROKEN: "broken", Standing.WARNS: "near a limit", Standing.UNKNOWN: "not known"}
    told = [f"{verdicts.count(verdict)} {word}" for verdict, word in words.items() if verdict in verdicts]
    if kept := sum(one in _KEPT for one in verdicts):
        told.append(f"{kept} kept{'' if verbose else ' (-v)'}")
    return ", ".join(told) or "nothing was examined"


# -- how figures are told --


def sized(count: float) -> str:
    """Bytes in the unit that suits them: ``1.5 MB``, ``29 GB``."""
    units = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
    unit = next((name for name, size in units.items() if abs(count) < 1000 * size), "TB")
    value = count / units[unit]
    return f"{value:,.0f} {unit}" if value >= 10 or value == int(value) else f"{value:.1f} {unit}"


def named(names: Iterable[str]) -> str:
    """``a, b, c and 4 more``."""
    each = sorted(set(names))
    more = len(each) - 3
    shown = ", ".join(each[:3])
    return f"{shown} and {more} more" if more > 0 else shown
