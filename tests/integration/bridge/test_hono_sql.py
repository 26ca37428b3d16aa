"""The rules of Hono's profile on a real Spark, one row of its tables each; `test_hono.py` has them on real brokers.

Spark takes longer to plan the SQL of a profile than to run it, so there is one plan for each of its lines: what differs
by `[hono]` alone is asked of the few expressions that it changes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own custom

from tests.integration.bridge.mapped import NOW, Planned, frame_of, message
from towline.bridge.config.downlink import Sql
from towline.bridge.config.file import parse
from towline.bridge.config.model import Bridge
from towline.bridge.downlink import sql as downsql
from towline.bridge.downlink.sql import DEAD_LETTER, NOTICE, DownlinkStatements
from towline.bridge.lines.sql import DeadLetterTarget
from towline.bridge.routes import RouteTable
from towline.bridge.uplink.statements import Statements
from towline.kafka.deadletters import DeadLetter, Reason, to_record

pytestmark = pytest.mark.spark

MILLIS = 1_767_323_045_678
DEAD = DeadLetterTarget("dead", "bridge.line")
RECORD = (
    "key binary, value binary, topic string, partition int, offset long, timestamp timestamp, "
    "headers array<struct<key: string, value: binary>>"
)
FILE = """
name = "b"
state_dir = "s"
[mqtt]
brokers = ["mqtt://h"]
[kafka]
bootstrap_servers = "k:9092"
{hono}
[[uplink]]
name = "up"
profile = "hono"
dead_letter_topic = "b.dead-letters"
[[downlink]]
name = "commands"
profile = "hono"
dead_letter_topic = "b.dead-letters"
[[downlink]]
name = "errors"
profile = "hono-errors"
"""
TENANTS = """
[hono.tenants.t1]
defaults = { content-type = "text/t1", importance = "high", level = 3, ready = true, ttl-telemetry-qos1 = 7 }
resource-limits = { max-ttl = 100, max-ttl-telemetry-qos0 = 5, max-ttl-command-response = 9 }
gateways = ["gw"]
[hono.tenants.t1.devices.d9]
defaults = { content-type = "text/d9", ttl = 40, level = 4 }
[hono.tenants.t2]
"""
Records = Callable[..., list[Any]]
#: Fields that say for whom a message is and who has published it.
IDENTITY = ("hono_query", "hono_levels", "hono_tenant", "hono_device", "hono_client_tenant", "hono_client_device")
MOUNTED = TENANTS.replace("\n[hono", '\n[hono]\nmount = "{device}@{tenant}"\n[hono', 1)


def bridge(hono: str = "") -> Bridge:
    return parse(FILE.format(hono=hono), Path("/nowhere/b.toml"), {})


@pytest.fixture(scope="module")
def plan(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Planned:
    """What goes to Kafka, in the order of the messages."""
    return Planned(spark, tmp_path_factory.mktemp("messages") / "m.arrow", bridge(TENANTS).uplinks[0].routes)


@pytest.fixture(scope="module")
def up(plan: Planned) -> Records:
    """By message ``(topic, key, value, headers)``, or the words of its refusal, or the reason of its dead letter."""
    return lambda *messages: [outcome(row) for row in plan(messages)]


def outcome(made: Any) -> Any:
    if isinstance(made, str):
        return made
    if isinstance(made, DeadLetter):
        return made.detail if made.reason is Reason.REJECTED else made.reason.value
    topic, value, key, _, _, _, _, pairs = made
    headers = {name: text.decode() for name, text in pairs}
    assert len(headers) == len(pairs), "no header stands twice"
    return topic, key.decode(), value, headers


def down(spark: SparkSession, section: Any, records: Sequence[tuple[Any, ...]]) -> list[Row]:
    statements = DownlinkStatements(section, "line", 1, 0, DEAD)
    return downsql.apply(spark.createDataFrame(records, RECORD), statements, "c", "k").collect()


def asked(frame: DataFrame, fields: Iterable[tuple[str, str]], *expressions: str) -> list[tuple[Any, ...]]:
    """What some expressions over the fields of a profile are, row by row."""
    for name, sql in fields:
        frame = frame.withColumn(name, F.expr(sql))
    return [tuple(row) for row in frame.select(*map(F.expr, expressions)).collect()]


def published(spark: SparkSession, hono: str, topics: Sequence[str]) -> list[tuple[Any, ...]]:
    """Tenant, device and refusal of messages; the topic alone decides, on every route by the same expressions."""
    routes = bridge(hono).uplinks[0].routes
    assert RouteTable(routes).match(pa.array(topics)).null_count == 0
    identity = {tuple(one for one in route.fields if one[0] in IDENTITY) for route in routes}
    assert len(identity) == 1
    telemetry = routes[0]
    frame = frame_of(spark, routes, [message(topic) for topic in topics], Statements(routes))
    return asked(frame, telemetry.fields, "hono_tenant", "hono_device", telemetry.reject or "NULL")


def test_its_code_is_of_a_size_that_java_compiles(plan: Planned) -> None:
    """As one method it is not, and Spark finds that out in each batch anew."""
    nodes = plan.frame._jdf.queryExecution().executedPlan().treeString()
    assert "Project" in nodes
    assert "*(" not in nodes, "compiled as one method"


def test_forms_of_topics(up: Records) -> None:
    """Telemetry and events, long and short, with both ids; other levels behind them change nothing."""
    forms = ["telemetry/t1/d1", "t/t1/d1", "t/t1/d1/more/levels", "event/t1/d1", "e/t1/d1"]
    results = up(*(message(form) for form in forms))
    assert [(topic, key) for topic, key, _, _ in results] == [("hono.telemetry.t1", "d1")] * 3 + [
        ("hono.event.t1", "d1")
    ] * 2
    assert [headers["orig_address"] for _, _, _, headers in results] == forms


def test_ids_come_from_the_configuration_where_the_topic_names_none(spark: SparkSession, up: Records) -> None:
    fixed = '[hono]\ntenant = "t1"\ndevice = "d1"\n'
    forms = ["t", "telemetry", "t//other", "t/t2/d2", "e", "event//other", "c///s/203abc/200"]
    assert [one[:2] for one in published(spark, fixed, forms)] == [
        ("t1", "d1"),
        ("t1", "d1"),
        ("t1", "other"),
        ("t2", "d2"),
        ("t1", "d1"),
        ("t1", "other"),
        ("t1", "d1"),
    ]
    assert up(message("t"), message("t//d"), message("t/t1")) == [
        "status 400: the topic names no tenant",
        "status 400: the topic names no tenant",
        "status 400: the topic names no device",
    ]


def test_a_mount_says_who_has_published(spark: SparkSession) -> None:
    """Authenticated forms: a gateway acts for others of its tenant, a device only for itself."""
    forms = ["d1@t1/t", "d@1@t1/telemetry", "gw@t1/t//d7", "gw@t1/e/t1/d7", "d1@t1/command///res/203abc/200"]
    strangers = ["d1@t1/t//d7", "d1@t1/t/t2/d1", "gw@t2/t//d7", "d1@t3/t", "nobody/t", "d1@/t"]
    results = published(spark, MOUNTED, [*forms, *strangers])
    assert results[: len(forms)] == [
        ("t1", "d1", None),
        ("t1", "d@1", None),
        ("t1", "d7", None),
        ("t1", "d7", None),
        ("t1", "d1", None),
    ]
    not_for = "status 403: device is not authorized to act on behalf of another"
    assert [refusal for *_, refusal in results[len(forms) :]] == [
        not_for,
        "status 403: can only publish for device of same tenant",
        not_for,
        "status 404: no such tenant",
        "status 400: the topic names no tenant",
        "status 400: the topic names no tenant",
    ]


def test_headers_of_telemetry_and_events(up: Records) -> None:
    """Strings raw, everything else JSON text; what is not there has no header."""
    users = [{"key": "content-encoding", "value": "gzip"}]
    telemetry, event, plain = up(
        message("t/t2/d", qos=0, retain=True, content_type="text/plain", user_properties=users),
        message("event/t2/d/?hono-ttl=30&hono-ttd=-1", content_type="text/plain"),
        message("t/t2/d"),
    )
    common = {"device_id": "d", "creation-time": str(MILLIS), "orig_adapter": "hono-mqtt"}
    assert telemetry[3] == {
        **common,
        "content-type": "text/plain",
        "content-encoding": "gzip",
        "qos": "0",
        "orig_address": "t/t2/d",
        "x-opt-retain": "true",
    }
    assert event[3] == {
        **common,
        "content-type": "text/plain",
        "qos": "1",
        "ttl": "30000",
        "ttd": "-1",
        "orig_address": "event/t2/d/?hono-ttl=30&hono-ttd=-1",
    }
    assert plain[3] == {**common, "content-type": "application/octet-stream", "qos": "1", "orig_address": "t/t2/d"}


def test_content_type_by_bag_property_device_and_tenant(up: Records) -> None:
    results = up(
        message("t/t1/d9/?content-type=a%2Fb", content_type="from/mqtt"),
        message("t/t1/d9/?Content-Type=a/b+c", content_type="from/mqtt"),
        message("t/t1/d9", content_type="from/mqtt"),
        message("t/t1/d9"),
        message("t/t1/d1"),
        message("t/t2/d1"),
    )
    types = [headers["content-type"] for *_, headers in results]
    assert types == ["a/b", "a/b c", "from/mqtt", "text/d9", "text/t1", "application/octet-stream"]
    extras = [{name: headers.get(name) for name in ("importance", "level", "ready")} for *_, headers in results[3:]]
    assert extras == [
        {"importance": "high", "level": "4", "ready": "true"},
        {"importance": "high", "level": "3", "ready": "true"},
        dict.fromkeys(("importance", "level", "ready")),
    ]


TTLS = [
    ("e/t1/d1/?hono-ttl=30", 1, "30000"),
    ("e/t1/d1/?hono-ttl=3000", 1, "100000"),
    ("e/t1/d1", 1, "100000"),
    ("e/t1/d9", 1, "40000"),
    ("e/t1/d1/?hono-ttl=-1", 1, "100000"),
    ("e/t1/d1/?hono-ttl=soon", 1, "100000"),
    ("e/t2/d1/?hono-ttl=0", 1, "0"),
    ("e/t2/d1/?hono-ttl=99999999999999999999", 1, None),
    ("e/t2/d1", 1, None),
    ("t/t1/d1/?hono-ttl=1", 0, "5000"),
    ("t/t1/d1", 1, "7000"),
    ("t/t1/d9", 1, "40000"),
    ("t/t2/d1/?hono-ttl=1", 1, None),
    ("c/t1/d1/s/203abc/200", 1, "9000"),
    ("c/t2/d1/s/203abc/200", 1, None),
]


def test_time_to_live_is_in_milliseconds_and_capped(up: Records) -> None:
    results = up(*(message(topic, qos=qos) for topic, qos, _ in TTLS))
    assert [headers.get("ttl") for *_, headers in results] == [ttl for *_, ttl in TTLS]


def test_payload_and_content_type_fit(up: Records) -> None:
    empty = "application/vnd.eclipse-hono-empty-notification"
    fine, other, none, both = up(
        message(f"e/t2/d/?content-type={empty}&hono-ttd=0", b""),
        message("e/t2/d", b"", content_type="text/plain"),
        message("t/t2/d", b""),
        message("t/t2/d", b"x", content_type=empty),
    )
    assert (fine[2], fine[3]["content-type"], fine[3]["ttd"]) == (b"", empty, "0")
    assert other[3]["content-type"] == "text/plain"
    assert none == "status 400: Content-Type null does not match payload"
    assert both == f"status 400: Content-Type {empty} does not match payload"


def test_what_the_adapter_refuses(up: Records) -> None:
    malformed, few = "status 400: malformed topic name", "status 400: command response topic has too few segments"
    data = "status 400: command response topic contains invalid data"
    expected = {
        "e/t1/d1 0": "status 400: Only QoS 1 supported for event messages",
        "t/t1/d1/?a=%zz 1": malformed,
        "t/t9/d1 1": "status 404: no such tenant",
        "c/t1/d1/s/203abc 1": few,
        "c/t1/d1/s/203abc/ok 1": "status 400: invalid status code",
        "c/t1/d1/s/203abc/199 1": data,
        "c/t1/d1/s/203abc/600 1": data,
        "c/t1/d1/s/204abc/200 1": data,
        "c/t1/d1/s/200/200 1": data,
        "c/t1/d1/s/xyzabc/200 1": data,
        "c/t1/d1/s//200 1": data,
    }
    sent = [message(key[:-2], qos=int(key[-1])) for key in expected]
    assert up(*sent) == list(expected.values())


def test_responses_say_which_request_they_answer(up: Records) -> None:
    topics = ["command/t2/d1/res/203abc/200", "c/t2/d1/s/30aa-b_c d.0:1reply/503", "c/t2/d1/s/003abc/299"]
    results = up(*(message(topic, content_type="text/x", qos=0) for topic in topics), message(topics[0]))
    assert [(topic, key) for topic, key, _, _ in results] == [("hono.command_response.t2", "d1")] * 4
    common = {"creation-time": str(MILLIS), "device_id": "d1", "tenant_id": "t2"}
    assert [headers for *_, headers in results] == [
        {**common, "content-type": "text/x", "correlation-id": "abc", "status": "200"},
        {**common, "content-type": "text/x", "correlation-id": "a-b_c d.0:", "status": "503"},
        {**common, "content-type": "text/x", "correlation-id": "abc", "status": "299"},
        {**common, "content-type": "application/octet-stream", "correlation-id": "abc", "status": "200"},
    ]


# -- commands --------------------------------------------------------------------------------------------------------


def command(key: str | None = "d1", topic: str = "hono.command.t1", **headers: str | None) -> tuple[Any, ...]:
    named = {"device_id": "d1", "subject": "lights/on", **headers}
    pairs = [(k if k == "device_id" else k.replace("_", "-"), v.encode()) for k, v in named.items() if v is not None]
    return key and key.encode(), b"p", topic, 0, 0, NOW, pairs


ASKED = {"response_required": "true", "correlation_id": "abc"}
PLACES = [
    ("", {}, "command/t1/d1/req//lights/on", "command/t1/d1/req/203abc/lights/on"),
    ("[hono]\ntopic_names = 'short'\n", {}, "c/t1/d1/q//lights/on", "c/t1/d1/q/203abc/lights/on"),
    ("[hono]\ncommand_ids = 'device'\n", {}, "command//d1/req//lights/on", "command//d1/req/203abc/lights/on"),
    ("[hono]\ncommand_ids = 'none'\n", {}, "command///req//lights/on", "command///req/203abc/lights/on"),
    ("[hono]\ncommand_ids = 'none'\n", {"via": "gw"}, "command//d1/req//lights/on", "command//d1/req/203abc/lights/on"),
    (MOUNTED, {}, "d1@t1/command///req//lights/on", "d1@t1/command///req/203abc/lights/on"),
    (MOUNTED, {"via": "gw"}, "gw@t1/command//d1/req//lights/on", "gw@t1/command//d1/req/203abc/lights/on"),
]


def test_where_a_command_goes(spark: SparkSession) -> None:
    """The ids stand there as in the device's filter; a gateway always sees the device."""
    sections = [bridge(hono).downlinks[0].section for hono, *_ in PLACES]
    fields = sections[0].fields
    assert all(section.fields == fields for section in sections)
    forms: tuple[dict[str, str], ...] = ({}, ASKED, {"correlation_id": "abc"})
    records = [command(**more, **form) for more in ({}, {"via": "gw"}) for form in forms]
    said = [section.topic.sql for section in sections if isinstance(section.topic, Sql)]
    rows = asked(spark.createDataFrame(records, RECORD).coalesce(1), fields.items(), *said)
    for number, (_, more, one_way, response) in enumerate(PLACES):
        first = len(forms) if more else 0
        assert [row[number] for row in rows[first : first + len(forms)]] == [one_way, response, one_way]


