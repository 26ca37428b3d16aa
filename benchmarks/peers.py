"""Other bridges that install from public indexes, on the same backlog: CPU a message, and how fast it goes down.

mq-bridge is the fastest of those that acknowledge after Kafka. It stores nothing, and is tuned: its defaults are four
times slower.
"""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from benchmarks.intake import forget
from benchmarks.pipeline import RIVAL_TOPIC, Ends, drain, paho, paho_drain
from benchmarks.rig import Meter, publish, wait

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from towline_prove.rig import Rig

_MQ_BRIDGE: Final = "mq-bridge==1.2.*"
#: Ends by itself after an hour, whatever becomes of who started it.
_PROGRAM: Final = """
import json, sys, time
from mq_bridge import Route

route = Route.from_config(json.loads(sys.argv[1]))
route.start()
print("ready", flush=True)
time.sleep(3600)
"""


def _install(directory: Path) -> Path:
    """A virtual environment with mq-bridge; its Python."""
    subprocess.run([sys.executable, "-m", "venv", directory / "venv"], check=True)
    python = directory / "venv/bin/python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", _MQ_BRIDGE], check=True)
    return python


def _route(rig: Rig) -> dict[str, object]:
    session = {"client_id": "mq-bridge", "clean_session": False, "session_expiry_interval": 3600, "qos": 1}
    source = {"url": f"mqtt://127.0.0.1:{rig.mosquitto.port}", "topic": "telemetry/#", "queue_capacity": 4096}
    sink = {"url": rig.bootstrap, "topic": RIVAL_TOPIC}
    return {"input": {"mqtt": source | session}, "output": {"kafka": sink}, "batch_size": 1024}


@contextmanager
def mq_bridge(rig: Rig, directory: Path) -> Iterator[int]:
    """Run it; its pid."""
    python, out = _install(directory), directory / "mq-bridge.log"
    with out.open("wb") as file:
        child = subprocess.Popen([python, "-c", _PROGRAM, json.dumps(_route(rig))], stdout=file, stderr=file)
    try:
        wait(lambda: "ready" in out.read_text(), f"mq-bridge, see {out}", seconds=30)
        ends = Ends(rig.bootstrap, RIVAL_TOPIC, 2)
        publish(rig.mosquitto, directory, 1_000)
        wait(lambda: ends() >= 1_000, "mq-bridge to be warm")
        ends.close()
        yield child.pid
    finally:
        child.kill()
        child.wait()


def beside(rig: Rig, directory: Path, count: int, rounds: int) -> None:
    """Drain the same backlog with each peer, on brokers that nobody else uses meanwhile."""
    with mq_bridge(rig, directory) as pid:
        meter = Meter(
            {
                "bridge": lambda: [pid],
                "mosquitto": lambda: [rig.mosquitto.pid or 0],
                "kafka": lambda: [rig.kafka.pid or 0],
            }
        )
        for _ in range(rounds):
            name = "mq-bridge 1.2, tuned"
            print(drain(name, rig, directory, pid, meter, RIVAL_TOPIC, count, ["bridge"]).line(), flush=True)
    forget(rig.mosquitto, "mq-bridge")
    with paho(rig, directory, count // 10 * rounds) as pid:
        for _ in range(rounds):
            print(paho_drain(rig, directory, pid, count // 10).line(), flush=True)
