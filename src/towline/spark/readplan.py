"""What a reader is told, and the slices that its tasks read, in plain values that every process can unpickle quickly.

Pure: a range is always cut the same way.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, combinations, pairwise
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

from annotated_types import Ge
from pyspark.sql.datasource import InputPartition

from towline.errors import ConfigError
from towline.gateway.access import gateway_list
from towline.options import OptionText, label, size
from towline.spark.cadence import LONGEST_DELAY_MS
from towline.spark.link import GatewayPlace
from towline.spark.offsets import JournalPlace

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from towline.gateway.client import GatewayClient
    from towline.spark.offsets import Position

#: ``committed``, ``earliest``, ``latest`` or an offset.
StartingOffset = str | int

GATEWAYS_OPTION: Final = 'format("mqtt") option "gateways"'

_T = TypeVar("_T")


def _offset(text: str, wanted: str = "an offset from 0") -> int:
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise ValueError(f"must be {wanted}")
    return int(text)


def _starting(text: str) -> StartingOffset:
    word = text.lower()
    words = ("committed", "earliest", "latest")
    return word if word in words else _offset(text, "committed, earliest, latest or an offset from 0")


def _by_gateway(read_one: Callable[[str], _T]) -> Callable[[str], _T | dict[str, _T]]:
    """Reads a value, or a JSON object of one for each gateway by its name."""

    def read_all(text: str) -> _T | dict[str, _T]:
        if not text.startswith("{"):
            return read_one(text)
        try:
            return {label(name): read_one(str(value)) for name, value in json.loads(text).items()}
        except (ValueError, AttributeError) as error:
            why = "" if isinstance(error, json.JSONDecodeError) else f"; {error}"
            raise ValueError(
                f'for several gateways must be JSON such as {{"g1": "earliest", "g2": 4711}}{why}'
            ) from None

    return read_all


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
        max_rows: Most rows of a micro-batch, of all gateways together; of a query 200,000.
        max_bytes: Most bytes of a micro-batch, of all gateways together, as the rows lie in the journal, and more by
            one frame at most; both limits hold. One row is always allowed. Of a query 256 MiB.
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
    max_rows: Annotated[int, Ge(1), OptionText("maxMessagesPerTrigger")] | None = None
    max_bytes: Annotated[int, Ge(1), OptionText("maxBytesPerTrigger", size)] | None = None
    starting: (
        Annotated[StartingOffset | Mapping[str, StartingOffset], OptionText("startingOffset", _by_gateway(_starting))]
        | None
    ) = None
    ending: Annotated[int | Mapping[str, int], OptionText("endingOffset", _by_gateway(_offset))] | None = None
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
        said: StartingOffset | None = for_gateway(self.starting, name)
        start = default if said is None else said
        offset = start if isinstance(start, int) else starts[start]
        return JournalPlace(name, str(status["journal"]), offset, client.extent(offset).incarnation, at)

    def check(self, *, streaming: bool) -> None:
        """Refuse what only shows once Spark has said how it reads.

        Raises:
            ConfigError: TL-C24, or `refused`.
        """
        if self.refused:
            raise self.refused
        if self.event_time and not streaming:
            what = "a batch read has no watermark"
            raise ConfigError("TL-C24", 'format("mqtt") option "eventTime"', what, "Use received_at.")
        if streaming and self.ending is not None:
            do = "Use spark.read for a range, or trigger(availableNow=True) for all that is there."
            raise ConfigError("TL-C24", 'format("mqtt") option "endingOffset"', "a stream has no end", do)


def check_distinct(places: Iterable[JournalPlace]) -> None:
    """See that no two gateways of a list are one; raises ConfigError, TL-G50."""
    for one, other in combinations(places, 2):
        if one.gateway == other.gateway or one.journal == other.journal:
            same = f'have the same name "{one.gateway}"'
            if one.gateway != other.gateway:
                same = f"serve one journal, {one.journal}"
            what = f"{one.at} and {other.at} {same}"
            do = "Name each gateway once, and give each a name of its own: it stands in the checkpoint."
            raise ConfigError("TL-G50", GATEWAYS_OPTION, what, do)


def for_gateway(value: Any, gateway: str) -> Any:
    """What an option says for one gateway."""
    return value.get(gateway) if isinstance(value, Mapping) else value


@dataclass(frozen=True)
class Slice(InputPartition):
    """The rows ``start`` to ``end`` - 1 of one journal: all that a worker is told.

    Attributes:
        place: Where the gateway is, and what lets the worker in there (`slices_of`).
        incarnation: Which opening of the journal wrote the row below `end`; "" for unknown.
        watermark_ms: The query's watermark, in ms since 1970; None for rows without an event time.
    """

    place: GatewayPlace
    journal: str
    start: int
    end: int
    incarnation: str = ""
    watermark_ms: int | None = None


def slices_of(
    client: GatewayClient, place: GatewayPlace, start: int, end: JournalPlace, sizes: Sequence[int]
) -> list[Slice]:
    """The rows from `start` to `end` of a gateway's journal in parts of these sizes, as tasks get them. On the driver.

    Those of a gateway on a network have a ticket each. Only of the end it is known which opening of the journal wrote
    the row below.

    Raises:
        GatewayError: TL-G46, the file with the authorities of the gateway's certificate can't be read.
    """
    bounds = pairwise(accumulate(sizes, initial=start))
    ranges = [(low, high, end.incarnation if high == end.offset else "") for low, high in bounds]
    places = [place] * len(ranges)
    if place.remote:
        tickets = client.sign(end.journal, ranges, valid_s=place.ticket_s)
        places = [replace(admitted, ticket=ticket) for admitted in [place.admitted("")] for ticket in tickets]
    return [Slice(at, end.journal, *part) for at, part in zip(places, ranges, strict=True)]


def ranges_between(start: Position, end: Position) -> list[tuple[int, JournalPlace]]:
    """What a batch has of each gateway, in the order of their names: its first offset, and the place where it ends.

    A gateway that comes in with this batch has no rows in it: where it begins is only known from its end. One that
    leaves with it has none either.
    """
    known = ((start.place(place.gateway), place) for place in end.places)
    return [(here.offset, there) for here, there in known if here and here.offset < there.offset]


def divided(rows: Sequence[int], min_partitions: int | None, max_records: int | None) -> list[list[int]]:
    """How many rows each part of each range has, in order: at least 1, and all parts of a range about the same.

    Args:
        rows: Of each range, at least 1.
        min_partitions: Wanted number of all parts together, a hint: one for each range, and the others in proportion to
            their rows, rounded. None for one each.
        max_records: Most rows of a part; None for no limit.
    """
    total, others = sum(rows), max(0, (min_partitions or 0) - len(rows))

    def cut(count: int) -> list[int]:
        wanted = 1 + (2 * count * others + total) // (2 * total)  # a half is rounded up
        parts = min(count, max(wanted, -(-count // max_records) if max_records else 1))
        least, more = divmod(count, parts)
        return [least] * (parts - more) + [least + 1] * more

    return [cut(count) for count in rows]
