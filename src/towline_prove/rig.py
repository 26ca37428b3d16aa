"""Test rig: a real Mosquitto, a real Kafka and a bridge between them, each behind a fault proxy."""

from __future__ import annotations

import contextlib
import itertools
import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from towline.checkpoint import Checkpoint
from towline.net.client import Client
from towline_prove.devstack import Kafka, Mosquitto, free_port
from towline_prove.devstack.process import wait_for
from towline_prove.history import Claims, SenderClaim, decode_message
from towline_prove.load import LoadPlan, LoadResult, run_load
from towline_prove.processes import Role
from towline_prove.proxy import FaultProxy
from towline_prove.reader import TopicTail, read_topic
from towline_prove.referee import RunAccount, Watermarks, judge_arrivals
from towline_prove.subject import LINE, TOPIC, BridgeRun, NotReady, bridge_file

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from towline_prove.devstack.server import Server

#: Spark's first batch on a busy machine takes its time.
DELIVERY_TIMEOUT_S = 400.0
#: Settings recommended to users, so that the broker drops nothing while a gateway restarts.
UNLIMITED_QUEUE = {"max_queued_messages": "0", "max_inflight_messages": "1000"}
#: Of the publishers and of the line.
QOS_OF_GUARANTEE = {"at_most_once": 0, "at_least_once": 1, "exactly_once": 2}
#: Bytes that the publishers of a load may have unanswered, all together.
_MAX_UNACKED_BYTES: Final = 256 << 20


