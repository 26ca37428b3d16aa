"""One real Mosquitto, one real Kafka, one bridge between them, each behind a proxy, for soaks and outages."""

from __future__ import annotations

import contextlib
import signal
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import mqtt5

from towline_prove.account import RunAccount, Watermarks
from towline_prove.devstack import Kafka, Mosquitto, free_port
from towline_prove.devstack.process import wait_for
from towline_prove.history import SenderRecord, read_history
from towline_prove.load import LoadPlan, LoadResult, connect, run_load
from towline_prove.numbered import decode
from towline_prove.processes import Role
from towline_prove.proxy import FaultProxy
from towline_prove.reader import Tail
from towline_prove.referee import Arrival, judge
from towline_prove.subject import LINE, TOPIC, BridgeRun, NotReady, bridge_file

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["LINE", "TOPIC", "Rig", "Trial", "dropped_by"]

#: Spark's first batch on a busy machine takes its time.
PATIENCE_S = 400.0


def dropped_by(broker: Mosquitto) -> int:
    """What a Mosquitto says it dropped because a queue was full; as of its last ``sys_interval``."""
    hello = mqtt5.ConnectPacket(f"prove-sys-{time.time_ns()}", clean_start=True)
    sock, _, rest = connect(hello, "127.0.0.1", broker.port)
    with sock:
        sock.settimeout(15)
        topic = "$SYS/broker/publish/messages/dropped"
        sock.sendall(mqtt5.SubscribePacket(1, [mqtt5.TopicFilter(topic)]).write())
        while True:
            with contextlib.suppress(IndexError):
                packet, used = mqtt5.read(memoryview(rest))
                rest = rest[used:]
                if isinstance(packet, mqtt5.PublishPacket):
                    payload = packet.payload
                    assert isinstance(payload, bytes)
                    return int(payload)
                continue
            if not (more := sock.recv(4096)):
                raise ConnectionError("the broker ended the connection before it said what it dropped")
            rest += more


class Rig:
    """The whole way from publishers to Kafka, ready to be hurt; a context manager.

    Args:
        directory: Everything lives below it.
        mosquitto: Settings of the broker; its own defaults where not given.
        guarantee: Of the line.
        partitions: Of the Kafka topic.
        kafka: Settings of Kafka.
        client: Settings of the bridge's Kafka client.
        direct: The bridge meets both brokers without a proxy between, for measurements; nothing can be cut then.
        tier: Of Spark.
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
        direct: bool = False,
        tier: str = "auto",
    ) -> None:
        self.directory = directory
        self.guarantee = guarantee
        self._partitions = partitions
        self._client = dict(client or {})
        self._direct = direct
        self._tier = tier
        directory.mkdir(parents=True, exist_ok=True)
        self.mosquitto = Mosquitto(directory / "mosquitto", settings={"sys_interval": "1", **(mosquitto or {})})
        self.mqtt_proxy = FaultProxy(self.mosquitto.port)
        front = free_port()
        inner = free_port()
        advertised = {} if direct else {"advertised.listeners": f"PLAINTEXT://127.0.0.1:{front}"}
        self.kafka = Kafka(directory / "kafka", port=inner, settings={**advertised, **(kafka or {})})
        self.kafka_proxy = FaultProxy(inner, listen=front)
        self.bridge = BridgeRun(directory / "bridge.toml", directory / "state" / LINE, directory / "bridge.log")
        self._stack = contextlib.ExitStack()
        self._runs = 0

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.mosquitto)
            self.mqtt_proxy = stack.enter_context(FaultProxy(self.mosquitto.port))  # the port is settled now
            stack.enter_context(self.kafka_proxy)
            stack.enter_context(self.kafka)
            self.kafka.create_topics({TOPIC: self._partitions})
            self._write_config()
            stack.enter_context(self.bridge)
            self.bridge.start()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _write_config(self) -> None:
        settings = ", ".join(f'"{name}" = {value}' for name, value in self._client.items())
        text = bridge_file(
            self.directory / "state",
            self.mosquitto.uri if self._direct else f"mqtt://127.0.0.1:{self.mqtt_proxy.port}",
            self.bootstrap,
            self.guarantee,
            writer="prove",
            more=f"settings = {{ {settings} }}",
        )
        self.bridge.config.write_text(f'{text}\n[spark]\ntier = "{self._tier}"\n', encoding="utf-8")

    @property
    def bootstrap(self) -> str:
        """Kafka as an independent reader meets it: where there is a proxy, that is what the broker advertises."""
        return self.kafka.bootstrap if self._direct else f"127.0.0.1:{self.kafka_proxy.port}"

    def online(self, timeout: float = PATIENCE_S) -> None:
        """Wait until the gateway is subscribed.

        Raises:
            NotReady: It is not in time, or the bridge ended (TL-P01).
        """
        wait_for(lambda: not self.bridge.running or self.bridge.state == "online", timeout, 0.05)
        if self.bridge.state != "online":
            raise NotReady("TL-P01", "bridge", "its gateway is not subscribed", f"See {self.bridge.log}.")

    def warm(self, messages: int = 200, rate: float = 0.0) -> None:
        """Send a first few messages the whole way, so that Spark is warm.

        Args:
            messages: How many.
            rate: Messages a second; 0 for as fast as the broker takes them.

        Raises:
            NotReady: They did not arrive in time (TL-P01).
        """
        self.online()
        with self.trial("warm") as trial:
            trial.load(messages, rate=rate)
            account = trial.account(PATIENCE_S)
        if not account.ok:
            raise NotReady("TL-P01", "bridge", f"the first messages: {account.line()}", f"See {self.bridge.log}.")

    def watermarks(self, timeout: float = 30.0) -> Watermarks | None:
        """What the gateway says now; None when it does not answer in time."""
        status: dict[str, Any] = {}

        def answered() -> bool:
            status.update(self.bridge.status() or {})
            return bool(status)

        return Watermarks.of(status) if wait_for(answered, timeout) else None

    def journaled(self) -> int:
        """Messages in the gateway's journal, as it says; 0 when it does not answer in time."""
        watermarks = self.watermarks()
        return watermarks.journaled if watermarks else 0

    def nothing_waits(self) -> bool:
        """Whether the gateway says that everything in its journal is committed."""
        watermarks = self.watermarks(5)
        return watermarks is not None and watermarks.waiting == 0

    def kill(self, role: Role) -> bool:
        """SIGKILL to the process that plays a role now, Kafka included; False when there is none."""
        if role is Role.KAFKA:
            self.kafka.kill()
            return True
        return self.bridge.hit(role, signal.SIGKILL)

    def revive(self, role: Role) -> bool:
        """Start what a service manager would start again; whether a process plays the role now."""
        if role is Role.KAFKA:
            self.kafka.restart()
            return True
        self.bridge.restart_if_ended()
        process = self.bridge.find(role)
        return process is not None and process.alive

    def trial(self, name: str = "trial") -> Trial:
        """Begin one judged piece of traffic; call it while Kafka answers."""
        self._runs += 1
        return Trial(self, f"{name}-{self._runs}")


