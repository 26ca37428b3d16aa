"""A program that writes with Spark's own Kafka sink changes the format's name and some options, not its plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from tests.integration.kafka.reading import records
from towline_prove.devstack import Kafka
from towline_prove.devstack.secured import CONNECTION_STRING, USER, SecuredKafka

#: As users of Spark's sink tune it: names of both clients, and what only Java's has.
TUNING = {
    "kafka.acks": "all",
    "kafka.batch.size": "65536",
    "kafka.client.dns.lookup": "use_all_dns_ips",
    "kafka.compression.type": "zstd",
    "kafka.enable.idempotence": "true",
    "kafka.linger.ms": "5",
    "kafka.max.in.flight.requests.per.connection": "5",
    "kafka.metadata.max.age.ms": "60000",
    "kafka.request.timeout.ms": "30000",
    "kafka.retries": "2147483647",
}
JAVA_TUNING = {
    "kafka.buffer.memory": "67108864",
    "kafka.compression.zstd.level": "3",
    "kafka.max.block.ms": "60000",
    "kafka.max.request.size": "2097152",
    "kafka.send.buffer.bytes": "131072",
}


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredKafka]:
    with SecuredKafka(tmp_path_factory.mktemp("secured")) as kafka:
        yield kafka


def java_options(kafka: SecuredKafka, mechanism: str) -> dict[str, str]:
    package = "org.apache.kafka.common.security"
    module = f"{package}.plain.PlainLoginModule" if mechanism == "PLAIN" else f"{package}.scram.ScramLoginModule"
    password = kafka.secret_file(mechanism).read_text()
    return {
        "kafka.sasl.jaas.config": f'{module} required username="{user(mechanism)}" password="{password}";',
        "kafka.ssl.truststore.type": "PEM",
        "kafka.ssl.truststore.location": str(kafka.authority),
        **JAVA_TUNING,
    }


def librdkafka_options(kafka: SecuredKafka, mechanism: str) -> dict[str, str]:
    return {
        "kafka.sasl.username": user(mechanism),
        "kafka.sasl.password.file": str(kafka.secret_file(mechanism)),
        "kafka.ssl.ca.location": str(kafka.authority),
    }


def user(mechanism: str) -> str:
    return CONNECTION_STRING if mechanism == "PLAIN" else USER


def program(spark: SparkSession, form: str, options: dict[str, str], checkpoint: Path, pad: int = 0) -> StreamingQuery:
    """Several partitions, a shuffle, and adaptive execution that may merge them: what a plan of a user's has."""
    source = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 500).option("numPartitions", 3)
    rows = source.load().selectExpr("CAST(value % 17 AS STRING) AS key", "CAST(value AS STRING) AS value")
    query = (
        rows.repartition("key")
        .selectExpr(
            "key",
            f"CONCAT(value, REPEAT(' ', {pad})) AS value",
            "array(struct('origin' AS key, CAST(value AS BINARY) AS value)) AS headers",
        )
        .writeStream.format(form)
        .options(**options)
        .option("includeHeaders", "true")
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(120)
    return query


def carried(bootstrap: str, topic: str) -> Counter[tuple[object, ...]]:
    return Counter((m.partition(), m.key(), m.value(), str(m.headers())) for m in records(bootstrap, topic))


@pytest.mark.parametrize("mechanism", ["SCRAM-SHA-512", pytest.param("PLAIN", marks=pytest.mark.long)])
def test_the_plan_needs_no_change(
    spark: SparkSession, secured: SecuredKafka, tmp_path: Path, mechanism: str, caplog: pytest.LogCaptureFixture
) -> None:
    topics = {form: f"{form}-{mechanism}" for form in ("kafka", "kafka_transactional")}
    secured.create_topics(dict.fromkeys(topics.values(), 3))
    own_options = {
        "kafka": java_options(secured, mechanism),
        "kafka_transactional": librdkafka_options(secured, mechanism),
    }
    security = {
        "kafka.security.protocol": "SASL_SSL",
        "kafka.sasl.mechanism": mechanism,
        "kafka.ssl.endpoint.identification.algorithm": "https",
    }
    found = {}
    shown = ""
    for form, topic in topics.items():
        options = {"kafka.bootstrap.servers": secured.bootstrap, "topic": topic, **security, **TUNING}
        for run in range(2):
            query = program(spark, form, {**options, **own_options[form]}, tmp_path / form)
            assert query.exception() is None, run
        found[topic] = carried(secured.internal_bootstrap, topic)
        jvm: Any = query._jsq
        shown = jvm.explainInternal(True) + str(query.lastProgress)
    assert found[topics["kafka_transactional"]] == found[topics["kafka"]]
    assert sum(found[topics["kafka"]].values()) >= 1000
    assert set(found[topics["kafka"]].values()) == {1}
    password = secured.secret_file(mechanism).read_text()
    kept = [path.read_bytes() for path in (tmp_path / "kafka_transactional").rglob("*") if path.is_file()]
    assert kept
    assert all(password.encode() not in content for content in kept)
    assert password not in shown + caplog.text


def test_a_batch_of_many_partitions_is_one_transaction(spark: SparkSession, kafka: Kafka, tmp_path: Path) -> None:
    """All of it becomes visible at once, whatever its plan: one commit in each partition of the topic."""
    kafka.create_topics({"gathered": 1})
    options = {"kafka.bootstrap.servers": kafka.bootstrap, "topic": "gathered"}
    program(spark, "kafka_transactional", options, tmp_path, pad=20_000)  # more than comes with a task's answer
    messages = records(kafka.bootstrap, "gathered")
    offsets = [message.offset() for message in messages]
    assert sorted(int(message.value()) for message in messages) == list(range(len(messages)))
    assert len(offsets) >= 500
    assert offsets[:500] == list(range(500))  # no end of a transaction between two records of a batch
