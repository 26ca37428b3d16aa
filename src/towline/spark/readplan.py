"""What a reader was told, in plain values that every process can unpickle quickly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from towline.errors import ConfigError
from towline.spark.link import GatewayPlace

__all__ = ["ReadPlan", "StartingOffset"]

#: ``committed``, ``earliest``, ``latest`` or an offset.
StartingOffset = str | int


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """What a reader was told. What is told for a gateway may differ from one to the other: a map by their names then.

    Attributes:
        place: Where the one gateway is; of several only how they are reached, their access.
        consumer: Name under which rows are committed.
        serves_again: Whether a batch that was begun before is served again, or empty (`towline.guarantee.Policy`).
        max_rows: Most rows of a micro-batch.
        max_bytes: Most bytes of a micro-batch, as the rows lie in the journal, and more by one frame at most; both
            limits hold, where both are there.
        starting: Where it begins without a checkpoint, or None for the default of the kind of read.
        ending: Offset after the last row, batch reads only.
        max_delay_s: Longest rest between two batches while rows wait, in seconds (`towline.spark.cadence`).
        poll_s: Longest wait for a message in ``latestOffset``, in seconds.
        refused: Why it can't be read, told by the reader: Spark masks what is raised where a reader is made.
        checkpoint: Location of the query's checkpoint, "" when it was not told.
        event_time: Whether rows have an event time that is never late.
        gateways: State directories and locations of several gateways, each once; empty for the one of `place`.
        removed: Names of gateways that may leave the checkpoint without being asked what waits there.
        min_partitions: Wanted number of partitions of a batch, None for one a gateway.
        max_records: Most rows of a partition, None for no limit.
    """

    place: GatewayPlace
    consumer: str = "default"
    serves_again: bool = True
    max_rows: int | None = None
    max_bytes: int | None = None
    starting: StartingOffset | Mapping[str, StartingOffset] | None = None
    ending: int | Mapping[str, int] | None = None
    max_delay_s: float = 0.0
    poll_s: float = 5.0
    refused: ConfigError | None = None
    checkpoint: str = ""
    event_time: bool = False
    gateways: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    min_partitions: int | None = None
    max_records: int | None = None

    @property
    def places(self) -> tuple[GatewayPlace, ...]:
        """Where the gateways are."""
        return tuple(map(self.at, self.gateways)) if self.gateways else (self.place,)

    def at(self, text: str) -> GatewayPlace:
        """The place of a gateway that is named by its state directory or location, reached as all are."""
        named = GatewayPlace.of(text)
        return replace(self.place, state_dir=named.state_dir, location=named.location, settings="")

    def beginning(self, gateway: str, first: int, tip: int, committed: int, default: StartingOffset) -> int:
        """The offset where a read without a place in that gateway's journal begins.

        Args:
            gateway: Its name.
            first: First offset that can be read.
            tip: Offset after the last row.
            committed: The consumer's watermark.
            default: Where the option does not say it.
        """
        starts = {"committed": max(committed, first), "earliest": first, "latest": tip}
        wanted = self.told(self.starting, gateway, default)
        return wanted if isinstance(wanted, int) else starts[wanted]

    def told(
        self, value: StartingOffset | Mapping[str, StartingOffset] | None, gateway: str, default: StartingOffset
    ) -> StartingOffset:
        """What a value says for one gateway."""
        said = value.get(gateway) if isinstance(value, Mapping) else value
        return default if said is None else said

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
