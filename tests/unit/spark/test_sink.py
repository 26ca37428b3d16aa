"""The sink of messages: columns, retries and clients."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import NoReturn

import pyarrow as pa
import pytest

from towline.errors import ConfigError, GatewayError, GatewayUnreachable
from towline.gateway.settings import GatewaySettings
from towline.schema import MESSAGE_SCHEMA
from towline.spark.link import GatewayAddress
from towline.spark.options import client_addresses, parse_sink_options
from towline.spark.sink import MqttStreamWriter, Retry, SinkColumns


def columns(schema: dict[str, str], **given: object) -> SinkColumns:
    settings = {"topic": None, "qos": 1, "retain": False, "qos_levels": (1, 2), **given}
    return SinkColumns.bind(schema, **settings)  # type: ignore[arg-type]


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


# -- several clients -------------------------------------------------------------------------------------------------


def test_each_has_a_directory_an_id_and_a_number(tmp_path: Path) -> None:
    options = {"broker": "mqtt://h", "stateDir": str(tmp_path / "s"), "clientId": "jet", "clients": "3"}
    places = client_addresses(parse_sink_options(options, "file:/ck"))
    told = [GatewaySettings.model_validate_json(place.settings) for place in places]
    assert [one.mqtt_client_id for one in told] == ["jet-0", "jet-1", "jet-2"]
    assert [one.state_dir for one in told] == [tmp_path / "s" / f"{number}-of-3" for number in range(3)]
    assert [one.outbox and (one.outbox.number, one.outbox.checkpoint) for one in told] == [
        (number, "file:/ck") for number in range(3)
    ]
    (tmp_path / "s" / "1-of-3").mkdir(parents=True)
    (tmp_path / "s" / "1-of-3.bak").mkdir()  # somebody's copy
    assert client_addresses(parse_sink_options(options, "file:/ck")) == places
    for wrong in ("1", "2"):
        with pytest.raises(ConfigError, match=r"has 3, .*TL-C28"):
            client_addresses(parse_sink_options({**options, "clients": wrong}))


def test_a_directory_of_one_client_stays_one(tmp_path: Path) -> None:
    (tmp_path / "outbox").mkdir()
    options = {"broker": "mqtt://h", "stateDir": str(tmp_path), "topic": "t"}
    assert len(client_addresses(parse_sink_options(options))) == 1
    with pytest.raises(ConfigError, match=r"has 1, .*TL-C28"):
        client_addresses(parse_sink_options({**options, "clients": "2"}))


def test_a_part_has_one_client_and_parts_are_shared_out_evenly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"broker": "mqtt://h", "stateDir": str(tmp_path / "s"), "topic": "t", "clients": "3"}
    writer = MqttStreamWriter(
        client_addresses(parse_sink_options(options)), columns({"payload": "binary"}, topic="t"), Retry("never"), None
    )
    asked: list[str] = []

    def connect(place: GatewayAddress) -> NoReturn:
        asked.append(Path(place.location).name[0])
        raise GatewayUnreachable("TL-G01", place.location, "no gateway answers")

    monkeypatch.setattr(GatewayAddress, "connect", connect)
    for part in range(7):
        with pytest.raises(GatewayError, match="TL-G23"):
            writer.store_batch("query", part, 0, iter([]))
    assert asked == [*"0120120"]
