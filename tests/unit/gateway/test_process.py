"""The end of a gateway that nobody foresaw is told to whoever started it; a signal that is ignored stays so."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import wait_until
from tests.unit.gateway.serving import rows
from towline.gateway.endpoint import ERROR_FILE, GatewayEndpoint
from towline.gateway.process import oldest_waiting_time
from towline.journal import Journal, Limits
from towline.schema import ROW_SCHEMA

#: No broker is there: the port is closed.
SETTINGS = {
    "name": "telemetry",
    "client_id": "c",
    "brokers": ["mqtt://127.0.0.1:1"],
    "subscriptions": [{"pattern": "t"}],
}

PROGRAM = """
import sys
from towline.gateway import process
from towline.net.driver import SessionDriver
from towline.gateway.process import main
def fail(*_, **__):
    raise RuntimeError("can't start new thread")
{}
sys.exit(main())
"""


def started(state_dir: Path, program: str, log: Path) -> subprocess.Popen[str]:
    with log.open("ab") as file:
        process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stderr=file, text=True)
    assert process.stdin is not None
    process.stdin.write(json.dumps({**SETTINGS, "state_dir": str(state_dir)}))
    process.stdin.close()
    return process


@pytest.mark.parametrize(
    "broken",
    [
        "process.GatewayService = fail",
        "process.Pump._turn = fail",
        "process.Pump._turn = SessionDriver.disconnect = fail",
    ],
)
def test_what_nobody_foresaw_ends_it_with_a_word(tmp_path: Path, broken: str) -> None:
    """A service that does not come up used to leave a gateway that receives and that nobody can reach."""
    state_dir, log = tmp_path / "state", tmp_path / "gateway-telemetry.log"
    assert started(state_dir, PROGRAM.format(broken), log).wait(30) == 1
    error = json.loads((state_dir / ERROR_FILE).read_text())
    assert error["code"] == "TL-G09"
    assert error["what"] == "the gateway failed in an unexpected way (RuntimeError: can't start new thread)"
    assert str(log) in error["do"]
    text = log.read_text()
    assert "Traceback" in text
    assert all(json.loads(line) for line in text.splitlines())  # the traceback too is in one line


def test_a_signal_that_is_ignored_stays_ignored(tmp_path: Path) -> None:
    """``nohup`` and the background jobs of a script."""
    state_dir = tmp_path / "state"
    ignoring = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n" + PROGRAM.format("")
    process = started(state_dir, ignoring, tmp_path / "log")
    wait_until(lambda: GatewayEndpoint.read(state_dir), what="the gateway's endpoint")
    status = Path(f"/proc/{process.pid}/status").read_text()
    ignored = next(int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigIgn"))
    process.terminate()
    assert ignored & 1 << (signal.SIGINT - 1)
    assert process.wait(30) == 0


def test_the_oldest_waiting_message_is_told_over_restarts(tmp_path: Path) -> None:
    """After a restart nobody else knows how long it has waited."""
    limits = Limits(min_free_bytes=0)
    with Journal.open(tmp_path, schema=ROW_SCHEMA, limits=limits) as journal:
        assert oldest_waiting_time(journal, "received_at")() is None
        for first in (0, 3):
            journal.append(rows(first, 3))
            journal.sync()
        journal.commit("bridge", 0)
    with Journal.open(tmp_path, schema=ROW_SCHEMA, limits=limits) as journal:
        oldest = oldest_waiting_time(journal, "received_at")
        times = [row["received_at"].timestamp() for batch in journal.read(0, 6) for row in batch.to_pylist()]
        for upto, at in enumerate(times):
            journal.commit("bridge", upto)
            assert (oldest(), oldest()) == (at, at)
        journal.commit("bridge", 6)
        assert oldest() is None
