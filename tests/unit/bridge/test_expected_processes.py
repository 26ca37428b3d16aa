"""What a person reads of real processes that reach nothing: no broker, no Kafka, no Java."""

# ruff: noqa: E501 - a screen's line is as long as it is

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import wait_until
from tests.unit.bridge.test_config import GOOD, read

REFUSED = "mqtt://127.0.0.1:1: no connection (connection refused). Is the broker up, and the port right?   [TL-M01]"


@pytest.fixture
def nowhere(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    """A bridge for which there is no broker, no Kafka, and a Java that does not start; and its environment."""
    text = GOOD.replace("mqtt://a:1883", "mqtt://127.0.0.1:1").replace("k1:9092", "127.0.0.1:1")
    file = read(text, tmp_path).file
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "java").symlink_to("/bin/false")
    environ = {name: value for name, value in os.environ.items() if name not in ("JAVA_HOME", "SPARK_HOME")}
    return file, {**environ, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}


def real(nowhere: tuple[Path, dict[str, str]], *command: str) -> subprocess.Popen[str]:
    """A real process, its console in ``out``."""
    file, environ = nowhere
    with (file.parent / "out").open("w") as out:
        towline = [*command[:-1], sys.executable, "-m", "towline", command[-1], str(file)]
        return subprocess.Popen(towline, stdout=out, stderr=out, stdin=subprocess.DEVNULL, env=environ, text=True)


def console(nowhere: tuple[Path, dict[str, str]], *awaited: str) -> list[str]:
    """Its lines, once they hold what is awaited; each once, times and places aside."""
    out = nowhere[0].parent / "out"
    wait_until(lambda: all(text in out.read_text() for text in awaited), what=f"{awaited}")
    text = re.sub(r"(?m)^\d{4}-\d\d-\d\dT[\d:]{8}Z  ", "", out.read_text()).replace(str(nowhere[0].parent), "HERE")
    text = re.sub(r"(?m)^(  version   |towline \d).*\n", "", text)
    text = re.sub(r"\d\d:\d\d:\d\d", "12:31:07", re.sub(r"in \d+\.\d s", "in N s", text))
    return list(dict.fromkeys(re.sub(r"for \d+ s", "for N s", re.sub(r"pid \d+", "pid 4711", text)).splitlines()))


def test_a_real_one_that_reaches_nothing(nowhere: tuple[Path, dict[str, str]]) -> None:
    """`nohup`, so that a log-out does not end it, and SIGHUP reloads it all the same; SIGTERM ends it.

    No Maven either, so a line from Kafka has no jars, which is no fault of the uplink's.
    """
    file, environ = nowhere
    with file.open("a") as more:
        more.write('\n[[downlink]]\nname = "commands"\nfrom = "commands"\n')
    (file.parent / "bin" / "nohup").symlink_to(str(shutil.which("nohup")))
    place = str(file.parent)
    poor = {**environ, "PATH": f"{place}/bin", "HOME": place, "XDG_CACHE_HOME": place}
    process = real((file, poor), "nohup", "run")
    try:
        console(nowhere, "[TL-K01]", "the same", "broker offline", 'line "commands": this line stops')
        process.send_signal(signal.SIGHUP)
        console(nowhere, "reload: ")
    finally:
        process.terminate()
        assert process.wait(60) == 0
    again = "restarting in N s, messages are still received (log: HERE/state/logs/driver.log)"
    said = console(nowhere)
    assert sum("[TL-B07]" in text for text in said) == 1
    assert sorted(text for text in said if "commands" not in text and "[TL-B07]" not in text) == sorted(
        [
            f'line "telemetry": {REFUSED}',
            'line "telemetry"   broker offline   received 0 = in Kafka 0 + waiting 0   in 0/s   out 0/s   lag 0.0 s',
            f"spark: the session did not start: Spark's JVM ended before it was ready. See the driver's log.   [TL-B01]; {again}",
            f"spark: the same error; {again}",
            "127.0.0.1:1: Kafka did not answer for N s: 127.0.0.1:1: Connect to ipv4#127.0.0.1:1 failed: Connection refused. Check the bootstrap servers, the network and, if Kafka asks for them, user and password.   [TL-K01]",
            f"reload: HERE/{nowhere[0].name} is unchanged; files with secrets are read at each new connection, Kafka's by each new client",
            "kafka: messages are still received and wait on disk; retrying",
            'line "telemetry": received 0 = in Kafka 0 + waiting 0   adds up ✓',
            'line "telemetry": no broker was reached',
        ]
    )


def test_a_real_one_that_is_killed(nowhere: tuple[Path, dict[str, str]]) -> None:
    process = real(nowhere, "run")
    console(nowhere, "broker offline")
    state_dir = nowhere[0].parent / "state"
    wait_until(lambda: '"state": "offline"' in (state_dir / "bridge.json").read_text(), what="its state")
    process.kill()
    process.wait()
    endpoint = state_dir / "telemetry" / "endpoint.json"
    wait_until(lambda: not endpoint.exists(), what="the end of its gateway")
    assert real(nowhere, "status").wait(60) == 3
    assert console(nowhere) == [
        '✗ bridge "plant-7"   not running, it was killed (pid 4711)   last update 12:31:07',
        '! line "telemetry"   not running   at_least_once',
        "  ! no gateway runs: nothing is received; the broker queues what it can for this client's session. Start towline run.",
        "  account   unknown: no gateway answers   last update 12:31:07: received 0 = in Kafka 0 + waiting 0",
    ]
    log = (state_dir / "logs" / "gateway-telemetry.log").read_text().splitlines()
    events = [(line["event"], line.get("code"), line.get("reason")) for line in map(json.loads, log)]
    assert list(dict.fromkeys(events)) == [
        ("begins", None, None),
        ("no connection", "TL-M01", f"telemetry at {REFUSED}"),
        ("serving", None, None),
        ("owner ended, ending too", None, None),
        ("ended", None, "as asked"),
    ]
