"""What is made of recorded facts of a broker, and of what its file says."""

from __future__ import annotations

import contextlib
import os
import pwd
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mqtt5 import ConnAckPacket, QoS

from tests.unit.doctor.bridges import DOWN, UP, UP_2, bridge_of
from tests.unit.doctor.recorded import BROKEN, HOLDS, LIMITED, SOUND_CONF, UNKNOWN, WARNS, broker_of, rows, wrong
from towline.doctor.broker import CHECKS, QueueProbe, probe_topic
from towline.doctor.inputs import LineLoad, broker_targets, topic_filters
from towline.doctor.table import Finding, ProbeSkipped, Verdict
from towline.errors import BrokerRefused, Unreachable
from towline.journal import Journal
from towline.mqtt.events import SessionRecord
from towline.mqtt.filters import matches
from towline.schema import ROW_SCHEMA

#: A filter of MQTT, of few words, so that it meets the topics of probes.
_LEVELS = st.lists(st.sampled_from(["+", "towline-doctor", "$towline-doctor", "w", "a"]), min_size=1, max_size=6)
SOME, NONE = (LineLoad(number, 0.0, "measured for 1 s") for number in (5.0, 0.0))
_FILTERS = st.builds(lambda levels, deep: "/".join([*levels, *(["#"] if deep else [])]), _LEVELS, st.booleans())


def kept(of: Iterable[int], accepted: int = 1500, *, present: bool = True) -> QueueProbe:
    return QueueProbe(session_present=present, accepted_count=accepted, numbers=list(of))


@given(st.sets(st.one_of(st.just("#"), _FILTERS), max_size=6))
def test_no_filter_takes_the_topic_of_a_probe(filters: set[str]) -> None:
    topic = probe_topic(filters, "w")
    assert topic is None or not any(matches(one, topic) for one in filters)


@pytest.mark.parametrize(
    ("filters", "topic"),
    [
        (set(), "towline-doctor/w"),
        ({"telemetry/#", "$SYS/#"}, "towline-doctor/w"),
        ({"+/+"}, "towline-doctor"),
        ({"+", "+/+", "+/+/+"}, "towline-doctor/w/w/w"),
        ({"towline-doctor/#"}, "towline-doctor-w/w"),
        ({"#"}, "$towline-doctor/w"),
        ({"+/#"}, "$towline-doctor/w"),
        ({"#", "$towline-doctor/#"}, "$towline-doctor-w/w"),
        ({"#", "$towline-doctor/#", "$towline-doctor-w/#"}, None),
    ],
)
def test_a_dollar_topic_only_where_the_file_takes_every_other(filters: set[str], topic: str | None) -> None:
    assert probe_topic(filters, "w") == topic


def test_shared_filters_and_those_of_gateways_elsewhere_count(tmp_path: Path) -> None:
    lines = UP.replace("telemetry/#", "$share/plant/{tenant}/data/#")
    assert topic_filters(bridge_of(tmp_path, "mqtt://127.0.0.1", lines)) == {"+/data/#"}


def journal_at(gateway_dir: Path, *filters: str, established: bool = True) -> Journal:
    """That of a gateway whose session is subscribed to these filters, open."""
    gateway_dir.mkdir(parents=True)
    journal = Journal.open(gateway_dir / "inbox", schema=ROW_SCHEMA)
    journal.set_session(asdict(SessionRecord("c", established, dict.fromkeys(filters, 1))))
    return journal


def test_what_sessions_are_subscribed_to_counts_beside_the_file(tmp_path: Path) -> None:
    """Of a line of the file, of one that is gone, and of a member that is; open or not. Nothing is touched."""
    bridge = bridge_of(tmp_path, "mqtt://127.0.0.1")
    state = bridge.state_dir
    assert topic_filters(bridge) == {"telemetry/#"}
    with (
        journal_at(state / "telemetry", "#"),
        journal_at(state / "gone", "$share/g/a/#", "b"),
        journal_at(state / "shared" / "members" / "g2", "c/+"),
    ):
        journal_at(state / "logs", "d").close()
        journal_at(state / "lost+found", "e").close()  # no line has such a name
        (state / "bridge.json").touch()
        (state / "down" / "outbox").mkdir(parents=True)
        before = {path: path.stat().st_mtime_ns for path in state.rglob("*")}
        assert topic_filters(bridge) == {"telemetry/#", "#", "a/#", "b", "c/+", "d"}
        assert {path: path.stat().st_mtime_ns for path in state.rglob("*")} == before


