"""Mosquitto forgets, the bridge is down, the publisher dies: all in Kafka, once; as the demo shows it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers import lacking
from towline.errors import SetupError
from towline.spark.java import find_java
from towline_prove.demo import Moment
from towline_prove.devstack.kafka import kafka_jars
from towline_prove.devstack.mosquitto import find_mosquitto
from towline_prove.receipts import ReceiptsDemo

# `make test` has the same in publisher/test_receipts.py, with a commit in place of Spark and Kafka.
pytestmark = [pytest.mark.long, pytest.mark.broker, pytest.mark.kafka, pytest.mark.spark, pytest.mark.timeout(1800)]


class Audience:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def step(self, title: str, text: str) -> None:
        self.told.append(f"{title} {text}")

    def fault(self, text: str) -> None:
        self.told.append(text)

    def show(self, moment: Moment, total: int) -> None:
        assert moment.in_kafka <= moment.offered <= total


@pytest.mark.parametrize("guarantee", ["exactly_once", "at_least_once"])
def test_what_can_not_be_done_with_mosquitto(tmp_path: Path, guarantee: str) -> None:
    try:
        find_java(), kafka_jars(), find_mosquitto()
    except SetupError as error:
        lacking(str(error))
    audience = Audience()
    account = ReceiptsDemo(audience, guarantee, messages=1500, rate=300, directory=tmp_path / "demo").run()
    assert account.ok, (account, audience.told)
    assert account.offered == account.in_kafka == 1500
    assert account.doubled == 0 or guarantee == "at_least_once"
    # Between the bridge's end and Mosquitto's a quarter of all messages was acknowledged, by a broker that forgot.
    assert account.sent_again >= account.forgotten >= 0.2 * 1500
    assert sum("killed" in text for text in audience.told) == 3
