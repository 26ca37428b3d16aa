"""`towline dlq` before it meets Kafka."""

from __future__ import annotations

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
from towline.kafka.deadletters import DeadLetter, Reason, to_records


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


def test_what_is_no_whole_letter_is_counted_and_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of three pieces, one whose first is missing, and a record of somebody else's."""
    letter = DeadLetter(Reason.TOO_LARGE, "t", b"k", b"x" * 9000)
    file = tmp_path / "bridge.toml"
    file.write_text(GOOD.replace("[[uplink]]", '[[uplink]]\ndead_letter_topic = "dlq"', 1))
    whole, other = (to_records(letter, 4096) for _ in range(2))
    assert len(whole) >= 2
    records = [*whole, *whole[:1], other[1], (b"k", b"v", ())]

    def read(*_: Any, **__: Any) -> Iterator[deadletters._TopicRecord]:
        return (deadletters._TopicRecord(0, at, 0, *one) for at, one in enumerate(records))

    monkeypatch.setattr(KafkaAdmin, "topic_ids", lambda *_: {})
    monkeypatch.setattr(deadletters.DeadLetterTopic, "_read_records", read)
    monkeypatch.setattr(deadletters.DeadLetterTopic, "_end_offsets", lambda *_: {0: len(records)})
    monkeypatch.setattr(deadletters.DeadLetterTopic, "_read_marks", lambda *_: None)
    code, out, _ = ran(capsys, "dlq", "show", str(file))
    assert code == 0
    assert "3  records that are no letter, or pieces of one that is not whole   in dlq" in out
