"""Faults planted in a real Kafka: each is found by the row it should be, and a sound cluster by none."""

from __future__ import annotations

import dataclasses
import itertools
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ResourcePatternType,
    ResourceType,
)
from confluent_kafka.cimpl import NewTopic

from tests.engines.planting import bridge_case, complaints
from tests.helpers import wait_until
from towline.doctor import clock
from towline.doctor.case import Case
from towline.doctor.findings import Finding, Standing
from towline.doctor.kafka.brokerclock import skews
from towline.doctor.kafka.examiner import examine
from towline.doctor.kafka.wanted import PROBE
from towline.kafka import admin
from towline_prove.devstack import Kafka
from towline_prove.devstack.cluster import KafkaCluster
from towline_prove.devstack.secured import SecuredKafka

pytestmark = pytest.mark.kafka

ALLOW: Final = AclPermissionType.ALLOW
BROKEN, WARNS, UNKNOWN = Standing.BROKEN, Standing.WARNS, Standing.UNKNOWN
_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, kafka: Kafka) -> Iterator[KafkaCluster]:
    """Three brokers, once for all; `kafka` says whether this machine can."""
    with KafkaCluster(tmp_path_factory.mktemp("cluster")) as started:
        yield started


def put(servers: str, topics: dict[str, dict[str, str]], replication: int = -1, partitions: int = 2) -> None:
    """Make topics with these settings, and wait until each broker knows of every replica that it is in sync."""
    new = [NewTopic(name, partitions, replication, config=config) for name, config in topics.items()]
    maker = AdminClient({"bootstrap.servers": servers})
    for future in maker.create_topics(new).values():
        future.result(60)

    def in_sync(server: str) -> bool:
        listed = AdminClient({"bootstrap.servers": server}).list_topics(timeout=10).topics
        parts = [part for name in topics if name in listed for part in listed[name].partitions.values()]
        return len(parts) == partitions * len(topics) and all(
            part.leader >= 0 and len(part.isrs) == len(part.replicas) for part in parts
        )

    for server in servers.split(","):
        wait_until(lambda server=server: in_sync(server), 120, f"{topics} at {server}")  # type: ignore[misc]


def settles(case: Case, expected: dict[str, Standing]) -> list[Finding]:
    """Ask until the rows that complain are these: brokers hear of a change one after the other."""
    last: list[Finding] = []

    def asked() -> bool:
        last[:] = examine(case)
        return complaints(last) == expected

    try:
        wait_until(asked, 60)
    except AssertionError as error:
        raise AssertionError([f"{one.verdict} {one.code} {one.because}" for one in last]) from error
    return last


def alter(servers: str, kind: Any, name: str, **values: str) -> None:
    """Set dynamic settings of a topic or broker; dots are written as underscores."""
    entries = [
        ConfigEntry(key.replace("_", "."), value, incremental_operation=AlterConfigOpType.SET)
        for key, value in values.items()
    ]
    resource = ConfigResource(kind, name, incremental_configs=entries)
    asked = AdminClient({"bootstrap.servers": servers})
    for future in asked.incremental_alter_configs([resource]).values():
        future.result(30)


@dataclasses.dataclass(frozen=True)
class Plant:
    """What is wrong.

    Attributes:
        code: The row that has to find it, and only that.
        verdict: How it has to judge.
        topics: Settings of topics that are made instead of the sound ones; None for one that is left out.
        change: What is changed in the bridge file.
        replication: Of the topics.
    """

    code: str
    verdict: Standing
    topics: dict[str, dict[str, str] | None] = dataclasses.field(default_factory=dict)
    change: tuple[str, str] = ("", "")
    replication: int = 3


def topic(name: str, **config: str) -> dict[str, dict[str, str] | None]:
    return {name: {key.replace("_", "."): value for key, value in config.items()}}


