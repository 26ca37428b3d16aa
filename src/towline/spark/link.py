"""From a Spark process to a gateway: where it is, who owns it, and patience while it is being started again."""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal, Self, TypeVar

from annotated_types import Ge

from towline import processes
from towline.errors import GatewayUnreachable, TowlineError
from towline.gateway.access import DEFAULT_VALID_S, REMOTE, Access, is_remote
from towline.gateway.client import GatewayClient
from towline.gateway.launch import discover, ensure
from towline.options import parts, path
from towline.processes import ProcessMark
from towline.text import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import pyarrow as pa

#: How long a reader waits for a gateway that does not answer, in seconds: a supervisor's restart and its recovery.
PATIENCE_S = 60.0

_PAUSE_S = 0.1
_NO_ACCESS = Access()

_T = TypeVar("_T")

_REMOTE: Final = re.compile(re.escape(REMOTE) + r"(\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._-]+):[0-9]{1,5}/?")


def gateway_location(text: str) -> str:
    """Read where a gateway is: its state directory, or its location.

    Raises:
        ValueError: It is neither.
    """
    if not text:
        raise ValueError("must be the state directory of a running gateway, or its location grpc+tls://HOST:PORT")
    if "://" not in text:
        return path(text)
    if not text.startswith("grpc+unix:///") and not _REMOTE.fullmatch(text):
        raise ValueError("a location is grpc+unix:///PATH or grpc+tls://HOST:PORT; there is none without TLS")
    return text


def gateway_list(text: str) -> tuple[str, ...]:
    """Read several gateways: ``/var/lib/g1, grpc+tls://g2:8815``, or a JSON list of the same texts.

    Raises:
        ValueError: One is none, or stands there twice, or there is none.
    """
    named = [gateway_location(part.strip()).rstrip("/") for part in parts(text, "gateways", '["/var/lib/g1"]')]
    if not named:
        raise ValueError("it names no gateway")
    if twice := next((one for one in named if named.count(one) > 1), None):
        raise ValueError(f"{printable(twice, 200)} stands there twice")
    return tuple(named)


