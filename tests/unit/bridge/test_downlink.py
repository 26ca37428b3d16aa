"""The way down without brokers: what a [[downlink]] may say, its account, its client's settings, its place in Kafka."""

# ruff: noqa: E501 - the messages are one line each, and pinned as such

from __future__ import annotations

import contextlib
import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from towline.bridge.config.downlink import template_of
from towline.bridge.config.file import parse
from towline.bridge.config.mistakes import ConfigMistakes
from towline.bridge.config.model import Bridge, DownLine, DownlinkSection
from towline.bridge.config.plan import plan_of, render
from towline.bridge.deadletters.remap import RemapFate, Returner
from towline.bridge.downlink.query import _digest, _former_digest, _mappings, _sections, covering, facts, recount
from towline.bridge.downlink.sink import sorted_out
from towline.bridge.downlink.spill import Spill
from towline.bridge.downlink.sql import LETTER, PLACE
from towline.bridge.runtime import jars, status
from towline.bridge.runtime.board import BridgeState
from towline.bridge.runtime.downaccount import DownCounts, down_account
from towline.bridge.runtime.failures import reason
from towline.bridge.runtime.identity import Identity
from towline.bridge.runtime.javaclient import java_client
from towline.bridge.runtime.recovery import PERMANENT, begin_again, mapping_problem, read_checkpoint
from towline.bridge.runtime.screen import summary
from towline.errors import ConfigError, KafkaError, SetupError, TowlineError
from towline.gateway.settings import OutboxSettings
from towline.kafka.deadletters import Letter, Reason

GOOD = """\
name = "plant-7"
state_dir = "state"
mqtt = { brokers = ["mqtt://a:1883"] }
kafka = { bootstrap_servers = "k1:9092" }

[[downlink]]
name = "commands"
from = "commands"
topic = "command/{header.tenant}/{key}/req"
"""


def read(text: str, directory: Path) -> Bridge:
    return parse(text, directory / "bridge.toml", {})


def the_line(text: str, directory: Path) -> DownLine:
    (line,) = read(text, directory).downlinks
    return line


def test_a_small_table_gets_safe_defaults(tmp_path: Path) -> None:
    line = the_line(GOOD, tmp_path)
    assert (line.qos, line.guarantee.value, line.parallelism) == (1, "at_least_once", 1)
    assert line.fixed_topics == ("commands",)
    assert line.gateway.subscriptions == ()
    assert line.gateway.outbox is not None
    assert line.gateway.mqtt_client_id == "plant-7-commands"
    assert (line.section.starting_offsets, line.section.on_data_loss) == ("earliest", "stop")


def test_its_gateway_knows_the_checkpoint_and_runs_on_with_an_older_one(tmp_path: Path) -> None:
    """An older copy of the outbox is found before anything is sent; a gateway of the version before has no such word."""
    line = read(GOOD.replace("[[downlink]]", '[[downlink]]\noutbox = { max_bytes = "2 GB" }'), tmp_path).lines[0]
    assert line.gateway.outbox == OutboxSettings(max_bytes=2_000_000_000, checkpoint=str(line.checkpoint))
    plain = line.gateway.model_copy(update={"outbox": OutboxSettings(max_bytes=2_000_000_000)})
    assert plain.digest() == line.gateway.digest()
    assert {"TL-G35", "TL-G36", "TL-G37"} <= PERMANENT


