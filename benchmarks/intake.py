"""Gateway against the null subscriber: the same Mosquitto, the same backlog; then both under live pressure."""

from __future__ import annotations

import json
import math
import sys
import tempfile
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from mqtt5 import ConnectPacket, DisconnectPacket

from benchmarks.rig import UNLIMITED, Meter, Outcome, header, held, machine, publish, running, wait
from benchmarks.stub_broker import StubBroker
from towline.gateway.settings import GatewaySettings
from towline.mqtt.events import Filter
from towline_prove.devstack.mosquitto import Mosquitto
from towline_prove.load import connect
from towline_prove.subject import GatewayRun

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


#: What both announce. 65,535 is MQTT's default: the codec leaves it out, and Mosquitto then takes its own 20.
WINDOW = 65_534


class Subject(NamedTuple):
    """A running subscriber: its name, its pid, and how many messages it has dealt with."""

    name: str
    pid: int
    taken: Callable[[], int]


def settings(port: int, directory: Path, *, qos: int = 1, **more: Any) -> GatewaySettings:
    """A gateway with every default but the broker and what is said."""
    return GatewaySettings(
        name="bench",
        state_dir=directory / "gateway",
        brokers=(f"mqtt://127.0.0.1:{port}",),  # type: ignore[arg-type]
        subscriptions=(Filter("telemetry/#", qos=qos),),
        **more,
    )


@contextmanager
def gateway_at(port: int, directory: Path, **more: Any) -> Iterator[GatewayRun]:
    """Start a gateway for the broker at a port, whether or not that answers yet."""
    with GatewayRun(settings(port, directory, **more)) as run:
        yield run.start()


@contextmanager
def gateway(broker: Mosquitto, directory: Path, **more: Any) -> Iterator[Subject]:
    """Run a gateway whose journal is on a disk."""
    with GatewayRun(settings(broker.port, directory, **more)) as run:
        run.start()
        run.wait_online()
        client = run.client()
        assert client is not None
        yield Subject("towline gateway (durable)", run.pid, lambda: int(client.status()["journaled"]))
        client.close()
        run.stop()


@contextmanager
def null(broker: Mosquitto, directory: Path, count: int) -> Iterator[Subject]:
    """Run the null subscriber."""
    out = directory / f"null-{time.time_ns()}"

    def taken() -> int:
        lines = out.read_text().splitlines()[1:]
        return json.loads(lines[0])["count"] if lines else 0

    with running(_null_command(broker.port, count), out) as child:
        wait(lambda: "ready" in out.read_text(), "the null subscriber")
        yield Subject("null subscriber (memory)", child.pid, taken)


def _null_command(port: int, count: int) -> list[str]:
    return [sys.executable, "-m", "benchmarks.null_subscriber", str(port), str(count)]


def drain(subject: Subject, broker: Mosquitto, directory: Path, count: int, qos: int = 1) -> Outcome:
    """Let a backlog pile up behind a stopped subject, then measure how it goes down."""
    broker_pid = broker.pid or 0
    meter = Meter({"mosquitto": lambda: [broker_pid], "subject": lambda: [subject.pid]})
    before = subject.taken()
    with held(subject.pid):
        publish(broker, directory, count, qos=qos)
        meter.start()
        began = time.monotonic()
    wait(lambda: subject.taken() - before >= count, f"{subject.name} to drain", pause=0.02)
    seconds = time.monotonic() - began
    meter.stop()
    return Outcome(subject.name, count, seconds, meter.used, ["subject"])


def live(subject: Subject, broker: Mosquitto, directory: Path, count: int, qos: int = 1, rate: float = 0.0) -> Outcome:
    """Measure with 8 publishers at the same time, flat out where no rate is said."""
    broker_pid = broker.pid or 0
    meter = Meter({"mosquitto": lambda: [broker_pid], "subject": lambda: [subject.pid]})
    before = subject.taken()
    meter.start()
    began = time.monotonic()
    publish(broker, directory, count, qos=qos, rate=rate)
    wait(lambda: subject.taken() - before >= count, f"{subject.name} to keep up", pause=0.02)
    seconds = time.monotonic() - began
    meter.stop()
    return Outcome(subject.name, count, seconds, meter.used, ["subject"])


def raw(count: int, rounds: int) -> None:
    """Both fed by a stub that costs next to nothing, so that neither waits for a broker."""
    print(f"intake: {count:,} messages from a stub broker, window {WINDOW:,}\n  {machine()}\n")
    best: dict[str, Outcome] = {}
    for number in range(rounds):
        for name, opened in (("null subscriber (memory)", _raw_null), ("towline gateway (durable)", _raw_gateway)):
            with tempfile.TemporaryDirectory(prefix="towline-bench-") as place, StubBroker() as stub:
                outcome = opened(name, stub, Path(place) / str(number), count)
            print(outcome.line(), flush=True)
            if name not in best or outcome.rate > best[name].rate:
                best[name] = outcome
    null_best, ours = best.values()
    print(f"\n  ratio gateway : null subscriber   {ours.rate / null_best.rate:.2f}   (aim 0.6)")
    print(f"  gateway {ours.micros('subject'):.2f} us a message (aim 1.5), null {null_best.micros('subject'):.2f}\n")


def _pushed(name: str, stub: StubBroker, pid: int, count: int) -> Outcome:
    stub.push(WINDOW)  # warm
    meter = Meter({"subject": lambda: [pid]})
    meter.start()
    seconds = stub.push(count)
    meter.stop()
    return Outcome(name, count, seconds, meter.used, ["subject"])


