"""The outage test: a part, a break, a part, the mend, a part; all of it in Kafka, in every size and kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.helpers import lacking
from towline.errors import SetupError
from towline.spark.java import find_java
from towline_prove.account import RunAccount
from towline_prove.devstack.kafka import kafka_jars
from towline_prove.devstack.mosquitto import find_mosquitto
from towline_prove.outage import BREAKS, outage, steady_outage
from towline_prove.rig import Rig
from towline_prove.soak import KEEP_ALL

# `make test` has an outage of Kafka in bridge/test_bridge.py, of either broker in gateway/ and kafka/.
pytestmark = [pytest.mark.long, pytest.mark.broker, pytest.mark.kafka, pytest.mark.spark]


#: Mosquitto with its own limits (`max_queued_messages 1000`).
OWN_LIMITS: dict[str, str] = {}  # one object for all tests, so that they share a rig


@pytest.fixture(scope="module")
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """One bridge for all: what one outage leaves behind is what the next one meets."""
    try:
        find_java(), kafka_jars(), find_mosquitto()
    except SetupError as error:
        lacking(str(error))
    with Rig(tmp_path_factory.mktemp("rig"), mosquitto=request.param) as running:
        running.warm()
        yield running


def story(account: RunAccount) -> str:
    return "\n".join([account.line(), *account.problems(), *account.notes, *map(str, account.verdict.stories)])


@pytest.mark.parametrize("rig", [OWN_LIMITS], ids=["defaults"], indirect=True)
@pytest.mark.parametrize("what", list(BREAKS))
def test_four_and_four_and_four_make_twelve(rig: Rig, what: str) -> None:
    account = outage(rig, what)
    assert account.ok, story(account)
    assert account.verdict.delivered == 12, story(account)


#: Where the gateway is cut off, only a broker that keeps more than 1,000 messages can hold 4,000 of them. Camel's own
#: test breaks both links.
THOUSANDS = [pytest.param(OWN_LIMITS if what.startswith("kafka") else KEEP_ALL, what, id=what) for what in BREAKS]


@pytest.mark.parametrize(("rig", "what"), THOUSANDS, indirect=["rig"])
def test_the_same_with_four_thousand(rig: Rig, what: str, record_property: Callable[[str, object], None]) -> None:
    account = outage(rig, what, 4_000)
    for name, count in account.verdict.counts().items():
        record_property(name, count)
    assert account.ok, story(account)
    assert account.verdict.delivered == 12_000, story(account)


@pytest.mark.parametrize("rig", [OWN_LIMITS], ids=["defaults"], indirect=True)
@pytest.mark.parametrize("seconds", [5, 60])
def test_a_publisher_that_goes_on_fills_the_journal_and_not_the_broker(
    rig: Rig, seconds: int, record_property: Callable[[str, object], None]
) -> None:
    """Kafka away at 2,000 msg/s: Mosquitto, which drops beyond 1,000, never has to queue."""
    steady = steady_outage(rig, seconds=seconds)
    record_property("journaled_during", steady.journaled_during)
    assert steady.dropped == 0
    assert steady.sent_during == 2_000 * seconds
    assert steady.journaled_during >= 2_000 * seconds
    assert steady.account.ok, story(steady.account)
