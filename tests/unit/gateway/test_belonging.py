"""Which checkpoints belong to a journal, and which are told apart before it takes anything in [I14]."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.gateway.serving import rows
from towline.errors import TowlineError
from towline.gateway.identity import INBOX_MISMATCH_CODES, check_checkpoint
from towline.gateway.settings import GatewaySettings
from towline.journal import Journal, Limits
from towline.schema import ROW_SCHEMA
from towline.spark.offsets import JournalPosition, SourceOffset

LIMITS = Limits(min_free_bytes=0, segment_bytes=8192)


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    """100 rows, the first of which are gone."""
    with Journal.open(tmp_path / "inbox", schema=ROW_SCHEMA, limits=LIMITS) as journal:
        for start in range(0, 100, 10):
            journal.append(rows(start, 10))
        journal.commit("spark", 60)
        assert 0 < journal.first_offset <= 60
        yield journal


def plan(place: Path, batch: int, *sources: Any) -> None:
    """An entry of the offset log, as Spark writes it."""
    (place / "offsets").mkdir(parents=True, exist_ok=True)
    (place / "metadata").write_text('{"id":"q"}')
    lines = [source if isinstance(source, str) else json.dumps(source) for source in sources]
    (place / "offsets" / str(batch)).write_text("\n".join(["v1", '{"batchWatermarkMs":0}', *lines]))


def at(journal: Journal, offset: int, *, name: str = "plant", of: str = "", incarnation: str | None = None) -> Any:
    known = journal.incarnation if incarnation is None else incarnation
    return SourceOffset((JournalPosition(name, of or journal.journal_id, offset, known),)).to_json()


def verdict(journal: Journal, place: Path | str) -> str:
    try:
        check_checkpoint("plant", journal, str(place))
    except TowlineError as error:
        return (
            error.code
            if error.code in INBOX_MISMATCH_CODES and "new checkpoint directory" in error.remedy
            else str(error)
        )
    return ""


def test_one_offset(journal: Journal, tmp_path: Path) -> None:
    for number, (place, code) in enumerate(
        [
            (at(journal, 100), ""),
            (at(journal, 70), ""),
            (at(journal, 101), "TL-G06"),
            (at(journal, 100, incarnation="0badf00d"), "TL-G26"),
            (at(journal, journal.first_offset, incarnation="0badf00d"), "TL-G26"),
            (at(journal, journal.first_offset - 1, incarnation="0badf00d"), ""),  # committed, and the reader's business
            (at(journal, 100, incarnation=""), ""),  # nothing to compare
            (at(journal, 101, incarnation=""), "TL-G06"),
            (at(journal, 5, of="other"), "TL-G04"),
            (at(journal, 100, name="renamed"), ""),
            (at(journal, 5, name="renamed", of="other"), "TL-G04"),
        ]
    ):
        plan(tmp_path / "ck", number, place)
        assert verdict(journal, tmp_path / "ck") == code, (number, place)


def test_only_this_gateway_counts_among_several_sources(journal: Journal, tmp_path: Path) -> None:
    kafka, elsewhere = {"orders": {"0": 17}}, at(journal, 7, name="elsewhere", of="other")
    for number, (sources, code) in enumerate(
        [
            ((kafka, "-", at(journal, 100), elsewhere), ""),
            ((kafka, at(journal, 101), elsewhere), "TL-G06"),
            ((at(journal, 7, of="other"), elsewhere), "TL-G04"),
            ((elsewhere, elsewhere), ""),
            ((kafka,), ""),
        ]
    ):
        plan(tmp_path / "ck", number, *sources)
        assert verdict(journal, f"file:{tmp_path}/ck") == code, number


def test_without_a_readable_checkpoint_there_is_nothing_to_compare(journal: Journal, tmp_path: Path) -> None:
    (tmp_path / "empty" / "offsets").mkdir(parents=True)
    for place in ("", tmp_path / "nowhere", tmp_path / "empty", "s3a://bucket/ck", "hdfs://node/ck"):
        assert verdict(journal, place) == ""


def test_a_torn_entry_is_a_batch_that_never_ran(journal: Journal, tmp_path: Path) -> None:
    plan(tmp_path / "ck", 9, at(journal, 101))
    plan(tmp_path / "ck", 10, at(journal, 100))
    (tmp_path / "ck" / "offsets" / "10").write_bytes(b"")
    assert verdict(journal, tmp_path / "ck") == "TL-G06"


def test_a_link_to_the_checkpoint_is_followed(journal: Journal, tmp_path: Path) -> None:
    plan(tmp_path / "elsewhere", 0, at(journal, 101))
    (tmp_path / "ck").symlink_to(tmp_path / "elsewhere")
    assert verdict(journal, tmp_path / "ck") == "TL-G06"


def test_queries_with_different_checkpoints_share_a_gateway(tmp_path: Path) -> None:
    one = GatewaySettings.model_validate(
        {"name": "plant", "state_dir": tmp_path, "brokers": "mqtt://localhost", "subscriptions": [{"pattern": "#"}]}
    )
    assert one.model_copy(update={"checkpoint": "/ck"}).digest() == one.digest()
    assert one.model_copy(update={"client_id": "x"}).digest() != one.digest()
