"""``[gateway]``: where the gateways of a file listen, what lets Spark in elsewhere, and the line each mistake gets."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.unit.bridge.test_config import GOOD, read, told
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
        ("cert_file", "cert_fil", 'unknown key "cert_fil". Did you mean "cert_file"?   [TL-C01]'),
        ("pki/token", "pki/tokens", "is not there. Make one: openssl rand -hex 32, mode 0600.   [TL-C15]"),
        ("pki/server.pem", "pki/none.pem", "is not there. It is a file in PEM.   [TL-C15]"),
        ("pki/server.key", "pki/client.key", "key_file: the key does not fit the certificate in cert_file."),
        ("pki/server.key", "pki/server.pem", "key_file: it holds no private key in PEM without a password."),
        ("pki/server.pem", "pki/token", "cert_file: it holds no certificate in PEM."),
        ("/server.", "/over.", "cert_file: the certificate is over."),
        ("pki/token", "pki/open", "token_file: no file of tokens: every user of this machine may read or write it."),
        ("pki/token", "pki/short", "a token has at least 16 letters, digits and signs"),
        ('listen = "0.0.0.0:8815"', 'listen = "host"', "it is no address to listen on"),
        ('token_file = "pki/token"\n', "", "has TLS and a token, and token_file is missing."),
        (
            'token_file = "pki/token"',
            'token = "abc"',
            '"token" would put a secret into this file. Write it into a file',
        ),
        ('token_file = "pki/token"', 'token_file = "pki/token"\nticket_valid_s = 5', "must be at least 60"),
    ],
)
def test_a_mistake_is_one_line(tmp_path: Path, pki: Pki, old: str, new: str, expected: str) -> None:
    past = {"not_before": datetime(2019, 1, 1, tzinfo=UTC), "not_after": datetime(2020, 1, 1, tzinfo=UTC)}
    pki.issue("over", "127.0.0.1", **past)
    for name, text, mode in (("open", "0123456789abcdef", 0o644), ("short", "hush-hush", 0o600)):
        (pki.directory / name).write_text(text)
        (pki.directory / name).chmod(mode)
    lines = told(GOOD + LISTENING.replace(old, new), tmp_path)
    assert any(expected in line for line in lines), lines
    assert all(line.startswith("bridge.toml:") for line in lines)
    assert "hush-hush" not in "".join(lines)


def test_status_shows_where_it_listens() -> None:
    listen = {
        "location": "grpc+tls://0.0.0.0:8815",
        "certificate_until": "2027-02-03T04:05:06+00:00",
        "refused": 1200,
    }
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
