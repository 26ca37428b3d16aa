"""What a broker keeps: judged by what was seen, by what its file says, and by both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mqtt5 import ConnAckPacket

from tests.unit.doctor.bridges import DOWN, UP, UP_2, bridge_of
from towline.doctor.broker.conf import BrokerConf
from towline.doctor.broker.facts import BrokerFacts, Greeting, KeptQueue, NoGreeting
from towline.doctor.broker.keeping import PROBE_BYTES, judge_keeping
from towline.doctor.broker.targets import Target, targets_of
from towline.doctor.broker.words import NEAR_S
from towline.doctor.case import LineLoad
from towline.doctor.findings import Finding, Standing
from towline.errors import Unreachable

SOUND = BrokerConf(
    file=Path("m.conf"), persistence=True, autosave_interval=1, autosave_on_changes=True, max_queued_messages=0
)
GREETING = Greeting(level=5, connack=ConnAckPacket(), asked_expiry_s=604800)
ALL_KEPT = KeptQueue(present=True, accepted=1500, kept=1500, window=1500)


@pytest.fixture(scope="module")
def target_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Target]:
    def make(lines: str) -> Target:
        [target] = targets_of(bridge_of(tmp_path_factory.mktemp("bridge"), "mqtt://127.0.0.1", lines))
        return target

    return make


@pytest.fixture(scope="module")
def target(target_of: Callable[[str], Target]) -> Target:
    return target_of(UP)


def judged(
    target: Target,
    conf: BrokerConf | None = SOUND,
    queue: KeptQueue | None = ALL_KEPT,
    load: LineLoad | None = None,
    greeting: Greeting = GREETING,
) -> dict[str, Finding]:
    facts = BrokerFacts(greeting=greeting, queue=queue)
    found = list(judge_keeping(target, facts, conf, lambda _line: load))
    assert len({one.code for one in found}) == len(found)
    return {one.code: one for one in found}


def load(rate: float) -> LineLoad:
    return LineLoad(rate, rate * 256, "--rate")


@given(st.integers(1, 10**7), st.floats(min_value=0.01, max_value=1e5))
def test_a_queue_is_near_when_it_is_full_within_the_hour(target: Target, limit: int, rate: float) -> None:
    row = judged(target, replace(SOUND, max_queued_messages=limit), load=load(rate))["TL-D05"]
    assert row.verdict is (Standing.LIMITED if limit / rate >= NEAR_S else Standing.WARNS)


@given(st.integers(1, 2000), st.integers(1, 2000), st.one_of(st.none(), st.integers(0, 3000)))
def test_the_smaller_of_what_was_seen_and_what_is_written_holds(
    target: Target, accepted: int, kept: int, said: int | None
) -> None:
    kept = min(kept, accepted)
    conf = None if said is None else replace(SOUND, max_queued_messages=said)
    row = judged(target, conf, KeptQueue(present=True, accepted=accepted, kept=kept), load(1.0))["TL-D05"]
    limits = [*([kept] if kept < accepted else []), *([said] if said else [])]
    if limits:
        assert f"{min(limits):,} message" in row.until
    else:
        assert row.verdict in {Standing.HOLDS, Standing.LIMITED}


def test_a_file_that_the_broker_does_not_run_with_is_told(target: Target) -> None:
    row = judged(target, queue=KeptQueue(present=True, accepted=1500, kept=1000))["TL-D05"]
    assert row.verdict is Standing.WARNS
    said = judged(target, replace(SOUND, max_queued_messages=1200), KeptQueue(present=True, accepted=1500, kept=1000))[
        "TL-D05"
    ]
    assert "not what the broker runs with" in said.because


def test_a_queue_that_ends_by_its_bytes_is_told_as_bytes(target: Target) -> None:
    conf = replace(SOUND, max_queued_bytes=1000)
    found = judged(target, conf, KeptQueue(present=True, accepted=1500, kept=124), load(200))
    assert found["TL-D05"].verdict is Standing.HOLDS
    assert found["TL-D06"].verdict is Standing.WARNS
    assert "1,000 bytes" in found["TL-D06"].until
    assert 1500 * PROBE_BYTES > 1000


@pytest.mark.parametrize(
    ("size", "rate", "verdict"),
    [(1 << 20, None, Standing.WARNS), (1 << 30, None, Standing.LIMITED), (1 << 30, 10_000.0, Standing.WARNS)],
)
def test_bytes_of_a_load_that_is_not_known(target: Target, size: int, rate: float | None, verdict: Standing) -> None:
    row = judged(target, replace(SOUND, memory_limit=size), load=None if rate is None else load(rate))["TL-D06"]
    assert row.verdict is verdict
    assert "memory_limit" in row.because


def test_no_session_and_no_queue(target: Target) -> None:
    lost = judged(target, queue=KeptQueue(present=False, accepted=10, kept=0))
    assert lost["TL-D03"].verdict is Standing.BROKEN
    assert "Session Present 0" in lost["TL-D03"].because
    empty = judged(target, queue=KeptQueue(present=True, accepted=10, kept=0))
    assert empty["TL-D03"].verdict is Standing.BROKEN
    assert "none of 10 messages" in empty["TL-D03"].because


@pytest.mark.parametrize(
    ("interval", "on_changes", "rate", "verdict"),
    [
        (1, True, None, Standing.LIMITED),
        (1800, True, None, Standing.WARNS),
        (1800, True, 200.0, Standing.LIMITED),  # changes: 9 s
        (1800, True, 1.0, Standing.WARNS),
        (60, False, 200.0, Standing.LIMITED),
        (61, False, 200.0, Standing.WARNS),
        (0, False, None, Standing.WARNS),
        (0, True, 1.0, Standing.WARNS),
    ],
)
def test_what_a_killed_broker_takes(
    target: Target, interval: int, on_changes: bool, rate: float | None, verdict: Standing
) -> None:
    conf = replace(SOUND, autosave_interval=interval, autosave_on_changes=on_changes)
    assert judged(target, conf, load=None if rate is None else load(rate))["TL-D08"].verdict is verdict


def test_a_broker_that_saves_nothing_has_nothing_to_lose_later(target: Target) -> None:
    found = judged(target, replace(SOUND, persistence=False))
    assert found["TL-D07"].verdict is Standing.BROKEN
    assert "TL-D08" not in found
    assert judged(target, conf=None)["TL-D07"].verdict is Standing.LIMITED


@pytest.mark.parametrize(
    ("given", "conf_s", "verdict"),
    [
        (None, None, Standing.HOLDS),
        (300, None, Standing.WARNS),
        (86400, None, Standing.LIMITED),
        (None, 7200.0, Standing.WARNS),
        (None, 14 * 86400.0, Standing.LIMITED),
    ],
)
def test_a_session_that_ends_within_a_day_is_near(
    target: Target, given: int | None, conf_s: float | None, verdict: Standing
) -> None:
    greeting = replace(GREETING, connack=ConnAckPacket(session_expiry_interval=given))
    assert judged(target, replace(SOUND, expiration_s=conf_s), greeting=greeting)["TL-D04"].verdict is verdict


def test_of_mqtt_3_the_expiry_is_not_known(target: Target) -> None:
    greeting = Greeting(level=4, connack=ConnAckPacket())
    assert judged(target, None, greeting=greeting)["TL-D04"].verdict is Standing.LIMITED
    assert judged(target, SOUND, greeting=greeting)["TL-D04"].verdict is Standing.HOLDS


def test_lines_that_need_no_session_are_told_nothing_of_it(target_of: Callable[[str], Target]) -> None:
    assert judged(target_of(UP.replace("at_least_once", "at_most_once"))) == {}
    down = judged(target_of(DOWN))
    assert {"TL-D04", "TL-D05"}.isdisjoint(down)
    assert down["TL-D07"].verdict is Standing.HOLDS


def test_of_exactly_once_the_phases_are_told(target_of: Callable[[str], Target]) -> None:
    row = judged(target_of(UP_2))["TL-D08"]
    assert row.verdict is Standing.LIMITED
    assert "phase" in row.because


def test_nothing_is_judged_of_a_broker_that_nobody_met(target: Target) -> None:
    facts = BrokerFacts(greeting=NoGreeting(error=Unreachable("TL-M01", "mqtt://a", "no connection")))
    assert list(judge_keeping(target, facts, SOUND, lambda _line: None)) == []
