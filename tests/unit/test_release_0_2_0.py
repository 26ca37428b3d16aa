"""Files that 0.2.0 wrote (`tests.fixtures.release`), as every later version has to read them.

A test here that fails names a format which has changed: then what was written before has to be read all the same.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from mqtt5 import PubCompPacket, PublishPacket, PubRecPacket, PubRelPacket, QoS

from tests.fixtures.reading import FIXTURES, WRITTEN_AT, Release, letter_facts, plain_rows, recorded_settings
from tests.helpers import wait_until
from tests.unit.cli.test_main import ran
from tests.unit.gateway.brokered import ROOMY, Broker, pumping, turn
from towline import Publisher
from towline.bridge import deadletters
from towline.bridge.config.file import load
from towline.bridge.config.model import CHECKPOINT, Bridge
from towline.bridge.lines.account import LineNotes
from towline.bridge.lines.identity import (
    Identity,
    assign_identities,
    current_or_former_line,
    former_dead_letter_topics,
    removed_lines,
)
from towline.bridge.runtime.state import BridgeState, LineView, read_pause
from towline.bridge.runtime.status import EXIT_UNKNOWN, collect_bridge_status
from towline.checkpoint import Checkpoint
from towline.delivery.receipts.ledger import MarkVerdict, ReceiptLedger
from towline.delivery.receipts.mark import Content, ReceiptKeys, parse_mark
from towline.delivery.refused import RefusedMessages
from towline.gateway.access import TicketKey
from towline.gateway.identity import JournalPosition, check_checkpoint, check_outbox, read_client_sessions
from towline.journal import Batch, Journal, Outbox
from towline.journal.outbox import PHASE_PUBLISHED, count_waiting_rows
from towline.kafka.markers import Marker, MarkerVerdict, compare_marker
from towline.monitor.gateway import GatewayFacts, gateway_samples, readiness_problems
from towline.monitor.history import History, line_history
from towline.publisher.pending_receipts import PendingReceipts
from towline.schema import OUTBOX_SCHEMA, REFUSED_SCHEMA, ROW_SCHEMA
from towline.sinks import Task
from towline.spark.offsets import SourceOffset, positions_at
from towline.spark.sink_note import SinkNote
from towline.timing import Timestamp

VERSION = "0.2.0"


@pytest.fixture
def release(tmp_path: Path) -> Release:
    return Release.copied(VERSION, tmp_path)


@pytest.fixture
def bridge(release: Release) -> Bridge:
    """As its file says, in the place to which it was moved."""
    return load(release.directory / "bridge.toml")


@pytest.fixture
def broker() -> Iterator[Broker]:
    broker = Broker()
    yield broker
    broker.line.close()
    broker.listener.close()


def checkpoint(release: Release, line: str) -> Checkpoint:
    return Checkpoint(f"file:{release.line(line) / CHECKPOINT}")


def outbox_of(directory: Path) -> Outbox:
    return Outbox.open(directory / "outbox", schema=OUTBOX_SCHEMA, limits=ROOMY)


# -- the files themselves --


def test_they_are_few_and_name_no_machine() -> None:
    paths = [path for path in (FIXTURES / VERSION).rglob("*") if path.is_file()]
    assert 40 < len(paths) < 100
    assert sum(path.stat().st_size for path in paths) < 300_000
    assert json.loads((FIXTURES / VERSION / "expected.json").read_text())["version"].startswith(VERSION)
    for name in ("bridge.json", "telemetry/line.json"):
        assert f'"{WRITTEN_AT}/' in (FIXTURES / VERSION / "state" / name).read_text()


def test_the_page_names_the_tests_of_this_file() -> None:
    page = (FIXTURES.parents[1] / "docs" / "compatibility.md").read_text()
    files = page.partition("\n## Files\n")[2].partition("\n## ")[0]
    named = set(re.findall(r"`(test_\w+)`", files))
    assert len(named) > 10
    assert named <= set(globals())


# -- journals --


@pytest.mark.parametrize(
    ("name", "place", "schema", "kind"),
    [
        ("telemetry", "state/telemetry/inbox", ROW_SCHEMA, Journal),
        ("commands", "state/commands/outbox", OUTBOX_SCHEMA, Outbox),
        ("refused", "state/commands/refused", REFUSED_SCHEMA, Journal),
        ("publisher", "publisher/outbox", OUTBOX_SCHEMA, Outbox),
    ],
)
def test_a_journal_goes_on(release: Release, name: str, place: str, schema: Any, kind: type[Journal]) -> None:
    """Rows, offsets, incarnations and watermarks are as they were, and the next row follows the last one."""
    expected = release.expected[name]
    with kind.open(release.directory / place, schema=schema, limits=ROOMY) as journal:
        first, end = journal.first_offset, journal.end
        assert (journal.journal_id, first, end) == (expected["journal"], expected["first"], expected["end"])
        assert (journal.epoch > expected["epoch"], journal.repair_note) == (True, "")
        assert dict(journal.consumers) == expected["consumers"]
        assert journal.session.get("client_id") == expected["client_id"]
        incarnations = [journal.incarnation_of(offset) for offset in range(first, end + 1)]
        assert incarnations == expected["incarnations"]
        assert plain_rows(journal.read(first, end)) == expected["rows"]
        (row,) = journal.read(end - 1, end)
        assert journal.append(row) == end + 1
        assert journal.incarnation_of(end + 1) not in incarnations
    with kind.open(release.directory / place, schema=schema, limits=ROOMY) as journal:
        assert (journal.first_offset, journal.end) == (first, end + 1)


def test_a_message_whose_packet_id_was_not_released_is_not_stored_again(release: Release, broker: Broker) -> None:
    """[I3]: its session is present, its PUBREC was lost."""
    line, expected = release.line("telemetry"), release.expected["telemetry"]
    settings = recorded_settings(line, receipts={"key_file": release.directory / "line.key"})
    with pumping(line, broker, **settings) as (pump, inbox):
        assert {str(name): [*row] for name, row in inbox.held_ids.items()} == expected["held"]
        broker.accept(pump, session_present=True)
        broker.heard()
        for packet_id, (offset, _) in expected["held"].items():
            row = expected["rows"][offset - expected["first"]]
            again = PublishPacket(
                row["topic"], row["payload"].encode(), qos=QoS(2), packet_id=int(packet_id), duplicate=True
            )
            broker.say(pump, again)
        assert [packet.packet_id for packet in broker.heard() if isinstance(packet, PubRecPacket)] == [301, 302, 303]
        assert inbox.end == expected["end"]
        broker.say(pump, PubRelPacket(301))
        assert [packet.packet_id for packet in broker.heard() if isinstance(packet, PubCompPacket)] == [301]
        broker.say(pump, PublishPacket("telemetry/d0/t", b"new", qos=QoS(2), packet_id=301))
        assert inbox.end == expected["end"] + 1
        assert sorted(inbox.held_ids) == [301, 302, 303]


def test_an_outbox_sends_what_was_in_flight_and_what_waited(release: Release, broker: Broker) -> None:
    """[I10]: under its packet ids, from the phase that each was in, and nothing that is done."""
    line, expected = release.line("commands"), release.expected["commands"]
    with outbox_of(line) as outbox, pumping(line, broker, outbox=outbox, **recorded_settings(line)) as (pump, _):
        in_flight = {str(packet_id): [*row] for packet_id, row in outbox.in_flight.items()}
        assert in_flight == expected["in_flight"]
        assert [[*ends] for ends in outbox.done_rows.ranges] == expected["done"]
        broker.accept(pump, session_present=True)
        published: list[PublishPacket] = []
        released: list[int | None] = []

        def all_sent() -> bool:
            turn(pump)
            for packet in broker.heard():
                if isinstance(packet, PublishPacket):
                    published.append(packet)
                    broker.say(pump, PubRecPacket(packet.packet_id or 0))
                elif isinstance(packet, PubRelPacket):
                    released.append(packet.packet_id)
                    broker.say(pump, PubCompPacket(packet.packet_id))
            return outbox.is_done_below(outbox.end)

        wait_until(all_sent, 10, "the end of the outbox")
        unanswered = {int(n): row for n, (row, phase, _) in in_flight.items() if phase == PHASE_PUBLISHED}
        payloads = {packet.packet_id: packet.payload for packet in published}
        assert payloads == {n: expected["rows"][row]["payload"].encode() for n, row in unanswered.items()}
        assert (len(published), all(packet.duplicate for packet in published)) == (len(unanswered), True)
        assert sorted(map(str, released)) == sorted(in_flight), "the one that was released is not published"


def test_a_batch_that_is_in_the_outbox_is_not_taken_again(release: Release) -> None:
    line, expected = release.line("commands"), release.expected["commands"]
    with outbox_of(line) as outbox:
        ((writer, number),) = expected["batches"].items()
        assert {name: batch.number for name, batch in outbox.last_batches.items()} == expected["batches"]
        (rows,) = outbox.read(0, 2)
        again = outbox.append_batch(rows, Batch(writer, number))
        assert (again.whole, again.already, again.newest, outbox.end) == (True, True, number, expected["end"])
        following = outbox.append_batch(rows, Batch(writer, number + 1))
        assert (following.already, following.end) == (False, expected["end"] + 2)
    assert count_waiting_rows(line / "outbox") == expected["end"] + 2 - sum(
        end - start for start, end in expected["done"]
    )


def test_a_refused_message_is_shown_and_replayed(release: Release) -> None:
    line, (stored,) = release.line("commands"), release.expected["refused"]["rows"]
    with outbox_of(line) as outbox:
        refused = RefusedMessages(line / "refused", outbox)
        (shown,) = refused.page(0)["rows"]
        assert (shown["number"], shown["words"], shown["topic"]) == (
            stored["number"],
            "not authorized",
            stored["topic"],
        )
        assert shown["arrived_at"] == stored["arrived_at"]
        assert base64.b64decode(refused.message(0)["rows"][0]["payload"]).decode() == stored["payload"]
        assert refused.replay(1)["moved"] == 1
        assert outbox.end == release.expected["commands"]["end"] + 1
        refused.close()


# -- checkpoints, identities, and the state of a bridge --


@pytest.mark.parametrize("line", ["telemetry", "commands"])
def test_a_checkpoint_goes_on(release: Release, line: str) -> None:
    logs, expected = checkpoint(release, line), release.expected["checkpoints"][line]
    assert logs.repair() == []
    assert (logs.query_id, logs.last_planned_batch(), logs.all_committed) == (
        expected["query"],
        expected["planned"],
        True,
    )
    assert logs.offsets(expected["planned"]) == logs.newest_offsets() == expected["offsets"]
    assert logs.offsets_hash(expected["planned"]) == expected["hash"]
    notes, sink = LineNotes.read(release.line(line) / CHECKPOINT), SinkNote.read(logs)
    assert dict(notes.counts) == expected["counts"]
    assert sink.throughput is not None
    assert [totals.batch for totals in sink.totals] == [
        *range(-1 if line == "telemetry" else 0, expected["planned"] + 1)
    ]
    content = logs.read_note("towline.totals")
    sink.write(logs)
    assert logs.read_note("towline.totals") == content


def test_journals_and_checkpoints_belong_together(release: Release) -> None:
    up, down = release.line("telemetry"), release.line("commands")
    with Journal.open(up / "inbox", schema=ROW_SCHEMA, limits=ROOMY) as inbox, outbox_of(down) as outbox:
        check_checkpoint("telemetry", inbox, f"file:{up / CHECKPOINT}")
        check_outbox("commands", outbox, f"file:{down / CHECKPOINT}")
        (position,) = positions_at(
            checkpoint(release, "telemetry"), release.expected["checkpoints"]["telemetry"]["planned"]
        )
        assert (position.journal, position.offset) == (inbox.journal_id, inbox.consumers["bridge"])
    note = JournalPosition.read_outbox_note(f"file:{down / CHECKPOINT}")
    assert note is not None
    assert note.to_json() == release.expected["outbox_note"]


def test_offsets_are_the_same_text(release: Release) -> None:
    """Spark compares them as text."""
    one, several = release.json("offsets.json")
    for text in (one, several):
        assert json.dumps(SourceOffset.parse(json.loads(text)).to_json(), separators=(",", ":")) == text
    assert [position.gateway for position in SourceOffset.parse(json.loads(several)).positions] == [
        "a",
        "plant-8",
        "telemetry",
    ]


def test_a_line_is_who_it_was(release: Release, bridge: Bridge) -> None:
    for line in ("telemetry", "commands"):
        directory = release.line(line)
        identity = Identity.read(directory)
        assert identity is not None
        assert (identity.line, identity.sink) == (line, release.expected["sinks"][line])
        assert identity.query == release.expected["checkpoints"][line]["query"]
        content = (directory / "identity.json").read_bytes()
        identity.save(directory)
        assert (directory / "identity.json").read_bytes() == content
        (session,) = read_client_sessions(directory)
        assert (session.client_id, session.ended) == (f"{bridge.name}-{line}", None)
        TicketKey.load(line, directory)
    assert assign_identities(bridge) == []
    assert (removed_lines(bridge), former_dead_letter_topics(bridge)) == ([], [])


def test_a_removed_line_is_who_it_was(release: Release, bridge: Bridge) -> None:
    """`towline retire` goes by ``line.json``; messages wait in its inbox."""
    file = release.directory / "bridge.toml"
    head, _, uplink = file.read_text().partition("[[uplink]]")
    file.write_text(f"{head}[[downlink]]{uplink.partition('[[downlink]]')[2]}")
    without = load(file)
    (removed,) = removed_lines(without)
    inbox = release.expected["telemetry"]
    assert removed.waiting_messages == inbox["end"] - inbox["consumers"]["bridge"]
    former, line = current_or_former_line(without, "telemetry"), bridge.line("telemetry")
    assert former.gateway.state_dir == release.line("telemetry")
    assert former.model_dump(exclude={"receipts", "gateway"}) == line.model_dump(exclude={"receipts", "gateway"})


def test_status_has_the_last_account(release: Release, capsys: pytest.CaptureFixture[str]) -> None:
    code, text, _ = ran(capsys, "status", "--state-dir", str(release.state), "--json")
    lines = json.loads(text)["lines"]
    assert (code, json.loads(text)["version"]) == (EXIT_UNKNOWN, release.expected["version"])
    for line, expected in release.expected["account"].items():
        account = lines[line]["last"]["account"]
        counts = {
            name: count for name, count in expected.items() if type(count) is int and name not in ("behind", "hidden")
        }
        assert {name: account[name] for name in counts} == counts
    _, text, _ = ran(capsys, "status", str(release.directory / "bridge.toml"))
    account = release.expected["account"]["telemetry"]
    assert f"received {account['received']} = in Kafka {account['in_kafka']} + dead-lettered 2" in " ".join(
        text.split()
    )
    assert "paused by" in text


def test_the_state_of_a_bridge_is_read(release: Release, bridge: Bridge) -> None:
    status = collect_bridge_status(bridge)
    assert (status["bridge"], status["running"], status["left"]) == (bridge.name, False, [])
    paused = read_pause(release.line("telemetry"))
    assert paused is not None
    assert paused["at"] > 1.7e9
    state = BridgeState(bridge.name, release.state, {"telemetry": "up", "commands": "down"})
    assert state.lines["telemetry"].previous_status["journal"] == release.expected["telemetry"]["journal"]


def test_history_and_findings_are_read(release: Release) -> None:
    shown = line_history(History(release.state), "telemetry", 0.0)
    columns = shown["columns"]
    assert len(columns["t"]) > 1
    assert all(former <= later for former, later in pairwise(columns["t"]))
    assert release.expected["account"]["telemetry"]["waiting"] in columns["waiting"]
    assert {band["part"] for band in shown["faults"]} == {"broker"}
    report = release.json("state/doctor.json")
    assert report["at"] > 1_700_000_000
    assert {"code", "line", "promise", "verdict"} <= set(report["findings"][0]), "what the page compares"


@pytest.mark.parametrize("state", ["online", "offline"])
@pytest.mark.parametrize(("line", "direction"), [("telemetry", "up"), ("commands", "down")])
def test_a_status_of_its_gateways_is_understood(release: Release, line: str, direction: str, state: str) -> None:
    """As a gateway of 0.2.0 answers over Flight."""
    status = release.json("status.json")[state][line]
    facts = GatewayFacts("b", line, line, direction, status)
    samples = {sample.name for sample in gateway_samples(facts, 0.0)}
    assert {"towline_gateway_up", "towline_fdatasync_seconds", "towline_journal_size_bytes"} <= samples
    assert len(samples) > 15
    assert [problem["what"] for problem in readiness_problems(facts)] == ["no session with the broker"] * (
        state == "offline"
    )
    if state == "offline":  # the last one
        view = LineView(line, direction, query="running", directory=release.line(line))
        view.update_status(status, LineNotes.read(release.line(line) / CHECKPOINT))
        assert view.account is not None
        assert view.account.counts == {name: release.expected["account"][line][name] for name in view.account.counts}
        assert view.account.adds_up


# -- in Kafka --


def test_markers_are_read(release: Release) -> None:
    """The batch of the last one is in Kafka and is skipped, the next one is written [I9]."""
    for line in ("telemetry", "commands"):
        sink, logs = release.expected["sinks"][line], checkpoint(release, line)
        stored = release.records[f"towline.{sink}.markers"]
        markers = [Marker.from_json(record.value or b"") for record in stored]
        assert [marker.to_json() for marker in markers] == [record.value for record in stored]
        assert {record.key for record in stored} == {f"{sink}/0".encode()}
        last = markers[-1]
        assert last.totals[1] == release.expected["account"][line]["dead_lettered"]
        hashes = {last.batch: logs.offsets_hash(last.batch) or ""}
        for batch, verdict in (
            (last.batch - 1, MarkerVerdict.MARKER_AHEAD),
            (last.batch, MarkerVerdict.ALREADY_WRITTEN),
            (last.batch + 1, MarkerVerdict.WRITE),
            (last.batch + 2, MarkerVerdict.MARKER_BEHIND),
        ):
            assert compare_marker(last, Task(0, batch=batch, query=logs.query_id), 1, hashes) is verdict
        assert compare_marker(last, Task(0, batch=last.batch, query="another"), 1, {}) is MarkerVerdict.OTHER_QUERY


def test_dead_letters_are_read_and_replayed_ones_left_out(
    release: Release, bridge: Bridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that came in parts, too. `test_release_0_2_0` of the integration tests has them in a Kafka."""
    (topic,) = deadletters.dead_letter_topics(bridge)
    stored = release.records[topic.topic]
    monkeypatch.setattr(topic, "read_records", lambda *_: (deadletters.TopicRecord(*record) for record in stored))
    monkeypatch.setattr(topic, "end_offsets", lambda *_: {0: stored[-1].offset + 1})
    topic._read_marks({0: stored[-1].offset + 1})
    letters = [*topic._read_letters()]
    facts = [letter_facts(letter, replayed=topic._is_replayed(letter)) for letter in letters]
    assert facts == release.expected["dead_letters"]
    assert len(stored) > len(letters) + 1, "parts, and a mark"
    assert topic.unreadable_records == 0
    assert [line and line.name for line in map(topic.line_of, (letter.dead_letter for letter in letters))] == [
        "telemetry",
        "telemetry",
        "commands",
    ]
    large = letters[0].dead_letter
    row = deadletters.source_row(large)
    assert row is not None
    assert (row["topic"], row["qos"], row["payload"]) == ("telemetry/d0/t", 2, b"90 " * 3_000)


