"""``[gateway]``: where the gateways of a file listen, what lets Spark in elsewhere, and the line each mistake gets."""

# ruff: noqa: E501 - the messages are one line each, and pinned as such

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.unit.bridge.test_config import GOOD, content, read, told
from tests.unit.gateway.remote import Pki
from towline.bridge.config.model import Bridge
from towline.bridge.runtime.status import render

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


def test_without_the_table_nothing_listens(tmp_path: Path) -> None:
    bridge = read(GOOD, tmp_path)
    assert bridge.lines[0].gateway.listen is None
    assert not any(vars_of(bridge).values())


def vars_of(bridge: Bridge) -> dict[str, str]:
    access = bridge.gateway.access()
    return {name: getattr(access, name) for name in access.__slots__}


def test_a_line_listens(tmp_path: Path, pki: Pki) -> None:
    bridge = read(GOOD + LISTENING, tmp_path)
    listen = bridge.lines[0].gateway.listen
    assert listen is not None
    assert listen.address == "0.0.0.0:8815"
    assert listen.cert_file == pki.directory / "server.pem"
    assert Bridge.model_validate_json(bridge.model_dump_json(by_alias=True)) == bridge


def test_two_lines_have_an_address_each(tmp_path: Path, pki: Pki) -> None:
    assert pki.directory.exists()
    text = GOOD + OTHER + LISTENING
    (mistake,) = told(text, tmp_path)
    assert mistake.startswith(
        'bridge.toml:17  downlink "commands": its gateway would listen on "0.0.0.0:8815", as that'
    )
    assert mistake.endswith("[TL-C99]")
    both = read(text.replace('from = "commands"', 'from = "commands"\nlisten = "0.0.0.0:8816"'), tmp_path)
    assert [line.gateway.listen and line.gateway.listen.address for line in both.lines] == [
        "0.0.0.0:8815",
        "0.0.0.0:8816",
    ]
    one = read(text.replace('from = "commands"', 'from = "commands"\nlisten = false'), tmp_path)
    assert [line.gateway.listen is None for line in one.lines] == [False, True]


def test_a_line_alone_may_have_an_address(tmp_path: Path, pki: Pki) -> None:
    assert pki.directory.exists()
    text = GOOD.replace('name = "telemetry"', 'name = "telemetry"\nlisten = "[::]:1"')
    listen = read(text + LISTENING.replace('listen = "0.0.0.0:8815"\n', ""), tmp_path).lines[0].gateway.listen
    assert listen is not None
    assert listen.location == "grpc+tls://[::]:1"
    (mistake,) = told(text, tmp_path)
    assert "cert_file and key_file and token_file is missing" in mistake


def test_spark_elsewhere_gets_its_access(tmp_path: Path, pki: Pki) -> None:
    table = '[gateway]\ntoken_file = "pki/token"\nca_file = "pki/ca.pem"\nserver_name = "g1"\nticket_valid_s = 7200\n'
    bridge = read(GOOD + table, tmp_path)
    assert vars_of(bridge) == {
        "token_file": str(pki.directory / "token"),
        "ca_file": str(pki.directory / "ca.pem"),
        "server_name": "g1",
    }
    assert bridge.gateway.ticket_valid_s == 7200
    assert bridge.lines[0].gateway.listen is None


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("cert_file", "cert_fil", 'bridge.toml:18  [gateway]: unknown key "cert_fil". Did you mean "cert_file"?   [TL-C01]'),
        ("pki/token", "pki/tokens", "bridge.toml:20  [gateway]: token_file pki/tokens is missing: openssl rand -hex 32, mode 0600.   [TL-C15]"),
        ("pki/server.pem", "pki/none.pem", "bridge.toml:18  [gateway]: cert_file pki/none.pem does not exist.   [TL-C15]"),
        ("pki/server.key", "pki/client.key", "bridge.toml:19  [gateway]: key_file: the key does not fit the certificate in cert_file.   [TL-C97]"),
        ("pki/server.key", "pki/server.pem", "bridge.toml:19  [gateway]: key_file: it holds no private key.   [TL-C97]"),
        ("pki/server.pem", "pki/token", "bridge.toml:18  [gateway]: cert_file: it holds no certificate.   [TL-C97]"),
        ("/server.", "/over.", "bridge.toml:18  [gateway]: cert_file: the certificate has expired.   [TL-C97]"),
        ("pki/token", "pki/open", "bridge.toml:20  [gateway]: token_file: every user may read it. chmod 600 it.   [TL-C98]"),
        ("pki/token", "pki/short", "bridge.toml:20  [gateway]: token_file: a token has at least 16 letters. openssl rand -hex 32   [TL-C98]"),
        ('listen = "0.0.0.0:8815"', 'listen = "host"', 'bridge.toml:17  [gateway]: it is no address. Write it as "127.0.0.1:9464".   [TL-C05]'),
        ('token_file = "pki/token"\n', "", "bridge.toml:17  [gateway]: token_file is missing.   [TL-C05]"),
        ('token_file = "pki/token"', 'token = "abc"', 'bridge.toml:20  [gateway]: "token" would put a secret here. A file of mode 0600, token_file.   [TL-C16]'),
        ('token_file = "pki/token"', 'token_file = "pki/token"\nticket_valid_s = 5', 'bridge.toml:21  [gateway]: "ticket_valid_s" must be at least 60.   [TL-C03]'),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(tmp_path: Path, pki: Pki, old: str, new: str, expected: str) -> None:
    past = {"not_before": datetime(2019, 1, 1, tzinfo=UTC), "not_after": datetime(2020, 1, 1, tzinfo=UTC)}
    pki.issue("over", "127.0.0.1", **past)
    for name, text, mode in (("open", "0123456789abcdef", 0o644), ("short", "hush-hush", 0o600)):
        (pki.directory / name).write_text(text)
        (pki.directory / name).chmod(mode)
    lines = told(GOOD + LISTENING.replace(old, new), tmp_path)
    assert content(expected) in map(content, lines), lines
    assert all(line.startswith("bridge.toml:") for line in lines)
    assert "hush-hush" not in "".join(lines)


def test_status_shows_where_it_listens() -> None:
    listen = {"location": "grpc+tls://0.0.0.0:8815", "certificate_until": "2027-02-03T04:05:06+00:00", "refused": 1200}
    line = {
        "direction": "up",
        "gateway": {"listen": listen},
        "gateway_running": True,
        "query": "running",
        "gateway_error": None,
        "query_error": None,
        "account": None,
        "rate_in": None,
        "fallback": 0,
    }
    status = {"bridge": "b", "running": True, "pid": 1, "spark": "", "kafka": "", "kafka_insecure": []}
    status |= {"silent": False, "version": None, "updated": None, "file_changed": False, "kafka_error": None}
    text = render({**status, "lines": {"telemetry": line}})
    assert "network   grpc+tls://0.0.0.0:8815   token   certificate until 2027-02-03" in text
    assert "refused calls 1,200" in text
    line["gateway"] = {}
    assert "network" not in render({**status, "lines": {"telemetry": line}})
