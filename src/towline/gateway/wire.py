"""How the gateway's errors leave it: as code, where, what and do, and nothing else [I12]."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Final

import structlog
from pyarrow import flight

from towline.errors import GatewayError, TowlineError
from towline.gateway.endpoint import error_fields
from towline.logfile import own_log
from towline.text import printable

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["errors_on_the_wire", "refusal", "unforeseen"]

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
    first = printable(next(iter(str(error).splitlines()), ""), _LONGEST_CAUSE).rstrip(". ")
    why = f"{type(error).__name__}{': ' if first else ''}{first}"
    log = own_log() or "the gateway's standard error"
    do = f"This is a fault in Towline; please report it with the traceback in {log}."
    return GatewayError("TL-G09", where, f"the gateway failed in an unexpected way ({why})", do)


def refusal(error: TowlineError) -> Exception:
    """An error for who is not let in: gRPC's own word for it, which a foreign client understands too."""
    wire: Exception = flight.FlightUnauthenticatedError(error.code, extra_info=_fields(error))
    return wire


def _on_the_wire(error: TowlineError) -> Exception:
    wire: Exception = flight.FlightServerError(error.code, extra_info=_fields(error))
    return wire


def _fields(error: TowlineError) -> bytes:
    return json.dumps(error_fields(error)).encode()
