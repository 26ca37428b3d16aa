"""Every crash point of a gateway's intake: killed at each send, failed at each sync, started again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import NewMosquitto
from tests.engines.forked import fork_gateway
from tests.engines.strace import Injection, inject_command, was_injected
from tests.helpers import wait_until
from towline.gateway.settings import GatewaySettings
from towline.guarantee import Guarantee
from towline.journal import Journal, Limits
from towline.mqtt.events import Filter
from towline.schema import ROW_SCHEMA
from towline_prove.devstack import Mosquitto
from towline_prove.history import read_history
from towline_prove.load import LoadPlan, run_load
from towline_prove.referee import Arrival, judge_arrivals
from towline_prove.subject import GatewayRun, NotReady

pytestmark = [pytest.mark.faults, pytest.mark.usefixtures("ptrace")]

MESSAGES = 12
#: Of them `make test` has the model of power loss (`test_powerloss`), with the disk of every moment.
LONG = [
    *((1, call, "KILL") for call in ("sendto", "writev", "rename", "fdatasync", "fsync")),
    *((1, call, fault) for call in ("writev", "fsync") for fault in ("EIO", "ENOSPC")),
    *((2, call, "KILL") for call in ("writev", "fdatasync")),
]


def life(broker: Mosquitto, directory: Path, qos: int, injection: Injection) -> bool:
    """One gateway that meets a fault, and one that goes on in its place; whether the fault was met."""
    name, log, claims = directory.name, directory / "strace", directory / "claims"
    guarantee = Guarantee.EXACTLY_ONCE if qos == 2 else Guarantee.AT_LEAST_ONCE
    settings = GatewaySettings(
        name=name, state_dir=directory / "gateway", brokers=(broker.uri,),  # type: ignore[arg-type]
        subscriptions=(Filter(f"{name}/#", qos=qos),), guarantee=guarantee, receive_maximum=4,
    ).model_copy(update={"journal": Limits(segment_bytes=64 << 10)})  # fmt: skip
    plan = LoadPlan(  # what fits into no segment alone, in several chunks
        port=broker.port, run=name, publishers=2, devices=4, messages=MESSAGES, rate=800, size=7_500,
        topic=f"{name}/{{device}}", qos=qos, seconds=30,
    )  # fmt: skip
    directory.mkdir()
    with GatewayRun(settings, log=directory / "log") as gateway:
        gateway.child = fork_gateway(settings, directory / "log", lambda pid: inject_command(pid, injection, log))
        try:
            gateway.wait_online()
        except NotReady:
            code = gateway.wait(5)
        else:
            run_load(plan, claims)
            gateway.wait_journaled(MESSAGES, 20)
            code = gateway.stop(15)
    met = code in {-9, 137} if injection.fault == "KILL" else was_injected(log)
    assert met or code == 0
    assert not (met and "sync" in injection.call and code == 0), "[I6]"
    with GatewayRun(settings, log=directory / "log") as gateway:
        gateway.child = fork_gateway(settings, directory / "log")
        gateway.wait_online()
        if not claims.exists():
            run_load(plan, claims)
        wait_until(lambda: not judge_arrivals(read_history(claims), served(gateway)).lost, what="what the broker has")
        assert gateway.stop(15) == 0
    with Journal.open(settings.inbox_dir, schema=ROW_SCHEMA) as journal:
        verdict = judge_arrivals(read_history(claims), arrivals(journal.read(journal.first_offset, journal.end)))
    assert verdict.ok(guarantee), f"{injection}: {verdict.summary_line()} {verdict.stories}"
    assert verdict.adds_up()
    return met


def served(gateway: GatewayRun) -> list[Arrival]:
    status, client = gateway.status(), gateway.client()
    assert status is not None
    assert client is not None
    with client:
        return list(arrivals(client.read(status["journal"], status["first"], status["journaled"])))


def arrivals(batches: Any) -> Iterator[Arrival]:
    for batch in batches:
        for row in batch.select(["offset", "payload"]).to_pylist():
            yield Arrival(0, row["offset"], None, row["payload"])


@pytest.mark.parametrize(
    ("qos", "call", "fault"),
    [
        (1, "fdatasync", "EIO"),
        (2, "sendto", "KILL"),  # [I3]: durable, PUBREC or PUBCOMP not sent
        *(pytest.param(*case, marks=pytest.mark.long) for case in LONG),
    ],
)
def test_no_crash_point_loses_anything(
    new_mosquitto: NewMosquitto,
    tmp_path: Path,
    qos: int,
    call: str,
    fault: Any,
    record_property: Callable[[str, object], None],
) -> None:
    """At QoS 2 nothing may come twice either. [MQTT-4.8.0-2 of 3.1.1]: a disk that fails ends the connection."""
    broker = new_mosquitto(max_queued_messages="0")
    points = next(n for n in count() if not life(broker, tmp_path / f"p{n}", qos, Injection(call, str(n + 1), fault)))
    record_property("points", points)
    assert points >= (1 if call == "rename" else 3), "the calls have other names now"
