"""A gateway on a network, as Spark's driver and workers meet it: the token stays on the driver."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark import cloudpickle
from pyspark.sql.types import StringType, StructField, StructType

from tests.unit.gateway.remote import TOKEN, Remote, remote
from tests.unit.gateway.serving import rows
from tests.unit.spark.reading import ALL
from towline.errors import ConfigError, GatewayError, GatewayUnreachable
from towline.gateway.access import KEY_FILE, ClientAccess
from towline.gateway.client import GatewayClient
from towline.sinks import Task
from towline.spark.link import GatewayAddress, ReadPlan
from towline.spark.options import parse_options, parse_sink_options
from towline.spark.reader import MqttBatchReader, MqttStreamReader, Slice
from towline.spark.sink import MqttStreamWriter, batch_writer, stream_writer
from towline.spark.source import MqttDataSource

SCHEMA = StructType([StructField("topic", StringType()), StructField("payload", StringType())])


@pytest.fixture
def far(tmp_path: Path) -> Iterator[Remote]:
    with remote(tmp_path, outbox=True) as running:
        yield running


def options(far: Remote, **more: str) -> dict[str, str]:
    files = far.pki.access()
    return {
        "gateway": far.location,
        "gatewayTokenFile": files.token_file,
        "gatewayCaFile": files.ca_file,
        **more,
    }


@pytest.fixture
def plan(far: Remote) -> ReadPlan:
    source = MqttDataSource(options(far))
    source.schema()
    return replace(source._plan, poll_s=0.05)


def secrets(far: Remote) -> list[bytes]:
    key = (far.pki.directory / "server.key").read_bytes().splitlines()[1]
    return [TOKEN.encode(), (far.server.state_dir / KEY_FILE).read_bytes(), key]


def as_a_worker_gets_it(far: Remote, *values: Any) -> list[Any]:
    """The pickles, read again where the files of the driver are not; none of them has a secret in it."""
    texts = [cloudpickle.dumps(value) for value in values]  # type: ignore[no-untyped-call]
    for secret in secrets(far):
        assert not any(secret in text for text in texts)
    return [pickle.loads(text) for text in texts]  # noqa: S301 - our own


def away(far: Remote) -> None:
    """The driver's files are not on this machine any more."""
    far.pki.directory.rename(far.pki.directory.with_name("driver's alone"))


def test_a_worker_reads_its_slice_without_a_file(far: Remote, plan: ReadPlan) -> None:
    far.server.add(30)
    stream = MqttStreamReader(plan)
    start = stream.initialOffset()
    end = stream.latestOffset(start, ALL)
    # The planner makes a reader of its own and pickles that.
    reader, part = as_a_worker_gets_it(far, MqttStreamReader(plan), stream.partitions(start, end)[0])
    stream.stop()
    away(far)
    assert pa.Table.from_batches(reader.read(part)).equals(pa.Table.from_batches([rows(0, 30)]))
    assert pa.Table.from_batches(reader.read(part)).num_rows == 30  # and again


def test_a_batch_query_reads_as_well(far: Remote, plan: ReadPlan) -> None:
    far.server.add(30)
    made = MqttBatchReader(replace(plan, start_offset=10))
    reader, part = as_a_worker_gets_it(far, made, made.partitions()[0])
    away(far)
    assert pa.Table.from_batches(reader.read(part)).num_rows == 20


def test_a_slice_that_was_stretched_is_refused(far: Remote, plan: ReadPlan) -> None:
    """What a task could change in its partition."""
    far.server.add(30)
    stream = MqttStreamReader(replace(plan, max_rows=10))
    start = stream.initialOffset()
    end = stream.latestOffset(start, stream.getDefaultReadLimit())
    (part,) = stream.partitions(start, end)
    assert isinstance(part, Slice)
    assert (part.start, part.end) == (0, 10)
    part = replace(part, end=20)
    with pytest.raises(GatewayError, match="TL-G43"):
        list(stream.read(part))
    stream.stop()


def test_an_expired_ticket_is_told_without_showing_it(far: Remote, plan: ReadPlan) -> None:
    far.server.add(5)
    stream = MqttStreamReader(plan)
    start = stream.initialOffset()
    (part,) = stream.partitions(start, stream.latestOffset(start, ALL))
    assert isinstance(part, Slice)
    far.server.service.tickets._clock = lambda: 1e11
    with pytest.raises(GatewayError, match="TL-G42") as refused:
        list(stream.read(part))
    assert part.address.ticket not in str(refused.value)
    stream.stop()


def test_a_ticket_is_worth_as_long_as_the_option_says(far: Remote) -> None:
    far.server.add(1)
    source = MqttDataSource(options(far, gatewayTicketValidity="7200"))
    (part,) = MqttBatchReader(source._plan).partitions()
    assert isinstance(part, Slice)
    tickets = far.server.service.tickets
    assert 7100 < tickets.verify(part.address.ticket).expires - tickets._clock() < 7210


# -- the sink ----------------------------------------------------------------------------------------------------------


def checkpoint(directory: Path, query: str) -> str:
    directory.mkdir()
    (directory / "metadata").write_text(json.dumps({"id": query}))
    return str(directory)