@contextlib.contextmanager
def of_another_user(directory: Path) -> Iterator[None]:
    """No right to a directory; root, which has any, is somebody else meanwhile."""
    directory.chmod(0)
    try:
        if os.geteuid() == 0:
            os.seteuid(pwd.getpwnam("nobody").pw_uid)
        yield
    finally:
        os.seteuid(os.getuid())
        directory.chmod(0o700)


@contextlib.contextmanager
def damaged(directory: Path) -> Iterator[None]:
    """The newest segment of the journal there has lost all but its first bytes."""
    [segment] = (directory / "inbox").glob("*.seg")
    segment.write_bytes(segment.read_bytes()[:100])
    yield


@pytest.mark.parametrize(("hurt", "told"), [(of_another_user, "Permission denied"), (damaged, "TL-J05")])
def test_where_a_session_cannot_be_known_no_probe_is_sent(
    tmp_path: Path, hurt: Callable[[Path], contextlib.AbstractContextManager[None]], told: str
) -> None:
    one = broker_of(tmp_path)
    for name in ("probe_topic", "queue_probe", "window_counts"):
        vars(one).pop(name)
    vars(one)["_tested_publisher"] = None  # whoever published would fail
    journal_at(one.inputs.bridge.state_dir / "gone").close()
    with hurt(one.inputs.bridge.state_dir / "gone"):
        found = {code: row for code, row in rows(CHECKS, one).items() if "not probed" in row.evidence}
    assert set(found) == {"TL-D03", "TL-D05", "TL-D11", "TL-D12", "TL-D13"}
    assert all(row.verdict is UNKNOWN for row in found.values())
    assert all(told in row.evidence and "as the user of the bridge" in row.remedy for row in found.values())


@pytest.mark.parametrize("lines", [UP, UP_2, DOWN, UP + DOWN])
@pytest.mark.parametrize("conf", [SOUND_CONF, None])
def test_nothing_is_wrong_with_a_sound_broker(tmp_path: Path, lines: str, conf: str | None) -> None:
    assert wrong(broker_of(tmp_path, lines, conf=conf, rate=200.0)) == set()


def row(code: str, one: Any) -> Finding:
    return rows(CHECKS, one)[code]


@pytest.mark.parametrize(
    ("conf", "rate", "queue", "verdict", "told"),
    [
        ("max_queued_messages 5000", 200.0, kept(range(1500)), WARNS, "5,000 messages, 25 s at 200 msg/s"),
        ("max_queued_messages 5000", None, kept(range(1500)), WARNS, "5,000 messages"),
        ("max_queued_messages 1000000", 200.0, kept(range(1500)), LIMITED, "1,000,000 messages, 83 min at 200 msg/s"),
        ("max_queued_messages 1200", 200.0, kept(range(1000)), WARNS, "does not run with this file"),
        ("max_queued_messages 0", 200.0, kept(range(1500)), HOLDS, "max_queued_messages is 0"),
        ("max_queued_messages 0", 200.0, kept(range(1000)), WARNS, "the newest are dropped"),
        ("max_queued_messages 0", 200.0, kept(range(500, 1500)), WARNS, "the oldest are dropped"),
        (None, 200.0, kept(range(1000)), WARNS, "1,000 messages, 5 s"),
        (None, 200.0, kept(range(1500)), LIMITED, "at least 1,500 messages, 7.5 s at 200 msg/s"),
        ("max_queued_messages 0\nmax_queued_bytes 512000", 200.0, kept(range(1500)), WARNS, "25 s at 20.0 kB/s"),
        ("max_queued_messages 0\nmax_queued_bytes 1000", 200.0, kept(range(124)), WARNS, "1,000 bytes"),
        ("max_queued_messages 9\nmax_queued_bytes 1000", 200.0, kept(range(9)), WARNS, "9 messages"),
        ("max_queued_messages 0\nmemory_limit 1048576", None, kept(range(1500)), WARNS, "memory_limit is 1,048,576"),
        ("max_queued_messages 0\nmemory_limit 1073741824", None, kept(range(1500)), LIMITED, "memory_limit"),
        ("max_queued_messages 0\nmemory_limit 1073741824", 10_000.0, kept(range(1500)), WARNS, "memory_limit"),
    ],
)
def test_the_outage_that_a_queue_holds(
    tmp_path: Path, conf: str | None, rate: float | None, queue: QueueProbe, verdict: Verdict, told: str
) -> None:
    found = row("TL-D05", broker_of(tmp_path, conf=conf, rate=rate, queue_probe=queue))
    assert found.verdict is verdict
    assert told in f"{found.limit} | {found.evidence}"


