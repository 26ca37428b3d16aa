"""The list of gateways of a source: who is in it twice, who leaves, and what a checkpoint knows of them."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.gateway.remote import remote
from tests.unit.gateway.serving import Served, served
from tests.unit.spark.reading import ALL
from tests.unit.spark.several import NewReader, Place, ends, new_reader, quick, seen, two, until
from towline.errors import ConfigError, GatewayUnreachable, ReaderFenced
from towline.spark.link import GatewayAddress, ReadPlan
from towline.spark.reader import MqttBatchReader, MqttStreamReader, Slice
from towline.spark.source import MqttDataSource

__all__ = ["new_reader", "quick", "two"]


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
    single = MqttStreamReader(ReadPlan(GatewayAddress(str(tmp_path / "g1")), "default", poll_s=0.05))
    two[0].add(3)
    at = single.latestOffset(single.initialOffset(), ALL)
    assert at["gateways"]["g1"]["at"] == str(tmp_path / "g1")
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
    with served(tmp_path / "g1", name="g1"), served(tmp_path / "g3", name="another-name") as other:
        other.add(1)
        end = until(new_reader("g1", "g3"), at, lambda place: ends(place) == {"g1": 0, "g2": 4})
        assert end["gateways"]["g2"]["at"] == str(tmp_path / "g3")


def test_a_foreign_journal_stops_before_anything_is_cut(two: tuple[Served, Served], new_reader: NewReader) -> None:
    stream = new_reader()
    at = stream.initialOffset()
    two[1].add(1)
    at["gateways"]["g2"]["journal"] = "abc"
    for call in (lambda: stream.latestOffset(at, ALL), lambda: seen(stream, at, _moved(at, "g2", 1))):
        with pytest.raises(ReaderFenced, match="TL-G04"):
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
        with pytest.raises(ConfigError, match=r"unknown whether .*g2 does not answer.*removedGateways=g2.*TL-G51"):
            new_reader("g1").latestOffset(at, ALL)
        with caplog.at_level(logging.WARNING):
            end = new_reader("g1", removed_gateways=("g2",)).latestOffset(at, ALL)
        assert list(end["gateways"]) == ["g1"]
        assert "gateway g2 is removed from the checkpoint unchecked" in caplog.text


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
    plan = replace(new_reader()._plan, start_offset={"g1": 7}, end_offset={"g2": 3}, min_partitions=2)
    made = MqttBatchReader(plan)
    rows = [offset for part in made.partitions() for batch in made.read(part) for offset in batch["offset"].to_pylist()]
    assert rows == [7, 8, 9, 0, 1, 2]
    assert two[0].journal.consumers == {}


def test_a_batch_read_needs_each_gateway(tmp_path: Path, new_reader: NewReader) -> None:
    with served(tmp_path / "g1", name="g1"), pytest.raises(GatewayUnreachable, match="TL-G01"):
        MqttBatchReader(new_reader()._plan).partitions()


# -- on a network ----------------------------------------------------------------------------------------------------


def test_one_here_and_one_on_a_network(tmp_path: Path) -> None:
    """The workers get a ticket for the one on the network, and need no file of the driver."""
    with served(tmp_path / "g1", name="g1") as one, remote(tmp_path) as far:
        one.add(3)
        far.server.add(4)
        files = far.pki.access()
        source = MqttDataSource(
            {
                "gateways": f"{one.state_dir},{far.location}",
                "gatewayTokenFile": files.token_file,
                "gatewayCaFile": files.ca_file,
                "minPartitions": "4",
            }
        )
        plan = replace(source._plan, poll_s=0.05)
        stream = MqttStreamReader(plan)
        at = stream.initialOffset()
        end = until(stream, at, lambda place: sorted(ends(place).values()) == [3, 4])
        parts = stream.partitions(at, end)
        assert [bool(part.address.ticket) for part in parts if isinstance(part, Slice)] == [False, False, True, True]
        stream.stop()
        far.pki.directory.rename(tmp_path / "the driver's alone")
        worker = MqttStreamReader(plan)
        assert sum(batch.num_rows for part in parts for batch in worker.read(part)) == 7
