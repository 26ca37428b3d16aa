"""Which batches are counted again, and which records each of them had."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.bridge.test_config import GOOD, read
from tests.unit.bridge.test_downlink_file import GOOD as DOWN
from towline.bridge.downlink.account import DownlinkCounts
from towline.bridge.downlink.query import DownlinkQuery
from towline.bridge.lines.identity import Identity
from towline.bridge.uplink.account import UplinkCounts
from towline.bridge.uplink.query import UplinkQuery
from towline.checkpoint import Checkpoint
from towline.spark import tally
from towline.spark.tally import noted


def checkpoint(path: Path, ends: list[dict[str, Any]], done: int) -> Path:
    """As Spark leaves it: the Kafka source began at 5, batch n ends at ``ends[n]``."""
    for name in ("offsets", "commits", "sources/0"):
        (path / name).mkdir(parents=True)
    (path / "metadata").write_text('{"id":"q"}')
    (path / "sources/0/0").write_text('\0v1\n{"t":{"0":5}}')
    for batch, end in enumerate(ends):
        (path / "offsets" / str(batch)).write_text(f"v1\n{{}}\n{json.dumps(end)}")
    for batch in range(done):
        (path / "commits" / str(batch)).write_text("v1\n{}")
    return path


ENDS: list[dict[str, Any]] = [{"t": {"0": 10}}, {"t": {"0": 20, "1": 3}}, {"t": {"0": 30, "1": 4}}]


@pytest.mark.parametrize(
    ("counts", "numbers"),
    [
        (DownlinkCounts(), [0, 1]),
        (DownlinkCounts("q", 0), [1]),
        (DownlinkCounts("q", 1), []),
        (DownlinkCounts("another", 7), [0, 1]),
    ],
)
def test_the_way_down_tells_what_the_writer_has_noted(
    tmp_path: Path, counts: DownlinkCounts, numbers: list[int]
) -> None:
    """Of batches that are committed and were not counted; of batch 2 nothing is committed."""
    bridge = read(DOWN, tmp_path)
    (line,) = bridge.downlinks
    query, place = DownlinkQuery(bridge, line), checkpoint(line.checkpoint, ENDS, done=2)
    Identity("commands", "plant-7.commands", query="q").save(line.gateway.state_dir)
    for batch in range(3):
        left_out = {"kept": 10 + batch, "dead_lettered": 1, "filtered": 2, "undecided": 3}
        tally.given(Checkpoint(str(place)), batch, None, left_out=left_out)
    reports = list(query.unreported(counts.as_json()))
    assert [report["batch"] for report in reports] == numbers
    for report in reports:
        counts = counts.add(report)
    assert counts.rows == sum(10 + n for n in numbers)
    assert (counts.undecided, counts.dead_lettered) == (3 * len(numbers), len(numbers))
    Identity("commands", "plant-7.commands", query="another").save(line.gateway.state_dir)
    assert list(query.unreported({})) == []


def test_what_nobody_has_noted_is_not_told(tmp_path: Path) -> None:
    """A power failure took the note: such batches are counted as unseen."""
    bridge = read(DOWN, tmp_path)
    (line,) = bridge.downlinks
    checkpoint(line.checkpoint, ENDS, done=2)
    Identity("commands", "plant-7.commands", query="q").save(line.gateway.state_dir)
    assert list(DownlinkQuery(bridge, line).unreported({})) == []


@pytest.mark.parametrize("guarantee", ["at_least_once", "at_most_once"])
def test_the_way_up_tells_of_letters_that_nobody_heard_of(tmp_path: Path, guarantee: str) -> None:
    """The bridge was killed after batch 1 was committed, in the middle of batch 2."""
    text = GOOD.replace(
        'name = "telemetry"', f'name = "telemetry"\nguarantee = "{guarantee}"\ndead_letter_topic = "dead"'
    )
    bridge = read(text, tmp_path)
    (line,) = bridge.uplinks
    query = UplinkQuery(bridge, line)
    place = checkpoint(
        line.checkpoint, [{"gateways": {"g": {"journal": "j", "offset": n}}, "tick": 0} for n in (10, 20, 30)], 2
    )
    Identity("telemetry", "plant-7.telemetry", query="q").save(line.gateway.state_dir)
    for batch, letters in enumerate((1, 2, 4)):
        noted(Checkpoint(str(place)), batch, letters)
    heard = {
        "batch": 0,
        "spans": {"j": (0, 10)},
        "query": "q",
        "rows": 10,
    }
    counts = UplinkCounts().add(query._with_the_sink(heard))
    for _ in range(2):
        for report in query.unreported({}):
            counts = counts.add(report)
    assert (counts.offsets, counts.rows, counts.missed, counts.dead_lettered) == (20, 10, 10, 3)
    assert counts.agree
    Identity("telemetry", "plant-7.telemetry", query="another").save(line.gateway.state_dir)
    assert list(query.unreported({})) == []


def test_the_way_up_tells_of_a_batch_that_was_given_up_and_that_nobody_heard_of(tmp_path: Path) -> None:
    """The JVM was killed in batch 1, the driver after that had been served empty: its rows are not in Kafka."""
    bridge = read(GOOD.replace('name = "telemetry"', 'name = "telemetry"\nguarantee = "at_most_once"'), tmp_path)
    (line,) = bridge.uplinks
    query = UplinkQuery(bridge, line)
    ends = [{"gateways": {"g": {"journal": "j", "offset": n}}, "tick": 0} for n in (10, 20, 30)]
    logs = Checkpoint(str(checkpoint(line.checkpoint, ends, 3)))
    Identity("telemetry", "plant-7.telemetry", query="q").save(line.gateway.state_dir)
    counts = UplinkCounts().add({"batch": 0, "spans": {"j": (0, 10)}, "query": "q", "rows": 10})
    tally.note_empty(logs, 1, empty=True)
    for _ in range(2):
        for report in query.unreported({}):
            counts = counts.add(report)
    assert (counts.offsets, counts.rows, counts.missed, counts.skipped) == (30, 10, 10, 10)
    assert counts.agree
