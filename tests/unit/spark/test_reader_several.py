"""Readers over several gateways: each a real service on a real journal, that goes and comes."""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadMaxRows

from tests.unit.gateway.remote import TOKEN, remote
from tests.unit.gateway.serving import Served, served
from tests.unit.spark.reading import ALL, NewReader, ends, seen, until
from towline.errors import ConfigError, GatewayError, GatewayUnreachable, ReaderFenced
from towline.gateway.access import ClientAccess
from towline.spark import gateways
from towline.spark.gateways import SourceGateway
from towline.spark.link import GatewayAddress
from towline.spark.reader import MqttBatchReader

pytestmark = pytest.mark.usefixtures("quick")

# -- one batch of both -----------------------------------------------------------------------------------------------


def test_any_gateway_wakes_the_reader(two: tuple[Served, Served], new_reader: NewReader) -> None:
    stream = new_reader(poll_ms=30000)
    at = stream.latestOffset(stream.initialOffset(), ALL)
    for one in two:
        before = ends(at)[one.name]
        timer = threading.Timer(0.1, one.add, (1,))
        timer.start()
        began = time.monotonic()
        at = until(stream, at, lambda place, one=one, before=before: ends(place)[one.name] == before + 1)  # type: ignore[misc]
        assert time.monotonic() - began < 10


def slow_down(monkeypatch: pytest.MonkeyPatch, pause: Callable[[], object]) -> None:
    """Let each call of g2 take longer."""
    call = SourceGateway._call

    def slowly(self: SourceGateway, do: Callable[[Any], Any]) -> Any:
        if self.address.location.endswith("g2"):
            pause()
        return call(self, do)

    monkeypatch.setattr(SourceGateway, "_call", slowly)


def far_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the answers of g2 take longer than a poll of a gateway without rows is waited for."""
    monkeypatch.setattr(gateways, "POLL_GRACE_S", 0.05)
    slow_down(monkeypatch, lambda: time.sleep(0.12))


def test_a_gateway_that_is_far_away_has_its_share(
    two: tuple[Served, Served], new_reader: NewReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answer takes longer than that of a gateway without rows may take."""
    far_away(monkeypatch)
    monkeypatch.setattr(gateways, "SLOW_POLL_GRACE_S", 5.0)
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
    far_away(monkeypatch)
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
    monkeypatch.setattr(gateways, "SLOW_POLL_GRACE_S", 20.0)
    hung = threading.Event()
    slow_down(monkeypatch, lambda: hung.wait(30))
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
    hung = threading.Event()
    slow_down(monkeypatch, lambda: hung.wait(30))
    at = stream.latestOffset(at, ReadMaxRows(50))
    began = time.monotonic()
    for limit in range(60, 70):
        at = until(stream, at, lambda place, at=at: ends(place)["g1"] > ends(at)["g1"], ReadMaxRows(limit))  # type: ignore[misc]
    assert time.monotonic() - began < 8, "it is waited for each time"
    assert ends(at)["g2"] == 0
    hung.set()


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


def test_available_now_ends_where_each_gateway_was(two: tuple[Served, Served], new_reader: NewReader) -> None:
    stream = new_reader()
    for one in two:
        one.add(20)
    stream.prepareForTriggerAvailableNow()
    for one in two:
        one.add(20)  # so small that all of them were within a share
    places = [stream.initialOffset()]
    while (end := stream.latestOffset(places[-1], ReadMaxRows(16))) is not places[-1]:
        places.append(end)
    assert [sum(ends(place).values()) for place in places] == [0, 16, 32, 40]
    assert ends(places[-1]) == {"g1": 20, "g2": 20}
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


# -- the list ----------------------------------------------------------------------------------------------------------


def test_two_gateways_of_one_name_are_refused(tmp_path: Path, new_reader: NewReader) -> None:
    with served(tmp_path / "g1", name="plant"), served(tmp_path / "g2", name="plant"):
        with pytest.raises(ConfigError) as caught:
            new_reader().initialOffset()
        assert 'have the same name "plant"' in str(caught.value)
        assert "TL-G50" in str(caught.value)
        with pytest.raises(ConfigError, match="TL-G50"):
            MqttBatchReader(new_reader()._plan).partitions()


