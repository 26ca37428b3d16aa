"""Readers over several gateways: each a real service on a real journal, that goes and comes."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadMaxBytes, ReadMaxRows

from tests.helpers import wait_until
from tests.unit.gateway.serving import Served, served
from tests.unit.spark.reading import ALL
from towline.errors import ConfigError, Fenced, GatewayUnreachable
from towline.spark import gateways, planning, reader
from towline.spark.link import GatewayPlace
from towline.spark.reader import MqttBatchReader, MqttStreamReader, ReadPlan, Slice

Place = dict[str, Any]
NewReader = Callable[..., MqttStreamReader]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateways, "_PAUSE_S", 0.02)
    monkeypatch.setattr(gateways, "MEET_S", 0.5)


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[Served, Served]]:
    with served(tmp_path / "g1", name="g1") as one, served(tmp_path / "g2", name="g2") as other:
        yield one, other


@pytest.fixture
def new_reader(tmp_path: Path) -> Iterator[NewReader]:
    made: list[MqttStreamReader] = []

    def make(*names: str, **more: Any) -> MqttStreamReader:
        at = tuple(str(tmp_path / name) for name in names or ("g1", "g2"))
        plan = ReadPlan(GatewayPlace("", ""), "default", poll_s=0.05, gateways=at)
        made.append(MqttStreamReader(replace(plan, **more)))
        return made[-1]

    yield make
    for one in made:
        one.stop()


def ends(at: Place) -> dict[str, int]:
    return {name: place["offset"] for name, place in at["gateways"].items()}


def seen(stream: MqttStreamReader, start: Place, end: Place) -> list[tuple[str, int]]:
    """Gateway and offset of each row of a batch, in the order of its partitions."""
    batches = [batch for part in stream.partitions(start, end) for batch in stream.read(part)]
    return [pair for b in batches for pair in zip(b["gateway"].to_pylist(), b["offset"].to_pylist(), strict=True)]


def until(stream: MqttStreamReader, at: Place, wanted: Callable[[Place], bool], limit: Any = ALL) -> Place:
    """Go on, batch by batch, until a position is wanted."""
    places = [at]

    def there() -> bool:
        places.append(stream.latestOffset(places[-1], limit))
        return wanted(places[-1])

    wait_until(there)
    return places[-1]


# -- one batch of both -----------------------------------------------------------------------------------------------


def test_a_batch_has_rows_of_each(two: tuple[Served, Served], new_reader: NewReader) -> None:
    stream, (one, other) = new_reader(), two
    one.add(3)
    other.add(2)
    at = stream.initialOffset()
    end = stream.latestOffset(at, ALL)
    assert ends(end) == {"g1": 3, "g2": 2}
    assert seen(stream, at, end) == [("g1", 0), ("g1", 1), ("g1", 2), ("g2", 0), ("g2", 1)]
    wait_until(lambda: stream.latestOffset(end, ALL) and other.journal.consumers["default"] == 2)
    assert one.journal.consumers["default"] == 3


def test_the_order_of_the_list_does_not_matter(two: tuple[Served, Served], new_reader: NewReader) -> None:
    two[0].add(1)
    at = new_reader().initialOffset()
    stream = new_reader("g2", "g1")
    end = stream.latestOffset(at, ALL)
    assert list(end["gateways"]) == ["g1", "g2"]
    assert list(at["gateways"]) == ["g1", "g2"]
    assert stream.latestOffset(end, ALL) is end or stream.latestOffset(end, ALL)["tick"] == 1


def test_nothing_new_returns_the_start_itself(two: tuple[Served, Served], new_reader: NewReader) -> None:
    stream = new_reader()
    two[1].add(1)
    at = stream.latestOffset(stream.initialOffset(), ALL)
    assert stream.latestOffset(at, ALL) is at


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


def test_the_limit_in_bytes_is_of_the_whole_batch(two: tuple[Served, Served], new_reader: NewReader) -> None:
    stream = new_reader(max_rows=1000, max_bytes=50_000)
    for one in two:
        for _ in range(50):
            one.add(10, payload=b"x" * 500)
    at, sizes = stream.initialOffset(), []
    while ends(at) != {"g1": 500, "g2": 500}:
        end = stream.latestOffset(at, ReadMaxRows(1000))
        sizes.append(sum(s.journal.size(ends(at)[s.name], ends(end)[s.name]) for s in two))
        assert all(ends(at)[name] < ends(end)[name] for name in ("g1", "g2")), "both have their share"
        at = end
    assert max(sizes) <= 50_000
    assert min(sizes[:-1]) > 40_000, "what is allowed is used"


def test_huge_messages_come_one_after_the_other(two: tuple[Served, Served], new_reader: NewReader) -> None:
    stream = new_reader()
    for one in two:
        one.add(1, payload=b"x" * 100_000)
    at = stream.initialOffset()
    first = stream.latestOffset(at, ReadMaxBytes(10_000))
    second = stream.latestOffset(first, ReadMaxBytes(10_000))
    assert sorted(ends(first).values()) == [0, 1]
    assert ends(second) == {"g1": 1, "g2": 1}


def test_partitions_are_cut_the_same_way_again(two: tuple[Served, Served], new_reader: NewReader) -> None:
    stream = new_reader(min_partitions=4, max_records=40)
    two[0].add(100)
    two[1].add(10)
    at = stream.initialOffset()
    end = stream.latestOffset(at, ALL)
    parts = stream.partitions(at, end)
    assert len(parts) == 4
    rows = seen(stream, at, end)
    assert rows == [*(("g1", n) for n in range(100)), *(("g2", n) for n in range(10))]
    again = new_reader("g2", "g1", min_partitions=4, max_records=40)
    bounds = [(p.journal, p.start, p.end) for p in parts if isinstance(p, Slice)]
    assert [(p.journal, p.start, p.end) for p in again.partitions(at, end) if isinstance(p, Slice)] == bounds
    assert seen(again, at, end) == rows


def test_at_most_once_gives_up_what_was_begun_at_each(two: tuple[Served, Served], new_reader: NewReader) -> None:
    first = new_reader(once_below=3)
    for one in two:
        one.add(5)
    at = first.initialOffset()
    end = first.latestOffset(at, ALL)
    assert len(seen(first, at, end)) == 10
    first.stop()
    again = new_reader(once_below=3)
    assert again.partitions(at, end) == []
    two[1].add(1)
    assert seen(again, end, until(again, end, lambda place: ends(place)["g2"] == 6)) == [("g2", 5)]


def test_what_another_checkpoint_has_handed_out_is_told_by_gateway(
    two: tuple[Served, Served], new_reader: NewReader
) -> None:
    for one in two:
        one.add(4)
    stream = new_reader(repeated_below={"g1": 3}, once_below=2, starting={"g1": 1, "g2": "earliest"})
    at = stream.initialOffset()
    assert ends(at) == {"g1": 1, "g2": 0}
    rows = seen(stream, at, stream.latestOffset(at, ALL))
    assert rows == [("g1", 3), *(("g2", n) for n in range(4))]


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
    monkeypatch.setattr(gateways, "PATIENCE_S", 0.2)
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
    monkeypatch.setattr(gateways, "PATIENCE_S", 0.2)
    monkeypatch.setattr(planning, "PATIENCE_S", 0.2)
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
            f'gateway "g2": it is away (no gateway runs in this state directory), and a batch that was begun needs its '
            f"messages 0 to 5. Nothing is lost: start it at {tmp_path / 'g2'}; the batch is then served as it was "
            "planned.   [TL-G53]"
        )
        with served(tmp_path / "g2", name="g2") as other:
            other.add(3)
            assert seen(again, at, end) == before


def test_a_restarted_gateway_knows_its_reader_again(tmp_path: Path, new_reader: NewReader) -> None:
    stream = new_reader()
    with served(tmp_path / "g1", name="g1") as one:
        with served(tmp_path / "g2", name="g2"):
            at = stream.latestOffset(stream.initialOffset(), ALL)
        for _ in range(3):
            with served(tmp_path / "g2", name="g2") as other:
                other.add(1)
                one.add(1)
                wanted = (one.journal.end, other.journal.end)
                at = until(stream, at, lambda place, wanted=wanted: tuple(ends(place).values()) == wanted)  # type: ignore[misc]


# -- AvailableNow ----------------------------------------------------------------------------------------------------


def test_available_now_ends_where_each_gateway_was(two: tuple[Served, Served], new_reader: NewReader) -> None:
    stream = new_reader()
    for one in two:
        one.add(20)
    stream.prepareForTriggerAvailableNow()
    for one in two:
        one.add(20)
    at = stream.initialOffset()
    places = [at]
    while (end := stream.latestOffset(places[-1], ReadMaxRows(16))) is not places[-1]:
        places.append(end)
    assert ends(places[-1]) == {"g1": 20, "g2": 20}
    assert [sum(ends(place).values()) for place in places] == [0, 16, 32, 40]
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
        monkeypatch.setattr(gateways.SourceGateways.lease_of, "__defaults__", (0.2,))
        with pytest.raises(GatewayUnreachable, match="TL-G01"):
            stream.latestOffset(at, ALL)
        with served(tmp_path / "g2", name="g2"):
            assert ends(until(stream, at, lambda place: ends(place)["g2"] == 5)) == {"g1": 0, "g2": 5}


# -- the list --------------------------------------------------------------------------------------------------------


def test_two_gateways_of_one_name_are_refused(tmp_path: Path, new_reader: NewReader) -> None:
    with served(tmp_path / "g1", name="plant"), served(tmp_path / "g2", name="plant"):
        with pytest.raises(ConfigError) as caught:
            new_reader().initialOffset()
        assert 'have the same name "plant"' in str(caught.value)
        assert "TL-G50" in str(caught.value)
        with pytest.raises(ConfigError, match="TL-G50"):
            MqttBatchReader(new_reader()._plan).partitions()


def test_one_gateway_under_two_places_is_refused(two: tuple[Served, Served], new_reader: NewReader) -> None:
    stream = new_reader()
    stream._plan = replace(stream._plan, gateways=(str(two[0].state_dir), two[0].location))
    with pytest.raises(ConfigError, match=r"have the same name|serve one journal.*TL-G50"):
        stream.initialOffset()


def test_a_checkpoint_of_one_gateway_goes_on(tmp_path: Path, two: tuple[Served, Served], new_reader: NewReader) -> None:
    single = MqttStreamReader(ReadPlan(GatewayPlace(str(tmp_path / "g1"), ""), "default", poll_s=0.05))
    two[0].add(3)
    at = single.latestOffset(single.initialOffset(), ALL)
    assert "at" not in at["gateways"]["g1"]
    single.stop()
    two[0].add(2)
    two[1].add(4)
    stream = new_reader()
    end = until(stream, at, lambda place: ends(place) == {"g1": 5, "g2": 4})
    assert end["gateways"]["g1"]["at"] == str(tmp_path / "g1")


def test_a_gateway_that_moved_is_known_by_its_journal(tmp_path: Path, new_reader: NewReader) -> None:
    with served(tmp_path / "g1", name="g1"), served(tmp_path / "g2", name="g2") as other:
        other.add(3)
        first = new_reader()
        at = first.latestOffset(first.initialOffset(), ALL)
        first.stop()
    (tmp_path / "g2").rename(tmp_path / "g3")
    with served(tmp_path / "g1", name="g1"), served(tmp_path / "g3", name="another name") as other:
        other.add(1)
        end = until(new_reader("g1", "g3"), at, lambda place: ends(place) == {"g1": 0, "g2": 4})
        assert end["gateways"]["g2"]["at"] == str(tmp_path / "g3")


def test_a_foreign_journal_stops_before_anything_is_cut(two: tuple[Served, Served], new_reader: NewReader) -> None:
    stream = new_reader()
    at = stream.initialOffset()
    two[1].add(1)
    at["gateways"]["g2"]["journal"] = "abc"
    for call in (lambda: stream.latestOffset(at, ALL), lambda: seen(stream, at, _moved(at, "g2", 1))):
        with pytest.raises(Fenced, match="TL-G04"):
            call()


def _moved(at: Place, name: str, offset: int) -> Place:
    return {**at, "gateways": {**at["gateways"], name: {**at["gateways"][name], "offset": offset}}}


def test_a_gateway_is_taken_out_when_it_is_empty(two: tuple[Served, Served], new_reader: NewReader) -> None:
    first, (one, other) = new_reader(), two
    for each in two:
        each.add(5)
    at = first.latestOffset(first.initialOffset(), ALL)
    first.stop()
    other.add(2)
    stream = new_reader("g1")
    with pytest.raises(ConfigError) as caught:
        stream.latestOffset(at, ALL)
    assert 'gateway "g2" is no longer in the list, and 2 messages wait at' in str(caught.value)
    assert "TL-G52" in str(caught.value)
    stream.stop()

    both = new_reader()
    at = until(both, at, lambda place: ends(place)["g2"] == 7)
    both.stop()
    stream = new_reader("g1")
    end = until(stream, at, lambda place: "g2" not in place["gateways"])
    assert seen(stream, at, end) == []
    assert other.journal.consumers["default"] == 7
    one.add(1)
    assert ends(until(stream, end, lambda place: ends(place)["g1"] == 6)) == {"g1": 6}
    assert other.service._leases.readers() == {}


def test_a_gateway_that_can_not_be_asked_goes_only_when_told(
    tmp_path: Path, new_reader: NewReader, caplog: pytest.LogCaptureFixture
) -> None:
    with served(tmp_path / "g1", name="g1"):
        with served(tmp_path / "g2", name="g2"):
            first = new_reader()
            at = first.latestOffset(first.initialOffset(), ALL)
            first.stop()
        with pytest.raises(ConfigError, match=r"not known: .*g2 does not answer.*removedGateways=g2.*TL-G51"):
            new_reader("g1").latestOffset(at, ALL)
        with caplog.at_level(logging.WARNING):
            end = new_reader("g1", removed=("g2",)).latestOffset(at, ALL)
        assert list(end["gateways"]) == ["g1"]
        assert "gateway g2 leaves the checkpoint unasked" in caplog.text


def test_a_batch_that_was_begun_is_served_by_a_gateway_that_was_taken_out(
    two: tuple[Served, Served], new_reader: NewReader
) -> None:
    first = new_reader()
    two[1].add(3)
    at = first.initialOffset()
    end = first.latestOffset(at, ALL)
    first.stop()
    stream = new_reader("g1")
    assert seen(stream, at, end) == [("g2", 0), ("g2", 1), ("g2", 2)]
    assert list(until(stream, end, lambda place: "g2" not in place["gateways"])["gateways"]) == ["g1"]


# -- batch reads -----------------------------------------------------------------------------------------------------


def test_a_batch_read_has_all_of_both(two: tuple[Served, Served], new_reader: NewReader) -> None:
    two[0].add(10)
    two[1].add(4)
    plan = replace(new_reader()._plan, starting={"g1": 7}, ending={"g2": 3}, min_partitions=2)
    made = MqttBatchReader(plan)
    rows = [offset for part in made.partitions() for batch in made.read(part) for offset in batch["offset"].to_pylist()]
    assert rows == [7, 8, 9, 0, 1, 2]
    assert two[0].journal.consumers == {}


def test_a_batch_read_needs_each_gateway(tmp_path: Path, new_reader: NewReader) -> None:
    with served(tmp_path / "g1", name="g1"), pytest.raises(GatewayUnreachable, match="TL-G01"):
        MqttBatchReader(new_reader()._plan).partitions()


def test_an_idle_query_ticks(
    two: tuple[Served, Served], new_reader: NewReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = new_reader()
    two[0].add(1)
    at = stream.latestOffset(stream.initialOffset(), ALL)
    monkeypatch.setattr(reader, "TICK_S", 0.02)
    ticked = wait_until(lambda: (found := stream.latestOffset(at, ALL)) is not at and found)
    assert ticked == {**at, "tick": 1}
    (part,) = stream.partitions(at, ticked)
    assert list(stream.read(part)) == []
