"""One real Mosquitto, one real Kafka, one bridge between them, each behind a proxy, ready to be hurt."""

from __future__ import annotations

import contextlib
import itertools
import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from towline.checkpoint import Checkpoint
from towline.net.client import Client
from towline_prove.account import RunAccount, Watermarks
from towline_prove.devstack import Kafka, Mosquitto, free_port
from towline_prove.devstack.process import wait_for
from towline_prove.history import Claims, SenderRecord
from towline_prove.load import LoadPlan, LoadResult, run_load
from towline_prove.numbered import decode
from towline_prove.processes import Role
from towline_prove.proxy import FaultProxy
from towline_prove.reader import Tail, read_topic
from towline_prove.referee import judge
from towline_prove.subject import LINE, TOPIC, BridgeRun, NotReady, bridge_file

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from towline_prove.devstack.server import Server

#: Spark's first batch on a busy machine takes its time.
PATIENCE_S = 400.0
#: A stopped or restarting gateway must not make the broker drop: what a user is told to set.
KEEP_ALL = {"max_queued_messages": "0", "max_inflight_messages": "1000"}
#: Of the publishers and of the line.
QOS = {"at_most_once": 0, "at_least_once": 1, "exactly_once": 2}
#: Bytes that the publishers of a load may have unanswered, all together.
_UNANSWERED: Final = 256 << 20


