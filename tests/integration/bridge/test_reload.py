"""Routes that change while messages come."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Mapping
from functools import partial
from getpass import getuser
from typing import Any

import pytest

from tests.conftest import NewTopic
from tests.helpers import wait_until
from tests.integration.bridge.running import PATIENCE, Flow, Running, in_kafka, publish
from towline.bridge.runtime.state import APPLIED, read_state
from towline_prove.devstack import Kafka, Mosquitto

pytestmark = pytest.mark.spark


BESIDE = """[[uplink]]
name = "{0}"
guarantee = "exactly_once"
max_trigger_delay_ms = 1000
route = [{{ from = "{0}/#", topic = "{1}" }}]
"""


def write(
    bridge: Running, broker: Mosquitto, kafka: Kafka, *routes: tuple[str, str], beside: Mapping[str, str]
) -> None:
    """A line of these routes, and lines with one route each beside it: their names, and their topics in Kafka."""
    made = "".join(f'[[uplink.route]]\nfrom = "{one}"\ntopic = "{to}"\n' for one, to in routes)
    line = '[[uplink]]\nname = "line"\nguarantee = "exactly_once"\nmax_trigger_delay_ms = 1000\n'
    others = "".join(BESIDE.format(name, topic) for name, topic in beside.items())
    bridge.write(broker.uri, kafka.bootstrap, line + made + others)


def load(broker: Mosquitto, topic: str) -> Flow:
    """Messages of QoS 2 to a topic, 40 a second."""
    return Flow(broker, partial(publish, topic=topic, text="{}", qos=2), 20, 0.5)


def readers(bridge: Running, line: str) -> Any:
    """Who reads its gateway, and since when: another one once its query was started again."""
    return bridge.line(line)["gateway"]["readers"]


@pytest.fixture
def loads() -> Iterator[list[Flow]]:
    running: list[Flow] = []
    yield running
    for one in running:
        one.end()


def test_a_load_runs_through_pauses_reloads_a_restart_and_a_kill(
    bridge: Running, broker: Mosquitto, kafka: Kafka, topic: NewTopic, loads: list[Flow]
) -> None:
    """Lost 0, doubled 0: a topic that changes, one that comes, and one that goes; the first reload is killed midway.

    The line beside it is paused over the kill, and then goes on while the others are reloaded and restarted.
    """
    before, after, gone, new = topic("before"), topic("after"), topic("gone"), topic("new")
    last, besides = topic("last"), {"other": topic("other")}
    write(bridge, broker, kafka, ("k/#", before), ("old/#", gone), beside=besides)
    bridge.program = ("tests.engines.dying", "towline.bridge.runtime.reload:Reloader._start_gateway")
    bridge.start()
    wait_until(lambda: bridge.online() and bridge.online("other"), PATIENCE, "the gateways")
    kept, old, other = load(broker, "k/d"), load(broker, "old/d"), load(broker, "other/d")
    loads += [kept, old, other]
    for name in ("line", "other"):
        wait_until(lambda: bridge.account(name).get("in_kafka", 0) > 0, PATIENCE, "the first batch")  # noqa: B023
    said = r'line "other": paused: receiving continues, with disk space for [\d.,]+ GB(; at [\d,]+ messages/s this|$)'
    assert re.match(said, bridge.command("pause", "other"))
    carried = bridge.account("other").get("in_kafka", 0)

    write(bridge, broker, kafka, ("k/#", after), ("old/#", gone), ("new/#", new), beside=besides)
    bridge.process.send_signal(signal.SIGHUP)
    assert bridge.ended() == -signal.SIGKILL
    bridge.program = ("towline",)
    bridge.start()
    wait_until(lambda: bridge.online() and bridge.line()["query"] == "running", PATIENCE, "the next start")
    loads.append(fresh := load(broker, "new/d"))
    wait_until(lambda: fresh.sent > 0, PATIENCE, "messages of the new route")
    paused = bridge.line("other")
    assert (paused["query"], paused["account"]["in_kafka"], paused["paused"]["by"]) == ("paused", carried, getuser())
    assert paused["account"]["waiting"] > 0
    assert bridge.command("resume", "other") == 'line "other": resumed\n'
    wait_until(lambda: bridge.account("other").get("in_kafka", 0) > carried, PATIENCE, "what came during the pause")

    old_sent, reader = old.end(), readers(bridge, "other")
    write(bridge, broker, kafka, ("k/#", after), ("new/#", new), beside={**besides, "third": after})
    assert bridge.command("reload") == 'line "line": gateway and query restarted\nline "third": new\n'
    publish(broker, old_sent, 5, topic="old/d", text="{}", qos=2)
    wait_until(lambda: bridge.online("third"), PATIENCE, "the line that has come")
    publish(broker, 0, 5, topic="third/d", text="third {}", qos=2)
    wait_until(lambda: bridge.account("third").get("in_kafka") == 5, PATIENCE, "messages of the line that has come")

    write(bridge, broker, kafka, ("k/#", last), ("new/#", new), beside={**besides, "third": after})
    gateway = bridge.line()["gateway"]["pid"]
    assert bridge.command("restart", "line") == 'line "line": gateway and query restarted\n'
    wait_until(bridge.online, PATIENCE, "the gateway of the line that was restarted")
    assert bridge.line()["gateway"]["pid"] != gateway
    assert readers(bridge, "other") == reader, "the query of another line has gone on throughout"
    restarted_at = kept.sent
    wait_until(lambda: kept.sent > restarted_at, PATIENCE, "messages after the restart")
    kept_sent, new_sent, other_sent = kept.end(), fresh.end(), other.end()
    total = kept_sent + new_sent + old_sent
    # Received is more where the broker has sent one again, which is answered and not stored.
    wait_until(lambda: (a := bridge.account())["in_kafka"] >= total and not a["waiting"], PATIENCE, "all of it")
    account = bridge.status_command()["lines"]["line"]["account"]
    assert (account["adds_up"], account["in_kafka"], account["unrouted"]) == (True, total, 0)
    wait_until(lambda: bridge.account("other").get("in_kafka", 0) >= other_sent, PATIENCE, "all of the other line")
    assert bridge.interrupt() == 0

    in_before, in_after, in_last, in_gone, in_new, in_other = (
        [value for _, value, _ in in_kafka(kafka.bootstrap, name)]
        for name in (before, after, last, gone, new, besides["other"])
    )
    in_third, in_after = ([one for one in in_after if one.startswith(b"third") is third] for third in (True, False))
    assert in_third == [b"third %d" % n for n in range(5)]
    in_kept = [int(one) for one in in_before + in_after + in_last]
    assert in_kept == [*range(kept_sent)], "each once and in order, whatever its topic"
    assert in_before
    assert in_after
    assert in_last
    assert [int(one) for one in in_other] == [*range(other_sent)]
    assert [int(one) for one in in_gone] == [*range(old_sent)], "none of what was received before its route went"
    assert [int(one) for one in in_new] == [*range(new_sent)]
    state = read_state(bridge.directory / "state") or {}
    assert state["outcomes"][""]["outcome"] == APPLIED