def _raw_null(name: str, stub: StubBroker, directory: Path, count: int) -> Outcome:
    directory.mkdir()
    with running(_null_command(stub.port, count), directory / "out") as child:
        stub.accept()
        return _pushed(name, stub, child.pid, count)


def _raw_gateway(name: str, stub: StubBroker, directory: Path, count: int) -> Outcome:
    with gateway_at(stub.port, directory) as run:
        stub.accept()
        return _pushed(name, stub, run.pid, count)


def run(count: int = 300_000, rounds: int = 2) -> None:
    """Both subjects in turn, on one broker, and their ratio (the best of each, as noise only slows)."""
    alone(count, rounds)
    taken_in(min(count // 6, 50_000), rounds)
    raw(count, rounds)
    with tempfile.TemporaryDirectory(prefix="towline-bench-") as name:
        directory = Path(name)
        with Mosquitto(directory / "mosquitto", settings=UNLIMITED) as broker:
            for title, measure, size, aim in (
                (f"intake: backlog of {count:,} drained", drain, count, 0.6),
                (f"intake: 8 publishers flat out, {count // 3:,} messages", live, count // 3, 0.9),
            ):
                header(title, broker)
                outcomes = _rounds(broker, directory, measure, size, rounds)
                best = [max(runs, key=lambda outcome: outcome.rate) for runs in outcomes]
                ratio = best[1].rate / best[0].rate
                print(f"\n  ratio gateway : null subscriber   {ratio:.2f}   (aim {aim})")
                print(f"  gateway CPU {best[1].micros('subject'):.2f} us a message, {_plus(best)} us more than null\n")


#: Mosquitto's own window, of 20, which MQTT 3.1.1 can't change.
_NARROW: Final = {"max_queued_messages": "0"}
#: Both levels; then what a larger Receive Maximum does to the broker that has to look after it, and a narrow window.
_ALONE: Final[tuple[tuple[int, dict[str, Any], dict[str, str]], ...]] = (
    (1, {}, UNLIMITED),
    (2, {}, UNLIMITED),
    (2, {"receive_maximum": 1_000}, UNLIMITED),
    (2, {"receive_maximum": 4_000}, UNLIMITED),
    (1, {"protocol": "3.1.1"}, _NARROW),
    (2, {"protocol": "3.1.1"}, _NARROW),
)


def alone(count: int, rounds: int) -> None:
    """The gateway by QoS: a backlog drained, and 5,000 messages a second; the best of each."""
    for qos, more, limits in _ALONE:
        said = "".join(f", {name} {value}" for name, value in more.items())
        backlog = min(count, 60_000) if limits is _NARROW else count
        print(f"intake: QoS {qos}{said}, {backlog:,} drained, then 5,000 msg/s\n  {machine()}\n")
        best: list[Outcome] = []
        for measured in (drain, partial(live, rate=5_000.0)):
            with (
                tempfile.TemporaryDirectory(prefix="towline-bench-") as name,
                Mosquitto(Path(name) / "mosquitto", settings=limits) as broker,
                gateway(broker, Path(name), qos=qos, **more) as subject,
            ):
                size = backlog if measured is drain else min(backlog, 50_000)
                outcomes = [measured(subject, broker, Path(name), size, qos) for _ in range(rounds)]
            best.append(min(outcomes, key=lambda outcome: outcome.micros("subject")))
            print(best[-1].line(), flush=True)
        print()


#: Devices that publish at the same time in `taken_in`, each over a connection of its own; the most of one load.
_DEVICES: Final = 1_000


def taken_in(count: int, rounds: int) -> None:
    """Mosquitto's CPU for a message that a device publishes, by QoS, nobody subscribed: the best of some rounds."""
    print(f"intake: {_DEVICES:,} devices publish {count:,} messages at 5,000 a second\n  {machine()}\n")
    for qos in (1, 2):
        best = math.inf
        for _ in range(rounds):
            with (
                tempfile.TemporaryDirectory(prefix="towline-bench-") as name,
                Mosquitto(Path(name) / "mosquitto", settings=UNLIMITED) as broker,
            ):
                pid = broker.pid or 0
                meter = Meter({"mosquitto": lambda pid=pid: [pid]})  # type: ignore[misc]
                meter.start()
                publish(broker, Path(name), count, rate=5_000.0, qos=qos, devices=_DEVICES, publishers=_DEVICES)
                meter.stop()
            best = min(best, meter.used["mosquitto"] / count * 1e6)
        print(f"  QoS {qos}: Mosquitto {best:.1f} us of CPU a message that it takes in\n", flush=True)


def _plus(best: list[Outcome]) -> str:
    return f"{best[1].micros('subject') - best[0].micros('subject'):.2f}"


def _rounds(
    broker: Mosquitto, directory: Path, measure: Callable[..., Outcome], count: int, rounds: int
) -> list[list[Outcome]]:
    outcomes: list[list[Outcome]] = [[], []]
    for number in range(rounds):
        subjects = (null(broker, directory, count), gateway(broker, directory / f"{measure.__name__}{number}"))
        for results, opened in zip(outcomes, subjects, strict=True):
            with opened as subject:
                outcome = measure(subject, broker, directory, count)
            print(outcome.line(), flush=True)
            results.append(outcome)
            forget(broker, "null-subscriber" if subject.name.startswith("null") else "bench")
    return outcomes


def forget(broker: Mosquitto, client_id: str) -> None:
    """End a session, so that nothing queues for its owner while somebody else is measured."""
    sock, _, _ = connect(ConnectPacket(client_id, clean_start=True), "127.0.0.1", broker.port)
    sock.sendall(DisconnectPacket().write())
    sock.close()
