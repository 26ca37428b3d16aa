"""Bridges whose brokers are examined."""

from __future__ import annotations

from pathlib import Path

from towline.bridge.config.file import load
from towline.bridge.config.model import Bridge

UP = """
[[uplink]]
name = "telemetry"
guarantee = "at_least_once"
[[uplink.route]]
from = "telemetry/#"
topic = "telemetry"
"""
UP_2 = UP.replace("at_least_once", "exactly_once")
DOWN = """
[[downlink]]
name = "commands"
guarantee = "at_least_once"
from = "commands"
topic = "command/all"
"""


def bridge_of(directory: Path, uris: str, lines: str = UP, mqtt: str = "") -> Bridge:
    """A bridge file in a directory of its own, read."""
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / "bridge.toml"
    file.write_text(
        f'name = "plant"\nstate_dir = "{directory}/state"\n[mqtt]\nbrokers = "{uris}"\n{mqtt}\n'
        f'[kafka]\nbootstrap_servers = "127.0.0.1:1"\n{lines}',
        encoding="utf-8",
    )
    return load(file)
