"""One connection to a gateway: how it is opened, what lets each call in, and what its errors mean.

Every error of Arrow Flight becomes one of ours in one place, `Channel.translated`. ``pyarrow.flight`` is imported
inside the methods: Spark's workers load this module before they fork.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
from typing import TYPE_CHECKING, Any, Final

from towline.errors import GatewayError, GatewayUnreachable
from towline.gateway.access import Access, is_remote
from towline.gateway.endpoint import error_from
from towline.gateway.interruptible import interruptible

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["BRING_S", "SILENCE_S", "Channel"]

#: Longest wait for the next rows over a network, in seconds: 32 MB of them at 3 Mbit/s.
SILENCE_S: Final = 90.0
#: Longest time for a piece of a batch on its way to an outbox over a network, in seconds.
BRING_S: Final = 300.0

#: gRPC would otherwise wait up to a second, then longer, before it looks again whether a gateway is back. What it calls
#: the shortest backoff is also how long one attempt may take: a busy machine needs more than a moment.
_CHANNEL: Final = [
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 10_000),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.use_local_subchannel_pool", 1),
]
#: What gRPC says of a certificate that it does not accept, in its own words and in OpenSSL's.
_NOT_TRUSTED: Final = re.compile(r"certificate verify failed: ([a-z ]+)|(Peer name \S+ is not in peer certificate)")
_NEAR: Final = "Is it running? `towline status` shows it; with the option stateDir the source starts one by itself."
_FAR: Final = "Does it run and listen there? `towline status` on its machine shows it."


class Channel:
    """A connection, opened at the first call.

    Args:
        location: Of the gateway.
        access: The files of a gateway on a network.
        ticket: Lets calls in, in place of the token.
        authority: The authorities of the gateway's certificate (PEM), where no file has them.
    """

    def __init__(self, location: str, access: Access, ticket: str = "", authority: str = "") -> None:
        self._location = location
        self._access = access
        self._ticket = ticket
        self._authority = authority
        self._flight: Any = None

    def connected(self) -> Any:
        """The client of Arrow Flight.

        Raises:
            GatewayError: TL-G46, a file can't be read on this machine.
        """
        from pyarrow import flight  # noqa: PLC0415 - no gRPC before a fork

        if self._flight is None:
            given = self._access.connection(self._authority) if is_remote(self._location) else {}
            self._flight = flight.connect(self._location, generic_options=_CHANNEL, **given)
        return self._flight

    def options_of_put(self) -> Any:
        """Those of a call that brings rows: over a network it has an end."""
        return self.options(BRING_S if is_remote(self._location) else None)

    def options(self, timeout_s: float | None = None) -> Any:
        """How long a call may take, and what lets it in over a network: on a unix socket the file's rights do.

        Args:
            timeout_s: Seconds; None for no end.

        Raises:
            GatewayError: TL-G46, there is no token here.
        """
        from pyarrow import flight  # noqa: PLC0415 - no gRPC before a fork

        headers = []
        if is_remote(self._location):
            told = f"Ticket {self._ticket}" if self._ticket else f"Bearer {self._access.token()}"
            headers = [(b"authorization", told.encode())]
        return flight.FlightCallOptions(timeout=timeout_s, headers=headers)

    def opened(self, call: Callable[[], Any]) -> Any:
        """Begin a stream of rows; over a network only as long as `heard` waits."""
        return interruptible(call, SILENCE_S) if is_remote(self._location) else call()

    @contextlib.contextmanager
    def heard(self, stream: Any) -> Iterator[None]:
        """End a stream over a network that says nothing for `SILENCE_S`: a machine that is gone ends no connection.

        gRPC's own keep-alive is no help: a server takes one ping in five minutes, and pyarrow has no setting for it.
        """
        if not is_remote(self._location):
            yield
            return
        timer = threading.Timer(SILENCE_S, stream.cancel)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    @contextlib.contextmanager
    def translated(self) -> Iterator[None]:
        """Make every error of Flight one of ours: the gateway's own words, or that it does not answer."""
        import pyarrow as pa  # noqa: PLC0415 - see above

        try:
            yield
        except (pa.ArrowException, StopIteration, OSError) as error:
            fields = getattr(error, "extra_info", None)
            if fields:
                raise error_from(json.loads(fields)) from error
            if found := _NOT_TRUSTED.search(str(error)):
                raise GatewayError(
                    "TL-G44",
                    self._location,
                    f"the gateway's certificate is not accepted ({found[1] or found[2]})",
                    "gatewayCaFile names the authority that signed it, gatewayServerName the name it is for.",
                ) from error
            hint = _FAR if is_remote(self._location) else _NEAR
            why = f"no gateway answers ({_first_words(error)})"
            raise GatewayUnreachable("TL-G01", self._location, why, hint) from error

    def close(self) -> None:
        """Close the connection, if there is one."""
        held, self._flight = self._flight, None
        if held is not None:
            with contextlib.suppress(Exception):
                held.close()


def _first_words(error: BaseException) -> str:
    """The kind of a foreign error, without its page of gRPC context."""
    return type(error).__name__.removeprefix("Flight").removesuffix("Error") or "no answer"
