"""Jet's `MqttSources` in PySpark."""

from __future__ import annotations

from pathlib import Path

from pyspark.sql import DataFrame, SparkSession


def shortcut(spark: SparkSession, broker: str, state: Path) -> DataFrame:
    """A topic, and everything else as it comes.

    Jet: ``MqttSources.mqtt(broker, "drivers/#")``
    """
    return (
        spark.readStream.format("mqtt")
        .options(broker=broker, subscribe="drivers/#", stateDir=str(state))
        .load()
        .select("payload")
    )


def built(spark: SparkSession, broker: str, state: Path, user: str, password_file: Path) -> DataFrame:
    """A login, a session that stays, reconnecting, and a function that makes an item of a message.

    Jet::

        MqttSources.builder()
            .clientId("drivers").topic("drivers/+").qualityOfService(EXACTLY_ONCE)
            .auth(user, password).autoReconnect().keepSession()
            .mapToItemFn((topic, message) -> tuple2(topic.substring(8), new String(message.getPayload())))
            .build()

    Reconnecting and the session need no word here: without them nothing could be promised. The password comes from a
    file, because options stand in Spark's plans and pages.
    """
    return (
        spark.readStream.format("mqtt")
        .options(broker=broker, stateDir=str(state), clientId="drivers", subscribe="drivers/+:2")
        .options(username=user, passwordFile=str(password_file))
        .load()
        .selectExpr("substring(topic, 9) AS driver", "CAST(payload AS STRING) AS item")
    )


def subscribed(spark: SparkSession, broker: str, state: Path) -> DataFrame:
    """Several filters, each with its own QoS.

    Jet: ``.subscriptions(Subscription.of("drivers/#", AT_MOST_ONCE), Subscription.of("cars/#", 1), ...)``
    """
    return (
        spark.readStream.format("mqtt")
        .options(broker=broker, stateDir=str(state), guarantee="at_most_once")  # one of them may lose
        .option("subscribe", "drivers/#:0, cars/#:1, alarms/#:2")
        .load()
        .select("topic", "payload", "qos")
    )


def connected(spark: SparkSession, brokers: str, state: Path) -> DataFrame:
    """What Jet leaves to Paho's own options.

    Jet::

        .connectOptionsFn(() -> {
            MqttConnectOptions options = new MqttConnectOptions();
            options.setServerURIs(...); options.setKeepAliveInterval(30); options.setConnectionTimeout(5);
            options.setMaxInflight(1000);
            return options;
        })
    """
    return (
        spark.readStream.format("mqtt")
        .options(broker=brokers, stateDir=str(state), subscribe="drivers/#")  # several with commas, tried in this order
        .options(keepAlive="30", connectTimeout="5", receiveMaximum="1000")
        .load()
    )
