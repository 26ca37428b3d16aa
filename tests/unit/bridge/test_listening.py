"""``[gateway]``: where the gateways of a file listen, what lets Spark in elsewhere, and the line each mistake gets."""

# ruff: noqa: E501 - the messages are one line each, and pinned as such

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.bridge.test_config import GOOD, content, read, told
from tests.unit.gateway.remote import Pki
from towline.bridge.config.model import Bridge
from towline.bridge.runtime.status import render
from towline.gateway.access import ClientAccess

LISTENING = """\
[gateway]
listen = "0.0.0.0:8815"
cert_file = "pki/server.pem"
key_file = "pki/server.key"
token_file = "pki/token"
"""
OTHER = """
[[downlink]]
name = "commands"
from = "commands"
"""


@pytest.fixture
def pki(tmp_path: Path) -> Pki:
    return Pki.made(tmp_path / "pki")


def test_each_line_has_an_address(tmp_path: Path, pki: Pki) -> None:
    text = GOOD + OTHER + LISTENING
    (mistake,) = told(text, tmp_path)
    assert mistake.startswith(
        'bridge.toml:17  downlink "commands": its gateway would listen on "0.0.0.0:8815", as that'
    )
    assert mistake.endswith("[TL-C99]")
    bridge = read(text.replace('from = "commands"', 'from = "commands"\nlisten = "[::]:1"'), tmp_path)
    places = [line.gateway.listen and line.gateway.listen.location for line in bridge.lines]
    assert places == ["grpc+tls://0.0.0.0:8815", "grpc+tls://[::]:1"]
    assert Bridge.model_validate_json(bridge.model_dump_json(by_alias=True)) == bridge
    one = read(text.replace('from = "commands"', 'from = "commands"\nlisten = false'), tmp_path)
    assert [line.gateway.listen is None for line in one.lines] == [False, True]


def test_spark_elsewhere_gets_its_access(tmp_path: Path, pki: Pki) -> None:
    table = '[gateway]\ntoken_file = "pki/token"\nca_file = "pki/ca.pem"\nserver_name = "g1"\nticket_valid_s = 7200\n'
    bridge = read(GOOD + table, tmp_path)
    access = ClientAccess(str(pki.directory / "token"), str(pki.directory / "ca.pem"), "g1")
    assert (bridge.gateway.access(), bridge.lines[0].gateway.listen) == (access, None)
    assert bridge.gateway.spark_options()["gatewayTicketValidity"] == "7200"
    assert read(GOOD, tmp_path).gateway.access() == ClientAccess()


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("pki/token", "pki/tokens", "bridge.toml:20  [gateway]: token_file pki/tokens is missing: openssl rand -hex 32, mode 0600.   [TL-C15]"),
        ("pki/server.key", "pki/client.key", "bridge.toml:19  [gateway]: key_file: the key does not fit the certificate in cert_file.   [TL-C97]"),
        ("pki/token", "pki/open", "bridge.toml:20  [gateway]: token_file: every user may read it. chmod 600 it.   [TL-C98]"),
        ('listen = "0.0.0.0:8815"', 'listen = "host"', 'bridge.toml:17  [gateway]: it is no address. Write it as "127.0.0.1:9464".   [TL-C05]'),
        ('token_file = "pki/token"\n', "", "bridge.toml:17  [gateway]: token_file is missing.   [TL-C05]"),
        ('token_file = "pki/token"', 'token = "abc"', 'bridge.toml:20  [gateway]: "token" would put a secret here. A file of mode 0600, token_file.   [TL-C16]'),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(tmp_path: Path, pki: Pki, old: str, new: str, expected: str) -> None:
    (pki.directory / "open").write_text("hush-hush-hush-hush")
    (pki.directory / "open").chmod(0o644)
    lines = told(GOOD + LISTENING.replace(old, new), tmp_path)
    assert content(expected) in map(content, lines), lines
    assert all(line.startswith("bridge.toml:") for line in lines)
    assert "hush-hush" not in "".join(lines)


def test_status_shows_where_it_listens() -> None:
    listen = {"location": "grpc+tls://0.0.0.0:8815", "certificate_until": "2027-02-03T04:05:06+00:00", "refused": 1200}
    nothing = ("gateway_error", "query_error", "account", "rate_in")
    line = {**dict.fromkeys(nothing), "direction": "up", "gateway_running": True, "query": "running", "fallback": 0}
    status = {"bridge": "b", "running": True, "pid": 1, "spark": "", "kafka": "", "kafka_insecure": []}
    status |= {"silent": False, "version": None, "updated": None, "file_changed": False, "kafka_error": None}
    text = render({**status, "lines": {"telemetry": {**line, "gateway": {"listen": listen}}}})
    assert "network   grpc+tls://0.0.0.0:8815   token   certificate until 2027-02-03" in text
    assert "refused calls 1,200" in text
