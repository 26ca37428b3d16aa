"""Several gateways of one line on a real broker: nothing lost, nothing doubled, order as each way promises it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.helpers import ServiceManager, wait_until
from tests.integration.gateway.conftest import Gateway, NewMembers
from towline import Client
from towline.gateway.identity import read_client_sessions
from towline.gateway.launch import find_running
from towline_prove.devstack import Mosquitto

ROUTE = '[[uplink.route]]\nfrom = "t/{site}/{device}/#"\ntopic = "t"\n'
TWO = '[[uplink.member]]\nname = "g1"\n[[uplink.member]]\nname = "g2"\n'
DEVICES, EACH = 50, 12


class Devices(threading.Thread):
    """Fifty devices, each with messages in order on several topics, QoS 2."""

    def __init__(self, broker: Mosquitto, first: int = 0) -> None:
        super().__init__(daemon=True)
        self._uri = broker.uri
        self._first = first
        self.half = threading.Event()

    def run(self) -> None:
        with Client(self._uri, client_id=f"devices-{self._first}") as client:
            sent = []
            for number in range(self._first, self._first + EACH):
                for device in range(DEVICES):
                    site = "n" if device % 2 else "s"
                    sent.append(client.publish(f"t/{site}/d{device}/{number % 3}", b"%d" % number, qos=2))
                if number == self._first + EACH // 2:
                    self.half.set()
            for one in sent:
                one.wait(60)


def stored(gateway: Gateway) -> dict[str, list[int]]:
    """Device → its numbers, in the order of the journal."""
    status = gateway.status()
    found: dict[str, list[int]] = defaultdict(list)
    for batch in gateway.client.read(status["journal"], status["first"], status["end"]):
        for row in batch.select(["topic", "payload"]).to_pylist():
            found[row["topic"].split("/")[2]].append(int(row["payload"]))
    return dict(found)


def accounted(gateway: Gateway) -> dict[str, Any]:
    """The account of a gateway that nothing comes to: everything received has its place [I11]."""
    last: dict[str, Any] = {}

    def settled() -> bool:
        before, now = (
            dict(last),
            {key: value for key, value in gateway.status().items() if key not in ("turned_s", "up_s")},
        )
        last.update(now)
        return now == before and now["unacknowledged"] == 0

    wait_until(settled, what="an account that stands still")
    assert last["received"] == last["end"] + last["deduplicated"], last
    return last


def status_of(directory: Path) -> str:
    command = [sys.executable, "-m", "towline", "status", str(directory / "bridge.toml")]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def publishing(mosquitto: Mosquitto, members: Mapping[str, Gateway]) -> Devices:
    """Start all members, and devices that have sent half of their messages."""
    for one in members.values():
        one.connect()
    devices = Devices(mosquitto)
    devices.start()
    assert devices.half.wait(60)
    return devices


def test_by_filters_each_member_has_its_own(mosquitto: Mosquitto, new_members: NewMembers) -> None:
    two = '[[uplink.member]]\nname = "g1"\nfilters = ["t/n/#"]\n[[uplink.member]]\nname = "g2"\nfilters = ["+/s/#"]\n'
    members = new_members(mosquitto, f'guarantee = "exactly_once"\n{ROUTE}{two}')
    for one in members.values():
        one.connect()
    devices = Devices(mosquitto)
    devices.start()
    devices.join(60)
    for one in members.values():
        one.until(end=DEVICES * EACH // 2)
    both = [stored(one) for one in members.values()]
    assert both[0] == {f"d{n}": [*range(EACH)] for n in range(1, DEVICES, 2)}
    assert both[1] == {f"d{n}": [*range(EACH)] for n in range(0, DEVICES, 2)}


def test_a_shared_subscription_loses_and_doubles_nothing_and_hands_nothing_over(
    mosquitto: Mosquitto, new_members: NewMembers
) -> None:
    """What Mosquitto has queued for a member that is away waits for that member [MQTT-4.8.2-4]."""
    members = new_members(mosquitto, f'guarantee = "exactly_once"\nshare = "subscription"\n{ROUTE}{TWO}')
    first, second = members["g1"], members["g2"]
    devices = publishing(mosquitto, members)
    second.stop(signal.SIGKILL)
    devices.join(60)

    still = accounted(first)["end"]
    assert 0.4 < still / (DEVICES * EACH) < 0.6, "the member that is there gets its part and no more"
    second.start()
    wait_until(lambda: sum(one.status()["end"] for one in members.values()) >= DEVICES * EACH, what="all of it")
    merged: dict[str, list[int]] = defaultdict(list)
    for one in members.values():
        for device, numbers in stored(one).items():
            merged[device] += numbers
    assert {d: sorted(n) for d, n in merged.items()} == {f"d{n}": [*range(EACH)] for n in range(DEVICES)}

    # A member that leaves gives its part to the others from then on, and strands nothing.
    second.stop()
    second.start(1.0)
    second.until(drain="waiting for commits")
    more = Devices(mosquitto, EACH)
    more.start()
    more.join(60)
    wait_until(lambda: first.status()["end"] == still + DEVICES * EACH, what="all that came since")
    second.commit()
    assert second.process is not None
    assert second.process.wait(30) == 0
    assert [one.how for one in read_client_sessions(second.settings.state_dir)] == ["drained"]


def test_the_command_drains_in_place_of_what_runs(
    mosquitto: Mosquitto, new_members: NewMembers, tmp_path: Path
) -> None:
    members = new_members(mosquitto, f'share = "subscription"\n{ROUTE}{TWO}')
    command = [sys.executable, "-m", "towline", "gateway", str(tmp_path / "bridge.toml"), "--idle", "1", "--member"]

    def run(*more: str, **variables: str) -> subprocess.Popen[str]:
        environ = {**os.environ, **variables}
        return subprocess.Popen(
            [*command, *more], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environ
        )

    first = members["g1"]
    first.connect()
    with Client(mosquitto.uri, client_id="device") as client:
        for n in range(10):
            client.publish(f"t/a/d{n}", b"%d" % n, qos=1).wait(30)
    first.until(end=10)
    before = first.process
    assert before is not None

    with run("g1", "--drain") as draining:
        assert before.wait(30) == 0, "the one that ran is ended"
        first._client = wait_until(lambda: find_running(first.settings.state_dir), what="the gateway that is drained")
        first.until(drain="waiting for commits")
        assert "drain: waiting for commits" in status_of(tmp_path)
        draining.send_signal(signal.SIGINT)
        out, _ = draining.communicate(timeout=30)
    assert draining.returncode == 1, out
    assert "TL-G58" in out.splitlines()[-1]

    with run("g1", "--drain") as draining:
        first._client = wait_until(lambda: find_running(first.settings.state_dir), what="the gateway that is drained")
        first.commit()
        out, _ = draining.communicate(timeout=30)
    assert draining.returncode == 0, out
    assert out.splitlines()[-2:] == [
        "line-g1 is drained: all is committed, and its session at the broker is ended",
        'Remove it from a query over several gateways: removed_gateways = ["line-g1"].',
    ]
    with ServiceManager() as manager, run("g2", "--drain", **manager.environ) as alone:  # none runs, and none ever has
        out, _ = alone.communicate(timeout=60)
        assert manager.received.splitlines() == [f"STATUS=connected to {mosquitto.uri}", "READY=1", "STOPPING=1"]
    assert alone.returncode == 0, out
    assert find_running(members["g2"].settings.state_dir) is None
    status = status_of(tmp_path)
    assert "member    g1   none answers on this machine" in status
    assert "TL-M51" not in status


def test_a_member_taken_out_of_the_file_leaves_a_session_that_is_named_and_ended(
    mosquitto: Mosquitto, new_members: NewMembers, tmp_path: Path
) -> None:
    members = new_members(mosquitto, f'share = "subscription"\n{ROUTE}{TWO}')
    for one in members.values():
        one.connect()
        one.stop()
    shared = f'share = "subscription"\n{ROUTE}[[uplink.member]]\nname = "g1"\n'
    new_members(mosquitto, shared)
    assert f'the session "b-line-g2" at {mosquitto.uri} was not ended' in status_of(tmp_path)

    given_up = new_members(mosquitto, f'mqtt = {{ abandon_session = "b-line-g2" }}\n{shared}')
    given_up["g1"].start()
    its_own = members["g2"].settings.state_dir
    wait_until(
        lambda: [one.how for one in read_client_sessions(its_own)] == ["discarded"], what="the end of its session"
    )
    text = status_of(tmp_path)
    assert "was not ended" not in text
    assert "the order of a device's messages is not kept" in text