KEYLESS = ('key = "{device}"\n', "")
HOUR = "3600000"
#: What is planted -> the row that has to find it.
PLANTS: Final = {
    "a source is missing": Plant("TL-D26", BROKEN, {"commands": None}),
    "one copy": Plant("TL-D27", WARNS, replication=1),
    "two copies": Plant("TL-D27", WARNS, replication=2),
    "one broker away stops writing": Plant("TL-D28", WARNS, topic("records", min_insync_replicas="3")),
    "acknowledged by one broker": Plant("TL-D28", WARNS, topic("records", min_insync_replicas="1")),
    "more in sync than copies": Plant("TL-D28", WARNS, topic("records", min_insync_replicas="4")),
    "unclean election": Plant("TL-D30", WARNS, topic("records", unclean_leader_election_enable="true")),
    "transactions longer than Kafka allows": Plant(
        "TL-D31",
        BROKEN,
        change=("create_topics", 'settings = { "transaction.timeout.ms" = 901000 }\ncreate_topics'),
    ),
    "a large message stops the line": Plant(
        "TL-D33", WARNS, change=('guarantee = "exactly_once"', 'guarantee = "exactly_once"\ndead_letter_topic = false')
    ),
    "records kept for a minute": Plant("TL-D34", WARNS, topic("records", retention_ms="60000")),
    "commands kept for an hour": Plant("TL-D34", WARNS, topic("commands", retention_ms=HOUR)),
    "old records refused": Plant("TL-D35", WARNS, topic("records", message_timestamp_before_max_ms=HOUR)),
    "markers deleted by time": Plant("TL-D36", BROKEN, topic("markers", cleanup_policy="compact,delete")),
    "fewer markers than writers": Plant(
        "TL-D36", BROKEN, change=('guarantee = "exactly_once"', 'guarantee = "exactly_once"\nparallelism = 3')
    ),
    "a compacted topic, and no key": Plant("TL-D38", BROKEN, topic("records", cleanup_policy="compact"), KEYLESS),
    "compacted dead letters": Plant("TL-D38", BROKEN, topic("dead-letters", cleanup_policy="compact")),
}


def sound_topics(name: str) -> dict[str, dict[str, str]]:
    return {
        f"{name}.records": {},
        f"{name}.commands": {},
        f"{name}.dead-letters": {},
        f"towline.{name}.up.markers": {"cleanup.policy": "compact"},
    }


def full(name: str, short: str) -> str:
    return f"towline.{name}.up.markers" if short == "markers" else f"{name}.{short}"


@pytest.mark.parametrize("what", PLANTS)
def test_a_fault_is_found_by_its_row_and_by_no_other(cluster: KafkaCluster, tmp_path: Path, what: str) -> None:
    plant, name = PLANTS[what], f"b{next(_numbers)}"
    topics = sound_topics(name)
    for short, config in plant.topics.items():
        if config is None:
            del topics[full(name, short)]
        else:
            topics[full(name, short)] |= config
    put(cluster.bootstrap, topics, plant.replication)
    case = bridge_case(tmp_path, name, cluster.bootstrap, lambda text: text.replace(*plant.change))
    settles(case, {plant.code: plant.verdict})


def test_nothing_is_found_in_a_sound_cluster_and_nothing_is_made(cluster: KafkaCluster, tmp_path: Path) -> None:
    name = f"b{next(_numbers)}"
    put(cluster.bootstrap, sound_topics(name), 3)
    before = set(admin.reachable(cluster.bootstrap).topics)
    found = settles(bridge_case(tmp_path, name, cluster.bootstrap), {})
    assert {one.code for one in found} >= {f"TL-D{number}" for number in (25, 26, 27, 28, 29, 30, 31, 32, 33, 34)}
    after = set(admin.reachable(cluster.bootstrap).topics)
    assert after - before <= {"__transaction_state", "__consumer_offsets"}


def test_topics_that_towline_will_make_are_judged_by_the_clusters_settings(
    cluster: KafkaCluster, tmp_path: Path
) -> None:
    name = f"b{next(_numbers)}"
    put(cluster.bootstrap, {f"{name}.commands": {}}, 3)
    one_copy = ("{ partitions = 2 }", "{ partitions = 2, replication_factor = 1 }")
    case = bridge_case(tmp_path, name, cluster.bootstrap, lambda text: text.replace(*one_copy))
    settles(case, {"TL-D27": WARNS})
    too_many = ("{ partitions = 2 }", "{ partitions = 2, replication_factor = 4 }")
    case = bridge_case(tmp_path, name, cluster.bootstrap, lambda text: text.replace(*too_many))
    settles(case, {"TL-D26": BROKEN})


def test_kafkas_own_topic_of_transactions(cluster: KafkaCluster, tmp_path: Path) -> None:
    name = f"b{next(_numbers)}"
    put(cluster.bootstrap, sound_topics(name), 3)
    case = bridge_case(tmp_path, name, cluster.bootstrap)
    settles(case, {})  # and it is there
    alter(cluster.bootstrap, ResourceType.TOPIC, "__transaction_state", min_insync_replicas="1")
    try:
        settles(case, {"TL-D32": WARNS})
    finally:
        alter(cluster.bootstrap, ResourceType.TOPIC, "__transaction_state", min_insync_replicas="2")


