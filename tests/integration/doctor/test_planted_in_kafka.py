"""Faults planted in a real Kafka: each is found by the row it should be, and nothing is made in it."""

from __future__ import annotations

import itertools
import re
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
)
from confluent_kafka.cimpl import NewTopic

from tests.engines.planting import bridge_case, complaints
from tests.helpers import wait_until
from tests.unit.doctor.recorded import BROKEN, UNKNOWN, WARNS
from towline.doctor.case import Case
from towline.doctor.cluster import Cluster
from towline.doctor.kafka import CHECKS
from towline.doctor.table import Finding, Standing, answers
from towline.errors import KafkaError
from towline.kafka import admin
from towline_prove.devstack import Kafka
from towline_prove.devstack.secured import SecuredKafka

pytestmark = pytest.mark.kafka

_numbers = itertools.count(1)
#: What is found wherever Kafka is one broker.
ALONE: Final = {"TL-D27": WARNS}
#: All that can't be asked of a Kafka that does not answer.
NOT_ASKED: Final = {check.code: UNKNOWN for check in CHECKS if check.code != "TL-D25"}


def put(servers: str, topics: dict[str, dict[str, str]]) -> None:
    """Make topics with these settings, and wait until the broker has them."""
    asked = AdminClient({"bootstrap.servers": servers})
    for future in asked.create_topics([NewTopic(name, 2, config=config) for name, config in topics.items()]).values():
        future.result(60)
    wait_until(lambda: set(topics) <= set(admin.reachable(servers).topics), 60, str(topics))


def sound_topics(name: str) -> dict[str, dict[str, str]]:
    return {
        f"{name}.records": {},
        f"{name}.commands": {},
        f"{name}.dead-letters": {},
        f"towline.{name}.up.markers": {"cleanup.policy": "compact"},
    }


def asked_of(case: Case) -> list[Finding]:
    return list(answers(CHECKS, Cluster(case)))


def settles(case: Case, expected: dict[str, Standing]) -> list[Finding]:
    """Ask until the rows that complain are these: a broker hears of a change a moment later."""
    last: list[Finding] = []

    def ask() -> bool:
        last[:] = asked_of(case)
        return complaints(last) == expected

    try:
        wait_until(ask, 60)
    except AssertionError as error:
        raise AssertionError([f"{one.verdict} {one.code} {one.because}" for one in last]) from error
    return last


#: What is planted -> what is changed in topics and file, and the row that has to find it.
PLANTS: Final[dict[str, tuple[dict[str, dict[str, str] | None], tuple[str, str], str, Standing]]] = {
    "nothing": ({}, ("", ""), "TL-D27", WARNS),
    "a source is missing": ({"commands": None}, ("", ""), "TL-D26", BROKEN),
    "too many copies": (
        {"records": None},
        ("{ partitions = 2 }", "{ partitions = 2, replication_factor = 4 }"),
        "TL-D26",
        BROKEN,
    ),
    "transactions longer than Kafka allows": (
        {},
        ("create_topics", 'settings = { "transaction.timeout.ms" = 901000 }\ncreate_topics'),
        "TL-D31",
        BROKEN,
    ),
    "commands kept for an hour": ({"commands": {"retention.ms": "3600000"}}, ("", ""), "TL-D34", WARNS),
    "a compacted topic, and no key": (
        {"records": {"cleanup.policy": "compact"}},
        ('key = "{device}"\n', ""),
        "TL-D38",
        BROKEN,
    ),
}


@pytest.mark.parametrize("what", PLANTS)
def test_a_fault_is_found_by_its_row_and_by_no_other(kafka: Kafka, tmp_path: Path, what: str) -> None:
    changed, change, code, verdict = PLANTS[what]
    name = f"doctor{next(_numbers)}"
    topics = {**sound_topics(name), **{f"{name}.{short}": config or {} for short, config in changed.items()}}
    put(
        kafka.bootstrap,
        {one: config for one, config in topics.items() if changed.get(one.split(".")[-1], {}) is not None},
    )
    case = bridge_case(tmp_path, name, kafka.bootstrap, lambda text: text.replace(*change))
    found = settles(case, {**ALONE, code: verdict})
    assert {one.code for one in found} >= {"TL-D25", "TL-D26", "TL-D27", "TL-D31", "TL-D39"}


