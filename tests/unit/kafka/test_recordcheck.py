"""Which records Kafka would refuse, told one by one and by whole columns."""

from __future__ import annotations

import datetime as dt
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import KafkaError as ClientError
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.kafka.memory import RECORD_TYPES
from tests.unit.kafka.memory import settings as kafka_settings
from towline.errors import ConfigError, KafkaError
from towline.kafka import recordcheck
from towline.kafka.admin import NO_LIMITS, TopicLimits
from towline.kafka.columns import COLUMN_TYPES, Columns
from towline.kafka.deadletters import ChunkAssembler, Reason
from towline.kafka.delivery import delivery_for
from towline.kafka.options import SinkSettings
from towline.kafka.producers import AttemptError
from towline.kafka.recordcheck import FailedRecord, RecordCheck, RecordLimits, RefusalLearner, record_fault
from towline.sinks import Task

HOUR = 3_600_000
NOW = int(time.time() * 1000)
TOPICS = {
    "t": TopicLimits(3, 10_000, HOUR, None, "delete"),
    "c": TopicLimits(1, 10_000, None, None, "compact"),
    "dlq": TopicLimits(1, 10_000, HOUR, None, "delete"),
}
LIMITS = RecordLimits(TOPICS, 20_000, None, NOW)


def record(
    topic: str | None = "t", value: bytes = b"v", key: bytes | None = b"k", partition: int = -1, moment: int = 0
) -> Any:
    return (topic, value, key, partition, None, None, moment, [])


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (record(None), Reason.TOPIC_ABSENT),
        (record("nowhere"), Reason.TOPIC_MISSING),
        (record("a/b"), Reason.TOPIC_ILLEGAL),
        (record(""), Reason.TOPIC_ILLEGAL),
        (record(".."), Reason.TOPIC_ILLEGAL),
        (record("x" * 250), Reason.TOPIC_ILLEGAL),
        (record(partition=3), Reason.PARTITION),
        (record(partition=-2), Reason.PARTITION),
        (record(moment=-1), Reason.TIMESTAMP),
        (record(moment=NOW + 2 * HOUR), Reason.TIMESTAMP),
        (record("c", key=None), Reason.KEY_ABSENT),
        (record(value=b"x" * 10_000), Reason.TOO_LARGE),
        (record(value=b"x" * 30_000), Reason.TOO_LARGE),
        (record(key=b"x" * 10_000), Reason.TOO_LARGE),
        ((*record()[:7], [("h", b"x" * 10_000)]), Reason.TOO_LARGE),
        (("t", b"x" * 10_000, None, -1, None, None, 0, None), Reason.TOO_LARGE),
    ],
)
def test_faults_of_records(bad: Any, reason: Reason) -> None:
    fault = record_fault(bad, LIMITS)
    assert fault is not None
    assert fault.reason is reason
    assert "\n" not in fault.detail


@pytest.mark.parametrize(
    "good", [record(), record(partition=2), record(moment=NOW), record(moment=NOW + HOUR), record("c", moment=NOW * 2)]
)
def test_valid_records(good: Any) -> None:
    assert record_fault(good, LIMITS) is None


def test_a_record_that_compresses_well_is_not_too_large() -> None:
    assert record_fault(record(value=b"x" * 15_000), LIMITS._replace(codec="zstd")) is None
    assert record_fault(record(value=b"x" * 25_000), LIMITS._replace(codec="zstd")) is not None


limits = st.none() | st.integers(0, 1000)
facts = st.builds(TopicLimits, st.just(1), limits, limits, limits, st.sampled_from(["", "delete", "compact"]), limits)


@given(facts, facts)
def test_learned_limits_only_get_lower(one: TopicLimits, other: TopicLimits) -> None:
    both = one.intersect(other)
    assert both.is_compacted == (one.is_compacted or other.is_compacted)
    assert both.intersect(one) == both.intersect(other) == both
    for name in ("max_bytes", "max_ahead_ms", "max_behind_ms", "batch_bytes"):
        known = [value for value in (getattr(one, name), getattr(other, name)) if value is not None]
        assert getattr(both, name) == min(known, default=None)


