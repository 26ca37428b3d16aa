"""The rules of Hono's profile on a real Spark, one row of its tables each; `test_hono.py` has them on real brokers.

Spark takes longer to plan the SQL of a profile than to run it, so there is one plan for each of its lines, and one job
for all messages. What differs by `[hono]` is asked of the same SQL with the parameters in columns: many tables at once.
"""

from __future__ import annotations

import json
import random
import re
import tomllib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own custom

from tests.integration.bridge.mapped import NOW, frame_of, message, outcomes
from tests.unit.bridge.test_messages import kafka_gets, line_of
from towline.bridge.config.file import parse
from towline.bridge.config.model import Bridge
from towline.bridge.downlink.sink import render_rows, split_by_outcome
from towline.bridge.lines import sql as downsql
from towline.bridge.lines.sql import RouteSql
from towline.bridge.messages import message_table
from towline.bridge.profiles import HonoSection, profile_lines
from towline.bridge.routes import RouteTable
from towline.kafka.deadletters import DeadLetter, Reason
from towline.schema import ROW_SCHEMA

pytestmark = pytest.mark.spark

MILLIS = 1_767_323_045_678
RECORD = (
    "key binary, value binary, topic string, partition int, offset long, timestamp timestamp, "
    "headers array<struct<key: string, value: binary>>"
)
COLUMNS = ("key", "value", "topic", "partition", "offset", "timestamp", "headers")
HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
TYPES_OF_KAFKA = (pa.binary(), pa.binary(), pa.string(), pa.int32(), pa.int64(), pa.timestamp("us", "UTC"), HEADERS)
KAFKA = pa.schema(list(zip(COLUMNS, TYPES_OF_KAFKA, strict=True)))
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
FIXED = '[hono]\ntenant = "t1"\ndevice = "d1"\n'
MOUNTED = TENANTS.replace("\n[hono", '\n[hono]\nmount = "{device}@{tenant}"\n[hono', 1)


def bridge(hono: str = "") -> Bridge:
    return parse(FILE.format(hono=hono), Path("/nowhere/b.toml"), {})


MESSAGES: list[dict[str, Any]] = []


def sent(*messages: dict[str, Any]) -> slice:
    """Have messages be sent with all others; where they are among `made` and `up`."""
    MESSAGES.extend(messages)
    return slice(len(MESSAGES) - len(messages), len(MESSAGES))


@pytest.fixture(scope="module")
def plan(spark: SparkSession) -> tuple[DataFrame, list[Any]]:
    """The plan of the uplink, and what becomes of all messages."""
    routes = bridge(TENANTS).uplinks[0].routes
    statements = RouteSql(routes)
    frame = statements.writer_frame(frame_of(spark, routes, MESSAGES, statements), tolerant=True)
    return frame, outcomes(routes, frame)


@pytest.fixture(scope="module")
def made(plan: tuple[DataFrame, list[Any]]) -> list[Any]:
    """What goes to Kafka, in the order of `MESSAGES`."""
    return plan[1]


@pytest.fixture(scope="module")
def up(made: list[Any]) -> list[Any]:
    """By message ``(topic, key, value, headers)``, or the words of its refusal, or the reason of its dead letter."""
    return [outcome(one) for one in made]


def outcome(made: Any) -> Any:
    if isinstance(made, str):
        return made
    if isinstance(made, DeadLetter):
        return made.detail if made.reason is Reason.REJECTED else made.reason.value
    topic, value, key, _, _, _, _, pairs = made
    headers = {name: text.decode() for name, text in pairs}
    assert len(headers) == len(pairs), "no header stands twice"
    return topic, key.decode(), value, headers


#: Of a record that is refused, its dead letter and its notice, if there is one.
Told = tuple[tuple[Any, ...], tuple[Any, ...] | None]


