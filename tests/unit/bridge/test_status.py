"""What `towline status` advises."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import pytest

from towline.bridge.runtime import state
from towline.bridge.runtime.state import BridgeState
from towline.bridge.runtime.status import EXIT_UNKNOWN, advice, collect_status, exit_code, render
from towline.gateway.identity import record_client_session, record_session_end
from towline.version import release, revision, version

LINE: Final[dict[str, Any]] = {
    "direction": "up",
    "gateway": {},
    "gateway_running": True,
    "query": "running",
    "gateway_error": None,
    "query_error": None,
    "account": None,
    "fallback": 0,
}


def test_messages_that_are_not_as_promised_are_told() -> None:
    gateway = {"packets_too_large": 1_200, "too_many_properties": 3, "lower_qos": 7}
    line = {**LINE, "gateway": gateway}
    large, crowded, lower = advice(line, running=True)
    assert large.startswith("larger than max_packet_bytes: 1,200 messages.")
    assert crowded.startswith("with more than 1,000 properties: 3 messages.")
    assert lower.startswith("published with a lower QoS than the guarantee needs: 7 messages.")
    assert not list(advice(LINE, running=True))


def test_the_worst_line_stands_first_and_each_has_its_mark(tmp_path: Path) -> None:
    names = ["well", "looked at", "wrong", "stopped", "without gateway"]
    BridgeState("plant", tmp_path, dict.fromkeys(names, "up")).save()
    current = collect_status(tmp_path)
    for line in current["lines"].values():
        line.update(LINE, account={"adds_up": True}, sentence="received 1", gateway={"state": "online"})
    lines = current["lines"]
    lines["looked at"]["gateway"] = {"state": "online", "held_back": "journal full"}
    lines["wrong"]["account"] = {"adds_up": False}
    lines["stopped"].update(query="stopped", query_error="x   [TL-K13]")
    lines["without gateway"].update(gateway=None, gateway_error="y   [TL-G02]")
    text = render(current)
    assert re.findall(r'(.) line "([\w ]+)"', text) == [
        ("✗", "wrong"),
        ("✗", "stopped"),
        ("✗", "without gateway"),
        ("!", "looked at"),
        ("▸", "well"),
    ]
    assert '✗ line "stopped"   stopped\n  ! x   [TL-K13]\n  account   received 1\n  session   online' in text


def test_a_file_that_was_changed_while_it_runs_is_told(tmp_path: Path) -> None:
    file = tmp_path / "bridge.toml"
    file.write_text('name = "plant"')
    BridgeState("plant", tmp_path, {"telemetry": "up"}, file=file).save()
    same = collect_status(tmp_path, ["telemetry"])
    assert not same["file_changed"]
    assert "has changed" not in render(same)
    file.write_text('name = "other"')
    current = collect_status(tmp_path, ["telemetryX"])
    assert current["file_changed"]
    assert exit_code(current) == EXIT_UNKNOWN
    text = render(current)
    assert (current["version"], current["revision"]) == (version(), revision())
    assert f"\n  version   {release()}\n" in text
    older = render({**current, "version": "0.1.9"})
    assert f"version   0.1.9 (revision {revision()}); this command is {release()}\n" in older
    changed = "has changed since it was read: the running version is the old one. Apply it with towline reload"
    assert f"! {file} {changed}" in text
    assert '! line "telemetryX"   not in the running bridge' in text
    assert "Start towline run." not in text
    assert not collect_status(tmp_path, None)["lines"].keys() - {"telemetry"}
    BridgeState("plant", tmp_path, {"telemetry": "up"}, file=file).save(has_ended=True)
    assert not collect_status(tmp_path, ["telemetry"])["file_changed"], "nothing runs"


def test_one_error_of_gateway_and_query_is_told_once() -> None:
    line = {**LINE, "gateway_error": "no token   [TL-G40]", "query_error": "no token   [TL-G40]"}
    assert list(advice(line, running=True)) == ["no token   [TL-G40]"]


def test_a_drained_gateway_is_not_told_to_have_a_session(tmp_path: Path) -> None:
    wanted = {"telemetry": {"": "plant-telemetry"}}
    directory = tmp_path / "telemetry"
    directory.mkdir()
    record_client_session(directory, "plant-telemetry", "mqtt://b:1883")
    before = render(collect_status(tmp_path, ["telemetry"], wanted))
    assert "the broker queues what it can" in before
    record_session_end(directory, "plant-telemetry", "drained")
    for clients in (wanted, None):
        drained = render(collect_status(tmp_path, ["telemetry"], clients))
        assert "! it is drained: it receives nothing, and the broker has no session for it." in drained
        assert "queues what it can" not in drained
    record_client_session(directory, "plant-telemetry", "mqtt://b:1883")
    assert "drained" not in render(collect_status(tmp_path, ["telemetry"], wanted)), "it takes part again"
    other = render(collect_status(tmp_path, ["telemetry"], {"telemetry": {"": "plant-2-telemetry"}}))
    assert "drained" not in other


def test_a_bridge_that_is_silent_is_not_to_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    BridgeState("plant", tmp_path, {"telemetry": "up"}).save()
    monkeypatch.setattr(state, "MAX_STATUS_AGE_S", -1.0)
    text = render(collect_status(tmp_path, ["telemetry"]))
    assert "there, and silent" in text
    assert "Start towline run" not in text


@pytest.mark.parametrize("moment", [1e300, -1e300, float("nan"), float("inf"), "soon", [1]])
def test_a_time_that_no_calendar_has_does_not_end_the_command(tmp_path: Path, moment: Any) -> None:
    """bridge.json is not synced: after a power failure anything may stand there."""
    BridgeState("plant", tmp_path, {}, file=tmp_path / "bridge.toml").save()
    text = render({**collect_status(tmp_path, []), "running": False, "silent": False, "updated": moment})
    assert "last update at an unknown time" in text
