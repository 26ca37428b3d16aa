"""``sasl.jaas.config`` of Java's Kafka client: one login module and its options, as Kafka's JaasConfig reads them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["Login", "parse"]

#: Java's StreamTokenizer as JaasConfig sets it up: words, quoted texts of one line, and two signs.
_TOKEN: Final = re.compile(
    r"""\s+ | //[^\n]* | /\*.*?\*/
    | "(?P<double>(?:[^"\\\n]|\\.)*)" | '(?P<single>(?:[^'\\\n]|\\.)*)'
    | (?P<word>[\w.$-]+) | (?P<sign>[=;])""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPE: Final = re.compile(r"\\([0-3]?[0-7]{1,2}|.)", re.DOTALL)
_ESCAPES: Final = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}
_FLAGS: Final = frozenset({"required", "requisite", "sufficient", "optional"})


@dataclass(frozen=True)
class Login:
    """A login module, and what it is told.

    Attributes:
        module: Its class, without the package.
        options: By name; may hold secrets.
    """

    module: str
    options: Mapping[str, str]

    def __repr__(self) -> str:
        return f"Login({self.module})"


def parse(text: str) -> Login:
    """Read ``CLASS required NAME="VALUE" ...;``.

    Raises:
        ValueError: It is not of this form; the text says why and quotes nothing of it.
    """
    tokens = list(_tokens(text))
    if not tokens or tokens[-1] != (";", True):
        raise ValueError("does not end with a semicolon")
    if len(tokens) < 3 or tokens[0][1] or tokens[1][0].lower() not in _FLAGS:
        raise ValueError('does not begin with a login module and "required"')
    given = tokens[2:-1]
    if (";", True) in given:
        raise ValueError("has more than one login module")
    options: dict[str, str] = {}
    for at in range(0, len(given), 3):
        part = given[at : at + 3]
        if len(part) < 3 or part[0][1] or part[1] != ("=", True) or part[2][1]:
            raise ValueError('has an option that is not of the form name="value"')
        options[part[0][0]] = part[2][0]
    return Login(tokens[0][0].rpartition(".")[2], options)


def _tokens(text: str) -> Iterator[tuple[str, bool]]:
    """Each token's text, and whether it is a sign."""
    at = 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise ValueError(f"can not be read from character {at + 1} on")
        at = match.end()
        kind = match.lastgroup
        if kind in ("double", "single"):
            yield _ESCAPE.sub(_unescaped, match[kind]), False
        elif kind is not None:
            yield match[kind], kind == "sign"


def _unescaped(match: re.Match[str]) -> str:
    escape = match[1]
    return chr(int(escape, 8)) if escape[0] in "01234567" else _ESCAPES.get(escape, escape)
