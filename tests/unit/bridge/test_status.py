"""What `towline status` advises."""

from __future__ import annotations

from pathlib import Path

from towline.bridge.runtime.state import BridgeState
from towline.bridge.runtime.status import NOT_KNOWN, advice, code_of, collect, render


def test_messages_that_are_not_as_promised_are_told() -> None:
    gateway = {"packets_too_large": 1_200, "too_many_properties": 3, "lower_qos": 7}
    line = {
        "direction": "up",
        "gateway": gateway,
        "gateway_running": True,
        "query": "running",
        "gateway_error": None,
        "query_error": None,
        "account": None,
        "fallback": 0,
    }
    large, crowded, lower = advice(line, running=True)
    assert large.startswith("larger than max_packet_bytes: 1,200 messages.")
    assert crowded.startswith("with more than 1,000 properties: 3 messages.")
    assert lower.startswith("published with a lower QoS than the promise needs: 7 messages.")
    assert not list(advice({**line, "gateway": {}}, running=True))


def test_a_file_that_was_changed_while_it_runs_is_told(tmp_path: Path) -> None:
    file = tmp_path / "bridge.toml"
    file.write_text('name = "plant"')
    BridgeState("plant", tmp_path, {"telemetry": "up"}, file=file).save()
    same = collect(tmp_path, ["telemetry"])
    assert not same["file_changed"]
    assert "has changed" not in render(same)
    file.write_text('name = "other"')
    current = collect(tmp_path, ["telemetryX"])
    assert current["file_changed"]
    assert code_of(current) == NOT_KNOWN
    text = render(current)
    assert f"! {file} has changed since the start: what runs is what it said then. Start towline run again." in text
    assert 'line "telemetryX"      query not in the running bridge' in text
    assert "Start towline run." not in text
    assert not collect(tmp_path, None)["lines"].keys() - {"telemetry"}
    BridgeState("plant", tmp_path, {"telemetry": "up"}, file=file).save(ended=True)
    assert not collect(tmp_path, ["telemetry"])["file_changed"], "nothing runs"
