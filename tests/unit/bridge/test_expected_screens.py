"""What an operator is told, whole and as he sees it: console, status and log for each thing that can happen to him.

The states are true ones: the supervisors take what gateways and Spark's driver say, the screen and `towline status` render it.
Errors are made where they are made in life. To change a word, change it here too, and read the whole screen again.
"""

# ruff: noqa: E501 - a screen's line is as long as it is

from __future__ import annotations

import io
import json
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.unit.bridge import noted
from tests.unit.gateway.serving import Served
from towline.bridge.config.file import parse
from towline.bridge.runtime import screen
from towline.bridge.runtime.child_supervisors import DriverSupervisor, GatewaySupervisor, KafkaSupervisor
from towline.bridge.runtime.failures import failure_reason
from towline.bridge.runtime.screen import LiveScreen, PlainScreen
from towline.bridge.runtime.state import BridgeState, read_notes
from towline.bridge.runtime.status import collect_status, render
from towline.bridge.runtime.supervisor import Supervisor
from towline.errors import BrokerRefused, GatewayUnreachable, JournalFull, Unreachable
from towline.gateway.client import GatewayClient
from towline.gateway.service import GatewayService
from towline.guarantee import AckAfter
from towline.journal import Journal
from towline.kafka import faults

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
            notes = noted.up({"j": (0, end)}, spark, **{**self.counts, "dropped": dropped})
        else:
            notes = noted.down(end, **self.counts)
        noted.commit(self.line.gateway.state_dir, notes)
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


NOW = 1_800_000_000.0
REFUSED = Unreachable(
    "TL-M01",
    "mqtt://broker.example:1883",
    "no connection (connection refused)",
    "Is the broker up, and the port right?",
)


@pytest.fixture(autouse=True)
def _a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: NOW)
    monkeypatch.setattr(screen, "PLAIN_INTERVAL_S", 0.0)


@pytest.fixture
def up(tmp_path: Path) -> Watched:
    return Watched(tmp_path)


@pytest.fixture
def down(tmp_path: Path) -> Watched:
    return Watched(tmp_path, "down", "exactly_once")


@pytest.fixture
def gateways() -> Iterator[list[tuple[GatewayService, Journal]]]:
    served: list[tuple[GatewayService, Journal]] = []
    yield served
    for service, journal in served:
        service.close()
        journal.close()


def serve(seen: Watched, gateways: list[tuple[GatewayService, Journal]]) -> None:
    """Let the line's gateway answer `towline status` what it has told the bridge."""
    served = Served(seen.line.gateway.state_dir, name=seen.line.name)
    served.reported = seen.facts
    served.journal.journal_id = seen.facts["journal"]  # that of the batches that were told
    served.service._publish_endpoint(replace(served.service.endpoint, journal=seen.facts["journal"]))
    gateways.append((served.service, served.journal))


def status(seen: Watched, *, ended: bool = False, killed: bool = False) -> list[str]:
    """The screen of `towline status`, without the row of the version."""
    seen.state.save(has_ended=ended)
    file = seen.bridge.state_dir / "bridge.json"
    if killed:
        file.write_text(file.read_text().replace(f'"pid": {os.getpid()}', '"pid": 4194305'))  # above any pid
    text = re.sub(r"\d\d:\d\d:\d\d", "12:31:07", render(collect_status(seen.bridge.state_dir)))
    text = re.sub(r"  version   .*\n", "", text)
    return re.sub(r"\(pid \d+\)", "(pid 4711)", text).replace("2027-01-15 ", "").splitlines()


def runs(seen: Watched) -> None:
    """Everything is up, and the console was read."""
    seen.tell("ready", spark="4.3.0", seconds=6.2)
    seen.state.kafka = "reachable"
    seen.answer()
    seen.tell("started")
    seen.seen()


