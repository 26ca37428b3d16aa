"""`towline refused` without a gateway: a Publisher's directory, or that of a gateway that has ended."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.cli.test_main import ran
from towline.delivery.outrows import add_arrival, rows_from_messages
from towline.delivery.refused import RefusedMessages
from towline.journal import Outbox
from towline.mqtt.reasons import CONNECTION_CUT
from towline.schema import OUTBOX_SCHEMA
from towline.timing import Timestamp


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A state directory with four messages, of which two were refused."""
    directory = tmp_path / "commands"
    outbox = Outbox.open(directory / "outbox", schema=OUTBOX_SCHEMA)
    topics = ["a", "esc\x1b[2J\nnext", "b", "c"]
    outbox.append_batch(
        add_arrival(
            rows_from_messages([{"topic": topic, "payload": b"12", "qos": 1} for topic in topics]), Timestamp(10**15)
        )
    )
    refused = RefusedMessages(directory / "refused", outbox)
    messages = [(next(iter(outbox.read(n, n + 1))), n, reason) for n, reason in ((1, CONNECTION_CUT), (2, 0x87))]
    for numbers in refused.store(messages):
        outbox.mark_done(numbers)
    outbox.mark_done([0, 3])
    outbox.flush()
    refused.close()
    outbox.close()
    return directory


def test_show_escapes_what_comes_from_outside(capsys: pytest.CaptureFixture[str], place: Path) -> None:
    code, out, err = ran(capsys, "refused", "show", str(place))
    assert (code, err) == (0, "")
    assert "\x1b" not in out
    assert "esc\\x1b[2J\\x0anext" in out
    assert "1  not authorized (0x87)   commands" in out
    code, out, _ = ran(capsys, "refused", "show", str(place), "--json", "--limit", "1")
    assert [row["topic"] for row in json.loads(out)["first"]] == ["esc\x1b[2J\nnext"]
    assert [row["messages"] for row in json.loads(out)["kept"]] == [1, 1]


def test_replay_puts_them_back_once(capsys: pytest.CaptureFixture[str], place: Path) -> None:
    code, out, _ = ran(capsys, "refused", "replay", str(place), "--limit", "1", "--json")
    assert (code, json.loads(out)) == (0, {"replay": {"commands": 1}})
    code, out, _ = ran(capsys, "refused", "replay", str(place))
    assert (code, out.split()[0]) == (0, "1")
    code, out, _ = ran(capsys, "refused", "replay", str(place))
    assert (code, out) == (0, "no refused messages\n")
    outbox = Outbox.open(place / "outbox", schema=OUTBOX_SCHEMA)
    topics = [topic for batch in outbox.read(4, outbox.end) for topic in batch.column("topic").to_pylist()]
    assert topics == ["esc\x1b[2J\nnext", "b"]
    outbox.close()


def test_drop_asks_first(capsys: pytest.CaptureFixture[str], place: Path) -> None:
    code, *_ = ran(capsys, "refused", "drop", str(place))
    assert code == 1
    code, out, _ = ran(capsys, "refused", "drop", str(place), "--yes")
    assert (code, out.split()[:2]) == (0, ["2", "dropped"])
    assert ran(capsys, "refused", "show", str(place))[1] == "no refused messages\n"