def test_a_command_carries_its_payload_and_nothing_of_kafka(commands: list[Row]) -> None:
    row = commands[0]
    assert (row[DEAD_LETTER], row.topic) == (None, "command/t1/d1/req//lights/on")
    assert (bytes(row.payload), row.content_type, row.retain, row.user_properties) == (b"p", "text/x", False, None)
    assert (row.response_topic, row.correlation_data, row.message_expiry_seconds) == (None, None, None)


METADATA = "delivery-failure-notification-metadata.trace"
BAD_COMMANDS = [
    (command(device_id=None, **ASKED), "device identifier is not set", False),
    (command(key="d2", **ASKED), "device identifier not set as record key", False),
    (command(key=None, **ASKED), "device identifier not set as record key", False),
    (command(subject=None, **ASKED), "malformed command message: subject not set", True),
    (command(subject=None), "malformed command message: subject not set", False),
    (command(response_required="true"), "malformed command message: correlation-id is not set", False),
    (command(key="a/b", device_id="a/b", **ASKED), "the device identifier can't be a level of a topic", True),
    (command(subject="+", **ASKED), "MQTT takes no such topic", True),
    (command(**{**ASKED, "correlation_id": "a/b"}), "malformed command message: correlation-id has", True),
    (command(**{**ASKED, "correlation_id": "x" * 256}), "malformed command message: correlation-id has", True),
]


