"""What ``/lines`` of a bridge's monitor says and does, and for whom."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.bridge.test_config import GOOD, read, told
from tests.unit.monitor.test_server import Served
from towline.bridge.runtime.state import PAUSED_FILE, RESTART_FILE, BridgeState, consume_request, read_pause
from towline.bridge.runtime.status import collect_bridge_status
from towline.errors import ConfigError
from towline.gateway.access import TokenFile
from towline.monitor import server
from towline.monitor.lines import BridgeRoutes
from towline.monitor.server import serve
from towline.monitor.serving import bridge_endpoint, serve_bridge
from towline.monitor.sessions import SessionStore

TOKEN = "0123456789abcdef"  # noqa: S105
MONITOR = '\n[monitor]\nlisten = "127.0.0.1:0"\ntoken_file = "token"\n'


class Bridged(Served):
    """The monitor of a bridge that a test plays."""

    def __init__(self, port: int, directory: Path, state: BridgeState) -> None:
        super().__init__(port)
        self.line, self.state = directory / "state" / "telemetry", state

    def post(self, path: str, token: str = TOKEN) -> tuple[int, str]:
        return self.get(path, "POST", **({"Authorization": f"Bearer {token}"} if token else {}))


@pytest.fixture
def bridged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bridged]:
    monkeypatch.setattr(server, "_ACCEPT_INTERVAL_S", 0.0)
    (tmp_path / "token").write_text(f"# of the operator\n{TOKEN}\n")
    (tmp_path / "token").chmod(0o600)
    bridge = read(GOOD + MONITOR, tmp_path)
    bridge.state_dir.mkdir(mode=0o700)
    state = BridgeState("plant-7", bridge.state_dir, {"telemetry": "up"}, file=bridge.file)
    state.lines["telemetry"].query = "running"
    state.save()
    sessions = SessionStore(TokenFile(tmp_path / "token"))
    with serve(BridgeRoutes(bridge, sessions, state.add_event).routes(), "127.0.0.1:0") as port:
        yield Bridged(port, tmp_path, state)


def test_the_status_is_that_of_the_command(bridged: Bridged, tmp_path: Path) -> None:
    """Of the file as it is now, as `towline status` reads it."""
    status, text = bridged.get("/lines")
    bridge = read(GOOD + MONITOR, tmp_path)
    assert (status, json.loads(text)) == (200, json.loads(json.dumps(collect_bridge_status(bridge))))
    bridge.file.write_text(GOOD.replace('name = "telemetry"', 'name = "other"'))
    assert [*json.loads(bridged.get("/lines")[1])["lines"]] == ["other"]
    bridge.file.write_text("name = ")
    status, text = bridged.get("/lines")
    assert (status, text.endswith("[TL-C11]\n")) == (503, True), text


def test_a_line_is_paused_resumed_restarted(bridged: Bridged) -> None:
    running = '{"line": "telemetry", "state": "running"}\n'
    assert bridged.post("/lines/telemetry/pause") == (202, running)
    pause = (bridged.line / PAUSED_FILE).read_text()
    assert json.loads(pause)["by"] == "[monitor]"
    assert bridged.post("/lines/telemetry/pause") == (202, running), "twice is once"
    assert (bridged.line / PAUSED_FILE).read_text() == pause
    assert bridged.post("/lines/telemetry/resume") == (202, running)
    assert read_pause(bridged.line) is None
    assert bridged.post("/lines/telemetry/restart") == (202, running)
    assert consume_request(bridged.line / RESTART_FILE)


def test_what_is_no_request_is_none(bridged: Bridged) -> None:
    status, text = bridged.post("/lines/telemetri/pause")
    assert (status, text) == (404, '[monitor]: no line is named "telemetri". Did you mean "telemetry"?   [TL-C73]\n')
    assert bridged.post("/lines/%1b%5b2J/pause")[1].isprintable() is False  # its line feed alone
    assert "\x1b" not in bridged.post("/lines/%1b%5b2J/pause")[1]
    assert bridged.post("/lines/../pause")[0] == bridged.post("/lines/%2e%2e/pause")[0] == 404
    assert bridged.get("/lines/telemetry/pause")[0] == bridged.post("/lines")[0] == 405
    assert bridged.post("/lines/telemetry/retire")[0] == bridged.post("/lines/telemetry")[0] == 404
    assert not bridged.line.parent.parent.joinpath("paused").exists()


def test_a_wrong_token_is_refused_and_logged_once(bridged: Bridged) -> None:
    for token in ("wrong-wrong-wrong", TOKEN[:-1], f"{TOKEN} {TOKEN}", "é", ""):
        status, text = bridged.post("/lines/telemetry/pause", token.encode().decode("latin-1"))
        assert (status, text.endswith("names.   [TL-B74]\n")) == (401, True)
    basic = {"Authorization": f"Basic {TOKEN}"}
    answer, _ = bridged.answer("/lines/telemetry/pause", "POST", **basic)
    assert (answer.status, answer.headers["WWW-Authenticate"]) == (401, "Bearer")
    assert bridged.post("/lines/telemetri/pause", "wrong-wrong-wrong")[0] == 401, "names are not tried either"
    assert read_pause(bridged.line) is None
    assert bridged.state.take_events() == ["[monitor]: requests refused that had no token of token_file: 1   [TL-B74]"]


def test_without_a_file_of_tokens_nobody_is_let_in(tmp_path: Path) -> None:
    bridge = read(GOOD + '[monitor]\nlisten = "0"\n', tmp_path)
    assert bridge.monitor.listen == "127.0.0.1:0"
    with serve_bridge(bridge, "0", str, has_page=False) as port:
        status, text = Served(port).get("/lines/telemetry/pause", "POST", Authorization=f"Bearer {TOKEN}")
        assert (status, text.startswith("[monitor]: token_file is not set"), "[TL-B73]" in text) == (403, True, True)


def test_a_file_of_tokens_that_cant_be_used_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "token").chmod(0o644)
    (line,) = told(GOOD + MONITOR, tmp_path)
    assert line.startswith("bridge.toml:")
    assert "[monitor]: token_file: the file of tokens: every user of this machine may read or write it." in line
    assert TOKEN not in line


def test_who_may_not_read_the_tokens_reads_the_file_and_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`towline status` of another user needs the file, and not its tokens; the start does."""
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "token").chmod(0o644)
    monkeypatch.setattr("os.access", lambda *_: False)
    bridge = read(GOOD + MONITOR, tmp_path)
    with pytest.raises(ConfigError, match=r"token: the file of tokens.*TL-C98"), bridge_endpoint(bridge, None):
        pass