def test_a_start_with_messages_waiting(up: Watched) -> None:
    up.answer(received=100, end=100, oldest=NOW - 3600)
    assert up.seen() == [
        'line "telemetry": connected to mqtt://broker.example:1883',
        'line "telemetry"   receiving, spark starting   received 100 = in Kafka 0 + waiting 100   in 0/s   out 0/s   lag 3,600 s',
    ]
    up.tell("ready", spark="4.3.0", seconds=6.2)
    up.tell("started")
    up.batch(0, 100, filtered=7, deduplicated=3)
    up.answer(committed=100, oldest=None)
    assert up.seen() == [
        "spark: 4.3.0 is up after 6.2 s",
        'line "telemetry"   running   received 100 = in Kafka 90 + filtered 7 + deduplicated 3 + waiting 0   in 0/s   out 0/s   lag 0.0 s',
    ]


def test_what_is_redrawn_on_a_terminal_adds_up(up: Watched) -> None:
    runs(up)
    up.answer(received=1_105, end=1_100, oldest=NOW - 0.2)
    up.batch(0, 1_000, filtered=7, unrouted=1, deduplicated=3, dead_lettered=2)
    fails(up, "java.io.IOException: No space left on device")
    line = 'line "telemetry"   receiving, query waiting to retry   received 1,105 = in Kafka 987 + filtered 7 + unrouted 1 + dead-lettered 2 + deduplicated 3 + arriving 5 + waiting 100   in 0/s   out 0/s   lag 0.2 s   batch 41 ms'
    text = 'line "telemetry": the query failed: no space is left on the disk of Spark\'s checkpoint or temporary files. Free disk space; the query is retried, and nothing is lost.   [TL-B56]'
    title = "bridge plant-7   spark running   kafka reachable   Ctrl-C ends it cleanly"
    assert redrawn(up, 300) == [title, line, f"  ! {text}"]
    narrow = redrawn(up, 80)
    assert max(map(len, narrow)) <= 80
    assert " ".join(" ".join(narrow).split()) == " ".join(f"{title} {line} ! {text}".split())
    assert 1_105 == 987 + 7 + 1 + 2 + 3 + 5 + 100


def redrawn(seen: Watched, width: int) -> list[str]:
    screen, console = LiveScreen(), Console(width=width, record=True, file=io.StringIO())
    screen._console = console
    screen.show(seen.state)
    console.print(screen.live.renderable, end="")
    return [line.rstrip() for line in console.export_text().splitlines()]


def test_the_end(up: Watched, gateways: list[tuple[GatewayService, Journal]]) -> None:
    runs(up)
    up.answer(received=110, end=110)
    up.batch(0, 104, dead_lettered=1)
    up.batch(1, 105)
    up.answer(committed=105, oldest=NOW - 1)
    assert up.seen() == [
        'line "telemetry": 1 message written to the dead-letter topic; towline dlq show has the reasons',
        'line "telemetry"   running   received 110 = in Kafka 104 + dead-lettered 1 + waiting 5   in 0/s   out 0/s   lag 1.0 s',
    ]
    serve(up, gateways)
    assert status(up) == [
        'bridge "plant-7"   running (pid 4711)   spark running   kafka reachable   last update 12:31:07',
        '! line "telemetry"   running   at_least_once',
        "  ! in the dead-letter topic: 1 message. See towline dlq show, and towline dlq replay.",
        "  account   received 110 = in Kafka 104 + dead-lettered 1 + waiting 5   adds up ✓",
        "  session   online   plant-7-telemetry at mqtt://broker.example:1883   unacknowledged 0   acks after journal",
        "  journal   1.2 MB on disk   offsets 0 to 110",
        "  pace      in 0/s   out 0/s   lag 1.0 s",
    ]
    up.farewell()
    assert up.seen() == [
        'line "telemetry": received 110 = in Kafka 104 + dead-lettered 1 + waiting 5   adds up ✓',
        'line "telemetry": 5 messages on disk; the next start delivers them',
        'line "telemetry": the broker keeps the session plant-7-telemetry',
    ]


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        ({"session_kept_s": 7 * 86_400}, "the broker keeps the session plant-7-telemetry for 7 days"),
        ({"session_kept_s": 3_600}, "the broker keeps the session plant-7-telemetry for 60 min"),
        ({"session_kept_s": 90, "protocol": "3.1.1"}, "the broker keeps the session plant-7-telemetry"),
        (
            {"session_kept_s": 90, "state": "offline"},
            "the broker is not reachable now; it was asked to keep the session plant-7-telemetry for 90 s",
        ),
        (
            {"session_kept_s": 0},
            "the broker keeps no session: messages published before the next start are not received",
        ),
    ],
)
def test_what_is_said_of_a_session(up: Watched, facts: dict[str, object], text: str) -> None:
    runs(up)
    up.answer(**facts)
    up.seen()
    up.farewell()
    assert up.seen()[1] == f'line "telemetry": {text}'