@given(st.integers(0, 5000), st.integers(1, 5000), st.integers(1, 5000))
def test_the_smaller_limit_counts(
    tmp_path_factory: pytest.TempPathFactory, said: int, kept_: int, accepted: int
) -> None:
    queue = kept(range(min(kept_, accepted)), accepted)
    directory = tmp_path_factory.mktemp("b")
    found = row("TL-D05", broker_of(directory, conf=f"max_queued_messages {said}", rate=1.0, queue_probe=queue))
    limits = [*([kept_] if kept_ < accepted else []), *([said] if said else [])]
    if limits:
        assert f"{min(limits):,} message" in found.limit
    else:
        assert found.verdict is HOLDS


@pytest.mark.parametrize(
    ("interval", "on_changes", "rate", "verdict"),
    [
        (1, True, None, LIMITED),
        (1800, True, None, WARNS),
        (1800, True, 200.0, LIMITED),  # changes: 9 s
        (1800, True, 1.0, WARNS),
        (60, False, 200.0, LIMITED),
        (61, False, 200.0, WARNS),
        (0, False, None, WARNS),
        (0, True, 1.0, WARNS),
    ],
)
def test_what_a_killed_broker_takes(
    tmp_path: Path, interval: int, on_changes: bool, rate: float | None, verdict: Verdict
) -> None:
    conf = f"persistence true\nautosave_interval {interval}\nautosave_on_changes {str(on_changes).lower()}\n"
    assert row("TL-D07", broker_of(tmp_path, conf=conf, rate=rate)).verdict is verdict


@pytest.mark.parametrize(
    ("conf", "verdict", "told"),
    [
        (SOUND_CONF.replace("persistence true", "persistence false"), BROKEN, "persistence is false"),
        (f"{SOUND_CONF}persistence_location /nowhere/at/all/\n", BROKEN, "/nowhere/at/all/ does not exist"),
        (f"{SOUND_CONF}persistence_location /etc/hostname\n", BROKEN, "is no directory"),
        (f"{SOUND_CONF}persistence_location /proc/\n", BROKEN, "persistence_location /proc/"),
        (None, LIMITED, "not visible to a client"),
    ],
)
def test_a_restart_keeps_what_was_saved(tmp_path: Path, conf: str | None, verdict: Verdict, told: str) -> None:
    if conf is not None and "/proc/" in conf:
        conf += "user nobody\n"
    found = row("TL-D07", broker_of(tmp_path, conf=conf))
    assert found.verdict is verdict
    assert told in found.evidence


def test_who_may_write_where_the_broker_saves(tmp_path: Path) -> None:
    """By the user that its file names; a directory of somebody else is the broker's, who starts it is not seen."""
    place = tmp_path / "store"
    place.mkdir()
    said = f"{SOUND_CONF}persistence_location {place}/\nuser nobody\n"
    place.chmod(0o755)
    assert "user nobody" in row("TL-D07", broker_of(tmp_path, conf=said)).evidence
    place.chmod(0o777)
    assert row("TL-D07", broker_of(tmp_path, conf=said)).verdict is LIMITED
    place.chmod(0o755)
    (place / "mosquitto.db").touch()  # it has saved as this user
    assert row("TL-D07", broker_of(tmp_path, conf=said)).verdict is LIMITED


@pytest.mark.parametrize(
    ("given_s", "conf", "mqtt", "verdict"),
    [
        (None, "", "", HOLDS),
        (300, "", "", WARNS),
        (86400, "", "", LIMITED),
        (None, "persistent_client_expiration 2h", "", WARNS),
        (None, "persistent_client_expiration 2w", "", LIMITED),
        (None, "", "session_expiry_s = 90", WARNS),
    ],
)
def test_a_session_that_ends_within_a_day_is_near(
    tmp_path: Path, given_s: int | None, conf: str, mqtt: str, verdict: Verdict
) -> None:
    connack = ConnAckPacket(session_expiry_interval=given_s)
    assert row("TL-D04", broker_of(tmp_path, mqtt=mqtt, conf=conf, connack=connack)).verdict is verdict


