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
from towline.bridge.deadletters.remap import RemapFate, Returner
from towline.bridge.downlink.account import DownlinkCounts
from towline.bridge.downlink.query import DownlinkQuery
from towline.bridge.downlink.sink import sorted_out
from towline.bridge.downlink.sql import DEAD_LETTER, NOTICE, PLACE
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


def test_rows_and_letters_come_in_the_order_of_kafka() -> None:
    kind = pa.struct([("key", pa.binary()), pa.field("value", pa.binary(), nullable=False)])
    where = pa.struct([("topic", pa.string()), ("partition", pa.int32()), ("offset", pa.int64())])
    places = [("t", 1, 3), ("t", 0, 9), ("s", 7, 8), ("t", 0, 10)]
    records = pa.RecordBatch.from_arrays(
        [
            pa.array(["d", None, "a", "c"]),
            pa.array([None, {"key": b"k", "value": b"v"}, None, None], kind),
            pa.array([dict(zip(("topic", "partition", "offset"), place, strict=True)) for place in places], where),
        ],
        ["topic", DEAD_LETTER, PLACE],
    )
    rows, letters = sorted_out([records.slice(0, 2), records.slice(2)])
    assert [row for part in rows for row in part.to_pylist()] == [{"topic": "a"}, {"topic": "c"}, {"topic": "d"}]
    assert [part.to_pylist() for part in letters] == [[{"key": b"k", "value": b"v"}]]
    assert [list(part) for part in sorted_out([])] == [[], []]
    told = pa.struct([("key", pa.binary()), pa.field("value", pa.binary())])
    notice = pa.array([None, {"key": b"n", "value": b""}, None, None], told)
    twice = records.append_column(NOTICE, notice)
    again = twice.slice(1, 1).set_column(2, PLACE, pa.array([{"topic": "z", "partition": 0, "offset": 0}], where))
    rows, letters = sorted_out([again, twice])
    assert [row for part in rows for row in part.to_pylist()] == [{"topic": "a"}, {"topic": "c"}, {"topic": "d"}]
    assert [row["key"] for part in letters for row in part.to_pylist()] == [b"k", b"n", b"k", b"n"]


@settings(deadline=None)  # files
@given(st.permutations(range(12)), st.integers(1, 5), st.sets(st.integers(0, 11)), st.integers(0, 3000))
def test_rows_of_any_size_come_in_order_and_in_bounded_batches(
    order: list[int], group: int, dead: set[int], memory: int
) -> None:
    place = [{"topic": "t", "partition": n // 6, "offset": n % 6} for n in order]
    letters = [{"key": b"k", "value": b"%d" % n} if n in dead else None for n in order]
    payloads = [b"%d" % n + bytes(100 * n) for n in order]
    records = pa.RecordBatch.from_pydict({"payload": payloads, PLACE: place, DEAD_LETTER: letters}, schema=_SORTED)
    with Spool(memory, None) as spool:
        spool.fill(records.slice(at, group) for at in range(0, 12, group))
        rows, dead_letters = (list(part) for part in sorted_out(list(spool), most=1000))
        assert all(batch.num_rows == 1 or batch.nbytes <= 1000 for batch in rows)
        sent = [payload.rstrip(b"\0") for batch in rows for payload in batch.column("payload").to_pylist()]
        assert sent == [b"%d" % n for n in range(12) if n not in dead]
        assert [row["value"] for batch in dead_letters for row in batch.to_pylist()] == [
            b"%d" % n for n in sorted(dead)
        ]


_SORTED = pa.schema(
    [
        ("payload", pa.binary()),
        (PLACE, pa.struct([("topic", pa.string()), ("partition", pa.int32()), ("offset", pa.int64())])),
        (DEAD_LETTER, pa.struct([("key", pa.binary()), ("value", pa.binary())])),
    ]
)


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
