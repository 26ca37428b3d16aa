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

PROPERTIES = {
    "retain": True,
    "message_expiry_seconds": 30,
    "content_type": "text/plain",
    "correlation_data": b"\xff",
    "user_properties": [{"key": "k", "value": "v\n"}, {"key": "k", "value": ""}],
}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A state directory with four messages, of which two were refused."""
    directory = tmp_path / "commands"
    outbox = Outbox.open(directory / "outbox", schema=OUTBOX_SCHEMA)
    topics = ["a", "esc\x1b[2J\nnext", "b", "c"]
    outbox.append_batch(
        add_arrival(
            rows_from_messages([{"topic": topic, "payload": b"12", "qos": 1, **PROPERTIES} for topic in topics]),
            Timestamp(10**15),
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


def test_one_message_is_shown_whole(capsys: pytest.CaptureFixture[str], place: Path) -> None:
    code, out, _ = ran(capsys, "refused", "show", str(place), "--at", "0", "--json")
    message = json.loads(out)
    assert (code, message["topic"], message["line"]) == (0, "esc\x1b[2J\nnext", "commands")
    assert message["payload"] == {"bytes": 2, "text": "12", "base64": "MTI=", "is_json": True, "truncated": False}
    assert (message["retain"], message["expiry_s"]) == (True, 30)
    assert message["properties"] == [
        ["content_type", "text/plain", "dGV4dC9wbGFpbg=="],
        ["correlation_data", None, "/w=="],
        ["k", "v\n", "dgo="],
        ["k", "", ""],
    ]
    code, out, _ = ran(capsys, "refused", "show", str(place), "--at", "1")
    assert code == 0
    assert "topic             b\n" in out
    assert "properties        k = v\\x0a\n" in out
    assert out.endswith("payload           2 B\n  12\n")
    assert ran(capsys, "refused", "replay", str(place), "--limit", "1")[0] == 0
    for moved_or_never in ("0", "2"):
        code, out, err = ran(capsys, "refused", "show", str(place), "--at", moved_or_never)
        assert (code, out, err.count("\n"), err.endswith("[TL-C76]\n")) == (2, "", 1, True)


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
