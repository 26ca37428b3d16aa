"""A gateway that is drained tells the stream, which does without it, and goes on there if it takes part again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import wait_until
from tests.unit.gateway.serving import Served, served
from tests.unit.spark.reading import ALL
from tests.unit.spark.several import NewReader, Place, ends, new_reader, quick, seen, two, until
from towline.errors import ConfigError, GatewayError
from towline.gateway import service
from towline.gateway.client import GatewayClient, Window
from towline.spark.reader import MqttStreamReader

__all__ = ["new_reader", "quick", "two"]


def is_drained(place: Place) -> bool:
    return bool(place["gateways"]["g2"].get("drained", False))


def carried(stream: MqttStreamReader, one: Served, count: int) -> Place:
    """Until so many rows of g2 are read and committed."""
    at = until(stream, stream.initialOffset(), lambda place: ends(place).get("g2") == count)
    wait_until(lambda: stream.latestOffset(at, ALL) and one.journal.consumers["default"] == count)
    return at


def drained(stream: MqttStreamReader, one: Served, count: int) -> Place:
    """Until the checkpoint has that g2 is drained, and g2 knows it."""
    at = carried(stream, one, count)
    wait_until(one.service.unheard)
    one.drain()
    end = until(stream, at, is_drained)
    assert end == {**at, "gateways": {**at["gateways"], "g2": {**at["gateways"]["g2"], "drained": True}}}
    assert one.service.unheard(), "that it stands in the commit log is only known with the next call"
    assert seen(stream, at, end) == []
    wait_until(lambda: stream.latestOffset(end, ALL) is end and not one.service.unheard())
    return end


@pytest.fixture
def left(tmp_path: Path, new_reader: NewReader) -> Place:
    """Where a stream stands that g2 has left after five rows."""
    with served(tmp_path / "g1", name="g1"), served(tmp_path / "g2", name="g2") as other:
        other.add(5)
        stream = new_reader()
        at = drained(stream, other, 5)
        stream.stop()
    return at


def test_one_that_is_drained_is_not_waited_for_nor_away(
    tmp_path: Path, new_reader: NewReader, caplog: pytest.LogCaptureFixture
) -> None:
    with served(tmp_path / "g1", name="g1") as one:
        stream = new_reader()
        with served(tmp_path / "g2", name="g2") as other:
            other.add(5)
            at = drained(stream, other, 5)
        (told,) = [line.getMessage() for line in caplog.records if "TL-G60" in line.getMessage()]
        assert told.startswith("gateway g2 is drained: all that it held is committed. It is not waited for any more")
        caplog.clear()
        one.add(3)
        at = until(stream, at, lambda place: ends(place) == {"g1": 3, "g2": 5})
        report = stream.reportLatestOffset()
        assert report is not None
        assert (report["away"], report["gateways"]["g2"]["drained"]) == ([], True)
        assert "last_error" not in report
        stream.stop()
        again = new_reader()  # the list as it was
        one.add(1)
        at = until(again, at, lambda place: ends(place) == {"g1": 4, "g2": 5})
        again.prepareForTriggerAvailableNow()
        assert again.latestOffset(at, ALL) is at
        assert caplog.text == ""


def test_it_may_be_taken_out_of_the_list_unasked(tmp_path: Path, new_reader: NewReader, left: Place) -> None:
    with served(tmp_path / "g1", name="g1"):
        assert list(new_reader("g1").latestOffset(left, ALL)["gateways"]) == ["g1"]


def test_taken_out_of_the_list_it_is_asked_all_the_same_where_it_answers(
    tmp_path: Path, new_reader: NewReader, left: Place
) -> None:
    """It may have taken part again meanwhile."""
    with served(tmp_path / "g1", name="g1"), served(tmp_path / "g2", name="g2") as other:
        other.add(1)
        with pytest.raises(ConfigError, match=r"1 messages wait at .*TL-G52"):
            new_reader("g1").latestOffset(left, ALL)


def test_one_that_takes_part_again_goes_on_where_it_stands(
    tmp_path: Path, new_reader: NewReader, left: Place, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever the query was told about beginnings: its place was never forgotten."""
    with served(tmp_path / "g1", name="g1"), served(tmp_path / "g2", name="g2") as other:
        other.add(2)
        stream = new_reader(starting="earliest")
        end = until(stream, left, lambda place: ends(place)["g2"] == 7)
        assert seen(stream, left, end) == [("g2", 5), ("g2", 6)]
        assert not is_drained(end)
        assert "gateway g2 takes part again, from offset 5 on" in caplog.text


def test_a_drain_that_is_taken_back_is_heard(two: tuple[Served, Served], new_reader: NewReader) -> None:
    stream, other = new_reader(poll_s=20.0), two[1]
    other.add(5)
    at = drained(new_reader(), other, 5)
    assert is_drained(at)
    other.drain(begin=False)
    at = until(stream, at, lambda place: not is_drained(place))
    other.add(1)
    assert ends(until(stream, at, lambda place: ends(place)["g2"] == 6)) == {"g1": 0, "g2": 6}


