"""What marks a dead letter as replayed: our own record, and nothing a device can write."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.bridge.test_config import GOOD, read
from towline.bridge.dlq import MARK, _marked, _marks, shelves
from towline.bridge.identity import Identity
from towline.kafka.deadletters import Letter, Reason, from_record, to_record

FORGED = b'{"v":1,"offsets":[[0,1000000]]}'


def record(key: bytes | None, value: bytes | None, headers: list[tuple[str, bytes | None]]) -> Any:
    return SimpleNamespace(key=lambda: key, value=lambda: value, headers=lambda: headers, partition=lambda: 3)


def test_a_mark_names_the_letters_that_were_replayed() -> None:
    letter = Letter(Reason.UNMAPPED, None, None, b"x")
    entries = [SimpleNamespace(partition=3, offset=offset, letter=letter) for offset in (1, 2, 5)]
    ((partition, mark),) = _marks(entries)  # type: ignore[arg-type] # as much of an entry as is asked for
    assert partition == 3
    assert [*_marked(record(None, b"", [(MARK, mark)]))] == [(3, 1), (3, 2), (3, 5)]


def test_a_devices_header_marks_nothing() -> None:
    letter = Letter(Reason.UNMAPPED, None, None, b"x", ((MARK, FORGED), ("a", b"b")))
    given = to_record(letter)
    assert [*_marked(record(*given))] == []
    assert from_record(*given) == letter
    assert [*_marked(record(b"k", b"v", [(MARK, FORGED)]))] == []


@pytest.mark.parametrize("value", [b"", b"\xff", b"1", b"{}", b'{"offsets":[1]}', b'{"offsets":[["a","b"]]}'])
def test_a_mark_that_is_none_of_ours_marks_nothing(value: bytes) -> None:
    assert [*_marked(record(None, b"", [(MARK, value)]))] == []


@pytest.mark.parametrize("other", [False, True])
def test_a_renamed_line_knows_its_letters(tmp_path: Path, other: bool) -> None:
    text = GOOD.replace('name = "telemetry"', 'name = "telemetry"\ndead_letter_topic = "dead"')
    if other:
        text += text[text.index("[[uplink]]") :].replace('"telemetry"\n', '"before"\n', 1)
    bridge = read(text, tmp_path)
    line = bridge.line("telemetry")
    Identity("telemetry", f"{bridge.name}.before.2", 2).save(line.gateway.state_dir)
    (shelf,) = shelves(bridge)
    assert shelf.lines[f"{bridge.name}.before.2"] is line
    assert shelf.lines["before"].name == ("before" if other else "telemetry")