@pytest.fixture(scope="module")
def commands(spark: SparkSession) -> list[Row]:
    """What becomes of a command, of one whose application is to be told, and of `BAD_COMMANDS`."""
    told = command(subject=None, **ASKED)
    told[6].append((METADATA, b"7"))
    records = [command(content_type="text/x", extra="1"), told, *(record for record, _, _ in BAD_COMMANDS)]
    return down(spark, bridge().downlinks[0].section, records)


def test_what_is_no_command_is_a_dead_letter_and_the_application_is_told(commands: list[Row]) -> None:
    for row, (record, words, told) in zip(commands[2:], BAD_COMMANDS, strict=True):
        detail = next(bytes(h.value).decode() for h in row[DEAD_LETTER].headers if h.key == "towline.dlq.detail")
        assert words in detail
        assert (row[NOTICE] is not None) is told, record
        if told:
            error = json.loads(bytes(row[NOTICE].value))["error"]
            assert error == detail.removeprefix("status 400: ")


def test_a_delivery_failure_has_the_headers_of_hono(commands: list[Row]) -> None:
    notice = commands[1][NOTICE]
    headers = {h.key: bytes(h.value).decode() for h in notice.headers}
    assert (notice.topic, bytes(notice.key)) == ("hono.command_response.t1", b"d1")
    assert abs(int(headers.pop("creation-time")) / 1000 - datetime.now(UTC).timestamp()) < 600
    assert headers == {
        "content-type": "application/vnd.eclipse-hono-delivery-failure-notification+json",
        "correlation-id": "abc",
        "device_id": "d1",
        "status": "400",
        "tenant_id": "t1",
        METADATA: "7",
    }


