"""``format("mqtt")`` as a sink: a real Spark, a real Mosquitto, and a gateway that the sink starts itself."""

from __future__ import annotations

import shutil
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from tests.conftest import NewMosquitto
from tests.helpers import present
from tests.integration.conftest import Ear
from tests.integration.gateway.test_outbox import in_order
from tests.integration.spark.collecting import end_gateway, forget_last_commit
from towline.gateway.launch import find_running
from towline_prove.devstack import Mosquitto


@pytest.fixture
def broker(new_mosquitto: NewMosquitto) -> Mosquitto:
    return new_mosquitto(max_queued_messages="0", persistence="true")


@pytest.fixture
def state(place: Path) -> Path:
    """The gateway's directory."""
    return place / "out"


def numbered(frame: DataFrame, column: str, topics: int = 3) -> DataFrame:
    return frame.selectExpr(
        f"concat('d/', {column} % {topics}) AS Topic",
        f"cast({column} AS string) AS Payload",
        "array(named_struct('key', 'a', 'value', '1'), named_struct('key', 'a', 'value', '2')) AS user_properties",
    )


def outbox(state: Path) -> dict[str, Any]:
    client = present(find_running(state))
    with client:
        found: dict[str, Any] = client.status()["outbox"]
        return found


@pytest.mark.parametrize("guarantee", ["at_most_once", "at_least_once", "exactly_once"])
def test_a_batch_query_publishes_each_row_once(
    spark: SparkSession, broker: Mosquitto, ear: Ear, state: Path, guarantee: str
) -> None:
    writer = numbered(spark.range(0, 300, numPartitions=1), "id").write.format("mqtt").mode("append")
    writer.options(broker=broker.uri, stateDir=str(state), guarantee=guarantee, confirm="broker").save()
    ear.until(300)
    assert Counter(ear.numbers()) == Counter(range(300))
    assert in_order(ear.messages)
    assert ear.messages[0].user_properties == [("a", "1"), ("a", "2")]
    account = outbox(state)
    assert (account["accepted"], account["delivered"], account["queued"]) == (300, 300, 0)
    assert account["writers"] == 0, "the job is over, nobody asks for its batches any more"


def test_a_stream_publishes_each_row_once_whatever_is_killed_and_run_again(
    spark: SparkSession, broker: Mosquitto, ear: Ear, state: Path, tmp_path: Path
) -> None:
    """Order within a topic where it is within a part; an older copy of the outbox is not taken for it."""
    source, checkpoint = tmp_path / "in", tmp_path / "ck"
    source.mkdir()

    def run() -> None:
        rows = numbered(spark.readStream.format("text").load(str(source)), "cast(value AS long)", topics=6)
        writer = rows.repartition(3, "topic").writeStream.format("mqtt").trigger(availableNow=True)
        writer = writer.options(broker=broker.uri, stateDir=str(state), guarantee="exactly_once")
        writer.option("checkpointLocation", str(checkpoint)).start().awaitTermination(60)

    (source / "1.txt").write_text("".join(f"{n}\n" for n in range(200)))
    run()
    ear.until(200)
    assert end_gateway(state, signal.SIGKILL)
    shutil.copytree(state / "outbox", copy := tmp_path / "copy")
    forget_last_commit(checkpoint)  # Spark runs the batch again, and nothing of it may enter a second time
    (source / "2.txt").write_text("".join(f"{n}\n" for n in range(200, 300)))
    run()
    ear.until(300)
    assert outbox(state)["accepted"] == 300
    assert Counter(ear.numbers()) == Counter(range(300))
    assert in_order(ear.messages)
    (source / "3.txt").write_text("300\n")
    assert end_gateway(state, signal.SIGKILL)
    (state / "outbox").rename(tmp_path / "newest")
    copy.rename(state / "outbox")
    with pytest.raises(Exception, match=r"older copy.*TL-G35"):
        run()
    assert not find_running(state), "the gateway does not come up, so it sends nothing twice"
    (state / "outbox").rename(tmp_path / "old")
    (tmp_path / "newest").rename(state / "outbox")
    run()
    ear.until(301)
    assert Counter(ear.numbers()) == Counter(range(301))


def test_a_full_outbox_holds_the_query_back_with_one_clear_line(
    spark: SparkSession, broker: Mosquitto, state: Path
) -> None:
    broker.kill()  # nothing can be delivered

    def bring(count: int) -> None:
        rows = spark.range(0, count, numPartitions=1).selectExpr("'t' AS topic", "repeat('x', 100000) AS payload")
        writer = rows.write.format("mqtt").mode("append")
        writer = writer.options(broker=broker.uri, stateDir=str(state), outboxMaxBytes="1m")
        # Longer than what an attempt of the task before has left there takes to go.
        writer.option("retryTimeout", "2.1").save()

    with pytest.raises(Exception, match=r"Raise outboxMaxBytes.*TL-J15"):  # it never fits
        bring(40)
    bring(6)
    with pytest.raises(Exception, match=r"TL-G23"):  # it fits when something was delivered
        bring(6)
