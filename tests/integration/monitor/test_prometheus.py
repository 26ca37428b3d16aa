"""A real Prometheus reads `towline gateway --metrics`; its alerts fire when the broker, and the gateway, are gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import NewMosquitto
from tests.engines.prometheus import Prometheus
from tests.helpers import wait_until
from tests.integration.monitor.looking import Scraped
from towline_prove.devstack.process import free_port

pytestmark = pytest.mark.long  # Prometheus' own binary


def test_from_well_to_a_broker_that_is_away_to_a_gateway_that_is_gone(
    tmp_path: Path, new_mosquitto: NewMosquitto
) -> None:
    broker, port = new_mosquitto(), free_port()
    file = tmp_path / "bridge.toml"
    file.write_text(f"""
name = "plant"
state_dir = "state"
mqtt = {{ brokers = "{broker.uri}" }}
kafka = {{ bootstrap_servers = "127.0.0.1:9" }}
[[uplink]]
name = "line"
route = [{{ from = "t/#", topic = "t" }}]
""")
    command = [sys.executable, "-m", "towline", "gateway", str(file), "--metrics", str(port)]
    with (tmp_path / "log").open("wb") as log:
        gateway = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "LC_ALL": "C"})
    try:
        endpoint = Scraped(f"127.0.0.1:{port}")
        wait_until(lambda: _online(endpoint), what="the gateway online")
        with Prometheus(tmp_path / "prometheus", f"127.0.0.1:{port}") as prometheus:
            wait_until(lambda: 1.0 in prometheus.query("towline_broker_connected").values(), what="a scrape")
            judged = prometheus.rounds()
            wait_until(lambda: prometheus.rounds() > judged + 5, what="rules judged while all is well")
            assert prometheus.alerts() == {}
            assert prometheus.query("process_resident_memory_bytes{job='towline'}")
            broker.stop()
            wait_until(lambda: prometheus.firing() == {"TowlineBrokerAway"}, what="the alert")
            assert prometheus.was_pending("TowlineBrokerAway")
            gateway.send_signal(signal.SIGKILL)
            gateway.wait()
            wait_until(lambda: prometheus.firing() == {"TowlineScrapeFails"}, what="the other alert")
    finally:
        if gateway.poll() is None:
            gateway.kill()
        gateway.wait()


def _online(endpoint: Scraped) -> bool:
    try:
        return endpoint.verdict("readyz") == (200, [])
    except OSError:
        return False
