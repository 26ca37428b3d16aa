"""Readers over several gateways: each a real service on a real journal, that goes and comes."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadMaxRows

from tests.helpers import wait_until
from tests.unit.gateway.serving import Served, served
from tests.unit.spark.reading import ALL
from tests.unit.spark.several import NewReader, ends, new_reader, quick, seen, two, until
from towline.checkpoint import Checkpoint
from towline.errors import GatewayUnreachable
from towline.spark import gateways
from towline.spark.gateways import PollRequest, PollResult, SourceGateway
from towline.spark.reader import MqttStreamReader, Slice

__all__ = ["new_reader", "quick", "two"]


# -- one batch of both -----------------------------------------------------------------------------------------------


def test_the_order_of_the_list_does_not_matter(two: tuple[Served, Served], new_reader: NewReader) -> None:
    two[0].add(1)
    at = new_reader().initialOffset()
    stream = new_reader("g2", "g1")
    end = stream.latestOffset(at, ALL)
    assert list(end["gateways"]) == ["g1", "g2"]
    assert list(at["gateways"]) == ["g1", "g2"]
    assert stream.latestOffset(end, ALL) is end or stream.latestOffset(end, ALL)["tick"] == 1


def test_any_gateway_wakes_the_reader(two: tuple[Served, Served], new_reader: NewReader) -> None:
    stream = new_reader(poll_s=30.0)
    at = stream.latestOffset(stream.initialOffset(), ALL)
    for one in (*two, two[1]):
        before = ends(at)[one.name]
        timer = threading.Timer(0.2, one.add, (1,))
        timer.start()
        began = time.monotonic()
        at = until(stream, at, lambda place, one=one, before=before: ends(place)[one.name] == before + 1)  # type: ignore[misc]
        assert time.monotonic() - began < 10


def test_a_batch_is_shared_within_its_limits(two: tuple[Served, Served], new_reader: NewReader) -> None:
    stream, (one, other) = new_reader(), two
    for _ in range(10):
        one.add(100)
    other.add(5)
    at = stream.initialOffset()
    first = stream.latestOffset(at, ReadMaxRows(50))
    assert ends(first) == {"g1": 45, "g2": 5}
    second = stream.latestOffset(first, ReadMaxRows(50))
    assert ends(second) == {"g1": 95, "g2": 5}


def test_the_limit_in_bytes_is_of_the_whole_batch(
    two: tuple[Served, Served], new_reader: NewReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateways, "POLL_GRACE_S", 30.0)  # each has rows to the end, so each is waited for
    stream = new_reader(max_rows=1000, max_bytes=50_000)
    for one in two:
        for _ in range(50):
            one.add(10, payload=b"x" * 500)
    at, sizes = stream.initialOffset(), []
    while ends(at) != {"g1": 500, "g2": 500}:
        end = stream.latestOffset(at, ReadMaxRows(1000))
        sizes.append(sum(s.journal.range_bytes(ends(at)[s.name], ends(end)[s.name]) for s in two))
        assert all(ends(at)[name] < ends(end)[name] for name in ("g1", "g2")), "both have their share"
        at = end
    assert max(sizes) <= 50_000
    assert min(sizes[:-1]) > 40_000, "what is allowed is used"


@pytest.mark.parametrize("answer_s", [0.3, 1.2])
def test_a_gateway_that_is_far_away_has_its_share(
    two: tuple[Served, Served], new_reader: NewReader, monkeypatch: pytest.MonkeyPatch, answer_s: float
) -> None:
    """Its answer takes longer than that of a gateway without rows may take."""
    far_away(monkeypatch, "g2", answer_s)
    monkeypatch.setattr(gateways, "FIRST_POLL_S", 5.0)
    stream = new_reader(max_rows=100)
    for one in two:
        one.add(1000)
    at, until_s = stream.initialOffset(), time.monotonic() + 10
    while not ends(at)["g2"] and time.monotonic() < until_s:
        at = stream.latestOffset(at, ReadMaxRows(100))
        two[0].add(100)  # the nearer one always has rows
    assert all(ends(at).values()), "both are carried"


def test_a_query_with_an_end_waits_for_a_gateway_that_is_far_away(
    two: tuple[Served, Served], new_reader: NewReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one, which is at its end, takes in more meanwhile."""
    far_away(monkeypatch, "g2")
    stream = new_reader(max_rows=50)
    two[1].add(100)
    two[0].add(1)
    at = stream.initialOffset()
    stream.prepareForTriggerAvailableNow()
    two[0].add(100)
    at = until(stream, at, lambda place: ends(place)["g1"] == 1, ReadMaxRows(50))
    while (end := stream.latestOffset(at, ReadMaxRows(50))) != at:
        at = end
    assert ends(at) == {"g1": 1, "g2": 100}


