"""The story of one message, from what is on disk; and how a record is recognised."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.unit.bridge.test_config import GOOD, read
from tests.unit.bridge.test_records import batch_of, compiled, row
from tests.unit.journal.support import ROOMY, Unsynced, rows
from tests.unit.test_checkpoint import Spark, put
from towline.bridge.config.model import Bridge
from towline.bridge.deadletters import TopicRecord
from towline.bridge.routes import Route
from towline.errors import ConfigError
from towline.journal import Journal
from towline.kafka.deadletters import Header
from towline.monitor.message import Story, Tracer, is_expected, rendered_rows

ROUTE = {"from": "t/{device}/#", "topic": "t", "key": "{device}"}
WAITING = ["received", "journaled", "acknowledged", "batch"]


def record(headers: Sequence[Header] = (), **more: Any) -> TopicRecord:
    return TopicRecord(0, 7, 1000, b"k", b"p", headers, "t")._replace(**more)


def expected_of(routes: Sequence[Route]) -> TopicRecord:
    ((message, expected),) = rendered_rows(routes, batch_of([row("t/d/x")]))
    assert message["topic"] == "t/d/x"
    return expected


def test_a_record_is_what_the_routes_make_of_a_row() -> None:
    expected = expected_of(compiled(ROUTE))
    assert (expected.key, expected.topic) == (b"d", "t")
    found = record([*expected.headers, ("more", b"1")], key=b"d")
    assert is_expected(found, expected)
    for other in ({"key": b"e"}, {"value": b"q"}, {"topic": "u"}, {"headers": expected.headers[1:]}):
        assert not is_expected(found._replace(**other), expected), other


def test_what_only_sql_knows_of_a_record_is_not_compared() -> None:
    expected = expected_of(compiled({**ROUTE, "key": "{unit}", "fields": {"unit": "upper(device)"}}))
    assert expected.key is None
    assert is_expected(record(expected.headers, key=b"D"), expected)


def test_without_properties_the_time_of_receipt_tells_records_apart() -> None:
    expected = expected_of(compiled({**ROUTE, "properties": "none"}))
    found = record(key=b"d", timestamp=expected.timestamp)
    assert is_expected(found, expected)
    assert not is_expected(found._replace(timestamp=expected.timestamp + 1), expected)


def written(directory: Path, text: str = GOOD) -> tuple[Bridge, Path]:
    bridge = read(text, directory)
    return bridge, bridge.lines[0].gateway.state_dir


def names(story: Story) -> list[str]:
    return [step["name"] for step in story.steps]


@pytest.mark.parametrize(
    ("headers", "named"),
    [
        ([("mqtt.gateway", b"g"), ("mqtt.offset", b"12")], ("g", 12)),
        ([("mqtt.gateway", b"g"), ("mqtt.offset", b"12"), ("towline.dlq.source", b"telemetry")], ("g", 12)),
        ([("mqtt.gateway", b"g"), ("mqtt.offset", b"12"), ("towline.dlq.source", b"other")], None),
        ([("mqtt.offset", b"12")], None),
        ([("mqtt.gateway", b"g"), ("mqtt.offset", b"-1")], None),
        ([("mqtt.gateway", b"g"), ("mqtt.offset", b"9" * 20)], None),
        ([("mqtt.gateway", b"g"), ("mqtt.offset", None)], None),
        ([], None),
    ],
)
def test_headers_that_name_a_message(tmp_path: Path, headers: list[Header], named: tuple[str, int] | None) -> None:
    bridge, _ = written(tmp_path)
    assert Tracer(bridge)._named(record(headers)) == named


def test_a_stopped_line_is_told_from_its_disk(tmp_path: Path) -> None:
    """Rows of an inbox are read by its gateway alone; offsets, batches, commits are on disk. Nothing is made there."""
    bridge, directory = written(tmp_path)
    with Journal.open(directory / "inbox", schema=rows(0, 1).schema, limits=ROOMY, disk=Unsynced()) as journal:
        journal.append(rows(0, 30))
        spark = Spark(directory / "checkpoint")
        for batch, end in ((4, 10), (5, 15), (6, 20)):
            offset = {"gateways": {"telemetry": {"journal": journal.journal_id, "offset": end}}, "tick": 0}
            put(spark.path / "offsets" / str(batch), f"v1\n{{}}\n{json.dumps(offset)}")
        spark.commit(4)
        spark.commit(5)
    before = {path: path.stat().st_mtime_ns for path in directory.rglob("*")}
    tracer = Tracer(bridge)
    waiting, running, committed, first, beyond = (tracer.by_offset(offset) for offset in (25, 15, 14, 5, 30))
    assert (waiting.state, names(waiting)) == ("waiting", WAITING)
    assert waiting.steps[0]["text"].startswith("unknown: its gateway does not answer")
    assert waiting.steps[1]["text"] == f"journal {journal.journal_id} of gateway telemetry"
    assert (running.state, names(running), running.steps[3]["text"]) == ("in_batch", [*WAITING, "kafka"], "6")
    assert (committed.state, names(committed)) == ("committed", [*WAITING, "committed", "kafka"])
    assert (committed.steps[3]["text"], first.steps[3]["text"]) == ("5", "4, or one before it")
    assert "no header of the routes names its offset, and its row can't be read" in committed.steps[5]["text"]
    assert (beyond.state, beyond.steps[0]["text"]) == ("not_received", "no: the next message gets offset 30")
    assert {path: path.stat().st_mtime_ns for path in directory.rglob("*")} == before


def test_a_line_that_never_ran_knows_nothing(tmp_path: Path) -> None:
    bridge, directory = written(tmp_path)
    story = Tracer(bridge).by_offset(3)
    assert (story.state, [step["text"].partition(":")[0] for step in story.steps[:2]]) == ("unknown", ["unknown"] * 2)
    assert not directory.exists()


@pytest.mark.parametrize(
    ("number", "state"), [(2, "committed"), (5, "journaled"), (9, "journaled"), (8, "not_received")]
)
def test_a_message_of_a_publisher_with_receipts(tmp_path: Path, number: int, state: str) -> None:
    bridge, directory = written(tmp_path)
    with Journal.open(directory / "inbox", schema=rows(0, 1).schema, limits=ROOMY, disk=Unsynced()) as journal:
        journal.append(rows(0, 1), notes={"publisher:press": [2, 6, [[9, 10]], 3, [0, 0, 0], []]})
    tracer = Tracer(bridge)
    assert tracer.by_receipt("press", number).state == state
    assert tracer.by_receipt("nobody", number).state == "unknown"


def test_several_uplinks_need_a_name(tmp_path: Path) -> None:
    bridge = read(GOOD, tmp_path)
    twice = bridge.model_copy(update={"lines": (*bridge.uplinks, *bridge.uplinks)})
    with pytest.raises(ConfigError, match=r"there are several uplinks: telemetry, telemetry\. Name one with --line"):
        twice.uplink(None)
