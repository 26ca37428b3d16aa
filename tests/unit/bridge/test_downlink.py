"""A downlink without brokers: its account, the order of its rows, its place on the screen."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.bridge.test_downlink_file import GOOD, read
from tests.unit.bridge.test_messages import RECORD
from towline.bridge.deadletters.remap import RemapFate, Returner
from towline.bridge.downlink.account import DownlinkCounts
from towline.bridge.downlink.query import DownlinkQuery
from towline.bridge.downlink.sink import sorted_out
from towline.bridge.messages import OUTCOME, PLACE, RENDERED_SCHEMA, own
from towline.bridge.runtime import status
from towline.bridge.runtime.screen import summary
from towline.bridge.runtime.state import BridgeState
from towline.errors import KafkaError
from towline.kafka.deadletters import DeadLetter, Reason
from towline.kafka.spool import Spool

OUTBOX = {"accepted": 90, "delivered": 70, "acknowledged": 70, "expired": 2, "refused": 3}


def batch(number: int, rows: int, query: str = "q", **observed: int) -> dict[str, Any]:
    return {"query": query, "batch": number, "rows": rows, "observed": {"rows": rows, **observed}}


def test_the_account_adds_up() -> None:
    counts = (
        DownlinkCounts().add(batch(0, 60, kept=60, filtered=5, dead_lettered=1)).add(batch(1, 40, kept=40, filtered=4))
    )
    account = counts.account({"outbox": OUTBOX})
    assert account.adds_up
    assert (account.received, account.waiting, account.uncounted, account.more["behind"]) == (100, 15, 0, None)
    assert account.received == account.carried + sum(account.parts.values()) + account.waiting
    assert account.sentence() == (
        "taken 100 = delivered 70 + dead-lettered 1 + filtered 9 + expired 2 + refused 3 + waiting 15   adds up ✓"
    )
    assert DownlinkCounts.from_json(counts.as_json()) == counts


def test_a_where_that_is_null_is_counted_apart() -> None:
    account = DownlinkCounts().add(batch(0, 93, filtered=1, undecided=2)).account({"outbox": OUTBOX})
    assert "filtered 1 + where is null 2 + expired 2 + refused 3 + waiting 15   adds up ✓" in account.sentence()


def test_a_batch_counts_once_and_a_hole_is_seen() -> None:
    counts = DownlinkCounts().add(batch(0, 60)).add(batch(0, 60)).add(batch(3, 10))
    assert (counts.rows, counts.unseen) == (70, 2)
    assert counts.add(batch(0, 5, query="again")).rows == 75
    assert counts.account({"outbox": OUTBOX}).uncounted == 20


def test_an_outbox_that_knows_less_does_not_add_up() -> None:
    account = DownlinkCounts().add(batch(0, 91)).account({"outbox": OUTBOX})
    assert not account.adds_up
    assert "Spark brought 91 messages · the outbox knows 90" in account.sentence()


def test_what_a_transform_takes_away_or_adds_is_counted() -> None:
    assert DownlinkCounts().add(batch(0, 10, kept=7, filtered=1)).filtered == 4
    more = DownlinkCounts().add(batch(0, 10, kept=15))
    assert (more.added, more.sent) == (5, 15)


def test_progress_of_sparks_kafka_source_is_reported(tmp_path: Path) -> None:
    bridge = read(GOOD, tmp_path)
    query = DownlinkQuery(bridge, bridge.downlinks[0])
    source = {"startOffset": {"t": {"0": 3, "1": 7}}, "endOffset": {"t": {"0": 5, "1": 7}}}
    for sources, offsets in (([source], 2), ([{"latestOffset": None}], None), ([], None)):
        report = query.report({"id": "q", "batchId": 3, "sources": sources})
        assert (report["query"], report["offsets"]) == ("q", offsets)


def test_messages_and_refused_records_come_in_the_order_of_kafka() -> None:
    places = [("t", 1, 3, "d"), ("t", 0, 9, None), ("s", 7, 8, "a"), ("t", 0, 10, "c")]
    rows = placed([dict(zip((*PLACE, own("topic")), place, strict=True)) for place in places])
    messages, refused = sorted_out([rows.slice(0, 2), rows.slice(2)])
    assert [row["topic"] for part in messages for row in part.to_pylist()] == ["a", "c", "d"]
    assert [row["offset"] for part in refused for row in part.to_pylist()] == [9]
    assert [list(part) for part in sorted_out([])] == [[], []]


def placed(rows: list[dict[str, Any]]) -> pa.RecordBatch:
    """Rendered records; one without an MQTT topic is refused."""
    made = [{**row, OUTCOME: int(row[own("topic")] is None)} for row in rows]
    return pa.RecordBatch.from_pylist(made, schema=_PLACED)


@settings(deadline=None)  # files
@given(st.permutations(range(12)), st.integers(1, 5), st.sets(st.integers(0, 11)), st.integers(0, 3000))
def test_rows_of_any_size_come_in_order_and_in_bounded_batches(
    order: list[int], group: int, dead: set[int], memory: int
) -> None:
    places = [{"topic": "t", "partition": n // 6, "offset": n % 6} for n in order]
    said = [{own("payload"): b"%d" % n + bytes(100 * n), own("topic"): None if n in dead else "t"} for n in order]
    records = placed([{**place, **one} for place, one in zip(places, said, strict=True)])
    with Spool(memory, None) as spool:
        spool.fill(records.slice(at, group) for at in range(0, 12, group))
        messages, refused = (list(part) for part in sorted_out(list(spool), most=2000))
        assert all(batch.num_rows == 1 or batch.nbytes <= 2000 for batch in messages)
        sent = [payload.rstrip(b"\0") for batch in messages for payload in batch.column("payload").to_pylist()]
        assert sent == [b"%d" % n for n in range(12) if n not in dead]
        left = [row["partition"] * 6 + row["offset"] for batch in refused for row in batch.to_pylist()]
        assert left == sorted(dead)


_PLACED = pa.schema([*(RECORD.field(name) for name in PLACE), *RENDERED_SCHEMA])


def test_a_disk_without_room_for_a_batch_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with Path("/dev/full").open("r+b", buffering=0) as full:
        monkeypatch.setattr(tempfile, "TemporaryFile", lambda **_: full)
        with Spool(0, None) as spool, pytest.raises(KafkaError, match=r"do not fit .*No space left.*TL-K23"):
            spool.fill([pa.RecordBatch.from_pydict({"payload": [b"x"]})])


def test_a_letter_goes_back_where_it_came_from() -> None:
    letter = DeadLetter(Reason.TOPIC_ABSENT, "commands", b"k", b"v", (("h", b"1"),), 3, 17, "why", "commands")
    (outcome,) = Returner().outcomes([letter])
    assert outcome.fate is RemapFate.MENDED
    assert outcome.record == ("commands", b"v", b"k", 3, None, None, 17, [("h", b"1")])


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
    account = DownlinkCounts().account({"outbox": outbox, "guarantee": guarantee})
    text = "taken 21,000 (21,000 of them uncounted) = delivered 21,000 (21,000 of them at QoS 1, not 2) + waiting 0"
    assert account.sentence() == f"{text}   {end}"
    shown: dict[str, Any] = {"lines": {"l": {"account": account.as_json(), "query": "running"}}}
    assert status.code_of(shown) == (1 if guarantee == "exactly_once" else 0)


def test_status_and_screen_tell_the_way_down(tmp_path: Path) -> None:
    state = BridgeState("b", tmp_path, {"line": "down"})
    view = state.lines["line"]
    view.status = {"state": "online", "client_id": "b-line", "guarantee": "at_least_once", "outbox": OUTBOX}
    view.counts, view.query = DownlinkCounts().add(batch(0, 91, kept=91, dead_lettered=1)), "running"
    assert "taken 91 = delivered 70 + dead-lettered 1 + expired 2 + refused 3 + waiting 15   in 0/s" in summary(
        view, "running"
    )
    state.save()
    assert BridgeState("b", tmp_path, {"line": "down"}).lines["line"].counts == view.counts
    text = status.render(status.collect(tmp_path))
    assert "adds up" not in text
    for part in (
        "account   unknown: no gateway answers",
        ": taken 91 = delivered 70 + dead-lettered 1 + expired 2 + refused 3 + waiting 15\n",
        "nothing is delivered; what is in Kafka and in the outbox waits",
        "refused by the broker for good: 3 messages.",
    ):
        assert part in text
    view.status = {**view.status, "gateway_running": True}
    assert "outbox    queued unknown   in flight unknown" in "\n".join(
        status._render_outbox(dict(view.status), {"account": None})
    )
