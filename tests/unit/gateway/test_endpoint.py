from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from tests.unit.gateway.serving import Served, mark, served
from towline import errors
from towline.errors import GatewayError, TowlineError
from towline.gateway.client import GatewayClient
from towline.gateway.endpoint import ENDPOINT_FILE, MAX_SOCKET_BYTES, GatewayEndpoint, error_fields, error_from


def test_endpoint_and_socket_are_private_and_name_the_process(server: Served) -> None:
    for name in (ENDPOINT_FILE, "gateway.sock"):
        assert stat.S_IMODE((server.state_dir / name).stat().st_mode) == 0o600
    assert GatewayEndpoint.read(server.state_dir) == server.service.endpoint
    assert server.service.endpoint.process == mark()
    assert server.service.endpoint.journal == server.journal.journal_id


def test_a_long_path_gets_a_private_socket_elsewhere(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 60) / ("e" * 60)
    with served(deep) as server, GatewayClient(server.location) as client:
        socket = Path(server.location.removeprefix("grpc+unix://"))
        assert len(os.fsencode(socket)) <= MAX_SOCKET_BYTES
        assert stat.S_IMODE(socket.parent.stat().st_mode) == 0o700
        assert client.status()["name"] == "plant"
    assert not socket.parent.exists()
    assert not (deep / ENDPOINT_FILE).exists()


@pytest.mark.parametrize("name", ["My Data", "brücke", "温度", "a[b]", "a#b", "a?b", "a%41b", "a%zz"])
def test_a_gateway_serves_in_a_directory_of_any_name(tmp_path: Path, name: str) -> None:
    """Arrow takes a URI: it received, and nobody could ever reach it."""
    with served(tmp_path / name) as server, GatewayClient(server.location) as client:
        server.add(3)
        assert client.status()["end"] == 3


def test_close_withdraws_only_its_own_endpoint(tmp_path: Path) -> None:
    server = Served(tmp_path / "state")
    newer = GatewayEndpoint("grpc+unix:///x", 1, 1, "h", "plant", "j", "now")
    newer.write(server.state_dir)
    server.close()
    assert GatewayEndpoint.read(server.state_dir) == newer


def test_a_socket_left_behind_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "gateway.sock").write_text("")
    with served(tmp_path / "state") as server, GatewayClient(server.location) as client:
        assert client.status()


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"location": "x"}'])
def test_a_file_that_is_no_endpoint_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / ENDPOINT_FILE).write_text(text)
    assert GatewayEndpoint.read(tmp_path) is None


KINDS = [k for k in vars(errors).values() if isinstance(k, type) and issubclass(k, TowlineError)]


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.__name__)
def test_every_error_survives_the_wire(kind: type[TowlineError]) -> None:
    if kind is errors.ProtocolViolation:
        error: TowlineError = errors.ProtocolViolation("here", "what")
        wanted: type[TowlineError] = errors.BrokerError
    elif kind is errors.ConfigErrors:
        error = errors.ConfigErrors(errors.ConfigError(f"TL-X0{n}", "here", "what", "Do it.") for n in range(2))
        wanted = kind
    else:
        error, wanted = kind("TL-X01", "here", "what", "Do it."), kind
    back = error_from(json.loads(json.dumps(error_fields(error))))
    assert (type(back), str(back)) == (wanted, str(error))


@pytest.mark.parametrize("kind", ["", "SystemExit", "annotations", "__all__", "TypeVar", 7, None])
def test_an_unknown_error_becomes_a_gateway_error(kind: object) -> None:
    assert type(error_from({"type": kind, "code": "TL-X01"})) is GatewayError
