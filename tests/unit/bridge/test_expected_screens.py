"""What an operator is told, whole: console, terminal and status, from what gateways and Spark's driver report."""

# ruff: noqa: E501 - a screen's line is as long as it is

from __future__ import annotations

import io
import json
import re
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.unit.bridge import noted
from towline.bridge.config.file import parse
from towline.bridge.runtime import screen
from towline.bridge.runtime.child_supervisors import DriverSupervisor, GatewaySupervisor, KafkaSupervisor
from towline.bridge.runtime.failures import failure_reason
from towline.bridge.runtime.screen import LiveScreen, PlainScreen
from towline.bridge.runtime.state import BridgeState, read_notes
from towline.bridge.runtime.status import collect_status, render
from towline.bridge.runtime.supervisor import Supervisor, session_text
from towline.errors import GatewayUnreachable, JournalFull
from towline.gateway.client import GatewayClient
from towline.guarantee import AckAfter
from towline.kafka import faults

_FILE = """
name = "plant-7"
state_dir = "state"
mqtt = {{ brokers = "mqtt://broker.example" }}
kafka = {{ bootstrap_servers = "k1:9092" }}
{}
"""
_LINES = {
    "up": '[[uplink]]\nname = "telemetry"\nroute = [{ from = "telemetry/#", topic = "telemetry" }]',
    "down": '[[downlink]]\nname = "commands"\nguarantee = "exactly_once"\nfrom = "commands"\ntopic = "c/{key}"',
}
_OUTBOX = ("accepted", "queued", "in_flight", "delivered", "acknowledged", "expired", "refused", "bytes_on_disk")
NOW = 1_800_000_000.0


class Hurried(threading.Event):
    """Nobody waits for another try."""

    def wait(self, timeout: float | None = None) -> bool:
        del timeout
        return self.is_set()


class Watched:
    """A bridge of one line without processes: its supervisors, and what they are told."""

    def __init__(self, directory: Path, direction: str) -> None:
        self.bridge = parse(_FILE.format(_LINES[direction]), directory / "bridge.toml", {})
        (self.line,) = self.bridge.lines
        self.bridge.state_dir.mkdir(exist_ok=True)
        self.out = io.StringIO()
        self.screen = PlainScreen(self.out)
        ending = Hurried()
        self.state = BridgeState("plant-7", self.bridge.state_dir, {self.line.name: direction})
        self.gateway = GatewaySupervisor(self.line, self.bridge, self.state, ending)
        self.kafka = KafkaSupervisor(self.bridge, self.state, ending)
        self.spark = DriverSupervisor(self.bridge, self.state, self.kafka, ending)
        self.counts = Counter[str]()
        self.facts: dict[str, Any] = {
            "state": "online",
            "broker": "mqtt://broker.example:1883",
            "client_id": f"plant-7-{self.line.name}",
            "protocol": "5",
            "guarantee": str(self.line.guarantee.value),
            "connects": 1,
            "session_kept_s": 0xFFFFFFFF,
            "journal": "j",
            **dict.fromkeys(("received", "end", "committed", "first", "unacknowledged"), 0),
            "ack_after": "journal",
            "bytes_on_disk": 1_250_000,
            "last_error": None,
            "outbox": dict.fromkeys(_OUTBOX, 0) if direction == "down" else None,
        }

    def answer(self, **facts: Any) -> None:
        """The gateway's next answer."""
        if (outbox := self.facts["outbox"]) is not None:
            outbox = {**outbox, **{name: facts.pop(name) for name in [*facts] if name in (*_OUTBOX, "degraded")}}
            facts["outbox"] = {**outbox, "acknowledged": outbox["delivered"]}
        self.facts |= facts
        self.gateway._handle_status(dict(self.facts), read_notes(self.line.gateway.state_dir))

    def tell(self, kind: str, **facts: Any) -> None:
        """A report of the driver."""
        self.spark._handle_report(json.dumps({"kind": kind, "at": 0.0, "line": self.line.name, **facts}))

    def batch(self, number: int, end: int, **counts: int) -> None:
        """A committed batch; the gateway is asked once more behind it."""
        self.counts.update(counts)
        notes = noted.up({"j": (0, end)}, **self.counts) if self.line.direction == "up" else noted.down(end)
        noted.commit(self.line.gateway.state_dir, notes)
        self.tell("progress", query="q", batch=number, millis={"triggerExecution": 41})
        self.answer()

    def seen(self) -> list[str]:
        """The console since the last call, without times."""
        for text in self.state.take_events():
            self.screen.print_event(text)
        self.screen.show(self.state)
        lines = [line.partition("  ")[2] for line in self.out.getvalue().splitlines()]
        self.out.seek(0)
        self.out.truncate()
        return lines

    def status(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """The screen of `towline status`, which asks the gateway too."""
        monkeypatch.setattr("towline.bridge.lines.statuses.gateway_status", lambda _: self.facts)
        self.state.save()
        text = re.sub(r"\d\d:\d\d:\d\d", "12:31:07", render(collect_status(self.bridge.state_dir)))
        text = re.sub(r"  version   .*\n", "", text).replace("2027-01-15 ", "")
        return re.sub(r"\(pid \d+\)", "(pid 4711)", text).splitlines()


@pytest.fixture(autouse=True)
def _a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: NOW)
    monkeypatch.setattr(screen, "PLAIN_INTERVAL_S", 0.0)


