"""[I11] The account of a downlink holds wherever a batch is killed, or names who disagrees; the order of its rows."""

from __future__ import annotations

import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.pandas.types import from_arrow_schema

from tests.unit.bridge.noted import committed, down
from tests.unit.bridge.test_messages import RECORD
from towline.bridge.downlink.sink import DownlinkResult, DownlinkWriter, LetterSink, split_by_outcome
from towline.bridge.lines.account import LineNotes, downlink_account
from towline.bridge.messages import DEAD_LETTER_SCHEMA, POSITION_COLUMNS, RENDERED_SCHEMA, internal
from towline.bridge.routes import OUTCOME, RowOutcome
from towline.bridge.runtime import status
from towline.gateway.identity import JournalPosition
from towline.kafka.delivery import DeliveryResult, Spool
from towline.spark import kafka_sink
from towline.spark.kafka_sink import KafkaTaskResult
from towline.spark.sink import MqttTaskResult

OUTBOX = {"accepted": 90, "delivered": 70, "acknowledged": 70, "expired": 2, "refused": 3}
REST = "expired 2 + refused 3 + waiting 15   adds up ✓"


@pytest.mark.parametrize(
    ("notes", "status", "said"),
    [
        (down(100, filtered=9, unfit=1), {}, f"taken 100 = delivered 70 + dead-lettered 1 + filtered 9 + {REST}"),
        (down(93, filtered=1, undecided=2), {}, f"filtered 1 + where is null 2 + {REST}"),
        (down(70), {}, f"taken 90 (20 of them uncounted) = delivered 70 + {REST}"),
        (LineNotes(), {}, f"taken 90 (90 of them uncounted) = delivered 70 + {REST}"),
        (down(91), {}, "✗ (the writer brought 91 messages · the outbox knows 90"),
        (down(91), {"away_since": 0.0}, "adds up ✓"),  # its last update is older than the last batch
        (down(90, {"taken": 92, "records": 90}), {}, "Spark took 92 records · the writer was given 90 of them"),
        (down(90, sent=88), {}, "the writer says 90 messages went to the outbox · the outbox says it has 88"),
        (down(92, unfit=2, dead_lettered=1, given=1), {}, "the writer says 2 dead letters · the sink says 1"),
        (
            down(92, unfit=2, dead_lettered=1, acknowledged=4),
            {},
            "the sink was given 2 rows · it says 4 acknowledged by Kafka + 1 dead letters",
        ),
        (
            down(92, unfit=2, drift=7, drift_dead=7),
            {},
            "Kafka's markers say 9 rows, 9 of them dead letters · the sink says 0 acknowledged by Kafka + 2",
        ),
        (down(92, unfit=2, given=3), {}, "the sink was given 3 rows · it says 0 acknowledged by Kafka + 2 dead"),
        (down(92, unfit=2, drift=7), {}, "Kafka's markers say 9 rows, 2 of them dead letters · the sink says 0"),
        (
            down(90),
            {"outbox": {**OUTBOX, "acknowledged": 69}},
            "✗ (the outbox says 70 delivered · the broker has acknowledged 69)",
        ),
    ],
)
def test_the_account_adds_up_or_names_who_disagrees(notes: LineNotes, status: dict[str, Any], said: str) -> None:
    account = downlink_account(notes, {"outbox": OUTBOX, **status})
    assert said in account.sentence()
    assert account.adds_up is ("✓" in said)


@pytest.mark.parametrize(
    ("guarantee", "end"), [("exactly_once", "adds up ✓, but is not exactly once ✗"), ("at_least_once", "adds up ✓")]
)
def test_qos_2_that_a_broker_took_as_qos_1_is_in_the_account(guarantee: str, end: str) -> None:
    outbox = OUTBOX | dict.fromkeys(("accepted", "delivered", "acknowledged", "degraded"), 75)
    account = downlink_account(LineNotes(), {"outbox": outbox | {"expired": 0, "refused": 0}, "guarantee": guarantee})
    text = "taken 75 (75 of them uncounted) = delivered 75 (75 of them at QoS 1, not 2) + waiting 0"
    assert account.sentence() == f"{text}   {end}"
    shown: dict[str, Any] = {"lines": {"l": {"account": account.as_json(), "query": "running"}}}
    assert status.exit_code(shown) == (1 if guarantee == "exactly_once" else 0)


#: Where a batch may be killed.
STEPS = ("planned", "in the outbox", "noted", "committed")


@pytest.fixture(autouse=True)
def no_kafka(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kafka_sink, "require_configured_topics", lambda _: None)


