"""Addresses of gateways and the options of a source, as plain values that every process unpickles quickly."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self, TypeVar

from annotated_types import Ge, Le

from towline.errors import ConfigError, GatewayUnreachable
from towline.gateway.access import DEFAULT_TICKET_S, ClientAccess, is_remote, parse_gateways
from towline.gateway.client import GatewayClient
from towline.gateway.identity import JournalPosition
from towline.gateway.launch import ensure_running, find_running
from towline.options import Option, parse_label, parse_size
from towline.processes import ProcessIdentity
from towline.spark.batching import LONGEST_DELAY_MS

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa

#: Longest wait of a reader for an unreachable gateway, in seconds: a supervisor restarts it, and it recovers.
GATEWAY_TIMEOUT_S = 60.0

_RETRY_PAUSE_S = 0.1

#: ``committed``, ``earliest``, ``latest`` or an offset.
StartOffset = str | int
_StartOffsets = StartOffset | Mapping[str, StartOffset]

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class GatewayAddress:
    """Address of a gateway and the access to it, as plain values: it is sent to Spark's workers.

    Attributes:
        location: State directory of the gateway, or its Flight location.
        settings: Settings of a gateway to start when none runs, as JSON; "" to start none.
        access: Files with the driver's credentials for a gateway on a network.
        ticket_s: Validity of the workers' tickets, in seconds.
        ticket: Ticket of a worker, in place of the token that `access` names.
        ca_pem: CA certificates for a worker with a ticket, as PEM text in place of a file.
        owner: JVM of the driver: a gateway that is started ends with it. Tasks on other machines start none.
    """

    location: str
    settings: str = ""
    access: ClientAccess = field(default_factory=ClientAccess)
    ticket_s: float = DEFAULT_TICKET_S
    ticket: str = field(default="", repr=False)
    ca_pem: str = ""
    owner: ProcessIdentity | None = None

    @property
    def remote(self) -> bool:
        """Whether the gateway is on a network: workers then need tickets."""
        return is_remote(self.location)

    def with_ticket(self, ticket: str) -> Self:
        """Return the address for a worker, with a ticket and CA certificates in place of files. On the driver.

        Raises:
            GatewayError: TL-G46, the file with the gateway's CA certificates can't be read.
        """
        return replace(self, ticket=ticket, ca_pem=self.access.ca_pem())

    def attach(self) -> GatewayClient:
        """Connect to the running gateway.

        Raises:
            GatewayUnreachable: TL-G01, no gateway runs there.
        """
        if "://" in self.location:
            return GatewayClient(self.location, self.access, ticket=self.ticket, ca_pem=self.ca_pem)
        client = find_running(Path(self.location))
        if client is None:
            remedy = "Start it there, or give the options of one to start; other machines need one on the network."
            raise GatewayUnreachable("TL-G01", self.location, "no gateway runs in this state directory", remedy)
        return client

    def connect(self) -> GatewayClient:
        """Connect to the running gateway; start it first if it has settings and this is the driver's machine.

        Raises:
            TowlineError: Why it can't start.
        """
        if not self.settings or self.owner is None or not self.owner.is_running():
            return self.attach()
        from towline.gateway.settings import GatewaySettings  # noqa: PLC0415 - workers need no pydantic

        return ensure_running(GatewaySettings.model_validate_json(self.settings), owner_pid=self.owner.pid)

    def rows(self, journal: str, start: int, end: int, incarnation: str = "") -> Iterator[pa.RecordBatch]:
        """Read a range of rows; if the gateway ends meanwhile, restart or await it and read the rest [I4].

        Raises:
            GatewayError: The journal is another one or lacks the range, or the gateway can't start.
            GatewayUnreachable: The gateway did not come back within `GATEWAY_TIMEOUT_S` seconds.
        """
        deadline, connect = time.monotonic() + GATEWAY_TIMEOUT_S, self.attach
        while start < end:
            try:
                with connect() as client:
                    for batch in client.read(journal, start, end, incarnation=incarnation):
                        start += batch.num_rows
                        yield batch
                        deadline = time.monotonic() + GATEWAY_TIMEOUT_S
            except GatewayUnreachable:
                if time.monotonic() >= deadline:
                    raise
                connect = self.connect
                time.sleep(_RETRY_PAUSE_S)


def retry_while_unreachable(call: Callable[[], _T], *, timeout_s: float = GATEWAY_TIMEOUT_S) -> _T:
    """Repeat a call while the gateway is unreachable.

    Raises:
        GatewayUnreachable: After `timeout_s` seconds.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return call()
        except GatewayUnreachable:
            if time.monotonic() >= deadline:
                raise
            time.sleep(_RETRY_PAUSE_S)


def _offset_reader(*keywords: str) -> Callable[[str], Any]:
    """Return a reader of an option: a keyword, an offset, or a JSON object of them by gateway name."""
    expected_form = f"{', '.join(keywords)} or an offset from 0" if keywords else "an offset from 0"

    def parse_offset(text: str) -> StartOffset | dict[str, Any]:
        if text.startswith("{"):
            try:
                return {parse_label(name): parse_offset(str(value)) for name, value in json.loads(text).items()}
            except (ValueError, AttributeError) as error:
                reason = "" if isinstance(error, json.JSONDecodeError) else f"; {error}"
                problem = f'for several gateways must be JSON such as {{"g1": "earliest", "g2": 4711}}{reason}'
                raise ValueError(problem) from None
        if text.lower() in keywords:
            return text.lower()
        if not re.fullmatch(r"[0-9]{1,18}", text):
            raise ValueError(f"must be {expected_form}")
        return int(text)

    return parse_offset


