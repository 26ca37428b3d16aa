"""What is asked of one line: files in its state directory that outlive whoever wrote them."""

from __future__ import annotations

import getpass
import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.unit.bridge.test_config import GOOD, read
from tests.unit.monitor.knowing import UP_STATUS, a_bridge
from towline import files
from towline.bridge.config.model import Bridge
from towline.bridge.runtime.state import (
    PAUSED_FILE,
    BridgeState,
    apply_pause,
    pause,
    read_pause,
    resume,
)
from towline.bridge.runtime.status import collect_status, render
from towline.errors import ConfigError, GatewayError


def test_a_pause_stays_until_it_is_ended(tmp_path: Path) -> None:
    """Of a line that never ran, too; who asks twice changes nothing."""
    line = tmp_path / "state" / "line"
    resume(line)
    assert not line.exists()
    pause(line)
    first = read_pause(line)
    assert first is not None
    assert (first["by"], abs(first["at"] - time.time()) < 60) == (getpass.getuser(), True)
    pause(line, by="monitor")
    assert read_pause(line) == first
    assert (line / PAUSED_FILE).stat().st_mode & 0o077 == 0
    for _ in range(2):
        resume(line)
        assert read_pause(line) is None
    pause(line, by="monitor")
    assert (read_pause(line) or first)["by"] == "monitor"


@pytest.mark.parametrize("content", ["", "[]", '{"at": "x", "by": 1}', "\udcff"])
def test_a_pause_that_says_nothing_is_one(tmp_path: Path, content: str) -> None:
    (tmp_path / PAUSED_FILE).write_bytes(content.encode(errors="surrogateescape"))
    assert read_pause(tmp_path) == {"at": 0.0, "by": ""}
    resume(tmp_path)
    assert read_pause(tmp_path) is None


def told(bridge: Bridge, name: str, **view: Any) -> None:
    """What the bridge that runs says of a line: this process."""
    state = BridgeState("plant", bridge.state_dir, {one.name: one.direction for one in bridge.lines})
    for key, value in view.items():
        setattr(state.lines[name], key, value)
    state.save()


def ran_by(bridge: Bridge, name: str, *, pausing: bool = True) -> str:
    return apply_pause(bridge, name, pausing=pausing, timeout_s=0.3)


def test_who_pauses_is_told_what_becomes_of_messages(tmp_path: Path) -> None:
    down = '[[downlink]]\nname = "back"\nfrom = "commands"\ntopic = "c/{key}"\n'
    bridge = read(GOOD + down, tmp_path)
    name = bridge.uplinks[0].name
    nobody = f'line "{name}": {{}}; no bridge runs, and the next start keeps this'
    assert ran_by(bridge, name) == nobody.format("paused")
    assert ran_by(bridge, name, pausing=False) == nobody.format("resumed")
    told(bridge, name, query="running")
    with pytest.raises(GatewayError, match=r"not paused after 0 s: its query is running. It takes effect when.*TL-B66"):
        ran_by(bridge, name)
    assert read_pause(bridge.state_dir / name), "it is asked for"
    measured = {"inbox": {"room_left": 3_600_000_000, "bytes_waiting": 40_000}}
    status = {"witnesses": 1, "ack_after": "journal", "waiting": 40, "measured": measured}
    told(bridge, name, query="paused", status=status)
    assert ran_by(bridge, name) == f'line "{name}": paused: receiving continues, with disk space for 3.6 GB'
    file = bridge.state_dir / "bridge.json"
    state = json.loads(file.read_text())
    state["lines"][name]["rate_in"] = 100.0
    file.write_text(json.dumps(state))
    assert ran_by(bridge, name).endswith("GB; at 100 messages/s this lasts 10 h")
    told(bridge, name, query="paused", status={**status, "ack_after": "kafka"})
    assert ran_by(bridge, name).endswith("are not acknowledged, and stay in the broker's queue")
    told(bridge, "back", query="paused")
    assert ran_by(bridge, "back").endswith("the outbox is delivered, and new records stay in Kafka")
    told(bridge, name, query="starting")
    assert ran_by(bridge, name, pausing=False) == f'line "{name}": resumed'
    with pytest.raises(ConfigError, match="TL-C73"):
        ran_by(bridge, "nobody")


def test_a_line_that_is_paused_is_well_and_named(tmp_path: Path) -> None:
    bridge = read(GOOD, tmp_path)
    name = bridge.uplinks[0].name
    pause(bridge.state_dir / name, by="maria")
    told(bridge, name, query="paused")
    status = collect_status(bridge.state_dir, [name])
    assert "  ! paused by maria " in render(status)
    assert ": new messages wait until towline resume." in render(status)
    waiting: dict[str, Any] = {"account": None, "lag_s": 1000.0, "status": UP_STATUS}
    problems = [bool([*a_bridge(**waiting, query=query).problems()]) for query in ("paused", "running")]
    assert problems == [False, True]


def test_a_disk_that_takes_no_request_is_told_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "replace_durably", full)
    with pytest.raises(GatewayError, match=r"the request can't be written \(no space left on device\).*TL-B64"):
        pause(tmp_path)
    assert read_pause(tmp_path) is None
