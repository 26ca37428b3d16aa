"""Which records Kafka would refuse, told one by one and by whole columns."""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Iterator
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
from towline.errors import KafkaError
from towline.kafka import recordcheck
from towline.kafka.admin import NO_LIMITS, TopicLimits
from towline.kafka.columns import COLUMN_TYPES, Columns
from towline.kafka.deadletters import ChunkAssembler, Reason
from towline.kafka.producers import AttemptError
from towline.kafka.recordcheck import FailedRecord, RecordCheck, RecordLimits, RefusalLearner, record_fault

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
    ("candidate", "reason"),
    [
        (record(None), Reason.TOPIC_ABSENT),
        (record("nowhere"), Reason.TOPIC_MISSING),
        (record("a/b"), Reason.TOPIC_ILLEGAL),
        (record(".."), Reason.TOPIC_ILLEGAL),
        (record("x" * 250), Reason.TOPIC_ILLEGAL),
        (record(partition=3), Reason.PARTITION),
        (record(partition=-2), Reason.PARTITION),
        (record(moment=-1), Reason.TIMESTAMP),
        (record(moment=NOW + 2 * HOUR), Reason.TIMESTAMP),
        (record("c", key=None), Reason.KEY_ABSENT),
        (record(value=b"x" * 10_000), Reason.TOO_LARGE),
        (record(key=b"x" * 10_000), Reason.TOO_LARGE),
        ((*record()[:7], [("h", b"x" * 10_000)]), Reason.TOO_LARGE),
        (("t", b"x" * 10_000, None, -1, None, None, 0, None), Reason.TOO_LARGE),
        (record(), None),
        (record(partition=2), None),
        (record(moment=NOW), None),
        (record(moment=NOW + HOUR), None),
        (record("c", moment=NOW * 2), None),
    ],
)
def test_faults_of_records(candidate: Any, reason: Reason | None) -> None:
    fault = record_fault(candidate, LIMITS)
    assert (fault and fault.reason) is reason
    assert fault is None or "\n" not in fault.detail


def test_a_record_that_compresses_well_is_not_too_large() -> None:
    assert record_fault(record(value=b"x" * 15_000), LIMITS._replace(codec="zstd")) is None
    assert record_fault(record(value=b"x" * 25_000), LIMITS._replace(codec="zstd")) is not None


TOLD = KafkaError("TL-K20", "k", "it was refused", "Correct it.")
UNFIT = ClientError(ClientError.INVALID_RECORD)


@pytest.fixture
def lessons() -> Iterator[RefusalLearner]:
    recordcheck._learned_limits.clear()
    yield RefusalLearner(kafka_settings())
    recordcheck._learned_limits.clear()


@pytest.mark.parametrize(("moment", "bad"), [(3, 3), (-3, -4)])
def test_a_refused_timestamp_is_learned(lessons: RefusalLearner, moment: int, bad: int) -> None:
    moment, bad = NOW + moment * HOUR, NOW + bad * HOUR
    failed = FailedRecord("u", ClientError(ClientError.INVALID_TIMESTAMP))
    lessons.learn(AttemptError(TOLD, failed))
    message = SimpleNamespace(timestamp=lambda: (1, moment), key=lambda: b"k")
    lessons.learn(AttemptError(TOLD, failed.learn_limits(failed.error, message, 90)))
    learned = TopicLimits(1).intersect(recordcheck._learned_limits["k:9092", "u"][1])
    limits = LIMITS._replace(topics={"u": learned})
    assert record_fault(record("u", moment=NOW), limits) is None
    fault = record_fault(record("u", moment=bad), limits)
    assert fault is not None
    assert fault.reason is Reason.TIMESTAMP
    denied = FailedRecord("u", ClientError(ClientError.TOPIC_AUTHORIZATION_FAILED))
    assert denied.learn_limits(denied.error, message, 90).limits == NO_LIMITS


def test_a_request_that_is_too_large_though_none_of_its_records_is_makes_requests_smaller(
    lessons: RefusalLearner,
) -> None:
    for size in (16 << 10, 4 << 10, 1 << 10):
        lessons.learn(AttemptError(TOLD, FailedRecord("v", ClientError(ClientError.RECORD_LIST_TOO_LARGE))))
        lessons.resolve_refusal()
        assert recordcheck._learned_limits["k:9092", "v"][1] == replace(NO_LIMITS, batch_bytes=size)
    lessons.learn(AttemptError(TOLD, FailedRecord("v", UNFIT)))
    with pytest.raises(KafkaError, match="it was refused"):
        lessons.resolve_refusal()


