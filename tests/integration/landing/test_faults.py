"""What a journal in Kafka does when it is not alone, when its topics are not what they were, and when Kafka is away."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient

from tests.conftest import NewMosquitto
from tests.engines.crashing import received
from tests.helpers import producer_in_order, wait_until
from tests.integration.gateway.conftest import NewGateway, publish
from tests.integration.landing.conftest import NewPlace
from towline.bridge.config.file import parse
from towline.bridge.uplink.landed import LandedRows
from towline.errors import ConfigError, JournalDamaged, JournalError, JournalFailed, TowlineError
from towline.journal import Journal
from towline.kafka import admin
from towline.landing import followers, lookup
from towline.landing.committer import Committer
from towline.landing.opening import open_journal
from towline.landing.place import LandingPlace, scan
from towline.landing.records import number_of, rows_of
from towline.landing.store import KafkaStore
from towline.landing.topics import NewTopics
from towline.schema import ROW_SCHEMA
from towline_prove.devstack import Kafka, Mosquitto

LINE = """
name = "plant"
state_dir = "state"
mqtt = {{ brokers = "mqtt://127.0.0.1" }}
kafka = {{ bootstrap_servers = "{kafka}" }}
[[uplink]]
name = "line"
inbox = "kafka"
route = [{{ from = "#", topic = "t" }}]
"""


def opened(place: LandingPlace, **more: Any) -> Journal:
    return open_journal(place, schema=ROW_SCHEMA, create=NewTopics(), repeats=True, **more)


def fill(journal: Journal, count: int) -> None:
    journal.append(received(journal.end, count))


def test_who_was_fenced_stores_nothing_more_and_ends(new_place: NewPlace) -> None:
    """[I2], [I8]: whatever it does next, nothing of it is there, and its calls say why."""
    place = new_place()
    older = opened(place)
    fill(older, 3)
    newer = opened(place)
    with pytest.raises(JournalFailed, match=r"another gateway has taken over.*TL-J31"):
        fill(older, 5)
    with pytest.raises(JournalFailed, match="TL-J31"):
        older.append(older.no_rows, released=(1,))
    fill(newer, 2)
    assert (newer.end, newer.epoch) == (5, older.epoch + 1)
    rows = [row for batch in newer.read(0, 5) for row in batch.to_pylist()]
    assert [row["offset"] for row in rows] == [0, 1, 2, 3, 4]
    newer.close()


def test_an_owner_whose_clock_ran_out_goes_on(new_place: NewPlace) -> None:
    """Kafka says "fenced" to it too (KIP-98), and nobody else has begun: it finds that out and stores its rows once."""
    place = new_place()
    journal = opened(place)
    fill(journal, 3)
    intruder = Committer(place, place.sink_settings(1 << 20))
    intruder.start()  # the epoch of the producer is another's now, and no other opening has begun
    intruder.close()
    fill(journal, 4)
    assert journal.end == 7
    assert [n for b in journal.read(0, 7) for n in b.column("offset").to_pylist()] == list(range(7))
    journal.close()


def test_who_took_a_living_owner_for_dead_takes_nothing(new_place: NewPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has fenced the owner and read its state; the owner finds no other opening, and goes on before that one begins.

    What it had read is old by then: its opening must come to nothing, or rows and packet ids in between were forgotten.
    """
    place = new_place()
    owner = opened(place)
    fill(owner, 3)
    begin = KafkaStore.begin

    def late(store: KafkaStore) -> None:
        owner.append(received(owner.end, 4), held={7: (owner.end, 1)})
        begin(store)

    with monkeypatch.context() as patched:
        patched.setattr(KafkaStore, "begin", late)
        with pytest.raises(JournalFailed, match=r"took for dead lives.*TL-J31"):
            opened(place)
    fill(owner, 5)
    assert owner.end == 12
    owner.close()
    with opened(place) as after:
        assert (after.end, dict(after.held)) == (12, {7: (3, 1)})
        assert [n for b in after.read(0, 12) for n in b.column("offset").to_pylist()] == list(range(12))


def delete(kafka: Kafka, *topics: str) -> None:
    client: Any = AdminClient(kafka.client)
    for future in client.delete_topics(list(topics)).values():
        future.result(30)
    wait_until(lambda: not set(topics) & set(client.list_topics(timeout=5).topics), 30, "the topics to go")


def put(place: LandingPlace, where: TopicPartition, records: Iterable[tuple[int, bytes | None, bytes | None]]) -> None:
    producer = producer_in_order(place.servers)
    for _, key, value in records:
        producer.produce(where.topic, value, key, partition=where.partition)
    assert producer.flush(30) == 0


def refusal(place: LandingPlace) -> TowlineError:
    with pytest.raises(TowlineError) as caught:
        opened(place)
    return caught.value