@dataclass
class ModelDownlink:
    """A line whose Spark, Kafka and gateway are not there, and whose writers, notes and account are."""

    directory: Path
    letters: bool = True
    batches: list[tuple[int, int, int]] = field(default_factory=list)
    accepted: int = 0
    brought: int = -1
    committed: int = -1

    @property
    def writer(self) -> DownlinkWriter:
        options = {"kafka.bootstrap.servers": "k:1", "deadLetterTopic": "dead", "guarantee": "at_least_once"}
        kafka = LetterSink(options).streamWriter(from_arrow_schema(DEAD_LETTER_SCHEMA), overwrite=False)
        kafka._checkpoint_location = str(self.directory)
        mqtt: Any = SimpleNamespace(commit=lambda *_: None)
        return DownlinkWriter("", mqtt, kafka if self.letters else None, str(self.directory))

    def run(self, rows: tuple[int, int, int], kill_after: str = "") -> None:
        """A batch of records to be delivered, to be filtered, and dead letters; what was begun before comes first."""
        batch = self.committed + 1
        if batch == len(self.batches):
            self.batches.append(rows)
        sent, filtered, dead = self.batches[batch]
        for step in STEPS:
            if step == "in the outbox" and self.brought < batch:
                self.accepted, self.brought = self.accepted + sent, batch
            elif step == "noted":
                counts = Counter(records=sent + filtered + dead, filtered=filtered, unfit=dead, sent=sent)
                letters = KafkaTaskResult(0, batch, "q", DeliveryResult(0, 0, dead_lettered=dead), dead)
                answer = DownlinkResult(
                    MqttTaskResult(0, batch, sent, already_stored=False, outbox_offset=JournalPosition("", "j", sent)),
                    letters,
                    counts,
                )
                self.writer.commit([answer], batch)
            elif step == "committed":
                committed(self.directory, batch)
                self.committed = batch
            if step == kill_after:
                return

    def sentence(self, **outbox: int) -> str:
        counts = {"accepted": self.accepted, "delivered": self.accepted, "expired": 0, "refused": 0}
        gateway = {"outbox": {**counts, "acknowledged": self.accepted, **outbox}}
        return downlink_account(LineNotes.read(self.directory), gateway).sentence()


ROWS = st.tuples(st.integers(0, 4), st.integers(0, 2), st.integers(0, 2))


@given(st.booleans(), st.lists(st.tuples(ROWS, st.sampled_from(["", *STEPS])), max_size=12))
def test_the_account_adds_up_after_a_kill_at_any_step(
    letters: bool, runs: list[tuple[tuple[int, int, int], str]]
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        line = ModelDownlink(Path(directory), letters)
        for rows, kill_after in runs:
            line.run(rows if letters else (*rows[:2], 0), kill_after)
            assert "adds up ✓" in line.sentence()
        while line.committed < len(line.batches) - 1:
            line.run((0, 0, 0))
        sent, filtered, dead = (sum(column) for column in zip((0, 0, 0), *line.batches, strict=True))
        parts = {"dead-lettered": dead, "filtered": filtered}
        more = "".join(f" + {name} {count}" for name, count in parts.items() if count)
        expected = f"taken {sent + filtered + dead} = delivered {sent}{more} + waiting 0   adds up ✓"
        assert line.sentence() == expected


def rendered(rows: list[dict[str, Any]]) -> pa.RecordBatch:
    """Rendered records; one without an MQTT topic is refused."""
    columns = [{**row, OUTCOME: int(RowOutcome.TOPIC_ABSENT) * (row[internal("topic")] is None)} for row in rows]
    schema = pa.schema([*(RECORD.field(name) for name in POSITION_COLUMNS), *RENDERED_SCHEMA])
    return pa.RecordBatch.from_pylist(columns, schema=schema)


@given(st.permutations(range(12)), st.integers(1, 5), st.sets(st.integers(0, 11)), st.integers(0, 3000))
def test_rows_of_any_size_come_in_the_order_of_kafka_and_in_bounded_batches(
    order: list[int], group: int, dead: set[int], memory: int
) -> None:
    places = [("st"[n // 6], (5, 6, 0, 1)[n // 3], (30, 8, 20, 0)[n // 3] + n % 3) for n in range(12)]
    positions = [dict(zip(POSITION_COLUMNS, places[n], strict=True)) for n in order]
    fields = [
        {internal("payload"): b"%d" % n + bytes(100 * n), internal("topic"): None if n in dead else "t"} for n in order
    ]
    records = rendered([{**position, **row} for position, row in zip(positions, fields, strict=True)])
    with Spool(memory) as spool:
        spool.fill(records.slice(at, group) for at in range(0, 12, group))
        messages, refused = (list(part) for part in split_by_outcome(list(spool), max_bytes=2000))
        assert all(batch.num_rows == 1 or batch.nbytes <= 2000 for batch in messages)
        sent = [payload.rstrip(b"\0") for batch in messages for payload in batch.column("payload").to_pylist()]
        assert sent == [b"%d" % n for n in range(12) if n not in dead]
        rows = [tuple(row.values()) for batch in refused for row in batch.select(POSITION_COLUMNS).to_pylist()]
        assert rows == [places[n] for n in sorted(dead)]
    assert [list(part) for part in split_by_outcome([])] == [[], []]