def running(directory: Path, direction: str) -> Watched:
    """Everything is up, and the console was read."""
    watched = Watched(directory, direction)
    watched.tell("ready", spark="4.3.0", seconds=6.2)
    watched.state.kafka = "reachable"
    watched.answer()
    watched.tell("started")
    watched.seen()
    return watched


@pytest.fixture
def up(tmp_path: Path) -> Watched:
    return running(tmp_path, "up")


def test_a_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    up = Watched(tmp_path, "up")
    up.answer(received=100, end=100, oldest=NOW - 3600)
    assert up.seen() == [
        'line "telemetry": connected to mqtt://broker.example:1883',
        'line "telemetry"   receiving, spark starting   received 100 = in Kafka 0 + waiting 100   in 0/s   out 0/s   lag 3,600 s',
    ]
    up.state.kafka = "reachable"
    up.tell("ready", spark="4.3.0", seconds=6.2)
    up.tell("started")
    up.batch(0, 100, filtered=7)
    up.answer(received=110, end=110)
    up.batch(1, 105, dead_lettered=1)
    up.answer(committed=105, oldest=NOW - 1)
    account = "received 110 = in Kafka 97 + filtered 7 + dead-lettered 1 + waiting 5"
    assert up.seen() == [
        "spark: 4.3.0 is up after 6.2 s",
        'line "telemetry": 1 message written to the dead-letter topic; towline dlq show has the reasons',
        f'line "telemetry"   running   {account}   in 0/s   out 0/s   lag 1.0 s',
    ]
    assert up.status(monkeypatch) == [
        'bridge "plant-7"   running (pid 4711)   spark running   kafka reachable   last update 12:31:07',
        '! line "telemetry"   running   at_least_once',
        "  ! in the dead-letter topic: 1 message. See towline dlq show, and towline dlq replay.",
        f"  account   {account}   adds up ✓",
        "  session   online   plant-7-telemetry at mqtt://broker.example:1883   unacknowledged 0   acks after journal",
        "  journal   1.2 MB on disk   offsets 0 to 110",
        "  pace      in 0/s   out 0/s   lag 1.0 s",
    ]
    supervisor = Supervisor(up.bridge, up.screen)
    supervisor._state = up.state
    assert [*supervisor._final_report()] == [
        f'line "telemetry": {account}   adds up ✓',
        'line "telemetry": 5 messages on disk; the next start delivers them',
        'line "telemetry": the broker keeps the session plant-7-telemetry',
    ]


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        ({"session_kept_s": 7 * 86_400}, "the broker keeps the session c for 7 days"),
        ({"session_kept_s": 90, "protocol": "3.1.1"}, "the broker keeps the session c"),
        (
            {"session_kept_s": 90, "state": "offline"},
            "the broker is not reachable now; it was asked to keep the session c for 90 s",
        ),
        ({}, "the broker keeps no session: messages published before the next start are not received"),
        ({"connects": 0}, "no broker was reached"),
        ({"drain": "waiting for commits"}, "its gateway drains, and ends its session at the broker"),
    ],
)
def test_what_is_said_of_a_session(facts: dict[str, object], text: str) -> None:
    assert session_text({"client_id": "c", "connects": 1, "state": "online", "protocol": "5", **facts}) == text


def fails(watched: Watched, error: str) -> str:
    why = failure_reason(error, f'line "{watched.line.name}"')
    watched.tell("failed", code=why.code, text=why.text, again_in=1.0)
    return why.text


def test_what_is_redrawn_on_a_terminal_adds_up(up: Watched) -> None:
    up.answer(received=1_105, end=1_100, oldest=NOW - 0.2)
    up.batch(0, 1_000, filtered=7, unrouted=1, dead_lettered=2)
    text = fails(up, "java.io.IOException: No space left on device")
    line = 'line "telemetry"   receiving, query waiting to retry   received 1,105 = in Kafka 990 + filtered 7 + unrouted 1 + dead-lettered 2 + arriving 5 + waiting 100   in 0/s   out 0/s   lag 0.2 s   batch 41 ms'
    title = "bridge plant-7   spark running   kafka reachable   Ctrl-C ends it cleanly"
    assert redrawn(up, 300) == [title, line, f"  ! {text}"]
    narrow = redrawn(up, 80)
    assert max(map(len, narrow)) <= 80
    assert " ".join(" ".join(narrow).split()) == " ".join(f"{title} {line} ! {text}".split())


