"""Other bridges that install from public indexes, on the same backlog: CPU a message, and how fast it goes down.

mq-bridge is the fastest of those that acknowledge after Kafka. It stores nothing, and is tuned: its defaults are four
times slower. Camel acknowledges after Kafka too, with manual acknowledgements and a persistent session.
"""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from benchmarks.intake import forget
from benchmarks.pipeline import RIVAL_TOPIC, Ends, paho, paho_drain, rival_drain
from benchmarks.rig import publish, running, wait
from towline.spark.java import find_java, resolve_jars

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
_CAMEL: Final = "4.14.0"
_CAMEL_PARTS: Final = ("camel-main", "camel-paho-mqtt5", "camel-kafka", "camel-xml-io-dsl")
_CAMEL_ROUTE: Final = """
<route>
  <from uri="paho-mqtt5:telemetry/#?brokerUrl=tcp://127.0.0.1:{port}&amp;clientId=camel&amp;cleanStart=false\
&amp;sessionExpiryInterval=3600&amp;qos=1&amp;manualAcksEnabled=true&amp;receiveMaximum=65534"/>
  <to uri="kafka:{topic}?brokers={kafka}&amp;lingerMs=20&amp;producerBatchSize=1000000"/>
</route>
"""


def _install(directory: Path) -> Path:
    """A virtual environment with mq-bridge; its Python."""
    subprocess.run([sys.executable, "-m", "venv", directory / "venv"], check=True)
    python = directory / "venv/bin/python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", _MQ_BRIDGE], check=True)
    return python


def _route(rig: Rig, prefix: str, topic: str) -> dict[str, object]:
    session = {"client_id": "mq-bridge", "clean_session": False, "session_expiry_interval": 3600, "qos": 1}
    source = {"url": f"mqtt://127.0.0.1:{rig.mosquitto.port}", "topic": f"{prefix}/#", "queue_capacity": 4096}
    sink = {"url": rig.bootstrap, "topic": topic}
    return {"input": {"mqtt": source | session}, "output": {"kafka": sink}, "batch_size": 1024}


@contextmanager
def mq_bridge(rig: Rig, directory: Path, prefix: str = "telemetry", topic: str = RIVAL_TOPIC) -> Iterator[int]:
    """Run it; its pid."""
    out = directory / "mq-bridge.log"
    with running([_install(directory), "-c", _PROGRAM, json.dumps(_route(rig, prefix, topic))], out) as child:
        wait(lambda: "ready" in out.read_text(), f"mq-bridge, see {out}", seconds=30)
        ends = Ends(rig.bootstrap, topic, 2)
        publish(rig.mosquitto, directory, 1_000, topic=f"{prefix}/{{device}}/data")
        wait(lambda: ends() >= 1_000, "mq-bridge to be warm")
        ends.close()
        yield child.pid


@contextmanager
def camel(rig: Rig, directory: Path) -> Iterator[int]:
    """Run a route of Camel; its pid."""
    parts = [f"org.apache.camel:{part}:{_CAMEL}" for part in _CAMEL_PARTS]
    jars = resolve_jars(f"camel-{_CAMEL}", [*parts, "org.slf4j:slf4j-nop:2.0.17"])
    route, out = directory / "camel.xml", directory / "camel.log"
    route.write_text(_CAMEL_ROUTE.format(port=rig.mosquitto.port, topic=RIVAL_TOPIC, kafka=rig.bootstrap))
    command: list[str | Path] = [find_java(), "-cp", f"{jars}/*", f"-Dcamel.main.routesIncludePattern=file:{route}"]
    ends = Ends(rig.bootstrap, RIVAL_TOPIC, 2)
    before = ends()
    with running([*command, "org.apache.camel.main.Main"], out) as child:
        wait(lambda: child.poll() is not None or _arrives(rig, ends, before), f"Camel, see {out}", seconds=60, pause=1)
        ends.close()
        if child.poll() is not None:
            raise SystemExit(f"Camel has ended, see {out}")
        yield child.pid


@contextmanager
def floor(rig: Rig, directory: Path, prefix: str = "telemetry", topic: str = RIVAL_TOPIC) -> Iterator[int]:
    """Run what stands in `benchmarks.floor_bridge`; its pid."""
    out = directory / "floor.log"
    places = [str(rig.mosquitto.port), rig.bootstrap, topic, f"{prefix}/#"]
    with running([sys.executable, "-m", "benchmarks.floor_bridge", *places], out) as child:
        wait(lambda: "ready" in out.read_text(), f"the floor, see {out}", seconds=30)
        yield child.pid


def _arrives(rig: Rig, ends: Ends, before: int) -> bool:
    """Whether a message comes through; until the subscription is there they are nobody's."""
    publish(rig.mosquitto, rig.directory, 1_000)
    return ends() > before


def beside(rig: Rig, directory: Path, count: int, rounds: int) -> None:
    """Drain the same backlog with each peer, on brokers that nobody else uses meanwhile."""
    with mq_bridge(rig, directory) as pid:
        _rounds("mq-bridge 1.2, tuned", rig, directory, pid, count, rounds)
    forget(rig.mosquitto, "mq-bridge")
    with floor(rig, directory) as pid:
        _rounds("floor: our decoder and librdkafka", rig, directory, pid, count, rounds)
    forget(rig.mosquitto, "floor")
    with camel(rig, directory) as pid:
        _rounds(f"Camel {_CAMEL}, manual acks", rig, directory, pid, count // 3, rounds + 1)
    forget(rig.mosquitto, "camel")
    with paho(rig, directory, count // 10 * rounds) as pid:
        for _ in range(rounds):
            print(paho_drain(rig, directory, pid, count // 10).line(), flush=True)


def _rounds(name: str, rig: Rig, directory: Path, pid: int, count: int, rounds: int) -> None:
    for _ in range(rounds):
        print(rival_drain(name, rig, directory, pid, count).line(), flush=True)