def test_a_checkpoint_of_one_gateway_goes_on(tmp_path: Path, two: tuple[Served, Served], new_reader: NewReader) -> None:
    single = new_reader(address=GatewayAddress(str(tmp_path / "g1")), gateways=())
    two[0].add(3)
    at = single.latestOffset(single.initialOffset(), ALL)
    single.stop()
    two[0].add(2)
    two[1].add(4)
    stream = new_reader()
    until(stream, at, lambda place: ends(place) == {"g1": 5, "g2": 4})


def test_a_gateway_that_moved_is_known_by_its_journal(tmp_path: Path, new_reader: NewReader) -> None:
    with served(tmp_path / "g1", name="g1"), served(tmp_path / "g2", name="g2") as other:
        other.add(3)
        first = new_reader()
        at = first.latestOffset(first.initialOffset(), ALL)
        first.stop()
    (tmp_path / "g2").rename(tmp_path / "g3")
    with served(tmp_path / "g1", name="g1"), served(tmp_path / "g3", name="another-name") as other:
        other.add(1)
        until(new_reader("g1", "g3"), at, lambda place: ends(place) == {"g1": 0, "g2": 4})


def test_a_gateway_goes_only_when_it_is_named(
    two: tuple[Served, Served], new_reader: NewReader, caplog: pytest.LogCaptureFixture
) -> None:
    first, (one, other) = new_reader(), two
    at = first.latestOffset(first.initialOffset(), ALL)
    first.stop()
    other.add(2)
    with pytest.raises(ConfigError) as caught:
        new_reader("g1").latestOffset(at, ALL)
    assert "1 of the checkpoint's gateways (g2) left the list, and messages may wait there" in str(caught.value)
    assert "removedGateways=g2" in str(caught.value)
    assert "TL-G51" in str(caught.value)
    stream = new_reader("g1", removed_gateways=("g2",))
    with caplog.at_level(logging.WARNING):
        end = stream.latestOffset(at, ALL)
    assert list(end["gateways"]) == ["g1"]
    assert seen(stream, at, end) == []
    assert "gateway g2 is removed from the checkpoint" in caplog.text
    one.add(1)
    assert ends(until(stream, end, lambda place: ends(place)["g1"] == 1)) == {"g1": 1}
    assert other.service._leases.readers() == {}


def test_a_gateway_that_is_away_is_not_taken_for_a_removed_one(tmp_path: Path, new_reader: NewReader) -> None:
    with served(tmp_path / "g1", name="g1"):
        with served(tmp_path / "g2", name="g2"), served(tmp_path / "g3", name="g3"):
            first = new_reader("g1", "g2", "g3")
            at = until(first, first.initialOffset(), lambda place: len(ends(place)) == 3)
            first.stop()
        stream = new_reader("g1", "g2", removed_gateways=("g3",))
        assert list(ends(until(stream, at, lambda place: "g3" not in ends(place)))) == ["g1", "g2"]
        with pytest.raises(ConfigError, match=r"1 of the checkpoint's gateways \(g2, g3\) left the list.*TL-G51"):
            new_reader("g1", "g2").latestOffset(at, ALL)
        for removed in ((), ("g2",), ("g2", "g3")):  # a name that was left in the options is no reason
            moved = new_reader("g1", "g4", "g5", removed_gateways=removed)  # they may be both, or new ones
            assert ends(moved.latestOffset(at, ALL)) == ends(at)


def test_a_batch_that_was_begun_needs_a_gateway_that_was_taken_out(
    two: tuple[Served, Served], new_reader: NewReader
) -> None:
    first = new_reader()
    two[1].add(3)
    at = first.initialOffset()
    end = first.latestOffset(at, ALL)
    first.stop()
    with pytest.raises(ConfigError, match=r'"g2" left the list, and an interrupted batch needs its messages.*TL-G51'):
        new_reader("g1", removed_gateways=("g2",)).partitions(at, end)
    assert seen(new_reader(), at, end) == [("g2", 0), ("g2", 1), ("g2", 2)]


