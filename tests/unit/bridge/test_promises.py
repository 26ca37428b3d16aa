"""One table decides what a guarantee sets: code, plan and documents agree with it."""

from __future__ import annotations

import io
import runpy
from pathlib import Path

import pyarrow as pa
import pytest
from rich.console import Console

from tests.unit.bridge.test_config import GOOD, changed, read, told
from tests.unit.bridge.test_reload import HEAD
from towline.bridge.routes import DEDUPE, RouteTable, RowOutcome, count_outcomes
from towline.bridge.runtime.plan import plan_text
from towline.bridge.runtime.screen import LiveScreen, PlainScreen
from towline.bridge.runtime.session import session_settings
from towline.bridge.runtime.state import BridgeState
from towline.bridge.runtime.status import collect_status
from towline.bridge.runtime.status import render as render_status
from towline.bridge.runtime.supervisor import Supervisor
from towline.guarantee import AckAfter, Guarantee, policy, promise_problem
from towline.kafka.clientconfig import insecure_settings
from towline.schema import ROW_SCHEMA


def test_the_page_says_what_the_code_does(monkeypatch: pytest.MonkeyPatch) -> None:
    scripts = Path(__file__).parents[3] / "scripts"
    monkeypatch.syspath_prepend(scripts)
    script = runpy.run_path(str(scripts / "guarantees.py"))
    assert script["table"]() in script["PAGE"].read_text(), "run scripts/guarantees.py"


@pytest.mark.parametrize("guarantee", list(Guarantee))
@pytest.mark.parametrize("promise", list(Guarantee))
@pytest.mark.parametrize("qos", [None, 0, 1, 2])
def test_a_route_promises_less_than_an_exactly_once_line_and_is_subscribed_so(
    guarantee: Guarantee, promise: Guarantee, qos: int | None
) -> None:
    weaker = guarantee is Guarantee.EXACTLY_ONCE and promise is not Guarantee.EXACTLY_ONCE
    fits = weaker and qos in (None, {Guarantee.AT_MOST_ONCE: 0, Guarantee.AT_LEAST_ONCE: 1}[promise])
    assert (promise_problem(guarantee, promise, qos) is None) is fits


@pytest.mark.parametrize("guarantee", list(Guarantee))
def test_a_bridge_sets_what_its_promises_ask_of_spark(guarantee: Guarantee, tmp_path: Path) -> None:
    own = changed('name = "telemetry"', f'name = "telemetry"\nguarantee = "{guarantee}"')
    assert session_settings(read(own, tmp_path)).items() >= policy(guarantee).spark_settings.items()


PROMISES = """
[[uplink.route]]
from = "fast/#"
topic = "fast"
promise = "at_most_once"
[[uplink.route]]
from = "alarm/#"
topic = "alarm"
promise = "at_least_once"
"""


@pytest.mark.parametrize(
    ("routes", "qos"),
    [
        (PROMISES, {"telemetry/+/#": 2, "fast/#": 0, "alarm/#": 1}),
        (PROMISES.replace('"fast/#"', '"#"'), {"#": 2}),  # a wider filter takes what needs the stronger promise too
    ],
)
def test_routes_that_promise_less_share_the_line(tmp_path: Path, routes: str, qos: dict[str, int]) -> None:
    exactly = changed('name = "telemetry"', 'name = "telemetry"\nguarantee = "exactly_once"')
    (line,) = read(exactly + routes, tmp_path).uplinks
    assert {one.pattern: one.qos for one in line.gateway.subscriptions} == qos


@pytest.mark.parametrize(
    ("said", "dead"),
    [("qos = 1", True), ("", False), ('promise = "at_least_once"', False), ('promise = "at_most_once"', False)],
)
def test_what_has_no_key_is_a_dead_letter_where_a_key_alone_tells_repeats(
    tmp_path: Path, said: str, *, dead: bool
) -> None:
    keyed = 'name = "telemetry"\nguarantee = "exactly_once"\ndedupe = { key = "{mqtt.user.id}" }'
    text = changed('name = "telemetry"', keyed).replace("[[uplink.route]]", f"[[uplink.route]]\n{said}")
    (line,) = read(text, tmp_path).uplinks
    message = pa.RecordBatch.from_pylist([{"topic": "telemetry/d/x", "payload": b""}], schema=ROW_SCHEMA)
    keyless = message.append_column(DEDUPE, pa.nulls(1, pa.string()))
    assert (RowOutcome.KEY_ABSENT in count_outcomes(RouteTable(line.routes).render(keyless))) is dead


def route(filter_: str, more: str = "") -> str:
    return f'[[uplink.route]]\nfrom = "{filter_}"\ntopic = "t"\n{more}\n'


WEAKER, KEY, LOSES = 'promise = "at_least_once"', 'dedupe = { key = "{mqtt.topic}" }', 'promise = "at_most_once"'


