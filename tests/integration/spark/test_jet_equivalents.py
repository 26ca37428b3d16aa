"""Jet's examples as they stand in examples/jet_equivalents, on a real Spark and a broker that asks for a password."""

from __future__ import annotations

import importlib
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
from pyspark.sql import SparkSession

from tests.conftest import NewMosquitto
from tests.helpers import lacking, wait_until
from tests.integration.spark.collecting import online
from towline import Client, ClientSettings
from towline.net.client import Message
from towline.spark.options import parse_sink_options
from towline_prove.devstack import Mosquitto

#: A Spark that starts on a busy machine.
PATIENCE = 240.0
PLACE = Path(__file__).parents[3] / "examples" / "jet_equivalents"

pytestmark = pytest.mark.spark


@pytest.fixture
def jet(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    monkeypatch.syspath_prepend(str(PLACE))
    return {name: importlib.import_module(name) for name in ("sources", "sinks", "pipeline", "functions")}


def hear(ear: Client, topics: set[str]) -> dict[str, Message]:
    """The last message of each topic, as soon as each has one."""
    heard: dict[str, Message] = {}

    def all_of_them() -> bool:
        if (message := ear.receive(0.1)) is not None:
            message.ack()
            heard[message.topic] = message
        return topics <= set(heard)

    wait_until(all_of_them, PATIENCE, f"{topics}")
    return heard


def secured(new_mosquitto: NewMosquitto, place: Path) -> tuple[Mosquitto, Path]:
    """A broker that lets in whoever knows the password, and the password's file."""
    if shutil.which("mosquitto_passwd") is None:
        lacking("mosquitto_passwd is missing")
    users, secret = place / "users", place / "password"
    subprocess.run(["mosquitto_passwd", "-b", "-c", str(users), "jet", "s3cret"], check=True, capture_output=True)
    secret.write_text("s3cret")
    secret.chmod(0o600)
    return new_mosquitto(password_file=str(users), max_queued_messages="0"), secret


def test_builder_source_and_sink(
    spark: SparkSession, new_mosquitto: NewMosquitto, jet: dict[str, ModuleType], place: Path
) -> None:
    for options in jet["sinks"].RETRY.values():
        parse_sink_options({"gateway": str(place), **options})
    assert "payload" in jet["sources"].connected(spark, "mqtt://a:1883,mqtt://b:1883", place / "state").columns
    login = ClientSettings(username="jet", password="s3cret")
    broker, secret = secured(new_mosquitto, place)
    items = jet["sources"].built(spark, broker.uri, place / "source", "jet", secret)
    query = jet["sinks"].built(items, broker.uri, place / "sink", "jet", secret)
    try:
        wait_until(lambda: online(place / "source"), PATIENCE, "the source's session")
        with Client(broker.uri, client_id="ear", subscribe=["shouts/#"], settings=login) as ear:
            for name in ("ann", "bob"):
                ear.publish(f"drivers/{name}", f"{name} brakes".encode(), qos=2).result(60)
            heard = hear(ear, {"shouts/ann", "shouts/bob"})
    finally:
        query.stop()
    assert {topic: message.payload for topic, message in heard.items()} == {
        "shouts/ann": b"ANN BRAKES",
        "shouts/bob": b"BOB BRAKES",
    }
    assert {message.qos for message in heard.values()} <= {1, 2}
    with Client(broker.uri, client_id="late", subscribe=["shouts/ann"], settings=login) as late:
        kept = late.receive(30)
    assert kept is not None
    assert kept.retain, "the message function sets retain"


def test_subscriptions_with_their_own_qos_and_the_pipeline(
    spark: SparkSession, mosquitto: Mosquitto, jet: dict[str, ModuleType], place: Path
) -> None:
    frame = jet["sources"].subscribed(spark, mosquitto.uri, place / "three")
    seen = frame.writeStream.format("memory").queryName("three").option("checkpointLocation", str(place / "c")).start()
    query = jet["pipeline"].run(spark, mosquitto.uri, place / "pipe")
    functions = jet["functions"].run(spark, mosquitto.uri, place / "functions")
    try:
        for state in (place / "three", place / "pipe" / "source", place / "functions" / "in"):
            wait_until(lambda state=state: online(state), PATIENCE, "the session")  # type: ignore[misc]
        with Client(mosquitto.uri, client_id="ear", subscribe=["shouts", "fast/#", "slow/#"]) as ear:
            with Client(mosquitto.uri, client_id="cars") as cars:
                for topic in ("drivers/a", "cars/b", "alarms/c"):
                    cars.publish(topic, b"hey", qos=2).result(60)
                for driver, speed in (("ann", b"80"), ("bob", b"20")):
                    cars.publish(f"speed/{driver}", b'{"speed": %b}' % speed, qos=1).result(60)
            wait_until(lambda: spark.table("three").count() == 3, PATIENCE, "three rows")
            heard = hear(ear, {"shouts", "fast/ann", "slow/bob"})
            shout, fast, slow = heard["shouts"], heard["fast/ann"], heard["slow/bob"]
    finally:
        seen.stop()
        query.stop()
        functions.stop()
    assert (fast.payload, fast.content_type, fast.user_properties) == (b"80.0", "text/plain", (("driver", "ann"),))
    assert (slow.payload, slow.qos, slow.user_properties) == (b"20.0", 1, (("driver", "bob"),))
    assert {(row.topic, row.qos) for row in spark.table("three").collect()} == {
        ("drivers/a", 0),
        ("cars/b", 1),
        ("alarms/c", 2),
    }
    assert shout.payload == b"HEY"
