"""The sink of messages: columns and retries."""

from __future__ import annotations

from typing import NoReturn

import pyarrow as pa
import pytest

from towline.errors import ConfigError, GatewayError, GatewayUnreachable
from towline.schema import MESSAGE_SCHEMA
from towline.sinks import Task
from towline.spark.link import GatewayAddress
from towline.spark.sink import MqttStreamWriter, SinkColumns


def columns(schema: dict[str, str], **given: object) -> SinkColumns:
    settings = {"topic": None, "qos": 1, "retain": False, "qos_levels": (1, 2), **given}
    return SinkColumns.bind(schema, **settings)  # type: ignore[arg-type]


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


@pytest.mark.parametrize("level", [0, 3, 1000])
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
        ({"topic": "string", "payload": "binary", "colour": "string"}, '"colour"'),
    ],
)
def test_a_wrong_column_is_refused_by_name(schema: dict[str, str], what: str) -> None:
    with pytest.raises(ConfigError, match="TL-C48") as caught:
        columns(schema)
    assert what in str(caught.value)


def test_what_only_a_received_message_has_may_stay() -> None:
    schema = {"topic": "string", "payload": "binary", "offset": "bigint", "gateway": "string"}
    assert columns(schema).columns == {"topic", "payload"}


@pytest.mark.parametrize(
    ("timeout_s", "tries", "code"), [(0.0, 1, "TL-G23"), (3.0, 4, "TL-G23"), (float("inf"), 9, "TL-G24")]
)
def test_a_gateway_that_is_away_is_awaited_for_the_time_that_was_given(
    timeout_s: float, tries: int, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, asked = [0.0], [0]

    def connect(address: GatewayAddress) -> NoReturn:
        asked[0] += 1
        if asked[0] == 9:
            raise GatewayError("TL-G24", address.location, "another error ends the wait")
        raise GatewayUnreachable("TL-G01", address.location, "no gateway answers")

    monkeypatch.setattr(GatewayAddress, "connect", connect)
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr("time.sleep", lambda pause_s: now.__setitem__(0, now[0] + max(pause_s, 1.0)))
    writer = MqttStreamWriter(GatewayAddress("/s"), columns({"payload": "binary"}, topic="t"), timeout_s, None)
    with pytest.raises(GatewayError, match=code):
        writer._write_rows(Task(0, batch=0, query="query"), iter([]))
    assert asked == [tries]