def down(spark: SparkSession, section: Any, records: Sequence[tuple[Any, ...]]) -> tuple[list[Any], list[Told]]:
    """The messages, and what Kafka is told of the other records."""
    made = downsql.apply_downlink_sql(spark.createDataFrame(records, RECORD), section, line_of(section))
    table = message_table(line_of(section))
    batches = made.toArrow().combine_chunks().to_batches()
    messages, refused = split_by_outcome(list(render_rows(table, batches, Counter(), has_dead_letter_topic=True)))
    each = [kafka_gets(table, part.slice(at, 1)) for part in refused for at in range(part.num_rows)]
    told = [(letter, next(iter(notices), None)) for letter, *notices in each]
    return [row for part in messages for row in part.to_pylist()], told


def asked(
    spark: SparkSession, line: dict[str, Any], rows: Sequence[tuple[str, dict[str, Any]]], schema: Any, *answers: str
) -> list[tuple[Any, ...]]:
    """What some expressions over the fields of a line of the profile are, by table ``[hono]`` and row.

    Each parameter is a column here, where a bridge has a constant.
    """
    tables = [HonoSection.model_validate(tomllib.loads(hono).get("hono", {})) for hono, _ in rows]
    values = [table.parameters("b") for table in tables]
    texts = [{f"p_{k}": v if isinstance(v, str) else json.dumps(v) for k, v in one.items()} for one in values]
    constants = pa.Table.from_pylist(texts)
    table = pa.Table.from_pylist([row for _, row in rows], schema)
    for name in constants.column_names:
        table = table.append_column(name, constants.column(name))
    fields = (F.expr(in_columns(sql)).alias(name) for name, sql in needed(line["fields"], answers))
    frame = spark.createDataFrame(table).coalesce(1).select("*", *fields)
    return [tuple(row) for row in frame.select(*(F.expr(in_columns(sql)) for sql in answers)).collect()]


def in_columns(sql: str) -> str:
    return re.sub(r"\$\{(\w+)\}", r"p_\1", sql)


def needed(fields: dict[str, str], answers: Sequence[str]) -> list[tuple[str, str]]:
    """The fields that some expressions are made of, in order."""
    chosen: list[tuple[str, str]] = []
    for name, sql in reversed(fields.items()):
        if any(name in re.findall(r"\w+", text) for text in (*answers, *(text for _, text in chosen))):
            chosen.insert(0, (name, sql))
    return chosen


@pytest.fixture(scope="module")
def published(spark: SparkSession) -> list[tuple[Any, ...]]:
    """Tenant, device and refusal of the messages in `BY_TOPIC`: the topic alone decides."""
    common = profile_lines()["uplink"]["hono"]["common"]
    rows = [(hono, message(topic)) for hono, topic, *_ in BY_TOPIC]
    return asked(spark, common, rows, ROW_SCHEMA, "hono_tenant", "hono_device", common["reject"])


def test_its_code_is_of_a_size_that_java_compiles(plan: tuple[DataFrame, list[Any]]) -> None:
    """As one method it is not, and Spark finds that out in each batch anew."""
    nodes = plan[0]._jdf.queryExecution().executedPlan().treeString()
    assert "Project" in nodes
    assert "*(" not in nodes, "compiled as one method"


