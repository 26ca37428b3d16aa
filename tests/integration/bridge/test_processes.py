"""Drivers of a bridge that start, end and are killed, with a program of the test's own."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import wait_until
from tests.unit.bridge.test_config import GOOD, read
from towline.bridge.config.model import Bridge
from towline.bridge.runtime import child_supervisors
from towline.bridge.runtime.child_supervisors import DriverSupervisor, KafkaSupervisor
from towline.bridge.runtime.state import BridgeState, pause, resume
from towline.errors import ConfigError
from towline.timing import Backoff

#: A driver that does what it is told about queries, tells everything it was told, and is killed by its first hold.
OBEDIENT = """
import json, os, sys
def tell(**report):
    print(json.dumps(report), flush=True)
tell(kind="noted", text=json.loads(sys.stdin.readline())["lines"][0]["route"][0]["from"])
for line in sys.stdin:
    order = json.loads(line) if line.startswith("{") else {}
    if "hold" in order:
        if not os.path.exists("killed"):
            open("killed", "w").close()
            os.kill(os.getpid(), 9)
        tell(kind="held", line=order["hold"])
    elif "judge" in order:
        for of, errors in ("the one before", []), (order["of"], [["TL-C74", "b:9", "where: no", "Correct it."]]):
            tell(kind="judged", of=of, errors=errors)
    elif "take" in order:
        tell(kind="noted", text="take " + order["take"]["route"][0]["topic"])
        tell(kind="started", line=order["take"]["name"])
    else:
        tell(kind="noted", text=line.strip())
"""


class Supervised:
    """A driver under its supervisor, with two lines."""

    def __init__(self, directory: Path) -> None:
        head, uplink, telemetry = GOOD.replace('"telemetry/{device}/#"', '"tél/温度/{device}/#"').partition(
            "[[uplink]]"
        )
        second = telemetry.replace('"telemetry"', '"second"', 1)
        self.bridge = read(head + uplink + telemetry + uplink + second, directory)
        self.bridge.log_dir.mkdir(parents=True)
        self.state = BridgeState("plant", directory, {line.name: "up" for line in self.bridge.lines})
        self.stopping = threading.Event()
        self.kafka = KafkaSupervisor(self.bridge, self.state, self.stopping)
        self.driver = DriverSupervisor(self.bridge, self.state, self.kafka, self.stopping)
        self.driver._backoff = Backoff(first_s=0.0, max_s=0.0)
        self.driver.command = (sys.executable, "-c", OBEDIENT)
        self.said = list[str]()

    def hears(self, text: str) -> None:
        """Wait until it has said so, once more than before."""

        def has_said() -> bool:
            self.said += self.state.take_events()
            return text in self.said

        wait_until(has_said, what=text)
        self.said.clear()

    def query(self, state: str) -> None:
        wait_until(lambda: self.state.lines["telemetry"].query == state, what=state)


@pytest.fixture
def supervised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Supervised]:
    monkeypatch.setenv("PYTHONIOENCODING", "latin-1")
    made = Supervised(tmp_path)
    yield made
    made.stopping.set()
    made.driver.kill()
    if made.driver.ident:
        made.driver.join(20)


def test_a_query_that_is_held_stays_so_over_the_end_of_its_driver(supervised: Supervised) -> None:
    """The driver is killed before it has stopped the query: the next one is told before it starts any.

    Queries begin when Kafka has answered; routes reach a driver in whatever encoding it has.
    """
    driver, bridge, view = supervised.driver, supervised.bridge, supervised.state.lines["telemetry"]
    driver.stop_line("second", "its SQL was wrong")
    driver.start()
    supervised.hears("tél/温度/{device}/#")
    driver._send_commands("before")
    supervised.hears("before")
    supervised.kafka._mark_reachable()
    supervised.hears("go")
    driver.hold_queries(["telemetry"])
    supervised.hears("go")
    assert (bridge.state_dir / "killed").exists()
    assert view.query == "held for a reload"
    changed = changed_topics(bridge)
    with pytest.raises(ConfigError, match=r"^b:9: where: no\. Correct it\.   \[TL-C74\]$"):
        driver.check_sql(changed.uplinks)
    assert driver.stopped_lines == {"second"}
    driver.start_queries(changed, ["telemetry", "second"])
    supervised.hears("take changed")
    supervised.query("running")
    assert driver.stopped_lines == set(), "a line that was given up begins again"

    place = bridge.state_dir / "telemetry"
    supervised.state.spark = "running"
    supervised.kafka._mark_reachable()
    pause(place)
    driver.apply_pauses()
    supervised.query("paused")
    first = driver._process
    driver.kill()
    wait_until(lambda: driver._process is not first, what="the next driver")
    driver._handle_report(json.dumps({"kind": "progress", "line": "telemetry", "batch": 1, "at": 0.0, "millis": {}}))
    driver.start_queries(changed, ["telemetry"])
    driver.apply_pauses()
    assert view.query == "paused", "whatever is reported, reloaded and started again"
    resume(place)
    driver.apply_pauses()
    supervised.query("running")
    events = supervised.state.take_events()
    assert events.count("go") == 1, "of the next driver"
    said = [text for text in events if text.startswith('line "telemetry": ')]
    assert said == [f'line "telemetry": {one}' for one in ("paused; new messages wait until towline resume", "resumed")]


def changed_topics(bridge: Bridge) -> Bridge:
    text = bridge.model_dump_json(by_alias=True).replace('"topic":"telemetry"', '"topic":"changed"')
    return Bridge.model_validate_json(text)


def test_a_driver_that_does_not_answer_refuses_a_reload(
    supervised: Supervised, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_supervisors, "_DRIVER_TIMEOUT_S", 0.1)
    lines = supervised.bridge.lines
    with pytest.raises(ConfigError, match=r"between two batches: Spark does not answer.*TL-C174"):
        supervised.driver.hold_queries([line.name for line in lines])
    with pytest.raises(ConfigError, match=r"the SQL of the routes was not checked: Spark does.*TL-C174"):
        supervised.driver.check_sql(lines)


def test_a_driver_that_ends_before_its_first_word_is_told_by_its_last_line(supervised: Supervised) -> None:
    """What it wrote before is another start's."""
    supervised.driver.log_path.write_text("ValueError: of yesterday\n")
    supervised.driver.command = (sys.executable, "-c", "import sys; sys.stdin.readline(); import no_such_module")
    supervised.driver.start()
    said = wait_until(supervised.state.take_events, what="the end of the driver")
    assert said[0].startswith("spark: its driver ended with code 1: ModuleNotFoundError: No module named")
