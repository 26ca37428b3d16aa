"""``towline kafka marker`` without a Kafka: its table, and what a reset would mean."""

from __future__ import annotations

import pytest

from tests.unit.cli.test_main import ran
from towline.cli.kafka import _print
from towline.errors import KafkaError
from towline.kafka.markers import Marker
from towline.kafka.markerstore import MarkerStore


def test_a_reset_says_what_it_means(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--kafka", "127.0.0.1:1", "--sink", "s", "--parallelism", "2", "--to-batch", "41")
    code, out, _ = ran(capsys, "kafka", "marker", "reset", *options)
    said = ("make batch 41 the last one written of sink s (2 partitions)", "are doubled", "are lost", "add --yes")
    assert (code, [text for text in said if text not in out]) == (1, [])


def test_a_table_of_markers(capsys: pytest.CaptureFixture[str]) -> None:
    _print("m", {0: Marker(41, 2, 1000, writer="q", total_rows=12345), 1: Marker(41, 2)}, as_json=False)
    topic, head, first, second = capsys.readouterr().out.splitlines()
    assert topic == "m"
    assert head.split()[:3] == ["partition", "of", "batch"]
    assert first.split() == ["0", "2", "41", "1,000", "0", "12,345", "q"]
    assert second.endswith("any (set by hand)")


def test_a_reset_of_so_many_partitions_reads_no_damaged_marker(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the way out of TL-K22: only what the sink wrote last has to be read from its markers."""

    def read_markers(_store: MarkerStore) -> dict[int, Marker | None]:
        raise KafkaError("TL-K22", "k", 'the marker "s/1" can\'t be decoded')

    def reset_markers(_store: MarkerStore, batch: int) -> dict[int, Marker]:
        reset.append(batch)
        return {}

    reset: list[int] = []
    monkeypatch.setattr(MarkerStore, "read_markers", read_markers)
    monkeypatch.setattr(MarkerStore, "reset", reset_markers)
    command = "kafka", "marker", "reset", "--kafka", "127.0.0.1:1", "--sink", "s", "--to-batch", "3", "--yes"
    code, _, err = ran(capsys, *command, "--parallelism", "2")
    assert (code, err, reset) == (0, "", [3])
    code, _, err = ran(capsys, *command)
    assert (code, reset) == (1, [3])
    assert err.endswith("[TL-K22]\n")
