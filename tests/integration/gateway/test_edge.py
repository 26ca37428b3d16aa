"""The session of docs/publishers.md, typed in a person's terminal: a gateway alone, with a broker and no Kafka."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.bridge.terminal import PROMPT, Terminal, sessions
from towline_prove.devstack import Mosquitto

PAGE = (Path(__file__).parents[3] / "docs" / "publishers.md").read_text()
PATIENCE = 60.0


@pytest.mark.broker
def test_the_edges_session(tmp_path: Path) -> None:
    (session,) = sessions(PAGE)
    with Mosquitto(tmp_path / "mosquitto") as broker, Terminal(tmp_path, {}) as shell:
        shell.perform(session, PATIENCE, {"mqtt://broker.example:1883": broker.address})
        shell.wait_for(PROMPT, PATIENCE)
        assert "received 1,000 = in Kafka 0 + waiting 1,000   adds up ✓" in shell.said
