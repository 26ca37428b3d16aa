"""An outbox that is not the one a query knows is recognised, before anything of it is sent or taken."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from towline.delivery.outrows import rows_of
from towline.errors import Fenced, GatewayError
from towline.gateway.identity import OUTBOX_FILE, Extent, KnownOffset, check_offset, check_outbox, extent
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


def bring(outbox: Outbox, number: int, writer: str = "q/0") -> KnownOffset:
    outbox.enter(rows_of([{"topic": "t", "payload": b"%d" % number}]), Batch(writer, number))
    here = extent(outbox)
    return KnownOffset(here.journal, here.tip, here.incarnation)


def copied(tmp_path: Path) -> Path:
    return Path(shutil.copytree(tmp_path / "o", tmp_path / "copy"))


def restore(tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "o")
    (tmp_path / "copy").rename(tmp_path / "o")


def test_the_same_outbox_goes_on(tmp_path: Path, checkpoint: str) -> None:
    assert KnownOffset.read(checkpoint) is None
    outbox = opened(tmp_path / "o")
    check_outbox("g", outbox, checkpoint)
    bring(outbox, 0).keep(checkpoint)
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
    bring(outbox, 1).keep(checkpoint)
    outbox.close()
    restore(tmp_path)
    outbox = opened(tmp_path / "o")
    with pytest.raises(GatewayError, match=r"offset 2, the outbox ends at 1: an older copy.*begin-again.*TL-G35"):
        check_outbox("g", outbox, checkpoint)
    bring(outbox, 0, "other/0")  # another query goes on with it
    with pytest.raises(GatewayError, match=r"an older copy that has gone on.*TL-G35"):
        check_outbox("g", outbox, checkpoint)
    outbox.close()


def test_another_outbox_is_refused(tmp_path: Path, checkpoint: str) -> None:
    outbox = opened(tmp_path / "o")
    bring(outbox, 0).keep(checkpoint)
    outbox.close()
    shutil.rmtree(tmp_path / "o")
    outbox = opened(tmp_path / "o")
    with pytest.raises(Fenced, match="TL-G36"):
        check_outbox("g", outbox, checkpoint)
    outbox.close()


def test_rows_whose_origin_is_not_known_any_more_are_not_compared() -> None:
    known = KnownOffset("j", 5, "aa")
    check_offset("g", known, Extent("j", 6, 9, ""), rows="outbox")
    with pytest.raises(GatewayError, match="TL-G35"):
        check_offset("g", known, Extent("j", 4, 9, ""), rows="outbox")


@pytest.mark.parametrize("text", ["", "[]", '{"journal": "j"}', '{"journal": "j", "offset": "x", "incarnation": ""}'])
def test_a_file_that_is_none_of_ours_is_refused(checkpoint: str, text: str) -> None:
    (Path(checkpoint) / OUTBOX_FILE).write_text(text)
    with pytest.raises(GatewayError, match="TL-G37"):
        KnownOffset.read(checkpoint)


def test_a_checkpoint_elsewhere_keeps_nothing() -> None:
    KnownOffset("j", 5, "aa").keep("hdfs://name/ck")
    KnownOffset("j", 5, "aa").keep("")
    assert KnownOffset.read("hdfs://name/ck") is None