def test_it_travels_as_json(tmp_path: Path) -> None:
    text = GOOD + 'payload = { sql = "upper(value)" }\nexpiry = 5\nretain = false\noutbox = { max_bytes = "2 GB" }\n'
    bridge = read(text.replace('from = "commands"', 'from = { pattern = "c.*" }'), tmp_path)
    assert Bridge.model_validate_json(bridge.model_dump_json(by_alias=True)) == bridge
    assert bridge.downlinks[0].gateway.outbox is not None
    assert bridge.downlinks[0].gateway.outbox.max_bytes == 2_000_000_000


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ('topic = "command', 'topic = "{nope}/', 'bridge.toml:6  downlink "commands": "{nope}//{header.tenant}/{key}/req" names {nope}, which a record does not have. Known are {key}, {value}, {value.JSON.PATH}, {header.NAME}, {kafka.topic}, {kafka.partition}, {kafka.offset}, {kafka.timestamp}.   [TL-C05]'),
        ('from = "commands"\n', "", 'bridge.toml:6  downlink "commands": "from" is missing. Add it.   [TL-C02]'),
        ("[[downlink]]\n", "[[downlink]]\nqos = 0\n", 'bridge.toml:7  downlink "commands": guarantee at_least_once publishes with QoS 1 or 2, not 0. Change one of the two.   [TL-C12]'),
        ("[[downlink]]\n", "[[downlink]]\nqso = 1\n", 'bridge.toml:7  downlink "commands": unknown key "qso". Did you mean "qos"?   [TL-C01]'),
        ("[[downlink]]\n", '[[downlink]]\nwhere = " "\n', 'bridge.toml:6  downlink "commands": where is empty. Give a condition in Spark SQL, or remove it.   [TL-C05]'),
        ('from = "commands"', 'from = "com mands"', 'bridge.toml:8  downlink "commands": "com mands" is no Kafka topic name: letters, digits, dots, _ and - only. Name one, several in a list, or { pattern = ... }.   [TL-C05]'),
        ("[[downlink]]\n", "[[downlink]]\nmqtt = { session_expiry_s = 0 }\n", 'bridge.toml:7  downlink "commands": guarantee at_least_once needs a session that outlives the connection, session_expiry_s is 0. Raise it; without the key it is for ever.   [TL-C12]'),
        ("[[downlink]]\n", '[[downlink]]\nname = "commands"\nfrom = "x"\n[[downlink]]\n', 'bridge.toml:10  downlink "commands": another line has this name. Rename one.   [TL-C18]'),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(old: str, new: str, told: str, tmp_path: Path) -> None:
    assert old in GOOD
    with pytest.raises(ConfigMistakes) as caught:
        read(GOOD.replace(old, new, 1), tmp_path)
    assert str(caught.value.mistakes[0]).replace(f"{tmp_path}/", "") == told


def test_qos_2_to_several_brokers_needs_a_word(tmp_path: Path) -> None:
    several = GOOD.replace('["mqtt://a:1883"]', '["mqtt://a", "mqtt://b"]')
    assert the_line(several, tmp_path).qos == 1
    assert the_line(several.replace("] }", "], brokers_share_sessions = true }", 1) + "qos = 2\n", tmp_path).qos == 2
    for said, told in (("qos = 2", "publish with QoS 1"), ('guarantee = "exactly_once"', "at_least_once")):
        with pytest.raises(ConfigMistakes, match=rf'bridge.toml:3  downlink "commands": .*; or .*{told}.*TL-C90'):
            read(several + said + "\n", tmp_path)


def test_two_lines_never_share_a_name_or_a_client_id(tmp_path: Path) -> None:
    text = (
        GOOD
        + '[[uplink]]\nname = "up"\nmqtt = { client_id = "plant-7-commands" }\nroute = [{ from = "#", topic = "t" }]\n'
    )
    with pytest.raises(ConfigMistakes) as caught:
        read(text, tmp_path)
    assert [m.code for m in caught.value.mistakes] == ["TL-C19"]


def test_fields_of_a_record() -> None:
    text = "{key}/{value}/{value.a.b[0]}/{header.x}/{kafka.offset}{{}}"
    assert template_of(text).fields == ("key", "value", "value.a.b[0]", "header.x", "kafka.offset")
    with pytest.raises(ValueError, match="which a record does not have"):
        template_of("{header.}")


def test_check_shows_promise_cost_and_limits(tmp_path: Path) -> None:
    text = GOOD.replace('name = "commands"', 'name = "commands"\nguarantee = "exactly_once"')
    bridge = read(text, tmp_path)
    told = render(plan_of(bridge))
    for part in (
        "Kafka → MQTT",
        "read_committed",
        "QoS 2",
        "doubled   no",
        "limit ",
        "Spark's Kafka source for PySpark",
    ):
        assert part in told
    assert 'warning  line "commands": a record that MQTT can\'t carry stops the line' in told
    assert json.loads(json.dumps(plan_of(bridge)))["lines"][0]["direction"] == "down"