@pytest.mark.usefixtures("lessons")
@pytest.mark.parametrize(("topic", "learned"), [("x", 1000), ("dead", 500)])
def test_a_refused_size_is_learned_and_letters_are_cut_to_half_of_it(topic: str, learned: int) -> None:
    learner = RefusalLearner(replace(kafka_settings(), dead_letter_topic="dead"))
    failed = FailedRecord(topic, ClientError(ClientError.MSG_SIZE_TOO_LARGE), replace(NO_LIMITS, max_bytes=1000))
    learner.learn(AttemptError(TOLD, failed))
    learner.resolve_refusal(failed)
    assert recordcheck._learned_limits["k:9092", topic][1].max_bytes == learned


def test_more_kinds_than_can_be_learned_stop_the_line(lessons: RefusalLearner) -> None:
    unfit = [FailedRecord(f"w{n}", UNFIT, replace(NO_LIMITS, cleanup_policy="compact")) for n in range(17)]
    for failed in unfit[:16]:
        lessons.learn(AttemptError(TOLD, failed))
        lessons.resolve_refusal(failed)
    lessons.learn(AttemptError(TOLD, unfit[16]))
    with pytest.raises(KafkaError, match=r'more than 16 kinds, the last for topic "w16".*TL-K29'):
        lessons.resolve_refusal(unfit[16])


@pytest.fixture(autouse=True)
def _known_topics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        recordcheck, "topic_limits", lambda _settings, names: {n: TOPICS[n] for n in names if n in TOPICS}
    )


def screen(dlq: str | None = "dlq", **options: str) -> RecordCheck:
    given = {"kafka__message__max__bytes": "20000", "kafka__batch__size": "1000", **options}
    settings = replace(kafka_settings(**given), topic=None, dead_letter_topic=dlq)
    types = {name: kinds[0] for name, kinds in COLUMN_TYPES.items()}
    return RecordCheck(settings, Columns.bind(types, None, include_headers=True), "s")


def everything(**cells: list[Any]) -> Any:
    count = max(map(len, cells.values()))
    return pa.record_batch({n: pa.array(cells.get(n, [None] * count), kind) for n, kind in RECORD_TYPES.items()})


@pytest.mark.parametrize(
    ("facts", "told"),
    [
        (TopicLimits(1, 10_000, None, None, "compact,delete"), "is compacted.*TL-K71"),
        (TopicLimits(1, 1_000, None, None, "delete"), "takes 1,000 bytes.*TL-K72"),
    ],
)
def test_a_topic_that_can_not_take_dead_letters(monkeypatch: pytest.MonkeyPatch, facts: TopicLimits, told: str) -> None:
    monkeypatch.setitem(TOPICS, "dlq", facts)
    with pytest.raises(KafkaError, match=told):
        screen().check_batches([everything(value=[b"1"], topic=["nowhere"])])


def test_a_row_that_names_the_dead_letter_topic_is_a_record_like_any_other() -> None:
    """One that is too large there is cut, and every byte of it is kept."""
    headers = [{"key": "a", "value": None}]
    batch = everything(key=[b"k", b"k"], value=[b"1", b"x" * 9_990], topic=["dlq", "dlq"], headers=[headers, headers])
    looked = screen()
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
    looked = screen()
    looked.check_batches([batch])
    assert not looked._may_have_faults(batch)
    assert looked.batch_settings() == {}
    large = screen(kafka__batch__size="20000")
    large.check_batches([batch])
    assert large.batch_settings() == {"batch.size": "10000"}


def test_without_a_dead_letter_topic_nothing_is_sent() -> None:
    with pytest.raises(KafkaError, match=r'"nowhere" does not exist.*TL-K04'):
        screen(dlq=None).check_batches([everything(value=[b"1", b"2"], topic=["t", "nowhere"])])
    with pytest.raises(KafkaError, match=r"partitions 0 to 2, not 9.*deadLetterTopic.*TL-K06"):
        screen(dlq=None).check_batches([everything(value=[b"1"], topic=["t"], partition=[9])])
    with pytest.raises(KafkaError, match=r'topic "t" .*takes 10,000 .*deadLetterTopic.*TL-K05'):
        screen(dlq=None).check_batches([everything(value=[b"1", b"x" * 10_000], topic=["t", "t"])])


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
    looked = screen()
    looked.check_batches([batch])
    records = list(looked._columns.rows(batch, any_topic=True).records)
    bad = [record for record in records if record_fault(record, looked._limits)]
    assert not bad or looked._may_have_faults(batch)
    checked = looked.checked_rows(batch)
    sent = list(checked.records)
    assert {record[0] for record in sent} <= checked.topics <= TOPICS.keys()
    assert looked.dead_letters == len(bad)
    assert [record for record in sent if record[0] != "dlq"] == [record for record in records if record not in bad]
    assert all(record_fault(record, looked._limits) is None for record in sent)
    collector = ChunkAssembler()
    letters = [collector.add(record[2], record[1], record[7]) for record in sent if record[0] == "dlq"]
    assert [(letter.key, letter.value) for letter in letters if letter] == [(record[2], record[1]) for record in bad]
