"""``[[uplink]] receipts``: the key reaches the line's gateway, and contradictions are told with their line."""

from __future__ import annotations

from pathlib import Path

import pytest

from towline.bridge.config import parse
from towline.bridge.model import Line
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
    (made,) = parse(FILE.format(more=more), Path("bridge.toml"), {}).lines
    assert isinstance(made, Line)
    return made


def test_the_key_reaches_the_gateway() -> None:
    assert line("").gateway.receipts is None
    assert line("receipts = false").gateway.receipts is None
    given = line("receipts = true").gateway.receipts
    assert given is not None
    assert given.prefix == "towline/receipts"
    given = line('receipts = { prefix = "plant/done", keep_s = 3600 }').gateway.receipts
    assert given is not None
    assert (given.prefix, given.keep_s) == ("plant/done", 3600)


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ('receipts = true\nguarantee = "at_most_once"', "receipts need guarantee"),
        ('receipts = true\n[uplink.mqtt]\nprotocol = "3.1.1"', "receipts need protocol"),
        ('receipts = { prefixes = "x" }', "bridge.toml:"),
        ('[uplink.mqtt]\nreceipts = "x"', "unknown key"),
    ],
)
def test_contradictions_are_mistakes_of_the_file(more: str, what: str) -> None:
    with pytest.raises(ConfigError) as told:
        line(more)
    assert what in str(told.value)
