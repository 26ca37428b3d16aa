"""What an operator sees of a bridge whose children say what they say: real supervisors, state, screen and status."""

from __future__ import annotations

import io
import json
import re
import threading
from collections import Counter
from pathlib import Path
from typing import Any

from tests.unit.bridge.noted import commit, down, up
from towline.bridge.config.file import parse
from towline.bridge.runtime.child_supervisors import DriverSupervisor, GatewaySupervisor, KafkaSupervisor
from towline.bridge.runtime.screen import PlainScreen
from towline.bridge.runtime.state import BridgeState, read_notes
from towline.bridge.runtime.supervisor import Supervisor

__all__ = ["Watched"]

_FILE = """
name = "plant-7"
state_dir = "state"
mqtt = {{ brokers = "mqtt://broker.example" }}
kafka = {{ bootstrap_servers = "k1:9092" }}
{}
"""
_LINES = {
    "up": '[[uplink]]\nname = "telemetry"\nguarantee = "{}"\nroute = [{{ from = "telemetry/#", topic = "telemetry" }}]',
    "down": '[[downlink]]\nname = "commands"\nguarantee = "{}"\nfrom = "commands"\ntopic = "c/{{key}}"',
}


class Hurried(threading.Event):
    """Nobody waits for another try."""

    def wait(self, timeout: float | None = None) -> bool:
        del timeout
        return self.is_set()


class Watched:
    """A bridge of one line without processes.

    Args:
        directory: For its files.
        direction: Of its line.
        guarantee: Of its line.
    """

    def __init__(self, directory: Path, direction: str = "up", guarantee: str = "at_least_once") -> None:
        text = _FILE.format(_LINES[direction].format(guarantee))
        self.bridge = parse(text, directory / "bridge.toml", {})
        (self.line,) = self.bridge.lines
        self.bridge.state_dir.mkdir(exist_ok=True)
        self.out = io.StringIO()
        self.screen = PlainScreen(self.out)
        self.ending = Hurried()
        self.state = BridgeState("plant-7", self.bridge.state_dir, {self.line.name: direction})
        self.gateway = GatewaySupervisor(self.line, self.bridge, self.state, self.ending)
        self.kafka = KafkaSupervisor(self.bridge, self.state, self.ending)
        self.spark = DriverSupervisor(self.bridge, self.state, self.kafka, self.ending)
        self.counts = Counter[str]()
        self.facts: dict[str, Any] = {
            "state": "online",
            "broker": "mqtt://broker.example:1883",
            "client_id": f"plant-7-{self.line.name}",
            "protocol": "5",
            "guarantee": guarantee,
            "connects": 1,
            "session_kept_s": 0xFFFFFFFF,
            "journal": "j",
            "received": 0,
            "end": 0,
            "committed": 0,
            "first": 0,
            "unacknowledged": 0,
            "ack_after": "journal",
            "bytes_on_disk": 1_250_000,
            "last_error": None,
            "outbox": None,
        }
        if direction == "down":
            names = ("accepted", "queued", "in_flight", "delivered", "acknowledged", "expired", "refused")
            self.facts["outbox"] = dict.fromkeys((*names, "bytes_on_disk"), 0)

    def answer(self, **facts: Any) -> None:
        """The gateway's next answer."""
        outbox = self.facts["outbox"]
        if outbox is not None:
            outbox = {
                **outbox,
                **{name: facts.pop(name) for name in list(facts) if name in outbox or name == "degraded"},
            }
            outbox["acknowledged"] = outbox["delivered"]
        self.facts |= {**facts, "outbox": outbox}
        self.gateway._handle_status(dict(self.facts), read_notes(self.line.gateway.state_dir))

    def tell(self, kind: str, **facts: Any) -> None:
        """A report of the driver."""
        self.spark._handle_report(json.dumps({"kind": kind, "at": 0.0, "line": self.line.name, **facts}))

    def batch(self, number: int, end: int, **counts: int) -> None:
        """A committed batch; the gateway is asked once more behind it."""
        self.counts.update(counts)
        if self.line.direction == "up":
            dropped = self.counts["deduplicated"]
            spark = {"deduplicated": dropped, "dropped": dropped}
            notes = up({"j": (0, end)}, spark, **{**self.counts, "dropped": dropped})
        else:
            notes = down(end, **self.counts)
        commit(self.line.gateway.state_dir, notes)
        self.tell("progress", query="q", batch=number, millis={"triggerExecution": 41})
        view = self.state.lines[self.line.name]
        view.behind, view.hidden = 0, 0  # as the supervisor of Kafka measures it
        self.answer()

    def look(self) -> None:
        """What the supervisor does a few times a second."""
        for text in self.state.take_events():
            self.screen.print_event(text)
        self.screen.show(self.state)

    def farewell(self) -> None:
        """The last lines."""
        supervisor = Supervisor(self.bridge, self.screen)
        supervisor._state = self.state
        for text in supervisor._final_report():
            self.screen.print_event(text)

    def seen(self) -> list[str]:
        """The console since the last call, without times; the state directory is called STATE."""
        self.look()
        text = self.out.getvalue().replace(str(self.bridge.state_dir), "STATE").replace(str(self.bridge.file), "FILE")
        self.out.seek(0)
        self.out.truncate()
        lines = [re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ  (.*)", line) for line in text.splitlines()]
        return [line[1] for line in lines if line]
