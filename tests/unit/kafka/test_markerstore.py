"""A marker is read up to the end its leader names, and no nearer end is believed."""

from __future__ import annotations

from itertools import repeat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.kafka import memory as kafka
from tests.unit.kafka.memory import MemoryKafka, Written, kafka_in_memory
from towline.errors import KafkaError
from towline.kafka import markerstore
from towline.kafka.markers import ANY_QUERY, NO_BATCH, Marker
from towline.kafka.markerstore import MarkerStore

OLDER, NEWEST = Marker(6, 1, writer="q"), Marker(7, 1, writer="q")
TOPIC = "towline.s.markers"
COMPACT = {"cleanup.policy": "compact"}


def store(**options: str) -> MarkerStore:
    return MarkerStore(kafka.settings(**options), "s")


def written(marker: Marker, key: bytes = b"s/0") -> Written:
    return Written(TOPIC, int(key[-1:]), key, marker.to_json())


def test_a_followers_end_is_not_the_end(memory: MemoryKafka) -> None:
    memory.log[TOPIC, 0] += [written(OLDER), None, written(NEWEST), None]
    memory.ends = iter([2, 2, 2])  # it is read up to there, until the follower has caught up
    assert store().read_marker(0) == NEWEST
    memory.ends = repeat(2)
    with pytest.raises(KafkaError, match=r"could be read up to 2, and its leader has 4\..*TL-K27"):
        store(deliveryTimeout="2").read_marker(0)
    memory.ends = iter(())
    assert store().read_marker(0) == NEWEST
    del memory.log[TOPIC, 0][2:]
    with pytest.raises(KafkaError, match=r"ends at 2, and ended at 4 before\..*TL-K27"):
        store().read_marker(0)


@given(
    st.lists(st.tuples(st.sampled_from(["s/0", "s/1", "else", None]), st.booleans()), max_size=40), st.integers(0, 300)
)
def test_the_last_record_with_the_key_counts_however_far_back_it_is(
    records: list[tuple[str | None, bool]], behind: int
) -> None:
    """Other keys, ends of transactions and removals lie between; what was removed counts for nothing."""
    with kafka_in_memory() as memory:
        memory.topics[TOPIC] = 1
        log = memory.log[TOPIC, 0]
        expected = None
        for batch, (key, kept) in enumerate(records):
            value = Marker(batch, 1).to_json() if kept else None
            log.append(None if key is None else Written(TOPIC, 0, key.encode(), value))
            if key == "s/0" and kept:
                expected = Marker(batch, 1)
        log += [None] * behind
        assert store().read_marker(0) == expected


def test_a_marker_near_the_end_needs_no_read_of_the_whole_topic(memory: MemoryKafka) -> None:
    """Compaction comes late: years of markers may lie before it."""
    memory.log[TOPIC, 0] += [written(OLDER), None] * 1000 + [written(NEWEST), None]
    assert store().read_marker(0) == NEWEST
    assert memory.calls.count("fetch") <= 16


def test_a_value_that_is_no_marker_is_an_error_with_its_key(memory: MemoryKafka) -> None:
    memory.log[TOPIC, 0].append(Written(TOPIC, 0, b"s/0", b'{"v":2}'))
    with pytest.raises(KafkaError, match=r'"s/0" in "towline.s.markers" can not be understood: .*version 2.*TL-K22'):
        store().read_marker(0)


@pytest.mark.parametrize("call", ["get_watermark_offsets", "fetch"])
def test_a_reader_that_had_no_answer_is_not_asked_again(memory: MemoryKafka, call: str) -> None:
    memory.log[TOPIC, 0].append(written(NEWEST))
    for _ in range(2):
        assert store(kafka__client__rack="west").read_marker(0) == NEWEST
        (reader,) = markerstore._consumers.values()
    assert reader.place == ("", 0), "it fetches nothing between two batches"
    assert reader.config["client.rack"] == "", "it would be sent to a follower"
    memory.fail(call, kafka.TRANSPORT)
    with pytest.raises(KafkaError, match="TL-K01"):
        store(kafka__client__rack="west").read_marker(0)
    assert memory.calls[-1] == "close"
    assert store().read_marker(0) == NEWEST