# -- receipts --


def test_a_publisher_goes_on(release: Release) -> None:
    """What has no receipt is kept, and the next message has the next number."""
    expected = release.expected["publisher"]
    key, place = release.directory / "line.key", release.directory / "publisher"
    publisher = Publisher("mqtt://127.0.0.1:1", state_dir=place, receipts=True, receipt_key_file=key)
    try:
        status = publisher.status()
        assert (publisher.journal_id, status["accepted"]) == (expected["journal"], expected["end"])
        assert status["queued"] + status["in_flight"] == 3
        receipts = status["receipts"]
        assert (receipts["epoch"], receipts["watermark"], receipts["awaiting"]) == (1, 5, 7)
        assert publisher.publish("telemetry/p/t", b"next").on_disk.result(10) == expected["end"]
    finally:
        assert publisher.close(0) == 8


def test_marks_and_receipts_are_understood(release: Release) -> None:
    """The gateway has the marks of what the publisher sent, and the publisher its receipt."""
    keys = ReceiptKeys.read_file(release.directory / "line.key")
    with (
        Journal.open(release.line("telemetry") / "inbox", schema=ROW_SCHEMA, limits=ROOMY) as inbox,
        outbox_of(release.directory / "publisher") as outbox,
    ):
        ledger, pending = ReceiptLedger(inbox.notes, inbox.end, keys=keys), PendingReceipts(outbox, 30, keys)
        verdicts, now = [], Timestamp(release.expected["telemetry"]["rows"][-1]["received_at"])
        for number in range(outbox.end):
            (row,) = outbox.read(number, number + 1) if number >= outbox.first_offset else (None,)
            content = Content("t", b"") if row is None else Content("telemetry/p/t", row["payload"][0].as_py())
            mark = parse_mark(pending.mark_properties(number, content))
            assert mark is not None
            verdicts.append(ledger.record_mark(mark, now))
        assert verdicts == [MarkVerdict.REPEAT] * 9 + [MarkVerdict.NEW] * 3
        receipt = release.json("receipt.json")
        assert receipt["topic"] == f"towline/receipts/{outbox.journal_id}"
        payload = base64.b64decode(receipt["payload"])
        told = pending.verify(payload)
        assert told is not None
        assert (told.epoch, told.watermark, told.encode(keys)) == (1, 5, payload)
        assert pending.apply_receipt(told, 0.0) == []
        assert pending.pending_count == 7


def test_records_have_the_headers_that_consumers_know(release: Release) -> None:
    records = release.records["release-0-2-0.telemetry"]
    (full,) = [record for record in records if record.value == b"8"]
    received_at = dict(full.headers)["mqtt.received-at"]
    assert (full.key, received_at is not None and received_at.isdigit()) == (b"d2", True)
    assert full.headers == [
        ("mqtt.topic", b"telemetry/d2/t"),
        ("mqtt.qos", b"2"),
        ("mqtt.content-type", "text/plain; charset=ü".encode()),
        ("mqtt.response-topic", b"answers/d1"),
        ("mqtt.correlation-data", b"\x00\xff\x01"),
        ("mqtt.message-expiry", b"4294967295"),
        ("mqtt.payload-format", b"1"),
        ("mqtt.received-at", received_at),
        ("mqtt.user.a", b"1"),
        ("mqtt.user.a", b""),
        ("mqtt.user.", "🚀".encode()),
        ("device", b"d2"),
    ]
