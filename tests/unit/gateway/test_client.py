from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers import wait_until
from tests.unit.gateway.serving import Served, served
from towline.errors import GatewayUnreachable
from towline.gateway.client import GatewayClient


def test_no_gateway_is_one_clear_line(tmp_path: Path) -> None:
    client = GatewayClient(f"grpc+unix://{tmp_path}/none.sock")
    with pytest.raises(GatewayUnreachable) as caught:
        client.status()
    assert str(caught.value) == (
        f"grpc+unix://{tmp_path}/none.sock: no gateway answers (Unavailable). Is it running? `towline status` shows "
        "it; with the option stateDir a source starts one itself.   [TL-G01]"
    )


def test_the_client_comes_back_when_the_gateway_does(tmp_path: Path) -> None:
    with served(tmp_path / "state") as server:
        client = GatewayClient(server.location)
        assert client.status()["epoch"] == 1
    with pytest.raises(GatewayUnreachable):
        client.status()
    with served(tmp_path / "state"):

        def epoch() -> int:
            try:
                return int(client.status()["epoch"])
            except GatewayUnreachable:
                return 0

        assert wait_until(epoch) == 2
    client.close()


def test_a_signal_is_handled_while_a_reader_waits(server: Served, tmp_path: Path) -> None:
    """A SIGTERM handler runs at once, though gRPC would hold the main thread for a minute."""
    program = (
        "import signal, sys\n"
        "from towline.gateway.client import GatewayClient, Lease\n"
        "def leave(*_):\n    print('left', flush=True); raise SystemExit(7)\n"
        "signal.signal(signal.SIGTERM, leave)\n"
        f"client = GatewayClient({server.location!r})\n"
        f"client.wait(Lease('default'), 0, journal={server.journal.journal_id!r}, timeout_s=60)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    try:
        wait_until(lambda: server.service._long_poll.waiters == 1, what="a waiting reader")
        start = time.monotonic()
        child.terminate()
        out, _ = child.communicate(timeout=60)
        assert (child.returncode, out) == (7, b"left\n")
        assert time.monotonic() - start < 10
    finally:
        child.kill()


def test_importing_the_client_loads_no_flight() -> None:
    assert loaded("towline, towline.gateway.client, towline.spark.link") & {"pyarrow", "pydantic", "pyspark"} == set()


def test_a_spark_worker_loads_no_mqtt() -> None:
    modules = loaded("towline.spark.sink, towline.spark.reader, towline.spark.session")
    assert (
        modules & {"mqtt5", "pydantic", "towline.mqtt", "towline.net", "towline.journal", "towline.delivery"} == set()
    )


def loaded(modules: str) -> set[str]:
    """What a fresh interpreter has loaded after importing these."""
    program = f"import sys, {modules}\nprint(*sys.modules)"
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    return set(out.stdout.split())
