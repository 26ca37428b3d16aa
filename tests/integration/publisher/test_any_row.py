"""Rows as a disk may hold them, in a publisher's outbox: each is sent or set aside, whatever is killed [I15]."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import extremes
from tests.conftest import NewMosquitto
from towline.journal import Limits, Outbox
from towline.schema import OUTBOX_SCHEMA

SEED = int(os.environ.get("TOWLINE_SEED", "20261122"))
#: Delivers an outbox; with a number: until so many are done, and then ends as kill -9 ends it.
LIFE = """
import json, os, signal, sys
from towline import ClientSettings, Publisher
broker, state, most = sys.argv[1], sys.argv[2], int(sys.argv[3])
done = 0

def outcome(number, what):
    global done
    done += 1
    if done == most:
        os.kill(os.getpid(), signal.SIGKILL)

with Publisher(broker, state_dir=state, on_outcome=outcome) as publisher:
    assert publisher.flush(60) == 0
    print(json.dumps(publisher.status()))
"""


@pytest.mark.parametrize("protocol", ["5", pytest.param("3.1.1", marks=pytest.mark.long)])
def test_every_row_goes_out_or_is_set_aside(new_mosquitto: NewMosquitto, tmp_path: Path, protocol: str) -> None:
    broker = new_mosquitto(max_queued_messages="0")
    rows = extremes.outbox_rows(SEED, OUTBOX_SCHEMA)
    with_outbox = Outbox.open(tmp_path / "p" / "outbox", schema=OUTBOX_SCHEMA, limits=Limits(segment_bytes=16 << 20))
    with_outbox.append(rows)
    with_outbox.close()
    life = LIFE.replace("state_dir=state", f'state_dir=state, settings=ClientSettings(protocol="{protocol}")')
    for most in (1, 20):
        assert run(life, broker.uri, tmp_path / "p", most).returncode == -9
    last = run(life, broker.uri, tmp_path / "p", 0)
    assert last.returncode == 0, last.stderr[-1000:]
    status: dict[str, Any] = json.loads(last.stdout)
    assert (status["accepted"], status["queued"], status["in_flight"]) == (rows.num_rows, 0, 0), f"seed {SEED}"
    assert status["delivered"] + status["expired"] + status["refused"] == rows.num_rows
    assert status["delivered"] > rows.num_rows / 3
    assert "panicked" not in last.stderr
    assert "Traceback" not in last.stderr


def run(life: str, broker: str, state: Path, most: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", life, broker, str(state), str(most)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=150)
