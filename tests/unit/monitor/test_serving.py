"""Whether metrics are asked for, and what is said where they can't be had."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import psutil
import pytest

from towline.bridge.config.file import parse
from towline.bridge.config.model import Bridge
from towline.bridge.runtime.state import BridgeState
from towline.errors import ConfigError
from towline.monitor.serving import metrics_endpoint
from towline.options import parse_host_port


def bridge(tmp_path: Path, monitor: str = "") -> Bridge:
    text = f"""
name = "b"
state_dir = "state"
mqtt = {{ brokers = "mqtt://127.0.0.1" }}
kafka = {{ bootstrap_servers = "127.0.0.1:9" }}
monitor = {{ {monitor} }}
[[uplink]]
name = "line"
route = [{{ from = "#", topic = "t" }}]
"""
    return parse(text, tmp_path / "bridge.toml", os.environ)


def test_an_address() -> None:
    assert [parse_host_port(text) for text in ("9464", "[::1]:80")] == [("127.0.0.1", 9464), ("::1", 80)]


@pytest.mark.parametrize("text", ["", "host", "host:", ":9464", "1:2:3", "host:65536", "http://h:1", "h:1/x"])
def test_no_address(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r'bridge.toml:6  \[monitor\]: .*Write it as "127.0.0.1:9464".*TL-C05'):
        bridge(tmp_path, f'listen = "{text}"')
    with pytest.raises(ConfigError, match=r"--metrics: .*TL-C145"), metrics_endpoint(bridge(tmp_path), text or " "):
        pass


def listening() -> set[Any]:
    """Where this process takes connections."""
    return {one.laddr for one in psutil.Process().net_connections("tcp") if one.status == psutil.CONN_LISTEN}


def test_nothing_listens_that_was_not_asked_for(tmp_path: Path) -> None:
    before = listening()
    with metrics_endpoint(bridge(tmp_path), None) as observe:
        observe(BridgeState("b", tmp_path, {"line": "up"}))
        assert listening() == before
    plan = bridge(tmp_path, 'listen = "127.0.0.1:0"')
    with metrics_endpoint(plan, None, plan.lines[0].gateway):  # the file's address is the bridge's
        assert listening() == before
    with metrics_endpoint(plan, None):
        assert len(listening() - before) == 1