class Rig:
    """The whole way from publishers to Kafka: a Mosquitto, a bridge with one line and a Kafka; a context manager.

    Args:
        directory: Everything lives below it.
        mosquitto: Settings of the broker; its own defaults where not given.
        guarantee: Of the line.
        partitions: Of the Kafka topic.
        kafka: Settings of Kafka.
        client: Settings of the bridge's Kafka client.
        line: A further line of the uplink.
        direct: The bridge meets both brokers without a proxy between; no connection can be cut then.
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
        line: str = "",
        direct: bool = False,
        tier: str = "auto",
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.guarantee = guarantee
        self.mosquitto = Mosquitto(directory / "mosquitto", settings={"sys_interval": "1", **(mosquitto or {})})
        self._partitions = partitions
        settings = ", ".join(f'"{name}" = {value}' for name, value in (client or {}).items())
        self._file = (f"settings = {{ {settings} }}", line, tier)
        self._direct = direct
        front, inner = free_port(), free_port()
        advertised = {} if direct else {"advertised.listeners": f"PLAINTEXT://127.0.0.1:{front}"}
        self.kafka = Kafka(directory / "kafka", port=inner, settings={**advertised, **(kafka or {})})
        self._brokers: dict[Role, Server] = {Role.MOSQUITTO: self.mosquitto, Role.KAFKA: self.kafka}
        self.kafka_proxy = FaultProxy(inner, listen=front)
        state_dir = directory / "state" / LINE
        self.bridge = BridgeRun(directory / "bridge.toml", state_dir, directory / "bridge.log")
        self._trials = itertools.count(1)

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            for broker in (self.mosquitto, self.kafka_proxy, self.kafka):
                stack.enter_context(broker)
            self.mqtt_proxy = stack.enter_context(FaultProxy(self.mosquitto.port))  # the port is settled now
            self.kafka.create_topics({TOPIC: self._partitions})
            self._write_config()
            stack.enter_context(self.bridge).start()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _write_config(self) -> None:
        mqtt = self.mosquitto.uri if self._direct else f"mqtt://127.0.0.1:{self.mqtt_proxy.port}"
        client, line, tier = self._file
        places = (self.directory / "state", mqtt, self.bootstrap)
        text = bridge_file(*places, self.guarantee, writer="prove", more=client, line=line)
        self.bridge.config.write_text(f'{text}\n[spark]\ntier = "{tier}"\n', encoding="utf-8")

    @property
    def versions(self) -> str:
        """Whom it runs with, for people."""
        return f"Mosquitto {self.mosquitto.version} {self.mosquitto.uri}   Kafka {self.kafka.version} {self.bootstrap}"

    @property
    def bootstrap(self) -> str:
        """Kafka as an independent reader meets it: where there is a proxy, that is what the broker advertises."""
        return self.kafka.bootstrap if self._direct else f"127.0.0.1:{self.kafka_proxy.port}"

    @property
    def batches(self) -> int:
        """Micro-batches in the line's commit log."""
        batch = Checkpoint(str(self.bridge.state_dir / "checkpoint")).last_commit_batch()
        return 0 if batch is None else batch + 1

    def kill(self, role: Role) -> bool:
        """SIGKILL to the process that plays a role now, brokers included; False when there is none."""
        if role not in self._brokers:
            return self.bridge.hit(role)
        self._brokers[role].kill()
        return True

    def revive(self, role: Role) -> bool:
        """Start what a service manager would start again; whether a process plays the role now."""
        if role not in self._brokers:
            return self.bridge.revive(role)
        self._brokers[role].start()
        return True

    def online(self, timeout: float = PATIENCE_S) -> None:
        """Wait until the gateway is subscribed.

        Raises:
            NotReady: It is not in time, or what was started has ended (TL-P01).
        """
        wait_for(lambda: not self.bridge.running or self.bridge.state == "online", timeout, 0.05)
        self._see_running()
        if self.bridge.state != "online":
            raise NotReady("TL-P01", "the bridge", "its gateway is not subscribed", f"See {self.bridge.log}.")

    def _see_running(self) -> None:
        if not self.bridge.running:
            last = next(reversed(self.bridge.log.read_text(encoding="utf-8", errors="replace").splitlines()), "")
            raise NotReady("TL-P01", "the bridge", f"it has ended: {last}", f"See {self.bridge.log}.")

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
            wait_for(lambda: not self.bridge.running or trial.settled(), PATIENCE_S, 0.05)
            self._see_running()
            account = trial.account()
        if not account.ok:
            what = f"did not carry the first messages: {account.line()}"
            raise NotReady("TL-P01", "the line", what, f"See {self.bridge.log}.")

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

    def dropped(self) -> int:
        """What the broker says it dropped because a queue was full; as of its last ``sys_interval``, a second.

        Raises:
            NotReady: It does not say it (TL-P01).
        """
        topic = "$SYS/broker/publish/messages/dropped"
        with Client(self.mosquitto.uri, client_id=f"prove-sys-{time.time_ns()}", subscribe=[topic]) as client:
            message = client.receive(15)
        if message is None or message.payload is None:
            raise NotReady("TL-P01", self.mosquitto.uri, f"it says nothing on {topic}", f"See {self.mosquitto.log}.")
        return int(message.payload)

    def trial(self, name: str = "trial") -> Trial:
        """Begin one judged piece of traffic; call it while Kafka answers."""
        return Trial(self, f"{name}-{next(self._trials)}")


