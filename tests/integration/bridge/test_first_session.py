"""The README's first line: its commands, typed in a person's terminal as they stand there, on real servers."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from tests.helpers import lacking, wait_until
from tests.integration.bridge.terminal import COLUMNS, PROMPT, Terminal, sessions
from towline.bridge.runtime.status import collect
from towline.errors import SetupError
from towline.spark.java import find_java
from towline_prove.devstack import Stack
from towline_prove.devstack.kafka import kafka_jars
from towline_prove.devstack.mosquitto import find_mosquitto

README = (Path(__file__).parents[3] / "README.md").read_text()
#: Seconds for one answer: a start of Spark on a machine that is busy.
PATIENCE = 240.0


@pytest.mark.broker
@pytest.mark.kafka
@pytest.mark.spark
def test_the_readmes_first_line(tmp_path: Path) -> None:
    try:
        for needed in (find_java, kafka_jars, find_mosquitto):
            needed()
    except SetupError as error:
        lacking(str(error))
    first, second, end = sessions(README)
    home = {"XDG_STATE_HOME": str(tmp_path / "state-home")}
    try:
        with Terminal(tmp_path, home) as one, Terminal(tmp_path, home) as other:
            one.perform(first, PATIENCE)
            wait_until(lambda: re.search('line "telemetry" .* running', one.said), PATIENCE, "the line to run")
            other.perform(second, PATIENCE)
            wait_until(lambda: _in_kafka(tmp_path) == 1000, PATIENCE, "all messages in Kafka")
            one.clear()
            one.type("\x03")
            one.perform(end, PATIENCE)
            one.wait_for(PROMPT, PATIENCE)
            assert re.search(r"received 1,000 = in Kafka 1,000 \+ waiting 0\s+adds up ✓", one.said)
            for said in (one.said, other.said):  # no row is longer than the terminal, but for what is typed, or a word
                rows = [row for row in said.splitlines() if len(row) > COLUMNS and not row.startswith(PROMPT)]
                assert [row for row in rows if max(map(len, row.split())) < COLUMNS // 2] == []
        (shown,) = re.findall(r"```toml\n(.*?)```", README, re.DOTALL)
        assert tomllib.loads((tmp_path / "bridge.toml").read_text()) == tomllib.loads(shown)
    finally:
        Stack(tmp_path / "state-home" / "towline" / "devstack").stop()


def _in_kafka(directory: Path) -> int:
    """What the account says."""
    account = collect(directory / "state", ["telemetry"])["lines"]["telemetry"].get("account") or {}
    return int(account.get("in_kafka", -1))
