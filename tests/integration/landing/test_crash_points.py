"""A gateway's journal in Kafka, killed at every step of its transactions: lost 0, doubled 0."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.engines.crashing import WORK, Model, received, reopened, run_killed
from towline.journal import Journal
from towline.landing.place import LandingPlace
from towline_prove.devstack import Kafka

pytestmark = [pytest.mark.faults, pytest.mark.timeout(240)]

#: Begin, each record, commit before and after it is sent and after its answer, for each of five transactions.
LEAST_POINTS = 30
TOGETHER = 8


def after(steps: int) -> Model:
    """What has to be there after so many steps: the work itself, on nothing."""

    class Nowhere:
        def __getattr__(self, _name: str) -> object:
            return lambda *_args, **_more: None

    model = Model()
    for step in WORK[:steps]:
        step(Nowhere(), model)  # type: ignore[arg-type] # the model follows the same steps
    return model


def test_no_point_loses_or_doubles_anything(
    kafka: Kafka, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """What had returned is there; of what had not, all or nothing; and the work goes on from there."""
    points: list[Point] = []
    with ThreadPoolExecutor(TOGETHER) as pool:  # a killed transaction takes its successor half a second of waiting
        while not points or all(point.killed for point in points):
            first = len(points) + 1
            points += pool.map(lambda at: _point(kafka, tmp_path, at), range(first, first + TOGETHER))
    killed = [point for point in points if point.killed]
    record_property("points", len(killed))
    bad = [point.problem for point in points if point.problem]
    assert not bad, "\n".join(bad)
    assert len(killed) >= LEAST_POINTS
    unsaid = sum(point.unsaid for point in killed)
    assert unsaid >= len(WORK), "no commit was found that nobody had heard of: this proves too little"


class Point(NamedTuple):
    """One crash point."""

    killed: bool
    #: a step was found done whose call had not returned
    unsaid: bool = False
    problem: str = ""


def _point(kafka: Kafka, directory: Path, at: int) -> Point:
    place = LandingPlace(kafka.client, f"crash-{at}")
    steps, killed = run_killed(place, at, directory / f"done-{at}")
    if not killed:
        return Point(killed=False, problem="" if steps == len(WORK) else "it did not do its work")
    with reopened(place) as journal:
        unsaid = not after(steps).agrees(journal)
        if unsaid and (steps == len(WORK) or not after(steps + 1).agrees(journal)):
            return Point(True, unsaid, f"killed at call {at}, {steps} steps had returned: ends at {journal.end}")
        steps += unsaid
        return Point(True, unsaid, _goes_on(journal, after(steps), WORK[steps:], at))


def _goes_on(journal: Journal, model: Model, rest: tuple[Callable[[Journal, Model], None], ...], at: int) -> str:
    for step in rest:
        step(journal, model)
    journal.append(received(model.end, 1))
    model.end += 1
    return "" if model.agrees(journal) else f"killed at call {at}: what came after does not agree"