@pytest.mark.parametrize(
    ("moment", "bad"), [(NOW + 3 * HOUR, NOW + 3 * HOUR), (NOW - 3 * HOUR, NOW - 4 * HOUR)], ids=["ahead", "back"]
)
def test_a_refused_timestamp_is_learned(moment: int, bad: int) -> None:
    told = KafkaError("TL-K20", "k", "it was refused", "Correct it.")
    lessons = RefusalLearner(kafka_settings())
    failed = FailedRecord("u", ClientError(ClientError.INVALID_TIMESTAMP))
    lessons.learn(AttemptError(told, failed))
    assert lessons.refusal is not None
    message = SimpleNamespace(timestamp=lambda: (1, moment), key=lambda: b"k")
    lessons.learn(AttemptError(told, failed.learn_limits(failed.error, message, 90)))
    limits = RecordLimits(
        {"u": TopicLimits(1).intersect(recordcheck._learned_limits["k:9092", "u"][1])}, 20_000, None, NOW
    )
    assert record_fault(record("u", moment=NOW), limits) is None
    fault = record_fault(record("u", moment=bad), limits)
    assert fault is not None
    assert fault.reason is Reason.TIMESTAMP


def test_a_request_that_is_too_large_though_none_of_its_records_is_makes_requests_smaller() -> None:
    told = KafkaError("TL-K20", "k", "it was refused", "Correct it.")
    lessons = RefusalLearner(kafka_settings())
    recordcheck._learned_limits.clear()
    for size in (16 << 10, 4 << 10, 1 << 10):
        lessons.learn(AttemptError(told, FailedRecord("v", ClientError(ClientError.RECORD_LIST_TOO_LARGE))))
        lessons.resolve_refusal()
        assert recordcheck._learned_limits["k:9092", "v"][1] == replace(NO_LIMITS, batch_bytes=size)
    lessons.learn(AttemptError(told, FailedRecord("v", ClientError(ClientError.INVALID_RECORD))))
    with pytest.raises(KafkaError, match="it was refused"):
        lessons.resolve_refusal()
    recordcheck._learned_limits.clear()


@pytest.fixture(autouse=True)
def _known_topics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        recordcheck, "topic_limits", lambda _settings, names: {n: TOPICS[n] for n in names if n in TOPICS}
    )


def screen(*columns: str, dlq: str | None = "dlq", **options: str) -> RecordCheck:
    given = {
        "kafka.bootstrap.servers": "k:9092",
        "kafka.message.max.bytes": "20000",
        "kafka.batch.size": "1000",
        **options,
    }
    if dlq:
        given["deadLetterTopic"] = dlq
    settings = SinkSettings.parse(given)
    bound = Columns.bind({n: COLUMN_TYPES[n][0] for n in columns}, settings.topic, include_headers=True)
    return RecordCheck(settings, bound, "s")


def everything(**cells: list[Any]) -> Any:
    count = max(map(len, cells.values()))
    return pa.record_batch({n: pa.array(cells.get(n, [None] * count), kind) for n, kind in RECORD_TYPES.items()})


ALL = ("key", "value", "topic", "partition", "timestamp", "headers")


@pytest.mark.parametrize(
    ("facts", "code", "told"),
    [
        (TopicLimits(1, 10_000, None, None, "compact,delete"), "TL-K71", "is compacted"),
        (TopicLimits(1, 1_000, None, None, "delete"), "TL-K72", "takes 1,000 bytes"),
    ],
)
def test_a_topic_that_can_not_take_dead_letters(
    monkeypatch: pytest.MonkeyPatch, facts: TopicLimits, code: str, told: str
) -> None:
    monkeypatch.setitem(TOPICS, "dlq", facts)
    looked = screen(*ALL)
    with pytest.raises(KafkaError, match=told) as caught:
        looked.check_batches([everything(value=[b"1"], topic=["nowhere"])])
    assert caught.value.code == code


def test_a_row_that_names_the_dead_letter_topic_is_a_record_like_any_other() -> None:
    """One that is too large there is cut, and every byte of it is kept."""
    headers = [{"key": "a", "value": None}]
    batch = everything(key=[b"k", b"k"], value=[b"1", b"x" * 9_990], topic=["dlq", "dlq"], headers=[headers, headers])
    looked = screen(*ALL)
    looked.check_batches([batch])
    whole, *parts = looked.checked_rows(batch).records
    assert whole[:3] == ("dlq", b"1", b"k")
    collector = ChunkAssembler()
    (letter,) = filter(None, (collector.add(part[2], part[1], part[7]) for part in parts))
    assert (letter.topic, letter.reason, letter.source) == ("dlq", Reason.TOO_LARGE, "s")
    assert (letter.key, letter.value, letter.headers) == (b"k", b"x" * 9_990, (("a", None),))
    assert looked.dead_letters == 1


def test_a_batch_without_fault_is_not_read_twice() -> None:
    batch = everything(value=[b"1"], topic=["t"], timestamp=[dt.datetime.now(dt.UTC)])
    looked = screen(*ALL)
    looked.check_batches([batch])
    assert not looked._may_have_faults(batch)
    assert looked.batch_settings() == {}
    large = screen(*ALL, **{"kafka.batch.size": "20000"})
    large.check_batches([batch])
    assert large.batch_settings() == {"batch.size": "10000"}


