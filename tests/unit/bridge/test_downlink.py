"""A downlink without brokers: its account, the order of its rows, and its dead letters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.bridge import test_downlink_file as down_file
from tests.unit.bridge.noted import down
from tests.unit.bridge.test_messages import RECORD
from towline.bridge.deadletters import LetterMapper
from towline.bridge.downlink.sink import split_by_outcome
from towline.bridge.lines.account import LineNotes, downlink_account
from towline.bridge.messages import POSITION_COLUMNS, RENDERED_SCHEMA, internal
from towline.bridge.routes import OUTCOME, RowOutcome
from towline.bridge.runtime import status
from towline.kafka.deadletters import DeadLetter, Reason
from towline.kafka.delivery import Spool

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


@pytest.mark.parametrize("header", ["h", "mqtt.topic"])
def test_a_letter_is_replayed_to_its_source_partition(tmp_path: Path, header: str) -> None:
    """Also one whose record had come from MQTT: no route of an uplink is asked."""
    letter = DeadLetter(Reason.TOPIC_ABSENT, "commands", b"k", b"v", ((header, b"1"),), 3, 17, "why", "commands")
    mapper = LetterMapper(down_file.the_line(down_file.GOOD, tmp_path), lambda: pytest.fail("there is no SQL"))
    (outcome,) = mapper.remap([letter])
    assert outcome == ("commands", b"v", b"k", 3, None, None, 17, [(header, b"1")])
