"""The steps of a reload in their order, and what each that fails leaves behind: what ran before."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers import wait_until
from tests.unit.bridge.test_config import read
from tests.unit.cli.test_main import ran
from tests.unit.gateway.serving import served
from towline.bridge.config.file import parse
from towline.bridge.config.model import Bridge
from towline.bridge.runtime import reload
from towline.bridge.runtime.reload import Reloader
from towline.bridge.runtime.state import (
    APPLIED,
    REFUSED,
    UNCHANGED,
    UNDER_WAY,
    BridgeState,
    consume_restart_request,
    read_state,
    request_reload,
)
from towline.bridge.runtime.status import collect_status, render
from towline.errors import ConfigError, GatewayError, KafkaError, TowlineError
from towline.processes import ProcessIdentity

HEAD = """
name = "plant"
state_dir = "state"
mqtt = { brokers = "mqtt://b" }
kafka = { bootstrap_servers = "k:9092" }
"""
OTHER = '[[uplink]]\nname = "other"\nroute = [{ from = "o/#", topic = "t" }]\n'


def line(*filters: str, topic: str = "t", own: str = "") -> str:
    routes = ", ".join(f'{{ from = "{one}", topic = "{topic}" }}' for one in filters)
    return f'{HEAD}[[uplink]]\nname = "up"\n{own}\nroute = [{routes}]\n{OTHER}'


class Scene:
    """A bridge whose parts write down what they are asked for."""

    def __init__(self, place: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
        self._place = place
        self.asked: list[str] = []
        self.answers = {"held": True}
        #: What Spark says of the SQL; None for no answer.
        self.mistakes: list[ConfigError] | None = []
        self.kafka_error: TowlineError | None = None
        bridge = self.write(text)
        self.state = BridgeState("plant", place, {one.name: "up" for one in bridge.lines}, file=bridge.file)
        self.stopping = threading.Event()
        #: What keeps a gateway from starting, by its line.
        self.faults: dict[str, ConfigError] = {}
        self.children: Any = {one.name: self._gateway(one, started=True) for one in bridge.lines}
        driver: Any = SimpleNamespace(check_sql=self._judge, hold_queries=self._hold, start_queries=self._take)
        monkeypatch.setattr(reload, "ensure_topics", self._see_to)
        monkeypatch.setattr(reload, "_GATEWAY_TIMEOUT_S", 0.3)
        parts = self.state, driver, self.children, self._gateway, self.stopping
        self.reloading = Reloader(bridge, bridge, self._read, *parts)

    def _gateway(self, line: Any, *, started: bool = False) -> Any:
        up, keep_alive = threading.Event(), line.gateway.keep_alive_s
        child = SimpleNamespace(line=line, fatal_error=None, ready=up, is_replaced=False, join=lambda _: None)

        def start() -> None:
            self.asked.append(f"start {line.name} {keep_alive}")
            child.fatal_error = self.faults.get(line.name)
            up.set()

        child.start, child.end = start, lambda _: self.asked.append(f"end {line.name} {keep_alive}")
        if started:
            up.set()
        return child

    def write(self, text: str) -> Bridge:
        (self._place / "bridge.toml").write_text(text)
        return read(text, self._place)

    def _read(self) -> Bridge:
        file = self._place / "bridge.toml"
        return parse(file.read_text(), file, {})

    def _judge(self, lines: list[Any], _: float) -> list[ConfigError] | None:
        self.asked.append(f"judge {' '.join(one.name for one in lines)}")
        return self.mistakes

    def _hold(self, names: list[str], _: float) -> bool:
        self.asked.append(f"hold {' '.join(names)}")
        return self.answers["held"]

    def _take(self, bridge: Bridge, names: list[str]) -> None:
        routes = {name: [one.from_ for one in bridge.line(name).route] for name in names}  # type: ignore[union-attr]
        self.asked.append(f"take {routes}")

    def _see_to(self, _: Bridge, topics: list[str]) -> str:
        self.asked.append(f"topics {' '.join(topics)}")
        if self.kafka_error:
            raise self.kafka_error
        return ""

    def reload(self, text: str) -> dict[str, Any]:
        self.write(text) if "[[" in text else (self._place / "bridge.toml").write_text(text)
        self.reloading.reload()
        return dict(self.state.outcomes[""])

    def lines(self) -> list[list[str]]:
        return [[one.from_ for one in child.line.route] for child in self.children.values()]


BEFORE = [["a/#", "b/#"], ["o/#"]]


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(tmp_path, monkeypatch, line("a/#", "b/#"))


NEW = '[[uplink]]\nname = "new"\nroute = [{ from = "n/#", topic = "t" }]\n'


def test_a_line_that_comes_is_started_and_no_other_is_touched(scene: Scene) -> None:
    told = scene.reload(line("a/#", "b/#") + NEW)
    assert (told["outcome"], told["texts"]) == (APPLIED, ['line "new": new'])
    assert scene.asked == ["judge new", "hold ", "start new 60", "take {'new': ['n/#']}"]
    assert scene.lines() == [*BEFORE, ["n/#"]]
    assert scene.state.lines["new"].direction == "up"
    assert scene.reload(line("a/#", "b/#"))["texts"][0].startswith(
        f'{scene.reloading.file_bridge.file}: uplink "new", which was removed, needs a restart'
    )


def test_a_gateway_with_other_filters_or_settings_is_restarted_while_its_query_stands(scene: Scene) -> None:
    told = scene.reload(line("a/#", "c/#", own="mqtt = { keep_alive_s = 7 }"))
    assert scene.asked == ["judge up", "hold up", "start up 7", "take {'up': ['a/#', 'c/#']}"]
    assert told["outcome"] == APPLIED
    assert told["texts"] == ['line "up": 2 routes → 2; subscribed c/#; unsubscribed b/#; restarted']
    assert scene.lines() == [["a/#", "c/#"], ["o/#"]]
    assert scene.state.take_events()[0].startswith('reload: line "up": ')
    scene.asked.clear()
    assert scene.reload(line("a/#", own="mqtt = { keep_alive_s = 7 }"))["texts"][0].endswith("restarted")
    assert scene.asked[2] == "start up 7"
    scene.asked.clear()
    assert scene.reload(line("a/#", own="mqtt = { keep_alive_s = 7 }"))["outcome"] == UNCHANGED
    assert scene.asked == []


def test_a_gateway_that_refuses_to_start_changes_nothing(scene: Scene) -> None:
    """That of a line which comes is gone again, and the others are what they were."""
    scene.faults["new"] = ConfigError("TL-M20", "new", "the broker holds a session", "Decide.")
    told = scene.reload(line("a/#", "b/#", own="mqtt = { keep_alive_s = 7 }") + NEW)
    assert told["outcome"] == REFUSED
    assert "[TL-M20]" in told["texts"][0]
    assert scene.asked[2:-1] == ["start up 7", "start new 60", "start up 60"]
    assert scene.asked[-1] == "take {'up': ['a/#', 'b/#']}"
    assert scene.lines() == BEFORE
    assert list(scene.state.lines) == ["up", "other"]
    del scene.faults["new"]
    assert scene.reload(line("a/#", "b/#") + NEW)["outcome"] == APPLIED


def test_one_line_is_restarted_by_the_file_and_no_other_is_taken_up(scene: Scene) -> None:
    scene.write(line("a/#", "c/#").replace('"o/#"', '"p/#"') + NEW)
    scene.reloading.reload("up")
    told = dict(scene.state.outcomes["up"])
    assert told["outcome"] == APPLIED
    assert told["texts"] == ['line "up": 2 routes → 2; subscribed c/#; unsubscribed b/#; restarted']
    assert scene.asked == ["judge up", "hold up", "start up 60", "take {'up': ['a/#', 'c/#']}"]
    assert scene.lines() == [["a/#", "c/#"], ["o/#"]]
    assert "" not in scene.state.outcomes
    scene.asked.clear()
    scene.reloading.reload("up")
    assert scene.state.outcomes["up"]["texts"] == ['line "up": restarted']
    assert scene.asked[1:3] == ["hold up", "start up 60"]
    scene.write(line("a/#", "c/#").replace("k:9092", "l:9092"))
    scene.reloading.reload("up")
    assert "[kafka] bootstrap_servers needs a restart" in scene.state.outcomes["up"]["texts"][0]
    scene.write(line("a/#", "c/#").replace('"up"', '"down"'))
    scene.reloading.reload("up")
    assert scene.state.outcomes["up"]["texts"][0].endswith("[TL-C73]")
    assert "restart refused, the bridge continues unchanged" in scene.state.take_events()[-1]


def test_a_line_that_goes_with_something_in_it_is_named_with_what_it_holds(scene: Scene) -> None:
    with served(scene.reloading.file_bridge.state_dir / "other", name="other") as server:
        server.add(3)
        told = scene.reload(line("a/#", "b/#").replace(OTHER, ""))
    assert told["outcome"] == REFUSED
    assert 'line "other" was removed from bridge.toml, and 3 acknowledged messages wait in' in told["texts"][0]
    assert "towline retire" in told["texts"][0]
    assert scene.asked == []


def test_without_other_filters_no_gateway_is_restarted(scene: Scene) -> None:
    assert scene.reload(line("a/#", "b/#", topic="u"))["outcome"] == APPLIED
    assert scene.asked == ["judge up", "topics u", "hold up", "take {'up': ['a/#', 'b/#']}"]


def test_spark_that_does_not_answer_changes_nothing(scene: Scene) -> None:
    scene.answers["held"] = False
    told = scene.reload(line("a/#", "c/#"))
    assert told["texts"][0].endswith("[TL-C174]")
    assert scene.asked == ["judge up", "hold up", "take {'up': ['a/#', 'b/#']}"]
    scene.stopping.set()
    assert "the bridge ends" in scene.reload(line("a/#", "c/#"))["texts"][0]
    scene.mistakes = None
    told = scene.reload(line("a/#", "c/#"))
    assert told["texts"][0].endswith(
        "the SQL of the routes was not checked: the bridge ends. Reload again when Spark runs.   [TL-C174]"
    )


def test_a_mistake_in_sql_changes_nothing(scene: Scene) -> None:
    scene.mistakes = [ConfigError("TL-C74", "bridge.toml:9", f"where: {one}", "Correct it.") for one in "ab"]
    told = scene.reload(line("a/#", "c/#"))
    assert (told["outcome"], told["texts"]) == (REFUSED, [str(one) for one in scene.mistakes])
    assert scene.asked == ["judge up"]


def test_while_kafka_is_away_topics_that_are_known_may_change_place(scene: Scene) -> None:
    scene.kafka_error = KafkaError("TL-K01", "k:9092", "no answer", "Wait.")
    told = scene.reload(line("a/#", topic="new"))
    assert (told["outcome"], told["texts"]) == (REFUSED, ["k:9092: no answer. Wait.   [TL-K01]"])
    assert scene.asked == ["judge up", "topics new"]
    assert scene.reload(line("a/#"))["outcome"] == APPLIED
    scene.kafka_error = KafkaError("TL-B03", "k:9092", "it is not there", "Create it.")
    assert "[TL-B03]" in scene.reload(line("a/#", topic="new"))["texts"][0]


@pytest.mark.parametrize("text", ["name = ", line("a/#", topic="no such/name"), line("a/#") + "colour = 1\n"])
def test_a_mistake_is_told_as_check_tells_it(
    scene: Scene, tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bridge.toml").write_text(text)
    scene.reloading.reload()
    told = dict(scene.state.outcomes[""])
    said = ran(capsys, "check", str(tmp_path / "bridge.toml"))[2]
    assert told["outcome"] == REFUSED
    assert told["texts"] == said.splitlines()
    assert scene.asked == []


def test_whatever_goes_wrong_the_bridge_goes_on(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reload, "line_changes", lambda *_: 1 / 0)
    assert "[TL-B55]" in scene.reload(line("a/#"))["texts"][0]


def test_status_tells_the_last_reload(scene: Scene, tmp_path: Path) -> None:
    scene.state.save()
    assert "reload" not in render(collect_status(tmp_path, ["up"]))
    scene.reload(line("a/#", "c/#"))
    scene.state.save()
    status = collect_status(tmp_path, ["up"])
    assert status["reload"]["outcome"] == APPLIED
    assert "  reload    applied " in render(status)
    assert not status["file_changed"]
    scene.reload("name = ")
    scene.state.save()
    text = render(collect_status(tmp_path, ["up"]))
    assert "  reload    refused " in text
    assert "! " in text.partition("reload    refused")[2]
    assert "[TL-C11]" in text
    assert collect_status(tmp_path, ["up"])["file_changed"]


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


def test_the_answer_is_that_of_a_reload_that_began_after_the_question(
    asked_from_outside: Bridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is under way may have read the file as it was before."""
    before = {"began": time.monotonic(), "outcome": UNDER_WAY}
    state = told_by(asked_from_outside, **before)
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda *args: sent.append(args))
    found: list[dict[str, Any]] = []
    asking_thread = threading.Thread(target=lambda: found.append(request_reload(asked_from_outside, timeout_s=60.0)))
    asking_thread.start()
    wait_until(lambda: sent == [(os.getpid(), signal.SIGHUP)], what="SIGHUP")
    after = {"began": time.monotonic()}
    for told in ({**before, "outcome": APPLIED}, {**after, "outcome": UNDER_WAY}, {**after, "outcome": REFUSED}):
        assert not found
        state.outcomes[""] = {"texts": [], **told}
        state.save()
    wait_until(lambda: bool(found), what="the answer")
    asking_thread.join()
    assert found[0]["outcome"] == REFUSED


