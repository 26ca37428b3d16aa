"""A bridge whose state a test plays: real views with statuses as gateways send them, and accounts made from notes."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

from towline.bridge.config.file import load
from towline.bridge.config.model import Bridge
from towline.bridge.lines.account import LineNotes
from towline.bridge.runtime.state import BridgeState, LineView
from towline.spark.sink_note import BatchTotals, Span
from towline.timing import Histogram

_HEAD = """\
name = "plant-7"
state_dir = "{directory}/state"
[mqtt]
brokers = ["mqtt://broker.example:1883"]
[kafka]
bootstrap_servers = "kafka.example:9092"
"""
_UPLINK = """\
[[uplink]]
name = "{name}"
guarantee = "{guarantee}"
[[uplink.route]]
from = "{name}/{{device}}/#"
topic = "telemetry"
"""
_DOWNLINK = """\
[[downlink]]
name = "{name}"
from = "commands"
topic = "{name}/{{key}}"
"""


class PlayedBridge:
    """Bridge of some lines; every fifth is a downlink.

    Args:
        directory: Gets the bridge file and the state directory.
        names: Names of the lines.
        monitor: The table ``[monitor]``.
    """

    def __init__(self, directory: Path, names: list[str], monitor: str = "") -> None:
        file = directory / "bridge.toml"
        lines = [
            _DOWNLINK.format(name=name)
            if index % 5 == 4
            else _UPLINK.format(name=name, guarantee="exactly_once" if index % 2 else "at_least_once")
            for index, name in enumerate(names)
        ]
        file.write_text(_HEAD.format(directory=directory) + monitor + "".join(lines))
        file.chmod(0o600)
        self.bridge: Bridge = load(file)
        self.bridge.state_dir.mkdir(mode=0o700)
        directions = {line.name: line.direction for line in self.bridge.lines}
        self.state = BridgeState("plant-7", self.bridge.state_dir, directions, file=file)
        self.state.spark, self.state.kafka = "running", "reachable"
        self.received = dict.fromkeys(directions, 0)

    def step(self, messages: int = 100, waiting: int = 10, **status: Any) -> None:
        """Receive messages on each line, of which some wait, and save the state; `status` changes what gateways say."""
        with self.state.lock:
            for view in self.state.lines.values():
                self.received[view.name] += messages
                view.directory.mkdir(exist_ok=True, mode=0o700)
                view.query, view.batch_s = "running", 0.25
                self._update(view, self.received[view.name], min(waiting, self.received[view.name]), status)
            self.state.heartbeat = time.monotonic()
            self.state.save()

    def _update(self, view: LineView, count: int, waiting: int, status: dict[str, Any]) -> None:
        disk = {
            "syncs": Histogram().as_json(),
            "bytes_written": 120 * count,
            "bytes_on_disk": 40_000_000,
            "bytes_waiting": 120 * waiting,
            "room_left": 29_000_000_000,
        }
        values: dict[str, Any] = {
            "name": view.name,
            "journal": view.name,
            "state": "online",
            "connects": 1,
            "broker": "mqtt://broker.example:1883",
            "client_id": f"plant-7-{view.name}",
            "guarantee": "at_least_once",
            "ack_after": "journal",
            "received": count,
            "end": count,
            "committed": count - waiting,
            "first": 0,
            "oldest": time.time() - 0.4 if waiting else None,
            "unacknowledged": 3,
            "deduplicated": 0,
            "measured": {"inbox": disk, "outbox": disk},
        }
        if view.direction == "down":
            sent = {"accepted": count, "queued": waiting, "in_flight": 0, "delivered": count - waiting}
            values["outbox"] = {**sent, "acknowledged": count - waiting, "expired": 0, "refused": 0}
            notes = LineNotes(BatchTotals(1, Counter(records=count, sent=count)), {"taken": count, "records": count})
        else:
            delivered = Counter(given=count - waiting, acknowledged=count - waiting)
            notes = LineNotes(BatchTotals(1, delivered, {view.name: Span(0, count - waiting)}))
        view.update_status({**values, **status}, notes)