# -- errors ----------------------------------------------------------------------------------------------------------


def letter(topic: str, detail: str, reason: str = "rejected") -> tuple[Any, ...]:
    """A dead letter, as far as a device is told of it."""
    said = {"mqtt.topic": topic, "towline.dlq.reason": reason, "towline.dlq.detail": detail}
    return None, b"", "b.dead-letters", 0, 0, NOW, [(name, text.encode()) for name, text in said.items()]


def test_devices_are_told_why(spark: SparkSession, plan: Planned) -> None:
    sent = [
        message("e/t1/d1/?correlation-id=c-1", qos=0),
        message("telemetry/t1/d1", b""),
        message("t/t9/d1/?correlation-id=a%2Fb"),
        message("command/t1/d1/res/bad/200"),
        message("c/t1/d1/s/bad/200"),
        message("event/t1/d1", qos=0),
        message("t/t1"),
    ]
    made = [to_record(letter) for letter in plan(sent)]
    letters = [(key, value, "b.dead-letters", 0, at, NOW, headers) for at, (key, value, headers) in enumerate(made)]
    assert len(letters) == len(sent)
    rows = down(spark, bridge(TENANTS).downlinks[1].section, letters)
    told = [f"{row.topic}: {bytes(row.payload).decode()}" for row in rows]
    body = '{{"code":{},"message":"{}","timestamp":"2026-01-02T03:04:05.678Z","correlation-id":"{}"}}'
    only, data = "Only QoS 1 supported for event messages", "command response topic contains invalid data"
    assert told == [
        f"error/t1/d1/e/c-1/400: {body.format(400, only, 'c-1')}",
        f"error/t1/d1/telemetry/-1/400: {body.format(400, 'Content-Type null does not match payload', -1)}",
        f"error/t9/d1/t/-1/404: {body.format(404, 'no such tenant', 'a/b')}",
        f"error/t1/d1/command-response/-1/400: {body.format(400, data, -1)}",
        f"error/t1/d1/c-s/-1/400: {body.format(400, data, -1)}",
        f"error/t1/d1/event/-1/400: {body.format(400, only, -1)}",
    ]


