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
from towline.gateway.identity import record_client_session, record_session_end
from towline.journal import Batch, Journal, Limits, Outbox
from towline.journal.outbox import count_waiting_rows
from towline.schema import OUTBOX_SCHEMA, ROW_SCHEMA

HEAD, UPLINK = GOOD.split("[[uplink]]", 1)
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
    with pytest.raises(ConfigError, match="TL-C75"):
        dead_letter_topics(bridge(tmp_path, "a"))
    record_lines(bridge(tmp_path, "a", "b", dead='"old"'))
    changed = bridge(tmp_path, "a", "b", dead=now)
    one_stays = bridge(tmp_path, "a", "b", dead='"old"').lines[1]
    for file in (changed, changed.model_copy(update={"lines": (changed.lines[0], one_stays)})):
        record_lines(file)
        found = {shelf.topic: shelf for shelf in dead_letter_topics(file)}
        assert found.keys() == ({"new", "old"} if "new" in now else {"old"})
        names = {name: line.name for name, line in found["old"].lines.items()}
        assert names.items() >= {"plant-7.a": "a", "plant-7.b": "b"}.items()
    letters = {one.name for one in topic_uses(changed, {"telemetry", "old"}) if one.role is TopicRole.DEAD_LETTERS}
    assert letters == ({"new", "old"} if "new" in now else {"old"})
    assert "old" not in {one.name for one in topic_uses(changed, {"telemetry"})}, "deleted since"


def test_a_line_is_remembered_as_it_was_started_last_wherever_the_state_is_now(tmp_path: Path) -> None:
    before = bridge(tmp_path, "a", "b")
    record_lines(before)
    assert (tmp_path / "state" / "a" / LINE_FILE).stat().st_mode & 0o777 == 0o600
    now = bridge(tmp_path, "b")
    assert current_or_former_line(now, "a") == before.line("a")
    assert current_or_former_line(now, "b") == now.line("b")
    place = (tmp_path / "state").rename(tmp_path / "moved")
    now = now.model_copy(update={"state_dir": place})
    moved = current_or_former_line(now, "a")
    assert (moved.gateway.state_dir, moved.checkpoint) == (place / "a", place / "a" / "checkpoint")
    (place / "a").rename(place / "c")
    for name, error in (
        ("c", "moved/c: what this line was is not recorded here.*TL-B38"),
        ("a", "TL-C73"),
        ("../moved", "TL-B38"),
    ):
        with pytest.raises(ConfigError, match=error):
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
    probe = MachineProbe(Inputs(changed))
    (row,) = [one for one in _check_state_directories(probe) if one.remedy.startswith("Deliver")]
    assert (row.verdict, row.evidence, row.remedy) == (Verdict.WARNS, caught.value.problem, caught.value.remedy)
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
    place, before, after = tmp_path / "state" / "a", bridge(tmp_path, "a"), bridge(tmp_path, "b")
    received(place / "members" / "g1", 2, 1)
    received(place / "members" / "g2", 3, 0)
    assign_identities(before)
    assert [left.waiting_messages for left in removed_lines(after)] == [4]
    record_client_session(place / "members" / "g1", "plant-7-a-g1", "mqtt://h:1883")
    with pytest.raises(ConfigError, match=r'the session "plant-7-a-g1" of a former client id is not ended.*TL-B38'):
        retire(before, "a", PlainScreen(sys.stderr))
    (segment,) = (place / "members" / "g1" / "inbox").glob("*.seg")
    os.truncate(segment, 10)
    with pytest.raises(ConfigError, match=r"and an unknown number of messages wait in .*TL-B37"):
        list(removed_line_notes(after))


def test_gateways_elsewhere_are_named_with_what_is_not_known(tmp_path: Path) -> None:
    """Nothing of it is here to be refused for; giving it up here ends the naming."""
    before, after = bridge(tmp_path, "a", "b"), bridge(tmp_path, "b")
    reads = before.lines[0].model_copy(update={"gateways": ("grpc+tls://h1:1",)})
    before = before.model_copy(update={"lines": (reads, before.lines[1])})
    assign_identities(before)
    record_lines(before)
    (text,) = removed_line_notes(after)
    assert "what its gateways grpc+tls://h1:1 hold is unknown here. Deliver them" in text
    with pytest.raises(ConfigError, match=r"its gateways are on other machines.*drain each.*TL-B38"):
        retire(after, "a", PlainScreen(sys.stderr))
    assert "is retired: nothing waits" in retire(after, "a", PlainScreen(sys.stderr), discard=True)
    assert removed_lines(after) == []


def test_status_and_its_exit_code_name_what_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = bridge(tmp_path, "a", "b", dead='"old"')
    record_lines(before)
    assign_identities(before)
    received(tmp_path / "state" / "a", 1, 0)
    record_client_session(tmp_path / "state" / "a", "plant-7-a", "mqtt://h:1883")
    file = str(bridge(tmp_path, "b").file)
    code, out, _ = ran(capsys, "status", file, "--json")
    found = json.loads(out)
    (left,) = found["left"]
    assert (left["line"], left["waiting"], left["sessions"], left["elsewhere"]) == ("a", 1, ["plant-7-a"], [])
    assert (code, found["former_dead_letter_topics"]) == (3, ["old"])
    _, out, _ = ran(capsys, "status", file)
    assert f"  ! {left['text']}\n" in out
    assert 'dead letters of former files may wait in "old": towline dlq show counts them\n' in out