def test_without_a_dead_letter_topic_nothing_is_sent() -> None:
    looked = screen(*ALL, dlq=None)
    with pytest.raises(KafkaError, match='"nowhere" does not exist') as caught:
        looked.check_batches([everything(value=[b"1", b"2"], topic=["t", "nowhere"])])
    assert caught.value.code == "TL-K04"
    with pytest.raises(KafkaError, match="partitions 0 to 2, not 9") as caught:
        looked.check_batches([everything(value=[b"1"], topic=["t"], partition=[9])])
    assert caught.value.code == "TL-K06"
    assert "deadLetterTopic" in caught.value.remedy


@pytest.mark.parametrize("name", ["__consumer_offsets", "towline.s.markers", "mine"])
def test_no_row_names_a_reserved_topic(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is there, and Kafka would take the record."""
    monkeypatch.setitem(TOPICS, name, TOPICS["t"])
    batch = everything(value=[b"1", b"2"], topic=["t", name])
    looked = screen(*ALL, markerTopic="mine")
    looked.check_batches([batch])
    rows = looked.checked_rows(batch)
    assert [r[0] for r in rows.records] == ["t", "dlq"]
    assert rows.topics == {"t", "dlq"}
    with pytest.raises(KafkaError, match="the topic is reserved") as caught:
        screen(*ALL, dlq=None, markerTopic="mine").check_batches([batch])
    assert caught.value.code == "TL-K06"


@pytest.mark.parametrize("guarantee", ["at_least_once", "at_most_once"])
def test_without_transactions_too(guarantee: str) -> None:
    settings = SinkSettings.parse({"kafka.bootstrap.servers": "k:9092", "guarantee": guarantee})
    bound = Columns.bind({"topic": "string", "value": "binary"}, None, include_headers=True)
    batch = pa.record_batch({"topic": ["__consumer_offsets"], "value": pa.array([b"1"])})
    with pytest.raises(KafkaError, match="the topic is reserved"):
        delivery_for(settings, bound).deliver(Task(0), [batch])


@pytest.mark.parametrize("option", ["topic", "deadLetterTopic"])
@pytest.mark.parametrize("name", ["__consumer_offsets", "mine.s.markers", "marks"])
def test_a_reserved_topic_in_the_options_is_a_config_error(option: str, name: str) -> None:
    own = {"transactionalIdPrefix": "mine", "markerTopic": "marks"}
    with pytest.raises(ConfigError, match="TL-C95"):
        SinkSettings.parse({"kafka.bootstrap.servers": "k:9092", **own, option: name})


def test_a_topic_of_the_options_must_be_there() -> None:
    with pytest.raises(KafkaError, match='"gone"'):
        screen("value", dlq="gone", topic="t").check_batches([pa.record_batch({"value": pa.array([b""])})])
    with pytest.raises(KafkaError, match='"away"'):
        screen("value", topic="away").check_batches([])


moments = st.one_of(
    st.none(), st.integers(-HOUR, NOW + 3 * HOUR).map(lambda ms: dt.datetime.fromtimestamp(ms / 1000, dt.UTC))
)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["t", "c", "nowhere", "", None]),
            st.one_of(st.none(), st.just(b"k"), st.just(b"x" * 9_950)),
            st.one_of(st.none(), st.just(b"v"), st.just(b"x" * 9_950), st.just(b"x" * 30_000)),
            st.one_of(st.none(), st.integers(-3, 4)),
            moments,
            st.one_of(st.none(), st.just([{"key": "h", "value": b"y" * 9_900}]), st.just([])),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_columns_never_pass_what_a_record_would_not(rows: list[tuple[Any, ...]]) -> None:
    """The quick look may be too careful, never too trusting; and no row vanishes."""
    names = ("topic", "key", "value", "partition", "timestamp", "headers")
    batch = everything(**{name: [row[i] for row in rows] for i, name in enumerate(names)})
    looked = screen(*ALL)
    looked.check_batches([batch])
    records = list(looked._columns.rows(batch, any_topic=True).records)
    bad = [record for record in records if record_fault(record, looked._limits)]
    assert not bad or looked._may_have_faults(batch)
    sent = list(looked.checked_rows(batch).records)
    assert looked.dead_letters == len(bad)
    assert [record for record in sent if record[0] != "dlq"] == [record for record in records if record not in bad]
    assert all(record_fault(record, looked._limits) is None for record in sent)
    collector = ChunkAssembler()
    letters = [collector.add(record[2], record[1], record[7]) for record in sent if record[0] == "dlq"]
    assert [(letter.key, letter.value) for letter in letters if letter] == [(record[2], record[1]) for record in bad]
