"""What is made of recorded facts of a broker, and of what its file says."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mqtt5 import ConnAckPacket

from tests.unit.doctor.bridges import DOWN, UP, UP_2, bridge_of
from tests.unit.doctor.recorded import BROKEN, HOLDS, LIMITED, SOUND_CONF, UNKNOWN, WARNS, broker_of, rows, wrong
from towline.doctor import examine_brokers
from towline.doctor.broker import CHECKS, QueueProbe, probe_topic
from towline.doctor.inputs import Inputs, LineLoad, topic_filters
from towline.doctor.table import Verdict
from towline.errors import BrokerRefused
from towline.journal import Journal
from towline.mqtt.events import SessionRecord
from towline.mqtt.filters import matches
from towline.schema import ROW_SCHEMA

#: A filter of MQTT, of few words, so that it meets the topics of probes.
_LEVELS = st.lists(st.sampled_from(["+", "towline-doctor", "$towline-doctor", "w", "a"]), min_size=1, max_size=6)
_FILTERS = st.builds(lambda levels, deep: "/".join([*levels, *(["#"] if deep else [])]), _LEVELS, st.booleans())
SOME, NONE = ({"telemetry": LineLoad(number, 0.0, "measured for 1 s")} for number in (5.0, 0.0))
LESS = {"telemetry": BrokerRefused("TL-M11", "b", "the broker grants QoS 1 instead of 2", "Raise it.")}
REFUSED = {"telemetry": BrokerRefused("TL-M10", "b", "refused", "Change it.")}


def kept(of: Iterable[int], accepted: int = 1500, *, present: bool = True) -> QueueProbe:
    return QueueProbe(session_present=present, accepted_count=accepted, numbers=list(of))


@given(st.sets(st.one_of(st.just("#"), _FILTERS), max_size=6))
def test_no_filter_takes_the_topic_of_a_probe(filters: set[str]) -> None:
    topic = probe_topic(filters, "w")
    assert topic is None or not any(matches(one, topic) for one in filters)


@pytest.mark.parametrize(
    ("filters", "topic"),
    [
        ({"telemetry/#", "$SYS/#"}, "towline-doctor/w"),
        ({"+", "+/+", "+/+/+"}, "towline-doctor/w/w/w"),
        ({"towline-doctor/#"}, "towline-doctor-w/w"),
        ({"#"}, "$towline-doctor/w"),
        ({"#", "$towline-doctor/#", "$towline-doctor-w/#"}, None),
    ],
)
def test_a_dollar_topic_only_where_the_file_takes_every_other(filters: set[str], topic: str | None) -> None:
    assert probe_topic(filters, "w") == topic


def journal_at(gateway_dir: Path, *filters: str, established: bool = True) -> Journal:
    """That of a gateway whose session is subscribed to these filters, open."""
    gateway_dir.mkdir(parents=True)
    journal = Journal.open(gateway_dir / "inbox", schema=ROW_SCHEMA)
    journal.set_session(asdict(SessionRecord("c", established, dict.fromkeys(filters, 1))))
    return journal


def test_what_sessions_are_subscribed_to_counts_beside_the_file(tmp_path: Path) -> None:
    """Of a line of the file, of one that is gone, and of a member that is; open or not. Nothing is touched."""
    bridge = bridge_of(tmp_path, "mqtt://127.0.0.1", UP.replace("telemetry/#", "$share/plant/{tenant}/data/#"))
    state = bridge.state_dir
    with (
        journal_at(state / "telemetry", "#"),
        journal_at(state / "gone", "$share/g/a/#", "b"),
        journal_at(state / "shared" / "members" / "g2", "c/+"),
    ):
        journal_at(state / "logs", "d").close()
        journal_at(state / "lost+found", "e").close()  # no line has such a name
        before = {path: path.stat().st_mtime_ns for path in state.rglob("*")}
        assert topic_filters(bridge) == {"+/data/#", "#", "a/#", "b", "c/+", "d"}
        assert {path: path.stat().st_mtime_ns for path in state.rglob("*")} == before


def test_where_a_session_cannot_be_known_no_probe_is_sent(tmp_path: Path) -> None:
    one = broker_of(tmp_path)
    for name in ("probe_topic", "queue_probe", "window_counts"):
        vars(one).pop(name)
    vars(one)["_tested_publisher"] = None  # whoever published would fail
    place = one.inputs.bridge.state_dir / "gone"
    journal_at(place).close()
    [segment] = (place / "inbox").glob("*.seg")
    segment.write_bytes(segment.read_bytes()[:100])
    found = {code: row for code, row in rows(CHECKS, one).items() if "not probed" in row.evidence}
    assert set(found) == {"TL-D03", "TL-D05", "TL-D11", "TL-D12", "TL-D13"}
    assert all(row.verdict is UNKNOWN for row in found.values())
    assert all("TL-J05" in row.evidence and "as the user of the bridge" in row.remedy for row in found.values())


@pytest.mark.parametrize("lines", [UP, UP_2, DOWN, UP + DOWN])
@pytest.mark.parametrize("conf", [SOUND_CONF, None])
def test_nothing_is_wrong_with_a_sound_broker(tmp_path: Path, lines: str, conf: str | None) -> None:
    assert wrong(broker_of(tmp_path, lines, conf=conf, rate=200.0)) == set()


def saving(interval: int, on_changes: bool, rate: float | None = None) -> dict[str, Any]:
    text = f"persistence true\nautosave_interval {interval}\nautosave_on_changes {str(on_changes).lower()}\n"
    return {"conf": text, "rate": rate}


def announcing(**limits: Any) -> dict[str, Any]:
    return {"connack": ConnAckPacket(**limits)}


#: Code, verdict, what is told, and the facts; planted in real brokers are those of tests/integration/doctor.
CASES: list[tuple[str, Verdict, str, dict[str, Any]]] = [
    ("TL-D03", BROKEN, "Session Present 0", {"queue_probe": kept([], 10, present=False)}),
    ("TL-D03", BROKEN, "none of 10 messages", {"queue_probe": kept([], 10)}),
    ("TL-D04", HOLDS, "", {}),
    ("TL-D04", WARNS, "", announcing(session_expiry_interval=300)),
    ("TL-D04", LIMITED, "", announcing(session_expiry_interval=86400)),
    ("TL-D04", LIMITED, "", {"conf": "persistent_client_expiration 2w"}),
    ("TL-D04", WARNS, "", {"mqtt": "session_expiry_s = 90"}),
    ("TL-D04", LIMITED, "", {"level": 4, "conf": None}),
    ("TL-D05", WARNS, "5,000 messages", {"conf": "max_queued_messages 5000"}),
    ("TL-D05", WARNS, "5,000 messages, 25 s at 200 msg/s", {"conf": "max_queued_messages 5000", "rate": 200.0}),
    ("TL-D05", LIMITED, "83 min at 200 msg/s", {"conf": "max_queued_messages 1000000", "rate": 200.0}),
    ("TL-D05", WARNS, "not run with this file", {"conf": "max_queued_messages 1200", "queue_probe": kept(range(1000))}),
    ("TL-D05", HOLDS, "max_queued_messages is 0", {}),
    ("TL-D05", WARNS, "the newest are dropped", {"queue_probe": kept(range(1000))}),
    ("TL-D05", WARNS, "the oldest are dropped", {"queue_probe": kept(range(500, 1500))}),
    ("TL-D05", LIMITED, "at least 1,500 messages, 7.5 s at 200 msg/s", {"conf": None, "rate": 200.0}),
    ("TL-D05", WARNS, "25 s at 20.0 kB/s", {"conf": f"{SOUND_CONF}max_queued_bytes 512000", "rate": 200.0}),
    ("TL-D05", WARNS, "1,000 bytes", {"conf": f"{SOUND_CONF}max_queued_bytes 1000", "queue_probe": kept(range(124))}),
    ("TL-D05", WARNS, "9 messages", {"conf": "max_queued_messages 9\nmax_queued_bytes 1000"}),
    ("TL-D05", WARNS, "memory_limit is 1,048,576", {"conf": f"{SOUND_CONF}memory_limit 1048576"}),
    ("TL-D05", LIMITED, "memory_limit", {"conf": f"{SOUND_CONF}memory_limit 1073741824"}),
    ("TL-D05", WARNS, "memory_limit", {"conf": f"{SOUND_CONF}memory_limit 1073741824", "rate": 10_000.0}),
    ("TL-D07", LIMITED, "", saving(1, on_changes=True)),
    ("TL-D07", WARNS, "", saving(1800, on_changes=True)),
    ("TL-D07", LIMITED, "", saving(1800, on_changes=True, rate=200.0)),  # changes: 9 s
    ("TL-D07", LIMITED, "", saving(60, on_changes=False)),
    ("TL-D07", WARNS, "", saving(61, on_changes=False)),
    ("TL-D07", WARNS, "", saving(0, on_changes=True, rate=1.0)),
    ("TL-D07", LIMITED, "not visible to a client", {"conf": None}),
    ("TL-D07", BROKEN, "/at/all/ does not exist", {"conf": f"{SOUND_CONF}persistence_location /nowhere/at/all/\n"}),
    ("TL-D09", BROKEN, "PUBACK", {"lines": UP_2, "qos_2": False}),
    ("TL-D09", BROKEN, "grants QoS 1", {"lines": UP_2, "measured_loads": LESS}),
    ("TL-D10", HOLDS, "", {"conf": None, "measured_loads": SOME}),
    ("TL-D10", LIMITED, "", {"conf": None, "measured_loads": NONE}),  # nobody knows the rules
    ("TL-D10", LIMITED, "acl_file", {"conf": "acl_file /etc/acl", "measured_loads": NONE}),
    ("TL-D10", HOLDS, "", {"conf": "", "measured_loads": NONE}),
    ("TL-D10", HOLDS, "", {"conf": "acl_file /etc/acl", "measured_loads": SOME}),  # what came was let through
    ("TL-D10", BROKEN, "refused", {"conf": "", "measured_loads": REFUSED}),
    ("TL-D10", LIMITED, "write access", {"lines": DOWN, "conf": None}),
    ("TL-D12", HOLDS, "", {"window_counts": (10, 10)}),  # HiveMQ sends the next when all of a batch is acknowledged
    ("TL-D12", WARNS, "", {"window_counts": (11, 11)}),
    ("TL-D12", BROKEN, "20 received unacknowledged", {"lines": UP_2, "window_counts": (20, 20)}),
    ("TL-D12", WARNS, "", {"window_counts": (10, 12)}),
    ("TL-D12", LIMITED, "max_inflight_messages is 20", {"level": 4}),
    ("TL-D13", WARNS, "", {"queue_probe": kept([0, 2, 1, 3])}),
    ("TL-D13", HOLDS, "", {"queue_probe": kept([0, 1, 2, 1, 2, 3])}),  # a repeat is not out of order
    ("TL-D17", LIMITED, "", {"conf": None}),
    ("TL-D17", LIMITED, "", {"conf": "message_size_limit 100000"}),
    ("TL-D17", WARNS, "acknowledged and dropped", {"conf": "message_size_limit 1000"}),
    ("TL-D17", LIMITED, "", announcing(max_packet_size=9000)),
    ("TL-D17", LIMITED, "dead", {"lines": f'{DOWN}dead_letter_topic = "d"\n', **announcing(max_packet_size=9000)}),
    ("TL-D17", LIMITED, "", {"lines": DOWN, **announcing(max_packet_size=2_000_000)}),
]


@pytest.mark.parametrize(("code", "verdict", "told", "facts"), CASES)
def test_what_is_found(tmp_path: Path, code: str, verdict: Verdict, told: str, facts: dict[str, Any]) -> None:
    found = rows(CHECKS, broker_of(tmp_path, **facts))[code]
    assert found.verdict is verdict
    assert told in f"{found.limit} | {found.evidence}"


def test_who_may_write_where_the_broker_saves(tmp_path: Path) -> None:
    """By the user that its file names; a directory of somebody else is the broker's, who starts it is not seen."""
    place = tmp_path / "store"
    place.mkdir()
    said = f"{SOUND_CONF}persistence_location {place}/\nuser nobody\n"
    place.chmod(0o755)
    assert "user nobody" in rows(CHECKS, broker_of(tmp_path, conf=said))["TL-D07"].evidence
    (place / "mosquitto.db").touch()  # it has saved as this user
    assert rows(CHECKS, broker_of(tmp_path, conf=said))["TL-D07"].verdict is LIMITED


