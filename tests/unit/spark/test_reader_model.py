"""What Spark does around a reader of several gateways, with crashes at any step: each row comes once, in its order."""

from __future__ import annotations

import contextlib
import json
import random
import threading
import time
from pathlib import Path

import pytest
from pyspark.sql.streaming.datasource import ReadMaxRows

from tests.helpers import wait_until
from tests.unit.gateway.serving import Served, served
from tests.unit.spark.reading import Place, ends, seen
from towline.errors import GatewayUnreachable
from towline.spark import gateways, link
from towline.spark.link import GatewayAddress, ReadPlan
from towline.spark.reader import MqttStreamReader

NAMES = ("g1", "g2", "g3")
MAX_BYTES, FRAME_BYTES = 40_000, 20_000


class Fleet:
    """Gateways that come and go."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._stacks: dict[str, contextlib.ExitStack] = {}
        self.up: dict[str, Served] = {}
        #: End of each journal.
        self.added = dict.fromkeys(NAMES, 0)

    def start(self, name: str) -> None:
        if name not in self.up:
            stack = self._stacks[name] = contextlib.ExitStack()
            self.up[name] = stack.enter_context(served(self._place / name, name=name))

    def stop(self, name: str) -> None:
        if self.up.pop(name, None):
            self._stacks.pop(name).close()

    def add(self, name: str, count: int) -> None:
        if name in self.up:
            self.added[name] = self.up[name].add(count, payload=b"x" * (count % 300))

    def close(self) -> None:
        for name in NAMES:
            self.stop(name)


class Query:
    """A streaming query: its offset log, its commit log, and a sink that is exactly once by batch number."""

    def __init__(self, place: Path, fleet: Fleet, chance: random.Random, limit: int) -> None:
        self._place = place
        self._fleet = fleet
        self._chance = chance
        self._limit = limit
        self._reader: MqttStreamReader | None = None
        #: Where the query began, then the end of each batch.
        self.log: list[Place] = []
        #: Batches that are done.
        self.done = 0
        self.sink: dict[int, list[tuple[str, int]]] = {}

    @property
    def decided(self) -> bool:
        return self.done >= len(self.log) - 1

    @property
    def carried(self) -> dict[str, int]:
        return dict.fromkeys(NAMES, 0) | (ends(self.log[self.done]) if self.done else {})

    def crash(self) -> None:
        if self._reader is not None:
            self._reader.stop()
            # With a process its threads end; here they might take a lease from under its successor's feet.
            wait_until(lambda: not any(one.name.startswith("gateway") for one in threading.enumerate()))
        self._reader = None

    def trigger(self, crashes: float = 0.0) -> None:
        """One trigger of Spark, which may crash after each of its steps."""
        if not (self.log or self._fleet.up) or (not self.decided and set(ends(self.log[-1])) - set(self._fleet.up)):
            return  # a gateway would be waited for
        reader = self._reader = self._reader or self._started()
        if not self.log:
            self.log.append(reader.initialOffset())
        if not self.decided:
            self._run(reader, len(self.log) - 1)
            self.done = len(self.log) - 1
        end = reader.latestOffset(self.log[-1], ReadMaxRows(self._limit))
        if json.dumps(end) == json.dumps(self.log[-1]):
            return
        self.log.append(end)
        if self._chance.random() < crashes:
            self.crash()  # planned, and nothing else
            return
        try:
            self._run(reader, len(self.log) - 1)
        except GatewayUnreachable:  # it answered, and then it went: the batch fails, and comes again
            self.crash()
            return
        if self._chance.random() < crashes:
            self.crash()  # in the sink, and not in the commit log
            return
        self.done = len(self.log) - 1

    def _started(self) -> MqttStreamReader:
        names = list(NAMES)
        self._chance.shuffle(names)
        at = tuple(str(self._place / name) for name in names)
        return MqttStreamReader(ReadPlan(GatewayAddress(""), "default", poll_ms=20, gateways=at, max_bytes=MAX_BYTES))

    def _run(self, reader: MqttStreamReader, batch: int) -> None:
        start, end = self.log[batch - 1], self.log[batch]
        rows = seen(reader, start, end)
        assert rows == self.sink.setdefault(batch, rows), "a batch that comes again is the same"
        assert len(rows) <= self._limit
        size = sum(
            one.journal.range_bytes(ends(start).get(n, 0), ends(end).get(n, 0)) for n, one in self._fleet.up.items()
        )
        assert size <= MAX_BYTES + FRAME_BYTES


def _step(fleet: Fleet, query: Query, chance: random.Random) -> None:
    step, name = chance.random(), chance.choice(NAMES)
    if step < 0.3:
        fleet.add(name, chance.choice([1, 3, 40]))
    elif step < 0.36:
        fleet.stop(name)
    elif step < 0.5:
        fleet.start(name)
    elif step < 0.56:
        query.crash()
    else:
        query.trigger(crashes=0.1)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("seed", range(4))
def test_any_history_gives_each_row_once(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (link, gateways):
        monkeypatch.setattr(module, "GATEWAY_TIMEOUT_S", 2.0)
    chance = random.Random(seed)
    limit = chance.choice([5, 20, 50, 400])
    with contextlib.closing(Fleet(tmp_path)) as fleet:
        query = Query(tmp_path, fleet, chance, limit)
        for name in chance.sample(NAMES, chance.randint(1, 3)):  # others join later
            fleet.start(name)
        for _ in range(60):
            _step(fleet, query, chance)
            cut = {name: one.journal.consumers.get("default", 0) for name, one in fleet.up.items()}
            assert all(query.carried[name] >= end for name, end in cut.items()), "nothing is cut that is not committed"
        for name in NAMES:
            fleet.start(name)
        deadline = time.monotonic() + 60
        while query.carried != fleet.added:
            assert time.monotonic() < deadline, (query.carried, fleet.added)
            query.trigger()
        query.crash()
    rows = [row for batch in sorted(query.sink) for row in query.sink[batch]]
    for name in NAMES:
        assert [offset for one, offset in rows if one == name] == list(range(fleet.added[name]))