def test_a_bridge_that_was_killed(up: Watched) -> None:
    """It told ``spark running  kafka reachable``, exit 0."""
    runs(up)
    up.answer(received=10, end=10)
    up.batch(0, 10)
    up.tell("failed", code="TL-B01", text=failure_reason("java.lang.X: y", 'line "telemetry"').text, again_in=1.0)
    assert status(up, killed=True) == [
        '✗ bridge "plant-7"   not running, it was killed (pid 4711)   last update 12:31:07',
        '! line "telemetry"   not running   at_least_once',
        "  ! no gateway runs: nothing is received; the broker queues what it can for this client's session. Start towline run.",
        '  ! before the bridge ended: line "telemetry": the query failed: java.lang.X: y. See the driver\'s log.   [TL-B01]',
        "  account   unknown: no gateway answers   last update 12:31:07: received 10 = in Kafka 10 + waiting 0",
    ]


def test_kafka_is_away_and_comes_back(up: Watched) -> None:
    up.answer()
    up.kafka._handle_failure(faults.unreachable_error("k1:9092", 5.1, "connection refused"))
    up.kafka._handle_failure(faults.unreachable_error("k1:9092", 5.1, "connection refused"))
    up.answer(received=12, end=12, oldest=NOW - 5)
    assert up.seen() == [
        'line "telemetry": connected to mqtt://broker.example:1883',
        "k1:9092: Kafka did not answer for 5 s: connection refused. Check the bootstrap servers, the network and, if Kafka asks for them, user and password.   [TL-K01]",
        "kafka: messages are still received and wait on disk; retrying",
        'line "telemetry"   receiving, spark starting   received 12 = in Kafka 0 + waiting 12   in 0/s   out 0/s   lag 5.0 s',
    ]
    up.kafka._mark_reachable()
    up.kafka._mark_reachable()  # told once
    assert [text for text in up.seen() if text.startswith("kafka")] == ["kafka: k1:9092 answers"]


@pytest.mark.parametrize(("ack_after", "where"), [(AckAfter.JOURNAL, "on disk"), (AckAfter.KAFKA, "in Kafka")])
def test_a_gateway_is_killed(up: Watched, ack_after: AckAfter, where: str) -> None:
    gateway = up.line.gateway.model_copy(update={"ack_after": ack_after})
    up.gateway.line = up.line.model_copy(update={"gateway": gateway})

    class Gone(GatewayClient):
        def status(self, *, timeout_s: float = 0.0) -> dict[str, object]:
            raise GatewayUnreachable("TL-G01", self.location, f"no gateway answers within {timeout_s:g} s")

    runs(up)
    up.gateway._mark_online()
    up.gateway._poll_until_end(Gone("grpc+unix:///none"))
    up.gateway._mark_online()
    assert up.seen() == [
        'line "telemetry": the gateway has ended; restarting it',
        f'line "telemetry": the gateway is running again; all acknowledged messages are {where}',
    ]


def test_spark_is_killed(up: Watched) -> None:
    runs(up)
    up.spark._backoff._first_s = up.spark._backoff._max_s = 0.0
    up.spark._handle_exit("its driver was ended by signal 9")
    up.answer(received=3, end=3, oldest=NOW - 2)
    assert up.seen() == [
        "spark: its driver was ended by signal 9; restarting in 0.0 s, messages are still received (log: STATE/logs/driver.log)",
        'line "telemetry"   receiving, spark starting again   received 3 = in Kafka 0 + waiting 3   in 0/s   out 0/s   lag 2.0 s',
    ]


