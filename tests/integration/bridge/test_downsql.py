"""What a downlink says in SQL, evaluated by a real Spark, and what the task that writes makes of it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own custom

from tests.helpers import wait_until
from tests.integration.bridge.mapped import NOW, RECORD
from tests.unit.bridge.test_messages import SENT, kafka_gets, line_of
from towline.bridge.config.tables import DownlinkTable
from towline.bridge.downlink.sink import render_rows
from towline.bridge.lines import sql as downsql
from towline.bridge.messages import internal, message_table
from towline.bridge.routes import FAULT, OUTCOME, RowOutcome


def section(**settings: Any) -> DownlinkTable:
    return DownlinkTable.model_validate({"name": "line", "from": "t", **settings})


def record(key: bytes | None = b"k", value: bytes | None = b"v", **more: Any) -> tuple[Any, ...]:
    headers = more.pop("headers", [])
    return key, value, "t", more.get("partition", 0), more.get("offset", 0), NOW, headers


def applied(frame: DataFrame, downlink: DownlinkTable) -> DataFrame:
    return downsql.apply_downlink_sql(frame, downlink, line_of(downlink))


def down(spark: SparkSession, downlink: DownlinkTable, *records: tuple[Any, ...]) -> Any:
    """Of each record its columns, and what Kafka gets of all that are refused."""
    rows = applied(spark.createDataFrame(records, RECORD), downlink).toArrow().combine_chunks()
    table = message_table(line_of(downlink))
    (batch,) = render_rows(table, rows.to_batches(), Counter(), has_dead_letter_topic=True)
    messages = (
        batch.select([*map(internal, SENT), OUTCOME, FAULT]).rename_columns([*SENT, "outcome", FAULT]).to_pylist()
    )
    refused = batch.filter(batch.column(OUTCOME).cast("bool"))
    return messages, kafka_gets(table, refused)


@pytest.mark.parametrize("name", ["topic", "content_type", "response_topic"])
def test_text_from_sql_is_checked_too(spark: SparkSession, name: str) -> None:
    """Spark casts any bytes to a string, and Arrow carries them: the gateway would have to set them aside."""
    values: dict[str, Any] = {"topic": "fine", name: {"sql": "concat('a/', CAST(key AS STRING))"}}
    (bad, fine, none), _ = down(spark, section(**values), record(b"\xff"), record("ü".encode()), record(None))
    assert "UTF-8" in bad[FAULT]
    assert (fine["outcome"], fine[name]) == (RowOutcome.RENDERED, "a/ü")
    assert (none["outcome"] == RowOutcome.RENDERED) is (name != "topic")


NOTICE_OF: dict[str, Any] = {
    "topic": {"sql": "IF(key = 'mute', NULL, concat('answers.', topic))"},
    "key": "{key}",
    "payload": {"sql": "to_json(named_struct('error', fault, 'key', shout))"},
    "headers": {"id": "{header.id}", "status": {"sql": "'400'"}},
    "copy_headers": ["keep*", "exact"],
    "where": "exists(headers, h -> h.key = 'id')",
}


def test_a_refused_record_is_a_dead_letter_and_a_failure_notice(spark: SparkSession) -> None:
    """The SQL of a notice may name why: so Spark is told first."""
    downlink = section(
        topic="a/{key}",
        properties="mqtt",
        fields={"shout": "upper(CAST(key AS STRING))"},
        reject="CASE key WHEN 'bad' THEN 'no such device' WHEN 'odd' THEN raise_error('odd') END",
        failure_notice=NOTICE_OF,
    )
    headers = [("keeper", b"\xff"), ("exact", None), ("id", b"7"), ("exactly", b"")]
    records = [record(key, headers=headers) for key in (b"ok", b"bad", b"odd", b"+", b"mute")]
    odd, refused = "the SQL of reject raised an error on it", "no such device"
    topic = "MQTT takes no such topic: empty, no UTF-8, over 65,535 bytes, +, # or U+0000"
    rows, letters = down(spark, downlink, *records, record(b"bad"))
    assert [row[FAULT] for row in rows] == [None, refused, odd, topic, None, refused]
    assert [topic for topic, *_ in letters] == [*["dead"] * 4, *["answers.t"] * 3]
    notices = letters[4:]
    assert [(key, json.loads(value)) for _, key, value, _ in notices] == [
        (b"bad", {"error": refused, "key": "BAD"}),
        (b"odd", {"error": odd, "key": "ODD"}),
        (b"+", {"error": topic, "key": "+"}),
    ]
    own_headers = [("id", b"7"), ("status", b"400"), ("keeper", b"\xff"), ("exact", None)]
    assert notices[0][-1] == own_headers


def test_everything_can_be_sql_or_a_template(spark: SparkSession) -> None:
    downlink = section(
        topic="c/{key}/{header.tenant}/{value.a.b[1]}/{kafka.offset}/{half}",
        fields={"twice": "offset * 2", "half": "twice / 4"},
        payload={"sql": "upper(CAST(value AS STRING)) -- loud"},
        retain={"sql": "twice > 3"},
        expiry="{value.ttl}",
        content_type="text/{header.tenant}",
        response_topic={"sql": "concat('r/', CAST(key AS STRING))"},
        correlation_data="{kafka.topic}",
        properties="mqtt",
    )
    value = b'{"a": {"b": [1, "x"]}, "ttl": 60}'
    headers = [("tenant", b"acme"), ("mqtt.user.u", b"1"), ("mqtt.retain", b"true"), ("traceparent", b"00-1-2-01")]
    source = record(value=value, headers=headers, offset=4)
    for parallelism in (1, 2):  # with two the messages are rendered before the task that writes
        ((row,), _) = down(spark, downlink.model_copy(update={"parallelism": parallelism}), source)
        assert (row["topic"], row["payload"]) == ("c/k/acme/x/4/2.0", value.upper())
        assert (row["retain"], row["message_expiry_seconds"], row["content_type"]) == (True, 60, "text/acme")
        assert (row["response_topic"], row["correlation_data"]) == ("r/k", b"t")
        pairs = [(pair["key"], pair["value"]) for pair in row["user_properties"]]
        assert pairs == [("u", "1"), ("traceparent", "00-1-2-01")]


def test_partitions_are_by_topic_and_filtered_records_are_counted(spark: SparkSession) -> None:
    where = "CASE WHEN offset = 1 THEN raise_error('odd') WHEN offset = 3 THEN NULL ELSE offset % 2 = 0 END"
    downlink = section(topic="d/{key}", where=where, parallelism=3)
    records = [record(b"%d" % (n % 4), b"%d" % n, offset=n) for n in range(40)]
    frame = applied(spark.createDataFrame(records, RECORD), downlink)
    rows = frame.withColumn("part", F.spark_partition_id()).toArrow().combine_chunks()
    sent = [row for row in rows.to_pylist() if row[OUTCOME] == 0]
    assert (
        len({(row[internal("topic")], row["part"]) for row in sent})
        == len({row[internal("topic")] for row in sent})
        == 2
    )
    assert sorted(row["offset"] for row in sent) == list(range(0, 40, 2))
    assert all((row["value"], row["headers"]) == (None, None) for row in sent), "only the payload goes on"
    counts = Counter[str]()
    parts = render_rows(message_table(line_of(downlink)), rows.to_batches(), counts, has_dead_letter_topic=True)
    assert sum(batch.num_rows for batch in parts) == 21
    assert counts == Counter(records=40, filtered=18, undecided=1, unfit=1)


# -- a shuffle that loses its files in the midst of a batch, as with the executor that wrote them ------------------


def numbers(spark: SparkSession, rows: int) -> DataFrame:
    """A stream with the numbers of each batch's rows, in two parts."""
    source = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", rows).option("numPartitions", 2)
    return source.load().selectExpr(f"value % {rows} AS n", "timestamp")