def redrawn(watched: Watched, width: int) -> list[str]:
    live, console = LiveScreen(), Console(width=width, record=True, file=io.StringIO())
    live._console = console
    live.show(watched.state)
    console.print(live.live.renderable, end="")
    return [line.rstrip() for line in console.export_text().splitlines()]


def test_kafka_is_away_and_comes_back(up: Watched) -> None:
    error = faults.unreachable_error("k1:9092", 5.1, "connection refused")
    for _ in range(2):
        up.kafka._handle_failure(error)
    assert up.seen() == [*f"{error}\nkafka: messages are still received and wait on disk; retrying".splitlines()]
    for _ in range(2):
        up.kafka._mark_reachable()
    assert up.seen() == ["kafka: k1:9092 answers"]


@pytest.mark.parametrize(("ack_after", "where"), [(AckAfter.JOURNAL, "on disk"), (AckAfter.KAFKA, "in Kafka")])
def test_a_gateway_is_killed(up: Watched, ack_after: AckAfter, where: str) -> None:
    gateway = up.line.gateway.model_copy(update={"ack_after": ack_after})
    up.gateway.line = up.line.model_copy(update={"gateway": gateway})

    class Gone(GatewayClient):
        def status(self, *, timeout_s: float = 0.0) -> dict[str, object]:
            raise GatewayUnreachable("TL-G01", self.location, f"no gateway answers within {timeout_s:g} s")

    up.gateway._mark_online()
    up.gateway._poll_until_end(Gone("grpc+unix:///none"))
    up.gateway._mark_online()
    assert up.seen() == [
        'line "telemetry": the gateway has ended; restarting it',
        f'line "telemetry": the gateway is running again; all acknowledged messages are {where}',
    ]


def test_a_disk_that_is_full_for_a_moment(up: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    text = fails(up, "java.io.IOException: No space left on device\n=== Streaming Query ===\nx")
    full = str(JournalFull("TL-J02", "telemetry/inbox", "0 MB are free on this disk", "Make room."))
    up.answer(received=10, end=10, oldest=NOW - 5, held_back="journal full", last_error={"text": full})
    assert up.seen() == [
        text,
        'line "telemetry": messages wait on disk; retrying',
        f'line "telemetry": {full}',
        'line "telemetry"   throttled: journal full   received 10 = in Kafka 0 + waiting 10   in 0/s   out 0/s   lag 5.0 s',
    ]
    assert up.status(monkeypatch)[1:5] == [
        '! line "telemetry"   waiting to retry   at_least_once',
        f"  ! {text}",
        f"  ! {full}",
        "  ! receiving is throttled (journal full). Nothing is lost; free disk space, or restore Kafka.",
    ]
    up.batch(0, 10)
    up.answer(held_back=None, last_error=None, committed=10, oldest=None)
    assert up.seen() == [
        'line "telemetry": runs again',
        'line "telemetry": there is disk space again, and messages are received',
        'line "telemetry"   running   received 10 = in Kafka 10 + waiting 0   in 0/s   out 0/s   lag 0.0 s',
    ]


def test_the_broker_loses_the_session(up: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        up.answer(sessions_lost=1)
    what = "the broker lost this client's session, and all messages queued in it"
    do = "Let the broker keep sessions on disk.   [TL-M22]"
    assert up.seen() == [f'line "telemetry": {what}. {do}']
    assert up.status(monkeypatch)[2] == f"  ! {what.replace('session,', 'session (once),')}. {do}"
    again = Watched(up.bridge.file.parent, "up")  # the next start knows what was told
    again.answer(sessions_lost=1)
    assert not [line for line in again.seen() if "TL-M22" in line]
    again.answer(sessions_lost=2, session_lost={"do": "Give each client an id of its own."})
    assert again.seen() == [f'line "telemetry": {what}. Give each client an id of its own.   [TL-M22]']


def test_a_broker_that_answers_qos_2_as_qos_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not exactly once, though every message is counted."""
    down = running(tmp_path, "down")
    down.answer(accepted=21_000, delivered=20_990, queued=10, degraded=20_990, oldest=NOW - 1)
    down.batch(0, 21_000)
    account = "taken 21,000 = delivered 20,990 (20,990 of them at QoS 1, not 2) + waiting 10"
    assert down.seen() == [
        'line "commands": the broker answers QoS 2 like QoS 1: from now on a message may be doubled. Use a broker with QoS 2, or guarantee = "at_least_once".   [TL-B58]',
        f'line "commands"   running   {account}   in 0/s   out 0/s   lag 1.0 s',
    ]
    assert down.status(monkeypatch)[1:] == [
        '✗ line "commands"   running   exactly_once',
        "  ! published with QoS 2 and accepted by the broker as QoS 1, perhaps doubled: 20,990 messages.   [TL-B58]",
        f"  account   {account}   adds up ✓, but is not exactly once ✗",
        "  session   online   plant-7-commands at mqtt://broker.example:1883",
        "  outbox    queued 10   in flight 0   0.0 MB on disk   unknown offsets behind in Kafka",
        "  pace      in 0/s   out 0/s   lag 1.0 s",
    ]