NO_TENANT, NO_DEVICE = "status 400: the topic names no tenant", "status 400: the topic names no device"
OTHERS = "status 403: device is not authorized to act on behalf of another"
UNKNOWN = "status 404: no such tenant"
#: `[hono]`, topic, and tenant, device and refusal of the message; None for a tenant and device that do not matter.
BY_TOPIC: list[tuple[str, str, tuple[str, str] | None, str | None]] = [
    # ids come from the configuration where the topic names none
    (FIXED, "t", ("t1", "d1"), None),
    (FIXED, "t//other", ("t1", "other"), None),
    (FIXED, "t/t2/d2", ("t2", "d2"), None),
    (FIXED, "c///s/203abc/200", ("t1", "d1"), None),
    (TENANTS, "t", None, NO_TENANT),
    (TENANTS, "t//d", None, NO_TENANT),
    (TENANTS, "t/t1", None, NO_DEVICE),
    # without tenants in the file every tenant may send
    (TENANTS, "t/t9/d", ("t9", "d"), UNKNOWN),
    ("", "t/t9/d", ("t9", "d"), None),
    # a mount says who has published: a gateway acts for others of its tenant, a device only for itself
    (MOUNTED, "d1@t1/t", ("t1", "d1"), None),
    (MOUNTED, "d@1@t1/telemetry", ("t1", "d@1"), None),
    (MOUNTED, "gw@t1/t//d7", ("t1", "d7"), None),
    (MOUNTED, "d1@t1/command///res/203abc/200", ("t1", "d1"), None),
    (MOUNTED, "d1@t1/t//d7", None, OTHERS),
    (MOUNTED, "d1@t1/t/t2/d1", None, "status 403: can only publish for device of same tenant"),
    (MOUNTED, "gw@t2/t//d7", None, OTHERS),
    (MOUNTED, "nobody/t", None, NO_TENANT),
    # or levels of its own
    ('[hono]\nmount = "/in/{tenant}/{device}"\n', "in/t1/d1/t", ("t1", "d1"), None),
    ('[hono]\nmount = "in/{tenant}/{device}/"\n', "in/t1/d1/t//d2", ("t1", "d2"), OTHERS),
    ('[hono]\nmount = "{device}"\ntenant = "t1"\n', "d1/t", ("t1", "d1"), None),
]


@pytest.mark.parametrize("number", range(len(BY_TOPIC)))
def test_for_whom_a_message_is_and_who_has_published_it(published: list[tuple[Any, ...]], number: int) -> None:
    hono, topic, ids, refusal = BY_TOPIC[number]
    *found, why = published[number]
    assert (ids is None or tuple(found) == ids, why) == (True, refusal), found
    assert RouteTable(bridge(hono).uplinks[0].routes).match(pa.array([topic])).null_count == 0


USERS = [{"key": "content-encoding", "value": "gzip"}]
ENDPOINTS = sent(
    message("t/t2/d", qos=0, retain=True, content_type="text/plain", user_properties=USERS),
    message("event/t2/d/?hono-ttl=30&hono-ttd=-1", content_type="text/plain"),
    message("t/t2/d"),
)


def test_headers_of_telemetry_and_events(up: list[Any]) -> None:
    """Strings raw, everything else JSON text; what is not there has no header."""
    telemetry, event, plain = up[ENDPOINTS]
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


TYPES = sent(
    message("t/t1/d9/?content-type=a%2Fb", content_type="from/mqtt"),
    message("t/t1/d9/?Content-Type=a/b+c", content_type="from/mqtt"),
    message("t/t1/d9", content_type="from/mqtt"),
    message("t/t1/d9"),
    message("t/t1/d1"),
    message("t/t2/d1"),
)


def test_content_type_by_bag_property_device_and_tenant(up: list[Any]) -> None:
    results = up[TYPES]
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
    ("e/t2/d1/?hono-ttl=0", 1, "0"),
    ("e/t2/d1/?hono-ttl=99999999999999999999", 1, None),
    ("t/t1/d1/?hono-ttl=1", 0, "5000"),
    ("t/t1/d1", 1, "7000"),
    ("c/t1/d1/s/203abc/200", 1, "9000"),
]


WITH_TTLS = sent(*(message(topic, qos=qos) for topic, qos, _ in TTLS))


def test_time_to_live_is_in_milliseconds_and_capped(up: list[Any]) -> None:
    results = up[WITH_TTLS]
    assert [headers.get("ttl") for *_, headers in results] == [ttl for *_, ttl in TTLS]


