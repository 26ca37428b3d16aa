"""What of MQTT a broker has: judged by what it said and by what was seen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from mqtt5 import ConnAckPacket, QoS

from tests.unit.doctor.bridges import DOWN, UP, UP_2, bridge_of
from towline.doctor.broker.access import judge_access, judge_line_access
from towline.doctor.broker.conf import BrokerConf, read_conf
from towline.doctor.broker.facts import (
    BrokerFacts,
    Elsewhere,
    FilterAnswer,
    Greeting,
    InFlight,
    KeptQueue,
    KeptWindow,
    LargeMessage,
    LineAnswers,
    NoGreeting,
    OwnTopics,
)
from towline.doctor.broker.features import judge_elsewhere, judge_features, judge_line_features
from towline.doctor.broker.targets import Target, targets_of
from towline.doctor.broker.versions import faults_of
from towline.doctor.case import LineLoad
from towline.doctor.findings import Finding, Standing
from towline.errors import Refused, Unreachable

GREETING = Greeting(level=5, connack=ConnAckPacket())
BROKEN, HOLDS, LIMITED, UNKNOWN, WARNS = (
    Standing.BROKEN,
    Standing.HOLDS,
    Standing.LIMITED,
    Standing.UNKNOWN,
    Standing.WARNS,
)


def target_of(directory: Path, lines: str = UP, uri: str = "mqtt://127.0.0.1", mqtt: str = "") -> Target:
    [target] = targets_of(bridge_of(directory, uri, lines, mqtt))
    return target


def of(target: Target, facts: BrokerFacts, conf: BrokerConf | None = None) -> dict[str, Finding]:
    return {one.code: one for one in judge_features(target, facts, conf)}


def of_line(
    target: Target, facts: BrokerFacts, seen: LineAnswers | None = None, load: LineLoad | None = None
) -> dict[str, Finding]:
    return {one.code: one for one in judge_line_features(target.gateways[0], facts, seen or LineAnswers(), load)}


def test_of_a_greeting_alone_nothing_is_wrong(tmp_path: Path) -> None:
    target = target_of(tmp_path, UP_2)
    found = [
        *judge_access(target, BrokerFacts(greeting=GREETING)),
        *of(target, BrokerFacts(greeting=GREETING)).values(),
    ]
    assert {one.verdict for one in found} == {HOLDS}


@pytest.mark.parametrize(
    ("before", "after", "lines", "verdict"),
    [
        (10, 11, UP, HOLDS),
        (1, 2, UP, HOLDS),
        (10, 10, UP, HOLDS),  # HiveMQ sends the next when all of a batch is acknowledged
        (20, 21, UP, WARNS),
        (10, 20, UP, WARNS),
        (10, 20, UP_2, BROKEN),
    ],
)
def test_the_window(tmp_path: Path, before: int, after: int, lines: str, verdict: Standing) -> None:
    window = KeptWindow(announced=10, before=before, after=after)
    assert of(target_of(tmp_path, lines), BrokerFacts(greeting=GREETING, window=window))["TL-D12"].verdict is verdict


@pytest.mark.parametrize(
    ("software", "shared", "number"),
    [
        ("mosquitto version 2.0.11", False, 1),
        ("mosquitto version 2.0.11", True, 2),
        ("mosquitto version 2.0.12", True, 1),
        ("mosquitto version 2.0.13", True, 0),
        ("mosquitto version 2.0.16", False, 1),
        ("mosquitto version 2.0.21", True, 0),
        ("mosquitto version 2.1.2", True, 0),
        ("HiveMQ 2025.5", True, 0),
        ("", True, 0),
    ],
)
def test_known_faults_of_a_version(software: str, shared: bool, number: int) -> None:
    assert len(list(faults_of(software, shared=shared))) == number


def test_a_version_with_a_fault_says_which_one_mends_it(tmp_path: Path) -> None:
    row = of(target_of(tmp_path), BrokerFacts(greeting=replace(GREETING, software="mosquitto version 2.0.11")))[
        "TL-D14"
    ]
    assert row.verdict is WARNS
    assert "#2301" in row.because
    assert "2.0.13" in row.mend


def test_qos_2(tmp_path: Path) -> None:
    target = target_of(tmp_path, UP_2)
    lower = replace(GREETING, connack=ConnAckPacket(max_qos=QoS.AT_LEAST_ONCE))
    assert of(target, BrokerFacts(greeting=lower))["TL-D09"].verdict is BROKEN
    assert of(target, BrokerFacts(greeting=GREETING, qos_2=False))["TL-D09"].verdict is BROKEN
    assert of(target, BrokerFacts(greeting=GREETING, qos_2=True))["TL-D09"].verdict is HOLDS
    granted = LineAnswers(filters=(FilterAnswer(pattern="telemetry/#", qos=2, code=1),))
    assert of_line(target, BrokerFacts(greeting=GREETING), granted)["TL-D09"].verdict is BROKEN
    assert "TL-D09" not in of(target_of(tmp_path / "1"), BrokerFacts(greeting=lower))


@pytest.mark.parametrize(
    ("pattern", "lacks", "told"),
    [
        ("telemetry/#", "wildcard_subscription_available", "wildcards"),
        ("$share/plant/telemetry/#", "shared_subscription_available", "shared"),
    ],
)
def test_what_a_subscription_needs(tmp_path: Path, pattern: str, lacks: str, told: str) -> None:
    target = target_of(tmp_path, UP.replace("telemetry/#", pattern))
    values: dict[str, bool] = {lacks: False}
    row = of_line(target, BrokerFacts(greeting=replace(GREETING, connack=ConnAckPacket(**values))))["TL-D16"]  # type: ignore[arg-type]
    assert row.verdict is BROKEN
    assert told in row.because
    refused = LineAnswers(filters=(FilterAnswer(pattern=pattern, qos=1, code=0x9E),))
    assert of_line(target, BrokerFacts(greeting=GREETING), refused)["TL-D16"].verdict is BROKEN


def test_a_narrow_window_is_near_at_half_of_what_it_lets_through(tmp_path: Path) -> None:
    queue = KeptQueue(present=True, accepted=60, kept=60, window=10)
    facts = BrokerFacts(greeting=replace(GREETING, round_trip_s=0.005), queue=queue)  # 10 in 10 ms: 1,000 msg/s
    target = target_of(tmp_path)
    verdicts = [of_line(target, facts, load=LineLoad(rate, rate, ""))["TL-D13"].verdict for rate in (499, 501)]
    assert verdicts == [LIMITED, WARNS]
    wide = replace(facts, queue=replace(queue, window=60))
    assert "TL-D13" not in of_line(target, wide)


def test_messages_in_flight_of_mqtt_3(tmp_path: Path) -> None:
    up, down = target_of(tmp_path / "up"), target_of(tmp_path / "down", DOWN, mqtt='protocol = "3.1.1"')
    lost = BrokerFacts(greeting=replace(GREETING, level=4), in_flight=InFlight(sent=20, arrived=5))
    assert of(down, lost)["TL-D15"].verdict is BROKEN
    assert of(up, replace(lost, greeting=GREETING))["TL-D15"].verdict is LIMITED
    assert of(down, replace(lost, in_flight=InFlight(sent=20, arrived=20)))["TL-D15"].verdict is HOLDS


@pytest.mark.parametrize(
    ("large", "most", "lines", "verdict"),
    [
        (LargeMessage(size=65536, code=0, arrived=True), None, UP, HOLDS),
        (LargeMessage(size=65536, code=0, arrived=False, level=4), None, UP, BROKEN),
        (LargeMessage(size=65536, code=0x95, arrived=False), None, UP, LIMITED),
        (None, 9000, UP, LIMITED),
        (None, 9000, DOWN, WARNS),
        (None, 9000, DOWN + 'dead_letter_topic = "dead"\n', LIMITED),
        (None, 2_000_000, DOWN, LIMITED),
    ],
)
def test_the_size_of_a_message(
    tmp_path: Path, large: LargeMessage | None, most: int | None, lines: str, verdict: Standing
) -> None:
    greeting = replace(GREETING, connack=ConnAckPacket(max_packet_size=most))
    facts = BrokerFacts(greeting=greeting, large=large)
    assert of(target_of(tmp_path, lines), facts)["TL-D17"].verdict is verdict


def test_a_limit_in_the_file_that_is_larger_than_the_probe_is_told(tmp_path: Path) -> None:
    facts = BrokerFacts(greeting=GREETING, large=LargeMessage(size=65536, code=0, arrived=True))
    conf = BrokerConf(file=Path("m.conf"), message_size_limit=100_000)
    assert of(target_of(tmp_path), facts, conf)["TL-D17"].verdict is LIMITED


def test_publishers(tmp_path: Path) -> None:
    facts = BrokerFacts(greeting=GREETING)
    target, twice = target_of(tmp_path / "1"), target_of(tmp_path / "2", UP_2)
    meant = UP.replace("at_least_once", "exactly_once").replace(
        "[[uplink.route]]", '[[uplink.route]]\npromise = "at_most_once"'
    )
    meant_so = target_of(tmp_path / "3", meant)
    assert "TL-D24" not in of_line(target, facts)
    assert of_line(target, facts, LineAnswers(levels=(0, 3, 0)))["TL-D24"].verdict is HOLDS
    assert of_line(target, facts, LineAnswers(levels=(1, 3, 0)))["TL-D24"].verdict is WARNS
    assert "TL-D24" not in of_line(meant_so, facts, LineAnswers(levels=(1, 3, 0)))
    assert of_line(twice, facts, LineAnswers(levels=(0, 1, 2)))["TL-D24"].verdict is LIMITED
    assert of_line(twice, facts, LineAnswers(levels=(0, 0, 2)))["TL-D24"].verdict is HOLDS


@pytest.mark.parametrize(
    ("uri", "mqtt", "verdict"),
    [
        ("mqtt://127.0.0.9", "", None),
        ("mqtt://localhost", "", None),
        ("mqtt://[::1]", "", None),
        ("unix:///run/mosquitto.sock", "", None),
        ("mqtt://broker.example", "", WARNS),
        ("mqtts://broker.example", "", HOLDS),
        ("mqtts://broker.example", "[mqtt.tls]\ninsecure = true", WARNS),
    ],
)
def test_what_leaves_this_machine_is_encrypted(tmp_path: Path, uri: str, mqtt: str, verdict: Standing | None) -> None:
    found = {
        one.code: one for one in judge_access(target_of(tmp_path, uri=uri, mqtt=mqtt), BrokerFacts(greeting=GREETING))
    }
    assert (found["TL-D21"].verdict if "TL-D21" in found else None) is verdict


def test_a_password_in_clear_is_named(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.touch(mode=0o600)
    secret.write_text("s3cret", encoding="utf-8")
    mqtt = f'username = "towline"\npassword_file = "{secret}"'
    target = target_of(tmp_path / "b", uri="mqtt://broker.example", mqtt=mqtt)
    rows = list(judge_access(target, BrokerFacts(greeting=GREETING)))
    assert "the password with it" in rows[0].because
    assert "s3cret" not in repr((rows, target, target.options()))


def test_why_nobody_was_met(tmp_path: Path) -> None:
    target = target_of(tmp_path)

    def row(greeting: NoGreeting) -> Finding:
        [found] = judge_access(target, BrokerFacts(greeting=greeting))
        return found

    cut = Unreachable("TL-M03", "mqtt://127.0.0.1", "the connection ended in place of CONNACK", "Trying again.")
    assert row(NoGreeting(error=cut)).code == "TL-D02"
    assert row(NoGreeting(error=cut, tls=True)).mend == "Write mqtts://127.0.0.1:1883."
    assert row(NoGreeting(error=cut, speaks=4)).code == "TL-D20"
    refused = Refused("TL-M08", "mqtt://127.0.0.1", "not \x1bauthorized", "Check username and password_file.")
    assert "\x1b" not in row(NoGreeting(error=refused)).because
    assert row(NoGreeting(error=refused)).mend == "Check username and password_file."


def test_probes_that_are_not_let_through_leave_it_unknown(tmp_path: Path) -> None:
    target = target_of(tmp_path)
    own = BrokerFacts(greeting=GREETING, own=OwnTopics(why="publishing is refused"))
    cut = BrokerFacts(greeting=GREETING, own=OwnTopics(), stopped=Unreachable("TL-M05", "b", "the connection broke"))
    for facts in (own, cut):
        [row] = [one for one in judge_access(target, facts) if one.code == "TL-D11"]
        assert row.verdict is UNKNOWN


@pytest.mark.parametrize(
    ("code", "seen", "acl", "verdict"),
    [
        (1, 5, None, HOLDS),
        (1, 0, None, LIMITED),  # nobody knows the rules
        (1, 0, "", BROKEN),
        (1, 0, "topic read telemetry/#", HOLDS),
        (1, 0, "topic read telemetry/a", WARNS),
        (1, 5, "", HOLDS),  # what came was let through
        (0x87, 0, None, BROKEN),
        (None, 0, None, BROKEN),
    ],
)
def test_the_right_to_read(tmp_path: Path, code: int | None, seen: int, acl: str | None, verdict: Standing) -> None:
    target = target_of(tmp_path)
    conf = None
    if acl is not None:
        (tmp_path / "acl").write_text(acl, encoding="utf-8")
        (tmp_path / "m.conf").write_text("listener 1883\nacl_file acl\n", encoding="utf-8")
        conf = read_conf(tmp_path / "m.conf", 1883)
    facts = LineAnswers(filters=(FilterAnswer(pattern="telemetry/#", qos=1, code=code, seen=seen),))
    [row] = [one for one in judge_line_access(target, target.gateways[0], facts, conf) if one.code == "TL-D10"]
    assert row.verdict is verdict


def test_rules_of_a_plugin_or_of_a_file_out_of_reach_are_not_known(tmp_path: Path) -> None:
    for text in ("plugin /usr/lib/x.so", "acl_file nowhere"):
        (tmp_path / "m.conf").write_text(text, encoding="utf-8")
        conf = read_conf(tmp_path / "m.conf", 1883)
        assert conf.acl is None
        assert conf.acl_unknown


def test_a_first_start_is_told(tmp_path: Path) -> None:
    target = target_of(tmp_path)
    told = {
        started: [
            one.verdict for one in judge_line_access(target, target.gateways[0], LineAnswers(started=started), None)
        ]
        for started in (None, False, True)
    }
    assert told == {None: [], False: [LIMITED], True: []}


def test_brokers_that_are_said_to_share_sessions() -> None:
    found = [judge_elsewhere("l", Elsewhere(made_at="a", asked_at="b", present=there)) for there in (True, False)]
    assert [one.verdict for one in found] == [HOLDS, BROKEN]


def test_several_brokers_without_that_word_are_told(tmp_path: Path) -> None:
    targets = targets_of(bridge_of(tmp_path, "mqtt://127.0.0.1,mqtt://127.0.0.2"))
    assert [target.lines for target in targets] == ["telemetry", "telemetry"]
    assert of_line(targets[0], BrokerFacts(greeting=GREETING))["TL-D22"].verdict is LIMITED


def test_one_broker_for_two_lines_is_examined_once(tmp_path: Path) -> None:
    [target] = targets_of(bridge_of(tmp_path, "mqtt://127.0.0.1", UP + DOWN))
    assert [one.name for one in target.gateways] == ["telemetry", "commands"]
    assert target.lines == ""