def fails(seen: Watched, error: BaseException | str, again: float | None = 1.0) -> None:
    why = failure_reason(error, f'line "{seen.line.name}"')
    seen.tell("failed", code=why.code, text=why.text, again_in=None if why.permanent else again)


def test_the_process_of_a_source_is_killed(up: Watched) -> None:
    """A part of Spark's plan was told as the reason."""
    runs(up)
    fails(
        up,
        "[STREAM_FAILED] Query [id = 1] terminated with exception:  SQLSTATE: XXKST (no cause message)\n=== Streaming Query ===\n x [TL-B02]",
    )
    up.batch(0, 0)
    assert up.seen()[:3] == [
        'line "telemetry": the query failed: a Python process of Spark has ended (killed, or out of memory). See the driver\'s log.   [TL-B01]',
        'line "telemetry": messages wait on disk; retrying',
        'line "telemetry": runs again',
    ]


def test_a_disk_that_is_full_for_a_moment(up: Watched, gateways: list[tuple[GatewayService, Journal]]) -> None:
    """The console said "ended with code 1", never "disk"."""
    runs(up)
    up.answer(received=10, end=10, oldest=NOW - 5)
    fails(up, "java.io.IOException: No space left on device\n=== Streaming Query ===\nx")
    full = JournalFull(
        "TL-J02", "STATE/telemetry/inbox", "0 MB are free on this disk, 537 MB must stay free", "Make room."
    )
    up.answer(held_back="journal full", last_error={"text": str(full)})
    assert up.seen() == [
        'line "telemetry": the query failed: no space is left on the disk of Spark\'s checkpoint or temporary files. Free disk space; the query is retried, and nothing is lost.   [TL-B56]',
        'line "telemetry": messages wait on disk; retrying',
        'line "telemetry": STATE/telemetry/inbox: 0 MB are free on this disk, 537 MB must stay free. Make room.   [TL-J02]',
        'line "telemetry"   throttled: journal full   received 10 = in Kafka 0 + waiting 10   in 0/s   out 0/s   lag 5.0 s',
    ]
    serve(up, gateways)
    assert status(up)[1:5] == [
        '! line "telemetry"   waiting to retry   at_least_once',
        '  ! line "telemetry": the query failed: no space is left on the disk of Spark\'s checkpoint or temporary files. Free disk space; the query is retried, and nothing is lost.   [TL-B56]',
        "  ! STATE/telemetry/inbox: 0 MB are free on this disk, 537 MB must stay free. Make room.   [TL-J02]",
        "  ! receiving is throttled (journal full). Nothing is lost; free disk space, or restore Kafka.",
    ]
    up.batch(0, 10)
    up.answer(held_back=None, last_error=None, committed=10, oldest=None)
    assert up.seen() == [
        'line "telemetry": runs again',
        'line "telemetry": there is disk space again, and messages are received',
        'line "telemetry"   running   received 10 = in Kafka 10 + waiting 0   in 0/s   out 0/s   lag 0.0 s',
    ]


def test_the_broker_loses_the_session(up: Watched, gateways: list[tuple[GatewayService, Journal]]) -> None:
    """It stood in the gateway's log only."""
    runs(up)
    up.answer(sessions_lost=1)
    up.answer(sessions_lost=1)
    what = "the broker lost this client's session, and all messages queued in it"
    do = "Let the broker keep sessions on disk.   [TL-M22]"
    assert up.seen() == [f'line "telemetry": {what}. {do}']
    serve(up, gateways)
    assert status(up)[2] == f"  ! {what.replace('session,', 'session (once),')}. {do}"
    up.state.save()
    again = Watched(up.bridge.file.parent)  # the next start knows what was told
    again.answer(sessions_lost=1)
    assert not [line for line in again.seen() if "TL-M22" in line]
    again.answer(sessions_lost=2)
    assert again.seen() == [f'line "telemetry": {what}. {do}']
    taken = "Give each client an id of its own."
    again.answer(sessions_lost=3, session_lost={"do": taken})
    assert again.seen() == [f'line "telemetry": {what}. {taken}   [TL-M22]']


