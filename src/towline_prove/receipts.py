"""What "can't be done with Mosquitto", done: end-to-end receipts shown with real brokers and real kills.

Mosquitto has its defaults: nothing on disk, 1,000 messages queued for a client, what comes beyond is dropped and
acknowledged all the same. The bridge is killed as a whole; messages queue in Mosquitto, and it is killed with them; the
publisher is killed in the middle and started again; then the bridge comes back. Every number has to be in Kafka, once.
"""

from __future__ import annotations

import json
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from towline import files
from towline_prove.demo import LINE, TOPIC, DemoFailed, DemoView, Moment, bridge_file, last_line, ready
from towline_prove.devstack import Kafka, Mosquitto
from towline_prove.reader import Tail, read_topic
from towline_prove.referee import Arrival
from towline_prove.subject import BridgeRun

__all__ = ["ReceiptsAccount", "ReceiptsDemo"]

#: Spark's start on a busy machine of two cores, and the way of everything into Kafka, in seconds.
_START_S: Final = 400.0
_DRAIN_S: Final = 300.0


@dataclass(frozen=True, slots=True)
class ReceiptsAccount:
    """What became of the numbers.

    Attributes:
        offered: Messages that `publish` had promised to keep.
        in_kafka: Different numbers found in Kafka by a plain consumer.
        doubled: Records beyond the first of a number.
        sent_again: Messages that the publisher sent again, because the broker had lost them.
        dropped: Repeats that the gateway recognised.
        guarantee: Of the line.
    """

    offered: int
    in_kafka: int
    doubled: int
    sent_again: int
    dropped: int
    guarantee: str

    @property
    def ok(self) -> bool:
        """Nothing lost; nothing doubled where that was promised."""
        return self.in_kafka == self.offered and (self.guarantee != "exactly_once" or not self.doubled)