def test_of_mqtt_3_the_expiry_and_the_window_are_not_known(tmp_path: Path) -> None:
    found = rows(CHECKS, broker_of(tmp_path, conf=None, level=4))
    assert [found[code].verdict for code in ("TL-D02", "TL-D04", "TL-D12")] == [LIMITED] * 3
    assert "MQTT 3.1.1" in found["TL-D02"].evidence
    told = row("TL-D12", broker_of(tmp_path, level=4))
    assert (told.verdict, "max_inflight_messages is 20" in told.evidence) == (LIMITED, True)


def test_no_session_and_no_queue(tmp_path: Path) -> None:
    lost = row("TL-D03", broker_of(tmp_path, queue_probe=kept([], 10, present=False)))
    assert (lost.verdict, "Session Present 0" in lost.evidence) == (BROKEN, True)
    empty = row("TL-D03", broker_of(tmp_path, queue_probe=kept([], 10)))
    assert (empty.verdict, "none of 10 messages" in empty.evidence) == (BROKEN, True)


def test_lines_that_need_no_session_are_told_nothing_of_it(tmp_path: Path) -> None:
    found = rows(CHECKS, broker_of(tmp_path, UP.replace("at_least_once", "at_most_once")))
    assert {"TL-D03", "TL-D04", "TL-D05", "TL-D07", "TL-D13", "TL-D23"}.isdisjoint(found)


@pytest.mark.parametrize(
    ("numbers", "verdict"), [(range(100), HOLDS), ([0, 2, 1, 3], WARNS), ([0, 1, 2, 1, 2, 3], HOLDS), ([], HOLDS)]
)
def test_the_order_of_what_waited(tmp_path: Path, numbers: Iterable[int], verdict: Verdict) -> None:
    """A message that comes a second time is a repeat, and not out of order."""
    assert row("TL-D13", broker_of(tmp_path, queue_probe=kept(numbers))).verdict is verdict


@pytest.mark.parametrize(
    ("window", "lines", "verdict"),
    [
        ((10, 11), UP, HOLDS),
        ((1, 2), UP, HOLDS),
        ((10, 10), UP, HOLDS),  # HiveMQ sends the next when all of a batch is acknowledged
        ((20, 21), UP, WARNS),
        ((10, 20), UP, WARNS),
        ((10, 20), UP_2, BROKEN),
    ],
)
def test_the_window(tmp_path: Path, window: tuple[int, int], lines: str, verdict: Verdict) -> None:
    assert row("TL-D12", broker_of(tmp_path, lines, window_counts=window)).verdict is verdict


def test_qos_2(tmp_path: Path) -> None:
    lower = ConnAckPacket(max_qos=QoS.AT_LEAST_ONCE)
    assert row("TL-D09", broker_of(tmp_path, UP_2, connack=lower)).verdict is BROKEN
    assert "PUBACK" in row("TL-D09", broker_of(tmp_path, UP_2, qos_2=False)).evidence
    less = BrokerRefused("TL-M11", "b", "the broker grants QoS 1 instead of 2", "Raise it.")
    found = rows(CHECKS, broker_of(tmp_path, UP_2, measured_loads={"telemetry": less}))
    assert (found["TL-D09"].verdict, found["TL-D09"].promise) == (BROKEN, "granted QoS")
    assert "TL-D10" not in found
    assert "TL-D09" not in rows(CHECKS, broker_of(tmp_path, UP, connack=lower))


@pytest.mark.parametrize(
    ("heard", "conf", "verdict"),
    [
        (SOME, None, HOLDS),
        (NONE, None, LIMITED),  # nobody knows the rules
        (NONE, "acl_file /etc/acl", LIMITED),
        (NONE, "plugin /usr/lib/x.so", LIMITED),
        (NONE, "", HOLDS),
        (SOME, "acl_file /etc/acl", HOLDS),  # what came was let through
        (BrokerRefused("TL-M10", "b", "refused", "Change it."), "", BROKEN),
    ],
)
def test_the_right_to_read(tmp_path: Path, heard: LineLoad | BrokerRefused, conf: str | None, verdict: Verdict) -> None:
    found = row("TL-D10", broker_of(tmp_path, conf=conf, measured_loads={"telemetry": heard}))
    assert found.verdict is verdict
    if conf:
        assert conf.split()[0] in found.evidence or heard is SOME


