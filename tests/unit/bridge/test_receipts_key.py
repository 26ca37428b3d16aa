"""``[[uplink]] receipts``: the key reaches the line's gateway, and contradictions are told with their line."""

from __future__ import annotations

from pathlib import Path

import pytest

from towline.bridge.config.file import parse
from towline.bridge.config.model import Uplink
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


def line(more: str, directory: Path) -> Uplink:
    (line,) = parse(FILE.format(more=more), directory / "bridge.toml", {}).lines
    assert isinstance(line, Uplink)
    return line


def test_the_key_is_a_file_beside_the_bridge_file(tmp_path: Path) -> None:
    assert line("", tmp_path).gateway.receipts is None
    text = 'receipts = { prefix = "plant/done", keep_s = 3600, key_file = "receipts.key" }'
    with pytest.raises(ConfigError, match="TL-C15"):
        line(text, tmp_path)
    (tmp_path / "receipts.key").write_text("0" * 64)
    given = line(text, tmp_path).gateway.receipts
    assert given is not None
    assert (given.key_file, given.prefix, given.keep_s) == (tmp_path / "receipts.key", "plant/done", 3600)


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ("receipts = true", '"receipts" must be a table'),
        ('receipts = { prefix = "x" }', '"key_file" is missing'),
        ('receipts = { key_file = "k" }\nguarantee = "at_most_once"', "receipts need guarantee"),
        ('receipts = { key_file = "k" }\n[uplink.mqtt]\nprotocol = "3.1.1"', "receipts need protocol"),
        ('receipts = { prefixes = "x" }', "bridge.toml:"),
        ('[uplink.mqtt]\nreceipts = "x"', "unknown key"),
    ],
)
def test_contradictions_are_mistakes_of_the_file(more: str, what: str, tmp_path: Path) -> None:
    (tmp_path / "k").write_text("0" * 64)
    with pytest.raises(ConfigError) as caught:
        line(more, tmp_path)
    assert what in str(caught.value)