@dataclass
class ReceiptsDemo:
    """One run.

    Attributes:
        stage: Where it is shown.
        guarantee: Of the line.
        messages: Numbered messages; QoS 2 with exactly_once, else QoS 1.
        rate: Messages a second.
        directory: Keeps everything there; None for a directory that is removed after a run that came to its end.
    """

    stage: DemoView
    guarantee: str = "exactly_once"
    messages: int = 5_000
    rate: float = 500.0
    directory: Path | None = None
    _moment: Moment = field(default_factory=Moment, init=False)
    _seen: Counter[bytes] = field(default_factory=Counter, init=False)
    _sent_again: int = field(default=0, init=False)

    def run(self) -> ReceiptsAccount:
        """Run it and return its account.

        Raises:
            TowlineError: Something could not be started or did not get through; with what to do.
        """
        if self.directory is not None:
            self.directory.mkdir(parents=True, exist_ok=True)
            return self._run(self.directory)
        scratch = Path(tempfile.mkdtemp(prefix="towline-demo-"))
        account = self._run(scratch)
        shutil.rmtree(scratch, ignore_errors=True)
        return account

    def _run(self, directory: Path) -> ReceiptsAccount:
        with ExitStack() as stack:
            mosquitto = stack.enter_context(Mosquitto(directory / "mosquitto"))
            kafka = stack.enter_context(Kafka(directory / "kafka"))
            self.stage.step(
                "brokers", f"Mosquitto {mosquitto.version} {mosquitto.uri}, persistence off   Kafka {kafka.bootstrap}"
            )
            key_file = directory / "receipts.key"
            files.replace(key_file, secrets.token_hex(32) + "\n")
            config = directory / "bridge.toml"
            config.write_text(self._config(directory, mosquitto, kafka))
            bridge = BridgeRun(config, directory / "state" / LINE, directory / "bridge.log")
            stack.enter_context(bridge)
            self._start(bridge)
            tail = Tail(kafka.bootstrap, TOPIC)
            stack.callback(tail.close)
            qos = 2 if self.guarantee == "exactly_once" else 1
            given = [str(directory / "publisher"), str(self.messages), str(self.rate), str(qos), str(key_file)]
            publisher = _Child(directory, [mosquitto.uri, *given])
            stack.callback(publisher.kill)
            self._perform(bridge, mosquitto, tail, publisher)
            status = self._settled(bridge)
            self._seen = Counter(one.value or b"" for one in read_topic(kafka.bootstrap, TOPIC))
            doubled = self._seen.total() - len(self._seen)
            found = sum(str(number).encode() in self._seen for number in range(self.messages))
            account = ReceiptsAccount(
                self.messages, found, doubled, self._sent_again, int(status["deduplicated"]), self.guarantee
            )
            bridge.stop()
        return account

    def _config(self, directory: Path, mosquitto: Mosquitto, kafka: Kafka) -> str:
        made = bridge_file(directory, mosquitto, kafka, self.guarantee)
        return made.replace("[[uplink.route]]", 'receipts = { key_file = "receipts.key" }\n\n[[uplink.route]]')

    def _start(self, bridge: BridgeRun) -> None:
        began = time.monotonic()
        bridge.start()
        self._until(lambda: not bridge.running or ready(bridge), _START_S, bridge.log)
        if not bridge.running:
            raise _failed(f"the bridge did not start: {last_line(bridge.log)}", bridge.log)
        seconds = time.monotonic() - began
        self.stage.step(
            f'line "{LINE}"',
            f"telemetry/{{device}}/data → kafka:{TOPIC}   {self.guarantee}   receipts   {seconds:.1f} s",
        )

    def _perform(self, bridge: BridgeRun, mosquitto: Mosquitto, tail: Tail, publisher: _Child) -> None:
        """The article's story."""
        publisher.start()

        def until(condition: Callable[[], bool]) -> None:
            self._until(lambda: self._watch(publisher, tail, bridge) and condition(), _DRAIN_S, publisher.log)

        def sent(share: float) -> Callable[[], bool]:
            return lambda: self._moment.acknowledged >= share * self.messages

        until(sent(0.15))
        bridge.kill()
        self.stage.fault(f"killed the bridge, gateway and Spark (kill -9), at {self._moment.acknowledged:,}")
        queued = self._moment.acknowledged
        until(sent(0.4))
        mosquitto.kill()
        lost = self._moment.acknowledged - queued
        self.stage.fault(f"killed Mosquitto (kill -9) with {lost:,} acknowledged messages in its memory")
        mosquitto.start()
        until(sent(0.6))
        publisher.kill()
        self.stage.fault(f"killed the publisher (kill -9) at {self._moment.offered:,}")
        publisher.start()
        until(sent(0.8))
        self.stage.fault("the bridge comes back; Mosquitto knows nothing of its subscription any more")
        bridge.start()
        until(lambda: not publisher.running)
        if publisher.code:
            raise _failed("the publisher gave up", publisher.log)

    def _watch(self, publisher: _Child, tail: Tail, bridge: BridgeRun) -> bool:
        told = publisher.told()
        moment = self._moment
        if told:
            moment.offered, moment.acknowledged = int(told["on_disk"]), int(told["at_broker"])
            self._sent_again = max(self._sent_again, int(told["sent_again"]))
        self._count(tail.pull(0.1))
        status = bridge.status()
        moment.journaled = int(status["journaled"]) if status else moment.journaled
        self.stage.show(moment, self.messages)
        return True

    def _count(self, arrived: list[Arrival]) -> None:
        self._seen.update(one.value or b"" for one in arrived)
        self._moment.in_kafka = len(self._seen)

    def _settled(self, bridge: BridgeRun) -> dict[str, Any]:
        """The gateway's last word, once everything it has is committed."""
        found: dict[str, Any] = {}

        def committed() -> bool:
            found.update(bridge.status() or {})
            return bool(found) and found["waiting"] == 0

        self._until(committed, _DRAIN_S, bridge.log)
        return found

    @staticmethod
    def _until(condition: Callable[[], bool], seconds: float, log: Path) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                raise _failed(f"it did not get further in {seconds:g} s: {last_line(log)}", log)
            time.sleep(0.05)


class _Child:
    """The publisher's process, over its lives."""

    def __init__(self, directory: Path, arguments: list[str]) -> None:
        self.command = [sys.executable, "-m", "towline_prove.receipts_publisher", *arguments]
        self.log = directory / "publisher.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(self.command, stdout=log, stderr=subprocess.STDOUT)

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def code(self) -> int | None:
        return self._process.returncode if self._process is not None else None

    def kill(self) -> None:
        if self._process is not None and self.running:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait(30)

    def told(self) -> dict[str, Any] | None:
        """The newest whole line that is a report."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        for line in reversed(text.splitlines()[-20:]):
            if line.startswith("{") and line.endswith("}"):
                return dict(json.loads(line))
        return None


def _failed(what: str, log: Path) -> DemoFailed:
    return DemoFailed("TL-P10", "demo receipts", what, f"See {log} and the logs beside it.")
