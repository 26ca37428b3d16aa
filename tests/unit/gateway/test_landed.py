"""A gateway meets Kafka's client only when its inbox is there, and leaves nothing behind on disk when it changes."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.engines.crashing import received
from towline.errors import ConfigError
from towline.gateway.landed import owned
from towline.gateway.membership import Start
from towline.gateway.process import run
from towline.gateway.settings import GatewaySettings
from towline.journal import Journal, Limits
from towline.schema import ROW_SCHEMA


def settings(state_dir: Path, **more: object) -> GatewaySettings:
    given = {"name": "plant-7", "state_dir": state_dir, "brokers": "mqtt://x", "subscriptions": [{"filter": "#"}]}
    return GatewaySettings.model_validate({**given, **more})


def test_a_gateway_on_disk_loads_no_client_of_kafka() -> None:
    code = "import sys, towline.gateway.__main__; print([m for m in sys.modules if m.startswith('confluent_kafka')])"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


def test_rows_on_disk_are_not_left_behind(tmp_path: Path) -> None:
    given = settings(tmp_path, landing={"client": {"bootstrap.servers": "127.0.0.1:1"}})
    with Journal.open(given.inbox, schema=ROW_SCHEMA, limits=Limits(min_free_bytes=0)) as journal:
        journal.append(received(0, 3))
    with pytest.raises(ConfigError, match=r'holds 3 messages that wait.*inbox = "disk" until.*TL-C130'):
        owned(given, None, standby=False, stopped=threading.Event())


def test_a_standby_needs_an_inbox_in_kafka(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(settings(tmp_path), Start.STANDBY) == 2
    assert "TL-C131" in capsys.readouterr().out


def test_a_landing_changes_the_digest_and_its_absence_does_not(tmp_path: Path) -> None:
    landing = {"client": {"bootstrap.servers": "k:9092"}}
    assert settings(tmp_path).digest() != settings(tmp_path, landing=landing).digest()
