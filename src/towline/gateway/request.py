"""What a client of the gateway asks for: JSON whose fields are checked when they are taken."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, NoReturn

from towline.errors import GatewayError
from towline.journal import Batch

__all__ = ["Request", "bad_request"]

#: Slices of a micro-batch: more than a cluster has cores.
_MOST_RANGES: Final = 10_000


class Request:
    """The fields of a request, each checked when it is taken.

    Args:
        where: The gateway, as errors name it.
        body: JSON; empty for no fields.

    Raises:
        GatewayError: TL-G08, from here and from every method: it is not what this version takes.
    """

    def __init__(self, where: str, body: bytes) -> None:
        self._where = where
        self._fields = _object(where, body)

    def text(self, key: str) -> str:
        """Text of 1 to 256 characters."""
        value = self._fields.get(key)
        if not isinstance(value, str) or not 0 < len(value) <= 256:
            self._refuse(key, "text of 1 to 256 characters")
        return value

    def number(self, key: str) -> int:
        """A number from 0."""
        value = self._fields.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            self._refuse(key, "a number from 0")
        return value

    def optional(self, key: str) -> int | None:
        """A number from 0; None where there is none."""
        return None if self._fields.get(key) is None else self.number(key)

    def incarnation(self) -> str:
        """The opening of a journal that an offset came with; "" for unknown."""
        value = self._fields.get("incarnation", "")
        return self.text("incarnation") if value != "" else ""

    def listed(self, key: str) -> list[Any]:
        """A list, whatever is in it."""
        value = self._fields.get(key)
        if not isinstance(value, list):
            self._refuse(key, "a list")
        return value

    def ranges(self) -> list[tuple[int, int, str]]:
        """Ranges of offsets, each with what its end came with: ``[[start, end, incarnation], ...]``."""
        value = self._fields.get("ranges")
        if not isinstance(value, list) or not 0 < len(value) <= _MOST_RANGES:
            self._refuse("ranges", f"1 to {_MOST_RANGES:,} ranges")
        return [self._range(each) for each in value]

    def _range(self, value: object) -> tuple[int, int, str]:
        if not isinstance(value, list) or list(map(type, value)) != [int, int, str]:
            self._refuse("ranges", "a list of [start, end, incarnation]")
        start, end, incarnation = value
        if not 0 <= start <= end or len(incarnation) > 256:
            self._refuse("ranges", "a list of [start, end, incarnation]")
        return start, end, incarnation

    def batch(self) -> Batch:
        """The batch that rows belong to."""
        return Batch(self.text("writer"), self.number("batch"), self._or_empty("origin"), self._or_empty("attempt"))

    def _or_empty(self, key: str) -> str:
        value = self._fields.get(key, "")
        if not isinstance(value, str) or len(value) > 256:
            self._refuse(key, "text of at most 256 characters")
        return value

    def seconds(self, key: str) -> float:
        """Seconds from 0."""
        value = self._fields.get(key)
        if not isinstance(value, int | float) or isinstance(value, bool) or not value >= 0:
            self._refuse(key, "seconds from 0")
        return float(value)

    def _refuse(self, key: str, wanted: str) -> NoReturn:
        raise bad_request(self._where, f'"{key}" has to be {wanted}')


def bad_request(where: str, what: str) -> GatewayError:
    """TL-G08: the client asks for what this version does not have."""
    return GatewayError("TL-G08", where, what, "Use the same version of Towline on both sides.")


def _object(where: str, body: bytes) -> Mapping[str, object]:
    """Read a JSON object; an empty body is an empty object."""
    try:
        value = json.loads(body or b"{}")
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise bad_request(where, "the request is not a JSON object")
    return value