def test_the_right_to_write_is_not_tried(tmp_path: Path) -> None:
    assert row("TL-D10", broker_of(tmp_path, DOWN, conf=None)).verdict is LIMITED
    assert row("TL-D10", broker_of(tmp_path, DOWN)).verdict is HOLDS


@pytest.mark.parametrize(
    ("facts", "conf", "lines", "verdict"),
    [
        ({}, "", UP, HOLDS),
        ({}, None, UP, LIMITED),
        ({}, "message_size_limit 1000", UP, WARNS),
        ({}, "message_size_limit 100000", UP, LIMITED),
        ({"connack": ConnAckPacket(max_packet_size=9000)}, "", UP, LIMITED),
        ({"connack": ConnAckPacket(max_packet_size=9000)}, "", DOWN, WARNS),
        ({"connack": ConnAckPacket(max_packet_size=9000)}, "", DOWN + 'dead_letter_topic = "dead"\n', LIMITED),
        ({"connack": ConnAckPacket(max_packet_size=2_000_000)}, "", DOWN, LIMITED),
    ],
)
def test_the_size_of_a_message(
    tmp_path: Path, facts: dict[str, Any], conf: str | None, lines: str, verdict: Verdict
) -> None:
    assert row("TL-D17", broker_of(tmp_path, lines, conf=conf, **facts)).verdict is verdict


def test_a_first_start_is_told_until_a_broker_has_taken_the_line_in(tmp_path: Path) -> None:
    one = broker_of(tmp_path)
    assert row("TL-D23", one).verdict is LIMITED
    with journal_at(one.target.settings.state_dir, established=False) as journal:
        assert row("TL-D23", one).verdict is LIMITED  # no broker has answered yet
        journal.set_session(asdict(SessionRecord("c", established=True)))
    assert "TL-D23" not in rows(CHECKS, one)


def test_a_broker_that_is_not_met_is_broken_and_the_rest_unknown(tmp_path: Path) -> None:
    do = "Is this port an MQTT listener? Is it a port for TLS? That is mqtts://127.0.0.1:1883."
    cut = Unreachable("TL-M03", "mqtt://127.0.0.1", "the connection ended in place of CONNACK", do)
    facts = "_first_client connack level probe_topic queue_probe window_counts qos_2 measured_loads"
    one = broker_of(tmp_path, UP_2)
    for name in facts.split():
        vars(one).pop(name, None)
        vars(one)[f"no {name}"] = cut
    found = rows(CHECKS, one)
    assert found["TL-D02"].verdict is BROKEN
    assert found["TL-D02"].remedy == do
    unknown = {code for code, one in found.items() if one.verdict is UNKNOWN}
    assert unknown >= {"TL-D03", "TL-D04", "TL-D05", "TL-D09", "TL-D10", "TL-D11", "TL-D12", "TL-D13", "TL-D17"}


def test_what_is_not_asked_says_why_in_each_of_its_rows(tmp_path: Path) -> None:
    one = broker_of(tmp_path)
    for name in ("probe_topic", "queue_probe", "window_counts"):
        vars(one).pop(name)
        vars(one)[f"no {name}"] = ProbeSkipped("a line would receive it", "Narrow the filters.")
    found = {code: one for code, one in rows(CHECKS, one).items() if one.verdict is UNKNOWN}
    assert set(found) == {"TL-D03", "TL-D05", "TL-D11", "TL-D12", "TL-D13"}
    assert {(one.evidence, one.remedy) for one in found.values()} == {
        ("not probed: a line would receive it", "Narrow the filters.")
    }


def test_each_way_to_a_broker_is_examined_once(tmp_path: Path) -> None:
    [target] = broker_targets(bridge_of(tmp_path / "1", "mqtt://127.0.0.1", UP + DOWN))
    assert ([*target.by_line], target.line_names) == (["commands", "telemetry"], "")
    targets = broker_targets(bridge_of(tmp_path / "2", "mqtt://127.0.0.1,mqtt://127.0.0.2"))
    assert [target.line_names for target in targets] == ["telemetry", "telemetry"]
    secret = tmp_path / "secret"
    secret.touch(mode=0o600)
    secret.write_text("s3cret", encoding="utf-8")
    [target] = broker_targets(
        bridge_of(tmp_path / "3", "mqtt://127.0.0.1", mqtt=f'username = "u"\npassword_file = "{secret}"')
    )
    options = target.settings.connection
    read = options.credentials(lambda: False)
    assert read[0]["password"] == b"s3cret"
    assert "s3cret" not in repr((target, options))