class Rig:
    """Complete path from publishers to Kafka: Mosquitto, a bridge with one line, and Kafka; a context manager.

    Args:
        client: Settings of the bridge's Kafka client.
        uplink_line: A further line of the uplink's table.
        direct: Connect the bridge to both brokers without a proxy; no connection can be cut then.
    """

    def __init__(
        self,
        directory: Path,
        *,
        mosquitto: Mapping[str, str] | None = None,
        guarantee: str = "at_least_once",
        partitions: int = 2,
        kafka: Mapping[str, str] | None = None,
        client: Mapping[str, int] | None = None,
        uplink_line: str = "",
        direct: bool = False,
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.guarantee = guarantee
        self.mosquitto = Mosquitto(directory / "mosquitto", settings={"sys_interval": "1", **(mosquitto or {})})
        self._partitions = partitions
        settings = ", ".join(f'"{name}" = {value}' for name, value in (client or {}).items())
        self._file_parts = (f"settings = {{ {settings} }}", uplink_line)
        self._direct = direct
        proxy_port, kafka_port = free_port(), free_port()
        advertised = {} if direct else {"advertised.listeners": f"PLAINTEXT://127.0.0.1:{proxy_port}"}
        self.kafka = Kafka(directory / "kafka", port=kafka_port, settings={**advertised, **(kafka or {})})
        self._brokers: dict[Role, Server] = {Role.MOSQUITTO: self.mosquitto, Role.KAFKA: self.kafka}
        self.kafka_proxy = FaultProxy(kafka_port, listen_port=proxy_port)
        state_dir = directory / "state" / LINE
        self.bridge = BridgeRun(directory / "bridge.toml", state_dir, directory / "bridge.log")
        self._trial_numbers = itertools.count(1)

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            for broker in (self.mosquitto, self.kafka_proxy, self.kafka):
                stack.enter_context(broker)
            self.mqtt_proxy = stack.enter_context(FaultProxy(self.mosquitto.port))  # the port is fixed now
            self.kafka.create_topics({TOPIC: self._partitions})
            self._write_config()
            stack.enter_context(self.bridge).start()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _write_config(self) -> None:
        mqtt = self.mosquitto.uri if self._direct else f"mqtt://127.0.0.1:{self.mqtt_proxy.port}"
        client_line, uplink_line = self._file_parts
        endpoints = (self.directory / "state", mqtt, self.bootstrap)
        text = bridge_file(*endpoints, self.guarantee, writer="prove", kafka_line=client_line, uplink_line=uplink_line)
        self.bridge.config.write_text(text, encoding="utf-8")

    @property
    def versions(self) -> str:
        """Versions and addresses of both brokers, for people."""
        return f"Mosquitto {self.mosquitto.version} {self.mosquitto.uri}   Kafka {self.kafka.version} {self.bootstrap}"

    @property
    def bootstrap(self) -> str:
        """Bootstrap servers for an independent reader: the advertised ones, the proxy's if there is a proxy."""
        return self.kafka.bootstrap if self._direct else f"127.0.0.1:{self.kafka_proxy.port}"

    @property
    def batches(self) -> int:
        """Number of micro-batches in the line's commit log."""
        batch = Checkpoint(str(self.bridge.state_dir / "checkpoint")).last_committed_batch()
        return 0 if batch is None else batch + 1

    def kill(self, role: Role) -> bool:
        """Kill the process with this role by SIGKILL, brokers included; False if there is none."""
        if role not in self._brokers:
            return self.bridge.kill_role(role)
        self._brokers[role].kill()
        return True

    def revive(self, role: Role) -> bool:
        """Restart the process with this role as a service manager would; return whether it runs now."""
        if role not in self._brokers:
            return self.bridge.revive_role(role)
        self._brokers[role].start()
        return True

    def wait_online(self, timeout: float = DELIVERY_TIMEOUT_S) -> None:
        """Wait until the gateway is subscribed; NotReady TL-P01 if that takes too long or the bridge has ended."""
        wait_for(lambda: not self.bridge.running or self.bridge.state == "online", timeout, 0.05)
        self._check_running()
        if self.bridge.state != "online":
            raise NotReady("TL-P01", "the bridge", "its gateway is not subscribed", f"See {self.bridge.log}.")

    def _check_running(self) -> None:
        if not self.bridge.running:
            last_line = next(reversed(self.bridge.log.read_text(encoding="utf-8", errors="replace").splitlines()), "")
            raise NotReady("TL-P01", "the bridge", f"it has ended: {last_line}", f"See {self.bridge.log}.")

    def warm_up(self, messages: int = 200, rate: float = 0.0) -> None:
        """Send first messages to Kafka, as fast as the broker allows by default, so that Spark is warm."""
        self.wait_online()
        with self.start_trial("warm") as trial:
            trial.send_load(messages, rate=rate)
            wait_for(lambda: not self.bridge.running or trial.all_delivered(), DELIVERY_TIMEOUT_S, 0.05)
            self._check_running()
            account = trial.account()
        if not account.ok:
            problem = f"did not deliver the first messages: {account.line()}"
            raise NotReady("TL-P01", "the line", problem, f"See {self.bridge.log}.")

    def watermarks(self, timeout: float = 30.0) -> Watermarks | None:
        """Return the watermarks of the gateway; None if it does not answer in time."""
        status: dict[str, Any] = {}

        def has_status() -> bool:
            status.update(self.bridge.status() or {})
            return bool(status)

        return Watermarks.from_status(status) if wait_for(has_status, timeout) else None

    def journaled_count(self) -> int:
        """Return the number of messages in the gateway's journal; 0 if it does not answer in time."""
        watermarks = self.watermarks()
        return watermarks.journaled if watermarks else 0

    def broker_dropped(self) -> int:
        """Return the broker's count of messages dropped by a full queue, at most a second old; NotReady TL-P01."""
        topic = "$SYS/broker/publish/messages/dropped"
        with Client(self.mosquitto.uri, client_id=f"prove-sys-{time.time_ns()}", subscribe=[topic]) as client:
            message = client.receive(15)
        if message is None or message.payload is None:
            raise NotReady("TL-P01", self.mosquitto.uri, f"it says nothing on {topic}", f"See {self.mosquitto.log}.")
        return int(message.payload)

    def start_trial(self, name: str = "trial") -> Trial:
        """Start a trial; call it while Kafka answers."""
        return Trial(self, f"{name}-{next(self._trial_numbers)}")


class Trial:
    """Numbered messages sent through a rig in parts named ``run_name.n``, and their account; a context manager."""

    def __init__(self, rig: Rig, run_name: str) -> None:
        self._rig = rig
        self._run_name = run_name
        self._claims: list[Claims] = []
        self._tail = TopicTail(rig.bootstrap, TOPIC, skip_existing=True)
        self._arrived_messages: set[tuple[str, int, int]] = set()
        self._watermarks_before = rig.watermarks()
        self.notes: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._tail.close()

    def plan_load(
        self, messages: int, *, rate: float = 0.0, seconds: float = 600.0, size: int = 150, devices: int = 50
    ) -> tuple[LoadPlan, Path]:
        """Return the plan of the next part and its claim file, for loads in another process."""
        part_name = f"{self._run_name}.{len(self._claims) + 1}"
        path = self._rig.directory / f"claims-{part_name}"
        self._claims.append(Claims(path))
        publishers = min(8 if size < 1 << 20 else 4, messages, devices)
        plan = LoadPlan(
            port=self._rig.mosquitto.port,
            run=part_name,
            publishers=publishers,
            devices=max(publishers, min(devices, messages)),
            messages=messages,
            rate=rate,
            seconds=seconds,
            qos=QOS_OF_GUARANTEE[self._rig.guarantee],
            size=size,
            window=max(1, min(1000, _MAX_UNACKED_BYTES // publishers // size)),
        )
        return plan, path

    def send_load(self, messages: int, *, rate: float = 0.0, seconds: float = 600.0) -> LoadResult:
        """Send the next part directly to the broker, and wait until it is acknowledged."""
        plan, claims = self.plan_load(messages, rate=rate, seconds=seconds)
        return run_load(plan, claims)

    def count_arrived(self, seconds: float = 1.0) -> int:
        """Read for at most this long; return the number of distinct messages of this trial in Kafka."""
        for arrival in self._tail.read_arrivals(seconds):
            message = decode_message(arrival.value)
            if message is not None and message.run.startswith(f"{self._run_name}."):
                self._arrived_messages.add((message.run, message.publisher, message.number))
        return len(self._arrived_messages)

    def count_claims(self, claim: SenderClaim) -> int:
        """Return the number of messages with this claim, over all parts."""
        return sum(claims.read_file().count(claim) for claims in self._claims if claims.path and claims.path.exists())

    def watermarks(self, timeout: float = 5.0) -> Watermarks | None:
        """Return the gateway's watermarks since the start of the trial; None if it does not answer in time."""
        current = self._rig.watermarks(timeout)
        return current.subtract(self._watermarks_before) if current and self._watermarks_before else current

    def all_delivered(self) -> bool:
        """Return whether all acknowledged messages are in Kafka, and all journaled ones committed."""
        if self.count_arrived(0.1) < self.count_claims(SenderClaim.ACKED):
            return False
        watermarks = self._rig.watermarks(5)
        return watermarks is not None and watermarks.uncommitted == 0

    def account(self) -> RunAccount:
        """Compare the claims with Kafka's records, read by a new consumer: that of `count_arrived` may be stuck."""
        arrivals = read_topic(self._rig.bootstrap, TOPIC, start=self._tail.start, seconds=DELIVERY_TIMEOUT_S)
        verdict = judge_arrivals([claims.read_file() for claims in self._claims], arrivals)
        return RunAccount(verdict, self._rig.guarantee, self.watermarks(30), self.notes, self._rig.bridge.account())


class Outage(NamedTuple):
    """Outage of a server or connection that ends after a while.

    Attributes:
        inject: Starts the outage.
        fix: Ends the outage.
        needs_proxies: True if the rig needs its proxies for it.
    """

    inject: Callable[[Rig], object]
    fix: Callable[[Rig], object]
    needs_proxies: bool = True


def _both_refuse(rig: Rig) -> None:
    rig.mqtt_proxy.refuse()
    rig.kafka_proxy.refuse()


def _both_forward(rig: Rig) -> None:
    rig.kafka_proxy.forward()
    rig.mqtt_proxy.forward()


#: Name → outage. A server that hangs (SIGSTOP, or a proxy that passes nothing on) keeps its
#: connections open and answers nobody; one that refuses lives, and nobody reaches it. The connection that is cut in the
#: middle of a packet from the broker recovers by itself.
OUTAGES: Mapping[str, Outage] = {
    "kafka stopped": Outage(lambda rig: rig.kafka.stop(), lambda rig: rig.kafka.start(), needs_proxies=False),
    "kafka killed": Outage(lambda rig: rig.kafka.kill(), lambda rig: rig.kafka.start(), needs_proxies=False),
    "kafka hangs": Outage(lambda rig: rig.kafka.pause(), lambda rig: rig.kafka.resume(), needs_proxies=False),
    "kafka refuses": Outage(lambda rig: rig.kafka_proxy.refuse(), lambda rig: rig.kafka_proxy.forward()),
    "mqtt refused": Outage(lambda rig: rig.mqtt_proxy.refuse(), lambda rig: rig.mqtt_proxy.forward()),
    "mqtt hangs": Outage(lambda rig: rig.mqtt_proxy.hang(), lambda rig: rig.mqtt_proxy.forward()),
    "mqtt cut in a packet": Outage(lambda rig: rig.mqtt_proxy.cut_after(301), lambda _: None),
    "both gone": Outage(_both_refuse, _both_forward),
    "bridge down": Outage(lambda rig: rig.bridge.kill(), lambda rig: rig.bridge.start(), needs_proxies=False),
}