MALFORMED, FEW = "status 400: malformed topic name", "status 400: command response topic has too few segments"
DATA = "status 400: command response topic contains invalid data"
#: Topic and QoS -> words.
EMPTY = "application/vnd.eclipse-hono-empty-notification"
REFUSED = {
    f"t/t2/d/?content-type={EMPTY} 1": f"status 400: Content-Type {EMPTY} does not match payload",
    "e/t1/d1 0": "status 400: Only QoS 1 supported for event messages",
    "t/t1/d1/?a=%zz 1": MALFORMED,
    "c/t1/d1/s/203abc 1": FEW,
    "c/t1/d1/s/203abc/ok 1": "status 400: invalid status code",
    "c/t1/d1/s/203abc/199 1": DATA,
    "c/t1/d1/s/204abc/200 1": DATA,
    "c/t1/d1/s/xyzabc/200 1": DATA,
}
ALL_REFUSED = sent(*(message(key[:-2], qos=int(key[-1])) for key in REFUSED))


def test_what_the_adapter_refuses(up: list[Any]) -> None:
    assert up[ALL_REFUSED] == list(REFUSED.values())


RESPONSES = ["command/t2/d1/res/203abc/200", "c/t2/d1/s/30aa-b_c d.0:1reply/503", "c/t2/d1/s/003abc/299"]
ALL_RESPONSES = sent(*(message(one, content_type="text/x", qos=0) for one in RESPONSES), message(RESPONSES[0]))


def test_responses_say_which_request_they_answer(up: list[Any]) -> None:
    results = up[ALL_RESPONSES]
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
    forms: tuple[dict[str, str], ...] = ({}, ASKED, {"correlation_id": "abc"})
    rows = [
        (hono, dict(zip(COLUMNS, command(**more, **form), strict=True))) for hono, more, *_ in PLACES for form in forms
    ]
    line = profile_lines()["downlink"]["hono"]
    topics = [topic for (topic,) in asked(spark, line, rows, KAFKA, line["topic"]["sql"])]
    assert topics == [topic for _, _, one_way, response in PLACES for topic in (one_way, response, one_way)]


def test_a_command_carries_its_payload_and_nothing_of_kafka(commands: tuple[list[Any], list[Told]]) -> None:
    (row,), _ = commands
    assert row["topic"] == "command/t1/d1/req//lights/on"
    assert (row["payload"], row["content_type"], row["retain"], row["user_properties"]) == (b"p", "text/x", False, None)
    assert (row["response_topic"], row["correlation_data"], row["message_expiry_seconds"]) == (None, None, None)


METADATA = "delivery-failure-notification-metadata.trace"
BAD_COMMANDS = [
    (command(device_id=None, **ASKED), "device identifier is not set", False),
    (command(key="d2", **ASKED), "device identifier not set as record key", False),
    (command(subject=None, **ASKED), "malformed command message: subject not set", True),
    (command(subject=None), "malformed command message: subject not set", False),
    (command(response_required="true"), "malformed command message: correlation-id is not set", False),
    (command(key="a/b", device_id="a/b", **ASKED), "the device identifier can't be a level of a topic", True),
    (command(subject="+", **ASKED), "MQTT takes no such topic", True),
    (command(**{**ASKED, "correlation_id": "x" * 256}), "malformed command message: correlation-id has", True),
]


@pytest.fixture(scope="module")
def commands(spark: SparkSession) -> tuple[list[Any], list[Told]]:
    """What becomes of a command, of one whose application is to be told, and of `BAD_COMMANDS`."""
    told = command(subject=None, **ASKED)
    told[6].append((METADATA, b"7"))
    records = [command(content_type="text/x", extra="1"), told, *(record for record, _, _ in BAD_COMMANDS)]
    return down(spark, bridge().downlinks[0], records)


def test_what_is_no_command_is_a_dead_letter_and_the_application_is_told(
    commands: tuple[list[Any], list[Told]],
) -> None:
    for (letter, notice), (record, words, told) in zip(commands[1][1:], BAD_COMMANDS, strict=True):
        detail = dict(letter[-1])["towline.dlq.detail"].decode()
        assert words in detail
        assert (notice is not None) is told, record
        if notice:
            assert json.loads(notice[2])["error"] == detail.removeprefix("status 400: ")


