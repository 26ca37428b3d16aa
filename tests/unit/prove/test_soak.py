"""What a soak makes of its runs, without brokers."""

from __future__ import annotations

from typing import Any

import pytest

from towline_prove.account import RunAccount
from towline_prove.commands import main
from towline_prove.processes import Role
from towline_prove.referee import Verdict
from towline_prove.soak import ROLES, SoakPlan, SoakRun


def outcome(**changes: Any) -> SoakRun:
    facts: dict[str, Any] = {
        "role": Role.JVM,
        "run": 1,
        "at": 50,
        "back": 1.5,
        "seconds": 9.0,
        "account": RunAccount(Verdict(attempted=2, acked=2, delivered=2, copies=2)),
    }
    return SoakRun(**(facts | changes))


def test_a_good_run_is_one_line() -> None:
    assert outcome().ok
    assert outcome().line().startswith("ok  jvm")
    assert "\n" not in outcome().line()


@pytest.mark.parametrize(
    "changes",
    [
        {"at": -1},
        {"back": -1.0},
        {"account": RunAccount(Verdict(attempted=2, acked=2, delivered=1, copies=1, lost=1))},
    ],
)
def test_no_kill_no_return_or_a_loss_is_a_bad_run(changes: dict[str, Any]) -> None:
    assert not outcome(**changes).ok
    assert outcome(**changes).line().startswith("BAD jvm")


def test_the_full_soak_is_what_the_promise_says() -> None:
    plan = SoakPlan()
    assert (plan.runs, plan.messages, plan.roles) == (20, 100_000, ROLES)
    assert SoakPlan.quick().roles == ROLES


def test_an_unknown_role_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["prove", "soak", "--roles", "gateway,cat"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    assert "TL-C83" in capsys.readouterr().err