def test_a_restart_is_asked_for_in_the_directory_of_its_line(asked_from_outside: Bridge) -> None:
    """The answer stands beside the line, and that of the last reload is no answer."""
    state, place = (
        told_by(asked_from_outside, began=time.monotonic() + 60, outcome=APPLIED),
        asked_from_outside.state_dir,
    )
    with pytest.raises(GatewayError, match=r'the running bridge has no line "other" yet\. Add it with.*TL-B65'):
        request_reload(asked_from_outside, "other")
    with pytest.raises(ConfigError, match="TL-C73"):
        request_reload(asked_from_outside, "nobody")
    found: list[dict[str, Any]] = []
    asking = threading.Thread(target=lambda: found.append(request_reload(asked_from_outside, "up", 60.0)))
    asking.start()
    wait_until(lambda: consume_restart_request(place / "up"), what="the request")
    state.outcomes["up"] = {"began": time.monotonic(), "outcome": REFUSED}
    state.save()
    asking.join(60)
    assert found == [state.outcomes["up"]]


def test_without_a_bridge_that_can_reload_nothing_is_sent(
    asked_from_outside: Bridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "kill", lambda *_: pytest.fail("a signal"))
    state_dir = asked_from_outside.state_dir
    with pytest.raises(GatewayError, match=r"no bridge runs here.*TL-B65"):
        request_reload(asked_from_outside)
    told_by(asked_from_outside)
    said = read_state(state_dir) or {}
    changes: list[tuple[dict[str, Any], str]] = [
        ({"ticks": ProcessIdentity.of(os.getpid()).started - 1}, "no bridge runs here.*TL-B65"),
        ({"file": {"path": "/elsewhere.toml"}}, "was started from /elsewhere.toml.*TL-C177"),
    ]
    for change, words in changes:
        (state_dir / "bridge.json").write_text(json.dumps({**said, **change}))
        with pytest.raises(TowlineError, match=words):
            request_reload(asked_from_outside)


def test_a_bridge_that_gives_no_answer_is_told(asked_from_outside: Bridge, monkeypatch: pytest.MonkeyPatch) -> None:
    told_by(asked_from_outside)
    monkeypatch.setattr(os, "kill", lambda *_: None)
    began = time.monotonic()
    with pytest.raises(ConfigError, match=r"no answer.*TL-C178"):
        request_reload(asked_from_outside, timeout_s=0.1)
    assert time.monotonic() > began
