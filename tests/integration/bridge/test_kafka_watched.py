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

#: Seconds to wait for the word, which follows Kafka within 10 s where tests leave it the machine.
SOON = 30


@pytest.fixture
def state(tmp_path: Path, own_kafka: Kafka) -> Iterator[BridgeState]:
    """What a bridge's supervisor of Kafka says, about a line with a batch that is done."""
    own_kafka.create_topics({"commands": 1})
    bridge = read(GOOD.replace("k1:9092", own_kafka.bootstrap), tmp_path)
    (line,), stopping = bridge.downlinks, threading.Event()
    for log, last in (("offsets", '{}\n{"commands":{"0":0}}'), ("commits", '{"nextBatchWatermarkMs":0}')):
        (line.checkpoint / log).mkdir(parents=True)
        (line.checkpoint / log / "0").write_text(f"v1\n{last}")
    state = BridgeState(bridge.name, tmp_path / "state", {line.name: "down"})
    child = KafkaSupervisor(bridge, state, stopping)
    child.start()
    yield state
    stopping.set()
    child.join(30)
    assert not child.is_alive()


def says(state: BridgeState, word: str) -> bool:
    """Whether word, gauge and verdict are those."""
    monitor = BridgeMonitor("tests", {})
    monitor.set_state(state)
    gauges = {one.name: one.value for one in monitor.samples()}
    problems, well = [one["what"] for one in monitor.ready()[1]["problems"]], word == "reachable"
    said = (state.kafka, gauges.get("towline_kafka_reachable"), f"kafka is {word}" in problems)
    return said == (word, int(well), not well)


def offsets(state: BridgeState) -> tuple[int | None, int | None]:
    """How many offsets the line is behind, and how many of them nobody gets."""
    (view,) = state.lines.values()
    return view.behind, view.hidden


def test_word_gauge_and_verdict_follow_kafka_and_so_does_what_a_line_is_behind(
    state: BridgeState, own_kafka: Kafka
) -> None:
    wait_until(lambda: says(state, "reachable"), SOON)
    produce_all(own_kafka.bootstrap, "commands", [(None, b"x", [])] * 59)
    wait_until(lambda: offsets(state) == (59, 0), SOON, "the records")
    (view,) = state.lines.values()
    view.query = "stopped"
    wait_until(lambda: offsets(state) == (None, None), SOON, "nothing of a line that may stand in a topic that is gone")
    view.query = "running"

    own_kafka.pause()
    wait_until(lambda: says(state, "unreachable"), SOON, "a Kafka that stands still")
    assert offsets(state) == (None, None)
    assert "TL-K01" in "".join(state.take_events())
    own_kafka.resume()
    wait_until(lambda: says(state, "reachable") and offsets(state) == (59, 0), SOON + 5, "a Kafka that goes on")
    own_kafka.kill()
    wait_until(lambda: says(state, "unreachable"), SOON, "a Kafka that was killed")
    assert "Connection refused" in str(state.kafka_error)