def test_no_topic_is_made_that_a_pattern_of_the_file_could_take(kafka: Kafka, tmp_path: Path) -> None:
    """Not for a moment: a downlink reads what it finds, and Spark looks for new topics of a pattern while it runs."""
    name = f"0-doctor{next(_numbers)}"  # a row names the first topics of many; those of other tests come behind
    put(kafka.bootstrap, sound_topics(name))
    pattern = (f'from = "{name}.commands"', "from = { pattern = '^(?!towline[.]|.*dead-letters)' }")
    case = bridge_case(tmp_path, name, kafka.bootstrap, lambda text: text.replace("NAME", name).replace(*pattern))
    before = set(admin.reachable(kafka.bootstrap).topics)
    found = asked_of(case)
    made = set(admin.reachable(kafka.bootstrap).topics) - before
    assert made <= {"__transaction_state", "__consumer_offsets"}
    assert {one.code: one.verdict for one in found if one.verdict is UNKNOWN} == {}
    assert any(f"{name}.records" in one.because for one in found if one.line == "down")


def test_a_transaction_that_stays_open_in_a_topic_that_a_line_reads(kafka: Kafka, tmp_path: Path) -> None:
    name = f"doctor{next(_numbers)}"
    put(kafka.bootstrap, sound_topics(name))
    holding = Producer({**kafka.client, "transactional.id": f"{name}.foreign"})
    holding.init_transactions(30)
    holding.begin_transaction()
    for _ in range(50):
        holding.produce(f"{name}.commands", b"x")
    assert holding.flush(30) == 0
    found = settles(replace(bridge_case(tmp_path, name, kafka.bootstrap), patience=2.0), {**ALONE, "TL-D31": WARNS})
    holding.abort_transaction(30)
    assert any(f"{name}.commands: 50 offsets are behind a transaction that stays open" in one.because for one in found)


def test_nobody_there(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = f"127.0.0.1:{listener.getsockname()[1]}"
        found = asked_of(replace(bridge_case(tmp_path, "b", server), patience=1.0))
    assert complaints(found) == {"TL-D25": BROKEN, **NOT_ASKED}
    assert "refused" in next(one.because for one in found if one.code == "TL-D25")


def test_an_address_that_can_not_be_resolved_and_a_kafka_that_is_frozen(tmp_path: Path, kafka: Kafka) -> None:
    """One Kafka for both: it tells its clients of a host that nobody knows; then it is stopped where it stands."""
    unheard = {"advertised.listeners": "PLAINTEXT://nobody.invalid:9092"}
    with Kafka(tmp_path / "kafka", settings=unheard) as lost:
        case = replace(bridge_case(tmp_path, "b", lost.bootstrap), patience=3.0)
        found = asked_of(case)
        assert complaints(found) == {"TL-D25": BROKEN, **NOT_ASKED}
        told = next(one.because for one in found if one.code == "TL-D25")
        assert re.search(r"broker \d+ tells its clients to come to nobody\.invalid:9092", told)
        with pytest.raises(KafkaError, match=r"Failed to resolve 'nobody.invalid:9092': .*TL-K01"):
            admin.create_topics(lost.bootstrap, {"x": 1}, timeout=3.0)
        lost.pause()
        found = asked_of(case)
        lost.kill()  # it can't reach itself to end in order
    assert complaints(found) == {"TL-D25": BROKEN, **NOT_ASKED}
    assert "did not answer for 3 s" in next(one.because for one in found if one.code == "TL-D25")
    assert kafka.running


#: Rights that the lines of a sound bridge need, in Kafka's words.
GRANTED: Final[dict[str, tuple[Any, str, Any, Any]]] = {
    "write": (ResourceType.TOPIC, "NAME.records", AclOperation.WRITE, ResourcePatternType.LITERAL),
    "dead letters": (ResourceType.TOPIC, "NAME.dead-letters", AclOperation.WRITE, ResourcePatternType.LITERAL),
    "read": (ResourceType.TOPIC, "NAME.commands", AclOperation.READ, ResourcePatternType.LITERAL),
    "see markers": (ResourceType.TOPIC, "towline.NAME.up.markers", AclOperation.READ, ResourcePatternType.LITERAL),
    "markers": (ResourceType.TOPIC, "towline.NAME.up.markers", AclOperation.WRITE, ResourcePatternType.LITERAL),
    "ids": (ResourceType.TRANSACTIONAL_ID, "towline.NAME.", AclOperation.WRITE, ResourcePatternType.PREFIXED),
    "see ids": (ResourceType.TRANSACTIONAL_ID, "towline.NAME.", AclOperation.DESCRIBE, ResourcePatternType.PREFIXED),
    "settings": (ResourceType.TOPIC, "NAME.", AclOperation.DESCRIBE_CONFIGS, ResourcePatternType.PREFIXED),
    "more settings": (ResourceType.TOPIC, "towline.NAME.", AclOperation.DESCRIBE_CONFIGS, ResourcePatternType.PREFIXED),
    "brokers": (ResourceType.BROKER, "kafka-cluster", AclOperation.DESCRIBE_CONFIGS, ResourcePatternType.LITERAL),
}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory, kafka: Kafka) -> Iterator[SecuredKafka]:
    """A Kafka that asks for rights; `kafka` says whether this machine can."""
    settings = {
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": "User:ANONYMOUS",  # on the listener of its own
    }
    with SecuredKafka(tmp_path_factory.mktemp("guarded"), settings=settings) as started:
        yield started