class Trial:
    """Numbered messages sent through a rig in one or more parts, and the account of all of them; a context manager.

    Args:
        rig: The rig.
        run: Name of the run; part n is called ``run.n``.

    Attributes:
        notes: What happened on the way, for the account.
    """

    def __init__(self, rig: Rig, run: str) -> None:
        self._rig = rig
        self._run = run
        self._parts: list[Claims] = []
        self._tail = Tail(rig.bootstrap, TOPIC, from_now=True)
        self._seen: set[tuple[str, int, int]] = set()
        self._before = rig.watermarks()
        self.notes: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._tail.close()

    def plan(
        self, messages: int, *, rate: float = 0.0, seconds: float = 600.0, size: int = 150, devices: int = 50
    ) -> tuple[LoadPlan, Path]:
        """Make the plan of the next part and the file for its claims; for loads run elsewhere."""
        run = f"{self._run}.{len(self._parts) + 1}"
        path = self._rig.directory / f"claims-{run}"
        self._parts.append(Claims(path))
        publishers = min(8 if size < 1 << 20 else 4, messages, devices)
        plan = LoadPlan(
            port=self._rig.mosquitto.port,
            run=run,
            publishers=publishers,
            devices=max(publishers, min(devices, messages)),
            messages=messages,
            rate=rate,
            seconds=seconds,
            qos=QOS[self._rig.guarantee],
            size=size,
            window=max(1, min(1000, _UNANSWERED // publishers // size)),
        )
        return plan, path

    def load(self, messages: int, *, rate: float = 0.0, seconds: float = 600.0) -> LoadResult:
        """Send the next part, straight to the broker, and wait until it is acknowledged."""
        plan, claims = self.plan(messages, rate=rate, seconds=seconds)
        return run_load(plan, claims)

    def arrived(self, seconds: float = 1.0) -> int:
        """Read on for at most this long; how many different messages of this trial are in Kafka."""
        for arrival in self._tail.read(seconds):
            message = decode(arrival.value)
            if message is not None and message.run.startswith(f"{self._run}."):
                self._seen.add((message.run, message.publisher, message.number))
        return len(self._seen)

    def claimed(self, claim: SenderRecord) -> int:
        """How many messages of all parts carry this claim now."""
        return sum(part.read().count(claim) for part in self._parts if part.path and part.path.exists())

    def watermarks(self, timeout: float = 5.0) -> Watermarks | None:
        """What the gateway has added since the trial began, as it says; None when it does not answer in time."""
        now = self._rig.watermarks(timeout)
        return now.since(self._before) if now and self._before else now

    def settled(self) -> bool:
        """Whether everything that was acknowledged is in Kafka, and nothing waits in the journal."""
        if self.arrived(0.1) < self.claimed(SenderRecord.ACKED):
            return False
        watermarks = self._rig.watermarks(5)
        return watermarks is not None and watermarks.waiting == 0

    def account(self) -> RunAccount:
        """Judge what Kafka holds now, as a new consumer reads it: that of `arrived` may be stuck."""
        arrivals = read_topic(self._rig.bootstrap, TOPIC, start=self._tail.start, seconds=PATIENCE_S)
        verdict = judge([part.read() for part in self._parts], arrivals)
        return RunAccount(verdict, self._rig.guarantee, self.watermarks(30), self.notes, self._rig.bridge.account())


class Break(NamedTuple):
    """Something that is away for a while.

    Attributes:
        hurt: Takes it away.
        mend: Brings it back.
        proxied: Whether that needs the proxies of the rig.
    """

    hurt: Callable[[Rig], object]
    mend: Callable[[Rig], object]
    proxied: bool = True


def _both_refuse(rig: Rig) -> None:
    rig.mqtt_proxy.refuse()
    rig.kafka_proxy.refuse()


def _both_forward(rig: Rig) -> None:
    rig.kafka_proxy.forward()
    rig.mqtt_proxy.forward()


#: What breaks, and how it is mended. A server that hangs (SIGSTOP, or a proxy that passes nothing on) keeps its
#: connections open and answers nobody; one that refuses lives, and nobody reaches it. The connection that is cut in the
#: middle of a packet from the broker heals by itself.
BREAKS: Mapping[str, Break] = {
    "kafka stopped": Break(lambda rig: rig.kafka.stop(), lambda rig: rig.kafka.start(), proxied=False),
    "kafka killed": Break(lambda rig: rig.kafka.kill(), lambda rig: rig.kafka.start(), proxied=False),
    "kafka hangs": Break(lambda rig: rig.kafka.pause(), lambda rig: rig.kafka.resume(), proxied=False),
    "kafka refuses": Break(lambda rig: rig.kafka_proxy.refuse(), lambda rig: rig.kafka_proxy.forward()),
    "mqtt refused": Break(lambda rig: rig.mqtt_proxy.refuse(), lambda rig: rig.mqtt_proxy.forward()),
    "mqtt hangs": Break(lambda rig: rig.mqtt_proxy.hang(), lambda rig: rig.mqtt_proxy.forward()),
    "mqtt cut in a packet": Break(lambda rig: rig.mqtt_proxy.cut_after(301), lambda _: None),
    "both gone": Break(_both_refuse, _both_forward),
    "bridge away": Break(lambda rig: rig.bridge.kill(), lambda rig: rig.bridge.start(), proxied=False),
}
