"""How a gateway is found on its machine, and how its errors travel."""

from __future__ import annotations

import json
import os
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.gateway.serving import Served, mark, served
from towline import errors
from towline.errors import GatewayError, TowlineError
from towline.gateway.client import GatewayClient
from towline.gateway.endpoint import ENDPOINT_FILE, MAX_SOCKET_BYTES, GatewayEndpoint, error_fields, error_from
from towline.gateway.launch import find_running


def test_endpoint_and_socket_are_private_and_name_the_process(tmp_path: Path) -> None:
    (tmp_path / "gateway.sock").write_text("")  # left behind by one that was killed
    with served(tmp_path) as server:
        for name in (ENDPOINT_FILE, "gateway.sock"):
            assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600
        endpoint = GatewayEndpoint.read(tmp_path)
        assert endpoint == server.service.endpoint
        assert (endpoint.process, endpoint.journal) == (mark(), server.journal.journal_id)
        client = find_running(tmp_path)
        assert client is not None
        client.close()
        assert client.location == server.location
    assert find_running(tmp_path) is None


@pytest.mark.parametrize(
    "change",
    [
        {"location": "grpc+unix:///none.sock"},
        {"journal": "another"},
        {"started": 1},  # the pid is another process's now
    ],
)
def test_an_endpoint_of_no_running_gateway_is_none(tmp_path: Path, change: dict[str, Any]) -> None:
    with served(tmp_path / "a") as server:
        replace(server.service.endpoint, **change).write(tmp_path)
        assert find_running(tmp_path) is None
    for text in ("", "[]", '{"location": "x"}'):
        (tmp_path / ENDPOINT_FILE).write_text(text)
        assert GatewayEndpoint.read(tmp_path) is None


@pytest.mark.parametrize("name", ["d" * 60 + "/" + "e" * 60, "brücke [1]", "a#b", "a?b", "a%41b"])
def test_a_gateway_serves_in_a_directory_of_any_name(tmp_path: Path, name: str) -> None:
    """Arrow takes a URI, and a socket's path is short: it received, and nobody could ever reach it."""
    with served(tmp_path / name) as server, GatewayClient(server.location) as client:
        assert client.status()["name"] == "plant"
        socket = server.service._socket
        assert len(os.fsencode(socket)) <= MAX_SOCKET_BYTES
        assert stat.S_IMODE(socket.parent.stat().st_mode) & 0o077 == 0 or socket.parent == tmp_path / name
    assert not socket.exists()
    assert socket.parent == tmp_path / name or not socket.parent.exists()


def test_close_withdraws_only_its_own_endpoint(tmp_path: Path) -> None:
    server = Served(tmp_path / "state")
    newer = GatewayEndpoint("grpc+unix:///x", 1, 1, "h", "plant", "j", "now")
    newer.write(server.state_dir)
    server.close()
    assert GatewayEndpoint.read(server.state_dir) == newer


KINDS = [k for k in vars(errors).values() if isinstance(k, type) and issubclass(k, TowlineError)]


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.__name__)
def test_every_error_survives_the_wire(kind: type[TowlineError]) -> None:
    if kind is errors.ProtocolViolation:
        error: TowlineError = errors.ProtocolViolation("here", "what")
        wanted: type[TowlineError] = errors.BrokerError
    elif kind is errors.ConfigErrors:
        error, wanted = errors.ConfigErrors([errors.ConfigError("TL-X01", "here", "what")]), errors.ConfigError
    else:
        error, wanted = kind("TL-X01", "here", "what", "Do it."), kind
    back = error_from(json.loads(json.dumps(error_fields(error))))
    assert (type(back), str(back)) == (wanted, str(error))


@pytest.mark.parametrize("kind", ["", "SystemExit", "annotations", "TypeVar", 7, None])
def test_an_unknown_error_becomes_a_gateway_error(kind: object) -> None:
    assert type(error_from({"type": kind, "code": "TL-X01"})) is GatewayError
