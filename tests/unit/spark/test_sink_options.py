"""The sink's options and columns: what is meant, and one line for each mistake."""

from __future__ import annotations

from itertools import islice

import pyarrow as pa
import pytest

from towline.errors import ConfigError
from towline.gateway.settings import GatewaySettings
from towline.guarantee import Guarantee
from towline.schema import MESSAGE_SCHEMA
from towline.spark.options import parse_sink_options
from towline.spark.sink import Retry, SinkColumns

BASE = {"broker": "mqtt://127.0.0.1", "stateDir": "/tmp/out"}  # noqa: S108 - never made
PROPERTIES = "array<struct<key:string,value:string>>"


def columns(schema: dict[str, str], **given: object) -> SinkColumns:
    settings = {"topic": None, "qos": 1, "retain": False, "qos_levels": (1, 2), **given}
    return SinkColumns.bind(schema, **settings)  # type: ignore[arg-type]


def test_qos_2_to_several_brokers_needs_a_word() -> None:
    several = {**BASE, "broker": "a, b"}
    assert parse_sink_options(several).qos_levels == (1,)
    assert parse_sink_options({**several, "brokersShareSessions": "true"}).qos_levels == (1, 2)
    for given in ({"guarantee": "exactly_once"}, {"qos": "2", "guarantee": "at_least_once"}):
        with pytest.raises(ConfigError, match=r"with 2 brokers .*brokersShareSessions=true.*\[TL-C90\]"):
            parse_sink_options({**several, **given})


@pytest.mark.parametrize(
    ("given", "guarantee", "qos"),
    [
        ({}, Guarantee.AT_LEAST_ONCE, 1),
        ({"qos": "0"}, Guarantee.AT_MOST_ONCE, 0),
        ({"qos": "2"}, Guarantee.EXACTLY_ONCE, 2),
        ({"guarantee": "at_most_once"}, Guarantee.AT_MOST_ONCE, 0),
        ({"guarantee": "exactly_once"}, Guarantee.EXACTLY_ONCE, 2),
        ({"guarantee": "at_least_once", "qos": "2"}, Guarantee.AT_LEAST_ONCE, 2),
    ],
)
def test_guarantee_and_qos_decide_about_each_other(given: dict[str, str], guarantee: Guarantee, qos: int) -> None:
    options = parse_sink_options({**BASE, **given})
    assert (options.guarantee, options.qos) == (guarantee, qos)
    assert GatewaySettings.model_validate_json(options.address.settings).outbox is not None


@pytest.mark.parametrize(
    ("given", "code", "named"),
    [
        ({"guarantee": "exactly_once", "qos": "1"}, "TL-C12", "qos"),
        ({"guarantee": "at_most_once", "qos": "1"}, "TL-C12", "qos"),
        ({"qos": "3"}, "TL-C21", "qos"),
        ({"confirm": "kafka"}, "TL-C21", "confirm"),
        ({"retryStrategy": "often"}, "TL-C21", "retryStrategy"),
        ({"retryInterval": "soon"}, "TL-C21", "retryInterval"),
        ({"topic": "a/#"}, "TL-C21", "topic"),
        ({"outboxMaxBytes": "1k"}, "TL-C21", "outboxMaxBytes"),
        ({"outboxMaxAge": "long"}, "TL-C21", '"outboxMaxAge" = "long": must be a number'),
        ({"outboxMaxAge": "0"}, "TL-C21", '"outboxMaxAge" = "0": must be more than 0'),
        ({"subscribe": "a/#"}, "TL-C01", "subscribe"),
        ({"confrim": "broker"}, "TL-C01", "confirm"),
        ({"password": "secret"}, "TL-C22", "password"),
        ({"broker": ""}, "TL-C20", "broker"),
        ({"gateway": "/x"}, "TL-C23", "gateway"),
    ],
)
def test_a_mistake_is_one_line(given: dict[str, str], code: str, named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_sink_options({**BASE, **given})
    assert caught.value.code.startswith(code)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_limit_of_the_outbox_belongs_to_the_gateway_as_every_other_setting() -> None:
    with pytest.raises(ConfigError, match=r'option "outboxMaxBytes": it is a setting of the gateway.*\[TL-C23\]'):
        parse_sink_options({"gateway": "/x", "outboxMaxBytes": "1g"})


def test_retry_strategies_have_the_shapes_of_jets() -> None:
    assert list(Retry("never").pauses()) == []
    assert list(Retry("constant", 2.0, attempts=3).pauses()) == [2, 2, 2]
    assert list(Retry("exponential", 1.0, 3.0, 5.0, attempts=3).pauses()) == [1, 3, 9]
    assert list(Retry("capped", 1.0, 3.0, 5.0, attempts=4).pauses()) == [1, 3, 5, 5]
    assert list(islice(Retry("constant", 1.0, attempts=-1).pauses(), 1000)) == [1] * 1000


def test_a_missing_column_is_filled_and_a_value_wins_over_the_option() -> None:
    bound = columns({"topic": "string", "payload": "string", "qos": "int"}, topic="d", retain=True)
    rows = bound.rows(
        pa.record_batch({"topic": ["a", None], "payload": ["x", None], "qos": pa.array([2, None], "int32")})
    )
    assert rows.schema.equals(MESSAGE_SCHEMA)
    assert rows.column("topic").to_pylist() == ["a", "d"]
    assert rows.column("payload").to_pylist() == [b"x", None]
    assert rows.column("qos").to_pylist() == [2, 1]
    assert rows.column("retain").to_pylist() == [True, True]
    assert rows.column("content_type").null_count == 2


@pytest.mark.parametrize("level", [0, 3, 1000, -5])
def test_a_rows_qos_must_keep_the_promise(level: int) -> None:
    bound = columns({"topic": "string", "payload": "string", "qos": "int"})
    with pytest.raises(ConfigError, match="TL-C12"):
        bound.rows(pa.record_batch({"topic": ["a"], "payload": ["x"], "qos": pa.array([level], "int32")}))


@pytest.mark.parametrize(
    ("schema", "what"),
    [
        ({"topic": "string"}, "payload"),
        ({"payload": "string"}, "topic"),
        ({"topic": "int", "payload": "binary"}, '"topic" is int'),
        ({"topic": "string", "payload": "bigint"}, '"payload" is bigint'),
        ({"topic": "string", "payload": "binary", "colour": "string"}, '"colour"'),
        ({"topic": "string", "payload": "binary", "user_properties": "map<string,string>"}, "user_properties"),
    ],
)
def test_a_wrong_column_is_refused_by_name(schema: dict[str, str], what: str) -> None:
    with pytest.raises(ConfigError, match="TL-C48") as caught:
        columns(schema)
    assert what in str(caught.value)


def test_what_only_a_received_message_has_may_stay() -> None:
    schema = {
        "topic": "string",
        "payload": "binary",
        "offset": "bigint",
        "gateway": "string",
        "user_properties": PROPERTIES,
    }
    assert columns(schema).columns == {"topic", "payload", "user_properties"}
