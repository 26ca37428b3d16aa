"""Which batches are counted again, and which records each of them had."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest

from tests.unit.bridge.test_config import GOOD, read
from towline.bridge.downlink.account import DownlinkCounts
from towline.bridge.downlink.query import between, uncounted
from towline.bridge.lines.evidence import read_checkpoint
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
def test_committed_and_not_counted(tmp_path: Path, counts: DownlinkCounts, numbers: list[int]) -> None:
    place = checkpoint(tmp_path, ENDS, done=2)
    batches = list(uncounted(place, read_checkpoint(place), counts))
    assert [batch for batch, _, _ in batches] == numbers
    wanted = [{"t": {"0": 5}}, *ENDS]
    assert all((before, after) == (wanted[batch], wanted[batch + 1]) for batch, before, after in batches)


def test_without_a_commit_or_its_start_nothing_is_counted(tmp_path: Path) -> None:
    place = checkpoint(tmp_path / "a", ENDS, done=0)
    assert list(uncounted(place, read_checkpoint(place), DownlinkCounts())) == []
    place = checkpoint(tmp_path / "b", ENDS, done=2)
    (place / "sources/0/0").unlink()
    assert [batch for batch, _, _ in uncounted(place, read_checkpoint(place), DownlinkCounts())] == [1]


def test_only_the_newest_are_jobs_of_a_start(tmp_path: Path) -> None:
    ends = [{"t": {"0": 10 + n}} for n in range(50)]
    place = checkpoint(tmp_path, ends, done=50)
    numbers = [batch for batch, _, _ in uncounted(place, read_checkpoint(place), DownlinkCounts())]
    assert numbers == list(range(30, 50))


def test_every_partition_is_named_at_both_ends(tmp_path: Path) -> None:
    """A partition that came during the batch was read from its first record."""
    place = checkpoint(tmp_path, ENDS, done=2)
    ((_, before, after),) = uncounted(place, read_checkpoint(place), DownlinkCounts("q", 0))
    assert {name: json.loads(text) for name, text in between(before, after).items()} == {
        "assign": {"t": [0, 1]},
        "startingOffsets": {"t": {"0": 10, "1": -2}},
        "endingOffsets": {"t": {"0": 20, "1": 3}},
        "failOnDataLoss": True,
    }


@pytest.mark.parametrize("guarantee", ["at_least_once", "at_most_once"])
def test_the_way_up_tells_of_letters_that_nobody_heard_of(tmp_path: Path, guarantee: str) -> None:
    """The bridge was killed after batch 1 was committed, in the middle of batch 2."""
    text = GOOD.replace(
        'name = "telemetry"', f'name = "telemetry"\nguarantee = "{guarantee}"\ndead_letter_topic = "dead"'
    )
    bridge = read(text, tmp_path)
    (line,) = bridge.uplinks
    query = UplinkQuery(bridge, line)
    spark: Any = None
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
        for report in query.unreported(spark, {}):
            counts = counts.add(report)
    assert (counts.offsets, counts.rows, counts.missed, counts.dead_lettered) == (20, 10, 10, 3)
    assert counts.agree
    Identity("telemetry", "plant-7.telemetry", query="another").save(line.gateway.state_dir)
    assert list(query.unreported(spark, {})) == []


def test_the_way_up_tells_of_a_batch_that_was_given_up_and_that_nobody_heard_of(tmp_path: Path) -> None:
    """The JVM was killed in batch 1, the driver after that had been served empty: its rows are not in Kafka."""
    bridge = read(GOOD.replace('name = "telemetry"', 'name = "telemetry"\nguarantee = "at_most_once"'), tmp_path)
    (line,) = bridge.uplinks
    query, spark = UplinkQuery(bridge, line), cast("Any", None)
    ends = [{"gateways": {"g": {"journal": "j", "offset": n}}, "tick": 0} for n in (10, 20, 30)]
    logs = Checkpoint(str(checkpoint(line.checkpoint, ends, 3)))
    Identity("telemetry", "plant-7.telemetry", query="q").save(line.gateway.state_dir)
    counts = UplinkCounts().add({"batch": 0, "spans": {"j": (0, 10)}, "query": "q", "rows": 10})
    tally.note_empty(logs, 1, empty=True)
    for _ in range(2):
        for report in query.unreported(spark, {}):
            counts = counts.add(report)
    assert (counts.offsets, counts.rows, counts.missed, counts.skipped) == (30, 10, 10, 10)
    assert counts.agree
