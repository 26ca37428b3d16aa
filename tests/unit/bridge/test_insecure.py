"""What [kafka] gives up is allowed, and shown as insecure: by check and in every status."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from tests.unit.bridge.test_config import GOOD, read
from towline.bridge.runtime.plan import bridge_plan, render
from towline.bridge.runtime.screen import LiveScreen
from towline.bridge.runtime.state import BridgeState
from towline.bridge.runtime.status import collect_status
from towline.bridge.runtime.status import render as render_status
from towline.kafka.clientconfig import insecure_settings

LOOSE = GOOD.replace(
    'bootstrap_servers = "k1:9092"',
    """bootstrap_servers = "k1:9092"
settings = { "security.protocol" = "ssl", "enable.ssl.certificate.verification" = false }""",
)
TOLD = "insecure: [kafka] enable.ssl.certificate.verification=false"


@pytest.mark.parametrize("loose", [True, False])
def test_check_and_every_status_tell(tmp_path: Path, loose: bool) -> None:
    bridge = read(LOOSE if loose else GOOD, tmp_path)
    plan = bridge_plan(bridge)
    assert any(text.startswith(TOLD) for text in plan["warnings"]) is loose
    assert ("topics telemetry   insecure" in render(plan)) is loose
    state = BridgeState(bridge.name, tmp_path, {"telemetry": "up"}, insecure_settings(bridge.kafka.client_settings()))
    state.kafka = "reachable"
    state.save()
    text = render_status(collect_status(tmp_path))
    assert ("kafka reachable (insecure)" in text) is loose
    assert (f"! {TOLD}" in text) is loose
    shown, live = io.StringIO(), LiveScreen()
    live.show(state)
    Console(file=shown, width=200).print(live.live.renderable)
    assert ("kafka reachable (insecure)" in shown.getvalue()) is loose
