"""Several clients of a sink: which part goes to which, and what each is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from towline.errors import ConfigError
from towline.gateway.settings import GatewaySettings
from towline.spark.link import client_of
from towline.spark.sink_clients import places_of
from towline.spark.sink_options import parse_sink_options


@given(st.integers(1, 64), st.integers(0, 10_000), st.integers(0, 10_000))
def test_a_part_has_one_client_and_parts_are_shared_out_evenly(clients: int, part: int, parts: int) -> None:
    assert 0 <= client_of(part, clients) < clients
    assert client_of(part, clients) == client_of(part + clients, clients)
    shares = [sum(client_of(one, clients) == number for one in range(parts % 200)) for number in range(clients)]
    assert max(shares) - min(shares) <= 1


def test_each_has_a_directory_an_id_and_a_number(tmp_path: Path) -> None:
    options = {"broker": "mqtt://h", "stateDir": str(tmp_path / "s"), "clientId": "jet", "clients": "3"}
    places = places_of(parse_sink_options(options, "file:/ck"))
    told = [GatewaySettings.model_validate_json(place.settings) for place in places]
    assert [one.mqtt_client_id for one in told] == ["jet-0", "jet-1", "jet-2"]
    assert [one.state_dir for one in told] == [tmp_path / "s" / str(number) for number in range(3)]
    assert [one.outbox and (one.outbox.number, one.outbox.checkpoint) for one in told] == [
        (number, "file:/ck") for number in range(3)
    ]
    assert json.loads((tmp_path / "s" / "clients.json").read_text()) == {"clients": 3}
    assert places_of(parse_sink_options(options)) != ()
    for number in range(3):
        (tmp_path / "s" / str(number) / "outbox").mkdir(parents=True)
    for wrong in ("1", "2"):
        with pytest.raises(ConfigError, match=r"has 3, .*TL-C28"):
            places_of(parse_sink_options({**options, "clients": wrong}))
    (tmp_path / "s" / "clients.json").unlink()
    with pytest.raises(ConfigError, match=r"has 3, .*TL-C28"):
        places_of(parse_sink_options({**options, "clients": "2"}))


def test_a_directory_of_one_client_stays_one(tmp_path: Path) -> None:
    (tmp_path / "outbox").mkdir()
    options = {"broker": "mqtt://h", "stateDir": str(tmp_path), "topic": "t"}
    assert len(places_of(parse_sink_options(options))) == 1
    with pytest.raises(ConfigError, match=r"has 1, .*TL-C28"):
        places_of(parse_sink_options({**options, "clients": "2"}))


def test_a_gateway_that_runs_is_one_client(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'option "clients": the option gateway names one client.*TL-C23'):
        parse_sink_options({"gateway": str(tmp_path), "clients": "2"})
