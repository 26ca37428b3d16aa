"""Faults planted in a real Kafka: each is found by the row it should be, and nothing is made in it."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from tests.engines.planting import bridge_case, complaints
from tests.helpers import wait_until
from tests.unit.doctor.recorded import BROKEN, UNKNOWN, WARNS
from towline.doctor import cluster
from towline.doctor.cluster import ClusterProbe
from towline.doctor.inputs import Inputs
from towline.doctor.kafka import CHECKS
from towline.doctor.table import Finding, Verdict, run_checks
from towline.errors import KafkaError
from towline.kafka import admin
from towline_prove.devstack import Kafka

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
    wait_until(lambda: set(topics) <= set(admin.KafkaAdmin(servers).info().topics), 60, str(topics))


def sound_topics(name: str) -> dict[str, dict[str, str]]:
    return {
        f"{name}.records": {},
        f"{name}.commands": {},
        f"{name}.dead-letters": {},
        f"towline.{name}.up.markers": {"cleanup.policy": "compact"},
    }


def asked_of(case: Inputs) -> list[Finding]:
    return list(run_checks(CHECKS, ClusterProbe(case)))


def settles(case: Inputs, expected: dict[str, Verdict]) -> list[Finding]:
    """Ask until the rows that complain are these: a broker hears of a change a moment later."""
    last: list[Finding] = []

    def ask() -> bool:
        last[:] = asked_of(case)
        return complaints(last) == expected

    try:
        wait_until(ask, 60)
    except AssertionError as error:
        raise AssertionError([f"{one.verdict} {one.code} {one.evidence}" for one in last]) from error
    return last


#: What is planted -> what is changed in topics and file, and the row that has to find it.
PLANTS: Final[dict[str, tuple[dict[str, dict[str, str] | None], tuple[str, str], str, Verdict]]] = {
    "nothing": ({}, ("", ""), "TL-D27", WARNS),
    "a source is missing": ({"commands": None}, ("", ""), "TL-D26", BROKEN),
    "transactions longer than Kafka allows": ({}, ("", ""), "TL-D31", BROKEN),
    "commands kept for an hour": ({"commands": {"retention.ms": "3600000"}}, ("", ""), "TL-D34", WARNS),
}


@pytest.mark.parametrize("what", PLANTS)
def test_a_fault_is_found_by_its_row_and_by_no_other(
    kafka: Kafka, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    changed, change, code, verdict = PLANTS[what]
    if code == "TL-D31":  # Kafka's limit is 15 minutes, and deliveryTimeout has no more
        writer = cluster.TransactionalWriter
        monkeypatch.setattr(cluster, "TransactionalWriter", lambda line, prefix, _: writer(line, prefix, 901_000))
    name = f"doctor{next(_numbers)}"
    topics = {**sound_topics(name), **{f"{name}.{short}": config or {} for short, config in changed.items()}}
    put(
        kafka.bootstrap,
        {one: config for one, config in topics.items() if changed.get(one.split(".")[-1], {}) is not None},
    )
    case = bridge_case(tmp_path, name, kafka.bootstrap, lambda text: text.replace(*change))
    found = settles(case, {**ALONE, code: verdict})
    assert {one.code for one in found} >= {"TL-D25", "TL-D26", "TL-D27", "TL-D31", "TL-D39"}


def test_no_topic_is_made_that_a_pattern_of_the_file_could_take(own_kafka: Kafka, tmp_path: Path) -> None:
    """Not for a moment: a downlink reads what it finds, and Spark looks for new topics of a pattern while it runs."""
    name = f"0-doctor{next(_numbers)}"  # a row names the first topics of many; those of other tests come behind
    put(own_kafka.bootstrap, sound_topics(name))
    pattern = (f'from = "{name}.commands"', "from = { pattern = '^(?!towline[.]|.*dead-letters)' }")
    case = bridge_case(tmp_path, name, own_kafka.bootstrap, lambda text: text.replace("NAME", name).replace(*pattern))
    before = set(admin.KafkaAdmin(own_kafka.bootstrap).info().topics)
    found = asked_of(case)
    made = set(admin.KafkaAdmin(own_kafka.bootstrap).info().topics) - before
    assert made <= {"__transaction_state", "__consumer_offsets"}
    assert {one.code: one.verdict for one in found if one.verdict is UNKNOWN} == {}
    assert any(f"{name}.records" in one.evidence for one in found if one.line == "down")


def test_a_transaction_that_stays_open_in_a_topic_that_a_line_reads(kafka: Kafka, tmp_path: Path) -> None:
    name = f"doctor{next(_numbers)}"
    put(kafka.bootstrap, sound_topics(name))
    holding = Producer({**kafka.client, "transactional.id": f"{name}.foreign"})
    holding.init_transactions(30)
    holding.begin_transaction()
    for _ in range(50):
        holding.produce(f"{name}.commands", b"x")
    assert holding.flush(30) == 0
    found = settles(replace(bridge_case(tmp_path, name, kafka.bootstrap), timeout_s=2.0), {**ALONE, "TL-D31": WARNS})
    holding.abort_transaction(30)
    assert any(f"{name}.commands: 50 offsets are behind an open transaction" in one.evidence for one in found)


def test_an_address_that_can_not_be_resolved_and_a_kafka_that_is_frozen(tmp_path: Path, kafka: Kafka) -> None:
    """One Kafka for both: it tells its clients of a host that nobody knows; then it is stopped where it stands."""
    unheard = {"advertised.listeners": "PLAINTEXT://nobody.invalid:9092"}
    with Kafka(tmp_path / "kafka", settings=unheard) as lost:
        case = replace(bridge_case(tmp_path, "b", lost.bootstrap), timeout_s=3.0)
        found = asked_of(case)
        assert complaints(found) == {"TL-D25": BROKEN, **NOT_ASKED}
        told = next(one.evidence for one in found if one.code == "TL-D25")
        assert re.search(r"broker \d+ advertises nobody\.invalid:9092", told)
        with pytest.raises(KafkaError, match=r"Failed to resolve 'nobody.invalid:9092': .*TL-K01"):
            admin.KafkaAdmin(lost.bootstrap, 3.0).create({"x": 1})
        lost.pause()
        found = asked_of(case)
        lost.kill()  # it can't reach itself to end in order
    assert complaints(found) == {"TL-D25": BROKEN, **NOT_ASKED}
    assert "did not answer for 3 s" in next(one.evidence for one in found if one.code == "TL-D25")
    assert kafka.running
