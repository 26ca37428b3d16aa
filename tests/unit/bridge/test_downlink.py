"""A downlink without brokers: its account, the order of its rows, its line on the screen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.bridge import test_downlink_file as down_file
from tests.unit.bridge.noted import commit, down
from tests.unit.bridge.test_messages import RECORD
from towline.bridge.deadletters import LetterMapper
from towline.bridge.downlink.sink import split_by_outcome
from towline.bridge.lines.account import LineNotes, downlink_account
from towline.bridge.messages import POSITION_COLUMNS, RENDERED_SCHEMA, internal
from towline.bridge.routes import OUTCOME, RowOutcome
from towline.bridge.runtime import status
from towline.bridge.runtime.screen import line_summary
from towline.bridge.runtime.state import BridgeState
from towline.kafka.deadletters import DeadLetter, Reason
from towline.kafka.delivery import Spool

OUTBOX = {"accepted": 90, "delivered": 70, "acknowledged": 70, "expired": 2, "refused": 3}


def test_the_account_adds_up() -> None:
    account = downlink_account(down(100, filtered=9, unfit=1), {"outbox": OUTBOX})
    assert account.adds_up
    assert (account.received, account.counts["waiting"], account.uncounted) == (100, 15, 0)
    assert account.received == account.delivered + sum(account.parts.values()) + account.counts["waiting"]
    assert account.sentence() == (
        "taken 100 = delivered 70 + dead-lettered 1 + filtered 9 + expired 2 + refused 3 + waiting 15   adds up ✓"
    )


def test_a_where_that_is_null_is_counted_apart() -> None:
    account = downlink_account(down(93, filtered=1, undecided=2), {"outbox": OUTBOX})
    assert "filtered 1 + where is null 2 + expired 2 + refused 3 + waiting 15   adds up ✓" in account.sentence()


def test_messages_of_an_uncommitted_batch_are_uncounted() -> None:
    account = downlink_account(down(70), {"outbox": OUTBOX})
    assert account.sentence().startswith("taken 90 (20 of them uncounted) = delivered 70")
    assert downlink_account(LineNotes(), {"outbox": OUTBOX}).uncounted == 90


def test_an_outbox_with_fewer_messages_does_not_add_up() -> None:
    account = downlink_account(down(91), {"outbox": OUTBOX})
    assert "the writer brought 91 messages · the outbox knows 90" in account.sentence()
    away = downlink_account(down(91), {"outbox": OUTBOX, "away_since": 0.0})
    assert away.adds_up, "its last update is older than the last batch"


def test_records_removed_by_a_transform_count_as_filtered() -> None:
    account = downlink_account(down(91, {"taken": 100, "removed": 9}, filtered=1), {"outbox": OUTBOX})
    assert "taken 100 = delivered 70 + filtered 10 + " in account.sentence()
    assert account.adds_up


@pytest.mark.parametrize(
    ("notes", "expected"),
    [
        (down(90, {"taken": 92, "unlike": 2}), "Spark took 92 records · the writer was given 90 of them"),
        (down(90, {"taken": 90, "beyond": 3}), "Kafka's offsets have room for 87 records · Spark took 90"),
        (down(90, sent=88), "the writer says 90 messages went to the outbox · the outbox says it has 88"),
        (down(92, unfit=2, dead_lettered=1, given=1), "the writer says 2 dead letters · the sink says 1"),
        (
            down(92, unfit=2, dead_lettered=1, acknowledged=4),
            "the writer brought 2 dead letters and notices · the sink says 4 acknowledged by Kafka + 1 dead letters",
        ),
        (
            down(92, unfit=2, drift=7, drift_dead=7),
            "Kafka's markers say 9 rows, 9 of them dead letters · the sink says 0 acknowledged by Kafka + 2",
        ),
    ],
)
def test_sources_that_disagree_are_in_the_account(notes: LineNotes, expected: str) -> None:
    assert expected in downlink_account(notes, {"outbox": OUTBOX}).disagreement_text


def test_a_missing_acknowledgement_is_in_the_account() -> None:
    text = downlink_account(down(90), {"outbox": {**OUTBOX, "acknowledged": 69}}).sentence()
    assert "✗ (the outbox says 70 delivered · the broker has acknowledged 69)" in text


def test_messages_and_refused_records_come_in_the_order_of_kafka() -> None:
    positions = [("t", 1, 3, "d"), ("t", 0, 9, None), ("s", 7, 8, "a"), ("t", 0, 10, "c")]
    rows = rendered([dict(zip((*POSITION_COLUMNS, internal("topic")), row, strict=True)) for row in positions])
    messages, refused = split_by_outcome([rows.slice(0, 2), rows.slice(2)])
    assert [row["topic"] for part in messages for row in part.to_pylist()] == ["a", "c", "d"]
    assert [row["offset"] for part in refused for row in part.to_pylist()] == [9]
    assert [list(part) for part in split_by_outcome([])] == [[], []]


def rendered(rows: list[dict[str, Any]]) -> pa.RecordBatch:
    """Rendered records; one without an MQTT topic is refused."""
    columns = [{**row, OUTCOME: int(RowOutcome.TOPIC_ABSENT) * (row[internal("topic")] is None)} for row in rows]
    return pa.RecordBatch.from_pylist(columns, schema=_RENDERED)


@settings(deadline=None)  # files
@given(st.permutations(range(12)), st.integers(1, 5), st.sets(st.integers(0, 11)), st.integers(0, 3000))
def test_rows_of_any_size_come_in_order_and_in_bounded_batches(
    order: list[int], group: int, dead: set[int], memory: int
) -> None:
    positions = [{"topic": "t", "partition": n // 6, "offset": n % 6} for n in order]
    fields = [
        {internal("payload"): b"%d" % n + bytes(100 * n), internal("topic"): None if n in dead else "t"} for n in order
    ]
    records = rendered([{**position, **row} for position, row in zip(positions, fields, strict=True)])
    with Spool(memory, None) as spool:
        spool.fill(records.slice(at, group) for at in range(0, 12, group))
        messages, refused = (list(part) for part in split_by_outcome(list(spool), max_bytes=2000))
        assert all(batch.num_rows == 1 or batch.nbytes <= 2000 for batch in messages)
        sent = [payload.rstrip(b"\0") for batch in messages for payload in batch.column("payload").to_pylist()]
        assert sent == [b"%d" % n for n in range(12) if n not in dead]
        refused_numbers = [row["partition"] * 6 + row["offset"] for batch in refused for row in batch.to_pylist()]
        assert refused_numbers == sorted(dead)


_RENDERED = pa.schema([*(RECORD.field(name) for name in POSITION_COLUMNS), *RENDERED_SCHEMA])


@pytest.mark.parametrize("header", ["h", "mqtt.topic"])
def test_a_letter_is_replayed_to_its_source_partition(tmp_path: Path, header: str) -> None:
    """Also one whose record had come from MQTT: no route of an uplink is asked."""
    letter = DeadLetter(Reason.TOPIC_ABSENT, "commands", b"k", b"v", ((header, b"1"),), 3, 17, "why", "commands")
    mapper = LetterMapper(down_file.the_line(down_file.GOOD, tmp_path), lambda: pytest.fail("there is no SQL"))
    (outcome,) = mapper.remap([letter])
    assert outcome.record == ("commands", b"v", b"k", 3, None, None, 17, [(header, b"1")])


@pytest.mark.parametrize(
    ("guarantee", "end"), [("exactly_once", "adds up ✓, but is not exactly once ✗"), ("at_least_once", "adds up ✓")]
)
def test_qos_2_that_a_broker_took_as_qos_1_is_in_the_account(guarantee: str, end: str) -> None:
    """It said ``adds up`` and nothing else; only --json had ``degraded: 21000``."""
    outbox = {
        **OUTBOX,
        "accepted": 21_000,
        "delivered": 21_000,
        "acknowledged": 21_000,
        "expired": 0,
        "refused": 0,
        "degraded": 21_000,
    }
    account = downlink_account(LineNotes(), {"outbox": outbox, "guarantee": guarantee})
    text = "taken 21,000 (21,000 of them uncounted) = delivered 21,000 (21,000 of them at QoS 1, not 2) + waiting 0"
    assert account.sentence() == f"{text}   {end}"
    shown: dict[str, Any] = {"lines": {"l": {"account": account.as_json(), "query": "running"}}}
    assert status.exit_code(shown) == (1 if guarantee == "exactly_once" else 0)


def test_status_and_screen_show_a_downlink(tmp_path: Path) -> None:
    state = BridgeState("b", tmp_path, {"line": "down"})
    view = state.lines["line"]
    view.status = {"state": "online", "client_id": "b-line", "guarantee": "at_least_once", "outbox": OUTBOX}
    view.notes, view.query = down(91, unfit=1), "running"
    commit(tmp_path / "line", view.notes)
    assert "taken 91 = delivered 70 + dead-lettered 1 + expired 2 + refused 3 + waiting 15   in 0/s" in line_summary(
        view, "running"
    )
    state.save()
    text = status.render(status.collect_status(tmp_path))
    assert "adds up" not in text
    for part in (
        "account   unknown: no gateway answers",
        ": taken 91 = delivered 70 + dead-lettered 1 + expired 2 + refused 3 + waiting 15\n",
        "nothing is delivered; records wait in Kafka and in the outbox",
        "refused by the broker permanently: 3 messages.",
    ):
        assert part in text
    shown = status._render_gateway("", {}, {"direction": "down", "account": None})
    assert "outbox    queued unknown   in flight unknown" in "\n".join(shown)
