"""The load against a real Mosquitto: what it claims to have been acknowledged."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import NewMosquitto
from tests.helpers import wait_until
from towline.errors import Unreachable
from towline_prove.history import SenderClaim, read_history
from towline_prove.load import LoadPlan, run_load

pytestmark = pytest.mark.broker


@pytest.mark.parametrize("qos", [0, 1, 2])
def test_a_load_claims_what_was_acknowledged_at_its_rate(new_mosquitto: NewMosquitto, tmp_path: Path, qos: int) -> None:
    plan = LoadPlan(port=new_mosquitto().port, messages=2000, rate=4000, qos=qos)
    result, claims = run_load(plan, tmp_path / "claims"), read_history(tmp_path / "claims")
    assert (result.attempted, result.acked) == (2000, 2000 if qos else 0)
    assert claims.count(SenderClaim.ATTEMPTED) == 2000
    assert claims.count(SenderClaim.ACKED) == result.acked
    assert 0.45 <= result.seconds < 5


def test_a_killed_load_has_claimed_what_it_sent(new_mosquitto: NewMosquitto, tmp_path: Path) -> None:
    broker, claims = new_mosquitto(), tmp_path / "claims"
    command = [sys.executable, "-m", "towline_prove", "load", str(claims), "--port", str(broker.port)]
    child = subprocess.Popen([*command, "--messages", "100000", "--rate", "5000"], stdout=subprocess.DEVNULL)
    wait_until(lambda: claims.exists() and read_history(claims).count(SenderClaim.ACKED) > 500, what="500 acknowledged")
    child.kill()
    child.wait(60)
    history = read_history(claims)
    assert 500 <= history.count(SenderClaim.ACKED) <= history.count(SenderClaim.ATTEMPTED) < 100_000


def test_no_broker_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(Unreachable, match=r"no connection .*TL-M60"):
        run_load(LoadPlan(port=1, messages=1, seconds=0.5), tmp_path / "claims")
