"""What the outbox says is done, and what the broker has acknowledged: two counts, in the same frames [I11]."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mqtt5 import PubAckReasonCode

from tests.unit.delivery.test_outbound import Line, outbox_rows
from towline.bridge.lines.account import LineNotes, downlink_account
from towline.delivery.outbound import outbox_counts
from towline.mqtt.events import ConnectionLost


def verdict(outbox: dict[str, Any]) -> str:
    return downlink_account(LineNotes(), {"outbox": outbox}).sentence()


@pytest.mark.parametrize(
    ("qos", "reason", "counts"),
    [
        (1, PubAckReasonCode.SUCCESS, (5, 5, 0, 0)),
        (0, PubAckReasonCode.SUCCESS, (5, 0, 5, 0)),  # nobody answers
        (1, PubAckReasonCode.NOT_AUTHORIZED, (0, 0, 0, 5)),
    ],
)
def test_acknowledgements_are_counted_beside_the_numbers(
    tmp_path: Path, qos: int, reason: PubAckReasonCode, counts: tuple[int, ...]
) -> None:
    line = Line(tmp_path, 5, qos=qos)
    line.connect()
    line.answer(reason)
    line.sender.turn()
    status = line.sender.status()
    assert tuple(status[name] for name in ("delivered", "acknowledged", "sent", "refused")) == counts
    assert "adds up ✓" in verdict(status)


def test_a_message_that_is_done_and_that_no_broker_acknowledged_is_reported(tmp_path: Path) -> None:
    """The planted fault: a row is done, and its acknowledgement is in no count."""
    line = Line(tmp_path, 5)
    line.connect(window=4)
    line.outbox.mark_done((4,))
    line.answer()
    assert ("does not add up ✗ (the outbox says 5 delivered · the broker has acknowledged 4)") in verdict(
        line.sender.status()
    )


@given(st.lists(st.sampled_from(["append", "connect", "answer", "refuse", "lost", "flush", "kill"]), max_size=12))
def test_whatever_a_crash_takes_both_counts_are_of_one_moment(steps: list[str]) -> None:
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place)
        line = Line(directory, 3)
        for step in steps:
            line = _step(line, step, directory)
            found = outbox_counts(line.outbox)
            assert found["delivered"] == sum(found[name] for name in ("acknowledged", "sent"))
        line.outbox.close()


def _step(line: Line, step: str, directory: Path) -> Line:
    online = line.session.state.name == "ONLINE"
    if step == "append":
        line.outbox.append_batch(outbox_rows({"topic": "d0", "payload": b"7", "qos": 1}))
        line.sender.turn()
    elif step == "connect" and not online:
        line.connect()
    elif step == "answer" and online:
        line.answer()
    elif step == "refuse" and online:
        line.answer(PubAckReasonCode.NOT_AUTHORIZED)
    elif step == "lost" and online:
        line.end(ConnectionLost())
    elif step == "flush":
        line.sender.flush()
    elif step == "kill":  # what was not flushed is forgotten by both
        line.outbox.close()
        line.sender.refused_messages.close()
        return Line(directory, 0)
    return line