def test_a_gateway_that_hangs_does_not_hold_up_a_restart(
    two: tuple[Served, Served], new_reader: NewReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = new_reader()
    at = first.latestOffset(first.initialOffset(), ALL)
    first.stop()
    two[0].add(3)
    monkeypatch.setattr(gateways, "FIRST_POLL_S", 20.0)
    hung, call = threading.Event(), SourceGateway._call
    monkeypatch.setattr(
        SourceGateway,
        "_call",
        lambda self, do: hung.wait(30) if self.address.location.endswith("g2") else call(self, do),
    )
    stream, began = new_reader(), time.monotonic()
    until(stream, at, lambda place: ends(place)["g1"] == 3)
    hung.set()
    assert time.monotonic() - began < 10


def test_a_gateway_that_hangs_with_rows_is_waited_for_once(
    two: tuple[Served, Served], new_reader: NewReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the limit of a batch is another one each time, as with a slow Kafka."""
    stream = new_reader(max_rows=100)
    for one in two:
        one.add(1000)
    at = stream.initialOffset()
    hung, wait = threading.Event(), SourceGateway.poll_rows

    def hangs(self: SourceGateway, question: PollRequest, timeout_s: float) -> PollResult:
        if self.address.location.endswith("g2"):
            hung.wait(30)
        return wait(self, question, timeout_s)

    monkeypatch.setattr(SourceGateway, "poll_rows", hangs)
    at = stream.latestOffset(at, ReadMaxRows(50))
    began = time.monotonic()
    for limit in range(60, 65):
        at = stream.latestOffset(at, ReadMaxRows(limit))
    assert time.monotonic() - began < 3
    assert ends(at) == {"g1": 50 + 60 + 61 + 62 + 63 + 64, "g2": 0}
    hung.set()


def far_away(monkeypatch: pytest.MonkeyPatch, name: str, answer_s: float = 0.3) -> None:
    """Let the answers of a gateway take longer than a poll of one without rows is waited for."""
    monkeypatch.setattr(gateways, "POLL_GRACE_S", 0.05)
    wait = SourceGateway.poll_rows

    def slowly(self: SourceGateway, question: PollRequest, timeout_s: float) -> PollResult:
        if self.address.location.endswith(name):
            time.sleep(answer_s)
        return wait(self, question, timeout_s)

    monkeypatch.setattr(SourceGateway, "poll_rows", slowly)


def test_partitions_are_cut_the_same_way_again(two: tuple[Served, Served], new_reader: NewReader) -> None:
    stream = new_reader(min_partitions=4, max_partition_rows=40)
    two[0].add(100)
    two[1].add(10)
    at = stream.initialOffset()
    end = stream.latestOffset(at, ALL)
    parts = stream.partitions(at, end)
    assert len(parts) == 4
    rows = seen(stream, at, end)
    assert rows == [*(("g1", n) for n in range(100)), *(("g2", n) for n in range(10))]
    again = new_reader("g2", "g1", min_partitions=4, max_partition_rows=40)
    bounds = [(p.journal, p.start, p.end) for p in parts if isinstance(p, Slice)]
    assert [(p.journal, p.start, p.end) for p in again.partitions(at, end) if isinstance(p, Slice)] == bounds
    assert seen(again, at, end) == rows


def test_at_most_once_gives_up_what_was_begun_at_each(two: tuple[Served, Served], new_reader: NewReader) -> None:
    first = new_reader(replays_batches=False)
    for one in two:
        one.add(5)
    at = first.initialOffset()
    end = first.latestOffset(at, ALL)
    assert len(seen(first, at, end)) == 10
    first.stop()
    again = new_reader(replays_batches=False)
    assert again.partitions(at, end) == []
    two[1].add(1)
    assert seen(again, end, until(again, end, lambda place: ends(place)["g2"] == 6)) == [("g2", 5)]


def test_the_checkpoint_is_synced_once_before_each_inbox_is_cut(
    two: tuple[Served, Served], new_reader: NewReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "ck"
    for log in ("offsets", "commits"):
        (place / log).mkdir(parents=True)
    stream = new_reader(checkpoint=str(place))
    for one in two:
        one.add(10)
    at = stream.latestOffset(stream.initialOffset(), ALL)
    assert ends(at) == {"g1": 10, "g2": 10}
    (place / "offsets" / "0").write_text(f'v1\n{{"batchWatermarkMs":0}}\n{json.dumps(at)}')
    (place / "commits" / "0").write_text('v1\n{"nextBatchWatermarkMs":0}')
    seen_at: list[tuple[int, int]] = []
    real = Checkpoint.sync

    def sync(checkpoint: Checkpoint) -> None:
        real(checkpoint)
        seen_at.append((two[0].journal.committed, two[1].journal.committed))

    monkeypatch.setattr(Checkpoint, "sync", sync)
    for _ in range(3):
        stream.latestOffset(at, ALL)
    assert [one.journal.consumers["default"] for one in two] == [10, 10]
    assert seen_at == [(0, 0)]


# -- who is away -----------------------------------------------------------------------------------------------------


def test_one_that_is_away_holds_back_its_own_rows_only(
    tmp_path: Path, new_reader: NewReader, caplog: pytest.LogCaptureFixture
) -> None:
    stream = new_reader()
    with served(tmp_path / "g1", name="g1") as one:
        with served(tmp_path / "g2", name="g2") as other:
            for each in (one, other):
                each.add(5)
            at = stream.latestOffset(stream.initialOffset(), ALL)
        one.add(5)
        at = until(stream, at, lambda place: ends(place) == {"g1": 10, "g2": 5})
        wait_until(lambda: stream.latestOffset(at, ALL) and "away_since" in _report(stream)["gateways"]["g2"])
        one.add(1)
        at = until(stream, at, lambda place: ends(place) == {"g1": 11, "g2": 5})
        report = _report(stream)
        assert json.loads(json.dumps(report)) == report
        assert (report["tip"], report["queued"]) == (16, 0)
        assert report["away"] == ["g2"]
        assert "no gateway" in report["gateways"]["g2"]["last_error"]
        assert report["gateways"]["g1"]["connected"] is True
        with served(tmp_path / "g2", name="g2") as other:
            other.add(7)
            end = until(stream, at, lambda place: ends(place) == {"g1": 11, "g2": 12})
            assert seen(stream, at, end)[-7:] == [("g2", n) for n in range(5, 12)]
            wait_until(lambda: stream.latestOffset(end, ALL) and other.journal.consumers["default"] == 12)
            assert "away_since" not in _report(stream)["gateways"]["g2"]
    told = [record.getMessage() for record in caplog.records if "TL-G54" in record.getMessage()]
    assert len(told) == 1
    assert "gateway g2 (" in told[0]


def _report(stream: MqttStreamReader) -> dict[str, Any]:
    report = stream.reportLatestOffset()
    assert report is not None
    return report


def test_a_new_query_needs_one_gateway_and_takes_the_others_in_later(tmp_path: Path, new_reader: NewReader) -> None:
    stream = new_reader()
    with served(tmp_path / "g1", name="g1") as one:
        one.add(3)
        at = stream.initialOffset()
        assert ends(at) == {"g1": 0}
        at = stream.latestOffset(at, ALL)
        assert ends(at) == {"g1": 3}
        with served(tmp_path / "g2", name="g2") as other:
            other.add(4)
            places = [at]

            def joined() -> bool:
                places.append(stream.latestOffset(places[-1], ALL))
                return "g2" in places[-1]["gateways"]

            wait_until(joined)
            assert ends(places[-1]) == {"g1": 3, "g2": 0}, "its place comes first"
            assert seen(stream, places[-2], places[-1]) == []
            end = until(stream, places[-1], lambda place: ends(place)["g2"] == 4)
            assert seen(stream, places[-1], end) == [("g2", n) for n in range(4)]


def test_without_any_gateway_a_new_query_says_so(new_reader: NewReader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateways, "GATEWAY_TIMEOUT_S", 0.2)
    with pytest.raises(GatewayUnreachable, match="TL-G01"):
        new_reader().initialOffset()


def test_a_query_goes_on_while_none_answers(tmp_path: Path, new_reader: NewReader) -> None:
    with contextlib.ExitStack() as stack:
        for name in ("g1", "g2"):
            stack.enter_context(served(tmp_path / name, name=name)).add(1)
        first = new_reader()
        at = until(first, first.initialOffset(), lambda place: ends(place) == {"g1": 1, "g2": 1})
        first.stop()
    stream = new_reader()
    stream.getDefaultReadLimit()
    ticked = stream.latestOffset(at, ALL)
    assert ends(ticked) == ends(at)
    with served(tmp_path / "g2", name="g2") as other:
        other.add(1)
        assert ends(until(stream, ticked, lambda place: ends(place)["g2"] == 2)) == {"g1": 1, "g2": 2}


def test_a_batch_that_was_begun_waits_for_its_gateway(
    tmp_path: Path, new_reader: NewReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateways, "GATEWAY_TIMEOUT_S", 0.2)
    first = new_reader()
    with served(tmp_path / "g1", name="g1"):
        with served(tmp_path / "g2", name="g2") as other:
            other.add(6)
            at = first.initialOffset()
            end = first.latestOffset(at, ALL)
            before = seen(first, at, end)
            first.stop()
        again = new_reader()
        with pytest.raises(GatewayUnreachable) as caught:
            again.partitions(at, end)
        assert str(caught.value) == (
            'gateway "g2": it is unavailable (no gateway runs in this state directory), and an interrupted batch needs '
            "its messages 0 to 5. Nothing is lost; the batch is then replayed as planned. Start it at "
            f"{tmp_path / 'g2'}.   [TL-G53]"
        )
        with served(tmp_path / "g2", name="g2") as other:
            other.add(3)
            assert seen(again, at, end) == before


# -- AvailableNow ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "payload", "rows", "sums"),
    [({}, b"", 16, [0, 16, 32, 40]), ({"max_bytes": 30_000}, b"x" * 1_000, 100, None)],
)
def test_available_now_ends_where_each_gateway_was(
    two: tuple[Served, Served],
    new_reader: NewReader,
    limits: dict[str, int],
    payload: bytes,
    rows: int,
    sums: list[int] | None,
) -> None:
    stream = new_reader(**limits)
    for one in two:
        one.add(20, payload=payload)
    stream.prepareForTriggerAvailableNow()
    for one in two:
        one.add(20)  # so small that all of them were within a share
    places = [stream.initialOffset()]
    while (end := stream.latestOffset(places[-1], ReadMaxRows(rows))) is not places[-1]:
        places.append(end)
    assert ends(places[-1]) == {"g1": 20, "g2": 20}
    assert len(places) > 2
    assert sums is None or [sum(ends(place).values()) for place in places] == sums
    assert [one.journal.consumers["default"] for one in two] == [20, 20]


def test_available_now_does_not_end_without_the_rows_of_one_that_is_away(
    tmp_path: Path, new_reader: NewReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = new_reader()
    with served(tmp_path / "g1", name="g1"):
        with served(tmp_path / "g2", name="g2") as other:
            other.add(5)
            stream.prepareForTriggerAvailableNow()
            at = stream.initialOffset()
        monkeypatch.setattr(gateways, "GATEWAY_TIMEOUT_S", 0.2)
        with pytest.raises(GatewayUnreachable, match="TL-G01"):
            stream.latestOffset(at, ALL)
        with served(tmp_path / "g2", name="g2"):
            assert ends(until(stream, at, lambda place: ends(place)["g2"] == 5)) == {"g1": 0, "g2": 5}