@pytest.mark.parametrize(
    ("guarantee", "routes", "refused"),
    [
        ("exactly_once", [route("a/+/c"), route("a/b/+")], True),
        ("at_most_once", [route("a/+/c"), route("a/b/+")], True),
        ("at_least_once", [route("a/+/c"), route("a/b/+")], False),
        ("exactly_once", [route("a/#"), route("a/b/+")], False),  # the second is not subscribed
        ("exactly_once", [route("$share/g/a/#"), route("a/b")], True),  # another group: both are subscribed
        ("exactly_once", [route("a/+/c", KEY), route("a/b/+", KEY)], False),
        ("exactly_once", [route("a/+/c", KEY), route("a/b/+")], False),  # the first route takes what both bring
        ("exactly_once", [route("a/b/+"), route("a/+/c", KEY)], True),
        ("exactly_once", [route("a/+/c", LOSES), route("a/b/+")], True),
        ("exactly_once", [route("a/+/c", WEAKER), route("a/b/+", WEAKER)], False),
        ("exactly_once", [route("a/b/c"), route("a/+/c", WEAKER), route("a/b/+", WEAKER)], True),  # the narrowest first
    ],
)
def test_filters_that_overlap_are_for_who_bears_a_repeat(
    tmp_path: Path, guarantee: str, routes: list[str], *, refused: bool
) -> None:
    text = f'{HEAD}[[uplink]]\nname = "up"\nguarantee = "{guarantee}"\n{"".join(routes)}'
    if not refused:
        warned = "overlap; a broker may send" in plan_text(read(text, tmp_path))
        assert warned is (guarantee == "at_least_once" or WEAKER in routes[0])
        return
    (mistake,) = told(text, tmp_path)
    assert f"guarantee {guarantee} does not allow it. Use one wider filter, a line or query for each, or " in mistake
    assert mistake.endswith("[TL-C05]")


#: Who takes the messages in, as a bridge file says it: keys of the line, and its tables.
TAKING = {
    "own": ("", ""),
    "members": ('share = "subscription"\n', '[[uplink.member]]\nname = "g1"\n[[uplink.member]]\nname = "g2"\n'),
    "elsewhere": ('gateways = ["/x/g1", "/x/g2"]\n', ""),
}


@pytest.mark.parametrize("taking", TAKING)
@pytest.mark.parametrize("keyed", [False, True], ids=["", "keyed"])
@pytest.mark.parametrize(("guarantee", "acks"), [(one, acks) for one in Guarantee for acks in policy(one).ack_choices])
def test_a_plan_says_what_may_be_lost_and_doubled(
    tmp_path: Path, guarantee: Guarantee, acks: AckAfter, taking: str, *, keyed: bool
) -> None:
    keys, tables = TAKING[taking]
    said = f'name = "telemetry"\nguarantee = "{guarantee}"\n{keys}'
    said += f'ack_after = "{acks}"\n' if taking != "elsewhere" else ""
    said += 'dedupe = { key = "{mqtt.user.id}" }\n' if keyed else ""
    text = plan_text(read(changed('name = "telemetry"\n', said) + tables, tmp_path))
    after_kafka = acks is AckAfter.KAFKA and taking != "elsewhere"
    says = {
        "acks      when Kafka has the message": after_kafka,
        "as long as the broker keeps its session": after_kafka,
        "acks      ": taking != "elsewhere",
        "as long as the state directory is kept": guarantee is not Guarantee.AT_MOST_ONCE and not after_kafka,
        "and what a publisher sends again": guarantee is Guarantee.AT_LEAST_ONCE and not keyed,
        "one transaction a batch, all topics and the marker at once": guarantee is Guarantee.EXACTLY_ONCE,
    }
    assert {sentence: sentence in text for sentence in says} == says


LOOSE = GOOD.replace(
    'bootstrap_servers = "k1:9092"',
    """bootstrap_servers = "k1:9092"
settings = { "security.protocol" = "ssl", "enable.ssl.certificate.verification" = false }""",
)
TOLD = "insecure: [kafka] enable.ssl.certificate.verification=false"


@pytest.mark.parametrize("loose", [True, False])
def test_check_and_every_status_tell(tmp_path: Path, loose: bool) -> None:
    bridge = read(LOOSE if loose else GOOD, tmp_path)
    plan = plan_text(bridge)
    assert (f"  ! {TOLD}" in plan) is loose
    assert ("topics telemetry   insecure" in plan) is loose
    state = BridgeState(bridge.name, tmp_path, {"telemetry": "up"}, insecure_settings(bridge.kafka.client_settings()))
    state.kafka = "reachable"
    state.save()
    text = render_status(collect_status(tmp_path))
    assert ("kafka reachable (insecure)" in text) is loose
    assert (f"! {TOLD}" in text) is loose
    shown, live = io.StringIO(), LiveScreen()
    live.show(state)
    Console(file=shown, width=200).print(live.live.renderable)
    assert ("kafka reachable (insecure)" in shown.getvalue()) is loose


def test_the_start_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def end(*_: object) -> None:
        raise KeyboardInterrupt

    out = io.StringIO()
    monkeypatch.setattr("towline.bridge.runtime.supervisor.KafkaSupervisor", end)  # the first part that is made
    with pytest.raises(KeyboardInterrupt):
        Supervisor(read(LOOSE, tmp_path), PlainScreen(out)).run()
    assert f"  {TOLD}" in out.getvalue()
