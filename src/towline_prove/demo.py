"""The demo: real brokers, a real bridge, a kill -9 of its gateway and of Spark on the way, and the account.

It is a proof run with an audience: the load is `towline_prove.load`, the judge `towline_prove.referee`, the bridge is
started with ``towline run`` as a user starts it. Nothing is simulated and no number is made up.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Final, Generic, Protocol, TypeVar

from towline.bridge.runtime.state import read_state
from towline.errors import TowlineError
from towline_prove.account import RunAccount, Watermarks
from towline_prove.devstack import Kafka, Mosquitto
from towline_prove.devstack.process import wait_for
from towline_prove.history import read_history
from towline_prove.load import LoadPlan, LoadResult, run_load
from towline_prove.processes import Role
from towline_prove.reader import Tail, read_topic
from towline_prove.referee import Verdict, judge
from towline_prove.subject import LINE, TOPIC, BridgeRun, NotReady, bridge_file, last_line

__all__ = ["Demo", "DemoAccount", "DemoFailed", "DemoView", "Moment", "Scene"]

#: Spark's first start on a busy machine of two cores, in seconds.
_START_S: Final = 400.0
#: The way of the last message into Kafka after two kills, in seconds.
_DRAIN_S: Final = 180.0


class DemoFailed(TowlineError):
    """The demo did not get as far as it should (TL-P10)."""


@dataclass(slots=True)
class Moment:
    """What the audience sees while messages flow; counts of messages."""

    offered: int = 0
    acknowledged: int = 0
    journaled: int = 0
    in_kafka: int = 0
    waiting: int = 0


class DemoView(Protocol):
    """Where the demo is shown."""

    def step(self, title: str, text: str) -> None:
        """One line about something that was done."""

    def fault(self, text: str) -> None:
        """One line about a process that was killed, and how it came back."""

    def show(self, moment: Moment, total: int) -> None:
        """The state of the run, several times a second."""


DemoAccount = TypeVar("DemoAccount")


@dataclass
class Scene(ABC, Generic[DemoAccount]):
    """What the scenes of the demo share: a directory, a bridge with one line, and a view.

    Attributes:
        stage: Where it is shown.
        guarantee: Of the line.
        messages: Numbered messages; QoS 2 with exactly_once, QoS 0 with at_most_once, else QoS 1.
        rate: Messages a second.
        directory: Keeps everything there; None for a directory that is removed after a run that came to its end.
    """

    #: For messages of errors.
    command: ClassVar[str] = "demo"

    stage: DemoView
    guarantee: str
    messages: int
    rate: float
    directory: Path | None = None
    _moment: Moment = field(default_factory=Moment, init=False)

    def run(self) -> DemoAccount:
        """Run it and return its account.

        Raises:
            TowlineError: Something could not be started or did not get through; with what to do.
        """
        if self.directory is not None:
            self.directory.mkdir(parents=True, exist_ok=True)
            return self._run(self.directory)
        scratch = Path(tempfile.mkdtemp(prefix="towline-demo-"))
        account = self._run(scratch)  # the logs in it explain a failure: only a good run is removed
        shutil.rmtree(scratch, ignore_errors=True)
        return account

    @abstractmethod
    def _run(self, directory: Path) -> DemoAccount:
        """Run it in a directory."""

    @property
    def _qos(self) -> int:
        return {"at_most_once": 0, "at_least_once": 1, "exactly_once": 2}[self.guarantee]

    def _bridge(self, directory: Path, mosquitto: Mosquitto, kafka: Kafka, receipts: str = "") -> BridgeRun:
        """The bridge, with its file written; `receipts` is a further line of the uplink."""
        config = directory / "bridge.toml"
        state_dir = directory / "state"
        topics = "create_topics = { partitions = 3 }"
        text = bridge_file(state_dir, mosquitto.uri, kafka.bootstrap, self.guarantee, writer="demo", more=topics)
        config.write_text(text.replace("[[uplink.route]]", f"{receipts}\n\n[[uplink.route]]") if receipts else text)
        return BridgeRun(config, state_dir / LINE, directory / "bridge.log")

    def _start(self, bridge: BridgeRun, note: str) -> None:
        """Start the bridge and wait until the gateway is subscribed and Spark is warm."""
        began = time.monotonic()
        bridge.start()
        started = wait_for(lambda: not bridge.running or _warm(bridge), _START_S, 0.1)
        if not started or not bridge.running:
            raise self._failed(f"the bridge did not start: {last_line(bridge.log)}", bridge.log)
        seconds = time.monotonic() - began
        self.stage.step(
            f'line "{LINE}"',
            f"telemetry/{{device}}/data → kafka:{TOPIC}   {self.guarantee}   {note}   {seconds:.1f} s",
        )

    def _failed(self, what: str, log: Path) -> DemoFailed:
        return DemoFailed("TL-P10", self.command, what, f"See {log} and the logs beside it.")


def _warm(bridge: BridgeRun) -> bool:
    """Whether the gateway is subscribed and Spark has finished its first, empty batch: what follows is warm."""
    state = read_state(bridge.state_dir.parent) or {"lines": {}}
    return bridge.state == "online" and state["lines"].get(LINE, {}).get("batch_ms", 0) > 0


@dataclass(slots=True)
class _Fault:
    """A role to kill when so many messages are acknowledged to the publishers."""

    role: Role
    at: int
    name: str
    back: Callable[[], bool]
    after: str
    struck_at: float = 0.0
    struck_by: int = 0
    done: bool = False


@dataclass
class Demo(Scene[RunAccount]):
    """Numbered messages from many devices, with a kill -9 of the gateway and one of Spark on the way.

    Attributes:
        devices: Publishing devices.
        kills: Whether the gateway and Spark are killed.
    """

    devices: int = 50
    kills: bool = True

    def _run(self, directory: Path) -> RunAccount:
        began = time.monotonic()
        # The gateway is killed: what the broker then holds must not be cut at Mosquitto's default of 1,000.
        mosquitto = Mosquitto(directory / "mosquitto", settings={"max_queued_messages": "0"})
        with mosquitto, Kafka(directory / "kafka") as kafka:
            seconds = time.monotonic() - began
            self.stage.step(
                "brokers", f"Mosquitto {mosquitto.version} {mosquitto.uri}   Kafka {kafka.bootstrap}   {seconds:.1f} s"
            )
            with self._bridge(directory, mosquitto, kafka) as bridge:
                self._start(bridge, "acks after fdatasync")
                verdict, watermarks, notes = self._perform(directory, bridge, mosquitto, kafka)
                bridge.stop()
            return RunAccount(verdict, self.guarantee, watermarks, notes)

    def _perform(
        self, directory: Path, bridge: BridgeRun, mosquitto: Mosquitto, kafka: Kafka
    ) -> tuple[Verdict, Watermarks | None, list[str]]:
        plan = LoadPlan(
            port=mosquitto.port,
            publishers=8,
            devices=self.devices,
            messages=self.messages,
            rate=self.rate,
            qos=self._qos,
            seconds=300,
        )
        history = directory / "history"
        load = _Load(plan, history, self._moment)
        tail = Tail(kafka.bootstrap, TOPIC)
        notes: list[str] = []
        try:
            load.start()
            self._attend(bridge, load, tail, notes)
        finally:
            load.stop()
            tail.close()
        status = bridge.status()
        verdict = judge(read_history(history), read_topic(kafka.bootstrap, TOPIC))
        return verdict, Watermarks.of(status) if status else None, notes

    def _attend(self, bridge: BridgeRun, load: _Load, tail: Tail, notes: list[str]) -> None:
        """Watch, strike, and wait until all that was acknowledged is committed."""
        faults = self._faults(bridge) if self.kills else []
        seen: set[tuple[int, int]] = set()
        last_change = time.monotonic()
        while True:
            before = (self._moment.in_kafka, self._moment.offered)
            arrived = tail.pull(0.2)
            seen.update((a.partition, a.offset) for a in arrived)
            self._observe(bridge, len(seen))
            for fault in faults:
                self._strike(bridge, fault, notes)
            self.stage.show(self._moment, self.messages)
            if before != (self._moment.in_kafka, self._moment.offered):
                last_change = time.monotonic()
            if load.ended and all(f.done for f in faults) and self._drained(bridge):
                return
            if time.monotonic() - last_change > _DRAIN_S:
                what = f"nothing moved for {_DRAIN_S:g} s: {last_line(bridge.log)}"
                raise NotReady("TL-P01", "demo", what, f"See {bridge.log} and the logs beside it.")

    def _observe(self, bridge: BridgeRun, in_kafka: int) -> None:
        moment = self._moment
        moment.in_kafka = in_kafka
        status = bridge.status()
        if status:
            moment.journaled = int(status["journaled"])
            moment.waiting = int(status["waiting"])

    def _drained(self, bridge: BridgeRun) -> bool:
        """Whether every message the publishers have a promise for is committed."""
        status = bridge.status()
        if not status or status["state"] != "online" or status["waiting"] or status["unacknowledged"]:
            return False
        return self.guarantee == "at_most_once" or int(status["received"]) >= self._moment.acknowledged

    def _faults(self, bridge: BridgeRun) -> list[_Fault]:
        committed = {"before": -1}

        def spark_is_back() -> bool:
            status = bridge.status()
            if status is None:
                return False
            if committed["before"] < 0:
                committed["before"] = int(status["committed"])
            return int(status["committed"]) > committed["before"]

        return [
            _Fault(
                Role.GATEWAY,
                round(self.messages * 0.3),
                "the gateway",
                lambda: bridge.state == "online",
                "session kept",
            ),
            _Fault(Role.JVM, round(self.messages * 0.65), "Spark's JVM", spark_is_back, "intake never stopped"),
        ]

    def _strike(self, bridge: BridgeRun, fault: _Fault, notes: list[str]) -> None:
        if fault.done:
            return
        if not fault.struck_at:
            if self._moment.acknowledged >= fault.at and bridge.hit(fault.role):
                fault.struck_at, fault.struck_by = time.monotonic(), self._moment.acknowledged
        elif fault.back():
            fault.done = True
            seconds = time.monotonic() - fault.struck_at
            note = f"killed {fault.name} (kill -9) at {fault.struck_by:,}   back after {seconds:.1f} s, {fault.after}"
            notes.append(note)
            self.stage.fault(note)


class _Load:
    """The publishers, on a thread of their own."""

    def __init__(self, plan: LoadPlan, history: Path, moment: Moment) -> None:
        self._plan, self._history, self._moment = plan, history, moment
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="load", daemon=True)
        self.result: LoadResult | None = None
        self._error: BaseException | None = None

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(30)

    @property
    def ended(self) -> bool:
        if self._error is not None:
            raise self._error
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self.result = run_load(self._plan, self._history, stop=self._stop, progress=self._progress)
        except BaseException as error:  # noqa: BLE001 - raised in the thread that waits
            self._error = error

    def _progress(self, attempted: int, acknowledged: int) -> None:
        self._moment.offered, self._moment.acknowledged = attempted, acknowledged
