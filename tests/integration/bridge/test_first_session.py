"""The README's quick start and the sessions of docs/operate.md, typed in a person's terminal, on real servers."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from tests.helpers import wait_until
from tests.integration.bridge.terminal import COLUMNS, PROMPT, Terminal, sessions
from towline.bridge.config.file import load
from towline.bridge.runtime.status import collect_status
from towline_prove.devstack import Stack

ROOT = Path(__file__).parents[3]
README, OPERATE, CONFIGURATION = (
    (ROOT / name).read_text() for name in ("README.md", "docs/operate.md", "docs/configure.md")
)
#: Seconds for one answer: a start of Spark on a machine that is busy.
PATIENCE = 240.0


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


@pytest.mark.broker
@pytest.mark.kafka
@pytest.mark.spark
@pytest.mark.usefixtures("stack_programs")
def test_the_pages_sessions(tmp_path: Path) -> None:
    first, second, end = sessions(README)
    lines, move = sessions(OPERATE)
    up, down = sessions(CONFIGURATION)
    home = {"XDG_STATE_HOME": str(tmp_path / "state-home")}
    try:
        with Terminal(tmp_path, home) as one, Terminal(tmp_path, home) as other:
            one.perform(up, PATIENCE)
            one.wait_for(PROMPT, PATIENCE)
            names = dict(
                zip(
                    ("mqtt://broker.example:1883", "kafka.example:9092"),
                    re.findall(r"^(?:mosquitto|kafka) +(\S+) ", one.said, re.MULTILINE),
                    strict=True,
                )
            )
            one.perform(first, PATIENCE, names)
            wait_until(lambda: re.search('line "telemetry" .* running', one.said), PATIENCE, "the line to run")
            other.perform(second, PATIENCE, names)
            wait_until(lambda: _in_kafka(tmp_path) == 1000, PATIENCE, "all messages in Kafka")
            other.clear()
            other.perform(lines, PATIENCE, names)
            other.wait_for(PROMPT, PATIENCE)
            for word in ("paused: receiving continues", "received 1,500 = in Kafka 1,000 + waiting 500", "resumed"):
                assert word in " ".join(other.said.split()), other.said
            wait_until(lambda: _in_kafka(tmp_path) == 1500, PATIENCE, "what waited in Kafka")
            one.clear()
            one.type("\x03")
            one.perform(end + move, PATIENCE)
            one.perform(down, PATIENCE)
            one.wait_for(PROMPT, PATIENCE)
            assert "received 1,500 = in Kafka 1,500 + waiting 0 adds up ✓" in " ".join(one.said.split())
            for said in (one.said, other.said):  # no row is longer than the terminal, but for what is typed, or a word
                rows = [row for row in said.splitlines() if len(row) > COLUMNS and not row.startswith(PROMPT)]
                assert [row for row in rows if max(map(len, row.split())) < COLUMNS // 2] == []
        shown, *_ = re.findall(r"```toml\n(.*?)```", CONFIGURATION, re.DOTALL)
        for name, real in names.items():
            shown = shown.replace(name, real)
        assert tomllib.loads((tmp_path / "elsewhere" / "bridge.toml").read_text()) == tomllib.loads(shown)
    finally:
        Stack(tmp_path / "state-home" / "towline" / "devstack").stop()


def _in_kafka(directory: Path) -> int:
    """What the account says."""
    account = collect_status(directory / "state", ["telemetry"])["lines"]["telemetry"].get("account") or {}
    return int(account.get("in_kafka", -1))
