"""What each rule makes of what Kafka says, where no real cluster is needed to have it said."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engines.planting import SOUND, bridge_case
from towline.bridge.config.file import load
from towline.doctor.case import LineLoad
from towline.doctor.findings import Finding, Standing
from towline.doctor.kafka import copies, examiner, retention, rights, topics, transactions
from towline.doctor.kafka.brokerclock import least_apart
from towline.doctor.kafka.examiner import answers, judge
from towline.doctor.kafka.flaws import days, named, sized
from towline.doctor.kafka.planned import planned
from towline.doctor.kafka.seen import KafkaSeen, LookedAt, TopicSeen
from towline.doctor.kafka.wanted import TopicRole, WantedTopic, wanted, writers
from towline.kafka import faults

BROKEN, WARNS, LIMITED, HOLDS = Standing.BROKEN, Standing.WARNS, Standing.LIMITED, Standing.HOLDS
#: A broker's settings as Kafka ships them, but for what it is sound to set.
SETTINGS = {
    "auto.create.topics.enable": "false",
    "default.replication.factor": "3",
    "log.cleanup.policy": "delete",
    "log.message.timestamp.after.max.ms": "3600000",
    "log.message.timestamp.before.max.ms": "9223372036854775807",
    "log.message.timestamp.type": "CreateTime",
    "log.retention.bytes": "-1",
    "log.retention.hours": "168",
    "message.max.bytes": "1048588",
    "min.insync.replicas": "2",
    "num.partitions": "1",
    "transaction.max.timeout.ms": "900000",
    "transaction.partition.verification.enable": "true",
    "transaction.state.log.min.isr": "2",
    "transaction.state.log.replication.factor": "3",
    "transactional.id.expiration.ms": "604800000",
    "unclean.leader.election.enable": "false",
}
CONFIG = {
    "cleanup.policy": "delete",
    "max.message.bytes": "1048588",
    "message.timestamp.type": "CreateTime",
    "message.timestamp.after.max.ms": "3600000",
    "message.timestamp.before.max.ms": "9223372036854775807",
    "min.insync.replicas": "2",
    "retention.bytes": "-1",
    "retention.ms": "604800000",
    "unclean.leader.election.enable": "false",
}
EVERYTHING = frozenset({"READ", "WRITE", "DELETE", "CREATE", "DESCRIBE", "DESCRIBE_CONFIGS"})


def seen(name: str, **config: str) -> TopicSeen:
    """A sound topic with three copies; dots of settings are written as underscores."""
    settings = CONFIG | {key.replace("_", "."): value for key, value in config.items()}
    return TopicSeen(name=name, partitions=2, replicas=3, in_sync=3, config=settings, allowed=EVERYTHING)


@pytest.fixture
def look(tmp_path: Path) -> LookedAt:
    """A sound bridge at a sound cluster."""
    file = tmp_path / "bridge.toml"
    file.write_text(SOUND.replace("NAME", "b").replace("SERVERS", "k:9092").replace("STATE", str(tmp_path / "state")))
    bridge = load(file)
    there = {name: seen(name) for name in ("b.records", "b.commands", "b.dead-letters")}
    there["towline.b.up.markers"] = seen("towline.b.up.markers", cleanup_policy="compact")
    begun = writers(bridge)
    kafka = KafkaSeen(
        servers="k:9092",
        cluster_id="x",
        brokers={1: "a:9092", 2: "b:9092", 3: "c:9092"},
        settings={1: SETTINGS, 2: SETTINGS, 3: SETTINGS},
        topics=there,
        listed=dict.fromkeys(there, 2),
        transactions={one.probe_id: ("", "") for one in begun},
    )
    return LookedAt(bridge=bridge, kafka=kafka, wanted=wanted(bridge, there), writers=begun)


def with_topic(look: LookedAt, topic: TopicSeen) -> LookedAt:
    return replace(look, kafka=replace(look.kafka, topics={**look.kafka.topics, topic.name: topic}))


def with_kafka(look: LookedAt, **changes: Any) -> LookedAt:
    return replace(look, kafka=replace(look.kafka, **changes))


def with_settings(look: LookedAt, **changes: str | None) -> LookedAt:
    """One of the three brokers is set otherwise; None for a setting that it does not have."""
    changed = SETTINGS | {key.replace("_", "."): value for key, value in changes.items() if value is not None}
    for key, value in changes.items():
        if value is None:
            del changed[key.replace("_", ".")]
    return with_kafka(look, settings={1: SETTINGS, 2: changed, 3: SETTINGS})


def bad(found: Iterator[Finding]) -> list[tuple[str, Standing]]:
    return sorted({(one.code, one.verdict) for one in found if one.verdict not in (HOLDS, LIMITED)})


def test_a_sound_cluster_has_no_complaint(look: LookedAt) -> None:
    assert bad(judge(look)) == []
    assert bad(answers(look.kafka)) == []


#: What is wrong -> which row says so; what a real Kafka is asked is in tests/integration/doctor.
CASES: dict[str, tuple[Callable[[LookedAt], LookedAt], str, Standing]] = {
    "transactions need more brokers than there are": (
        lambda one: with_kafka(
            with_settings(one, transaction_state_log_replication_factor="3"), brokers={1: "a:9092"}, transactions={}
        ),
        "TL-D32",
        BROKEN,
    ),
    "one copy of transactions": (
        lambda one: with_settings(one, transaction_state_log_replication_factor="1"),
        "TL-D32",
        WARNS,
    ),
    "every copy of transactions has to be there": (
        lambda one: with_topic(one, replace(seen("__transaction_state"), config={"min.insync.replicas": "3"})),
        "TL-D32",
        WARNS,
    ),
    "one broker allows short transactions only": (
        lambda one: with_settings(one, transaction_max_timeout_ms="30000"),
        "TL-D31",
        BROKEN,
    ),
    "a transaction does not begin": (
        lambda one: with_kafka(one, transactions={one.writers[0].probe_id: ("_TIMED_OUT", "no answer")}),
        "TL-D31",
        BROKEN,
    ),
    "writers are forgotten": (
        lambda one: with_settings(one, transactional_id_expiration_ms="60000"),
        "TL-D40",
        WARNS,
    ),
    "late requests are let in": (
        lambda one: with_settings(one, transaction_partition_verification_enable="false"),
        "TL-D41",
        WARNS,
    ),
    "brokers older than 3.6": (
        lambda one: with_settings(one, transaction_partition_verification_enable=None),
        "TL-D41",
        WARNS,
    ),
    "a partition without a leader": (
        lambda one: with_topic(one, replace(seen("b.records"), leaderless=1)),
        "TL-D29",
        BROKEN,
    ),
    "fewer in sync than have to be": (
        lambda one: with_topic(one, replace(seen("b.records"), in_sync=1)),
        "TL-D29",
        BROKEN,
    ),
    "a topic that may not be seen": (
        lambda one: with_kafka(
            one,
            hidden=frozenset({"b.records"}),
            topics={name: topic for name, topic in one.kafka.topics.items() if name != "b.records"},
        ),
        "TL-D39",
        BROKEN,
    ),
    "a clock that may not be a minute ahead": (
        lambda one: with_topic(one, seen("b.records", message_timestamp_after_max_ms="1000")),
        "TL-D35",
        WARNS,
    ),
    "dead letters for an hour": (
        lambda one: with_topic(one, seen("b.dead-letters", retention_ms="3600000")),
        "TL-D34",
        WARNS,
    ),
}


@pytest.mark.parametrize("what", CASES)
def test_what_is_wrong_is_said_once(look: LookedAt, what: str) -> None:
    change, code, verdict = CASES[what]
    found = bad(judge(change(look)))
    alone = [("TL-D27", WARNS)] if len(change(look).kafka.brokers) == 1 else []
    assert found == sorted([(code, verdict), *alone])


def test_what_may_not_be_read_is_not_known_and_says_which_right_it_takes(look: LookedAt) -> None:
    blind = {name: replace(one, config=None) for name, one in look.kafka.topics.items()}
    found = [*judge(with_kafka(look, settings={}, topics=blind))]
    assert bad(iter(found)) == [("TL-D39", Standing.UNKNOWN)]
    assert all("DescribeConfigs" in one.because for one in found if one.verdict is Standing.UNKNOWN)


def test_a_missing_topic_that_any_program_could_make(look: LookedAt) -> None:
    there = {name: one for name, one in look.kafka.topics.items() if name != "b.commands"}
    typo = with_kafka(with_settings(look, auto_create_topics_enable="true"), topics=there)
    (row,) = (one for one in topics.there(typo) if one.verdict is BROKEN)
    assert "b.commands: does not exist" in row.because
    assert "auto.create.topics.enable = true" in row.because


def test_retention_by_size_is_a_time_at_the_rate(look: LookedAt) -> None:
    small = with_topic(look, seen("b.records", retention_bytes=str(10**9)))
    assert bad(retention.kept(small)) == []
    busy = replace(small, total=LineLoad(10_000, 2e6, "--rate"))  # 2 partitions of 1 GB: 1,000 s
    (row,) = (one for one in retention.kept(busy) if one.verdict is WARNS)
    assert "17 min" in row.until


@given(st.integers(-1, 1 << 40), st.integers(-1, 1 << 50), st.floats(1, 1e9), st.integers(1, 100))
def test_records_stay_until_the_nearer_limit(by_time: int, by_size: int, rate: float, partitions: int) -> None:
    one = replace(seen("t", retention_ms=str(by_time), retention_bytes=str(by_size)), partitions=partitions)
    kept = retention.kept_ms(one, rate)
    assert kept is not None
    if by_time < 0 and by_size < 0:
        assert kept == -1
    for limit in (by_time, by_size * partitions / rate * 1000 if by_size >= 0 else -1):
        assert limit < 0 or 0 <= kept <= limit
    assert retention.kept_ms(replace(one, config=None)) is None


def test_topics_that_will_be_made_are_as_the_brokers_make_them(look: LookedAt) -> None:
    missing = [
        WantedTopic("t", TopicRole.RECORDS, "up", partitions=6, made=True),
        WantedTopic("m", TopicRole.MARKERS, "up", made=True),
        WantedTopic("one", TopicRole.RECORDS, "up", made=True, replication=1),
        WantedTopic("no", TopicRole.RECORDS, "up", made=True),
        WantedTopic("b.records", TopicRole.RECORDS, "up", made=True),
        WantedTopic("by-hand", TopicRole.RECORDS, "up"),
    ]
    kafka = replace(look.kafka, may_create={"no": ("POLICY_VIOLATION", "no")})
    made = planned(kafka, missing)
    assert set(made) == {"t", "m", "one"}
    assert (made["t"].replicas, made["t"].partitions, made["one"].replicas) == (3, 6, 1)
    assert made["t"].number("retention.ms") == 168 * 3_600_000
    assert made["m"].policy == {"compact"}
    assert planned(replace(kafka, settings={}), missing[:2]) == {}


def test_a_broker_that_can_not_be_reached_is_named(look: LookedAt) -> None:
    (row,) = answers(replace(look.kafka, unreached={2: "unknown host"}))
    assert (row.code, row.verdict) == ("TL-D25", BROKEN)
    assert "broker 2" in row.because
    assert "unknown host" in row.because


def test_a_broker_that_the_client_gave_up_is_named_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a slow machine the client leaves its bootstrap server for that address before it has the list of topics."""

    def gives_up(*_: object) -> None:
        raise faults.unreachable(
            "k:9092", 11.0, "127.0.0.1:1/7: Connect to ipv4#127.0.0.1:1 failed: Connection refused"
        )

    monkeypatch.setattr(examiner, "read", gives_up)
    (row,) = examiner.examine(bridge_case(tmp_path, "b", "k:9092"))
    assert (row.code, row.verdict) == ("TL-D25", BROKEN)
    assert row.because.startswith("broker 7 tells its clients to come to 127.0.0.1:1, which can't be reached: Connect")


