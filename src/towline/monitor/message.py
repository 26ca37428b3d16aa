"""Story of one message of an uplink: received, journaled, acknowledged, its batch, and its record in Kafka.

It only looks: at rows of a journal, which need no lease [I4], at the checkpoint, and at committed records, without a
consumer group. The rest is unknown [I19]. By default a record does not name its message: it is found by headers that a
route adds; or, while the journal has the row, as what the routes make of it.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from towline.bridge.config.model import CONSUMER, Bridge
from towline.bridge.deadletters import TopicReader, TopicRecord
from towline.bridge.lines.identity import Identity
from towline.bridge.lines.statuses import ask_each, endpoints_of, request_status
from towline.bridge.routes import RecordColumns, Route, RouteTable
from towline.checkpoint import Checkpoint
from towline.delivery.receipts.ledger import noted_state
from towline.errors import ConfigError, GatewayError, JournalError, KafkaError
from towline.journal.recovery import read_state
from towline.kafka.admin import KafkaAdmin
from towline.kafka.deadletters import PREFIX, ChunkAssembler
from towline.spark.offsets import positions_at

#: Most records of a topic and most rows of a journal that are searched; most messages of a device that are listed.
MAX_RECORDS, MAX_ROWS, MAX_LISTED = 100_000, 20_000, 20


@dataclass
class Story:
    """Story of one message; its fields are the JSON of ``towline message`` (docs/operate.md#where-is-one-message)."""

    line: str
    gateway: str | None = None
    offset: int | None = None
    state: str = "unknown"
    steps: list[dict[str, Any]] = field(default_factory=list)
    candidates: list[dict[str, Any]] = field(default_factory=list)

    def add(self, name: str, text: str, at: float | None = None, *, state: str = "") -> None:
        """Add a step with its time, in seconds since 1970, None if unknown; and set the state that it shows."""
        self.steps.append({"name": name, "at": at, "text": text})
        self.state = state or self.state


def header_text(record: TopicRecord, name: str) -> str:
    """Return the first value of a header; "" for none."""
    return (next((value for key, value in record.headers if key == name), None) or b"").decode("utf-8", "replace")


def rendered_rows(routes: Sequence[Route], batch: Any) -> Iterator[tuple[dict[str, Any], TopicRecord]]:
    """Yield rows, each with what routes make of it, as far as that is known without their SQL; its offset is -1."""
    records = RecordColumns().rows(RouteTable(routes).render(batch), any_topic=True).records
    for row, (topic, value, key, _, _, _, timestamp, headers) in zip(batch.to_pylist(), records, strict=True):
        yield row, TopicRecord(-1, -1, timestamp, key, value, headers or (), topic or "")


def is_expected(record: TopicRecord, expected: TopicRecord) -> bool:
    """Return whether a record has all that is known of the expected one; a header tells the time better than Kafka."""
    timestamp = None if header_text(expected, "mqtt.received-at") else expected.timestamp
    known = (expected.topic or None, expected.key, expected.value, timestamp)
    pairs = zip(known, (record.topic, record.key, record.value, record.timestamp), strict=True)
    return all(value in (None, other) for value, other in pairs) and {*expected.headers} <= {*record.headers}


class Tracer:
    """Tells the stories of the messages of one uplink; raises ConfigError as `Bridge.uplink`."""

    def __init__(self, bridge: Bridge, name: str | None = None) -> None:
        line = bridge.uplink(name)
        self._bridge, self._line, self._routes = bridge, line, line.routes
        self._client, self._checkpoint = bridge.kafka.client_settings(), Checkpoint(str(line.checkpoint))
        self._sources = ("", line.name, Identity.of_line(bridge, line).sink)
        names = {template.text: name for route in self._routes for name, template in route.headers}
        #: Headers with gateway and offset; "" where the routes add none.
        self._route_headers = names.get("{mqtt.gateway}", ""), names.get("{mqtt.offset}", "")

    def by_offset(self, offset: int, gateway: str = "", record: TopicRecord | None = None) -> Story:
        """Tell of the message with an offset at a gateway, "" for the only one; raises ConfigError, TL-C120."""
        journals = [journal for journal in self._journals if gateway in ("", journal["name"])]
        if len(journals) != 1:
            problem = f'line "{self._line.name}" has the gateways {", ".join(j["name"] for j in self._journals)}'
            raise ConfigError("TL-C120", str(self._bridge.file), problem, "Name one with --gateway, or another line.")
        (journal,) = journals
        story, end = Story(self._line.name, journal["name"], offset), journal["end"]
        if end is not None and offset >= end:
            story.add("received", f"no: the next message gets offset {end:,}", state="not_received")
            return story
        unknown = f"unknown: {journal['problem'] or 'its row is no longer in the journal'}"
        row, expected = next(self._rows(journal, offset, offset + 1), (None, None))
        text = f"topic {row['topic']}, QoS {row['qos']}, {len(row['payload'] or b''):,} bytes" if row else unknown
        story.add("received", text, row["received_at"].timestamp() if row else None)
        story.add("journaled", unknown if end is None else f"journal {journal['journal']} of gateway {journal['name']}")
        story.add("acknowledged", f"as ack_after = {self._line.gateway.effective_ack_after} allows; when is not stored")
        committed_at = self._add_batch(story, journal, offset)
        if self._line.transactional and story.state != "waiting":
            story.add("transaction", f'that of the batch, with the marker of sink "{self._sources[2]}"')
        if record is not None:
            self._add_record(story, record)
        elif story.state != "waiting":
            self._add_search(story, expected, committed_at)
        return story

    def by_record(self, topic: str, partition: int, offset: int) -> Story:
        """Tell of the message that became a record or a dead letter; raises KafkaError, TL-K01."""
        story, reader = Story(self._line.name), TopicReader(self._client, topic)
        is_there = offset < reader.end_offsets().get(partition, 0)
        record = next(reader.read_records({partition: offset + 1}, {partition: offset}), None) if is_there else None
        if record is None:
            story.add("kafka", "no committed record is there: removed, not written yet, or the end of a transaction")
        elif named := self._named(record):
            return self.by_offset(named[1], named[0], record)
        else:
            story.add("journaled", "offset unknown: no header names its message")
            self._add_record(story, record)
        return story

    def by_device(self, device: str) -> Story:
        """List the newest messages of a device, the newest last: its id is the record key, or a level of the topic."""
        story = Story(self._line.name, state="listed")
        for journal in self._journals:
            if journal["problem"]:
                story.add("journaled", f"unknown: {journal['problem']}")
            end = journal["end"] or 0
            for row, record in self._rows(journal, max(journal["committed"], end - MAX_ROWS), end):
                if record.key == device.encode() or device in row["topic"].split("/"):
                    entry = {"at": row["received_at"].timestamp(), "text": f"topic {row['topic']}, waiting"}
                    place = {"offset": row["offset"], "gateway": journal["name"], "kafka": None}
                    story.candidates.append(entry | place)
        for record in self._search(story):
            if record.key == device.encode() or device in header_text(record, "mqtt.topic").split("/"):
                story.candidates.append(self._entry(record))
        story.candidates = sorted(story.candidates, key=lambda entry: entry["at"])[-MAX_LISTED:]
        return story

    def by_receipt(self, publisher: str, number: int) -> Story:
        """Tell of a message of a publisher with receipts, by its number in the newest epoch."""
        story = Story(self._line.name)
        for journal in self._journals:
            if state := noted_state(journal["notes"], publisher, number):
                story.add("receipt", f"{state.replace('_', ' ')} at gateway {journal['name']}", state=state)
        return story

    def _add_batch(self, story: Story, journal: dict[str, Any], offset: int) -> float | None:
        """Add the steps of the batch; return when it was committed, None if unknown."""
        batch = next((batch for batch, end in journal["batches"] if end > offset), None)
        if batch is None:
            state = "unknown" if journal["end"] is None else "waiting"
            state = "committed" if offset < journal["committed"] else state
            story.add("batch", "none in the checkpoint", state=state)
            return None
        is_cut = batch == journal["batches"][0][0]
        story.add("batch", f"{batch}, or one before it" if is_cut else str(batch), state="in_batch")
        if (committed_at := self._checkpoint.committed_at(batch)) is not None:
            story.add("committed", "in Spark's commit log, at this time at the latest", committed_at, state="committed")
        return committed_at

    def _add_search(self, story: Story, expected: TopicRecord | None, at: float | None) -> None:
        """Search the record or the dead letter, and add its step, or why there is none."""
        topic, is_blind = expected.topic if expected else "", expected is None and "" in self._route_headers
        topics = {topic, self._line.dead_letter_topic or ""} if topic or is_blind else ()
        at = expected.timestamp / 1000 if expected else at
        for record in self._search(story, topics, at):
            named = self._named(record)
            if named == (story.gateway, story.offset) or (not named and expected and is_expected(record, expected)):
                self._add_record(story, record)
        if not any(step["name"] == "kafka" for step in story.steps):
            reasons = "not written yet, dropped by where or dedupe, taken by no route, or removed by Kafka"
            if is_blind:
                reasons = "no header of the routes names its offset, and its row can't be read"
            story.add("kafka", f"not found: {reasons}")

    def _add_record(self, story: Story, record: TopicRecord) -> None:
        """Add the step of a record; there are several after a repeated batch, or of equal messages."""
        entry, state = self._entry(record), "dead_letter" if header_text(record, PREFIX + "reason") else "in_kafka"
        story.candidates.append(entry)
        story.add("kafka", f"{entry['kafka']}, {entry['text']}", entry["at"], state=state)

    @cached_property
    def _journals(self) -> list[dict[str, Any]]:
        """What the directory of each gateway says, if it is on this machine, and then its status."""
        names = {str(gateway.state_dir): gateway.name for gateway in self._line.all_gateways}
        endpoints, journals = endpoints_of(self._line.gateways or names, self._bridge.gateway.access()), []
        positions = [(batch, positions_at(self._checkpoint, batch)) for batch in self._checkpoint.planned_batches()]
        for address, (location, answer) in zip(endpoints, ask_each(endpoints, request_status).items(), strict=True):
            journal: dict[str, Any] = {"name": names.get(location, location), "journal": "", "end": None, "problem": ""}
            journal |= {"address": address, "consumers": {}, "notes": {}}
            with contextlib.suppress(JournalError, OSError):
                if state := read_state(Path(location) / "inbox"):
                    journal |= {"journal": state.journal_id, "end": state.end}
                    journal |= {"consumers": state.consumers, "notes": state.notes}
            if isinstance(answer, GatewayError):
                journal["problem"] = f"its gateway does not answer ({answer.problem})"
            else:
                journal |= answer
            ends = [(batch, {p.journal: p.offset for p in at}.get(journal["journal"], 0)) for batch, at in positions]
            committed = (end for batch, end in ends if self._checkpoint.has_commit(batch))
            journal["batches"], journal["committed"] = ends, max(journal["consumers"].get(CONSUMER, 0), *committed, 0)
            journals.append(journal)
        return journals

    def _rows(self, journal: dict[str, Any], start: int, end: int) -> Iterator[tuple[dict[str, Any], TopicRecord]]:
        """Yield `rendered_rows`; none if they are removed, or the gateway does not answer."""
        if start < end and not journal["problem"]:
            with contextlib.suppress(GatewayError), journal["address"].attach() as client:
                for batch in client.read(journal["journal"], start, end):
                    yield from rendered_rows(self._routes, batch)

    def _named(self, record: TopicRecord) -> tuple[str, int] | None:
        """Return gateway and offset that headers of a record, or of a dead letter of this line, name; else None."""
        for headers in (self._route_headers, ("mqtt.gateway", "mqtt.offset")):
            gateway, offset = (header_text(record, name) for name in headers)
            is_own = gateway and header_text(record, PREFIX + "source") in self._sources
            if is_own and offset.isdecimal() and len(offset) < 20:
                return gateway, int(offset)
        return None

    def _entry(self, record: TopicRecord) -> dict[str, Any]:
        reason, detail, topic = (header_text(record, n) for n in (PREFIX + "reason", PREFIX + "detail", "mqtt.topic"))
        text = f"dead letter, {reason}: {detail}" if reason else f"topic {topic or 'unknown'}"
        gateway, offset = self._named(record) or (None, None)
        place = f"{record.topic}/{record.partition}/{record.offset}"
        return {"at": record.timestamp / 1000, "text": text, "offset": offset, "gateway": gateway, "kafka": place}

    def _search(self, story: Story, topics: Iterable[str] = (), at: float | None = None) -> Iterator[TopicRecord]:
        """Yield the records of topics, or all that the file names, nearest to a time, or the newest ones."""
        try:
            for topic in sorted(filter(None, topics or {*self._line.fixed_topics, *self._line.listed_topics})):
                reader = TopicReader(self._client, topic)
                ends = reader.end_offsets()
                centers = KafkaAdmin(self._client).offsets_at(topic, ends, at) if ends and at is not None else {}
                half = MAX_RECORDS // max(1, 2 * len(ends))
                starts = {number: max(0, centers.get(number, end) - half) for number, end in ends.items()}
                stops = {number: min(end, starts[number] + 2 * half) for number, end in ends.items()}
                if any(starts.values()) or stops != ends:
                    story.add("searched", f"at most {MAX_RECORDS:,} records of {topic}: nearest in time, or newest")
                letters = defaultdict[int, ChunkAssembler](ChunkAssembler)
                for record in reader.read_records(stops, starts):
                    letter = None
                    if topic == self._line.dead_letter_topic:
                        with contextlib.suppress(ValueError):  # another record
                            letter = letters[record.partition].add(record.key, record.value, record.headers)
                    yield record._replace(headers=(*record.headers, *letter.headers)) if letter else record
        except KafkaError as error:
            story.add("kafka", f"unknown: {error}")
