"""Each alert fires on its fault, and on no other: planted in the facts, and of a real gateway that is hurt."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import generate_latest

from tests.conftest import NewMosquitto
from tests.engines.alert_rules import EXAMPLES, RULES, Hurt, firing, promtool
from tests.helpers import wait_until
from tests.integration.conftest import NewGateway
from tests.unit.monitor.knowing import DOWN_STATUS, SOUND, UP_STATUS, Known, a_bridge, a_gateway
from tests.unit.monitor.test_examples import EXPRESSIONS, plain
from tests.unit.monitor.test_metrics import NOW, PUBLISHER, everything, exported
from tests.unit.monitor.test_server import Served
from towline.bridge.lines.account import AccountPart
from towline.monitor.gateway import GatewayFacts, GatewayMonitor
from towline.monitor.server import monitor_routes, serve
from towline.monitor.table import publisher_samples
from towline.timing import Histogram

WELL = {**UP_STATUS, "waiting": 0, "measured": {"inbox": {**UP_STATUS["measured"]["inbox"], "room_left": 10**12}}}
DOWN = {**DOWN_STATUS, "outbox": {**DOWN_STATUS["outbox"], "queued": 0, "in_flight": 0}}
DOWN["measured"] = {"outbox": {**UP_STATUS["measured"]["inbox"], "room_left": 10**12}}


def bridge(known: Known, queue: int | None = None) -> str:
    return generate_latest(exported(known.samples(NOW, queue))).decode()


def a_sound(**changes: object) -> Known:
    return a_bridge(**{"status": WELL, "rates": (1.0, 1.0), **changes})  # type: ignore[arg-type]


def down(**outbox: object) -> str:
    status = {**DOWN, "outbox": {**DOWN["outbox"], **outbox}}
    return bridge(a_bridge(a_gateway("down", status, (1.0, 1.0)), direction="down"))


def slow(syncs: int) -> str:
    histogram = Histogram()
    for _ in range(syncs):
        histogram.observe(0.6)
    measured = {**WELL["measured"]["inbox"], "syncs": histogram.as_json()}
    return bridge(a_sound(status={**WELL, "measured": {"inbox": measured}}))


UP = bridge(a_sound())
MORE = replace(SOUND, parts={**SOUND.parts, "dead_lettered": AccountPart("", 5)})
PUBLISHING = generate_latest(exported(publisher_samples(PUBLISHER, "app", "j"))).decode()
HELD = generate_latest(exported(publisher_samples({**PUBLISHER, "held_back": "full"}, "app", "j"))).decode()

FAULTS: dict[str, tuple[str, Hurt, set[str]]] = {
    "nothing": (UP, UP, set()),
    "no answer": (UP, None, {"TowlineScrapeFails"}),
    "no query": (UP, bridge(a_sound(query="waiting to retry")), {"TowlineQueryDown"}),
    "paused": (UP, bridge(a_sound(query="paused", status={**WELL, "waiting": 5})), {"TowlinePaused"}),
    "no spark": (UP, bridge(a_sound(spark="starting again")), {"TowlineSparkDown"}),
    "no kafka": (UP, bridge(a_sound(kafka="unreachable")), {"TowlineKafkaAway"}),
    "not added up": (UP, bridge(a_sound(account=replace(SOUND, disagreements=("1, not 2",)))), {"TowlineAccountWrong"}),
    "broken": (UP, bridge(a_sound(account=replace(SOUND, more={"broken": "not kept"}))), {"TowlineGuaranteeBroken"}),
    "dead letter": (UP, bridge(a_sound(account=MORE)), {"TowlineDeadLetters"}),
    "overrun": (UP, bridge(a_sound(status={**WELL, "window_overruns": 1})), {"TowlineWindowOverrun"}),
    "session lost": (UP, bridge(a_sound(status={**WELL, "sessions_lost": 2})), {"TowlineSessionLost"}),
    "held back": (UP, bridge(a_sound(status={**WELL, "held_back": "journal full"})), {"TowlineIntakeHeldBack"}),
    "no room": (UP, bridge(a_sound(rates=(1.0, 10.0**9))), {"TowlineSoonFull"}),
    "short queue": (UP, bridge(a_sound(rates=(100.0, 1.0)), queue=29_000), {"TowlineBrokerQueueShort"}),
    "slow disk": (UP, (slow(1), slow(3)), {"TowlineSlowDisk"}),
    "loop": (UP, bridge(a_sound(status={**WELL, "turned_s": 130})), {"TowlineLoopStands"}),
    "restarts": (UP, bridge(a_sound(spark_restarts=5)), {"TowlineRestarts"}),
    "sound way down": (down(), down(), set()),
    "refused": (down(), down(refused=2), {"TowlineRefused"}),
    "nothing goes down": (down(), down(queued=1), {"TowlineNothingCarried"}),
    "publisher": (PUBLISHING, HELD, {"TowlinePublisherHeldBack"}),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_and_its_alert(tmp_path: Path, name: str) -> None:
    sound, hurt, expected = FAULTS[name]
    assert firing(tmp_path, sound, {"fault": hurt})["fault"] == expected


def test_every_alert_has_its_fault() -> None:
    planted = set().union(*(alerts for _, _, alerts in FAULTS.values()))
    assert planted | {"TowlineGatewayDown", "TowlineBrokerAway"} == {rule.name for rule in RULES}


def test_a_gateway_whose_broker_and_which_itself_goes_away(
    tmp_path: Path, new_mosquitto: NewMosquitto, new_gateway: NewGateway
) -> None:
    broker = new_mosquitto()
    gateway = new_gateway(broker).connect()
    facts = GatewayFacts("b", "line", gateway.settings.name, "up")
    with serve(monitor_routes(GatewayMonitor(facts, gateway.settings.state_dir)), "127.0.0.1:0") as port:
        served = Served(port)

        def until(metric: str, value: int) -> str:
            shown = re.compile(rf"^towline_{metric}{{.*}} {value}\.0$", re.MULTILINE)
            return wait_until(lambda: text if shown.search(text := served.get("/metrics")[1]) else None, what=metric)

        sound = until("broker_connected", 1)
        assert served.get("/readyz")[0] == 200
        broker.stop()
        away = until("broker_connected", 0)
        status, text = served.get("/readyz")
        assert (status, json.loads(text)["problems"][0]["what"]) == (503, "no session with the broker")
        assert served.get("/healthz")[0] == 200
        gateway.stop(signal.SIGKILL)
        killed = until("gateway_up", 0)
        assert "the gateway does not answer" in served.get("/readyz")[1]
    alerts = firing(tmp_path, sound, {"away": away, "killed": killed})
    assert alerts == {"away": {"TowlineBrokerAway"}, "killed": {"TowlineGatewayDown"}}


@pytest.mark.parametrize("command", [("rules", "alerts.yml"), ("config", "prometheus.yml"), ("rules", "all.json")])
def test_the_examples_are_valid(tmp_path: Path, command: tuple[str, str]) -> None:
    """The last has each expression of the dashboard, too."""
    shutil.copytree(EXAMPLES, tmp_path, dirs_exist_ok=True)
    rules = [{"record": f"x:{n}", "expr": plain(one)} for n, one in enumerate(EXPRESSIONS.values())]
    (tmp_path / "all.json").write_text(json.dumps({"groups": [{"name": "all", "rules": rules}]}))
    said = subprocess.run([promtool(), "check", *command], cwd=tmp_path, capture_output=True, check=False, timeout=60)
    assert said.returncode == 0, said.stdout + said.stderr


def test_promtool_has_nothing_to_say_of_names_and_help() -> None:
    text = generate_latest(exported(everything()))
    said = subprocess.run([promtool(), "check", "metrics"], input=text, capture_output=True, check=False, timeout=60)
    assert (said.returncode, said.stdout + said.stderr) == (0, b"")
