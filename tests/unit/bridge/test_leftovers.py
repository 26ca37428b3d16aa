"""What a changed file leaves behind: named, with the way, whatever the file says now."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from tests.unit.bridge.test_config import GOOD, read
from tests.unit.cli.test_main import ran
from towline.bridge.config.model import CONSUMER, Bridge
from towline.bridge.deadletters import dead_letter_topics
from towline.bridge.lines.identity import (
    LINE_FILE,
    assign_identities,
    current_or_former_line,
    record_lines,
    removed_line_notes,
    removed_lines,
)
from towline.bridge.runtime.retiring import retire
from towline.bridge.runtime.screen import PlainScreen
from towline.doctor.cluster import TopicRole, topic_uses
from towline.doctor.inputs import Inputs
from towline.doctor.machine import MachineProbe, _check_state_directories
from towline.doctor.table import Verdict
from towline.errors import ConfigError
from towline.gateway.identity import MEMBERS_DIR, record_client_session, record_session_end
from towline.journal import Batch, Journal, Limits, Outbox
from towline.journal.outbox import count_waiting_rows
from towline.schema import OUTBOX_SCHEMA, ROW_SCHEMA

HEAD, UPLINK = GOOD.split("[[uplink]]", 1)
DOWN = '[[downlink]]\nname = "commands"\nfrom = "commands"\ntopic = "c/{key}"\n'
LIMITS = Limits(min_free_bytes=0)


def bridge(directory: Path, *lines: str, head: str = HEAD, dead: str = "") -> Bridge:
    """A file with these uplinks."""
    own = f"dead_letter_topic = {dead}\n" if dead else ""
    texts = ["[[uplink]]" + UPLINK.replace('name = "telemetry"\n', f'name = "{line}"\n{own}', 1) for line in lines]
    return read(head + "".join(texts), directory)


def received(directory: Path, rows: int, committed: int) -> None:
    """Rows in the inbox of a gateway, so many of them in Kafka."""
    with Journal.open(directory / "inbox", schema=ROW_SCHEMA, limits=LIMITS) as journal:
        journal.append(_rows(ROW_SCHEMA, rows))
        journal.commit(CONSUMER, committed)


def _rows(schema: pa.Schema, count: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([{}] * count, schema=schema)


@pytest.mark.parametrize("now", ['"new"', "false"])
def test_a_dead_letter_topic_that_the_file_has_no_more_is_asked(tmp_path: Path, now: str) -> None:
    """By dlq show and replay (the shelves), and by doctor; the letters of a line that shared it are its own."""
    record_lines(bridge(tmp_path, "a", "b", dead='"old"'))
    changed = bridge(tmp_path, "a", "b", dead=now)
    record_lines(changed)
    found = {shelf.topic: shelf for shelf in dead_letter_topics(changed)}
    assert list(found) == (["new", "old"] if "new" in now else ["old"])
    assert {name: line.name for name, line in found["old"].lines.items()}.items() >= {
        "plant-7.a": "a",
        "b": "b",
    }.items()
    letters = {one.name for one in topic_uses(changed, {"telemetry", "old"}) if one.role is TopicRole.DEAD_LETTERS}
    assert letters == ({"new", "old"} if "new" in now else {"old"})
    assert "old" not in {one.name for one in topic_uses(changed, {"telemetry"})}, "deleted since"


def test_letters_of_a_line_that_takes_another_topic_while_its_neighbour_stays(tmp_path: Path) -> None:
    record_lines(bridge(tmp_path, "a", "b", dead='"both"'))
    own = bridge(tmp_path, "a", "b", dead='"both"')
    moved = own.model_copy(
        update={"lines": (own.lines[0].model_copy(update={"dead_letter_topic": "mine"}), own.lines[1])}
    )
    both = next(shelf for shelf in dead_letter_topics(moved) if shelf.topic == "both")
    assert both.lines["plant-7.a"].name == "a"


def test_a_bridge_without_any_dead_letter_topic_says_so(tmp_path: Path) -> None:
    one = bridge(tmp_path, "a")
    record_lines(one)
    with pytest.raises(ConfigError, match="TL-C75"):
        dead_letter_topics(one)


def test_a_line_is_remembered_as_it_was_started_last_wherever_the_state_is_now(tmp_path: Path) -> None:
    before = bridge(tmp_path, "a", "b")
    record_lines(before)
    file = tmp_path / "state" / "a" / LINE_FILE
    assert file.stat().st_mode & 0o777 == 0o600
    now = bridge(tmp_path, "b")
    assert current_or_former_line(now, "a") == before.line("a")
    assert current_or_former_line(now, "b") == now.line("b")
    (tmp_path / "state").rename(tmp_path / "moved")
    now = now.model_copy(update={"state_dir": tmp_path / "moved"})
    moved = current_or_former_line(now, "a")
    assert (moved.gateway.state_dir, moved.checkpoint) == (
        tmp_path / "moved" / "a",
        tmp_path / "moved" / "a" / "checkpoint",
    )
    (tmp_path / "moved" / "a").rename(tmp_path / "moved" / "c")
    with pytest.raises(ConfigError, match=r"moved/c: what this line was is not recorded here.*TL-B38"):
        current_or_former_line(now, "c")
    for name, code in (("a", "TL-C73"), ("../moved", "TL-B38"), (".", "TL-B38")):
        with pytest.raises(ConfigError, match=code):
            current_or_former_line(now, name)


def test_a_copy_that_somebody_keeps_beside_its_line_is_none_that_is_gone(tmp_path: Path) -> None:
    """Its messages are those of the line; carried on by themselves they would come twice."""
    one = bridge(tmp_path, "a")
    assign_identities(one)
    received(tmp_path / "state" / "a", 5, 0)
    shutil.copytree(tmp_path / "state" / "a", tmp_path / "state" / "a.bak")
    assert removed_lines(one) == []
    assert [each.directory.name for each in removed_lines(bridge(tmp_path, "b"))] == ["a", "a.bak"]


def test_a_line_that_was_taken_out_is_refused_with_its_count_and_both_ways_out(tmp_path: Path) -> None:
    assign_identities(bridge(tmp_path, "a", "b"))
    received(tmp_path / "state" / "a", 77, 0)
    changed = bridge(tmp_path, "b")
    with pytest.raises(ConfigError) as caught:
        list(removed_line_notes(changed))
    assert str(caught.value).replace(f"{tmp_path}/", "") == (
        'bridge.toml: line "a" was removed from bridge.toml, and 77 acknowledged messages wait in state/a. Deliver '
        "them and remove the line: towline retire bridge.toml a. Or start without them: "
        'leave_waiting = ["a"] at the top of the file.   [TL-B37]'
    )
    (row,) = [
        one for one in _check_state_directories(MachineProbe(Inputs(changed))) if one.remedy.startswith("Deliver")
    ]
    assert (row.verdict, row.evidence, row.remedy) == (Verdict.WARNS, caught.value.problem, caught.value.remedy), (
        "doctor's row"
    )
    left = bridge(tmp_path, "b", head=f'leave_waiting = ["a"]\n{HEAD}')
    (text,) = removed_line_notes(left)
    assert text.replace(f"{tmp_path}/", "").endswith("remove the line: towline retire bridge.toml a.   [TL-B37]")


def test_what_is_carried_on_is_no_matter_but_a_session_that_queues_is_named(tmp_path: Path) -> None:
    assign_identities(bridge(tmp_path, "a", "b"))
    place = tmp_path / "state" / "a"
    received(place, 3, 3)
    changed = bridge(tmp_path, "b")
    assert removed_lines(changed) == []
    record_client_session(place, "plant-7-a", "mqtt://a:1883")
    (text,) = removed_line_notes(changed)
    assert 'and the session "plant-7-a" still queues messages at its broker. Deliver them and remove the line: ' in text
    assert "leave_waiting" not in text
    record_session_end(place, "plant-7-a", "drained")
    assert removed_lines(changed) == []


def test_what_is_to_be_sent_and_what_was_refused_waits_too(tmp_path: Path) -> None:
    """Not what was sent, nor the part of a batch that never became whole: Kafka has that still."""
    read(HEAD + DOWN, tmp_path)
    place = tmp_path / "state" / "commands"
    outbox = Outbox.open(place / "outbox", schema=OUTBOX_SCHEMA, limits=LIMITS)
    outbox.append_batch(_rows(OUTBOX_SCHEMA, 10), Batch("q/0", 0))
    outbox.append_batch(_rows(OUTBOX_SCHEMA, 4), Batch("q/0", 1, attempt="1"), whole=False)
    outbox.mark_done([0, 1, 2, 5])
    outbox.flush()
    assert count_waiting_rows(place / "outbox") == 6, "while it is open"
    outbox.close()
    with Journal.open(place / "refused", schema=OUTBOX_SCHEMA, limits=LIMITS) as refused:
        refused.append(_rows(OUTBOX_SCHEMA, 2))
    (left,) = removed_lines(bridge(tmp_path, "a"))
    assert (left.directory.name, left.waiting_messages) == ("commands", 8)


def test_of_members_each_is_counted_and_what_cant_be_read_is_not_nothing(tmp_path: Path) -> None:
    place = tmp_path / "state" / "a"
    received(place / "members" / "g1", 2, 1)
    received(place / "members" / "g2", 3, 0)
    assign_identities(bridge(tmp_path, "a"))
    (left,) = removed_lines(bridge(tmp_path, "b"))
    assert left.waiting_messages == 4
    (segment,) = (place / "members" / "g1" / "inbox").glob("*.seg")
    os.truncate(segment, 10)
    with pytest.raises(ConfigError, match=r"and an unknown number of messages wait in .*TL-B37"):
        list(removed_line_notes(bridge(tmp_path, "b")))


def test_gateways_elsewhere_are_named_with_what_is_not_known(tmp_path: Path) -> None:
    """Nothing of it is here to be refused for; giving it up here ends the naming."""
    before = bridge(tmp_path, "a", "b")
    reads = before.lines[0].model_copy(update={"gateways": ("grpc+tls://h1:1", "grpc+tls://h2:1")})
    before = before.model_copy(update={"lines": (reads, before.lines[1])})
    assign_identities(before)
    record_lines(before)
    (text,) = removed_line_notes(bridge(tmp_path, "b"))
    assert "what its gateways grpc+tls://h1:1, grpc+tls://h2:1 hold is unknown here. Deliver them" in text
    with pytest.raises(ConfigError, match=r"its gateways are on other machines.*drain each.*TL-B38"):
        retire(bridge(tmp_path, "b"), "a", PlainScreen(sys.stderr))
    assert "is retired: nothing waits" in retire(bridge(tmp_path, "b"), "a", PlainScreen(sys.stderr), discard=True)
    assert removed_lines(bridge(tmp_path, "b")) == []


def test_a_line_is_not_retired_over_the_session_of_a_member_that_was_taken_out(tmp_path: Path) -> None:
    """Its directory goes with the line, and with that the only word of the session [I18]."""
    line = bridge(tmp_path, "a").lines[0]
    member = line.gateway.state_dir / MEMBERS_DIR / "g1"
    member.mkdir(parents=True)
    record_client_session(member, "plant-7-a-g1", "mqtt://h:1883")
    with pytest.raises(ConfigError, match=r'the session "plant-7-a-g1" of a former client id is not ended.*TL-B38'):
        retire(bridge(tmp_path, "a"), "a", PlainScreen(sys.stderr))
    assert member.is_dir()


def test_status_and_its_exit_code_name_what_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record_lines(bridge(tmp_path, "a", "b", dead='"old"'))
    assign_identities(bridge(tmp_path, "a", "b"))
    received(tmp_path / "state" / "a", 1, 0)
    record_client_session(tmp_path / "state" / "a", "plant-7-a", "mqtt://h:1883")
    bridge(tmp_path, "b")
    code, out, _ = ran(capsys, "status", str(tmp_path / "bridge.toml"), "--json")
    found = json.loads(out)
    assert [(one["sessions"], one["elsewhere"]) for one in found["left"]] == [(["plant-7-a"], [])]
    assert (code, found["former_dead_letter_topics"]) == (3, ["old"])
    assert [(one["line"], one["waiting"]) for one in found["left"]] == [("a", 1)]
    _, out, _ = ran(capsys, "status", str(tmp_path / "bridge.toml"))
    assert f"  ! {found['left'][0]['text']}\n" in out
    assert 'dead letters of former files may wait in "old": towline dlq show counts them\n' in out
