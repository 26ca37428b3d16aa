"""`towline status`: what nobody can say now is unknown, on the screen, in JSON and in the exit code."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.unit.bridge.noted import commit, down
from tests.unit.cli.test_main import ran
from tests.unit.gateway.serving import served
from towline.bridge.runtime.state import BridgeState

OUTBOX = dict.fromkeys(
    ("accepted", "queued", "in_flight", "delivered", "acknowledged", "expired", "refused", "bytes_on_disk"), 0
)
STATUS = {"state": "online", "client_id": "b-l", "guarantee": "at_least_once", "received": 0, "outbox": OUTBOX}


class Line(contextlib.ExitStack):
    """A bridge of one line, as its files and its commands show it."""

    def __init__(self, state_dir: Path, capsys: pytest.CaptureFixture[str], direction: str) -> None:
        super().__init__()
        self._command, self.state_dir = partial(ran, capsys, "status", "--state-dir", str(state_dir)), state_dir
        self.state = BridgeState("b", state_dir, {"line": direction})
        self.state.spark = "running"
        self.view = self.state.lines["line"]
        self.view.query = "running"

    def serve(self, status: dict[str, Any]) -> None:
        """Let a gateway answer."""
        self.enter_context(served(self.state_dir / "line", name="line")).reported = status

    def current(self) -> tuple[int, dict[str, Any]]:
        code, out, err = self._command("--json")
        assert err == ""
        return code, json.loads(out)["lines"]["line"]

    def shown(self) -> str:
        code, out, _ = self._command()
        assert code == self.current()[0], "for a person as for a script"
        return out


@pytest.fixture
def line(tmp_path: Path, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest) -> Iterator[Line]:
    with Line(tmp_path, capsys, getattr(request, "param", "down")) as made:
        yield made


def test_a_gateway_that_crashes_again_and_again_leaves_the_account_unknown(line: Line) -> None:
    """It had answered before the message came that ends it; since then nobody knows."""
    line.view.status, line.view.heard = STATUS, time.time() - 3600
    line.view.behind = 0
    line.view.gateway_error = "commands: the gateway ended with code 1 before it listened.   [TL-G02]"
    line.state.save()
    code, text = line.current()
    assert (code, text["account"], text["gateway"], text["gateway_running"]) == (3, None, None, False)
    assert (text["rate_in"], text["rate_out"], text["lag_s"]) == (None, None, None)
    assert text["last"]["heard"] == pytest.approx(time.time() - 3600, abs=60)
    assert text["last"]["account"]["waiting"] == 0
    out = line.shown()
    assert "account   unknown: no gateway answers" in out
    # After midnight an hour ago is another day, and the date stands before the time.
    assert re.search(rf"last update (\S+ )?{time.strftime('%H:%M:', time.localtime(line.view.heard))}", out)
    assert "adds up" not in out
    assert "pace" not in out
    assert "TL-G02" in out


def test_a_line_that_runs_adds_up(line: Line) -> None:
    line.serve({"outbox": {**OUTBOX, "accepted": 3, "delivered": 3, "acknowledged": 3}})
    commit(line.state_dir / "line", down(3))
    line.view.behind, line.view.hidden = 7, 5
    line.state.save()
    code, text = line.current()
    assert (code, text["account"]["behind"], text["account"]["adds_up"]) == (0, 7, True)
    assert text["account"]["hidden"] == 5
    assert "7 offsets behind in Kafka (5 of them behind an open transaction of an unknown id, " in line.shown()


def test_how_far_kafka_is_nobody_knows_before_it_was_asked_and_without_a_bridge(line: Line) -> None:
    line.serve({"outbox": OUTBOX})
    line.state.save()
    code, text = line.current()
    assert (code, text["account"]["waiting"], text["account"]["behind"]) == (0, 0, None)
    line.view.behind, line.view.hidden = 7, 5
    line.view.query = "waiting to retry"
    line.state.save()
    code, text = line.current()
    assert (code, text["account"]["behind"]) == (3, 7), "it is asked whether the query runs or not"
    line.state.save(has_ended=True)
    code, text = line.current()
    assert (code, text["account"]["behind"], text["account"]["hidden"]) == (3, None, None)
    out = line.shown()
    assert "unknown offsets behind in Kafka" in out


def test_a_gateway_that_says_nothing_of_its_outbox_has_no_account(line: Line) -> None:
    line.serve({})
    line.state.save()
    code, text = line.current()
    assert (code, text["account"]) == (3, None)
    assert "queued unknown   in flight unknown   unknown MB on disk" in line.shown()


def test_an_account_that_does_not_add_up_is_the_worse_news(line: Line) -> None:
    line.serve({"outbox": OUTBOX})
    commit(line.state_dir / "line", down(3))
    line.state.save(has_ended=True)
    code, text = line.current()
    assert (code, text["account"]["adds_up"]) == (1, False)


@pytest.mark.parametrize("line", ["up"], indirect=True)
def test_a_bridge_that_was_killed_says_nothing_of_spark_and_kafka(line: Line) -> None:
    line.state.kafka = "reachable"
    line.serve({"received": 5})
    line.state.save()
    file, two_days_ago = line.state_dir / "bridge.json", time.time() - 86_400 * 2
    # Its pid is another process's now.
    file.write_text(json.dumps({**json.loads(file.read_text()), "ticks": 1, "updated": two_days_ago}))
    code, text = line.current()
    assert (code, text["account"]["received"], text["rate_in"], text["lag_s"]) == (3, 5, None, None)
    assert text["query"] == "not running"
    head = line.shown().splitlines()[0]
    assert "not running, it was killed (pid " in head
    assert "spark" not in head
    assert "kafka" not in head
    assert f"last update {time.strftime('%Y-%m-%d', time.localtime(two_days_ago))}" in head


STOPPED = (
    'line "line": the marker in Kafka is ahead of the checkpoint.   [TL-K13]',
    'line "line": Spark does not understand the line\'s SQL: x.   [TL-C74]',
    "line: the journal is an older copy that was written to since.   [TL-J21]",
)


@pytest.mark.parametrize("running", [True, False], ids=["running", "ended"])
@pytest.mark.parametrize("error", STOPPED)
def test_no_tick_stands_beside_a_line_that_has_stopped(line: Line, error: str, *, running: bool) -> None:
    """Its numbers add up, and what they say of Kafka is what is in doubt."""
    line.serve({"outbox": {**OUTBOX, "accepted": 3, "delivered": 3, "acknowledged": 3}})
    commit(line.state_dir / "line", down(3))
    line.view.query, line.view.query_error = "stopped", error
    line.state.save(has_ended=not running)
    code, text = line.current()
    assert (code, text["account"]["adds_up"], text["account"]["delivered"]) == (3, None, 3)
    out = line.shown()
    assert "✓" not in out
    assert "taken 3 = delivered 3 + waiting 0   not checked: the line has stopped" in out
    line.view.update_status({**STATUS, "outbox": OUTBOX}, down(3))
    assert line.view.account is not None
    assert "does not add up ✗" in line.view.account.sentence(), "what disagrees is told all the same"
