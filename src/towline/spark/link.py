"""From a Spark process to a gateway: where it is, who owns it, and patience while it is being started again."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypeVar

from towline.errors import GatewayUnreachable, TowlineError
from towline.gateway.access import DEFAULT_VALID_S, Access, is_remote
from towline.gateway.client import GatewayClient
from towline.gateway.launch import discover, ensure
from towline.processes import ProcessMark

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import pyarrow as pa

#: How long a reader waits for a gateway that does not answer, in seconds: a supervisor's restart and its recovery.
PATIENCE_S = 60.0

_PAUSE_S = 0.1
_NO_ACCESS = Access()

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class GatewayPlace:
    """Where a gateway is, in plain values: it travels to Spark's workers.

    Attributes:
        text: The state directory of the gateway, or its Flight location.
        settings: Settings of a gateway to start when none runs, as JSON; "" to start none.
        access: The files that let the driver in to a gateway on a network.
        ticket_s: Seconds that a ticket of its workers is worth something.
        ticket: Lets a worker in, in place of the token that `access` names.
        authority: With it: the authorities of the gateway's certificate as PEM text; a worker needs no file of them.
        owner: The driver's JVM, with which a gateway that is started ends; tasks elsewhere start none.
    """

    text: str
    settings: str = ""
    access: Access = _NO_ACCESS
    ticket_s: float = DEFAULT_VALID_S
    ticket: str = field(default="", repr=False)
    authority: str = ""
    owner: ProcessMark | None = None

    @property
    def remote(self) -> bool:
        """Whether the gateway is on a network: workers need tickets then."""
        return is_remote(self.text)

    def admitted(self, ticket: str) -> Self:
        """The same place as a worker comes to it: with a ticket, and without a need for files. On the driver.

        Raises:
            GatewayError: TL-G46, the file with the authorities of the gateway's certificate can't be read.
        """
        return replace(self, ticket=ticket, authority=self.access.authority())

    def attach(self) -> GatewayClient:
        """Find the running gateway.

        Raises:
            GatewayUnreachable: TL-G01 when none runs there.
        """
        if "://" in self.text:
            return GatewayClient(self.text, self.access, ticket=self.ticket, authority=self.authority)
        client = discover(Path(self.text))
        if client is None:
            do = "Start it, or give the options broker, subscribe and stateDir instead of gateway."
            if self.settings:
                do = "It is on the driver's machine: tasks elsewhere need a gateway on the network (option gateway)."
            raise GatewayUnreachable("TL-G01", self.text, "no gateway runs in this state directory", do)
        return client

    def connect(self) -> GatewayClient:
        """Find the running gateway, or start one where that is ours to do, on the machine of the driver.

        Raises:
            TowlineError: Whatever kept it from starting.
        """
        if not self.settings or self.owner is None or not self.owner.runs_here():
            return self.attach()
        from towline.gateway.settings import GatewaySettings  # noqa: PLC0415 - workers need no pydantic
        from towline.spark.options import in_options  # noqa: PLC0415 - see above

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
