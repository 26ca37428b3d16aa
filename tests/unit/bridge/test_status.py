"""What `towline status` advises."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import pytest

from towline.bridge.runtime import state
from towline.bridge.runtime.state import BridgeState
from towline.bridge.runtime.status import EXIT_UNKNOWN, EXIT_WRONG, advice, collect_status, exit_code, render
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
}

#: Status of a gateway.
TROUBLED = {
    "held_back": "journal full",
    "sessions_lost": 1,
    "session_lost": {"do": "Ask it."},
    "receipts": {"forged": 4},
}


@pytest.mark.parametrize(
    ("change", "texts"),
    [
        ({}, []),
        ({"gateway_error": "no token   [TL-G40]", "query_error": "no token   [TL-G40]"}, ["no token   [TL-G40]"]),
        (
            {"gateway": {"packets_too_large": 1_200, "too_many_properties": 3, "lower_qos": 1}},
            [
                "larger than max_packet_bytes: 1,200 messages.",
                "with more than 1,000 properties: 3 messages.",
                "published with a lower QoS than the guarantee needs: 1 message.",
            ],
        ),
        (
            {"gateway": {"gateways": {"g1": TROUBLED, "g2": {**TROUBLED, "at": "/g2", "away_since": 1.0}}}},
            [
                "gateway g2 unavailable since ",
                "gateway g1: receiving is throttled (journal full).",
                "gateway g1: the broker lost this client's session (once), and all messages queued in it. Ask it.",
                "gateway g1: with marks of a publisher but without its key: 4 messages.",
                "gateway g2: the broker lost this client's session (once), and all messages queued in it. Ask it.",
                "gateway g2: with marks of a publisher but without its key: 4 messages.",
            ],
        ),
        (
            {"gateway": {"outbox": {"refused": 2}}},
            ["refused by the broker permanently: 2 messages. See towline refused"],
        ),
        (
            {"gateway_running": False, "gateways": ["/g1", "/g2"]},
            ["none of its gateways answers: /g1, /g2. Their messages wait there."],
        ),
    ],
)
def test_messages_that_are_not_as_promised_are_told(change: dict[str, Any], texts: list[str]) -> None:
    found = [*advice({**LINE, **change}, running=True)]
    assert len(found) == len(texts)
    assert all(said.startswith(text) for said, text in zip(found, texts, strict=True)), found


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
    assert exit_code(current) == EXIT_WRONG, "of one line among others"
    assert re.findall(r'(.) line "([\w ]+)"', render(current)) == [
        ("✗", "wrong"),
        ("✗", "stopped"),
        ("✗", "without gateway"),
        ("!", "looked at"),
        ("▸", "well"),
    ]


def test_a_file_that_was_changed_while_it_runs_is_told(tmp_path: Path) -> None:
    file = tmp_path / "bridge.toml"
    file.write_text('name = "plant"')
    BridgeState("plant", tmp_path, {"telemetry": "up"}, file=file).save()
    assert "has changed" not in render(collect_status(tmp_path, ["telemetry"]))
    file.write_text('name = "other"')
    current = collect_status(tmp_path, ["telemetryX"])
    assert (current["file_changed"], exit_code(current)) == (True, EXIT_UNKNOWN)
    assert (current["version"], current["revision"]) == (version(), revision())
    text = render(current)
    assert f"\n  version   {release()}\n" in text
    older = render({**current, "version": "0.1.9"})
    assert f"version   0.1.9 (revision {revision()}); this command is {release()}\n" in older
    said = "has changed since it was read: the running version is the old one. Apply it with towline reload"
    assert f"! {file} {said}" in text
    assert '! line "telemetryX"   not in the running bridge' in text
    assert "Start towline run." not in text
    BridgeState("plant", tmp_path, {"telemetry": "up"}, file=file).save(has_ended=True)
    assert not collect_status(tmp_path, ["telemetry"])["file_changed"], "nothing runs"


def test_a_drained_gateway_is_not_told_to_have_a_session(tmp_path: Path) -> None:
    directory, ids = tmp_path / "telemetry", {"telemetry": {"": "plant-telemetry"}}
    directory.mkdir()

    def drained(client_ids: dict[str, dict[str, str]] | None = ids) -> bool:
        text = render(collect_status(tmp_path, ["telemetry"], client_ids))
        said = "! it is drained: it receives nothing, and the broker has no session for it." in text
        assert said is not ("the broker queues what it can" in text)
        return said

    record_client_session(directory, "plant-telemetry", "mqtt://b:1883")
    assert not drained()
    record_session_end(directory, "plant-telemetry", "drained")
    assert (drained(), drained(None), drained({"telemetry": {"": "plant-2-telemetry"}})) == (True, True, False)
    record_client_session(directory, "plant-telemetry", "mqtt://b:1883")
    assert not drained(), "it takes part again"


@pytest.mark.parametrize("moment", [1e300, float("nan"), "soon", [1]])
def test_a_bridge_that_is_silent_is_told_whenever_it_was_heard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: Any
) -> None:
    """bridge.json is not synced: after a power failure anything may stand there."""
    BridgeState("plant", tmp_path, {"telemetry": "up"}).save()
    monkeypatch.setattr(state, "MAX_STATUS_AGE_S", -1.0)
    text = render({**collect_status(tmp_path, ["telemetry"]), "updated": moment})
    assert re.search("there, and silent.*last update at an unknown time", text)
    assert "Start towline run" not in text
