"""What an operator is told: events, console, terminal and status, from what gateways and Spark's driver report."""

from __future__ import annotations

import io
import json
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.unit.bridge.noted import commit, up
from tests.unit.bridge.test_config import GOOD, read
from towline.bridge.lines import statuses
from towline.bridge.runtime.child_supervisors import DriverSupervisor, GatewaySupervisor, KafkaSupervisor
from towline.bridge.runtime.failures import failure_reason
from towline.bridge.runtime.screen import LiveScreen, PlainScreen, line_summary
from towline.bridge.runtime.state import RATE_WINDOW_S, BridgeState, read_notes
from towline.bridge.runtime.status import collect_status, render
from towline.bridge.runtime.supervisor import Supervisor
from towline.errors import GatewayUnreachable
from towline.gateway.client import GatewayClient
from towline.timing import RateMeter

NOW = 1_800_000_000.0
LINE = 'line "telemetry"'
FACTS: dict[str, Any] = {
    "state": "online",
    "broker": "mqtt://a:1883",
    "client_id": "c",
    "protocol": "5",
    "guarantee": "at_least_once",
    "connects": 1,
    "session_kept_s": 0xFFFFFFFF,
    "journal": "j",
    **dict.fromkeys(("received", "end", "committed", "first", "unacknowledged"), 0),
    "ack_after": "journal",
    "bytes_on_disk": 1_250_000,
}


class Hurried(threading.Event):
    """Nobody waits for another try."""

    def wait(self, timeout: float | None = None) -> bool:
        del timeout
        return self.is_set()


class Watched:
    """A bridge of one line without processes: its supervisors, and what they are told."""

    def __init__(self, directory: Path) -> None:
        self.bridge = read(GOOD, directory)
        (self.line,) = self.bridge.lines
        self.bridge.state_dir.mkdir(exist_ok=True)
        self.state = BridgeState("plant-7", self.bridge.state_dir, {self.line.name: "up"})
        ending = Hurried()
        self.gateway = GatewaySupervisor(self.line, self.bridge, self.state, ending)
        self.kafka = KafkaSupervisor(self.bridge, self.state, ending)
        self.spark = DriverSupervisor(self.bridge, self.state, self.kafka, ending)
        self.facts = dict(FACTS)

    def answers(self, **facts: Any) -> list[str]:
        """What is told of the gateway's next answer."""
        self.facts |= facts
        self.gateway._handle_status(dict(self.facts), read_notes(self.line.gateway.state_dir))
        return self.state.take_events()

    def reports(self, kind: str, **facts: Any) -> list[str]:
        """What is told of a report of the driver."""
        self.spark._handle_report(json.dumps({"kind": kind, "at": 0.0, "line": self.line.name, **facts}))
        return self.state.take_events()

    def fails(self, error: str) -> list[str]:
        why = failure_reason(error, LINE)
        return self.reports("failed", code=why.code, text=why.text, again_in=1.0)


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watched:
    monkeypatch.setattr(time, "time", lambda: NOW)
    return Watched(tmp_path)


