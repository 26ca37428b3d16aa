"""How Kafka is, and how far a line from it is from its end, as a bridge that runs sees it: killed, frozen, held up."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import produce_all, wait_until
from tests.unit.bridge.test_downlink_file import GOOD, read
from towline.bridge.runtime.child_supervisors import KafkaSupervisor
from towline.bridge.runtime.state import BridgeState
from towline.monitor.bridge import BridgeMonitor
from towline_prove.devstack import Kafka

pytestmark = pytest.mark.kafka

#: Seconds to wait for the word, which follows Kafka within 10 s where tests leave it the machine.
SOON = 30


class Watched:
    """A bridge's supervisor of Kafka, and the word, gauge and verdict that users see."""

    def __init__(self, place: Path, servers: str) -> None:
        bridge = read(GOOD.replace("k1:9092", servers), place)
        self.line = bridge.downlinks[0]
        self.state = BridgeState(bridge.name, place / "state", {self.line.name: "down"})
        self.monitor = BridgeMonitor(bridge.name, {})
        self.monitor.set_state(self.state)
        self._stopping = threading.Event()
        self._child = KafkaSupervisor(bridge, self.state, self._stopping)
        self._child.start()

    def says(self, word: str) -> bool:
        """Whether word, gauge and verdict are those."""
        gauges = {one.name: one.value for one in self.monitor.samples()}
        problems = [one["what"] for one in self.monitor.ready()[1]["problems"]]
        well = word == "reachable"
        return (
            self.state.kafka == word
            and gauges.get("towline_kafka_reachable") == int(well)
            and (f"kafka is {word}" in problems) is not well
        )

    def offsets(self) -> tuple[int | None, int | None]:
        """How many offsets the line is behind, and how many of them nobody gets."""
        view = self.state.lines[self.line.name]
        return view.behind, view.hidden

    def close(self) -> None:
        """End it."""
        self._stopping.set()
        self._child.join(30)
        assert not self._child.is_alive()


@pytest.fixture
def watched(tmp_path: Path, own_kafka: Kafka) -> Iterator[Watched]:
    own_kafka.create_topics({"commands": 1})
    one = Watched(tmp_path, own_kafka.bootstrap)
    try:
        yield one
    finally:
        one.close()


def test_word_gauge_and_verdict_follow_kafka_and_so_does_what_a_line_is_behind(
    watched: Watched, own_kafka: Kafka
) -> None:
    wait_until(lambda: watched.says("reachable"), SOON)
    assert watched.offsets() == (None, None), "nothing is known of a line that never ran [I19]"

    checkpoint = watched.line.checkpoint  # with what Spark's Kafka source leaves of a batch that is done
    for log, last in (("offsets", '{}\n{"commands":{"0":0}}'), ("commits", '{"nextBatchWatermarkMs":0}')):
        (checkpoint / log).mkdir(parents=True)
        (checkpoint / log / "0").write_text(f"v1\n{last}")
    produce_all(own_kafka.bootstrap, "commands", [(None, b"x", [])] * 59)
    wait_until(lambda: watched.offsets() == (59, 0), SOON, "the records")
    watched.state.lines[watched.line.name].query = "stopped"
    wait_until(
        lambda: watched.offsets() == (None, None), SOON, "nothing of a line that may stand in a topic that is gone"
    )
    watched.state.lines[watched.line.name].query = "running"

    own_kafka.pause()
    wait_until(lambda: watched.says("unreachable"), SOON, "a Kafka that stands still")
    assert watched.offsets() == (None, None)
    assert "TL-K01" in "".join(watched.state.take_events())
    own_kafka.resume()
    wait_until(lambda: watched.says("reachable") and watched.offsets() == (59, 0), SOON + 5, "a Kafka that goes on")
    own_kafka.kill()
    wait_until(lambda: watched.says("unreachable"), SOON, "a Kafka that was killed")
    assert "Connection refused" in str(watched.state.kafka_error)
