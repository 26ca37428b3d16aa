"""``ack_after``: what it costs that a broker is answered after Kafka, not after the journal; one bridge, in turns.

A line that answers after Kafka has as many messages on the way as the broker's window allows, so it carries at most one
window a batch; and while Kafka is away it takes in no more than a window.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple

from benchmarks.pipeline import Ends
from benchmarks.rig import UNLIMITED, held, machine, publish, wait
from towline.checkpoint import Checkpoint
from towline.gateway.client import GatewayClient
from towline.gateway.endpoint import GatewayEndpoint
from towline_prove.devstack import Kafka, Mosquitto
from towline_prove.subject import BridgeRun

#: Name of a line: ``ack_after`` and Receive Maximum.
_LINES: Final = {
    "journal-65534": ("journal", 65_534),
    "kafka-65534": ("kafka", 65_534),
    "kafka-2000": ("kafka", 2_000),
    "kafka-100": ("kafka", 100),
}
_HEAD: Final = """
name = "acks"
state_dir = "{state}"
mqtt = {{ brokers = ["{mqtt}"] }}
kafka = {{ bootstrap_servers = "{kafka}" }}
"""
_LINE: Final = """
[[uplink]]
name = "{name}"
ack_after = "{ack}"
mqtt = {{ receive_maximum = {window} }}
route = [{{ from = "{name}/{{device}}/data", topic = "{name}", key = "{{device}}" }}]
"""
_START_S: Final = 600.0
#: Pace of the live part, messages a second, and its seconds.
_RATE: Final = 1_000.0
#: Seconds for which Kafka is frozen.
_AWAY_S: Final = 10.0


class _Drained(NamedTuple):
    """A backlog that went down: messages a second, and seconds a batch."""

    rate: float
    batch_s: float


class _Bench:
    """The bridge with its lines.

    Args:
        directory: Of everything.
    """

    def __init__(self, directory: Path, mosquitto: Mosquitto, kafka: Kafka) -> None:
        self._directory, self._mosquitto, self._kafka = directory, mosquitto, kafka
        self._state = directory / "state"

    def status(self, line: str) -> dict[str, object]:
        """What the line's gateway says."""
        endpoint = GatewayEndpoint.read(self._state / line)
        assert endpoint is not None
        with GatewayClient(endpoint.location) as client:
            return client.status(timeout_s=10)

    def ready(self, line: str) -> bool:
        """Whether its session is there and its query has begun."""
        begun = Checkpoint(str(self._state / line / "checkpoint")).last_commit_batch() is not None
        return begun and self.status(line)["state"] == "online"

    def publish(self, line: str, count: int, rate: float = 0.0) -> None:
        """Publish to one line."""
        publish(self._mosquitto, self._directory, count, rate=rate, run=line, topic=f"{line}/{{device}}/data")

    def drain(self, line: str, count: int) -> _Drained:
        """Hold the line's gateway, pile up a backlog, let go, wait until Kafka has it."""
        endpoint = GatewayEndpoint.read(self._state / line)
        assert endpoint is not None
        ends, logs = Ends(self._kafka.bootstrap, line, 1), Checkpoint(str(self._state / line / "checkpoint"))
        with held(endpoint.pid):
            self.publish(line, count)
            before, batch = ends(), logs.last_commit_batch() or 0
            began = time.monotonic()
        wait(lambda: ends() - before >= count, f"{line} to drain", pause=0.02)
        seconds = time.monotonic() - began
        ends.close()
        return _Drained(count / seconds, seconds / max(1, (logs.last_commit_batch() or 0) - batch))

    def delay_s(self, line: str, seconds: float) -> float:
        """How long a message waits for its PUBACK on average, at a steady pace: what is owed over the pace (Little)."""
        owed = []
        with ThreadPoolExecutor(1) as pool:
            load = pool.submit(self.publish, line, int(_RATE * seconds), _RATE)
            time.sleep(seconds / 4)  # it has settled
            while not load.done():
                owed.append(int(str(self.status(line)["unacknowledged"])))
                time.sleep(0.02)
            load.result()
        return statistics.mean(owed) / _RATE

    def taken_in(self, line: str) -> int:
        """How many of the messages that come while Kafka is frozen the gateway takes in."""
        before = int(str(self.status(line)["journaled"]))
        with held(self._kafka.pid or 0):
            self.publish(line, int(_RATE * _AWAY_S), _RATE)
            time.sleep(1)
            taken = int(str(self.status(line)["journaled"])) - before
        wait(lambda: not self.status(line)["waiting"], f"{line} to catch up")
        return taken


