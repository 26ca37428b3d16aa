"""``[[uplink]] receipts``: the key reaches the line's gateway, and contradictions are told with their line."""

from __future__ import annotations

from pathlib import Path

import pytest

from towline.bridge.config.file import parse
from towline.bridge.config.model import Line
from towline.errors import ConfigError

FILE = """
name = "plant"
state_dir = "state"
[mqtt]
brokers = ["mqtt://127.0.0.1:1883"]
[kafka]
bootstrap_servers = "127.0.0.1:9092"
[[uplink]]
name = "telemetry"
{more}
[[uplink.route]]
from = "telemetry/#"
topic = "telemetry"
"""


def line(more: str) -> Line:
    (line,) = parse(FILE.format(more=more), Path("bridge.toml"), {}).lines
    assert isinstance(line, Line)
    return line


def test_the_key_reaches_the_gateway() -> None:
    assert line("").gateway.receipts is None
    assert line("receipts = false").gateway.receipts is None
    given = line("receipts = { trust_all_clients = true }").gateway.receipts
    assert given is not None
    assert given.prefix == "towline/receipts"
    given = line('receipts = { prefix = "plant/done", keep_s = 3600, trust_all_clients = true }').gateway.receipts
    assert given is not None
    assert (given.prefix, given.keep_s) == ("plant/done", 3600)


def test_the_key_is_a_file_beside_the_bridge_file(tmp_path: Path) -> None:
    file = tmp_path / "bridge.toml"
    text = FILE.format(more='receipts = { key_file = "receipts.key" }')
    with pytest.raises(ConfigError, match="TL-C15"):
        parse(text, file, {})
    (tmp_path / "receipts.key").write_text("0" * 64)
    (line,) = parse(text, file, {}).lines
    assert isinstance(line, Line)
    assert line.gateway.receipts is not None
    assert line.gateway.receipts.key_file == tmp_path / "receipts.key"


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ("receipts = true", "receipts need key_file, or trust_all_clients"),
        ('receipts = { trust_all_clients = true }\nguarantee = "at_most_once"', "receipts need guarantee"),
        ('receipts = { trust_all_clients = true }\n[uplink.mqtt]\nprotocol = "3.1.1"', "receipts need protocol"),
        ('receipts = { prefixes = "x" }', "bridge.toml:"),
        ('[uplink.mqtt]\nreceipts = "x"', "unknown key"),
    ],
)
def test_contradictions_are_mistakes_of_the_file(more: str, what: str) -> None:
    with pytest.raises(ConfigError) as caught:
        line(more)
    assert what in str(caught.value)
