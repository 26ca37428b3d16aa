"""The sink of a bridge's uplink: ``format("kafka_transactional")`` for messages, which it makes records of.

It takes what the two sources of `towline.bridge.uplink.source` give, each in a format of the bridge's own: a place that
data names is fetched from here and by no sink that users have [I13].
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, TypeAlias

import pyarrow as pa

from towline.bridge.routes import Rendered, RouteOutcome, route_table
from towline.bridge.uplink.records import RecordColumns
from towline.bridge.uplink.source import SLICE, RoutedSource, SliceSource, parted, slice_of
from towline.bridge.uplink.statements import of_schema
from towline.checkpoint import Checkpoint
from towline.errors import KafkaError, one_line
from towline.kafka.options import FORMAT
from towline.sinks import lower_case
from towline.spark.kafka_sink import KafkaTransactional, KafkaWritten, StreamWriter
from towline.spark.offsets import places_at
from towline.spark.tally import BatchMessages, BatchResult
from towline.spark.tasks import settle
from towline.text import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from pyarrow import RecordBatch
    from pyspark.sql.types import StructType

    from towline.kafka.columns import Columns
    from towline.kafka.delivery import Delivery
    from towline.spark.tally import SinkNote

__all__ = ["FORMATS", "RECORDS", "LineWriter", "LineWritten", "Mapping", "RecordSink"]

#: Name of the format.
RECORDS: Final = "towline_records"
_ROUTES, _LETTERS, _DEDUPES, _EMPTY = "routes", "letters", "dedupes", "empty"
#: Messages, the number of the writer that reads them, and how many writers there are.
Part: TypeAlias = "tuple[RecordBatch, int, int]"
#: Bytes of rows that are made records of at once; of large messages they are fewer.
_ENOUGH: Final = 1 << 20
#: Outcomes that are counted apart, and their names in the account.
_COUNTED: Final = {
    RouteOutcome.FILTERED: "filtered",
    RouteOutcome.UNDECIDED: "undecided",
    RouteOutcome.FALLBACK: "fallback",
}
#: Of those that a writer counts, and ``unrouted``: what did not come to the sink.
_LEFT_OUT: Final = ("filtered", "undecided", "unrouted")
#: What a fallback topic would have taken.
_NAMES: Final = frozenset(one for one in RouteOutcome if one.reason and one.reason.startswith("topic_"))


class RecordSink(KafkaTransactional):
    """Makes records of messages, and writes them as ``kafka_transactional`` does.

    Its own options are ``routes``, of `towline.bridge.routes.to_json`; ``letters``: the dead-letter topic under any
    guarantee, "" for none; ``dedupes``: whether Spark drops repeats; ``empty``: the batch that was begun before and is
    served empty, "" for none.
    """

    def __init__(self, options: dict[str, str]) -> None:
        own, rest = parted(options, _ROUTES, _LETTERS, _DEDUPES, _EMPTY)
        super().__init__(rest)
        self._routes, self._dedupes = own[_ROUTES], own[_DEDUPES] == "true"
        self._empty = int(own[_EMPTY]) if own[_EMPTY] else None
        self._settings = replace(self._settings, dead_letter_topic=own[_LETTERS] or None)

    @classmethod
    def name(cls) -> str:
        """The name of the format."""
        return RECORDS

    def _columns(self, schema: StructType) -> Columns:  # noqa: ARG002 - the rows are the bridge's own
        return RecordColumns()

    def _stream_writer(self, delivery: Delivery, location: str) -> StreamWriter:
        return LineWriter(delivery, location, self._routes, dedupes=self._dedupes, empty=self._empty)


#: The bridge's own formats, for its session.
FORMATS: Final = (SliceSource, RoutedSource, RecordSink)


@dataclass
class LineWritten(KafkaWritten):
    """What a writer of a line has in Kafka.

    Attributes:
        seen: How many messages it has read.
        own: How many of those are its own.
    """

    seen: int = 0
    own: int = 0


class LineWriter(StreamWriter):
    """Writes the micro-batches of a line.

    Args:
        delivery: The strategy.
        location: The checkpoint.
        routes: Of `towline.bridge.routes.to_json`.
        dedupes: Whether Spark drops repeats.
        empty: The batch that is served empty; None for none.
    """

    def __init__(
        self, delivery: Delivery, location: str, routes: str, *, dedupes: bool = False, empty: int | None = None
    ) -> None:
        super().__init__(delivery, location)
        self._routes, self._dedupes, self._empty = routes, dedupes, empty

    @one_line
    def write(self, iterator: Iterator[RecordBatch]) -> LineWritten:
        """Write a partition of a micro-batch.

        Raises:
            KafkaError: As `StreamWriter.write`; TL-B02, TL-B29, TL-B33 for a message that has nowhere to go.
        """
        settle()
        mapping = Mapping(self._routes, letters=self._delivery.settings.dead_letter_topic is not None)
        done = self._written(mapping.records(_parts(iterator)))
        left_out = dict(mapping.left_out)
        return LineWritten(done.partition, done.batch, done.query, done.done, done.given, left_out, *mapping.rows)

    def _result(self, written: Sequence[KafkaWritten], batch: int, note: SinkNote) -> BatchResult:
        """What became of the batch's messages, as the offset log numbers them.

        Counted are, beside what the sink was given and what a writer left out: ``messages``; of those ``unwitnessed``,
        between the batches before and this one; and of those that did not come to the sink ``skipped``, given up by
        at_most_once, ``dropped`` by Spark, ``left_out`` for a reason that nobody knows, as Kafka had the batch already,
        ``astray`` for no reason that there is.
        """
        _check_slices(written, batch)
        result, logs = super()._result(written, batch, note), Checkpoint(self._location)
        messages = BatchMessages.of(note.before(batch), places_at(logs, batch - 1), places_at(logs, batch))
        if messages.own is None:  # they are before what is counted
            return replace(result, counts=Counter(), spans=messages.spans)
        counts = result.counts
        missing = messages.own - counts["given"] - sum(counts[name] for name in _LEFT_OUT)
        certain = all(answer.marked in (None, answer.given) for answer in written)
        why = "skipped" if batch == self._empty else "dropped" if self._dedupes else "astray"
        why = "astray" if missing < 0 else why if certain else "left_out"
        counts.update({"messages": messages.own + messages.gap, "unwitnessed": messages.gap})
        counts[why] += missing
        return replace(result, spans=messages.spans)


def _check_slices(written: Sequence[KafkaWritten], batch: int) -> None:
    """See that the writers have read the same slices, and that each message is one's own."""
    each = [answer for answer in written if isinstance(answer, LineWritten)]
    seen, rows = {answer.seen for answer in each}, sum(answer.own for answer in each)
    if any(answer.seen != answer.own for answer in each) and seen != {rows}:
        counts = " and ".join(f"{count:,}" for count in sorted(seen))
        what = f"the writers of batch {batch} have read {counts} messages, and {rows:,} are theirs together"
        raise KafkaError("TL-K26", FORMAT, what, "The batch is not committed. Report it, with the bridge's file.")


