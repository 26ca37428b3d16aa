"""Jet's `MqttSinks` in PySpark."""

from __future__ import annotations

from pathlib import Path

from pyspark.sql import DataFrame
from pyspark.sql.streaming import StreamingQuery


def shortcut(frame: DataFrame, broker: str, directory: Path) -> StreamingQuery:
    """Everything to one topic.

    Jet: ``MqttSinks.mqtt(broker, "shouts")``
    """
    return (
        frame.selectExpr("item AS payload")
        .writeStream.format("mqtt")
        .options(broker=broker, topic="shouts", stateDir=str(directory / "outbox"))
        .option("checkpointLocation", str(directory / "checkpoint"))
        .start()
    )


def built(frame: DataFrame, broker: str, directory: Path, user: str, password_file: Path) -> StreamingQuery:
    """A login, a session that stays, a retry strategy, and a function that makes a message of an item.

    Jet::

        MqttSinks.<Tuple2<String, String>>builder()
            .clientId("shouts").topic("shouts").auth(user, password).keepSession().autoReconnect()
            .retryStrategy(RetryStrategies.custom()
                .maxAttempts(10)
                .intervalFunction(IntervalFunction.exponentialBackoffWithCap(100, 2.0, 5000))
                .build())
            .messageFn(item -> {
                MqttMessage message = new MqttMessage(item.f1().toUpperCase().getBytes());
                message.setQos(2); message.setRetained(true);
                return message;
            })
            .build()

    The function is an expression over the row, and may name a topic for each; Jet's sink has one.
    """
    return (
        frame.selectExpr(
            "concat('shouts/', driver) AS topic",
            "upper(item) AS payload",
            "2 AS qos",
            "true AS retain",
        )
        .writeStream.format("mqtt")
        .options(broker=broker, clientId="shouts", stateDir=str(directory / "outbox"))
        .options(username=user, passwordFile=str(password_file))
        .option("retryTimeout", "60")
        .option("guarantee", "exactly_once")
        .option("checkpointLocation", str(directory / "checkpoint"))
        .start()
    )


#: Jet's retry strategies as options of the sink.
RETRY = {
    "RetryStrategies.never()": {"retryTimeout": "0"},
    "RetryStrategies.indefinitely(500)": {"retryTimeout": "inf"},
}
