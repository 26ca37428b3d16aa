"""Where gateways are and what a source reads of them, in plain values that every process can unpickle quickly."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self, TypeVar

from annotated_types import Ge

from towline.errors import ConfigError, GatewayUnreachable, TowlineError
from towline.gateway.access import DEFAULT_VALID_S, Access, gateway_list, is_remote
from towline.gateway.client import GatewayClient
from towline.gateway.launch import discover, ensure
from towline.options import OptionText, label, size
from towline.processes import ProcessMark
from towline.spark.cadence import LONGEST_DELAY_MS
from towline.spark.offsets import JournalPlace

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa

#: How long a reader waits for a gateway that does not answer, in seconds: a supervisor's restart and its recovery.
PATIENCE_S = 60.0

_PAUSE_S = 0.1

#: ``committed``, ``earliest``, ``latest`` or an offset.
Start = str | int

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
    access: Access = field(default_factory=Access)
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


def _offset(*words: str) -> Callable[[str], Any]:
    """Reads one of these words or an offset, or a JSON object of one for each gateway by its name."""
    wanted = f"{', '.join(words)} or an offset from 0" if words else "an offset from 0"

    def read(text: str) -> Start | dict[str, Any]:
        if text.startswith("{"):
            try:
                return {label(name): read(str(value)) for name, value in json.loads(text).items()}
            except (ValueError, AttributeError) as error:
                why = "" if isinstance(error, json.JSONDecodeError) else f"; {error}"
                what = f'for several gateways must be JSON such as {{"g1": "earliest", "g2": 4711}}{why}'
                raise ValueError(what) from None
        if text.lower() in words:
            return text.lower()
        if not re.fullmatch(r"[0-9]{1,18}", text):
            raise ValueError(f"must be {wanted}")
        return int(text)

    return read


_start = _offset("committed", "earliest", "latest")


def _names(text: str) -> tuple[str, ...]:
    return tuple(label(part.strip()) for part in text.split(",") if part.strip())


def _seconds(text: str) -> float:
    """Seconds of so many milliseconds."""
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise ValueError("must be a whole number of milliseconds")
    if int(text) > LONGEST_DELAY_MS:
        raise ValueError(f"must be at most {LONGEST_DELAY_MS}, or Spark's idle Python workers end meanwhile")
    return int(text) / 1000


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """What a reader was told. What is told for a gateway may differ from one to the other: a map by their names then.

    Attributes:
        place: Where the one gateway is; of several only how they are reached, their access.
        consumer: Name under which rows are committed; each query on one gateway needs its own.
        serves_again: Whether a batch that was begun before is served again, or empty (`towline.guarantee.Policy`).
        max_rows: Most rows of a micro-batch, of all gateways together.
        max_bytes: Most bytes of a micro-batch, of all gateways together, as the rows lie in the journal, and more by
            one frame at most; both limits hold. One row is always allowed.
        starting: Where it begins without a checkpoint: ``committed`` (default of a stream), ``earliest`` (of a batch
            read), ``latest``, an offset; of several gateways one word for all, or JSON: ``{"g1": "latest", "g2":
            4711}``.
        ending: Offset after the last row, batch reads only; of several gateways JSON by their names.
        max_delay_s: Longest rest between two batches while rows wait: milliseconds in the option, at most 30000,
            seconds here; the more wait, the shorter it is (docs/options.md#when-a-batch-begins). A query with several
            sources waits for each. ``Trigger.AvailableNow`` and the first batch never wait.
        poll_s: How long an idle query waits in one call: milliseconds in the option; lower it when a query has several
            sources.
        refused: Why it can't be read, told by the reader: Spark masks what is raised where a reader is made.
        checkpoint: Location of the query's checkpoint, the same as the writer's: a gateway that the source starts
            compares it with its journal before it takes anything in (docs/guarantees.md#restored-copies), committed
            rows are removed sooner, and after a power failure the query starts by itself (docs/power-loss.md).
        event_time: One more column ``event_time timestamp`` for ``withWatermark``; needs ``checkpointLocation`` on a
            file system of this machine. It is ``received_at``, but always after the query's watermark: with
            ``received_at`` a clock that was ahead for a moment makes Spark drop every row as late until it has caught
            up.
        gateways: In place of ``gateway``: state directories and locations of several that run already, with commas or
            as a JSON list, each once and in any order (docs/several-gateways.md).
        removed: Names of gateways that leave the checkpoint unasked, with what may wait there; for one that will never
            answer again.
        min_partitions: Wanted number of partitions of a batch, as in Spark's Kafka source: a hint, long ranges are cut
            in proportion (docs/several-gateways.md#order). Default one a gateway.
        max_records: Most rows of a partition, as in Spark's Kafka source; default no limit.
    """

    place: GatewayPlace
    consumer: Annotated[str, OptionText(read=label)] = "default"
    serves_again: bool = True
    #: About 40 MB of small messages, 0.3 to 0.7 s of Spark's time.
    max_rows: Annotated[int, Ge(1), OptionText("maxMessagesPerTrigger")] = 200_000
    #: What a crash repeats, and what the sink keeps until it is written.
    max_bytes: Annotated[int, Ge(1), OptionText("maxBytesPerTrigger", size)] = 256 << 20
    starting: Annotated[Start | Mapping[str, Start], OptionText("startingOffset", _start)] | None = None
    ending: Annotated[int | Mapping[str, int], OptionText("endingOffset", _offset())] | None = None
    max_delay_s: Annotated[float, OptionText("maxTriggerDelayMs", _seconds)] = 0.0
    poll_s: Annotated[float, OptionText("pollMs", _seconds)] = 5.0
    refused: ConfigError | None = None
    checkpoint: Annotated[str, OptionText("checkpointLocation")] = ""
    event_time: bool = False
    gateways: Annotated[tuple[str, ...], OptionText(read=gateway_list, hidden=True)] = ()
    removed: Annotated[tuple[str, ...], OptionText("removedGateways", _names)] = ()
    min_partitions: Annotated[int, Ge(1)] | None = None
    max_records: Annotated[int, Ge(1), OptionText("maxRecordsPerPartition")] | None = None

    @property
    def places(self) -> tuple[GatewayPlace, ...]:
        """Where the gateways are."""
        return tuple(map(self.at, self.gateways)) if self.gateways else (self.place,)

    def at(self, text: str) -> GatewayPlace:
        """The place of a gateway that is named by its state directory or location, reached as all are."""
        return replace(self.place, text=text, settings="")

    def entry(self, client: GatewayClient, status: Mapping[str, Any], at: str, default: str) -> JournalPlace:
        """Where a read begins that has no place in the journal of a gateway, which has said its `status`.

        `default` counts where ``startingOffset`` says nothing of that gateway.
        """
        name, first = str(status["name"]), int(status["first"])
        committed = max(first, int(status["consumers"].get(self.consumer, first)))
        starts = {"committed": committed, "earliest": first, "latest": int(status["end"])}
        given = self.starting.get(name) if isinstance(self.starting, Mapping) else self.starting
        start = default if given is None else given
        offset = start if isinstance(start, int) else starts[start]
        return JournalPlace(name, str(status["journal"]), offset, client.extent(offset).incarnation, at)