def test_topics_that_are_not_of_one_time_are_recognised(kafka: Kafka, new_place: NewPlace) -> None:
    """[I14]: one line, before anything is taken in."""
    place = new_place("restored")
    with opened(place) as journal:
        fill(journal, 10)
    kept, rows = scan(place.client, place.state).records, scan(place.client, place.rows).records
    with opened(place) as journal:
        fill(journal, 10)

    delete(kafka, place.state_topic)  # the state is gone
    assert "there is no state of them" in str(refusal(place))
    assert refusal(place).code == "TL-J33"

    put(place, place.state, kept)  # a mirror's state, older than the rows
    assert "an older copy" in refusal(place).what
    assert refusal(place).code == "TL-J33"

    delete(kafka, place.topic)  # made anew, and shorter
    assert "made anew, or a copy" in refusal(place).what
    put(place, place.rows, [*rows[:9], *((0, b"{}", b""),) * 30])
    assert refusal(place).code == "TL-J05"  # something else wrote there


def test_rows_that_are_gone_are_damage(kafka: Kafka, new_place: NewPlace) -> None:
    place = new_place("gone")
    with opened(place) as journal:
        fill(journal, 10)
        journal.commit("spark", 4)
    admin.delete_below(place.client, {(place.topic, 0): lookup.bounds(place)[1]})
    with pytest.raises(JournalDamaged, match=r"rows from 0 to 10 are missing.*TL-J05"):
        opened(place)


def test_a_group_that_was_further_than_the_topic_is(kafka: Kafka, new_place: NewPlace) -> None:
    """Both topics made anew, or both an older copy: what was read from the former ones tells."""
    place = new_place("ahead")
    with opened(place) as journal:
        fill(journal, 10)
        with pytest.raises(JournalError, match=r"made anew, or restored.*TL-J33"):
            journal._store.number_from(1000)  # type: ignore[attr-defined]
    followers.commit(place, "bridge", 1000)
    with pytest.raises(JournalError, match="TL-J33"):
        lookup.row_at(place, 1000)


def test_what_is_done_outlives_a_group_that_kafka_forgets(kafka: Kafka, new_place: NewPlace) -> None:
    """A group that commits nothing for a week is forgotten; the journal still knows which rows are done."""
    place = new_place("forgotten")
    with opened(place) as journal:
        assert lookup.done_before(place, "bridge") is None
        for _ in range(5):
            fill(journal, 4)
        (offset,) = (at for at, key, _ in scan(place.client, place.rows).records if number_of(key or b"") == 14)
        followers.commit(place, "bridge", offset)
        watched = followers.Followers(place, journal, journal._store.number_from, ("bridge",))  # type: ignore[attr-defined]
        assert watched.look()
        watched.close()
        assert lookup.done_before(place, "bridge") == offset
        client: Any = AdminClient(kafka.client)
        client.delete_consumer_groups([group := followers.group_of(place, "bridge")])[group].result(30)
        assert followers.committed_of(place, "bridge") is None
        assert lookup.done_before(place, "bridge") == offset
        word = lookup.word_of(place, "bridge")
        assert word is not None
        assert (word.end, word.committed, word.first, word.sign) == (20, 14, 0, None)
        journal.commit("bridge", 20)
        assert lookup.done_before(place, "bridge") == lookup.bounds(place)[1]


