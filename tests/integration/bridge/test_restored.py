"""A journal that is not its checkpoint's: the line stops before anything is taken in, though Kafka is away [I14]."""

from __future__ import annotations

import json

import pytest

from tests.integration.bridge.running import Running
from tests.integration.bridge.test_delivery_semantics import online, write
from tests.unit.gateway.serving import rows
from towline.bridge.lines.identity import Identity
from towline.gateway.identity import JournalPosition
from towline.journal import Journal, Limits
from towline.schema import ROW_SCHEMA
from towline.spark.offsets import SourceOffset
from towline_prove.devstack import Mosquitto

pytestmark = pytest.mark.spark

NOWHERE = "127.0.0.1:1"


def left_behind(bridge: Running, offset: int) -> None:
    """A line that ended at `offset`, and an older copy of its journal with ten rows."""
    with Journal.open(bridge.state_dir / "inbox", schema=ROW_SCHEMA, limits=Limits(min_free_bytes=0)) as journal:
        journal.append(rows(journal.end, 10 - journal.end))
        place = SourceOffset((JournalPosition("line", journal.journal_id, offset, "0badf00d"),))
    Identity("line", "tests.line", query="q", parallelism=1).save(bridge.state_dir)
    offsets = bridge.state_dir / "checkpoint" / "offsets"
    offsets.mkdir(parents=True, exist_ok=True)
    (offsets.parent / "metadata").write_text('{"id":"q"}')
    (offsets / "0").write_text(f'v1\n{{"batchWatermarkMs":0}}\n{json.dumps(place.to_json())}')


def test_an_older_copy_stops_the_line_before_intake(bridge: Running, mosquitto: Mosquitto) -> None:
    write(bridge, mosquitto, NOWHERE, 'guarantee = "exactly_once"', 'from = "t/#"\ntopic = "x"')
    for offset, words in (
        (15, "at offset 15, the journal ends at 10"),
        (10, "an older copy that was written to since"),
    ):
        left_behind(bridge, offset)
        bridge.start()
        assert bridge.ended() == 1
        assert words in bridge.out
        assert "[TL-B24]" in bridge.out
    assert "tests-line" not in mosquitto.log.read_text(), "no gateway came to the broker"

    assert "is reset" in bridge.command("reset", "line")
    bridge.start()
    online(bridge)
    assert bridge.line()["gateway"]["journaled"] == 10
    assert bridge.interrupt() == 0
