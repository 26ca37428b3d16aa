"""The load against a real Mosquitto: what it claims is what a foreign subscriber got."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import mqtt5
import pytest

from tests.conftest import NewMosquitto
from tests.helpers import wait_until
from towline.errors import Unreachable
from towline_prove.devstack.mosquitto import Mosquitto
from towline_prove.history import Claims, SenderClaim, read_history
from towline_prove.load import LoadPlan, connect, run_load
from towline_prove.referee import Arrival, RunVerdict, judge_arrivals

pytestmark = pytest.mark.broker


@pytest.fixture
def broker(new_mosquitto: NewMosquitto) -> Mosquitto:
    return new_mosquitto(max_queued_messages="0", max_inflight_messages="0", persistence="true")


class Collector:
    """A plain subscriber that keeps every payload, in order."""

    def __init__(self, port: int) -> None:
        hello = mqtt5.ConnectPacket("collector", clean_start=False, session_expiry_interval=600)
        self.sock, _, self.rest = connect(hello, "127.0.0.1", port)
        filters = [mqtt5.TopicFilter("telemetry/#", max_qos=mqtt5.QoS.AT_LEAST_ONCE)]
        self.sock.sendall(mqtt5.SubscribePacket(1, filters).write())
        self.arrivals: list[Arrival] = []

    def collect(self, claims: Claims, *, qos_0: bool = False) -> RunVerdict:
        """Receive until nothing acknowledged (at QoS 0: attempted) is missing, and judge that."""
        self.sock.settimeout(20)
        verdict = judge_arrivals(claims, self.arrivals)
        while verdict.lost or (qos_0 and verdict.missing):
            data = self.sock.recv(1 << 20)
            assert data, "the broker closed the connection"
            self._take(self.rest + data)
            verdict = judge_arrivals(claims, self.arrivals)
        self.sock.close()
        return verdict

    def _take(self, data: bytes) -> None:
        view, at, acks = memoryview(data), 0, bytearray()
        while at < len(view):
            try:
                packet, used = mqtt5.read(view[at:])
            except IndexError:
                break
            at += used
            if isinstance(packet, mqtt5.PublishPacket):
                self.arrivals.append(Arrival(0, len(self.arrivals), None, bytes(packet.payload)))
                acks += mqtt5.PubAckPacket(packet.packet_id).write() if packet.packet_id else b""
        self.rest = bytes(view[at:])
        self.sock.sendall(acks)


@pytest.mark.parametrize("qos", [0, 1, 2])
def test_everything_claimed_arrives(broker: Mosquitto, tmp_path: Path, qos: int) -> None:
    collector = Collector(broker.port)
    result = run_load(LoadPlan(port=broker.port, messages=2000, rate=4000, qos=qos), tmp_path / "claims")
    assert (result.attempted, result.acked) == (2000, 2000 if qos else 0)
    assert 0.45 <= result.seconds < 5
    verdict = collector.collect(read_history(tmp_path / "claims"), qos_0=qos == 0)
    assert verdict.ok("exactly_once"), verdict.summary_line()
    assert (verdict.delivered, len(verdict.device_partitions)) == (2000, 50)


def test_a_killed_load_can_still_be_judged(broker: Mosquitto, tmp_path: Path) -> None:
    collector, claims = Collector(broker.port), tmp_path / "claims"
    command = [sys.executable, "-m", "towline_prove", "load", str(claims), "--port", str(broker.port)]
    child = subprocess.Popen([*command, "--messages", "100000", "--rate", "5000"], stdout=subprocess.DEVNULL)
    wait_until(lambda: claims.exists() and read_history(claims).count(SenderClaim.ACKED) > 500, what="500 acknowledged")
    child.kill()
    child.wait(60)
    history = read_history(claims)
    assert 500 <= history.count(SenderClaim.ACKED) <= history.count(SenderClaim.ATTEMPTED) < 100_000
    verdict = collector.collect(history)
    assert verdict.lost == verdict.unexpected == 0, verdict.summary_line()


def test_no_broker_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(Unreachable, match=r"no connection .*TL-M60"):
        run_load(LoadPlan(port=1, messages=1, seconds=0.5), tmp_path / "claims")