def test_a_replica_that_is_away(cluster: KafkaCluster, tmp_path: Path) -> None:
    """Last of `cluster`: a broker is killed, and stays away."""
    name = f"b{next(_numbers)}"
    put(cluster.bootstrap, sound_topics(name), 3)
    case = dataclasses.replace(bridge_case(tmp_path, name, cluster.bootstrap), patience=3.0)
    cluster.node(3).kill()
    settles(case, {"TL-D29": WARNS})  # until it is fenced, it can't be reached, which is TL-D25


def test_one_broker_is_told_and_nothing_else(kafka: Kafka, tmp_path: Path) -> None:
    name = f"b{next(_numbers)}"
    put(kafka.bootstrap, sound_topics(name))
    found = settles(bridge_case(tmp_path, name, kafka.bootstrap), {"TL-D27": WARNS})
    assert "on this machine" in next(one.because for one in found if one.code == "TL-D27")


def test_nobody_there(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = f"127.0.0.1:{listener.getsockname()[1]}"
        case = dataclasses.replace(bridge_case(tmp_path, "b", server), patience=1.0)
        (found,) = examine(case)
    assert (found.code, found.verdict) == ("TL-D25", BROKEN)
    assert "refused" in found.because


def test_a_broker_that_tells_its_clients_another_address(tmp_path: Path, kafka: Kafka) -> None:
    unheard = {"advertised.listeners": "PLAINTEXT://127.0.0.1:1"}
    with Kafka(tmp_path / "kafka", settings=unheard) as lost:
        (found,) = examine(bridge_case(tmp_path, "b", lost.bootstrap))
        lost.kill()  # it can't reach itself to end in order
    assert (found.code, found.verdict) == ("TL-D25", BROKEN)
    assert re.search(r"127\.0\.0\.1:1, which can't be reached", found.because)


#: Rights that the lines of a sound bridge need, in Kafka's words.
GRANTED: Final[tuple[tuple[Any, str, Any, Any], ...]] = (
    (ResourceType.TOPIC, "NAME.records", AclOperation.WRITE, ResourcePatternType.LITERAL),
    (ResourceType.TOPIC, "NAME.dead-letters", AclOperation.WRITE, ResourcePatternType.LITERAL),
    (ResourceType.TOPIC, "NAME.commands", AclOperation.READ, ResourcePatternType.LITERAL),
    (ResourceType.TOPIC, "towline.NAME.up.markers", AclOperation.READ, ResourcePatternType.LITERAL),
    (ResourceType.TOPIC, "towline.NAME.up.markers", AclOperation.WRITE, ResourcePatternType.LITERAL),
    (ResourceType.TRANSACTIONAL_ID, "towline.NAME.", AclOperation.WRITE, ResourcePatternType.PREFIXED),
    (ResourceType.TRANSACTIONAL_ID, "towline.NAME.", AclOperation.DESCRIBE, ResourcePatternType.PREFIXED),
    (ResourceType.TOPIC, "NAME.", AclOperation.DESCRIBE_CONFIGS, ResourcePatternType.PREFIXED),
    (ResourceType.TOPIC, "towline.NAME.", AclOperation.DESCRIBE_CONFIGS, ResourcePatternType.PREFIXED),
    (ResourceType.BROKER, "kafka-cluster", AclOperation.DESCRIBE_CONFIGS, ResourcePatternType.LITERAL),
)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory, kafka: Kafka) -> Iterator[SecuredKafka]:
    """A Kafka that asks for rights, and forgets writers after an hour."""
    settings = {
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": "User:ANONYMOUS",  # on the listener of its own
        "transactional.id.expiration.ms": HOUR,
        "transaction.partition.verification.enable": "false",
    }
    with SecuredKafka(tmp_path_factory.mktemp("guarded"), settings=settings) as started:
        yield started


#: What the settings of `guarded` are found by, beside what is planted.
BADLY_SET: Final = {"TL-D27": WARNS, "TL-D40": WARNS, "TL-D41": WARNS}


