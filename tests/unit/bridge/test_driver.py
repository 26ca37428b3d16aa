"""What the driver takes from Spark's progress; the rest is tested on a real Spark."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.bridge.test_config import GOOD, read
from towline.bridge.runtime import driver
from towline.bridge.runtime.account import Counts
from towline.bridge.runtime.driver import Reports, facts
from towline.bridge.uplink.sql import Letters
from towline.guarantee import Guarantee


def place(offset: int) -> dict[str, Any]:
    return {"gateways": {"plant": {"journal": "j", "offset": offset}}, "tick": 0}


PROGRESS = {
    "name": "line",
    "batchId": 3,
    "numInputRows": 10,
    "durationMs": {"triggerExecution": 41},
    "sources": [{"startOffset": place(5), "endOffset": place(15), "latestOffset": {"x": 1}}],
    "observedMetrics": {"towline": {"rows": 10, "filtered": 2, "unrouted": 1, "fallback": 0}},
}


def test_progress_becomes_facts() -> None:
    assert facts(PROGRESS) == {
        "batch": 3,
        "rows": 10,
        "journal": "j",
        "query": "",
        "behind": None,
        "start": 5,
        "end": 15,
        "millis": {"triggerExecution": 41},
        "observed": {"rows": 10, "filtered": 2, "unrouted": 1, "fallback": 0},
    }


def test_a_trigger_without_a_batch_is_no_batch() -> None:
    """Spark reports it with the number of the next one, which would then be taken for counted [I11]."""
    out = io.StringIO()
    made: Any = SimpleNamespace(counts={}, reports=Reports(out))
    line: Any = SimpleNamespace(name="line", guarantee=Guarantee.AT_LEAST_ONCE)
    runner = driver._Runner(made, line)
    runner.tell(facts({**PROGRESS, "numInputRows": 0, "durationMs": {"latestOffset": 3, "triggerExecution": 3}}))
    assert out.getvalue() == ""
    runner.tell(facts({**PROGRESS, "durationMs": {"addBatch": 30, "triggerExecution": 41}}))
    assert json.loads(out.getvalue())["batch"] == 3


@pytest.mark.parametrize(
    "change",
    [
        {"sources": [{"startOffset": None, "endOffset": place(15)}]},
        {"sources": []},
        {"sources": [{"endOffset": "None"}]},
        {"observedMetrics": {}},
        {"observedMetrics": {"towline": {"rows": None}}},
    ],
)
def test_what_spark_leaves_out_does_no_harm(change: dict[str, Any]) -> None:
    made = facts({**PROGRESS, **change})
    assert Counts().add(made).agree


def test_repeats_are_the_rows_that_did_not_come_out() -> None:
    observed = {
        "towline": {"rows": 10, "filtered": 2, "unrouted": 1},
        "towline.kept": {"kept": 4, "fallback": 0, "dead_lettered": 1},
    }
    made = facts({**PROGRESS, "observedMetrics": observed, "stateOperators": [{"numRowsDroppedByWatermark": 1}]})
    assert made["observed"] == {
        "rows": 10,
        "filtered": 2,
        "unrouted": 1,
        "fallback": 0,
        "dead_lettered": 1,
        "deduplicated": 2,
        "late": 1,
    }


def test_a_report_is_one_line_of_json() -> None:
    stream = io.StringIO()
    Reports(stream).say("failed", line="x", text="a\nb")
    (line,) = stream.getvalue().splitlines()
    assert json.loads(line)["text"] == "a\nb"


def test_a_reader_that_is_gone_does_no_harm() -> None:
    stream = io.StringIO()
    stream.close()
    Reports(stream).say("progress")


def test_dead_letters_are_signed_with_what_no_other_bridge_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = GOOD.replace('name = "telemetry"', 'name = "telemetry"\ndead_letter_topic = "dead"')
    made: list[Any] = []
    monkeypatch.setattr(driver, "apply", lambda *_, letters, **__: made.append(letters))
    driver.records(None, read(text, tmp_path).uplinks[0], "plant.telemetry")  # type: ignore[arg-type] # nothing reads it
    assert made == [Letters("dead", "plant.telemetry")]


def test_a_disk_that_has_room_again_is_not_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    """A minute's pause after a disk that was full for seconds costs more than asking it every other second."""
    out = io.StringIO()
    going = SimpleNamespace(is_set=lambda: False)
    made: Any = SimpleNamespace(counts={}, reports=Reports(out), stopping=going, jvm_gone=lambda: False)
    line: Any = SimpleNamespace(name="line")
    runner = driver._Runner(made, line)
    for _ in range(8):
        runner._failed(RuntimeError("java.io.IOException: No space left on device"))
    assert all(json.loads(text)["again_in"] <= 2 for text in out.getvalue().splitlines())
    assert "No space left" in capsys.readouterr().err  # the log has all of it