_read_start_offset = _offset_reader("committed", "earliest", "latest")


def _read_names(text: str) -> tuple[str, ...]:
    return tuple(parse_label(part.strip()) for part in text.split(",") if part.strip())


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """Options of a source. An option that differs between gateways is a map by their names.

    Attributes:
        address: Address of the one gateway; for several gateways only the access to them.
        consumer: Name under which rows are committed; each query on one gateway needs its own.
        replays_batches: Whether a batch that a crash interrupted is replayed with its rows, or empty
            (`towline.guarantee.Policy`).
        max_rows: Most rows of a micro-batch, of all gateways together.
        max_bytes: Most bytes of a micro-batch, of all gateways together, as stored in the journal, and one frame more
            at most; both limits hold. One row is always allowed.
        start_offset: First offset of a query without a checkpoint: ``committed`` (default of a stream), ``earliest``
            (of a batch read), ``latest``, or a number; for several gateways one word for all, or JSON: ``{"g1":
            "latest", "g2": 4711}``.
        end_offset: Offset after the last row, batch reads only; for several gateways JSON by their names.
        max_delay_ms: Longest pause between two batches while rows wait, in milliseconds, at most 30000, as Spark's idle
            Python workers end later; with more rows it is shorter (docs/options.md#when-a-batch-begins). A query with
            several sources waits for each. ``Trigger.AvailableNow`` and the first batch never wait.
        poll_ms: Longest wait of an idle query in one call, in milliseconds; lower it when a query has several sources.
        options_error: Error in the options, raised by the reader: Spark masks an exception where a reader is created.
        checkpoint: Location of the query's checkpoint, the same as the writer's: a gateway that the source starts
            compares it with its journal before it receives (docs/guarantees.md#restored-copies), committed
            rows are removed sooner, and after a power failure the query starts without repairs by hand
            (docs/journal.md).
        event_time: One more column ``event_time timestamp`` for ``withWatermark``; needs ``checkpointLocation`` on a
            file system of this machine. It is ``received_at``, but always after the query's watermark: with
            ``received_at`` a clock that was ahead for a moment makes Spark drop every row as late until it has caught
            up.
        gateways: In place of ``gateway``: state directories and locations of several running gateways, with commas or
            as a JSON list, each once and in any order (docs/scaling.md#several-gateways).
        removed_gateways: Names of gateways to remove from the checkpoint, with any rows that wait there: drained ones,
            and those that will never answer again.
    """

    address: GatewayAddress
    consumer: Annotated[str, Option(parse=parse_label)] = "default"
    replays_batches: bool = True
    #: About 40 MB of small messages, 0.3 to 0.7 s of Spark's time.
    max_rows: Annotated[int, Ge(1), Option("maxMessagesPerTrigger")] = 200_000
    #: Repeated after a crash, and buffered by the sink until it is written.
    max_bytes: Annotated[int, Ge(1), Option("maxBytesPerTrigger", parse=parse_size)] = 256 << 20
    start_offset: Annotated[_StartOffsets, Option("startingOffset", parse=_read_start_offset)] | None = None
    end_offset: Annotated[int | Mapping[str, int], Option("endingOffset", parse=_offset_reader())] | None = None
    max_delay_ms: Annotated[int, Ge(0), Le(LONGEST_DELAY_MS), Option("maxTriggerDelayMs")] = 0
    poll_ms: Annotated[int, Ge(0), Le(LONGEST_DELAY_MS)] = 5000
    options_error: ConfigError | None = None
    checkpoint: Annotated[str, Option("checkpointLocation")] = ""
    event_time: bool = False
    gateways: Annotated[tuple[str, ...], Option(parse=parse_gateways, secret=True)] = ()
    removed_gateways: Annotated[tuple[str, ...], Option("removedGateways", parse=_read_names)] = ()

    @property
    def addresses(self) -> tuple[GatewayAddress, ...]:
        """Addresses of the gateways."""
        several_addresses = (replace(self.address, location=location, settings="") for location in self.gateways)
        return tuple(several_addresses) or (self.address,)

    def start_position(self, client: GatewayClient, status: Mapping[str, Any], default: str) -> JournalPosition:
        """Return the first position of a query without a position in a gateway's journal, from its `status`.

        `default` applies where ``startingOffset`` does not name that gateway.
        """
        name, first_offset = str(status["name"]), int(status["first"])
        committed_offset = max(first_offset, int(status["consumers"].get(self.consumer, first_offset)))
        offsets = {"committed": committed_offset, "earliest": first_offset, "latest": int(status["end"])}
        option_value = self.start_offset.get(name) if isinstance(self.start_offset, Mapping) else self.start_offset
        start = default if option_value is None else option_value
        offset = start if isinstance(start, int) else offsets[start]
        return JournalPosition(name, str(status["journal"]), offset, client.extent(offset).incarnation)