def test_one_that_was_killed_in_its_drain_goes_on_with_it_unseen(
    tmp_path: Path, new_reader: NewReader, left: Place, caplog: pytest.LogCaptureFixture
) -> None:
    """It looks first whether the broker has something for it: that is no taking part, and the mark stays."""
    with served(tmp_path / "g1", name="g1"), served(tmp_path / "g2", name="g2") as other:
        other.drained = False
        assert other.service.unheard(), "a reader that knew of it has yet to come back"
        stream = new_reader()
        wait_until(lambda: stream.latestOffset(left, ALL) is left and not other.service.unheard())
        other.drain()
        assert stream.latestOffset(left, ALL) is left
        assert not other.service.unheard()
    assert "takes part again" not in caplog.text


def test_who_was_told_that_it_takes_part_is_told_of_the_next_drain(two: tuple[Served, Served]) -> None:
    """Though what it said last is that it knows: the answer ended that."""
    other = two[1]
    other.drain()
    with GatewayClient(other.location) as client:
        lease = client.open("default", patience_s=1)

        def wait(*, knows: bool) -> bool:
            return client.wait(lease, 0, timeout_s=0, sized=True, drained=knows).drained

        assert wait(knows=True)
        assert not other.service.unheard()
        other.drain(begin=False)
        assert not wait(knows=True)
        other.drain()
        assert other.service.unheard()
        assert wait(knows=True), "its checkpoint has not got there"
        assert not other.service.unheard()


def test_rows_behind_the_end_end_the_mark(two: tuple[Served, Served], new_reader: NewReader) -> None:
    """A broker that sends what it had begun to send, although the filters are gone."""
    stream, other = new_reader(), two[1]
    other.add(5)
    at = drained(stream, other, 5)
    other.add(1)
    end = until(stream, at, lambda place: ends(place)["g2"] == 6)
    assert not is_drained(end)
    at = until(stream, end, is_drained)
    assert ends(at) == {"g1": 0, "g2": 6}


@pytest.mark.parametrize(
    "change",
    [lambda one: replace(one, tip=one.tip + 1), lambda one: replace(one, journal="other")],
    ids=["with more behind it", "of another journal"],
)
def test_an_answer_that_contradicts_itself_is_no_end(
    two: tuple[Served, Served],
    new_reader: NewReader,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Window], Window],
) -> None:
    stream = new_reader()
    two[1].add(5)
    at = carried(stream, two[1], 5)
    whole = GatewayClient.wait
    forged: list[Window] = []

    def forge(*args: Any, **more: Any) -> Window:
        forged.append(change(replace(whole(*args, **more), drained=True)))
        return forged[-1]

    monkeypatch.setattr(GatewayClient, "wait", forge)
    assert not is_drained(until(stream, at, lambda place: is_drained(place) or len(forged) > 5))


def test_an_older_copy_that_says_that_it_is_drained_is_found_out(tmp_path: Path, new_reader: NewReader) -> None:
    """It was drained, took part again, and its directory was then put back."""
    with served(tmp_path / "g1", name="g1"):
        stream = new_reader()
        with served(tmp_path / "g2", name="g2") as other:
            other.add(5)
            drained(stream, other, 5)
        stream.stop()
        shutil.copytree(tmp_path / "g2", tmp_path / "copy")
        stream = new_reader()
        with served(tmp_path / "g2", name="g2") as other:
            other.add(2)
            at = carried(stream, other, 7)
        stream.stop()
        shutil.rmtree(tmp_path / "g2")
        (tmp_path / "copy").rename(tmp_path / "g2")
        with served(tmp_path / "g2", name="g2") as other:
            other.drain()
            with pytest.raises(GatewayError, match="TL-G06"):
                until(new_reader(), at, lambda _: False)


def test_a_reader_of_one_gateway_keeps_no_drain_waiting(two: tuple[Served, Served], new_reader: NewReader) -> None:
    stream, other = new_reader(), two[1]
    stream._plan = replace(stream._plan, gateways=(), place=replace(stream._plan.place, state_dir=str(other.state_dir)))
    other.add(5)
    at = stream.latestOffset(stream.initialOffset(), ALL)
    assert not other.service.unheard()
    other.drain()
    assert stream.latestOffset(at, ALL) is at
    assert "drained" not in json.dumps(at)


def test_a_reader_that_has_ended_keeps_no_drain_waiting(two: tuple[Served, Served], new_reader: NewReader) -> None:
    stream = new_reader()
    stream.latestOffset(stream.initialOffset(), ALL)
    wait_until(two[1].service.unheard)
    stream.stop()
    assert not two[1].service.unheard()


def test_a_reader_that_was_there_before_is_waited_for_a_while_after_a_start(
    tmp_path: Path, new_reader: NewReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drain that goes on after a kill would else be over before its reader has connected again."""
    stream = new_reader()
    with served(tmp_path / "g1", name="g1"), served(tmp_path / "g2", name="g2") as other:
        at = stream.latestOffset(stream.initialOffset(), ALL)
        wait_until(other.service.unheard)
        stream.stop()
        assert not other.service.unheard()
        other.close()
        with served(tmp_path / "g2", name="g2") as again:
            again.drain()
            assert again.service.unheard()
            stream = new_reader()
            end = until(stream, at, is_drained)
            assert again.service.unheard()
            wait_until(lambda: stream.latestOffset(end, ALL) is end and not again.service.unheard())
        with served(tmp_path / "g2", name="g2") as late:
            assert late.service.unheard()
            monkeypatch.setattr(service, "_RETURN_S", 0.0)
            assert not late.service.unheard()
