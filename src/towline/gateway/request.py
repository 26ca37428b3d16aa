"""What a client of the gateway asks for, as JSON whose fields are a handler's arguments; how errors go back."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias, TypeVar

import structlog
from pyarrow import flight
from pydantic import Field, ValidationError

from towline.errors import GatewayError, TowlineError
from towline.gateway.endpoint import bad_request, error_fields
from towline.logfile import own_log
from towline.text import cause

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Fields of a request: text of 1 to 256 characters, the same or "" for none, a number and seconds from 0, and ranges of
#: offsets, each with what its end came with.
Text: TypeAlias = Annotated[str, Field(min_length=1, max_length=256)]
OptionalText: TypeAlias = Annotated[str, Field(max_length=256)]
Number: TypeAlias = Annotated[int, Field(ge=0, strict=True)]
Seconds: TypeAlias = Annotated[float, Field(ge=0, strict=True, allow_inf_nan=False)]
#: As many as slices of a micro-batch: more than a cluster has cores.
Ranges: TypeAlias = Annotated[list[tuple[Number, Number, OptionalText]], Field(min_length=1, max_length=10_000)]
_T = TypeVar("_T")


def fields_of(where: str, body: bytes) -> dict[str, Any]:
    """The fields of a request, a JSON object; empty for an empty body.

    Raises:
        GatewayError: TL-G08, it is none.
    """
    try:
        value = json.loads(body or b"{}")
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise bad_request(where, "the request is not a JSON object")
    return value


def answer(where: str, handler: Callable[..., _T], body: bytes, **more: object) -> _T:
    """What a handler answers to a request, whose fields are its arguments, checked by their types (`validate_call`).

    Args:
        where: The gateway, as errors name it.
        handler: The handler.
        body: Of the request.
        more: Arguments that the call itself says.

    Raises:
        GatewayError: TL-G08, it is not what this version takes; and what the handler raises.
    """
    fields = {**fields_of(where, body), **more}
    try:
        return handler(**fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        name = ".".join(map(str, first["loc"]))
        raise bad_request(where, f'"{name}" is not accepted: {first["msg"].lower()}') from None


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