OUTBOX = {"accepted": 90, "delivered": 70, "expired": 2, "refused": 3}


def batch(number: int, rows: int, query: str = "q", **observed: int) -> dict[str, Any]:
    return {"query": query, "batch": number, "rows": rows, "behind": 7, "observed": {"rows": rows, **observed}}


def test_the_account_adds_up() -> None:
    counts = DownCounts().add(batch(0, 60, kept=60, filtered=5, dead_lettered=1)).add(batch(1, 40, kept=40, filtered=4))
    known = down_account({"outbox": OUTBOX}, counts)
    assert known.adds_up
    assert (known.taken, known.waiting, known.uncounted, known.behind) == (100, 15, 0, 7)
    assert known.taken == sum(
        (known.delivered, known.dead_lettered, known.filtered, known.expired, known.refused, known.waiting)
    )
    assert known.sentence() == (
        "taken 100 = delivered 70 + dead-lettered 1 + filtered 9 + expired 2 + refused 3 + waiting 15   adds up ✓"
    )
    assert DownCounts.from_json(counts.as_json()) == counts


def test_a_batch_counts_once_and_a_hole_is_seen() -> None:
    counts = DownCounts().add(batch(0, 60)).add(batch(0, 60)).add(batch(3, 10))
    assert (counts.rows, counts.unseen) == (70, 2)
    assert counts.add(batch(0, 5, query="again")).rows == 75
    assert down_account({"outbox": OUTBOX}, counts).uncounted == 20


def test_an_outbox_that_knows_less_does_not_add_up() -> None:
    known = down_account({"outbox": OUTBOX}, DownCounts().add(batch(0, 91)))
    assert not known.adds_up
    assert "Spark brought 91 messages, the outbox knows 90" in known.sentence()


def test_what_a_transform_takes_away_or_adds_is_counted() -> None:
    assert DownCounts().add(batch(0, 10, kept=7, filtered=1)).filtered == 4
    more = DownCounts().add(batch(0, 10, kept=15))
    assert (more.added, more.sent) == (5, 15)


def test_progress_of_sparks_kafka_source_becomes_facts() -> None:
    source = {"endOffset": {"t": {"0": 5, "1": 7}}, "latestOffset": {"t": {"0": 9, "1": 7}}}
    assert facts({"id": "q", "sources": [source]}) == {"query": "q", "behind": 4}
    assert facts({"id": "q", "sources": [{"latestOffset": None}]}) == {"query": "q", "behind": None}
    assert facts({"sources": []}) == {"query": "", "behind": None}


def test_rows_and_letters_come_in_the_order_of_kafka() -> None:
    kind = pa.struct([("key", pa.binary()), ("value", pa.binary())])
    where = pa.struct([("topic", pa.string()), ("partition", pa.int32()), ("offset", pa.int64())])
    places = [("t", 1, 3), ("t", 0, 9), ("s", 7, 8), ("t", 0, 10)]
    made = pa.RecordBatch.from_arrays(
        [
            pa.array(["d", None, "a", "c"]),
            pa.array([None, {"key": b"k", "value": b"v"}, None, None], kind),
            pa.array([dict(zip(("topic", "partition", "offset"), place, strict=True)) for place in places], where),
        ],
        ["topic", LETTER, PLACE],
    )
    rows, letters = sorted_out([made.slice(0, 2), made.slice(2)])
    assert [row for part in rows for row in part.to_pylist()] == [{"topic": "a"}, {"topic": "c"}, {"topic": "d"}]
    assert [part.to_pylist() for part in letters] == [[{"key": b"k", "value": b"v"}]]
    assert [list(part) for part in sorted_out([])] == [[], []]