@pytest.mark.parametrize(
    ("left_out", "expected"),
    [
        ((), {}),
        ((0,), {"TL-D39": BROKEN}),
        ((2,), {"TL-D39": BROKEN}),
        ((5,), {"TL-D39": WARNS}),
        ((7,), {"TL-D39": UNKNOWN}),
        ((9,), {"TL-D39": UNKNOWN, "TL-D40": None, "TL-D41": None}),
    ],
    ids=["none", "write", "read", "transactional id", "settings of topics", "settings of brokers"],
)
def test_a_right_that_is_missing(
    guarded: SecuredKafka, tmp_path: Path, left_out: tuple[int, ...], expected: dict[str, Standing | None]
) -> None:
    name = f"b{next(_numbers)}"
    put(guarded.inside, sound_topics(name))
    grant(guarded, name, left_out)
    wanted = {code: verdict for code, verdict in {**BADLY_SET, **expected}.items() if verdict is not None}
    settles(bridge_case(tmp_path, name, guarded.bootstrap, lambda text: secured(text, guarded)), wanted)


def grant(broker: SecuredKafka, name: str, left_out: tuple[int, ...]) -> None:
    """Give every right but those, and take back what an earlier test gave for the whole cluster."""
    asked = AdminClient({"bootstrap.servers": broker.inside})
    bindings = [
        AclBinding(kind, text.replace("NAME", name), pattern, "User:towline", "*", operation, AclPermissionType.ALLOW)
        for kind, text, operation, pattern in GRANTED
    ]
    given = [one for number, one in enumerate(bindings) if number not in left_out]
    for future in asked.create_acls(given).values():
        future.result(30)
    for number in left_out:
        if GRANTED[number][0] == ResourceType.BROKER:
            one = bindings[number]
            only = AclBindingFilter(
                one.restype,
                one.name,
                one.resource_pattern_type,
                None,  # type: ignore[arg-type]
                None,  # type: ignore[arg-type]
                one.operation,
                one.permission_type,
            )
            for future in asked.delete_acls([only]).values():
                future.result(30)


def secured(text: str, broker: SecuredKafka) -> str:
    lines = "".join(f'"{key}" = "{value}", ' for key, value in broker.settings_of().items())
    own = f'settings = {{ {lines.rstrip(", ")} }}\npassword_file = "{broker.password_file}"\ncreate_topics'
    return text.replace("create_topics", own)


def test_a_password_that_is_wrong(guarded: SecuredKafka, tmp_path: Path) -> None:
    wrong = tmp_path / "password"
    wrong.write_text("hunter2")

    def change(text: str) -> str:
        return secured(text, guarded).replace(str(guarded.password_file), str(wrong))

    case = dataclasses.replace(bridge_case(tmp_path, "b", guarded.bootstrap, change), patience=3.0)
    (found,) = examine(case)
    assert (found.code, found.verdict) == ("TL-D25", BROKEN)
    assert "authentication failed" in found.because
    assert "hunter2" not in str(found)


def test_a_topic_that_may_not_be_made(guarded: SecuredKafka, tmp_path: Path) -> None:
    name = f"b{next(_numbers)}"
    topics = sound_topics(name)
    del topics[f"{name}.records"]
    put(guarded.inside, topics)
    grant(guarded, name, ())
    case = bridge_case(tmp_path, name, guarded.bootstrap, lambda text: secured(text, guarded))
    found = settles(case, {**BADLY_SET, "TL-D39": BROKEN})
    assert any("Create" in one.because and f"{name}.records" in one.because for one in found)


def test_kafkas_clock_where_topics_may_be_made_and_not_removed(guarded: SecuredKafka, tmp_path: Path) -> None:
    """Last of `guarded`: what is granted here stays."""
    case = bridge_case(tmp_path, f"b{next(_numbers)}", guarded.bootstrap, lambda text: secured(text, guarded))
    measured = skews(case)
    assert (dict(measured.by_broker), measured.left) == ({}, "")
    assert "no topic may be made" in measured.why
    asked = AdminClient({"bootstrap.servers": guarded.inside})
    half = [
        AclBinding(ResourceType.TOPIC, PROBE, ResourcePatternType.PREFIXED, "User:towline", "*", one, ALLOW)
        for one in (AclOperation.CREATE, AclOperation.WRITE)
    ]
    for future in asked.create_acls(half).values():
        future.result(30)
    found = wait_until(lambda: [one for one in clock.examine(case) if one.verdict is WARNS], 60)
    (name,) = (one for one in admin.reachable(guarded.inside).topics if one.startswith(PROBE))
    assert name in found[0].because
    asked.delete_topics([name])[name].result(30)
