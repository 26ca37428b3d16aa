"""What is made of recorded facts of a cluster, where no real one is needed to have it said."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engines.planting import bridge_case
from tests.unit.doctor.recorded import BROKEN, HOLDS, LIMITED, UNKNOWN, WARNS
from towline.doctor.cluster import TRANSACTION_TOPIC, ClusterProbe, TopicRole, TopicState, TopicUse, topic_uses
from towline.doctor.inputs import LineLoad
from towline.doctor.kafka import CHECKS
from towline.doctor.table import Finding, Verdict, run_checks
from towline.kafka.admin import ClusterInfo

#: A broker's settings as Kafka ships them, but for what it is sound to set.
SETTINGS = {
    "default.replication.factor": "3",
    "min.insync.replicas": "2",
    "transaction.max.timeout.ms": "900000",
    "transaction.state.log.min.isr": "2",
    "transaction.state.log.replication.factor": "3",
    "unclean.leader.election.enable": "false",
}
CONFIG = {
    "cleanup.policy": "delete",
    "max.message.bytes": "1048588",
    "min.insync.replicas": "2",
    "retention.bytes": "-1",
    "retention.ms": "604800000",
    "unclean.leader.election.enable": "false",
}
EVERYTHING = frozenset({"READ", "WRITE", "DELETE", "CREATE", "DESCRIBE", "DESCRIBE_CONFIGS"})
MARKERS = "towline.b.up.markers"
GUARANTEE = 'guarantee = "exactly_once"'
#: What is asked of a cluster.
FACTS = ("cluster_info", "unreachable", "described_topics", "broker_settings", "begin_errors", "hidden_offsets")


def seen(name: str, **config: str) -> TopicState:
    """A sound topic with three copies."""
    known = {"settings": CONFIG | config, "allowed_operations": EVERYTHING}
    return TopicState(name=name, partitions=2, replicas=3, in_sync=3, **known)  # type: ignore[arg-type]


@pytest.fixture
def kafka(tmp_path: Path) -> ClusterProbe:
    """A sound cluster, and a sound bridge at it."""
    one = ClusterProbe(bridge_case(tmp_path, "b", "k:9092"))
    there = {name: seen(name) for name in ("b.records", "b.commands", "b.dead-letters")}
    there[MARKERS] = seen(MARKERS, **{"cleanup.policy": "compact"})
    brokers = {1: "a:9092", 2: "b:9092", 3: "c:9092"}
    known(one, cluster_info=ClusterInfo("x", brokers, dict.fromkeys(there, 2)), unreachable={}, described_topics=there)
    begun = {writer.probe_id: ("", "") for writer in one.writers}
    return known(one, broker_settings=dict.fromkeys(brokers, SETTINGS), begin_errors=begun, hidden_offsets={})


def known(one: ClusterProbe, **facts: Any) -> ClusterProbe:
    vars(one).update(facts)
    return one


def found(one: ClusterProbe) -> list[Finding]:
    return list(run_checks(CHECKS, one))


def bad(one: ClusterProbe) -> list[tuple[str, Verdict]]:
    return sorted({(row.code, row.verdict) for row in found(one) if row.verdict not in {HOLDS, LIMITED}})


def test_a_sound_cluster_has_no_complaint_and_an_answer_to_every_check(kafka: ClusterProbe) -> None:
    assert bad(kafka) == []
    assert {row.code for row in found(kafka)} == {check.code for check in CHECKS}


#: Code, verdict, and what is otherwise than in a sound cluster: a topic's fields and settings, one broker's, the rest.
CASES: list[tuple[str, Verdict, dict[str, Any]]] = [
    ("TL-D27", WARNS, {"fields": {"replicas": 2, "in_sync": 2}}),
    ("TL-D27", WARNS, {"broker": {"transaction.state.log.replication.factor": "1"}}),
    ("TL-D28", WARNS, {"min.insync.replicas": "1"}),
    ("TL-D28", WARNS, {"min.insync.replicas": "3"}),  # one broker away stops writing
    ("TL-D28", WARNS, {"min.insync.replicas": "4"}),
    ("TL-D28", WARNS, {"topic": TRANSACTION_TOPIC, "min.insync.replicas": "3"}),
    ("TL-D28", WARNS, {"fields": {"in_sync": 2}}),
    ("TL-D28", BROKEN, {"fields": {"leaderless_partitions": 1}}),
    ("TL-D28", BROKEN, {"fields": {"in_sync": 1}}),
    ("TL-D30", WARNS, {"unclean.leader.election.enable": "true"}),
    ("TL-D31", BROKEN, {"broker": {"transaction.max.timeout.ms": "30000"}}),
    ("TL-D31", BROKEN, {"begin": "_TIMED_OUT"}),
    ("TL-D31", WARNS, {"hidden": {"b.commands": 50}}),
    ("TL-D34", WARNS, {"retention.ms": "60000"}),
    ("TL-D34", WARNS, {"topic": "b.commands", "retention.ms": "3600000"}),
    ("TL-D34", WARNS, {"topic": "b.dead-letters", "retention.ms": "3600000"}),
    ("TL-D38", BROKEN, {"topic": MARKERS, "cleanup.policy": "compact,delete"}),
    ("TL-D38", BROKEN, {"topic": "b.dead-letters", "cleanup.policy": "compact"}),
    ("TL-D39", BROKEN, {"fields": None}),  # it may not be described
    ("TL-D39", BROKEN, {"fields": {"allowed_operations": frozenset({"DESCRIBE"})}}),
    ("TL-D39", WARNS, {"begin": "TRANSACTIONAL_ID_AUTHORIZATION_FAILED"}),
]


@pytest.mark.parametrize(("code", "verdict", "changes"), CASES)
def test_what_is_wrong_is_said_once(kafka: ClusterProbe, code: str, verdict: Verdict, changes: dict[str, Any]) -> None:
    told = {"topic": "b.records", "fields": {}, "broker": {}, "begin": "", "hidden": {}, **changes}
    name, fields, broker, begin, hidden = (told.pop(key) for key in ("topic", "fields", "broker", "begin", "hidden"))
    topic = None if fields is None else replace(seen(name, **told), **fields)
    known(kafka, described_topics={**kafka.described_topics, name: topic}, hidden_offsets=hidden)
    known(kafka, broker_settings={1: SETTINGS, 2: SETTINGS | broker, 3: SETTINGS})
    known(kafka, begin_errors={kafka.writers[0].probe_id: (begin, "no answer")})
    assert bad(kafka) == [(code, verdict)]


def test_transactions_need_as_many_brokers_as_copies(kafka: ClusterProbe) -> None:
    known(kafka, cluster_info=replace(kafka.cluster_info, brokers={1: "a:9092"}), begin_errors={})
    assert bad(kafka) == [("TL-D27", BROKEN), ("TL-D27", WARNS)]


def test_what_may_not_be_read_is_not_known_and_says_which_right_it_takes(kafka: ClusterProbe) -> None:
    blind = {name: None if one is None else replace(one, settings=None) for name, one in kafka.described_topics.items()}
    one = known(kafka, broker_settings={}, described_topics=blind)
    assert bad(one) == [("TL-D39", UNKNOWN)]
    rights = [row for row in found(one) if row.verdict is UNKNOWN]
    assert rights
    assert all("DescribeConfigs" in row.evidence and "kafka-acls.sh" in row.remedy for row in rights)


@pytest.mark.parametrize(
    ("outcome", "factor", "expected"),
    [
        (("", ""), "3", []),
        (("", ""), "1", [("TL-D27", WARNS)]),
        (("POLICY_VIOLATION", "no"), "3", [("TL-D26", BROKEN)]),
        (("TOPIC_AUTHORIZATION_FAILED", "no"), "3", [("TL-D39", BROKEN)]),
    ],
)
def test_topics_that_will_be_made_are_judged_as_the_brokers_make_them(
    kafka: ClusterProbe, outcome: tuple[str, str], factor: str, expected: list[tuple[str, Verdict]]
) -> None:
    there = {name: one for name, one in kafka.described_topics.items() if name != "b.records"}
    one = known(
        kafka,
        described_topics=there,
        create_errors={"b.records": outcome},
        broker_settings=dict.fromkeys((1, 2, 3), SETTINGS | {"default.replication.factor": factor}),
    )
    assert bad(one) == expected


@given(st.integers(-1, 1 << 40), st.integers(-1, 1 << 50), st.floats(1, 1e9))
def test_records_stay_until_the_nearer_limit(
    tmp_path_factory: pytest.TempPathFactory, by_time: int, by_size: int, rate: float
) -> None:
    case = replace(
        bridge_case(tmp_path_factory.mktemp("b"), "b", "k:9092"), loads={"up": LineLoad(1.0, rate, "--rate")}
    )
    topic = seen("b.records", **{"retention.ms": str(by_time), "retention.bytes": str(by_size)})
    use = (TopicUse("b.records", TopicRole.RECORDS, "up"),)
    one = known(ClusterProbe(case), topic_uses=use, topics={"b.records": topic})
    [check] = [check for check in CHECKS if check.code == "TL-D34"]
    (row,) = run_checks([check], one)
    limits = [by_time] if by_time >= 0 else []
    limits += [int(by_size * 2 / rate * 1000)] if by_size >= 0 else []
    assert (row.verdict is WARNS) == (min(limits, default=3_600_000) < 3_600_000)


@pytest.mark.parametrize(
    ("old", "new", "policy", "expected"),
    [
        (GUARANTEE, f"{GUARANTEE}\ndead_letter_topic = false", "delete", ("TL-D33", WARNS)),
        (GUARANTEE, f"{GUARANTEE}\nparallelism = 3", "delete", ("TL-D38", BROKEN)),
        ('key = "{device}"\n', "", "compact", ("TL-D38", BROKEN)),
    ],
)
def test_what_the_file_asks_of_sound_topics(
    tmp_path: Path, kafka: ClusterProbe, old: str, new: str, policy: str, expected: tuple[str, Verdict]
) -> None:
    one = ClusterProbe(bridge_case(tmp_path, "b", "k:9092", lambda text: text.replace(old, new)))
    vars(one).update({name: vars(kafka)[name] for name in FACTS})
    topic = seen("b.records", **{"cleanup.policy": policy})
    known(one, described_topics={**kafka.described_topics, topic.name: topic})
    assert bad(one) == [expected]


def test_a_pattern_and_a_message_name_what_is_listed(tmp_path: Path) -> None:
    def change(text: str) -> str:
        text = text.replace('from = "b.commands"', 'from = { pattern = "cmd-.*" }')
        return text.replace('topic = "b.records"', 'topic = "to.{device}"\nallowed_topics = ["to.*", "to.fixed"]')

    def dashed(text: str) -> str:
        return change(text.replace("NAME", "b"))

    bridge = bridge_case(tmp_path, "b", "k:9092", dashed).bridge
    uses = topic_uses(bridge, ["cmd-1", "__cmd-2", "to.a", "other", "__consumer_offsets", MARKERS])
    roles: Mapping[str, TopicRole] = {one.name: one.role for one in uses}
    assert {name for name, role in roles.items() if role is TopicRole.SOURCE} == {"cmd-1", "__cmd-2"}
    records = {one.name: one.required for one in uses if one.role is TopicRole.RECORDS}
    assert records["to.a"] is False
    assert records["to.fixed"] is True
    assert not {"other", "__consumer_offsets"} & set(roles)
