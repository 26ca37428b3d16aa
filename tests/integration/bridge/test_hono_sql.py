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
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own custom

from tests.integration.bridge.mapped import NOW, RECORD, frame_of, message, outcomes
from tests.unit.bridge.test_messages import RECORD as KAFKA
from tests.unit.bridge.test_messages import kafka_gets, line_of
from towline.bridge.config.file import parse
from towline.bridge.config.model import Bridge
from towline.bridge.downlink.sink import render_rows, split_by_outcome
from towline.bridge.lines import sql as downsql
from towline.bridge.lines.sql import RouteSql
from towline.bridge.messages import message_table
from towline.bridge.profiles import HonoSection, profile_lines
from towline.bridge.routes import RouteTable
from towline.kafka.deadletters import DeadLetter
from towline.schema import ROW_SCHEMA

MILLIS = 1_767_323_045_678
COLUMNS = KAFKA.names
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


def test_for_whom_a_message_is_and_who_has_published_it(spark: SparkSession) -> None:
    """The topic alone decides."""
    common = profile_lines()["uplink"]["hono"]["common"]
    rows = [(hono, message(topic)) for hono, topic, *_ in BY_TOPIC]
    published = asked(spark, common, rows, ROW_SCHEMA, "hono_tenant", "hono_device", common["reject"])
    for (hono, topic, ids, refusal), (tenant, device, why) in zip(BY_TOPIC, published, strict=True):
        assert (ids in (None, (tenant, device)), why) == (True, refusal), (hono, topic, tenant, device)
        assert RouteTable(bridge(hono).uplinks[0].routes).match(pa.array([topic])).null_count == 0


EMPTY = "application/vnd.eclipse-hono-empty-notification"
MALFORMED, FEW = "status 400: malformed topic name", "status 400: command response topic has too few segments"
DATA = "status 400: command response topic contains invalid data"
T1 = {"importance": "high", "level": "3", "ready": "true", "content-type": "text/t1"}
#: Messages, and what becomes of them: words of a refusal, or all headers of the record but "creation-time".
UP: list[tuple[dict[str, Any], str | dict[str, str]]] = [
    # headers of telemetry and events: strings raw, everything else JSON text; what is not there has no header
    (
        message(
            "t/t2/d",
            qos=0,
            retain=True,
            content_type="text/plain",
            user_properties=[{"key": "content-encoding", "value": "gzip"}],
        ),
        {"content-type": "text/plain", "content-encoding": "gzip", "qos": "0", "x-opt-retain": "true"},
    ),
    (message("event/t2/d/?hono-ttl=30&hono-ttd=-1"), {"qos": "1", "ttl": "30000", "ttd": "-1"}),
    (message("e/t2/d", b"", content_type="text/plain"), {"content-type": "text/plain", "qos": "1"}),
    (message(f"e/t2/d/?content-type={EMPTY}&hono-ttd=0", b""), {"content-type": EMPTY, "qos": "1", "ttd": "0"}),
    # the content type by bag, property, device and tenant, and further defaults
    (message("t/t2/d/?content-type=a%2Fb", content_type="from/mqtt"), {"content-type": "a/b", "qos": "1"}),
    (message("t/t2/d/?Content-Type=a/b+c", content_type="from/mqtt"), {"content-type": "a/b c", "qos": "1"}),
    (message("t/t2/d", content_type="from/mqtt"), {"content-type": "from/mqtt", "qos": "1"}),
    (message("t/t1/d9"), {**T1, "level": "4", "content-type": "text/d9", "qos": "1", "ttl": "40000"}),
    (message("t/t1/d1"), {**T1, "qos": "1", "ttl": "7000"}),
    # the time to live in milliseconds, capped
    (message("e/t1/d1/?hono-ttl=30"), {**T1, "qos": "1", "ttl": "30000"}),
    (message("e/t1/d1/?hono-ttl=3000"), {**T1, "qos": "1", "ttl": "100000"}),
    (message("e/t1/d1/?hono-ttl=-1"), {**T1, "qos": "1", "ttl": "100000"}),
    (message("e/t2/d1/?hono-ttl=0"), {"qos": "1", "ttl": "0"}),
    (message("e/t2/d1/?hono-ttl=99999999999999999999"), {"qos": "1"}),
    (message("t/t1/d1/?hono-ttl=1", qos=0), {**T1, "qos": "0", "ttl": "5000"}),
    # responses say which request they answer
    (
        message("c/t2/d1/s/30aa-b_c d.0:1reply/503", content_type="text/x", qos=0),
        {"content-type": "text/x", "correlation-id": "a-b_c d.0:", "status": "503"},
    ),
    (message("command/t2/d1/res/003abc/299"), {"correlation-id": "abc", "status": "299"}),
    (
        message("c/t1/d9/s/203abc/200"),
        {**T1, "level": "4", "content-type": "text/d9", "correlation-id": "abc", "status": "200", "ttl": "9000"},
    ),
    # what the adapter refuses
    (message("e/t1/d1", qos=0), "status 400: Only QoS 1 supported for event messages"),
    (message("t/t2/d", b""), "status 400: Content-Type null does not match payload"),
    (message("t/t2/d", content_type=EMPTY), f"status 400: Content-Type {EMPTY} does not match payload"),
    (message("t/t1/d1/?a=%zz"), MALFORMED),
    (message("c/t1/d1/s/203abc"), FEW),
    (message("c/t1/d1/s/203abc/ok"), "status 400: invalid status code"),
    (message("c/t1/d1/s/203abc/199"), DATA),
    (message("c/t1/d1/s/204abc/200"), DATA),
    (message("c/t1/d1/s/xyzabc/200"), DATA),
    # an error under short names is no event
    (message("e/t1/d1/e/-1/400", qos=0), "filtered"),
    (message("e/t2/d1/e/-1/nan"), {"qos": "1"}),
]
#: Names and values of a property bag, of which some stand twice, as a device might write them.
NAMES = ["content-type", "Content-Type", "CORRELATION-ID", "x", "content%2Dtype"]
PIECES = [*"aZ0-_.~,+ü\U0001f600/?=", "%20", "%2F", "%25", "%C3%BC", "/?"]


