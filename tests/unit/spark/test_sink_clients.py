"""Several clients of a sink: which part goes to which, and what each is told."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import pytest

from towline.errors import ConfigError, GatewayError, GatewayUnreachable
from towline.gateway.settings import GatewaySettings
from towline.spark.link import GatewayAddress
from towline.spark.options import client_addresses, parse_sink_options
from towline.spark.sink import MqttStreamWriter, Retry, SinkColumns


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


def test_a_part_has_one_client_and_parts_are_shared_out_evenly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"broker": "mqtt://h", "stateDir": str(tmp_path / "s"), "topic": "t", "clients": "3"}
    columns = SinkColumns.bind({"payload": "binary"}, topic="t", qos=1, retain=False, qos_levels=(1,))
    writer = MqttStreamWriter(client_addresses(parse_sink_options(options)), columns, Retry(strategy="never"), None)
    asked: list[str] = []

    def connect(place: GatewayAddress) -> NoReturn:
        asked.append(Path(place.location).name[0])
        raise GatewayUnreachable("TL-G01", place.location, "no gateway answers")

    monkeypatch.setattr(GatewayAddress, "connect", connect)
    for part in range(7):
        with pytest.raises(GatewayError, match="TL-G23"):
            writer.store_batch("query", part, 0, iter([]))
    assert asked == [*"0120120"]


def test_a_directory_of_one_client_stays_one(tmp_path: Path) -> None:
    (tmp_path / "outbox").mkdir()
    options = {"broker": "mqtt://h", "stateDir": str(tmp_path), "topic": "t"}
    assert len(client_addresses(parse_sink_options(options))) == 1
    with pytest.raises(ConfigError, match=r"has 1, .*TL-C28"):
        client_addresses(parse_sink_options({**options, "clients": "2"}))


def test_a_gateway_that_runs_is_one_client(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'option "clients": the option gateway names a running gateway.*TL-C23'):
        parse_sink_options({"gateway": str(tmp_path), "clients": "2"})
