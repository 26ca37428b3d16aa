"""Alive and ready, and what is said of each thing that is wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.monitor.knowing import DOWN_STATUS, SOUND, UP_STATUS, Known, a_bridge, a_gateway
from towline.bridge.runtime.state import BridgeState
from towline.monitor.bridge import BridgeMonitor
from towline.monitor.gateway import GatewayFacts, Problem, liveness_problems, readiness_problems, verdict

BROKEN_DOWN = {**DOWN_STATUS, "outbox": {**DOWN_STATUS["outbox"], "held_back": "full"}}


def told(problems: Iterator[Problem]) -> list[str]:
    return [problem["what"] for problem in problems]


def test_a_sound_bridge_is_ready() -> None:
    assert verdict("ready", a_bridge().problems()) == (True, {"ready": True, "problems": []})
    full = a_gateway(status={**UP_STATUS, "held_back": "window full"})
    assert told(readiness_problems(full)) == [], "it is how a broker is held to its pace"


def test_only_a_loop_that_stands_still_is_a_reason_to_start_again(tmp_path: Path) -> None:
    """Whatever else is hurt: a restart mends none of that."""
    monitor, state = BridgeMonitor("b", {}), BridgeState("b", tmp_path, {"line": "up"})
    assert monitor.alive() == (True, {"alive": True, "problems": []}), "it is starting"
    monitor.set_state(state)
    state.spark, state.kafka, state.lines["line"].query = "starting", "unreachable", "stopped"
    assert monitor.alive() == (True, {"alive": True, "problems": []})
    assert len(monitor.ready()[1]["problems"]) == 4
    state.heartbeat -= 61
    assert monitor.alive() == (False, {"alive": False, "problems": [{"what": "the bridge's loop is stalled"}]})


@pytest.mark.parametrize(
    ("known", "what"),
    [
        (a_bridge(spark="starting again"), "spark is starting again"),
        (a_bridge(kafka="unreachable"), "kafka is unreachable"),
        (a_bridge(kafka="unknown"), "kafka is unknown"),
        (a_bridge(up=False), "the gateway does not answer"),
        (a_bridge(status={**UP_STATUS, "state": "connecting"}), "no session with the broker"),
        (a_bridge(status={**UP_STATUS, "held_back": "journal full"}), "nothing is read from the broker: journal full"),
        (a_bridge(a_gateway("down", BROKEN_DOWN)), "nothing is sent: the disk is full, or the guarantee can't be kept"),
        (a_bridge(query="waiting to retry"), "the query is waiting to retry"),
        (a_bridge(lag_s=121), "the query delivers nothing: the oldest message waits too long"),
        (a_bridge(account=replace(SOUND, disagreements=("1, not 2",))), "the account does not add up"),
        (a_bridge(account=replace(SOUND, more={"broken": "not kept"})), "the guarantee was not kept"),
    ],
)
def test_one_thing_that_is_wrong_is_one_problem(known: Known, what: str) -> None:
    assert told(known.problems()) == [what]


def test_codes_are_told_and_texts_are_not() -> None:
    """What a broker or a device wrote is in the text."""
    trouble = {"code": "TL-M05", "text": "mqtt://secret@host: evil\x1b[31m topic", "at": 0}
    status = {**UP_STATUS, "state": "connecting", "last_error": trouble}
    _, answer = verdict("ready", a_bridge(status=status, error="its text   [TL-B22]").problems())
    assert answer["problems"] == [
        {"what": "no session with the broker", "line": "line", "gateway": "gw", "codes": ("TL-B22", "TL-M05")}
    ]
    assert "evil" not in json.dumps(answer)


@pytest.mark.parametrize(
    ("facts", "silent_s", "what"),
    [
        (a_gateway(), 0, []),
        (a_gateway(status={**UP_STATUS, "turned_s": 119}), 0, []),
        (a_gateway(status={**UP_STATUS, "turned_s": 121}), 0, ["the gateway's loop is stalled"]),
        (a_gateway(status={}), 0, []),  # it recovers a large journal
        (a_gateway(status={}), 121, ["the gateway does not answer"]),
    ],
)
def test_a_gateway_is_alive_while_its_loop_moves(facts: GatewayFacts, silent_s: float, what: list[str]) -> None:
    assert told(liveness_problems(facts, silent_s=silent_s)) == what
