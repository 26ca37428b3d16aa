"""An outbox that is not the one a query knows is recognised, before anything of it is sent or taken."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from towline.delivery.outrows import rows_from_messages
from towline.errors import GatewayError, ReaderFenced
from towline.gateway.identity import OUTBOX_FILE, Extent, JournalOffset, check_offset, check_outbox, journal_extent
from towline.journal import Batch, Limits, Outbox
from towline.schema import MESSAGE_SCHEMA

ROOMY = Limits(min_free_bytes=0)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "ck").mkdir()
    yield str(tmp_path / "ck")
    assert not list((tmp_path / "ck").glob(".*")), "no scratch file stays"


def opened(directory: Path) -> Outbox:
    return Outbox.open(directory, schema=MESSAGE_SCHEMA, limits=ROOMY)


def bring(outbox: Outbox, number: int, writer: str = "q/0") -> JournalOffset:
    outbox.append_batch(rows_from_messages([{"topic": "t", "payload": b"%d" % number}]), Batch(writer, number))
    here = journal_extent(outbox)
    return JournalOffset(here.journal, here.end_offset, here.incarnation)


def copied(tmp_path: Path) -> Path:
    return Path(shutil.copytree(tmp_path / "o", tmp_path / "copy"))


def restore(tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "o")
    (tmp_path / "copy").rename(tmp_path / "o")


def test_the_same_outbox_goes_on(tmp_path: Path, checkpoint: str) -> None:
    assert JournalOffset.read_outbox_note(checkpoint) is None
    outbox = opened(tmp_path / "o")
    check_outbox("g", outbox, checkpoint)
    bring(outbox, 0).write_outbox_note(checkpoint)
    outbox.close()
    outbox = opened(tmp_path / "o")
    check_outbox("g", outbox, checkpoint)
    bring(outbox, 1)  # Spark was killed before it committed this one
    outbox.close()
    outbox = opened(tmp_path / "o")
    check_outbox("g", outbox, checkpoint)
    outbox.close()


def test_an_older_copy_is_refused(tmp_path: Path, checkpoint: str) -> None:
    outbox = opened(tmp_path / "o")
    bring(outbox, 0)
    outbox.close()
    copied(tmp_path)
    outbox = opened(tmp_path / "o")
    bring(outbox, 1).write_outbox_note(checkpoint)
    outbox.close()
    restore(tmp_path)
    outbox = opened(tmp_path / "o")
    with pytest.raises(GatewayError, match=r"offset 2, the outbox ends at 1: an older copy.*reset.*TL-G35"):
        check_outbox("g", outbox, checkpoint)
    bring(outbox, 0, "other/0")  # another query goes on with it
    with pytest.raises(GatewayError, match=r"an older copy that was written to since.*TL-G35"):
        check_outbox("g", outbox, checkpoint)
    outbox.close()


def test_another_outbox_is_refused(tmp_path: Path, checkpoint: str) -> None:
    outbox = opened(tmp_path / "o")
    bring(outbox, 0).write_outbox_note(checkpoint)
    outbox.close()
    shutil.rmtree(tmp_path / "o")
    outbox = opened(tmp_path / "o")
    with pytest.raises(ReaderFenced, match="TL-G36"):
        check_outbox("g", outbox, checkpoint)
    outbox.close()


def test_rows_whose_origin_is_not_known_any_more_are_not_compared() -> None:
    known = JournalOffset("j", 5, "aa")
    check_offset("g", known, Extent("j", 6, 9, ""), kind="outbox")
    with pytest.raises(GatewayError, match="TL-G35"):
        check_offset("g", known, Extent("j", 4, 9, ""), kind="outbox")


@pytest.mark.parametrize("text", ["", "[]", '{"journal": "j"}', '{"journal": "j", "offset": "x", "incarnation": ""}'])
def test_a_file_that_is_none_of_ours_is_refused(checkpoint: str, text: str) -> None:
    (Path(checkpoint) / OUTBOX_FILE).write_text(text)
    with pytest.raises(GatewayError, match="TL-G37"):
        JournalOffset.read_outbox_note(checkpoint)


def test_a_checkpoint_elsewhere_keeps_nothing() -> None:
    JournalOffset("j", 5, "aa").write_outbox_note("hdfs://name/ck")
    JournalOffset("j", 5, "aa").write_outbox_note("")
    assert JournalOffset.read_outbox_note("hdfs://name/ck") is None
