"""What the driver takes from Spark's progress; the rest is tested on a real Spark."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from tests.unit.bridge.test_config import GOOD, read
from tests.unit.bridge.test_failures import TOPICS_GONE
from tests.unit.bridge.test_recovery import DOWN
from towline.bridge.downlink.query import DownlinkQuery
from towline.bridge.lines.identity import Identity
from towline.bridge.runtime.driver import LineRunner, report_writer, step_all
from towline.bridge.runtime.session import OBSERVE_SETTINGS, session_settings
from towline.bridge.uplink.query import UplinkQuery
from towline.errors import KafkaError, SetupError

PROGRESS: dict[str, Any] = {"batchId": 3, "durationMs": {"addBatch": 30, "triggerExecution": 41}}


@pytest.fixture
def uplink(tmp_path: Path) -> UplinkQuery:
    bridge = read(GOOD, tmp_path)
    return UplinkQuery(bridge, bridge.uplinks[0])


class Runner(LineRunner):
    """With a driver that goes as far as a runner needs it, and has what is reported."""

    def __init__(self, uplink: UplinkQuery) -> None:
        self.out = io.StringIO()
        host: Any = SimpleNamespace(spark=None, report=report_writer(self.out), is_ending=lambda: False)
        super().__init__(host, uplink)

    @property
    def reports(self) -> list[dict[str, Any]]:
        return [json.loads(text) for text in self.out.getvalue().splitlines()]


@pytest.fixture
def runner(uplink: UplinkQuery, monkeypatch: pytest.MonkeyPatch) -> Runner:
    monkeypatch.setattr("towline.bridge.runtime.driver.ensure_topics", lambda *_: "")
    monkeypatch.setattr(UplinkQuery, "start", lambda *_: SimpleNamespace(isActive=True))
    return Runner(uplink)


def test_what_an_uplink_sets_is_no_other_lines_and_one_that_can_not_be_noted_is_stopped(
    uplink: UplinkQuery, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A downlink that starts after it still hands 64 MiB to its sink; a query unknown to its runner blocks the next."""
    name = "spark.sql.execution.arrow.maxBytesPerBatch"
    conf = {name: "64m"}
    both = read(GOOD + DOWN, tmp_path)
    downlink = DownlinkQuery(both, both.downlinks[0])
    done: list[object] = []

    def start() -> Any:
        done.append(conf[name])
        return SimpleNamespace(id="q", stop=lambda: done.append("stopped"))

    writer = MagicMock()
    writer.queryName().option().trigger().start = start
    spark: Any = SimpleNamespace(conf=SimpleNamespace(set=conf.__setitem__))
    for query in (uplink, downlink):
        monkeypatch.setattr(query, "_prepare_writer", lambda _: (writer, Identity("telemetry", "plant-7.telemetry")))
        query.line.gateway.state_dir.parent.mkdir(exist_ok=True)
        query.line.gateway.state_dir.touch()
        with pytest.raises(OSError, match="exists"):
            query.start(spark)
    assert done == [str((1 << 31) - 1), "stopped", str(64 << 20), "stopped"]


def test_spark_conf_does_not_have_tasks_counted_twice_and_a_suspended_machine_costs_no_jvm(tmp_path: Path) -> None:
    conf = f'[spark.conf]\n"{next(iter(OBSERVE_SETTINGS))}" = true\n\n[[uplink]]'
    settings = session_settings(read(GOOD.replace("[[uplink]]", conf), tmp_path))
    assert settings.items() >= OBSERVE_SETTINGS.items()
    assert settings["spark.storage.blockManagerHeartbeatTimeoutMs"] == "365d"


