"""The steps of a reload in their order, what each that fails leaves behind, and the request for one."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.bridge.test_config import read
from tests.unit.bridge.test_reload import HEAD
from tests.unit.cli.test_main import ran
from tests.unit.gateway.serving import served
from towline.bridge.config.file import parse
from towline.bridge.config.model import Bridge
from towline.bridge.runtime import reload
from towline.bridge.runtime import state as state_module
from towline.bridge.runtime.reload import Reloader
from towline.bridge.runtime.state import (
    APPLIED,
    REFUSED,
    RESTART_FILE,
    UNCHANGED,
    UNDER_WAY,
    BridgeState,
    consume_request,
    read_state,
    request_reload,
)
from towline.bridge.runtime.status import collect_status, render
from towline.errors import ConfigError, GatewayError, KafkaError, TowlineError
from towline.processes import ProcessIdentity

OTHER = '[[uplink]]\nname = "other"\nroute = [{ from = "o/#", topic = "t" }]\n'
NEW = OTHER.replace('"other"', '"new"').replace("o/#", "n/#")
SEVEN = "mqtt = { keep_alive_s = 7 }"


def line(*filters: str, topic: str = "t", own: str = "") -> str:
    routes = ", ".join(f'{{ from = "{one}", topic = "{topic}" }}' for one in filters)
    return f'{HEAD}[[uplink]]\nname = "up"\n{own}\nroute = [{routes}]\n{OTHER}'


class Scene:
    """A bridge whose parts write down what they are asked for; `asked` has each step."""

    def __init__(self, place: Path, monkeypatch: pytest.MonkeyPatch, text: str = line("a/#", "b/#")) -> None:
        self._file = place / "bridge.toml"
        self.asked: list[str] = []
        self.hold_error: ConfigError | None = None
        self.sql_error: ConfigError | None = None
        #: The faults of gateways, by line.
        self.faults: dict[str, TowlineError] = {}
        self.kafka_error: Exception | None = None
        bridge = self.write(text)
        self.state = BridgeState("plant", place, {one.name: "up" for one in bridge.lines}, file=bridge.file)
        self.children: Any = {one.name: self._gateway(one) for one in bridge.lines}
        driver: Any = SimpleNamespace(check_sql=self._judge, hold_queries=self._hold, start_queries=self._take)
        monkeypatch.setattr(reload, "ensure_topics", self._see_to)
        monkeypatch.setattr(reload, "_GATEWAY_TIMEOUT_S", 0.1)
        parts = self.state, driver, self.children, self._gateway, threading.Event()
        self.reloading = Reloader(bridge, bridge, lambda: parse(self._file.read_text(), self._file, {}), *parts)

    def _gateway(self, line: Any) -> Any:
        child = SimpleNamespace(line=line, fatal_error=None, ready=threading.Event(), is_replaced=False)

        def start() -> None:
            self.asked.append(f"start {line.name} {line.gateway.keep_alive_s}")
            child.fatal_error = self.faults.get(line.name)
            child.ready.set()

        child.start, child.join = start, lambda _: None
        child.end = lambda _: self.asked.append(f"end {line.name} {line.gateway.keep_alive_s}")
        return child

    def write(self, text: str) -> Bridge:
        self._file.write_text(text)
        return read(text, self._file.parent)

    def _judge(self, lines: list[Any]) -> None:
        self.asked.append(f"judge {' '.join(one.name for one in lines)}")
        if self.sql_error:
            raise self.sql_error

    def _hold(self, names: list[str]) -> None:
        self.asked.append(f"hold {' '.join(names)}")
        if self.hold_error:
            raise self.hold_error

    def _take(self, bridge: Bridge, names: list[str]) -> None:
        routes = {name: [one.from_ for one in bridge.line(name).route] for name in names}  # type: ignore[union-attr]
        self.asked.append(f"take {routes}")

    def _see_to(self, _: Bridge, topics: list[str]) -> str:
        self.asked.append(f"topics {' '.join(topics)}")
        if self.kafka_error:
            raise self.kafka_error
        return ""

    def reload(self, text: str, only: str = "") -> dict[str, Any]:
        self.asked.clear()
        self._file.write_text(text)
        self.reloading.reload(only)
        return dict(self.state.outcomes[only])

    def lines(self) -> list[list[str]]:
        return [[one.from_ for one in child.line.route] for child in self.children.values()]


BEFORE = [["a/#", "b/#"], ["o/#"]]


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("text", "asked", "told"),
    [
        (line("a/#", "b/#", topic="u"), ["judge up", "topics u", "hold up", "take {'up': ['a/#', 'b/#']}"], None),
        (
            line("a/#", "c/#", own=SEVEN),
            ["judge up", "hold up", "start up 7", "take {'up': ['a/#', 'c/#']}"],
            '"up": gateway and query restarted',
        ),
    ],
)
def test_a_change_is_applied_step_by_step(scene: Scene, text: str, asked: list[str], told: str | None) -> None:
    """A gateway is replaced while its query stands, and only where its own settings change."""
    said = scene.reload(text)
    assert (said["outcome"], scene.asked) == (APPLIED, asked)
    assert told is None or said["texts"] == [f"line {told}"]
    assert scene.reload(text)["outcome"] == UNCHANGED
    assert scene.asked == []


@pytest.mark.parametrize(
    ("name", "value", "text", "last_step"),
    [
        ("hold_error", ConfigError("TL-C174", "b", "not stopped", "Again."), "not stopped.*[TL-C174]", "take"),
        ("sql_error", ConfigError("TL-C74", "bridge.toml:9", "where: no", ""), "where: no.*[TL-C74]", "judge"),
        ("kafka_error", KafkaError("TL-K01", "k", "no answer", "Wait."), "no answer.*[TL-K01]", "topics"),
        ("kafka_error", ZeroDivisionError("x"), "unexpected error.*[TL-B55]", "topics"),
    ],
)
def test_a_reload_that_can_not_be_finished_changes_nothing(
    scene: Scene, name: str, value: Any, text: str, last_step: str
) -> None:
    """The queries that were stopped go on with the routes they had; the file is taken up when the fault has gone."""
    before = getattr(scene, name)
    setattr(scene, name, value)
    told = scene.reload(line("a/#", "c/#", topic="u" if last_step == "topics" else "t"))
    assert told["outcome"] == REFUSED
    assert all(part in told["texts"][0] for part in text.split(".*"))
    assert scene.state.take_events()[-1].startswith("reload refused, the bridge continues unchanged:\n")
    assert (scene.lines(), scene.asked[-1].partition(" ")[0]) == (BEFORE, last_step)
    assert last_step != "take" or scene.asked[-1] == "take {'up': ['a/#', 'b/#']}"
    setattr(scene, name, before)
    assert scene.reload(line("a/#", "c/#"))["outcome"] == APPLIED


def test_a_gateway_that_refuses_to_start_changes_nothing(scene: Scene) -> None:
    """Those of lines which come are gone again, and the others are what they were."""
    scene.faults["newer"] = ConfigError("TL-M20", "newer", "the broker holds a session", "Decide.")
    told = scene.reload(line("a/#", "b/#", own=SEVEN) + NEW + NEW.replace("new", "newer").replace("n/#", "m/#"))
    assert "[TL-M20]" in told["texts"][0]
    starts = ["start up 7", "start new 60", "start newer 60"]
    assert scene.asked[2:] == [*starts, "start up 60", "end new 60", "take {'up': ['a/#', 'b/#']}"]
    assert (told["outcome"], scene.lines(), list(scene.state.lines)) == (REFUSED, BEFORE, ["up", "other"])


def test_one_line_is_restarted_by_the_file_and_no_other_is_taken_up(scene: Scene) -> None:
    text = line("a/#", "c/#")
    told = scene.reload(text.replace("o/#", "p/#") + NEW, "up")
    assert told["texts"] == ['line "up": gateway and query restarted']
    assert (told["outcome"], scene.lines(), [*scene.state.outcomes]) == (APPLIED, [["a/#", "c/#"], ["o/#"]], ["up"])
    assert scene.reload(text, "up")["texts"] == ['line "up": gateway and query restarted']
    assert scene.asked[1:3] == ["hold up", "start up 60"]
    for changed, code in ((text.replace("k:9092", "l:9092"), "TL-C169"), (text.replace('"up"', '"down"'), "TL-C73")):
        told = scene.reload(changed, "up")
        assert (told["outcome"], told["texts"][0].endswith(f"[{code}]"), scene.asked) == (REFUSED, True, [])
    assert "restart refused, the bridge continues unchanged" in scene.state.take_events()[-1]


def test_a_line_that_goes_with_something_in_it_is_named_with_what_it_holds(scene: Scene) -> None:
    with served(scene.reloading.file_bridge.state_dir / "other", name="other") as server:
        server.add(3)
        told = scene.reload(line("a/#", "b/#").replace(OTHER, ""))
    assert 'line "other" was removed from bridge.toml, and 3 acknowledged messages wait in' in told["texts"][0]
    assert (told["outcome"], scene.asked) == (REFUSED, [])


def test_a_mistake_is_told_as_check_tells_it_and_status_tells_it_too(
    scene: Scene, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = scene.reload(line("a/#", topic="no such/name") + "colour = 1\n")
    said = ran(capsys, "check", str(tmp_path / "bridge.toml"))[2]
    assert (told["outcome"], told["texts"], scene.asked) == (REFUSED, said.splitlines(), [])
    scene.state.save()
    text = render(status := collect_status(tmp_path, ["up"]))
    assert "  reload    refused " in text
    assert all(f"  ! {mistake}\n" in text for mistake in told["texts"])
    assert status["file_changed"]
    scene.reload(line("a/#"))
    scene.state.save()
    text = render(status := collect_status(tmp_path, ["up"]))
    assert "  reload    applied " in text
    assert not status["file_changed"]


# -- from another process ----------------------------------------------------------------------------------------------


@pytest.fixture
def asked_from_outside(tmp_path: Path) -> Bridge:
    text = line("a/#").replace('"state"', f'"{tmp_path}"')
    (tmp_path / "bridge.toml").write_text(text)
    return read(text, tmp_path)


def told_by(bridge: Bridge, **more: Any) -> BridgeState:
    state = BridgeState("plant", bridge.state_dir, {"up": "up"}, file=bridge.file)
    state.outcomes[""] = more
    state.save()
    return state


@pytest.mark.parametrize("only", ["", "up"])
def test_the_answer_is_that_of_a_reload_that_began_after_the_question(
    asked_from_outside: Bridge, monkeypatch: pytest.MonkeyPatch, only: str
) -> None:
    """One that is under way may have read the file as it was before; a restart is asked for beside its line."""
    state = told_by(asked_from_outside)
    began = time.monotonic()
    outcomes = iter([(began - 1, APPLIED), (began + 60, UNDER_WAY), (began + 60, REFUSED)])

    def poll(read: Callable[[], Any], _: float) -> Any:
        for at, outcome in outcomes:
            state.outcomes[only] = {"began": at, "outcome": outcome, "texts": []}
            state.save()
            if found := read():
                return found
        return None

    monkeypatch.setattr(state_module, "poll_until", poll)
    assert request_reload(asked_from_outside, only)["outcome"] == REFUSED
    requests = [asked_from_outside.state_dir / one for one in (RESTART_FILE, f"up/{RESTART_FILE}")]
    assert [*map(consume_request, requests)] == [not only, bool(only)]


def test_without_a_bridge_that_can_reload_nothing_is_sent(asked_from_outside: Bridge) -> None:
    with pytest.raises(GatewayError, match=r"no bridge runs here.*TL-B65"):
        request_reload(asked_from_outside)
    told_by(asked_from_outside)
    said = read_state(asked_from_outside.state_dir) or {}
    changes: list[tuple[dict[str, Any], str, str]] = [
        ({"ticks": ProcessIdentity.of(os.getpid()).started - 1}, "", "no bridge runs here.*TL-B65"),
        ({"file": {"path": "/elsewhere.toml"}}, "", "was started from /elsewhere.toml.*TL-C177"),
        ({}, "other", r'the running bridge has no line "other" yet\. Add it with.*TL-B65'),
        ({}, "nobody", "TL-C73"),
    ]
    for more, name, words in changes:
        (asked_from_outside.state_dir / "bridge.json").write_text(json.dumps({**said, **more}))
        with pytest.raises(TowlineError, match=words):
            request_reload(asked_from_outside, name)
    assert not (asked_from_outside.state_dir / RESTART_FILE).exists()
    with pytest.raises(ConfigError, match=r"no answer.*TL-C178"):
        request_reload(asked_from_outside, timeout_s=0.1)