def test_a_batch_read_has_all_of_both(two: tuple[Served, Served], new_reader: NewReader) -> None:
    two[0].add(10)
    two[1].add(4)
    plan = replace(new_reader()._plan, start_offset={"g1": 7}, end_offset={"g2": 3})
    made = MqttBatchReader(plan)
    rows = [offset for part in made.partitions() for batch in made.read(part) for offset in batch["offset"].to_pylist()]
    assert rows == [7, 8, 9, 0, 1, 2]
    assert two[0].journal.consumers == {}


# -- refusals ----------------------------------------------------------------------------------------------------------

OTHER = "0123456789abcdef-another-token"


def test_one_that_refuses_holds_back_its_rows_and_all_that_refuse_end_the_query(
    two: tuple[Served, Served], tmp_path: Path, new_reader: NewReader, caplog: pytest.LogCaptureFixture
) -> None:
    token = tmp_path / "shown"
    token.write_text(OTHER)
    with remote(tmp_path / "far", name="far") as far:
        address = GatewayAddress("", access=ClientAccess(str(token), far.pki.access().ca_file))
        places = str(two[0].state_dir), far.location
        stream = new_reader(address=address, gateways=places)
        two[0].add(3)
        far.server.add(2)
        at = until(stream, stream.initialOffset(), lambda place: ends(place) == {"g1": 3})
        at = until(stream, at, lambda _: "TL-G40" in caplog.text)
        report = stream.reportLatestOffset()
        assert report is not None
        assert report["gateways"][far.location]["refused"]
        assert [name for name, part in report["gateways"].items() if "away_since" in part] == [far.location]
        assert "gatewayTokenFile has to hold" in report["gateways"][far.location]["last_error"]
        assert not {TOKEN, OTHER} & set(caplog.text.split())
        token.write_text(TOKEN)  # the file is taken as it is then
        at = until(stream, at, lambda place: ends(place).get("far") == 0)
        end = until(stream, at, lambda place: ends(place)["far"] == 2)
        far.pki.tokens(OTHER)
        later = until(stream, end, lambda _: caplog.text.count("refuses this query") == 2)
        token.write_text(OTHER)
        far.server.add(1)
        until(stream, later, lambda place: ends(place)["far"] == 3)
        stream.stop()
        token.write_text(TOKEN)
        with pytest.raises(GatewayUnreachable, match=r"messages 0 to 1\. .* gatewayTokenFile has to hold .*TL-G53"):
            new_reader(address=address, gateways=places).partitions(at, end)
        both = far.location, far.location.replace("127.0.0.1", "localhost")
        what = r"^far: the token is .*TL-G40"
        with pytest.raises(GatewayError, match=what):
            new_reader(address=address, gateways=both).initialOffset()
        alone = replace(address, location=far.location)
        with pytest.raises(GatewayError, match=r"^far: the token is missing .*TL-G40"):
            new_reader(address=alone, gateways=()).initialOffset()
        token.write_text(OTHER)
        running = new_reader(address=address, gateways=both)
        at = until(running, running.initialOffset(), lambda place: ends(place) == {"far": 3})
        far.pki.tokens(TOKEN)
        with pytest.raises(GatewayError, match=what):
            until(running, at, lambda _: False)


def test_a_stranger_at_the_place_of_a_gateway_stops_the_query(
    two: tuple[Served, Served], tmp_path: Path, new_reader: NewReader
) -> None:
    """Whatever its name is: the place in the checkpoint is of a gateway that is there no more."""
    stream = new_reader("g1", "g3")
    with served(tmp_path / "g3", name="g3") as other:
        other.add(3)
        at = until(stream, stream.initialOffset(), lambda place: ends(place).get("g3") == 3)
    shutil.rmtree(tmp_path / "g3")
    with served(tmp_path / "g3", name="stranger") as other:
        other.add(9)
        with pytest.raises(ReaderFenced, match="TL-G04"):
            until(stream, at, lambda _: False)
        assert other.journal.committed == 0
        assert two[0].journal.committed == 0
