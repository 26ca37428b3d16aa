"""The outage test: a part, a break, a part, the mend, a part; all of it in Kafka, in every size and kind."""

from __future__ import annotations

from collections.abc import Iterator

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

pytestmark = [pytest.mark.broker, pytest.mark.kafka, pytest.mark.spark, pytest.mark.timeout(900)]


@pytest.fixture(scope="module", params=[pytest.param({}, id="defaults"), pytest.param(KEEP_ALL, id="keep all")])
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """One bridge for all: what one outage leaves behind is what the next one meets.

    With Mosquitto's own limits (`max_queued_messages 1000`), and with the one a user is told to set where the
    gateway or the way to it may be away.
    """
    try:
        find_java(), kafka_jars(), find_mosquitto()
    except SetupError as error:
        lacking(str(error))
    with Rig(tmp_path_factory.mktemp("rig"), mosquitto=request.param) as made:
        made.warm()
        yield made


def keeps_all(rig: Rig) -> bool:
    return "max_queued_messages" in rig.mosquitto.settings


def told(account: RunAccount) -> str:
    return "\n".join([account.line(), *account.problems(), *account.notes, *map(str, account.verdict.stories)])


@pytest.mark.parametrize("what", list(BREAKS))
def test_four_and_four_and_four_make_twelve(rig: Rig, what: str) -> None:
    """With the broker's defaults."""
    if keeps_all(rig):
        pytest.skip("shown with the broker's defaults")
    account = outage(rig, what)
    assert account.ok, told(account)
    assert account.verdict.delivered == 12, told(account)


#: One outage of each side runs every time; the others belong to `make soak`.
EVERY_TIME = {"kafka hangs", "mqtt hangs"}


@pytest.mark.parametrize(
    "what", [pytest.param(what, marks=[] if what in EVERY_TIME else pytest.mark.long) for what in BREAKS]
)
def test_the_same_with_four_thousand(rig: Rig, what: str) -> None:
    """Where the gateway is cut off, only a broker that keeps more than 1,000 messages can hold 4,000 of them."""
    kafka_only = what.startswith("kafka")
    if keeps_all(rig) is kafka_only:
        pytest.skip("the other broker's case")
    account = outage(rig, what, 4_000)
    assert account.ok, told(account)
    assert account.verdict.delivered == 12_000, told(account)


@pytest.mark.parametrize("seconds", [10, pytest.param(60, marks=pytest.mark.long)])
def test_a_publisher_that_goes_on_fills_the_journal_and_not_the_broker(rig: Rig, seconds: int) -> None:
    """Kafka away at 2,000 msg/s: Mosquitto, which drops beyond 1,000, never has to queue."""
    if keeps_all(rig):
        pytest.skip("shown with the broker's defaults")
    steady = steady_outage(rig, seconds=seconds)
    assert steady.dropped == 0
    assert steady.sent_during == 2_000 * seconds
    assert steady.journaled_during >= 2_000 * seconds
    assert steady.account.ok, told(steady.account)
