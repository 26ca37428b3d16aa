"""``python -m towline.gateway.front``: the process of a gateway that faces the network.

A process of its own, because gRPC as pyarrow builds it takes messages of any size and any number of connections before
it asks who sends them: what a stranger uses up, memory, threads, descriptors or the interpreter, is this process's and
never the intake's [I7]. It knows tokens and tickets, has the gateway's unix socket for all that is let in, and keeps
nothing: it may end at any time, and the gateway starts it again.

Settings come as a line of JSON on standard input, whose end ends it; what it has to say goes to standard output, a line
of JSON each.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from pyarrow import flight

from towline.errors import GatewayError, TowlineError
from towline.gateway.endpoint import error_fields
from towline.gateway.listen import ListenSettings, ServerCertificate, TokenFile
from towline.gateway.memory import give_memory_back, physical_bytes, resident_bytes
from towline.gateway.process import configure_logging
from towline.gateway.remote import RemoteService
from towline.gateway.request import unforeseen
from towline.gateway.tickets import TicketKey
from towline.logfile import LogStream

__all__ = ["Forwarding", "main"]

#: Most bytes in memory: a quarter of the machine's, and so many at least. A row of 256 MB is there three times on its
#: way, and each stream of rows has two batches of up to 32 MB; strangers get no more either.
_LEAST_BYTES: Final = 2 << 30
#: Longer than the longest wait that a client may ask for.
_CALL_S: Final = 90.0
#: How long a port may still be that of a gateway that has just been killed, in seconds.
_PORT_S: Final = 3.0
#: How often it is looked how much memory there is, in seconds: a fast network brings 100 MB meanwhile.
_GLANCE_S: Final = 0.1


class Forwarding:
    """Hands calls on to the gateway's unix socket; `RemoteService` asks it as it would ask the gateway's own service.

    Args:
        location: Of the socket.
        tickets: Judges the tickets of this gateway.
    """

    def __init__(self, location: str, tickets: TicketKey) -> None:
        self.tickets = tickets
        self._gateway = flight.connect(location)

    def do_action(self, context: Any, action: Any) -> list[bytes]:
        """Answer as the gateway does."""
        del context
        with _passed_on():
            options = flight.FlightCallOptions(timeout=_CALL_S)
            return [result.body.to_pybytes() for result in self._gateway.do_action(action, options)]

    def do_get(self, context: Any, ticket: Any) -> Any:
        """Stream what the gateway streams."""
        del context
        with _passed_on():
            stream = self._gateway.do_get(ticket)
            return flight.GeneratorStream(stream.schema, _rows(stream))

    def do_put(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        """Bring the gateway what comes, batch by batch."""
        del context
        with _passed_on():
            stream, answers = self._gateway.do_put(descriptor, reader.schema)
            try:
                for chunk in reader:
                    if chunk.app_metadata is None:
                        stream.write_batch(chunk.data)
                    else:
                        stream.write_with_metadata(chunk.data, chunk.app_metadata)
                stream.done_writing()
                answer = answers.read()
            finally:
                stream.close()
            if answer is not None:
                writer.write(answer)

    def close(self) -> None:
        """Close the connection."""
        self._gateway.close()


def _rows(stream: Any) -> Iterator[pa.RecordBatch]:
    try:
        while True:
            with _passed_on():
                chunk = next(stream, None)
            if chunk is None:
                return
            yield chunk.data
    finally:
        with contextlib.suppress(Exception):
            stream.cancel()


@contextlib.contextmanager
def _passed_on() -> Iterator[None]:
    """The gateway's errors, as it said them; a gateway that is gone is not reached here either."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        if told := getattr(error, "extra_info", None):
            raise flight.FlightServerError("TL-G", extra_info=bytes(told)) from None
        raise flight.FlightUnavailableError("the gateway does not answer") from None


def main() -> int:
    """Serve until standard input ends."""
    configure_logging(LogStream(sys.stderr))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the gateway ends it, when it has ended what waits
    told = json.loads(sys.stdin.readline())
    give_memory_back()
    _first_to_go()
    try:
        _serve(told)
    except TowlineError as error:
        _say({"error": error_fields(error)})
        return 1
    except Exception as error:  # noqa: BLE001 - the gateway learns why, whatever it was
        _say({"error": error_fields(unforeseen(str(told.get("name")), error))})
        return 1
    return 0


def _serve(told: Mapping[str, Any]) -> None:
    settings, name = ListenSettings.model_validate(told["listen"]), str(told["name"])
    allowed, certificate = TokenFile(settings.token_file), ServerCertificate.read(settings)
    calls = Forwarding(str(told["gateway"]), TicketKey.of(name, Path(told["state_dir"])))
    service = _listening(lambda: RemoteService(settings, calls, name, allowed, certificate))
    said: dict[str, object] = {}
    most = told.get("most_bytes") or max(_LEAST_BYTES, physical_bytes() // 4)
    while not select.select([sys.stdin], [], [], _GLANCE_S if said else 0)[0]:
        if (status := service.status()) != said:
            _say(said := status)
        if resident_bytes() > most:
            what = f"the network's calls took more than {most >> 20:,} MB"
            _say({"error": error_fields(GatewayError("TL-G49", name, what, "It begins again."))})
            os._exit(1)  # nothing is kept here, and whatever ends in order takes time
    service.close()
    calls.close()


def _listening(make: Callable[[], RemoteService]) -> RemoteService:
    """Listen; the process before may need a moment to let go of the port."""
    deadline = time.monotonic() + _PORT_S
    while True:
        try:
            return make()
        except GatewayError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(0.1)


def _first_to_go() -> None:
    """Where memory is short, this process goes, and not the one that takes messages in."""
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # keys would be in it
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def _say(words: Mapping[str, object]) -> None:
    sys.stdout.write(json.dumps(words) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