def test_a_line_from_its_start_to_its_end(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    assert watched.answers(received=100, end=100, oldest=NOW - 3600) == [f"{LINE}: connected to mqtt://a:1883"]
    view = watched.state.lines["telemetry"]
    account = "received 100 = in Kafka 0 + waiting 100   in 0/s   out 0/s   lag 3,600 s"
    assert line_summary(view, "starting") == f"{LINE}   receiving, spark starting   {account}"
    watched.state.kafka = "reachable"
    assert watched.reports("ready", spark="4.3.0", seconds=6.2) == ["spark: 4.3.0 is up after 6.2 s"]
    watched.reports("started")
    watched.answers()
    commit(watched.line.gateway.state_dir, up({"j": (0, 105)}, filtered=7, dead_lettered=1))
    watched.reports("progress", query="q", batch=1, millis={"triggerExecution": 41})
    assert watched.answers(received=110, end=110, oldest=NOW - 1) == []
    watched.answers(committed=105)
    account = "received 110 = in Kafka 97 + filtered 7 + dead-lettered 1 + waiting 5"
    monkeypatch.setattr(statuses, "gateway_status", lambda _: watched.facts)
    watched.state.save()
    text = re.sub(r"\d\d:\d\d:\d\d", "12:31:07", render(collect_status(watched.bridge.state_dir)))
    text = re.sub(r"\(pid \d+\)", "(pid 4711)", re.sub(r"  version   .*\n|2027-01-15 ", "", text))
    assert text.splitlines() == [
        'bridge "plant-7"   running (pid 4711)   spark running   kafka reachable   last update 12:31:07',
        f"! {LINE}   running   at_least_once",
        "  ! in the dead-letter topic: 1 message. See towline dlq show, and towline dlq replay.",
        f"  account   {account}   adds up ✓",
        "  session   online   c at mqtt://a:1883   unacknowledged 0   acks after journal",
        "  journal   1.2 MB on disk   offsets 0 to 110",
        "  pace      in 0/s   out 0/s   lag 1.0 s",
    ]
    supervisor = Supervisor(watched.bridge, PlainScreen(io.StringIO()))
    supervisor._state = watched.state
    assert [*supervisor._final_report()] == [
        f"{LINE}: {account}   adds up ✓",
        f"{LINE}: 5 messages on disk; the next start delivers them",
        f"{LINE}: the broker keeps the session c",
    ]
    for unkept in ({"session_kept_s": 0}, {"state": "offline"}, {"drain": "waiting"}):
        watched.answers(**unkept)
        assert not any("keeps the session" in text for text in supervisor._final_report())
        watched.answers(**{"drain": None, **{name: FACTS[name] for name in ("session_kept_s", "state")}})
    (failure, _) = watched.fails("java.io.IOException: No space left on device")[0].split("\n")
    watched.state.lines["telemetry"].rate_meter = RateMeter(RATE_WINDOW_S)
    rates = f"rate unknown {'·' * 20}   waiting 5 ████████ peak 5   lag 1.0 s"
    line = f"! telemetry   receiving, query waiting to retry   at_least_once   {account}   adds up ✓   {rates}"
    title = 'bridge "plant-7"   spark running   kafka reachable   12:31:07   Ctrl-C ends it'
    dead_letters = "  ! in the dead-letter topic: 1 message. See towline dlq show, and towline dlq replay."
    assert redrawn(watched, 300) == [title, line, f"  ! {failure}", dead_letters]
    narrow = redrawn(watched, 80)
    assert max(map(len, narrow)) <= 80
    assert " ".join(" ".join(narrow).split()) == " ".join(f"{title} {line} ! {failure} {dead_letters}".split())


def redrawn(watched: Watched, width: int) -> list[str]:
    live, console = LiveScreen(), Console(width=width, record=True, file=io.StringIO())
    live._console = console
    live.show(watched.state)
    console.print(live.live.renderable, end="")
    text = re.sub(r"\d\d:\d\d:\d\d", "12:31:07", console.export_text())
    return [line.rstrip() for line in text.splitlines()]


def test_a_gateway_is_killed(watched: Watched) -> None:
    class Gone(GatewayClient):
        def status(self, *, timeout_s: float = 0.0) -> dict[str, object]:
            raise GatewayUnreachable("TL-G01", self.location, f"no gateway answers within {timeout_s:g} s")

    watched.gateway._mark_online()
    watched.gateway._poll_until_end(Gone("grpc+unix:///none"))
    watched.gateway._mark_online()
    assert watched.state.take_events() == [
        f"{LINE}: the gateway has ended; restarting it",
        f"{LINE}: the gateway is running again",
    ]


def test_a_full_disk_a_session_that_is_lost_and_a_weaker_qos_are_told_once(watched: Watched) -> None:
    """The next start knows what was told."""
    watched.answers()
    full = {"held_back": "journal full", "last_error": {"text": "0 MB are free.   [TL-J02]"}}
    assert [watched.answers(**full) for _ in range(2)] == [[f"{LINE}: 0 MB are free.   [TL-J02]"], []]
    told = watched.answers(held_back=None, last_error=None)
    assert told == [f"{LINE}: connected to mqtt://a:1883"]
    what = f"{LINE}: the broker lost this client's session, and all messages queued in it"
    do = "Let the broker keep sessions on disk.   [TL-M22]"
    assert [watched.answers(sessions_lost=1) for _ in range(2)] == [[f"{what}. {do}"], []]
    watched.state.save()
    again = Watched(watched.bridge.file.parent)
    assert not any("TL-M22" in text for text in again.answers(sessions_lost=1))
    taken = {"do": "Give each client an id of its own."}
    assert again.answers(sessions_lost=2, session_lost=taken) == [f"{what}. {taken['do']}   [TL-M22]"]
    (degraded,) = again.answers(outbox={"degraded": 3})
    assert degraded.startswith(f"{LINE}: the broker answers QoS 2 like QoS 1: from now on a message may be doubled.")
    assert degraded.endswith("[TL-B58]")
    assert again.answers(outbox={"degraded": 9}) == []