@settings(deadline=None)  # files
@given(st.permutations(range(12)), st.integers(1, 5), st.sets(st.integers(0, 11)), st.integers(0, 3000))
def test_rows_of_any_size_come_in_order_and_in_bounded_batches(
    order: list[int], group: int, dead: set[int], memory: int
) -> None:
    place = [{"topic": "t", "partition": n // 6, "offset": n % 6} for n in order]
    letters = [{"key": b"k", "value": b"%d" % n} if n in dead else None for n in order]
    payloads = [b"%d" % n + bytes(100 * n) for n in order]
    made = pa.RecordBatch.from_pydict({"payload": payloads, PLACE: place, LETTER: letters}, schema=_SORTED)
    with Spill(memory) as spill:
        kept = spill.kept(made.slice(at, group) for at in range(0, 12, group))
        rows, dead_letters = (list(part) for part in sorted_out(kept, most=1000))
        assert all(batch.num_rows == 1 or batch.nbytes <= 1000 for batch in rows)
        found = [payload.rstrip(b"\0") for batch in rows for payload in batch.column("payload").to_pylist()]
        assert found == [b"%d" % n for n in range(12) if n not in dead]
        assert [row["value"] for batch in dead_letters for row in batch.to_pylist()] == [
            b"%d" % n for n in sorted(dead)
        ]


_SORTED = pa.schema(
    [
        ("payload", pa.binary()),
        (PLACE, pa.struct([("topic", pa.string()), ("partition", pa.int32()), ("offset", pa.int64())])),
        (LETTER, pa.struct([("key", pa.binary()), ("value", pa.binary())])),
    ]
)


def test_a_disk_without_room_for_a_batch_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with Path("/dev/full").open("r+b", buffering=0) as full:
        monkeypatch.setattr(tempfile, "TemporaryFile", lambda **_: full)
        with Spill(0) as spill, pytest.raises(KafkaError, match=r"do not fit .*No space left.*TL-K23"):
            spill.kept([pa.RecordBatch.from_pydict({"payload": [b"x"]})])


# -- Kafka's other client --


def test_plain_settings_are_the_same() -> None:
    assert java_client({"bootstrap.servers": "a:1", "linger.ms": "5"}, {}) == {"bootstrap.servers": "a:1"}


def test_no_secret_is_in_the_settings(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text('s3"cret\\\n')
    (tmp_path / "ca").write_text("-----CA-----")
    told: dict[str, str] = {}
    client = {
        "bootstrap.servers": "a:1",
        "security.protocol": "SASL_SSL",
        "sasl.mechanisms": "SCRAM-SHA-512",
        "sasl.username": "me",
        "sasl.password.file": str(tmp_path / "secret"),
        "ssl.ca.location": str(tmp_path / "ca"),
        "ssl.endpoint.identification.algorithm": "none",
    }
    made = java_client(client, told)
    assert "cret" not in str(made)
    assert told["TOWLINE_KAFKA_PASSWORD"] == 's3\\"cret\\\\'  # noqa: S105 - made up
    assert told["TOWLINE_KAFKA_SSL_CA_LOCATION"] == "-----CA-----"
    assert made["sasl.jaas.config"] == (
        'org.apache.kafka.common.security.scram.ScramLoginModule required username="me" '
        'password="${env:TOWLINE_KAFKA_PASSWORD}";'
    )
    assert (made["ssl.truststore.type"], made["ssl.endpoint.identification.algorithm"]) == ("PEM", "")
    assert made["config.providers"] == "env"


@pytest.mark.parametrize(
    "client",
    [
        {"enable.ssl.certificate.verification": "false"},
        {"sasl.mechanism": "GSSAPI"},
        {"ssl.ca.location": "/nowhere"},
    ],
)
def test_what_java_can_not_do_is_refused(client: dict[str, str]) -> None:
    with pytest.raises(ConfigError) as caught:
        java_client({"bootstrap.servers": "a:1", **client}, {})
    assert caught.value.code == "TL-C77"


# -- beginning again --


def checkpoint(line: DownLine, offsets: dict[str, Any], batch: int = 0, *, done: bool = True) -> None:
    for log in ("offsets", "commits"):
        (line.checkpoint / log).mkdir(parents=True, exist_ok=True)
    text = f"v1\n{json.dumps({'batchWatermarkMs': 0})}\n{json.dumps(offsets)}"
    (line.checkpoint / "offsets" / str(batch)).write_text(text)
    if done:
        (line.checkpoint / "commits" / str(batch)).write_text('v1\n{"nextBatchWatermarkMs":0}')
    (line.checkpoint / "metadata").write_text('{"id":"q"}')


def test_it_begins_again_behind_the_last_batch_that_is_done(tmp_path: Path) -> None:
    line = the_line(GOOD, tmp_path)
    checkpoint(line, {"commands": {"0": 12}})
    checkpoint(line, {"commands": {"0": 20}}, 1, done=False)
    Identity("commands", "plant-7.commands", query="q").save(line.gateway.state_dir)
    assert "begins again" in begin_again(line)
    fresh = Identity.read(line.gateway.state_dir)
    assert fresh is not None
    assert (json.loads(fresh.offsets), fresh.sink) == ({"commands": {"0": 12}}, "plant-7.commands.2")
    assert not line.checkpoint.exists()


def test_an_undecided_batch_keeps_its_mapping(tmp_path: Path) -> None:
    line = the_line(GOOD, tmp_path)
    checkpoint(line, {"commands": {"0": 12}}, done=False)
    seen = read_checkpoint(line.checkpoint)
    mapping_problem(line, tmp_path / "bridge.toml", Identity("c", "s", mapping="same"), seen, "same")
    with pytest.raises(TowlineError) as caught:
        mapping_problem(line, tmp_path / "bridge.toml", Identity("c", "s", mapping="same"), seen, "other")
    assert caught.value.code == "TL-B27"
    assert "--begin-again commands" in str(caught.value)
    assert reason(caught.value, "line").permanent


class Asked(Exception):
    """Spark was asked for records."""


class Spark:
    @property
    def read(self) -> Any:
        raise Asked


@pytest.mark.parametrize(
    ("query", "mapped", "asks"),
    [("q", True, True), ("another", True, False), ("q", False, False)],
)
def test_only_batches_of_its_own_are_counted_again(tmp_path: Path, query: str, mapped: bool, asks: bool) -> None:
    """A copied checkpoint is refused when the query starts; its batches must not be in the account by then."""
    bridge = read(GOOD, tmp_path)
    (line,) = bridge.downlinks
    checkpoint(line, {"commands": {"0": 12}})
    (line.checkpoint / "sources" / "0").mkdir(parents=True)
    (line.checkpoint / "sources" / "0" / "0").write_text('\0v1\n{"commands":{"0":5}}')
    mapping = next(iter(_mappings(line))) if mapped else "other"
    Identity("commands", "plant-7.commands", query=query, mapping=mapping).save(line.gateway.state_dir)
    spark: Any = Spark()
    with pytest.raises(Asked) if asks else contextlib.nullcontext():
        assert list(recount(spark, bridge, line, DownCounts())) == []


def test_control_characters_are_dead_letters_where_there_are_any(tmp_path: Path) -> None:
    letters, send = GOOD + 'dead_letter_topic = "dead"\n', 'control_characters = "send"\n'
    assert the_line(letters, tmp_path).control_characters == "dead_letter"
    assert the_line(letters + send, tmp_path).control_characters == "send"
    assert the_line(GOOD, tmp_path).control_characters == "send"
    assert "with control characters a record is a dead letter" in render(plan_of(read(letters, tmp_path)))
    assert "with control characters it is sent" in render(plan_of(read(GOOD, tmp_path)))


def test_a_batch_that_was_begun_before_there_was_that_policy_is_finished_without_it(tmp_path: Path) -> None:
    line = the_line(GOOD + 'dead_letter_topic = "dead"\n', tmp_path)
    now, before = _sections(line)
    assert (now.control_characters, before.control_characters) == ("dead_letter", "send")
    older = json.loads(before.model_dump_json())
    del older["control_characters"]
    text = json.dumps(older, separators=(",", ":"), ensure_ascii=False)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    assert _former_digest(before) == digest != _former_digest(now)
    assert _mappings(line)[digest] == before
    assert next(iter(_mappings(line).values())) == now


#: What the version before wrote down, which made a digest of every key.
WRITTEN = [
    ("", "922570d4e6b8712d"),
    ('dead_letter_topic = "dead"\n', "1f12755956d731bf"),
    ('dead_letter_topic = "dead"\n', "62bc035599322d61"),
    (
        'dead_letter_topic = "dead"\nqos = 2\nwhere = "length(value) > 0"\nretain = { sql = "true" }\n',
        "dd55615ade524498",
    ),
]


@pytest.mark.parametrize(("more", "digest"), WRITTEN)
def test_a_batch_that_the_version_before_has_begun_is_finished(tmp_path: Path, more: str, digest: str) -> None:
    assert digest in _mappings(the_line(GOOD + more, tmp_path))


def test_a_version_with_another_setting_finds_the_same_mapping(tmp_path: Path) -> None:
    class Later(DownlinkSection):
        compression: str | None = None

    section = the_line(GOOD + 'where = "length(value) > 0"\n', tmp_path).section
    later = Later.model_validate(section.model_dump(by_alias=True))
    assert _digest(later) == _digest(section)
    assert _digest(later.model_copy(update={"compression": "zstd"})) != _digest(section)


@pytest.mark.parametrize(
    ("more", "same"),
    [
        ("max_messages_per_trigger = 7\n", True),
        ("trigger_interval_s = 3\n", True),
        ('confirm = "broker"\n', True),
        ('starting_offsets = "latest"\n', True),
        ('name = "orders"\n', True),
        ("parallelism = 2\n", False),
        ('where = "true"\n', False),
        ("qos = 2\n", False),
        ('from = "others"\n', False),
    ],
)
def test_what_decides_which_record_becomes_which_row(tmp_path: Path, more: str, same: bool) -> None:
    head, _, own = GOOD.partition("[[downlink]]")
    key = more.partition(" ")[0]
    kept = head + "[[downlink]]" + "".join(f"{said}\n" for said in own.split("\n") if not said.startswith(f"{key} ="))
    now, before = the_line(kept + more, tmp_path), the_line(GOOD, tmp_path)
    assert (next(iter(_mappings(now))) == next(iter(_mappings(before)))) is same


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ('"commands"', {"commands": {"0": 12, "1": -2, "2": -2}}),
        ('["commands", "new"]', {"commands": {"0": 12, "1": -2, "2": -2}, "new": {"0": -2}}),
        ('{ pattern = ".*" }', {"commands": {"0": 12, "1": -2, "2": -2}, "new": {"0": -2}, "__mine": {"0": -2}}),
    ],
)
def test_it_begins_again_with_every_partition_there_is(tmp_path: Path, source: str, wanted: dict[str, Any]) -> None:
    section = the_line(GOOD.replace('from = "commands"', f"from = {source}"), tmp_path).section
    known = {"commands": {"0": 12}, "gone": {"0": 3}}
    topics = {"commands": 3, "new": 1, "__mine": 1, "__consumer_offsets": 50}
    assert covering(known, topics, section) == wanted


def test_a_letter_goes_back_where_it_came_from() -> None:
    letter = Letter(Reason.TOPIC_ABSENT, "commands", b"k", b"v", (("h", b"1"),), 3, 17, "why", "commands")
    (outcome,) = Returner().outcomes([letter])
    assert outcome.fate is RemapFate.MENDED
    assert outcome.record == ("commands", b"v", b"k", 3, None, None, 17, [("h", b"1")])


def test_data_kafka_has_deleted_stops_the_line() -> None:
    told = reason("x [KAFKA_DATA_LOSS.START_OFFSET_RESET] Some data may have been lost.", 'line "commands"')
    assert (told.code, told.permanent) == ("TL-B06", True)
    assert 'on_data_loss = "go_on"' in told.text


def test_jars_that_are_named_are_taken_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("spark-sql-kafka-0-10_2.13-9.9.9.jar", "kafka-clients-3.9.2.jar"):
        (tmp_path / name).touch()
    text = GOOD + '[spark]\nkafka_jars = ["spark-sql-kafka-0-10_2.13-9.9.9.jar", "kafka-clients-3.9.2.jar"]\n'
    bridge = read(text, tmp_path)
    assert jars.equipped(bridge) is bridge
    assert jars.told(bridge).endswith(": spark-sql-kafka-0-10_2.13 9.9.9")
    with pytest.raises(ConfigMistakes, match=r"the jar .*gone.jar is not there"):
        read(text.replace("kafka-clients-3.9.2.jar", "gone.jar"), tmp_path)

    def nothing(version: str) -> list[Path]:
        raise SetupError("TL-S15", "maven", f"no {version}", "")

    monkeypatch.setattr(jars, "spark_kafka_jars", nothing)
    monkeypatch.setattr(jars, "known_spark_kafka_jars", lambda _: [])
    bare = read(GOOD, tmp_path)
    assert "Maven brings its jars at the first start" in jars.told(bare)
    with pytest.raises(ConfigError, match=r"Spark's Kafka source, whose jars can't be had .* \[TL-B07\]") as caught:
        jars.equipped(bare)
    way = '"spark.jars.packages" = "org.apache.spark:spark-sql-kafka-0-10_2.13:4.2.0"'
    assert way in caught.value.do  # of who has no Maven
    packages = read(f"{GOOD}[spark.conf]\n{way}\n", tmp_path)
    assert jars.equipped(packages) is packages
    assert jars.told(packages).endswith("Spark fetches org.apache.spark:spark-sql-kafka-0-10_2.13:4.2.0")
    others = read(f"{GOOD}[spark.conf]\n{way.replace('sql-kafka-0-10', 'avro')}\n", tmp_path)
    assert "Maven brings its jars" in jars.told(others)
    with pytest.raises(ConfigError, match="TL-B07"):
        jars.equipped(others)


@pytest.mark.parametrize(
    ("guarantee", "end"), [("exactly_once", "adds up ✓, but is not exactly once ✗"), ("at_least_once", "adds up ✓")]
)
def test_qos_2_that_a_broker_took_as_qos_1_is_in_the_account(guarantee: str, end: str) -> None:
    """It said ``adds up`` and nothing else; only --json had ``degraded: 21000``."""
    outbox = {**OUTBOX, "accepted": 21_000, "delivered": 21_000, "expired": 0, "refused": 0, "degraded": 21_000}
    known = down_account({"outbox": outbox, "guarantee": guarantee}, DownCounts())
    told = "taken 21,000 (21,000 of them uncounted) = delivered 21,000 (21,000 of them at QoS 1, not 2) + waiting 0"
    assert known.sentence() == f"{told}   {end}"
    shown: dict[str, Any] = {"lines": {"l": {"account": known.as_json(), "query": "running"}}}
    assert status.code_of(shown) == (1 if guarantee == "exactly_once" else 0)


def test_status_and_screen_tell_the_way_down(tmp_path: Path) -> None:
    board = BridgeState("b", tmp_path, {"line": "down"})
    view = board.lines["line"]
    view.status = {"state": "online", "client_id": "b-line", "guarantee": "at_least_once", "outbox": OUTBOX}
    view.counts, view.query = DownCounts().add(batch(0, 91, kept=91, dead_lettered=1)), "running"
    assert "taken 91 = delivered 70 + dead-lettered 1 + expired 2 + refused 3 + waiting 15   in 0/s" in summary(
        view, "running"
    )
    board.save()
    assert BridgeState("b", tmp_path, {"line": "down"}).lines["line"].counts == view.counts
    told = status.render(status.collect(tmp_path))
    assert "adds up" not in told
    for part in (
        "account   unknown: no gateway answers",
        ": taken 91 = delivered 70 + dead-lettered 1 + expired 2 + refused 3 + waiting 15\n",
        "nothing is delivered; what is in Kafka and in the outbox waits",
        "refused by the broker for good: 3 messages.",
    ):
        assert part in told
    view.status = {**view.status, "gateway_running": True}
    assert "outbox    queued unknown   in flight unknown" in "\n".join(
        status._render_outbox(dict(view.status), {"account": None})
    )
