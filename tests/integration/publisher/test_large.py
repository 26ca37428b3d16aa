"""A million messages wait for a broker that is away: memory stays what it was, and all of them arrive."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import NewMosquitto

#: Fills an outbox with numbered messages, delivers them, and prints the peak of its memory in MiB before and after.
LIFE = """
import resource, sys
from towline import Publisher
broker, away, state, count = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024

with Publisher(away, state_dir=state, client_id="large") as publisher:
    last = None
    for number in range(count):
        last = publisher.publish("t/%d" % (number % 100), b"x" * 100, wait=False)
        if number == 50_000:
            last.on_disk.result()
            print(peak())
    last.on_disk.result()
    print(peak())
    assert publisher.close(0) == count
with Publisher(broker, state_dir=state, client_id="large") as publisher:
    assert publisher.flush(900) == 0
    assert publisher.status()["delivered"] == count
print(peak())
"""


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_million_messages_in_bounded_memory(new_mosquitto: NewMosquitto, tmp_path: Path) -> None:
    broker = new_mosquitto(max_inflight_messages="0")
    command = [sys.executable, "-c", LIFE, broker.uri, "mqtt://127.0.0.1:1", str(tmp_path / "p"), "1000000"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=1700)
    early, full, delivered = map(int, done.stdout.split())
    assert full - early < 60
    assert delivered - early < 150