def test_a_broker_that_answers_qos_2_as_qos_1(down: Watched, gateways: list[tuple[GatewayService, Journal]]) -> None:
    """It said ``adds up ✓``; only --json had ``degraded: 21000``."""
    runs(down)
    down.answer(accepted=21_000, delivered=20_990, queued=10, degraded=20_990, oldest=NOW - 1)
    down.batch(0, 21_000)
    account = "taken 21,000 = delivered 20,990 (20,990 of them at QoS 1, not 2) + waiting 10"
    assert down.seen() == [
        'line "commands": the broker answers QoS 2 like QoS 1: from now on a message may be doubled. Use a broker with QoS 2, or guarantee = "at_least_once".   [TL-B58]',
        f'line "commands"   running   {account}   in 0/s   out 0/s   lag 1.0 s',
    ]
    serve(down, gateways)
    assert status(down) == [
        'bridge "plant-7"   running (pid 4711)   spark running   kafka reachable   last update 12:31:07',
        '✗ line "commands"   running   exactly_once',
        "  ! published with QoS 2 and accepted by the broker as QoS 1, perhaps doubled: 20,990 messages.   [TL-B58]",
        f"  account   {account}   adds up ✓, but is not exactly once ✗",
        "  session   online   plant-7-commands at mqtt://broker.example:1883",
        "  outbox    queued 10   in flight 0   0.0 MB on disk   0 offsets behind in Kafka",
        "  pace      in 0/s   out 0/s   lag 1.0 s",
    ]


def test_a_mistake_in_the_sql(up: Watched) -> None:
    runs(up)

    class AnalysisException(Exception):
        pass

    said = "[UNRESOLVED_ROUTINE] Cannot resolve routine `lenght` on search path [`system`.`builtin`]. SQLSTATE: 42883; line 1 pos 0;"
    fails(up, AnalysisException(said))
    assert up.seen() == [
        "line \"telemetry\": Spark does not understand the line's SQL: Cannot resolve routine `lenght` on search path [`system`.`builtin`]. Correct it in the bridge file; the columns are those of the line's source.   [TL-C74]",
        'line "telemetry": this line stops',
        'line "telemetry"   receiving, query stopped   received 0 = in Kafka 0 + waiting 0   in 0/s   out 0/s   lag 0.0 s',
    ]


def test_a_gateway_that_does_not_start(up: Watched) -> None:
    up.gateway._handle_failure(
        BrokerRefused("TL-M10", "mqtt://broker.example:1883", "not authorized (0x87)", "Check user and password.")
    )
    assert up.gateway.fatal_error is not None
    assert up.seen() == [
        'line "telemetry": mqtt://broker.example:1883: not authorized (0x87). Check user and password.   [TL-M10]'
    ]
    assert status(up)[1:] == [
        '✗ line "telemetry"   starting',
        "  ! no gateway runs: nothing is received; the broker queues what it can for this client's session. towline run starts it again.",
        "  ! mqtt://broker.example:1883: not authorized (0x87). Check user and password.   [TL-M10]",
        "  account   unknown: no gateway answers",
    ]


def test_messages_that_went_another_way(down: Watched, gateways: list[tuple[GatewayService, Journal]]) -> None:
    runs(down)
    down.answer(accepted=9, delivered=5, expired=1, refused=2, queued=1, oldest=NOW - 61)
    down.batch(0, 12, filtered=2, unfit=1)
    assert down.seen() == [
        'line "commands": 1 message written to the dead-letter topic; towline dlq show has the reasons',
        'line "commands"   running   taken 12 = delivered 5 + dead-lettered 1 + filtered 2 + expired 1 + refused 2 + waiting 1   in 0/s   out 0/s   lag 61.0 s',
    ]
    serve(down, gateways)
    assert status(down)[2:4] == [
        "  ! refused by the broker permanently: 2 messages. See towline refused show, and towline refused replay.",
        "  ! in the dead-letter topic: 1 message. See towline dlq show, and towline dlq replay.",
    ]