def test_a_trigger_without_a_batch_is_no_batch(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark reports it with the number of the next one, which would then be taken for counted [I11]."""
    runner.report_progress({**PROGRESS, "durationMs": {"latestOffset": 3, "triggerExecution": 3}})
    assert runner.reports == []
    monkeypatch.setattr(UplinkQuery, "count_spark", MagicMock(side_effect=OSError(28, "No space left on device")))
    runner.report_progress(PROGRESS)
    (report,) = runner.reports  # numbers that can't be counted stop nothing
    assert (report["line"], report["millis"]) == ("telemetry", PROGRESS["durationMs"])


def test_a_disk_is_asked_every_other_second_and_deleted_topics_are_not_looked_for_for_ever(
    runner: Runner, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(8):
        runner._report_failure(RuntimeError("java.io.IOException: No space left on device"))
    assert all(report["again_in"] <= 2 for report in runner.reports)
    for text, given_up in ((TOPICS_GONE[0], False), (TOPICS_GONE[1], False), (TOPICS_GONE[1], True)):
        runner._report_failure(RuntimeError(text))
        assert (runner.start_at == math.inf) is given_up
    assert "Partitions Set" in capsys.readouterr().err  # the log has all of it


def test_a_line_that_lacks_a_topic_looks_again_each_minute(
    runner: Runner, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By itself; a Kafka that does not answer is no reason to wait, and what was made is told."""
    answers = [KafkaError("TL-B03", "k", "it is not there"), KafkaError("TL-K01", "k", "silent"), "made"]
    monkeypatch.setattr("towline.bridge.runtime.driver.ensure_topics", MagicMock(side_effect=answers))
    for _ in range(3):
        runner.start_at, runner._streaming_query = 0.0, None
        runner.step()
    said = runner.reports
    assert [report["kind"] for report in said] == ["failed", "started", "noted", "started"]
    assert (said[0]["code"], said[0]["again_in"] <= 60) == ("TL-B03", True)
    assert "TL-B03" in capsys.readouterr().err


@pytest.mark.parametrize(("code", "given_up"), [("TL-S31", True), ("TL-S32", False)])
def test_a_line_waits_for_executors_and_not_for_what_one_lacks(
    runner: Runner, monkeypatch: pytest.MonkeyPatch, code: str, given_up: bool
) -> None:
    """A cluster without a free executor at a start must not end the bridge, and intake with it."""
    error = SetupError(code, "spark", "executors", "Look at them.")
    monkeypatch.setattr("towline.bridge.runtime.driver.check_new_executors", MagicMock(side_effect=error))
    runner.step()
    (report,) = runner.reports
    assert (report["code"], report["again_in"] is None, runner.start_at == math.inf) == (code, given_up, given_up)


def test_a_query_that_has_finished_a_former_batch_is_followed_by_the_next(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = SimpleNamespace(isActive=False, exception=lambda: None)
    monkeypatch.setattr(runner, "_poll_progress", lambda _: False)
    monkeypatch.setattr(UplinkQuery, "start", MagicMock(side_effect=[ended, SimpleNamespace(isActive=True)]))
    for _ in range(3):
        runner.step()
    assert [report["kind"] for report in runner.reports] == ["started", "started"]
    assert runner.is_starting


def test_lines_begin_a_few_at_a_time_and_all_of_them_in_the_end() -> None:
    class FakeLine:
        def __init__(self) -> None:
            self.is_start_due, self.is_starting, self.steps = True, False, 0

        def step(self) -> None:
            self.steps += 1
            self.is_starting, self.is_start_due = self.is_starting or self.is_start_due, False

    lines: Any = [FakeLine() for _ in range(5)]
    for _ in range(2):
        step_all(lines, max_starting=2)
    assert [line.steps for line in lines] == [2, 2, 0, 0, 0]  # a line that runs is looked after meanwhile
    for _ in range(5):
        for line in lines:
            line.is_starting = False
        step_all(lines, max_starting=2)
    assert all(line.steps for line in lines)


def test_a_query_begins_until_its_first_batch_or_for_a_while(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr("towline.bridge.runtime.driver.time.monotonic", lambda: clock.now)

    def seen() -> tuple[bool, bool]:
        return runner.is_start_due, runner.is_starting

    assert seen() == (True, False)
    runner.step()
    assert seen() == (False, True)
    clock.now += 60
    assert seen() == (False, False)  # Kafka may be away: the other lines must not wait for it
    clock.now -= 60
    runner.report_progress(PROGRESS)
    assert seen() == (False, False)
