"""A marker is read up to the end its leader names, and no nearer end is believed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError as ClientError
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.kafka import memory as kafka
from tests.unit.kafka.memory import MemoryKafka, Written, kafka_in_memory
from towline.errors import KafkaError
from towline.kafka import markerstore
from towline.kafka.markers import ANY_QUERY, NO_BATCH, Marker, MarkerTotals
from towline.kafka.markerstore import MarkerStore
from towline.kafka.options import SinkSettings

OLDER, NEWEST = Marker(6, 1, writer="q"), Marker(7, 1, writer="q")


class Lagging:
    """A consumer that is sent to a follower: it ends before the leader does, until the follower has caught up.

    Args:
        leaders_end: What the leader answers to ListOffsets.
        polls: What `poll` gives: a marker at its offset, or an offset alone for "this is the end".
    """

    def __init__(self, leaders_end: int, *polls: tuple[int, Marker] | int) -> None:
        self.config: Mapping[str, Any] = {}
        self.leaders_end = leaders_end
        self.polls = [*polls]
        self.closed = False
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def get_watermark_offsets(self, _place: object, timeout: float) -> tuple[int, int]:
        assert timeout > 0
        return 0, self.leaders_end

    def assign(self, _places: object) -> None:
        pass

    def unassign(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True

    def poll(self, timeout: float) -> Any:
        if not self.polls:
            self.now += timeout
            return None
        given = self.polls.pop(0)
        if isinstance(given, int):
            error = SimpleNamespace(name=lambda: "_PARTITION_EOF")
            return SimpleNamespace(error=lambda: error, offset=lambda: given)
        return SimpleNamespace(
            error=lambda: None, offset=lambda: given[0], key=lambda: b"sink/0", value=given[1].to_json
        )


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    yield
    markerstore._consumers.clear()
    markerstore._highest_ends.clear()


def store(monkeypatch: pytest.MonkeyPatch, consumer: Lagging, **client: str) -> MarkerStore:
    def made(config: Mapping[str, Any], **_: object) -> Lagging:
        consumer.config = config
        return consumer

    markerstore._consumers.clear()
    monkeypatch.setattr(markerstore, "Consumer", made)
    monkeypatch.setattr(markerstore, "time", consumer)
    options = {"kafka.bootstrap.servers": "k:9092", "deliveryTimeout": "1"}
    return MarkerStore(SinkSettings.parse({**options, **client}), "sink")


def test_the_marker_consumer_has_no_rack(monkeypatch: pytest.MonkeyPatch) -> None:
    consumer = Lagging(2, (0, NEWEST), 2)
    given = {"kafka.client.rack": "west", "kafka.client.id": "mine"}
    assert store(monkeypatch, consumer, **given).read_marker(0) == NEWEST
    assert (consumer.config["client.rack"], consumer.config["client.id"]) == ("", "mine")


def test_an_end_below_the_leaders_is_not_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    consumer = Lagging(4, (0, OLDER), 2, (2, NEWEST), 4)
    assert store(monkeypatch, consumer).read_marker(0) == NEWEST


def test_an_end_that_stays_below_the_leaders_is_an_error_and_no_marker(monkeypatch: pytest.MonkeyPatch) -> None:
    consumer = Lagging(4, (0, OLDER), 2)
    with pytest.raises(KafkaError, match=r"could be read up to 2, and its leader has 4\..*\[TL-K27\]"):
        store(monkeypatch, consumer).read_marker(0)
    assert consumer.closed


def test_an_end_offset_below_an_earlier_one_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    assert store(monkeypatch, Lagging(4, (2, NEWEST), 4)).read_marker(0) == NEWEST
    with pytest.raises(KafkaError, match=r"ends at 2, and ended at 4 before\..*\[TL-K27\]"):
        store(monkeypatch, Lagging(2, (0, OLDER), 2)).read_marker(0)


# -- against a Kafka in memory --

TOPIC = "towline.s.markers"
COMPACT = {"cleanup.policy": "compact"}


def reader(**options: str) -> MarkerStore:
    return MarkerStore(kafka.settings(**options), "s")


@given(
    st.lists(st.tuples(st.sampled_from(["s/0", "s/1", "else", None]), st.booleans()), max_size=40), st.integers(0, 300)
)
def test_the_last_record_with_the_key_counts_however_far_back_it_is(
    records: list[tuple[str | None, bool]], behind: int
) -> None:
    """Other keys, ends of transactions and removals lie between; a marker that was removed is none."""
    with kafka_in_memory() as memory:
        memory.topics[TOPIC] = 1
        log = memory.log[TOPIC, 0]
        expected = None
        for batch, (key, kept) in enumerate(records):
            value = Marker(batch, 1).to_json() if kept else None
            log.append(None if key is None else Written(TOPIC, 0, key.encode(), value))
            if key == "s/0":
                expected = Marker(batch, 1) if kept else None
        log += [None] * behind
        assert reader().read_marker(0) == expected


def test_a_marker_near_the_end_needs_no_read_of_the_whole_topic(memory: MemoryKafka) -> None:
    """Compaction comes late: years of markers may lie before it."""
    memory.topics[TOPIC] = 1
    older = Written(TOPIC, 0, b"s/0", OLDER.to_json())
    memory.log[TOPIC, 0] += [older, None] * 1000 + [Written(TOPIC, 0, b"s/0", NEWEST.to_json()), None]
    assert reader().read_marker(0) == NEWEST
    assert memory.calls.count("fetch") <= 16


def test_a_value_that_is_no_marker_is_an_error_with_its_key(memory: MemoryKafka) -> None:
    memory.topics[TOPIC] = 1
    memory.log[TOPIC, 0].append(Written(TOPIC, 0, b"s/0", b'{"v":2}'))
    with pytest.raises(KafkaError, match=r'"s/0" in "towline.s.markers" can not be understood: .*version 2.*TL-K22'):
        reader().read_marker(0)


@pytest.mark.parametrize("call", ["get_watermark_offsets", "fetch"])
def test_a_reader_that_had_no_answer_is_not_asked_again(memory: MemoryKafka, call: str) -> None:
    memory.topics[TOPIC] = 1
    memory.log[TOPIC, 0].append(Written(TOPIC, 0, b"s/0", NEWEST.to_json()))
    assert reader().read_marker(0) == NEWEST
    (first,) = markerstore._consumers.values()
    assert first.place == ("", 0), "it fetches nothing between two batches"
    assert reader().read_marker(0) == NEWEST
    assert [*markerstore._consumers.values()] == [first]
    memory.fail(call, kafka.TRANSPORT)
    with pytest.raises(KafkaError, match="TL-K01"):
        reader().read_marker(0)
    assert memory.calls[-1] == "close"
    assert reader().read_marker(0) == NEWEST


def test_an_error_amid_the_markers_is_no_end_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    consumer = Lagging(4, (0, OLDER))
    polls = iter(
        [consumer.poll(0), SimpleNamespace(error=lambda: ClientError(ClientError._TRANSPORT), offset=lambda: 4)]
    )
    monkeypatch.setattr(consumer, "poll", lambda _: next(polls))
    with pytest.raises(KafkaError, match="TL-K01"):
        store(monkeypatch, consumer).read_marker(0)
    assert consumer.closed


def test_a_topic_for_markers_is_made_compacted_with_a_partition_for_each_of_the_sink(memory: MemoryKafka) -> None:
    reader(parallelism="3").ensure_topic()
    assert memory.topics[TOPIC] == 3
    assert memory.configs[TOPIC]["cleanup.policy"] == "compact"
    before = len(memory.calls)
    reader(parallelism="3").ensure_topic()
    assert len(memory.calls) == before, "once in a process is enough"
    with pytest.raises(KafkaError, match=r"has 3 partitions, parallelism 4 needs as many.*--partitions 4.*TL-K22"):
        reader(parallelism="4").ensure_topic()


def test_a_created_marker_topic_is_waited_for(memory: MemoryKafka, monkeypatch: pytest.MonkeyPatch) -> None:
    looks, facts = iter(range(1000)), MarkerStore._topic_limits
    monkeypatch.setattr(MarkerStore, "_topic_limits", lambda self: None if next(looks) < 4 else facts(self))
    reader().ensure_topic()
    assert next(looks) == 5
    looks = iter([0] * 1000)
    with pytest.raises(KafkaError, match=r"does not exist.*TL-K22"):
        reader(markerTopic="other").ensure_topic()
    assert memory.now - 1000 < 62, "not for ever"


@pytest.mark.parametrize(
    ("partitions", "policy", "options", "told"),
    [
        (
            None,
            None,
            {"createMarkerTopic": "false"},
            r"does not exist.*--create --topic towline.s.markers --partitions 1",
        ),
        (1, "delete", {}, r"cleanup.policy=delete: it deletes markers"),
        (1, "compact,delete", {}, r"cleanup.policy=compact,delete: it deletes markers"),
        (1, "compact", {"parallelism": "2"}, r"has 1 partitions, parallelism 2"),
        (2, "compact", {}, None),
        (1, "", {}, None),  # a user who may not see it
    ],
)
def test_a_topic_that_would_lose_markers_is_refused(
    memory: MemoryKafka, partitions: int | None, policy: str | None, options: dict[str, str], told: str | None
) -> None:
    if partitions is not None and policy is not None:
        memory.topics[TOPIC], memory.configs[TOPIC] = partitions, {"cleanup.policy": policy}
    if told is None:
        reader(**options).ensure_topic()
        return
    for _ in range(2):  # it is no better the second time
        with pytest.raises(KafkaError, match=rf"{told}.*TL-K22"):
            reader(**options).ensure_topic()


def test_all_markers_are_those_of_each_partition(memory: MemoryKafka) -> None:
    assert reader().read_markers() == {}
    memory.topics[TOPIC] = 3
    memory.log[TOPIC, 1].append(Written(TOPIC, 1, b"s/1", NEWEST.to_json()))
    assert reader().read_markers() == {0: None, 1: NEWEST, 2: None}


# -- set by hand --


def test_a_reset_keeps_the_totals_and_accepts_any_query(memory: MemoryKafka) -> None:
    memory.topics[TOPIC], memory.configs[TOPIC] = 2, COMPACT
    before = Marker(6, 1, rows=5, crc=1, writer="q", offsets="h", dead_lettered=2, total_rows=50, total_dead_lettered=3)
    memory.log[TOPIC, 0].append(Written(TOPIC, 0, b"s/0", before.to_json()))
    memory.log[TOPIC, 1].append(Written(TOPIC, 1, b"s/1", b"what nobody understands"))
    memory.undecided = 3
    markers = MarkerStore(kafka.settings(parallelism="2"), "s").reset(9)
    assert markers == reader().read_markers()
    assert markers[0] == Marker(9, 2, writer=ANY_QUERY, total_rows=50, total_dead_lettered=3)
    assert markers[1] == Marker(9, 2)
    assert [one and one.totals for one in markers.values()] == [MarkerTotals(50, 3), MarkerTotals(0, 0)]
    assert memory.undecided == 0, "who looks next sees what was set"
    assert [producer.id for producer in memory.producers] == ["towline.s.0", "towline.s.1"], (
        "a query that runs is fenced"
    )
    again = MarkerStore(kafka.settings(), "s").reset(NO_BATCH)
    assert again == {0: Marker(NO_BATCH, 1, total_rows=50, total_dead_lettered=3)}
    assert MarkerStore(kafka.settings(), "s").reset(None) == {0: None}
    assert reader().read_marker(0) is None
    assert MarkerStore(kafka.settings(), "s").reset(3) == {0: Marker(3, 1)}


def test_a_marker_that_could_not_be_set_is_an_error(memory: MemoryKafka) -> None:
    memory.fail("commit_transaction", kafka.INCONSISTENT)
    with pytest.raises(KafkaError, match="TL-K20"):
        MarkerStore(kafka.settings(), "s").reset(3)
    assert memory.calls[-2:] == ["purge", "flush"]
    assert reader().read_marker(0) is None
    memory.fail("fetch", kafka.TRANSPORT)
    MarkerStore(kafka.settings(), "s").reset(4)
    memory.fail("fetch", kafka.TRANSPORT)
    with pytest.raises(KafkaError, match="TL-K01"):  # not taken for a marker that can't be understood
        MarkerStore(kafka.settings(), "s").reset(5)
    found = reader().read_marker(0)
    assert found is not None
    assert found.batch == 4