def test_rights_are_told_with_the_command_that_gives_them(look: LookedAt) -> None:
    poor = with_topic(look, replace(seen("b.records"), allowed=frozenset({"DESCRIBE", "DESCRIBE_CONFIGS"})))
    (row,) = rights.rights(poor)
    assert row.mend.startswith("kafka-acls.sh --bootstrap-server k:9092 --add")
    assert "--operation Write --topic b.records" in row.mend


def test_who_writes_with_transactions(look: LookedAt) -> None:
    (one,) = look.writers
    assert (one.line, one.clock_ms) == ("up", 60_000)
    assert one.probe_id == "towline.b.up.towline-doctor"
    assert one.probe_id.startswith(one.prefix)


def test_a_pattern_and_a_message_name_what_is_listed(look: LookedAt, tmp_path: Path) -> None:
    file = tmp_path / "bridge.toml"
    text = file.read_text().replace('from = "b.commands"', 'from = { pattern = "cmd-.*" }')
    dynamic = 'topic = "to.{device}"\nallowed_topics = ["to.*"]'
    file.write_text(text.replace('topic = "b.records"', dynamic))
    found = wanted(load(file), ["cmd-1", "to.a", "other", "__consumer_offsets", "towline.b.up.markers"])
    roles: Mapping[str, TopicRole] = {one.name: one.role for one in found}
    assert {name for name, role in roles.items() if role is TopicRole.SOURCE} == {"cmd-1"}
    assert "to.a" in roles
    assert not {"other", "__consumer_offsets"} & set(roles)