def test_lines_that_need_no_session_are_told_nothing_of_it(tmp_path: Path) -> None:
    found = rows(CHECKS, broker_of(tmp_path, UP.replace("at_least_once", "at_most_once")))
    assert {"TL-D03", "TL-D04", "TL-D05", "TL-D07", "TL-D13", "TL-D23"}.isdisjoint(found)


def test_a_first_start_is_told_until_a_broker_has_taken_the_line_in(tmp_path: Path) -> None:
    one = broker_of(tmp_path)
    assert rows(CHECKS, one)["TL-D23"].verdict is LIMITED
    with journal_at(one.target.settings.state_dir, established=False) as journal:
        assert rows(CHECKS, one)["TL-D23"].verdict is LIMITED  # no broker has answered yet
        journal.set_session(asdict(SessionRecord("c", established=True)))
    assert "TL-D23" not in rows(CHECKS, one)


def test_findings_name_their_lines_where_there_are_several_brokers(tmp_path: Path) -> None:
    for brokers, line in (("mqtt://127.0.0.1:1", ""), ("mqtt://127.0.0.1:1,mqtt://127.0.0.1:2", "telemetry")):
        findings = examine_brokers(Inputs(bridge_of(tmp_path / str(len(brokers)), brokers), timeout_s=2.0))
        assert {(found.code, found.line) for found in findings if found.verdict is BROKEN} == {("TL-D02", line)}
