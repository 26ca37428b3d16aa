"""`towline init` on a real terminal."""

from __future__ import annotations

from pathlib import Path

from tests.integration.bridge.terminal import PROMPT, Terminal
from towline.bridge.config.file import load


def test_on_a_terminal_it_asks_until_the_answer_can_be(tmp_path: Path) -> None:
    """A real terminal: what is asked, what is told of a wrong answer, and the file that comes of it."""
    with Terminal(tmp_path, {"COLUMNS": "200"}) as shell:
        shell.wait_for(PROMPT, 60)
        shell.type("towline init --guarantee exactly_once --name plant-7\n")
        for answer in ("http://b", "mqtt://b:1884", "", "k1", "k1:9092", "readings"):
            shell.wait_for("]: ", 60)
            shell.type(f"{answer}\n")
        shell.wait_for(PROMPT, 60)
        text = shell.said
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