@pytest.mark.parametrize(
    ("left_out", "expected"),
    [
        ("brokers", {"TL-D39": UNKNOWN}),  # first: what is granted for the whole cluster stays
        ("", {}),
        ("write", {"TL-D39": BROKEN}),
        ("ids", {"TL-D39": WARNS}),
        ("settings", {"TL-D39": UNKNOWN}),
    ],
)
def test_a_right_that_is_missing(
    guarded: SecuredKafka, tmp_path: Path, left_out: str, expected: dict[str, Standing]
) -> None:
    name = f"b{next(_numbers)}"
    put(guarded.inside, sound_topics(name))
    grant(guarded, name, left_out)
    settles(bridge_case(tmp_path, name, guarded.bootstrap, secured(guarded)), {**ALONE, **expected})


def grant(broker: SecuredKafka, name: str, left_out: str) -> None:
    bindings = [
        AclBinding(kind, text.replace("NAME", name), pattern, "User:towline", "*", operation, AclPermissionType.ALLOW)
        for right, (kind, text, operation, pattern) in GRANTED.items()
        if right != left_out
    ]
    asked = AdminClient({"bootstrap.servers": broker.inside})
    for future in asked.create_acls(bindings).values():
        future.result(30)


def secured(broker: SecuredKafka, password: Path | None = None) -> Callable[[str], str]:
    lines = ", ".join(f'"{key}" = "{value}"' for key, value in broker.settings_of().items())
    own = f'settings = {{ {lines} }}\npassword_file = "{password or broker.password_file}"\ncreate_topics'
    return lambda text: text.replace("create_topics", own)


def test_a_password_that_is_wrong(guarded: SecuredKafka, tmp_path: Path) -> None:
    wrong = tmp_path / "password"
    wrong.write_text("hunter2")
    found = asked_of(replace(bridge_case(tmp_path, "b", guarded.bootstrap, secured(guarded, wrong)), patience=3.0))
    assert complaints(found) == {"TL-D25": BROKEN, **NOT_ASKED}
    assert "authentication failed" in next(one.because for one in found if one.code == "TL-D25")
    assert "hunter2" not in str(found)


def test_a_topic_that_may_not_be_made(guarded: SecuredKafka, tmp_path: Path) -> None:
    name = f"b{next(_numbers)}"
    put(guarded.inside, {one: config for one, config in sound_topics(name).items() if not one.endswith("records")})
    grant(guarded, name, "")
    found = settles(bridge_case(tmp_path, name, guarded.bootstrap, secured(guarded)), {**ALONE, "TL-D39": BROKEN})
    assert any("Create" in one.because and f"{name}.records" in one.because for one in found)
