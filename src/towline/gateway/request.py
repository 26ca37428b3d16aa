"""What a client of the gateway asks for, as JSON whose fields are checked when they are taken; how errors go back."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

import structlog
from pyarrow import flight

from towline.errors import GatewayError, TowlineError
from towline.gateway.endpoint import bad_request, error_fields
from towline.journal import Batch
from towline.logfile import own_log
from towline.text import cause

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Slices of a micro-batch: more than a cluster has cores.
_MOST_RANGES: Final = 10_000


class Request:
    """The fields of a request, each checked when it is taken.

    Args:
        where: The gateway, as errors name it.
        body: JSON; empty for no fields.
        cancelled: Whether the client has gone.

    Raises:
        GatewayError: TL-G08, from here and from every method: it is not what this version takes.
    """

    def __init__(self, where: str, body: bytes, cancelled: Callable[[], bool] = lambda: False) -> None:
        self._where = where
        self.cancelled = cancelled
        self._fields = _object(where, body)

    def _taken(self, key: str, sound: Callable[[Any], bool], wanted: str) -> Any:
        value = self._fields.get(key)
        if not sound(value):
            raise bad_request(self._where, f'"{key}" has to be {wanted}')
        return value

    def text(self, key: str) -> str:
        """Text of 1 to 256 characters."""
        return str(self._taken(key, lambda v: isinstance(v, str) and 0 < len(v) <= 256, "text of 1 to 256 characters"))

    def text_or_empty(self, key: str) -> str:
        """Text of at most 256 characters; "" where there is none."""
        return self.text(key) if self._fields.get(key, "") != "" else ""

    def number(self, key: str) -> int:
        """A number from 0."""
        return int(self._taken(key, lambda v: type(v) is int and v >= 0, "a number from 0"))

    def optional(self, key: str) -> int | None:
        """A number from 0; None where there is none."""
        return None if self._fields.get(key) is None else self.number(key)

    def seconds(self, key: str) -> float:
        """Seconds from 0."""
        return float(self._taken(key, lambda v: type(v) in (int, float) and v >= 0, "seconds from 0"))

    def listed(self, key: str) -> list[Any]:
        """A list, whatever is in it."""
        return list(self._taken(key, lambda v: isinstance(v, list), "a list"))

    def ranges(self) -> list[tuple[int, int, str]]:
        """Ranges of offsets, each with what its end came with: ``[[start, end, incarnation], ...]``."""
        wanted = f"1 to {_MOST_RANGES:,} lists of [start, end, incarnation]"
        return [tuple(each) for each in self._taken("ranges", _are_ranges, wanted)]

    def batch(self) -> Batch:
        """The batch that rows belong to."""
        origin, attempt = self.text_or_empty("origin"), self.text_or_empty("attempt")
        return Batch(self.text("writer"), self.number("batch"), origin, attempt)


def _are_ranges(value: Any) -> bool:
    if not isinstance(value, list) or not 0 < len(value) <= _MOST_RANGES:
        return False
    typed = all(isinstance(each, list) and list(map(type, each)) == [int, int, str] for each in value)
    return typed and all(0 <= start <= end and len(incarnation) <= 256 for start, end, incarnation in value)


def _object(where: str, body: bytes) -> Mapping[str, object]:
    """Read a JSON object; an empty body is an empty object."""
    try:
        value = json.loads(body or b"{}")
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise bad_request(where, "the request is not a JSON object")
    return value


#: Characters of an unforeseen cause: its text may hold a message.
_LONGEST_CAUSE: Final = 200


@contextlib.contextmanager
def errors_on_the_wire(where: str) -> Iterator[None]:
    """Carry any error across the wire as code, where, what and do; nothing else leaves the gateway [I12]."""
    try:
        yield
    except TowlineError as error:
        raise _on_the_wire(error) from error
    except Exception as error:
        raise _on_the_wire(unforeseen(where, error)) from error


def unforeseen(where: str, error: BaseException) -> GatewayError:
    """TL-G09: the cause in words, and the traceback in the log of this process."""
    structlog.get_logger("towline.gateway").error("unexpected", line=where, code="TL-G09", exc_info=error)
    log = own_log() or "the gateway's standard error"
    do = f"This is a fault in Towline; please report it with the traceback in {log}."
    what = f"the gateway failed in an unexpected way ({cause(error, _LONGEST_CAUSE)})"
    return GatewayError("TL-G09", where, what, do)


def refusal(error: TowlineError) -> Exception:
    """An error for who is not let in: gRPC's own word for it, which a foreign client understands too."""
    return _on_the_wire(error, flight.FlightUnauthenticatedError)


def _on_the_wire(error: TowlineError, kind: type[Exception] = flight.FlightServerError) -> Exception:
    return kind(error.code, extra_info=json.dumps(error_fields(error)).encode())  # type: ignore[call-arg]