def bag() -> str:
    pairs = [(random.choice(NAMES), "".join(random.choices(PIECES, k=random.randrange(5)))) for _ in range(4)]
    return "&".join(f"{name}={value}" for name, value in pairs[: random.randrange(5)])


def as_a_url_query(topic: str) -> dict[str, str]:
    """Headers of an event with a bag, by a URL library."""
    pairs: dict[str, str] = {}
    for name, value in parse_qsl(topic.rpartition("/?")[2].replace(";", "&"), keep_blank_values=True):
        pairs.setdefault(name.lower(), value)
    return {"qos": "1", **({"content-type": pairs["content-type"]} if pairs.get("content-type") else {})}


def test_what_becomes_of_messages(spark: SparkSession) -> None:
    """Its code is of a size that Java compiles: as one method it is not, which Spark finds out in each batch anew."""
    bags = [message(f"e/t2/d/?{bag()}") for _ in range(200)]
    cases = [*UP, *((one, as_a_url_query(one["topic"])) for one in bags)]
    routes = bridge(TENANTS).uplinks[0].routes
    statements = RouteSql(routes)
    frame = statements.writer_frame(frame_of(spark, routes, [row for row, _ in cases], statements))
    nodes = frame._jdf.queryExecution().executedPlan().treeString()
    assert "Project" in nodes
    assert "*(" not in nodes, "compiled as one method"
    for (row, expected), made in zip(cases, outcomes(routes, frame), strict=True):
        if isinstance(expected, str):
            assert (made.detail if isinstance(made, DeadLetter) else made) == expected, row["topic"]
            continue
        kind, tenant, device = row["topic"].split("/")[:3]
        common = {"device_id": device, "creation-time": str(MILLIS), "content-type": "application/octet-stream"}
        name = {"t": "telemetry", "e": "event", "c": "command_response"}[kind[0]]
        own = {"tenant_id": tenant} if kind[0] == "c" else {"orig_adapter": "hono-mqtt", "orig_address": row["topic"]}
        topic, value, key, *_, headers = made
        assert (topic, value, key) == (f"hono.{name}.{tenant}", row["payload"], device.encode())
        assert len(dict(headers)) == len(headers), "no header stands twice"
        assert {name: text.decode() for name, text in headers} == {**common, **own, **expected}, row["topic"]


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


def test_what_is_no_command_is_a_dead_letter_and_the_application_is_told(spark: SparkSession) -> None:
    """A command carries its payload, and nothing of Kafka."""
    records = [command(content_type="text/x", extra="1"), *(record for record, _, _ in BAD_COMMANDS)]
    (row,), refused = down(spark, bridge().downlinks[0], records)
    assert row["topic"] == "command/t1/d1/req//lights/on"
    assert (row["payload"], row["content_type"], row["retain"], row["user_properties"]) == (b"p", "text/x", False, None)
    assert (row["response_topic"], row["correlation_data"], row["message_expiry_seconds"]) == (None, None, None)
    for (letter, notice), (record, words, told) in zip(refused, BAD_COMMANDS, strict=True):
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