def test_errors_go_to_the_client_that_has_published(spark: SparkSession) -> None:
    sent = {
        "d1@t1/e": ("d1@t1/error///e/-1/400", "status 400: x"),
        "gw@t1/e//d7": ("gw@t1/error//d7/e/-1/400", "status 400: x"),
        "d1@t1/t//d7": ("d1@t1/error//d7/t/-1/403", "status 403: x"),
        "d1@t1/t/t2/d1": ("d1@t1/error///t/-1/403", "status 403: x"),
    }
    assert told(spark, MOUNTED, [letter(topic, detail) for topic, (_, detail) in sent.items()]) == [
        place for place, _ in sent.values()
    ]


def test_errors_under_short_names_are_no_events(spark: SparkSession, up: Records) -> None:
    short = TENANTS.replace("\n[hono", "\n[hono]\ntopic_names = 'short'\n[hono", 1)
    (topic,) = told(spark, short, [letter("e/t1/d1", "status 400: x")])
    assert topic == "e/t1/d1/e/-1/400"
    own, event = up(message(topic, qos=0), message("e/t1/d1/e/-1/nan"))
    assert (own, event[0]) == ("filtered", "hono.event.t1")


def told(spark: SparkSession, hono: str, letters: list[tuple[Any, ...]]) -> list[str]:
    """Where errors are published."""
    fields = bridge(hono).downlinks[1].section.fields
    frame = spark.createDataFrame(letters, RECORD).coalesce(1)
    return [topic for (topic,) in asked(frame, fields.items(), "hono_error_topic")]