def run(count: int = 100_000, rounds: int = 3, seconds: float = 20.0) -> None:
    """All lines in turn, and their ratios to the one that answers after the journal.

    Args:
        count: Messages of a backlog; of a line with a small window a tenth, a hundredth.
        rounds: Drains of each.
        seconds: Of the steady pace.
    """
    print(f"ack_after: backlogs drained, QoS 1, 150 B, at_least_once\n  {machine()}\n")
    with (
        tempfile.TemporaryDirectory(prefix="towline-bench-") as name,
        Mosquitto(Path(name) / "mosquitto", settings=UNLIMITED) as mosquitto,
        Kafka(Path(name) / "kafka") as kafka,
    ):
        directory = Path(name)
        kafka.create_topics(dict.fromkeys(_LINES, 1))
        config = directory / "bridge.toml"
        text = _HEAD.format(state=directory / "state", mqtt=mosquitto.uri, kafka=kafka.bootstrap)
        lines = (_LINE.format(name=line, ack=ack, window=window) for line, (ack, window) in _LINES.items())
        config.write_text(text + "".join(lines), encoding="utf-8")
        with BridgeRun(config, directory / "state" / "journal-65534", directory / "bridge.log") as bridge:
            bridge.start()
            logs = [directory / "state" / line / "checkpoint" / "commits" for line in _LINES]
            wait(lambda: all(any(one.glob("[0-9]*")) for one in logs), "the lines to begin", seconds=_START_S)
            bench = _Bench(directory, mosquitto, kafka)
            wait(lambda: all(map(bench.ready, _LINES)), "the lines to be online")
            _compare(bench, count, rounds, seconds)


def _compare(bench: _Bench, count: int, rounds: int, seconds: float) -> None:
    drained: dict[str, list[_Drained]] = {line: [] for line in _LINES}
    for turn in range(rounds + 1):
        for line, (_, window) in _LINES.items():
            size = min(count, max(window * 10, 1_000))
            outcome = bench.drain(line, size)
            if turn:  # the first warms Spark
                drained[line].append(outcome)
    delays = {line: bench.delay_s(line, seconds) for line in _LINES}
    taken = {line: bench.taken_in(line) for line in _LINES}
    first = next(iter(_LINES))
    print(
        "  ack_after  window   msg/s drained   s a batch   window / s a batch   to its PUBACK   taken in, Kafka frozen"
    )
    for line, (ack, window) in _LINES.items():
        rate, batch_s = (statistics.median(column) for column in zip(*drained[line], strict=True))
        bound = f"{window / batch_s:,.0f}" if ack == "kafka" else ""
        print(
            f"  {ack:<9} {window:>7,} {rate:>15,.0f} {batch_s:>11.2f} {bound:>20} {delays[line] * 1000:>8,.0f} ms"
            f" {taken[line]:>17,} of {int(_RATE * _AWAY_S):,}",
            flush=True,
        )
    for line in list(_LINES)[1:]:
        pairs = zip(drained[line], drained[first], strict=True)
        ratio = statistics.median(one.rate / journal.rate for one, journal in pairs)
        print(f"  ratio {line} : {first}   drained {ratio:.3f}   to its PUBACK {delays[line] / delays[first]:,.0f} x")
    print()