def test_a_batch_is_counted_before_its_rows_may_go(
    kafka: Kafka, new_place: NewPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner removes what the query says to be done, maybe before the query takes another breath."""
    place = new_place()
    said = followers.commit

    def at_once(where: LandingPlace, consumer: str, offset: int) -> None:
        said(where, consumer, offset)
        admin.delete_below(where.client, {(where.topic, 0): offset})

    monkeypatch.setattr(followers, "commit", at_once)
    with opened(place) as journal:
        fill(journal, 4)
        begin = lookup.bounds(place)[1]
        fill(journal, 3)
        end = lookup.bounds(place)[1]
        source = {f"{which}Offset": {place.topic: {"0": at}} for which, at in (("start", begin), ("end", end))}
        counted = reader_of(kafka, place).done(source, 3)
    assert (counted["start"], counted["end"], counted["rows"]) == (4, 7, 3)


def reader_of(kafka: Kafka, place: LandingPlace) -> LandedRows:
    """As the bridge has it, of a journal that is there."""
    bridge = parse(LINE.format(kafka=kafka.bootstrap), Path("/nowhere/bridge.toml"), {})
    reader = LandedRows(bridge, bridge.uplinks[0])
    reader._place = place
    return reader


def test_rows_that_go_while_they_are_looked_for_are_not_there(
    new_place: NewPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = new_place()

    def behind(*args: Any, **more: Any) -> Any:
        admin.delete_below(place.client, {(place.topic, 0): end})
        return scan(*args, **more)

    with opened(place) as journal:
        fill(journal, 4)
        end = lookup.bounds(place)[1]
        fill(journal, 3)
        monkeypatch.setattr(lookup, "scan", behind)
        with pytest.raises(JournalError, match="TL-J07"):
            lookup.row_at(place, 0)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"cleanup.policy": "compact"}, "cleanup.policy=compact"),
        ({"retention.ms": "60000"}, "retention.ms=60000"),
        ({"retention.ms": "-1", "retention.bytes": "1000"}, "retention.bytes=1000"),
        ({"retention.ms": "-1", "max.message.bytes": "100000"}, "max.message.bytes=100000"),
    ],
)
def test_topics_that_can_not_keep_everything_are_refused(
    kafka: Kafka, new_place: NewPlace, config: dict[str, str], said: str
) -> None:
    place = new_place("unfit")
    kafka.create_topics({place.topic: 1, place.state_topic: 2}, config)
    with pytest.raises(ConfigError, match="TL-J35") as caught:
        opened(place)
    assert said in str(caught.value)


def test_a_topic_that_is_missing_is_named(new_place: NewPlace) -> None:
    place = new_place("missing")
    with pytest.raises(ConfigError, match=r'"towline.missing-\d+.landing" does not exist.*create_topics.*TL-J35'):
        open_journal(place, schema=ROW_SCHEMA)


def test_a_message_too_large_for_the_topic_is_set_aside(kafka: Kafka, new_place: NewPlace) -> None:
    """[I15]: a row without payload, counted, with its size and digest; the others around it as they are."""
    place = new_place("large")
    kafka.create_topics({place.topic: 1}, {"max.message.bytes": "600000", "retention.ms": "-1"})
    batch = received(0, 3)
    payloads = batch.column("payload").to_pylist()
    payloads[1] = b"x" * 600_000
    columns = dict(zip(batch.schema.names, batch.columns, strict=True)) | {"payload": payloads}
    large = type(batch).from_pydict(columns, schema=ROW_SCHEMA)
    with opened(place) as journal:
        journal.append(large)
        fill(journal, 1)
        rows = [row for one in journal.read(0, 4) for row in one.to_pylist()]
        assert journal.ledger["packets_too_large"] == 1
    assert [row["payload"] for row in rows] == [b"0", None, b"2", b"3"]
    facts = {one["key"]: one["value"] for one in rows[1]["user_properties"]}
    assert facts["towline-reason"] == "record_too_large"
    assert int(facts["towline-size"]) > 600_000
    assert rows[1]["topic"] == "t/1"
    records = scan(place.client, place.rows).records
    assert rows_of([(key or b"", value) for _, key, value in records], ROW_SCHEMA).num_rows == 4


def test_a_second_gateway_is_refused_while_the_first_lives(
    mosquitto: Mosquitto, kafka: Kafka, new_gateway: NewGateway, tmp_path: Path
) -> None:
    landing = {"client": kafka.client, "create": True}
    first = new_gateway(mosquitto, "alone", landing=landing)
    first.start()
    second = new_gateway(mosquitto, "alone", landing=landing, state_dir=tmp_path / "other")
    second.log = tmp_path / "other.log"
    error = json.loads(second.fail())
    assert error["code"] == "TL-J38"
    assert "--standby" in error["reason"]
    publish(mosquitto, range(20))
    first.until(journaled=20)
    assert first.stop() == 0


@pytest.mark.long
def test_kafka_away_holds_back_and_keeps_the_session_alive(
    new_mosquitto: NewMosquitto, own_kafka: Kafka, new_gateway: NewGateway
) -> None:
    """[I7]: nothing is read and nothing acknowledged; PINGREQ goes on; then everything comes, once."""
    mosquitto = new_mosquitto(log_type="all")
    gateway = new_gateway(
        mosquitto,
        "held",
        landing={"client": own_kafka.client, "create": True},
        keep_alive_s=5,
        guarantee="exactly_once",
        subscriptions=[{"filter": "t/#", "qos": 2}],
    )
    gateway.start()
    publish(mosquitto, range(50), qos=2)
    gateway.until(journaled=50)
    own_kafka.pause()
    publish(mosquitto, range(50, 100), qos=2)
    gateway.until(held_back="Kafka away")
    assert gateway.status()["last_error"]["code"] == "TL-J30"
    pings = mosquitto.log.read_text().count("PINGREQ")
    wait_until(lambda: mosquitto.log.read_text().count("PINGREQ") >= pings + 3, 60, "three pings")
    assert (gateway.status()["journaled"], gateway.status()["connects"]) == (50, 1)
    own_kafka.resume()
    status = gateway.until(journaled=100)
    assert status["connects"] == 1
    assert gateway.seen() == list(range(100))
    assert gateway.stop() == 0
