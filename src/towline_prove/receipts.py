"""What "can't be done with Mosquitto", done: end-to-end receipts shown with real brokers and real kills.

Mosquitto has its defaults: nothing on disk, 1,000 messages queued for a client, what comes beyond is dropped and
acknowledged all the same. The bridge is killed as a whole; messages queue in Mosquitto, and it is killed with them; the
publisher is killed in the middle and started again; then the bridge comes back. Every number has to be in Kafka, once.
"""

from __future__ import annotations

import json
import secrets
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final

from towline import files
from towline_prove.demo import Scene
from towline_prove.devstack import Kafka, Mosquitto
from towline_prove.devstack.process import wait_for
from towline_prove.reader import Tail, read_topic
from towline_prove.referee import Arrival
from towline_prove.subject import TOPIC, BridgeRun, last_line

__all__ = ["ReceiptsAccount", "ReceiptsDemo"]

#: The way of everything into Kafka after three kills, in seconds.
_DRAIN_S: Final = 300.0
#: The last of the messages is published after the last kill: so large a part of them is before it, at most.
_MOST: Final = 0.9


@dataclass(frozen=True, slots=True)
class ReceiptsAccount:
    """What became of the numbers.

    Attributes:
        offered: Messages that `publish` had promised to keep.
        in_kafka: Different numbers found in Kafka by a plain consumer.
        doubled: Records beyond the first of a number.
        forgotten: Messages that Mosquitto had acknowledged and lost when it was killed, at least.
        sent_again: Messages that the publisher sent again, because the broker had lost them.
        dropped: Repeats that the gateway recognised.
        guarantee: Of the line.
    """

    offered: int
    in_kafka: int
    doubled: int
    forgotten: int
    sent_again: int
    dropped: int
    guarantee: str

    @property
    def ok(self) -> bool:
        """Nothing lost; nothing doubled where that was promised."""
        return self.in_kafka == self.offered and (self.guarantee != "exactly_once" or not self.doubled)


@dataclass
class ReceiptsDemo(Scene[ReceiptsAccount]):
    """The bridge, the broker and the publisher are killed, one after the other."""

    command: ClassVar[str] = "demo receipts"

    _seen: Counter[bytes] = field(default_factory=Counter, init=False)
    _sent_again: int = field(default=0, init=False)
    #: When the publisher looked at what it told last, on the clock of all processes.
    _told_at: float = field(default=0.0, init=False)

    def _run(self, directory: Path) -> ReceiptsAccount:
        with ExitStack() as stack:
            mosquitto = stack.enter_context(Mosquitto(directory / "mosquitto"))
            kafka = stack.enter_context(Kafka(directory / "kafka"))
            self.stage.step(
                "brokers", f"Mosquitto {mosquitto.version} {mosquitto.uri}, persistence off   Kafka {kafka.bootstrap}"
            )
            key_file = directory / "receipts.key"
            files.replace(key_file, secrets.token_hex(32) + "\n")
            bridge = self._bridge(directory, mosquitto, kafka, 'receipts = { key_file = "receipts.key" }')
            stack.enter_context(bridge)
            self._start(bridge, "receipts")
            tail = Tail(kafka.bootstrap, TOPIC)
            stack.callback(tail.close)
            arguments = [mosquitto.uri, directory / "publisher", self.messages, self.rate, self._qos, key_file]
            publisher = _Child(directory, list(map(str, arguments)))
            stack.callback(publisher.kill)
            forgotten = self._perform(bridge, mosquitto, tail, publisher)
            status = self._settled(bridge)
            self._seen = Counter(one.value or b"" for one in read_topic(kafka.bootstrap, TOPIC))
            doubled = self._seen.total() - len(self._seen)
            in_kafka = sum(str(number).encode() in self._seen for number in range(self.messages))
            account = ReceiptsAccount(
                self.messages,
                in_kafka,
                doubled,
                forgotten,
                self._sent_again,
                int(status["deduplicated"]),
                self.guarantee,
            )
            bridge.stop()
        return account

    def _perform(self, bridge: BridgeRun, mosquitto: Mosquitto, tail: Tail, publisher: _Child) -> int:
        """The article's story; how many acknowledged messages Mosquitto forgets in it, at least."""
        publisher.start()

        def until(condition: Callable[[], bool]) -> None:
            self._until(lambda: self._watch(publisher, tail, bridge) and condition(), _DRAIN_S, publisher.log)

        def further(share: float) -> int:
            """Wait for so many more acknowledgements; how many there were when it began, at least."""
            now = time.monotonic()
            until(lambda: self._told_at > now)  # what was told before may be from before the last kill
            begun = self._moment.acknowledged
            wanted = min(begun + share * self.messages, _MOST * self.messages)
            until(lambda: self._moment.acknowledged >= wanted)
            return begun

        further(0.15)
        with publisher.stopped():  # a bridge takes a while to kill, and takes in what is published meanwhile
            bridge.kill()
        self.stage.fault(f"killed the bridge, gateway and Spark (kill -9), at {self._moment.acknowledged:,}")
        queued = further(0.25)
        mosquitto.kill()
        forgotten = self._moment.acknowledged - queued
        self.stage.fault(f"killed Mosquitto (kill -9) with {forgotten:,} acknowledged messages in its memory")
        mosquitto.start()
        further(0.2)
        publisher.kill()
        self.stage.fault(f"killed the publisher (kill -9) at {self._moment.offered:,}")
        publisher.start()
        further(0.2)
        self.stage.fault("the bridge comes back; Mosquitto knows nothing of its subscription any more")
        bridge.start()
        until(lambda: not publisher.running)
        if publisher.code:
            raise self._failed("the publisher gave up", publisher.log)
        return forgotten

    def _watch(self, publisher: _Child, tail: Tail, bridge: BridgeRun) -> bool:
        moment = self._moment
        self._count(tail.pull(0.1))
        report = publisher.report()
        if report:
            self._told_at = float(report["at"])
            # It reports now and then: what is in Kafka has been offered, whether it has said so or not.
            moment.offered = max(int(report["on_disk"]), moment.in_kafka)
            moment.acknowledged = int(report["at_broker"])
            self._sent_again = max(self._sent_again, int(report["sent_again"]))
        status = bridge.status()
        moment.journaled = int(status["journaled"]) if status else moment.journaled
        self.stage.show(moment, self.messages)
        return True

    def _count(self, arrived: list[Arrival]) -> None:
        self._seen.update(one.value or b"" for one in arrived)
        self._moment.in_kafka = len(self._seen)

    def _settled(self, bridge: BridgeRun) -> dict[str, Any]:
        """The gateway's last word, once everything it has is committed."""
        status: dict[str, Any] = {}

        def committed() -> bool:
            status.update(bridge.status() or {})
            return bool(status) and status["waiting"] == 0

        self._until(committed, _DRAIN_S, bridge.log)
        return status

    def _until(self, condition: Callable[[], bool], seconds: float, log: Path) -> None:
        if not wait_for(condition, seconds, 0.05):
            raise self._failed(f"it did not get further in {seconds:g} s: {last_line(log)}", log)


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

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """It does nothing meanwhile, and then goes on."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        if self._process is not None and self.running:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait(30)

    def report(self) -> dict[str, Any] | None:
        """The newest whole line that is a report."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        for line in reversed(text.splitlines()[-20:]):
            if line.startswith("{") and line.endswith("}"):
                return dict(json.loads(line))
        return None
