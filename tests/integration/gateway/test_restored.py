"""A state directory restored from a copy: recognised before anything is taken in, acknowledged or cut [I14]."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.integration.conftest import Gateway, NewGateway, payloads, publish
from towline.errors import ReaderFenced
from towline.gateway.client import Lease
from towline.gateway.identity import JournalPosition
from towline.gateway.launch import ensure_running
from towline.spark.offsets import SourceOffset
from towline_prove.devstack import Mosquitto


class Query:
    """What Spark leaves behind of a query that reads to the end: one batch in the offset log, perhaps not done."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self.place = Path(gateway.settings.checkpoint)
        self._batch = -1
        #: numbers of the messages it has read
        self.seen: list[int] = []

    def read(self) -> None:
        """Read to the end."""
        client = self._gateway.client
        lease = Lease("spark")
        status = client.acquire(lease)
        journal, committed = status["journal"], status["consumers"]["spark"]
        window = client.wait(lease, committed, journal=journal, timeout_s=0)
        for rows in client.read(journal, committed, window.end, incarnation=window.incarnation):
            self.seen += map(int, rows.column("payload").to_pylist())
        self._plan(SourceOffset((JournalPosition(status["name"], journal, window.end, window.incarnation),)))
        client.wait(lease, window.end, journal=journal, timeout_s=0, incarnation=window.incarnation)
        client.release(lease)

    def _plan(self, place: SourceOffset) -> None:
        (self.place / "offsets").mkdir(parents=True, exist_ok=True)
        (self.place / "metadata").write_text('{"id":"q"}')
        self._batch += 1
        entry = self.place / "offsets" / str(self._batch)
        entry.write_text(f'v1\n{{"batchWatermarkMs":0}}\n{json.dumps(place.to_json())}')


@pytest.fixture
def gateway(broker: Mosquitto, new_gateway: NewGateway, tmp_path: Path) -> Gateway:
    """One that runs, and has taken ten messages in."""
    made = new_gateway(broker, checkpoint=str(tmp_path / "checkpoint"))
    made.start()
    publish(broker, range(10))
    made.until(journaled=10)
    return made


def copied(gateway: Gateway, name: str) -> Path:
    """A copy of the journal of a gateway, as a backup makes it, also of one that runs."""
    return Path(shutil.copytree(gateway.settings.inbox_dir, gateway.settings.state_dir.parent / name))


def bring_back(gateway: Gateway, copy: Path) -> None:
    shutil.rmtree(gateway.settings.inbox_dir)
    shutil.copytree(copy, gateway.settings.inbox_dir)


def test_an_older_copy_takes_nothing_in(broker: Mosquitto, gateway: Gateway) -> None:
    query = Query(gateway)
    copy = copied(gateway, "copy")  # of a journal that is being written
    publish(broker, range(10, 15))
    gateway.until(journaled=15)
    query.read()
    gateway.stop()
    newest = copied(gateway, "newest")
    publish(broker, range(15, 35))

    bring_back(gateway, copy)
    for _ in range(2):
        line = gateway.fail()
        assert "the checkpoint is at offset 15, the journal ends at 10: an older copy" in line
        assert "TL-G06" in line
    assert payloads(gateway) == list(range(10)), "nothing was taken in"

    bring_back(gateway, newest)
    gateway.start()
    gateway.until(journaled=35)
    query.read()
    assert query.seen == list(range(35)), "what waited at the broker was never acknowledged to the copy"


def test_a_journal_begun_anew_takes_nothing_in(broker: Mosquitto, gateway: Gateway) -> None:
    query = Query(gateway)
    query.read()
    gateway.stop()
    publish(broker, range(10, 20))
    shutil.rmtree(gateway.settings.inbox_dir)
    with pytest.raises(ReaderFenced, match=r"checkpoint belongs to journal \w+, this gateway has journal.*TL-G04"):
        ensure_running(gateway.settings, owner_pid=gateway.settings.owner_pid or 0)
    assert payloads(gateway) == []
    shutil.rmtree(query.place)  # the way out: a new checkpoint
    gateway.settings = gateway.settings.model_copy(update={"unknown_session": "adopt"})
    gateway.start()
    gateway.until(journaled=10)
    query.read()
    assert query.seen == list(range(20))


@pytest.mark.parametrize("how", ["the lock file is removed", "the directory is replaced"])
def test_who_lost_its_directory_acknowledges_nothing_more(broker: Mosquitto, gateway: Gateway, how: str) -> None:
    if how == "the lock file is removed":
        (gateway.settings.inbox_dir / "lock").unlink()
    else:
        bring_back(gateway, copied(gateway, "copy"))
    publish(broker, range(10, 20))
    assert gateway.process.wait(60) == 1
    assert "TL-J11" in gateway.log.read_text().splitlines()[-1]
    gateway.start()
    gateway.until(journaled=20)
    assert gateway.seen() == list(range(20)), "the broker still had what was not acknowledged"