@pytest.mark.parametrize("uri", [str, "file:{}".format, "file://{}".format])
def test_a_task_brings_its_rows_without_a_file(far: Remote, tmp_path: Path, uri: Callable[[str], str]) -> None:
    location = checkpoint(tmp_path / "ck", "query-1")
    given = options(far, checkpointLocation=uri(location), retryStrategy="never")
    (writer,) = as_a_worker_gets_it(far, stream_writer(given, SCHEMA))
    away(far)
    batch = pa.record_batch({"topic": ["t"] * 10, "payload": [str(number) for number in range(10)]})
    assert writer.store_batch("query-1", 3, 0, iter([batch])).rows == 10
    assert writer.store_batch("query-1", 3, 0, iter([batch])).already
    for other in ("query-2", "job-1"):
        with pytest.raises(GatewayError, match="TL-G43"):
            writer.store_batch(other, 3, 0, iter([batch]))


def test_a_batch_query_brings_its_rows_as_well(far: Remote) -> None:
    driver = batch_writer(options(far, retryStrategy="never"), SCHEMA, overwrite=False)
    (writer,) = as_a_worker_gets_it(far, driver)
    batch = pa.record_batch({"topic": ["t"], "payload": ["x"]})
    assert writer.store_batch(writer.name_prefix, 0, 0, iter([batch])).rows == 1
    driver.commit([])  # on the driver, with the token
    with pytest.raises(Exception, match="TL-J17"):
        writer.store_batch(writer.name_prefix, 0, 0, iter([batch]))


@pytest.mark.parametrize("again", ["s3a://Bucket/a//ck/", "S3A://bucket/a/ck"])
def test_a_ticket_is_for_the_checkpoint_where_that_is_no_path(
    far: Remote, monkeypatch: pytest.MonkeyPatch, again: str
) -> None:
    """Whoever has it brings batches of that query alone, and they come once, however the place is written."""
    task = Task(3, 0, 0, "query-1", None)
    monkeypatch.setattr(MqttStreamWriter, "_task", lambda _: task)
    batch = pa.record_batch({"topic": ["t"] * 10, "payload": [str(number) for number in range(10)]})
    given = options(far, retryStrategy="never")
    (writer,) = as_a_worker_gets_it(far, stream_writer({**given, "checkpointLocation": "s3a://bucket/a/ck"}, SCHEMA))
    assert not writer.write(iter([batch])).already_stored
    assert stream_writer({**given, "checkpointLocation": again}, SCHEMA).write(iter([batch])).already_stored
    other = stream_writer({**given, "checkpointLocation": "s3a://bucket/a/other"}, SCHEMA)
    assert not other.write(iter([batch])).already_stored
    assert isinstance(other, MqttStreamWriter)
    for name in (f"{writer.name_prefix}query-1", "query-1"):
        with pytest.raises(GatewayError, match="TL-G43"):
            other.store_batch(name, 3, 0, iter([batch]))


def test_a_query_whose_id_is_not_known_gets_no_ticket(far: Remote, tmp_path: Path) -> None:
    with pytest.raises(GatewayError, match=r"the checkpoint .* can't be read on the driver.*TL-G48"):
        stream_writer(options(far, checkpointLocation=str(tmp_path / "none")), SCHEMA)


def test_a_gateway_that_is_being_started_again_is_waited_for(
    far: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[str] = []
    real = GatewayClient.request_write_ticket

    def at_the_third(client: GatewayClient, writer: str, **more: float) -> str:
        tries.append(writer)
        if len(tries) < 3:
            raise GatewayUnreachable("TL-G01", "x", "no gateway answers")
        return real(client, writer, **more)

    monkeypatch.setattr(GatewayClient, "request_write_ticket", at_the_third)
    stream_writer(options(far, checkpointLocation=checkpoint(tmp_path / "ck", "q")), SCHEMA)
    assert tries == ["q", "q", "q"]


# -- options -----------------------------------------------------------------------------------------------------------

PLACE = {"gateway": "grpc+tls://g1:8815", "gatewayTokenFile": "/t"}


def test_the_options_become_the_access() -> None:
    files = {"gatewayCaFile": "/ca", "gatewayServerName": "g"}
    for parsed in (parse_options({**PLACE, **files}), parse_sink_options({**PLACE, **files})):
        access = ClientAccess("/t", "/ca", "g")
        assert parsed.address == GatewayAddress("grpc+tls://g1:8815", "", access, 3600.0)


@pytest.mark.parametrize("parse", [parse_options, parse_sink_options])
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"gateway": "grpc+tls://g1:8815"}, r'"gatewayTokenFile" is missing.*TL-C20'),
        ({**PLACE, "gatewayTicketValidity": "5"}, r"must be at least 60.*TL-C21"),
        ({"gateway": "/state", "gatewayTokenFile": "/t"}, r"this one is on this machine.*TL-C23"),
        ({**PLACE, "gateway": "grpc+tcp://g1:8815"}, r"There is none without TLS.*TL-C21"),
        ({**PLACE, "gatewayToken": "hush-hush-hush-hush"}, r'unknown option "gatewayToken". Did you mean.*TL-C01'),
    ],
)
def test_what_does_not_go_together(parse: Any, given: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        parse(given)
    assert "hush" not in str(refused.value)