def progress_of_a_lost_shuffle(rows: DataFrame, place: Path) -> dict[str, Any]:
    """What Spark says of the first batch, whose tasks before the shuffle were run twice.

    Args:
        rows: Of a session with two cores, behind a shuffle into three parts: the last is fetched after the first.
        place: A directory for the checkpoint.
    """
    read = rows.where(_loses(str(place / "lost")))
    query = read.writeStream.format("noop").option("checkpointLocation", str(place / "checkpoint")).start()
    wait_until(lambda: bool(query.recentProgress) or not query.isActive, 60)
    query.stop()
    if error := query.exception():
        raise error
    told: dict[str, Any] = json.loads(query.recentProgress[0].json)
    return told


def _loses(flag: str) -> Column:
    def loses(_: int) -> bool:
        import glob  # noqa: PLC0415 - in a worker
        import os  # noqa: PLC0415
        import time  # noqa: PLC0415

        try:
            open(flag, "x").close()  # noqa: PTH123
        except FileExistsError:
            while not os.path.exists(f"{flag}.done"):  # noqa: PTH110 - the other worker is at it
                time.sleep(0.01)
            return True
        for place in os.environ["SPARK_LOCAL_DIRS"].split(","):  # Spark's own, for its workers
            for file in glob.glob(f"{place}/*/shuffle_*"):  # noqa: PTH207
                os.unlink(file)  # noqa: PTH108
        open(f"{flag}.done", "x").close()  # noqa: PTH123
        return True

    lost = F.udf(loses, "boolean", useArrow=False).asNondeterministic()  # else it would move before the shuffle
    return lost(F.lit(1))


def test_records_are_counted_once_though_tasks_run_again(spark: SparkSession, tmp_path: Path) -> None:
    """Of an executor that was lost with what it had written for a shuffle (`towline.bridge.lines.sql.apply`)."""
    records = numbers(spark, 600).selectExpr(
        "CAST(CAST(n % 30 AS STRING) AS BINARY) AS key",
        "CAST('v' AS BINARY) AS value",
        "'t' AS topic",
        "0 AS partition",
        "n AS offset",
        "timestamp",
        "CAST(array() AS array<struct<key: string, value: binary>>) AS headers",
    )
    rows = applied(records, section(topic="{key}", where="offset % 3 > 0", parallelism=3))
    progress = progress_of_a_lost_shuffle(rows, tmp_path)
    assert progress["numInputRows"] > 600, "the tasks have not run again"
    assert progress["observedMetrics"][downsql.ROW_METRICS]["rows"] == 600
