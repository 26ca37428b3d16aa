"""Gateways that a stream may not read: who refuses holds back its own rows, who is another one stops all."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.helpers import wait_until
from tests.unit.gateway.remote import TOKEN, Pki, Remote, remote
from tests.unit.gateway.serving import Served, served
from tests.unit.spark.reading import ALL
from tests.unit.spark.several import NewReader, ends, new_reader, quick, seen, until
from towline.errors import ConfigError, GatewayError, GatewayUnreachable, ReaderFenced
from towline.gateway.access import ClientAccess
from towline.spark import gateways
from towline.spark.link import GatewayAddress, ReadPlan
from towline.spark.reader import MqttStreamReader, Slice

__all__ = ["new_reader", "quick"]

OTHER = "0123456789abcdef-another-token"


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateways, "GATEWAY_TIMEOUT_S", 3.0)


@pytest.fixture
def near(tmp_path: Path) -> Iterator[Served]:
    with served(tmp_path / "near", name="near") as running:
        yield running


@pytest.fixture
def far(tmp_path: Path) -> Iterator[Remote]:
    with remote(tmp_path / "far", name="far") as running:
        yield running


class Readers:
    """Streams over gateways of this machine and of a network; ``access.ca_file`` is a file of their own."""

    def __init__(self, directory: Path) -> None:
        self.authority, self.token = directory / "trusted.pem", directory / "shown"
        self.token.write_text(TOKEN)
        self.access = ClientAccess(str(self.token), str(self.authority))
        self._made: list[MqttStreamReader] = []

    def of(self, *places: str) -> MqttStreamReader:
        plan = ReadPlan(GatewayAddress("", access=self.access), "default", poll_s=0.05, gateways=places)
        self._made.append(MqttStreamReader(plan))
        return self._made[-1]

    def trust(self, *pkis: Pki) -> None:
        self.authority.write_text("".join(one.authority_text for one in pkis))

    def close(self) -> None:
        for one in self._made:
            one.stop()


@pytest.fixture
def readers(tmp_path: Path) -> Iterator[Readers]:
    made = Readers(tmp_path)
    yield made
    made.close()


def test_a_refused_token_holds_back_the_rows_of_that_gateway_only(
    near: Served, far: Remote, readers: Readers, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers.trust(far.pki)
    stream = readers.of(str(near.state_dir), far.location)
    near.add(3)
    far.server.add(2)
    at = until(stream, stream.initialOffset(), lambda place: ends(place) == {"near": 3, "far": 2})
    wait_until(lambda: stream.latestOffset(at, ALL) and far.server.journal.committed == 2)
    far.pki.tokens(OTHER)
    monkeypatch.setattr(gateways, "_REFUSED_LOG_S", 0.2)
    far.server.add(4)
    for number in range(4, 8):
        near.add(1)
        at = until(stream, at, lambda place, wanted=number: ends(place) == {"near": wanted, "far": 2})  # type: ignore[misc]
    at = until(stream, at, lambda _: caplog.text.count("gateway far") >= 3)
    report = stream.reportLatestOffset()
    assert report is not None
    assert (report["away"], report["gateways"]["far"]["refused"]) == (["far"], True)
    assert "refused" not in report["gateways"]["near"]
    told = next(one.getMessage() for one in caplog.records if one.name == "towline.spark")
    assert told == (
        f"gateway far ({far.location}) refuses this query: the token is missing or unknown to this gateway; its "
        "messages wait there, other gateways go on. gatewayTokenFile has to hold a line of the file that the gateway's "
        "token_file names.   [TL-G40]"
    )
    assert not {TOKEN, OTHER} & set(caplog.text.split())
    assert far.server.journal.committed == 2, "nothing is committed there meanwhile"
    far.pki.tokens(OTHER, TOKEN)
    end = until(stream, at, lambda place: ends(place) == {"near": 7, "far": 6})
    assert seen(stream, at, end)[-4:] == [("far", n) for n in range(2, 6)]
    assert "gateway far (" in caplog.records[-1].getMessage()
    assert "is available again" in caplog.records[-1].getMessage()


def test_a_certificate_that_does_not_verify_holds_back_that_gateway_only(
    near: Served, far: Remote, readers: Readers, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """The authority that signed it is trusted later: the stream takes the file as it is then."""
    readers.trust(Pki.made(tmp_path / "another authority"))
    stream = readers.of(str(near.state_dir), far.location)
    near.add(3)
    far.server.add(2)
    at = until(stream, stream.initialOffset(), lambda place: ends(place) == {"near": 3})
    at = until(stream, at, lambda _: "TL-G44" in caplog.text)
    report = stream.reportLatestOffset()
    assert report is not None
    assert report["away"] == [far.location]
    assert "gatewayCaFile names the authority" in report["gateways"][far.location]["last_error"]
    readers.trust(far.pki)
    assert ends(until(stream, at, lambda place: ends(place).get("far") == 2)) == {"near": 3, "far": 2}


def test_a_query_that_no_gateway_lets_in_says_so_and_ends(far: Remote, readers: Readers, tmp_path: Path) -> None:
    with remote(tmp_path / "third", name="third") as third:
        readers.trust(far.pki, third.pki)
        both = (far.location, third.location)
        stream = readers.of(*both)
        at = until(stream, stream.initialOffset(), lambda place: len(ends(place)) == 2)
        readers.token.write_text(OTHER)
        what = (
            r"all gateways of the list refuse this query \(far .*: the token is missing or unknown to this gateway; "
            r"third .*: the token .*\)\. gatewayTokenFile has to hold .*TL-G40"
        )
        with pytest.raises(GatewayError, match=what):
            until(stream, at, lambda _: False)
        with pytest.raises(GatewayError, match=r"all gateways of the list refuse this query.*TL-G40"):
            readers.of(*both).initialOffset()
        readers.token.unlink()
        with pytest.raises(GatewayError, match=r"shown can't be read.*TL-G46"):
            readers.of(*both).initialOffset()


def test_one_that_refuses_is_needed_for_a_batch_that_was_begun_and_to_be_taken_out(
    near: Served, far: Remote, readers: Readers
) -> None:
    readers.trust(far.pki)
    first = readers.of(str(near.state_dir), far.location)
    far.server.add(2)
    at = first.initialOffset()
    assert ends(at) == {"near": 0, "far": 0}
    end = until(first, at, lambda place: ends(place)["far"] == 2)
    first.stop()
    far.pki.tokens(OTHER)
    again = readers.of(str(near.state_dir), far.location)
    with pytest.raises(GatewayUnreachable, match=r"messages 0 to 1\. .* gatewayTokenFile has to hold .*TL-G53"):
        again.partitions(at, end)
    with pytest.raises(ConfigError, match=r"refuses this query \(the token .*removedGateways=far.*TL-G51"):
        readers.of(str(near.state_dir)).latestOffset(end, ALL)


def test_a_token_changed_between_the_plan_and_its_tickets_is_named(near: Served, far: Remote, readers: Readers) -> None:
    """The batch was planned with the old token; its slices are signed with the new one, or not at all."""
    readers.trust(far.pki)
    stream = readers.of(str(near.state_dir), far.location)
    at = stream.initialOffset()
    far.server.add(2)
    end = until(stream, at, lambda place: ends(place)["far"] == 2)
    far.pki.tokens(OTHER)
    with pytest.raises(GatewayUnreachable, match=r"messages 0 to 1\. .* gatewayTokenFile has to hold .*TL-G53"):
        stream.partitions(at, end)
    readers.token.write_text(OTHER)
    assert [(p.start, p.end) for p in stream.partitions(at, end) if isinstance(p, Slice)] == [(0, 2)]


def test_the_one_gateway_of_a_source_refuses_at_once(far: Remote, readers: Readers) -> None:
    far.pki.tokens(OTHER)
    readers.trust(far.pki)
    stream = readers.of(far.location)
    stream._plan = replace(stream._plan, gateways=(), address=replace(stream._plan.address, location=far.location))
    with pytest.raises(GatewayError, match=r"the token is missing.*TL-G40"):
        stream.initialOffset()


@pytest.mark.parametrize(("goes_on", "code"), [(False, "TL-G06"), (True, "TL-G26")])
def test_an_older_copy_stops_the_query_before_anything_is_committed_there(
    near: Served, tmp_path: Path, new_reader: NewReader, goes_on: bool, code: str
) -> None:
    """Also one that comes back while the query runs: another identity is not an absence."""
    stream = new_reader("near", "g2")
    with served(tmp_path / "g2", name="g2") as other:
        other.add(3)
        at = until(stream, stream.initialOffset(), lambda place: ends(place).get("g2") == 3)
    shutil.copytree(tmp_path / "g2", tmp_path / "copy")
    with served(tmp_path / "g2", name="g2") as other:
        other.add(4)
        at = until(stream, at, lambda place: ends(place).get("g2") == 7)
    shutil.rmtree(tmp_path / "g2")
    (tmp_path / "copy").rename(tmp_path / "g2")
    with served(tmp_path / "g2", name="g2") as other:
        if goes_on:
            other.add(9)
        near.add(1)
        before = dict(other.journal.consumers)
        with pytest.raises((GatewayError, ReaderFenced), match=code):
            until(stream, at, lambda _: False)
        assert dict(other.journal.consumers) == before


def test_a_stranger_at_the_place_of_a_gateway_stops_the_query(
    near: Served, tmp_path: Path, new_reader: NewReader
) -> None:
    """Whatever its name is: the place in the checkpoint is of a gateway that is there no more."""
    stream = new_reader("near", "g2")
    with served(tmp_path / "g2", name="g2") as other:
        other.add(3)
        at = until(stream, stream.initialOffset(), lambda place: ends(place).get("g2") == 3)
    shutil.rmtree(tmp_path / "g2")
    with served(tmp_path / "g2", name="stranger") as other:
        other.add(9)
        with pytest.raises(ReaderFenced, match="TL-G04"):
            until(stream, at, lambda _: False)
        assert other.journal.committed == 0
        assert near.journal.committed == 0
