"""A gateway on a network, as Spark's driver and workers meet it: the token stays on the driver."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark import cloudpickle
from pyspark.sql.types import StringType, StructField, StructType

from tests.unit.gateway.remote import TOKEN, Remote
from tests.unit.gateway.serving import rows
from towline.errors import GatewayError
from towline.gateway.access import KEY_FILE
from towline.sinks import Task
from towline.spark.reader import MqttStreamReader
from towline.spark.sink import MqttStreamWriter, stream_writer
from towline.spark.source import MqttDataSource

SCHEMA = StructType([StructField("topic", StringType()), StructField("payload", StringType())])


def options(far: Remote, **more: str) -> dict[str, str]:
    files = far.pki.access()
    return {"gateway": far.location, "gatewayTokenFile": files.token_file, "gatewayCaFile": files.ca_file, **more}


def as_a_worker_gets_it(far: Remote, *values: Any) -> list[Any]:
    """The pickles, read again where the files of the driver are not; none of them has a secret in it."""
    texts = [cloudpickle.dumps(value) for value in values]  # type: ignore[no-untyped-call]
    key = (far.pki.directory / "server.key").read_bytes().splitlines()[1]
    for secret in (TOKEN.encode(), (far.server.state_dir / KEY_FILE).read_bytes(), key):
        assert not any(secret in text for text in texts)
    return [pickle.loads(text) for text in texts]  # noqa: S301 - our own


def test_a_worker_reads_its_slice_without_a_file_and_no_more(far: Remote) -> None:
    far.server.add(30)
    plan = replace(MqttDataSource(options(far, gatewayTicketValidity="7200"))._plan, poll_ms=50, max_rows=10)
    stream = MqttStreamReader(plan)
    start = stream.initialOffset()
    end = stream.latestOffset(start, stream.getDefaultReadLimit())
    # The planner makes a reader of its own and pickles that.
    reader, part = as_a_worker_gets_it(far, MqttStreamReader(plan), stream.partitions(start, end)[0])
    stream.stop()
    far.pki.directory.rename(far.pki.directory.with_name("driver's alone"))
    for _ in range(2):
        assert pa.Table.from_batches(reader.read(part)).equals(pa.Table.from_batches([rows(0, 10)]))
    with pytest.raises(GatewayError, match="TL-G43"):
        list(reader.read(replace(part, end=20)))
    tickets = far.server.service.tickets
    assert 7100 < tickets.verify(part.address.ticket).expires - tickets._clock() < 7210
    tickets._clock = lambda: 1e11
    with pytest.raises(GatewayError, match="TL-G42") as expired:
        list(reader.read(part))
    assert part.address.ticket not in str(expired.value)


@pytest.mark.parametrize("again", ["s3a://Bucket/a//ck/", "S3A://bucket/a/ck"])
def test_a_ticket_is_for_the_checkpoint_where_that_is_no_path(
    far: Remote, monkeypatch: pytest.MonkeyPatch, again: str
) -> None:
    """Whoever has it brings batches of that query alone, and they come once, however the place is written."""
    task = Task(3, 0, 0, "query-1", None)
    monkeypatch.setattr(MqttStreamWriter, "_task", lambda _: task)
    batch = pa.record_batch({"topic": ["t"] * 10, "payload": [str(number) for number in range(10)]})
    given = options(far, retryTimeout="0")
    (writer,) = as_a_worker_gets_it(far, stream_writer({**given, "checkpointLocation": "s3a://bucket/a/ck"}, SCHEMA))
    assert not writer.write(iter([batch])).already_stored
    assert stream_writer({**given, "checkpointLocation": again}, SCHEMA).write(iter([batch])).already_stored
    other = stream_writer({**given, "checkpointLocation": "s3a://bucket/a/other"}, SCHEMA)
    assert not other.write(iter([batch])).already_stored
    assert isinstance(other, MqttStreamWriter)
    for name in (f"{writer.name_prefix}query-1", "query-1"):
        with pytest.raises(GatewayError, match="TL-G43"):
            replace(other, name_prefix="")._write_rows(replace(task, query=name), iter([batch]))


def test_a_query_whose_id_is_not_known_gets_no_ticket(far: Remote, tmp_path: Path) -> None:
    with pytest.raises(GatewayError, match=r"the checkpoint .* can't be read on the driver.*TL-G48"):
        stream_writer(options(far, checkpointLocation=str(tmp_path / "none")), SCHEMA)