class Mapping:
    """From messages to records, and what is left out on the way.

    Args:
        routes: Of `towline.bridge.routes.to_json`.
        letters: Whether what can't be a record goes to a dead-letter topic; else the first one ends the batch, but for
            messages that no route takes, which are left out.
    """

    def __init__(self, routes: str, *, letters: bool) -> None:
        self._table = route_table(routes)
        self._letters = letters
        #: How many messages had an outcome that is counted apart.
        self.left_out: Counter[str] = Counter()
        self._seen = self._own = 0

    @property
    def rows(self) -> tuple[int, int]:
        """How many messages were read, and how many of those were this writer's."""
        return self._seen, self._own

    def records(self, parts: Iterable[Part]) -> Iterator[RecordBatch]:
        """Records and refused messages, in batches of `towline.bridge.routes.RECORD_SCHEMA`.

        Raises:
            KafkaError: TL-B02, TL-B29, TL-B33.
        """
        for rows, writer, writers in parts:
            rendered = self._table.render(rows)
            self._seen += rows.num_rows
            if writers > 1:
                rendered = rendered.of_writer(writer, writers)
            self._own += len(rendered.outcomes)
            counts = rendered.tally()
            self.left_out += Counter({name: counts[one] for one, name in _COUNTED.items()})
            if not self._letters:
                self.left_out += Counter(unrouted=counts.pop(RouteOutcome.UNROUTED, 0))
                if any(one.reason for one in counts):
                    raise _nowhere(rendered)
            yield from rendered.parts(unrouted=self._letters)


def _nowhere(rendered: Rendered) -> KafkaError:
    """The end of a line that has nowhere to put a refused message."""
    codes = [RouteOutcome(code) for code in rendered.outcomes.to_pylist()]
    at = next(n for n, code in enumerate(codes) if code.reason and code is not RouteOutcome.UNROUTED)
    outcome, detail = codes[at], codes[at].detail or f"reject: {rendered.refusals[at].as_py()}"
    code, do = "TL-B02", "Give the line a dead_letter_topic"
    if outcome in (RouteOutcome.NOT_WHOLE, RouteOutcome.TOO_MANY):
        code, detail = "TL-B29", "a message was not taken in whole, see towline-reason and max_packet_bytes"
    elif outcome is RouteOutcome.REJECTED:
        code = "TL-B33"
    elif outcome in _NAMES:
        do += ", or the route a fallback_topic"
    topic = printable(rendered.records.column("towline_topic")[at].as_py() or "")
    stop = "The line stops there rather than lose it"
    return KafkaError(code, f'message of topic "{topic}"', f"{printable(detail)}. {stop}", f"{do}.")


def _parts(batches: Iterable[RecordBatch]) -> Iterator[Part]:
    """Messages with what Spark says of them, of slices or of rows."""
    for batch in map(lower_case, batches):
        if batch.schema.names != [SLICE]:
            yield of_schema(batch), 0, 1
            continue
        for rows, writer, writers in map(slice_of, batch.column(SLICE).to_pylist()):
            yield from ((one, writer, writers) for one in _larger(rows))


def _larger(batches: Iterable[RecordBatch]) -> Iterator[RecordBatch]:
    """The same rows in larger batches: a frame of a trickle has few, and each batch costs."""
    waiting: list[RecordBatch] = []
    size = 0
    for batch in batches:
        waiting.append(batch)
        size += batch.nbytes
        if size >= _ENOUGH:
            yield _joined(waiting)
            waiting, size = [], 0
    if waiting:
        yield _joined(waiting)


def _joined(batches: list[RecordBatch]) -> RecordBatch:
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)
