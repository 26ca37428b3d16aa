"""Large messages through a whole bridge while Kafka is away; the recorded runs are this, in full size."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from towline_prove.large import LargePlan, run_large

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = [pytest.mark.broker, pytest.mark.kafka, pytest.mark.spark, pytest.mark.long, pytest.mark.timeout(1200)]


@pytest.mark.parametrize("guarantee", ["at_least_once", "exactly_once"])
@pytest.mark.parametrize(("messages", "size", "away"), [(8_000, 300_000, 60.0), (6, 60_000_000, 5.0)])
def test_a_backlog_of_large_messages_goes_through(
    tmp_path: Path,
    guarantee: str,
    messages: int,
    size: int,
    away: float,
    record_property: Callable[[str, object], None],
) -> None:
    run = run_large(LargePlan(messages=messages, size=size, guarantee=guarantee, away=away), tmp_path)
    for name, value in run.as_json().items():
        record_property(name, value)
    assert run.ok, run.as_json()