@given(st.floats(0, 1e15))
def test_spans_and_sizes_are_short_and_have_a_unit(value: float) -> None:
    for text in (days(value), sized(value)):
        number, unit = text.split(" ")
        assert float(number.replace(",", "")) >= 0
        assert unit in {"s", "min", "h", "days", "B", "kB", "MB", "GB", "TB"}


@given(st.lists(st.text("ab", min_size=1), min_size=1))
def test_many_topics_are_counted(names: list[str]) -> None:
    told = named(names)
    assert len(told.split(", ")) <= 3
    assert ("more" in told) == (len(set(names)) > 3)


@given(st.floats(-100, 100), st.lists(st.tuples(st.floats(0, 5), st.floats(0, 5)), min_size=1, max_size=3))
def test_a_slow_answer_proves_no_difference(truth: float, ways: list[tuple[float, float]]) -> None:
    """A record is on its way for a while, and so is its answer: what is told is never more than what is true."""
    bounds = [(truth - there, truth + back) for there, back in ways]
    told = least_apart(bounds)
    assert abs(told) <= abs(truth)
    assert told * truth >= 0
    if all(there + back == 0 for there, back in ways):
        assert told == truth


def test_transactions_of_a_bridge_that_has_none_are_no_question(look: LookedAt) -> None:
    without = replace(look, writers=())
    for rule in (*transactions.RULES, copies.transaction_log):
        assert [*rule(without)] == []
