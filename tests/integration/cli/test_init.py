"""`towline init` on a real terminal."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

from towline.bridge.config.file import load


def test_on_a_terminal_it_asks_until_the_answer_can_be(tmp_path: Path) -> None:
    """A real terminal: what is asked, what is told of a wrong answer, and the file that comes of it."""
    main, side = pty.openpty()
    command = [sys.executable, "-m", "towline", "init", "--guarantee", "exactly_once", "--name", "plant-7"]
    environ = {**os.environ, "COLUMNS": "200", "TERM": "dumb"}
    with subprocess.Popen(command, stdin=side, stdout=side, stderr=side, cwd=tmp_path, env=environ) as process:
        os.close(side)
        os.write(main, b"http://b\nmqtt://b:1884\n\nk1\nk1:9092\nreadings\n")
        said = b""
        while True:
            try:
                more = os.read(main, 4096)
            except OSError:  # the other side is closed
                break
            said += more
            if not more:
                break
        assert process.wait(60) == 0
    os.close(main)
    text = said.decode().replace("\r\n", "\n")
    assert text.count("MQTT broker [mqtt://localhost:1883]: ") == 2
    assert "Error: a broker is mqtt://HOST[:PORT], mqtts://, ws://HOST[:PORT][/PATH], wss:// or unix:///PATH." in text
    assert text.count("MQTT topics [telemetry/{device}/#]: ") == 1
    assert 'Error: "k1" in "bootstrap_servers" is not HOST:PORT. Name one or more HOST:PORT' in text
    assert text.count("Kafka topic [telemetry]: ") == 1
    assert "Guarantee" not in text, "an option has said it"
    bridge = load(tmp_path / "bridge.toml", {})
    (line,) = bridge.uplinks
    assert (str(line.gateway.brokers[0]), bridge.kafka.bootstrap_servers) == ("mqtt://b:1884", "k1:9092")
    assert (line.name, line.fixed_topics[-1], line.guarantee.value) == ("readings", "readings", "exactly_once")