@dataclass
class _Part:
    claims: Path
    plan: LoadPlan


class Trial:
    """Numbered messages sent through a rig in one or more parts, and the account of all of them; a context manager.

    Args:
        rig: The rig.
        run: Name of the run; part n is called ``run.n``.
    """

    def __init__(self, rig: Rig, run: str) -> None:
        self._rig = rig
        self._run = run
        self._parts: list[_Part] = []
        self._arrivals: list[Arrival] = []
        self._tail = Tail(rig.bootstrap, TOPIC, from_now=True)
        self._before = rig.watermarks()
        self.notes: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._tail.close()

    def plan(self, messages: int, *, rate: float = 0.0, seconds: float = 600.0) -> tuple[LoadPlan, Path]:
        """Make the plan of the next part and the file for its claims; for loads run elsewhere."""
        run = f"{self._run}.{len(self._parts) + 1}"
        publishers = min(8, messages)
        plan = LoadPlan(
            port=self._rig.mosquitto.port,
            run=run,
            publishers=publishers,
            devices=max(publishers, min(50, messages)),
            messages=messages,
            rate=rate,
            seconds=seconds,
            qos=2 if self._rig.guarantee == "exactly_once" else 1,
        )
        part = _Part(self._rig.directory / f"claims-{run}", plan)
        self._parts.append(part)
        return plan, part.claims

    def load(self, messages: int, *, rate: float = 0.0, seconds: float = 600.0) -> LoadResult:
        """Send the next part, straight to the broker, and wait until it is acknowledged."""
        plan, claims = self.plan(messages, rate=rate, seconds=seconds)
        return run_load(plan, claims)

    def arrived(self, seconds: float = 1.0) -> int:
        """Read on for at most this long; how many different messages of this trial are in Kafka."""
        self._arrivals += self._tail.pull(seconds)
        runs = {part.plan.run for part in self._parts}
        messages = filter(None, (decode(arrival.value) for arrival in self._arrivals))
        return len({(m.run, m.publisher, m.number) for m in messages if m.run in runs})

    def account(self, seconds: float = PATIENCE_S) -> RunAccount:
        """Wait until everything acknowledged is in Kafka and committed at the gateway (or time is up), and judge."""
        acked = sum(read_history(part.claims).count(SenderRecord.ACKED) for part in self._parts)
        if not wait_for(lambda: self.arrived() >= acked, seconds / 2):
            # The consumer that reads Kafka may itself be stuck; the note says how far it had read.
            self.notes.append(self._tail.reopen())
            wait_for(lambda: self.arrived() >= acked, seconds / 2)
        wait_for(self._rig.nothing_waits, 30, 0.1)
        self.arrived(2.0)
        return self._judge()

    def _judge(self) -> RunAccount:
        verdict = judge(read_history(self._parts[0].claims), self._arrivals)
        for part in self._parts[1:]:
            verdict.merge(judge(read_history(part.claims), self._arrivals))
        after = self._rig.watermarks()
        added = after.since(self._before) if after and self._before else after
        return RunAccount(verdict, self._rig.guarantee, added, self.notes, self._rig.bridge.account())