def test_a_topic_for_markers_is_made_compacted_with_a_partition_for_each_of_the_sink(memory: MemoryKafka) -> None:
    memory.seen = iter([True, False, True, False, False])  # the next broker may not know of it yet
    store(parallelism="3").ensure_topic()
    assert (memory.topics[TOPIC], memory.configs[TOPIC]["cleanup.policy"]) == (3, "compact")
    before = len(memory.calls)
    store(parallelism="3").ensure_topic()
    assert len(memory.calls) == before, "once in a process is enough"
    memory.seen = repeat(False)
    with pytest.raises(KafkaError, match=r"does not exist.*--create --topic other.s.markers --partitions 1.*TL-K22"):
        store(transactionalIdPrefix="other").ensure_topic()
    assert memory.now - 1000 < 124, "not for ever"


@pytest.mark.parametrize(
    ("partitions", "policy", "options", "told"),
    [
        (1, "delete", {}, "cleanup.policy=delete.*need 1 at least, and compact alone"),
        (1, "compact,delete", {}, "cleanup.policy=compact,delete.*compact alone"),
        (1, "compact", {"parallelism": "2"}, "has 1 partitions.*need 2 at least.*--partitions 2"),
        (2, "compact", {}, None),
        (1, "", {}, None),  # a user who may not see it
    ],
)
def test_a_topic_that_would_lose_markers_is_refused(
    memory: MemoryKafka, partitions: int, policy: str, options: dict[str, str], told: str | None
) -> None:
    memory.topics[TOPIC], memory.configs[TOPIC] = partitions, {"cleanup.policy": policy}
    if told is None:
        store(**options).ensure_topic()
        return
    for _ in range(2):  # it is no better the second time
        with pytest.raises(KafkaError, match=rf"{told}.*TL-K22"):
            store(**options).ensure_topic()


def test_a_reset_keeps_the_totals_and_accepts_any_query(memory: MemoryKafka) -> None:
    assert store().read_markers() == {}
    memory.topics[TOPIC], memory.configs[TOPIC] = 2, COMPACT
    before = Marker(6, 1, rows=5, crc=1, writer="q", offsets="h", dead_lettered=2, total_rows=50, total_dead_lettered=3)
    memory.log[TOPIC, 0].append(written(before))
    memory.log[TOPIC, 1].append(Written(TOPIC, 1, b"s/1", b"what nobody understands"))
    memory.undecided = 3
    markers = store(parallelism="2").reset(9)
    assert markers == store().read_markers()
    assert markers == {0: Marker(9, 2, writer=ANY_QUERY, total_rows=50, total_dead_lettered=3), 1: Marker(9, 2)}
    assert memory.undecided == 0, "who looks next sees what was set"
    assert [producer.id for producer in memory.producers] == ["towline.s.0", "towline.s.1"], "it fences"
    assert store().reset(NO_BATCH) == {0: Marker(NO_BATCH, 1, total_rows=50, total_dead_lettered=3)}
    assert store().reset(3) == {0: Marker(3, 1, total_rows=50, total_dead_lettered=3)}


def test_a_marker_that_could_not_be_set_is_an_error(memory: MemoryKafka) -> None:
    memory.fail("commit_transaction", kafka.INCONSISTENT)
    with pytest.raises(KafkaError, match="TL-K20") as caught:
        store().reset(3)
    assert type(caught.value) is KafkaError, "Spark's text names the class"
    assert memory.calls[-2:] == ["purge", "flush"]
    assert store().reset(4) == store().read_markers()
    memory.fail("fetch", kafka.TRANSPORT)
    with pytest.raises(KafkaError, match="TL-K01"):  # not taken for a marker that can't be understood
        store().reset(5)
    assert store().read_markers() == {0: Marker(4, 1)}


def test_the_markers_are_named_as_the_command_line_takes_them() -> None:
    assert store().command_options == "--kafka k:9092 --sink s"
    assert store(transactionalIdPrefix="mine").command_options == "--kafka k:9092 --sink s --prefix mine"