@dataclass(frozen=True, slots=True)
class GatewayPlace:
    """Where a gateway is, in plain values: it travels to Spark's workers.

    Attributes:
        state_dir: State directory of the gateway, "" when only its location is known.
        location: Flight location, "" when it is to be found by the state directory.
        settings: Settings of a gateway to start when none runs, as JSON; "" to start none.
        access: The files that let the driver in to a gateway on a network.
        ticket_s: Seconds that a ticket of its workers is worth something.
        ticket: Lets a worker in, in place of the token that `access` names.
        authority: With it: the authorities of the gateway's certificate as PEM text; a worker needs no file of them.
        owner: The driver's JVM, with which a gateway that is started ends; tasks elsewhere start none.
    """

    state_dir: str
    location: str
    settings: str = ""
    access: Access = _NO_ACCESS
    ticket_s: float = DEFAULT_VALID_S
    ticket: str = field(default="", repr=False)
    authority: str = ""
    owner: ProcessMark | None = None

    @property
    def remote(self) -> bool:
        """Whether the gateway is on a network: workers need tickets then."""
        return is_remote(self.location)

    def admitted(self, ticket: str) -> Self:
        """The same place as a worker comes to it: with a ticket, and without a need for files. On the driver.

        Raises:
            GatewayError: TL-G46, the file with the authorities of the gateway's certificate can't be read.
        """
        return replace(self, ticket=ticket, authority=self.access.authority())

    def for_writer(self, client: GatewayClient, writer: str) -> Self:
        """The place as the tasks of one query or job come to it to bring rows. On the driver; raises as `admitted`."""
        return self.admitted(client.sign_writer(writer, valid_s=self.ticket_s)) if self.remote else self

    @classmethod
    def of(cls, text: str, access: Access = _NO_ACCESS) -> Self:
        """The place of a running gateway, as the option ``gateways`` names it: a location, or a state directory."""
        return cls("", text, access=access) if "://" in text else cls(text, "", access=access)

    @property
    def text(self) -> str:
        """The place in one word, as `of` takes it."""
        return self.location or self.state_dir

    def attach(self) -> GatewayClient:
        """Find the running gateway.

        Raises:
            GatewayUnreachable: TL-G01 when none runs there.
        """
        if self.location:
            return GatewayClient(self.location, self.access, ticket=self.ticket, authority=self.authority)
        client = discover(Path(self.state_dir))
        if client is None:
            do = "Start it, or give the options broker, subscribe and stateDir instead of gateway."
            if self.settings:
                do = "It is on the driver's machine: tasks elsewhere need a gateway on the network (option gateway)."
            raise GatewayUnreachable("TL-G01", self.state_dir, "no gateway runs in this state directory", do)
        return client

    def connect(self) -> GatewayClient:
        """Find the running gateway, or start one where that is ours to do, on the machine of the driver.

        Raises:
            TowlineError: Whatever kept it from starting.
        """
        if not self.settings or self.owner is None or not self.owner.runs_here():
            return self.attach()
        from towline.gateway.settings import GatewaySettings  # noqa: PLC0415 - workers need no pydantic
        from towline.spark.gateway_options import in_options  # noqa: PLC0415 - see above

        try:
            return ensure(GatewaySettings.model_validate_json(self.settings), owner_pid=self.owner.pid)
        except TowlineError as error:
            error.what, error.do = in_options(error.what), in_options(error.do)
            raise

    def rows(self, journal: str, start: int, end: int, incarnation: str = "") -> Iterator[pa.RecordBatch]:
        """Read a range; a gateway that has ended is started again, or waited for, and the rest is read then [I4].

        Raises:
            GatewayError: When the journal is another one or does not have the range, or what kept it from starting.
            GatewayUnreachable: When the gateway did not come back within `PATIENCE_S` seconds.
        """
        deadline, reach = time.monotonic() + PATIENCE_S, self.attach
        while start < end:
            try:
                with reach() as client:
                    for batch in client.read(journal, start, end, incarnation=incarnation):
                        start += batch.num_rows
                        yield batch
                        deadline = time.monotonic() + PATIENCE_S
            except GatewayUnreachable:
                if time.monotonic() >= deadline:
                    raise
                reach = self.connect
                time.sleep(_PAUSE_S)


@dataclass(frozen=True, slots=True)
class Retry:
    """How often, and how soon, a full outbox or a gateway that does not answer is tried again.

    Attributes:
        strategy: ``never``, ``constant``, ``exponential`` or ``capped`` (exponential up to a cap).
        interval_s: First pause, in seconds.
        multiplier: Of each pause over the one before.
        cap_s: Longest pause, in seconds.
        attempts: Repeats; 0 for one try only, below 0 for ever.
    """

    strategy: Literal["never", "constant", "exponential", "capped"] = "capped"
    interval_s: Annotated[float, Ge(0.001)] = 0.1
    multiplier: Annotated[float, Ge(1)] = 2.0
    cap_s: Annotated[float, Ge(0.001)] = 5.0
    attempts: Annotated[int, Ge(-1)] = 120

    def pauses(self) -> Iterator[float]:
        """The pause before each repeat, in seconds."""
        pause, left = self.interval_s, 0 if self.strategy == "never" else self.attempts
        while left:
            left -= 1
            yield pause
            if self.strategy != "constant":
                pause = min(pause * self.multiplier, self.cap_s if self.strategy == "capped" else 86_400.0)


def patiently(call: Callable[[], _T], *, patience_s: float = PATIENCE_S) -> _T:
    """Repeat a call while no gateway answers.

    Raises:
        GatewayUnreachable: After ``patience_s`` seconds.
    """
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return call()
        except GatewayUnreachable:
            if time.monotonic() >= deadline:
                raise
            time.sleep(_PAUSE_S)


def driver_pid() -> int:
    """The driver's JVM: the nearest ancestor named ``java``, else the parent.

    Spark starts a streaming source's process right below the JVM, others below a daemon.
    """
    pid = os.getppid()
    while pid > 1:
        if processes.name(pid) == "java":
            return pid
        pid = processes.parent(pid)
    return os.getppid()