# -- the property bag, against a URL library -------------------------------------------------------------------------

NAMES = st.sampled_from(["content-type", "Content-Type", "CORRELATION-ID", "hono-ttl", "x", "content%2Dtype"])
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0+#&;=%"), max_size=8)
ESCAPED = st.sampled_from(["%20", "%2F", "%25", "%C3%BC", "/", "?", "/?", "="])
VALUES = st.lists(TEXT | ESCAPED, max_size=3).map("".join)
BAGS = st.lists(st.tuples(NAMES, VALUES), max_size=4)


@given(bags=st.lists(BAGS, min_size=200, max_size=200))
@settings(max_examples=1, deadline=None, suppress_health_check=list(HealthCheck))
def test_a_property_bag_is_a_url_query(up: Records, bags: list[list[tuple[str, str]]]) -> None:
    topics = ["e/t2/d/?" + "&".join(f"{name}={value}" for name, value in bag) for bag in bags]
    results = up(*(message(topic) for topic in topics))
    for topic, result in zip(topics, results, strict=True):
        query = topic.rpartition("/?")[2]
        said: dict[str, str] = {}
        for name, value in parse_qsl(query.replace(";", "&"), keep_blank_values=True):
            said.setdefault(name.lower(), value)
        assert result[3]["content-type"] == (said.get("content-type") or "application/octet-stream"), topic
        assert result[3]["orig_address"] == topic
