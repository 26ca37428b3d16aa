"""`towline dlq` before it meets Kafka."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.bridge.test_config import GOOD
from tests.unit.cli.test_main import ran
from towline.bridge import deadletters
from towline.kafka.admin import KafkaAdmin
from towline.kafka.deadletters import DeadLetter, Reason, Record, to_records


def test_a_reason_is_one_that_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = ran(capsys, "dlq", "show", "--reason", "too_larg")
    assert (code, "'too_large'" in err) == (2, True)


def fake_topic(name: str, **methods: Any) -> SimpleNamespace:
    return SimpleNamespace(topic=name, is_missing=False, unknown_sources=Counter(), unreadable_records=0, **methods)


def test_a_limit_is_for_all_topics_together(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "bridge.toml"
    file.write_text(GOOD)
    topics = [fake_topic(name) for name in ("one", "other", "third")]
    given: list[int] = []

    def replay(*_: object, limit: int, dry_run: bool, **__: object) -> Iterator[deadletters.RemapResult]:
        given.append(limit)
        assert not dry_run
        return iter([("t", None, None, -1, None, None, 0, None), None])

    monkeypatch.setattr(deadletters, "dead_letter_topics", lambda _bridge: topics)
    monkeypatch.setattr(deadletters, "replay", replay)
    code, out, _ = ran(capsys, "dlq", "replay", str(file), "--limit", "5")
    assert (code, given) == (0, [5, 3, 1])
    assert "3  written to t" in out


@pytest.mark.parametrize(
    ("arguments", "names", "limits", "left_out"),
    [
        (["--at", "0/7", "--at", "0/7"], {"one/0/7"}, [1], 0),
        (["--at", "one/0/7", "--at", "0/17", "--at", "0/1"], {"one/0/7", "one/0/17", "one/0/1"}, [3], 1),
        (["--at", "0/7", "--at", "0/17", "--at", "0/1", "--limit", "2"], {"one/0/7", "one/0/17", "one/0/1"}, [2], 1),
        (["--at", ""], {"one/"}, [1], 0),  # a variable of a script that is empty means no letter, and not all
    ],
)
def test_chosen_letters_alone_are_replayed_and_what_was_left_out_is_told(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    names: set[str],
    limits: list[int],
    left_out: int,
) -> None:
    file = tmp_path / "bridge.toml"
    file.write_text(GOOD)
    given: list[tuple[frozenset[str], int]] = []

    def replay(*_: object, names: frozenset[str], limit: int, **__: object) -> Iterator[deadletters.RemapResult]:
        given.append((names, limit))
        return iter([("t", None, None, -1, None, None, 0, None), None][:limit])

    monkeypatch.setattr(deadletters, "dead_letter_topics", lambda _bridge: [fake_topic("one")])
    monkeypatch.setattr(deadletters, "replay", replay)
    code, out, _ = ran(capsys, "dlq", "replay", str(file), *arguments)
    assert (code, given) == (0, [(frozenset(names), limit) for limit in limits])
    assert (f"{left_out}  of --at left out: replayed before, not there" in out) is (left_out > 0)


def letters_in_kafka(directory: Path, monkeypatch: pytest.MonkeyPatch, records: list[Record]) -> Path:
    """A bridge file, and the records that are in the one partition of each of its dead-letter topics."""
    file = directory / "bridge.toml"
    file.write_text(GOOD.replace("[[uplink]]", '[[uplink]]\ndead_letter_topic = "dlq"', 1))

    def read(*_: Any, **__: Any) -> Iterator[deadletters.TopicRecord]:
        return (deadletters.TopicRecord(0, at, 0, *one) for at, one in enumerate(records))

    monkeypatch.setattr(KafkaAdmin, "topic_ids", lambda *_: {})
    monkeypatch.setattr(deadletters.DeadLetterTopic, "read_records", read)
    monkeypatch.setattr(deadletters.DeadLetterTopic, "end_offsets", lambda *_: {0: len(records)})
    monkeypatch.setattr(deadletters.DeadLetterTopic, "_read_marks", lambda *_: None)
    return file


def test_one_letter_is_shown_whole(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One in pieces by the offset of its last; what a device wrote acts on no terminal."""
    headers = (("mqtt.topic", b"t/\x1b[2J"), ("raw", b"\xff"))
    value = b'{"v": [1, 2], "text": "' + b"x" * 9000 + b'"}'
    letter = DeadLetter(Reason.TOO_LARGE, "t", b"\xff", value, headers, detail="9 kB", source="telemetry")
    records = [*to_records(letter, 4096), *to_records(DeadLetter(Reason.UNROUTED, None, None, None), 4096)]
    last = len(records) - 2
    file = letters_in_kafka(tmp_path, monkeypatch, records)
    assert f"dlq/0/{last}  too_large" in ran(capsys, "dlq", "show", str(file))[1]
    code, out, _ = ran(capsys, "dlq", "show", str(file), "--at", f"0/{last}", "--json")
    shown = json.loads(out)
    assert (code, shown["line"], shown["reason"], shown["detail"]) == (0, "telemetry", "too_large", "9 kB")
    assert shown["headers"] == [["mqtt.topic", "t/\x1b[2J", "dC8bWzJK"], ["raw", None, "/w=="]]
    assert (shown["payload"]["text"], shown["payload"]["is_json"]) == (value.decode(), True)
    assert (shown["key"]["text"], shown["key"]["base64"]) == (None, "/w==")
    code, out, _ = ran(capsys, "dlq", "show", str(file), "--at", f"dlq/0/{last}")
    lines = out.splitlines()
    assert code == 0
    assert "headers           mqtt.topic = t/\\x1b[2J" in lines
    assert lines[-8:-2] == [f"payload           {len(value):,} B", "  {", '    "v": [', "      1,", "      2", "    ],"]
    for wrong in (f"0/{last - 1}", f"0/{last + 1}", "other/0/0", "0-0", ""):
        code, out, err = ran(capsys, "dlq", "show", str(file), "--at", wrong)
        assert (code, out, err.count("\n"), err.endswith("[TL-C76]\n")) == (2, "", 1, True)


def test_what_is_no_whole_letter_is_counted_and_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of three pieces, one whose first is missing, and a record of somebody else's."""
    letter = DeadLetter(Reason.TOO_LARGE, "t", b"k", b"x" * 9000)
    whole, other = (to_records(letter, 4096) for _ in range(2))
    assert len(whole) >= 2
    file = letters_in_kafka(tmp_path, monkeypatch, [*whole, *whole[:1], other[1], (b"k", b"v", [])])
    code, out, _ = ran(capsys, "dlq", "show", str(file))
    assert code == 0
    assert "3  records that are no letter, or pieces of one that is not whole   in dlq" in out