# -- errors ----------------------------------------------------------------------------------------------------------


def letter(topic: str, detail: str, reason: str = "rejected") -> tuple[Any, ...]:
    """A dead letter, as far as a device is told of it."""
    said = {"mqtt.topic": topic, "towline.dlq.reason": reason, "towline.dlq.detail": detail}
    return None, b"", "b.dead-letters", 0, 0, NOW, [(name, text.encode()) for name, text in said.items()]


SHORT = TENANTS.replace("\n[hono", "\n[hono]\ntopic_names = 'short'\n[hono", 1)
#: `[hono]`, topic and status of what was refused, and where its client is told.
TOLD_AT = [
    (MOUNTED, "d1@t1/e", 400, "d1@t1/error///e/-1/400"),
    (MOUNTED, "gw@t1/e//d7", 400, "gw@t1/error//d7/e/-1/400"),
    (MOUNTED, "d1@t1/t//d7", 403, "d1@t1/error//d7/t/-1/403"),
    (MOUNTED, "d1@t1/t/t2/d1", 403, "d1@t1/error///t/-1/403"),
    (MOUNTED, "d1@{device}/t", 404, None),
    (TENANTS, "command/t1/d1/res/bad/200", 400, "error/t1/d1/command-response/-1/400"),
    (TENANTS, "c/t1/d1/s/bad/200", 400, "error/t1/d1/c-s/-1/400"),
    (TENANTS, "t/t9/d1/?correlation-id=a%2Fb", 404, "error/t9/d1/t/-1/404"),
    (TENANTS, "t/t1", 400, None),
    (SHORT, "e/t1/d1", 400, "e/t1/d1/e/-1/400"),
]


def test_errors_go_to_the_client_that_has_published(spark: SparkSession) -> None:
    """What names no client is told nobody."""
    rows = [
        (hono, dict(zip(COLUMNS, letter(topic, f"status {status}: x"), strict=True)))
        for hono, topic, status, _ in TOLD_AT
    ]
    places = asked(spark, profile_lines()["downlink"]["hono-errors"], rows, KAFKA, "hono_error_topic")
    assert [place for (place,) in places] == [place for *_, place in TOLD_AT]


OWN = sent(message(str(TOLD_AT[-1][-1]), qos=0), message("e/t1/d1/e/-1/nan"))


def test_errors_under_short_names_are_no_events(up: list[Any]) -> None:
    own, event = up[OWN]
    assert (own, event[0]) == ("filtered", "hono.event.t1")


# -- the property bag, against a URL library -------------------------------------------------------------------------

NAMES = ["content-type", "Content-Type", "CORRELATION-ID", "hono-ttl", "x", "content%2Dtype"]
PIECES = [*"aZ0-_.~,+ü\U0001f600/?=", "%20", "%2F", "%25", "%C3%BC", "/?"]


def bag() -> str:
    """Names and values, of which some stand twice, as a device might write them."""
    pairs = [(random.choice(NAMES), "".join(random.choices(PIECES, k=random.randrange(5)))) for _ in range(4)]
    return "&".join(f"{name}={value}" for name, value in pairs[: random.randrange(5)])


BAGS = sent(*(message(f"e/t2/d/?{bag()}") for _ in range(200)))


def test_a_property_bag_is_a_url_query(up: list[Any]) -> None:
    for one, result in zip(MESSAGES[BAGS], up[BAGS], strict=True):
        topic = one["topic"]
        query = topic.rpartition("/?")[2]
        pairs: dict[str, str] = {}
        for name, value in parse_qsl(query.replace(";", "&"), keep_blank_values=True):
            pairs.setdefault(name.lower(), value)
        assert result[3]["content-type"] == (pairs.get("content-type") or "application/octet-stream"), topic
        assert result[3]["orig_address"] == topic
