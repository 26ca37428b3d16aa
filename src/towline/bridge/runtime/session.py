"""The Spark session of a bridge."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any, Final

from pyspark import SparkConf, SparkContext
from pyspark.sql import SparkSession

import towline
from towline.bridge.config import sqlcheck
from towline.bridge.config.kafka_source import java_client
from towline.bridge.runtime.surroundings import short_sockets
from towline.bridge.uplink.source import PackedSource
from towline.guarantee import policy
from towline.spark import localfs

if TYPE_CHECKING:
    from collections.abc import Callable

    from towline.bridge.config.model import Bridge

__all__ = ["session"]

#: For a line that drops repeats. One partition, because rows of a device must not be spread over several and come back
#: in another order; and no batch of its own to clear old keys, which the next batch clears as well.
_STATEFUL: Final = {
    "spark.sql.shuffle.partitions": "1",
    "spark.sql.streaming.noDataMicroBatches.enabled": "false",
}
#: A master that is one process, for which Spark makes the secret of spark.authenticate by itself
#: (`SecurityManager.initializeAuth`). Without one, another user of the machine could read blocks of messages at its
#: ports, and hand the driver Java objects to deserialize.
_ALONE: Final = re.compile(r"local(\[.*\])?")
_LOOPBACK: Final = {"spark.driver.bindAddress": "127.0.0.1", "spark.driver.host": "127.0.0.1"}


def session(bridge: Bridge, judge: Callable[[Any], None] | None = None) -> SparkSession:
    """The Spark session of a bridge, both formats registered; what this process makes from now on is its user's alone.

    Args:
        bridge: What the file says.
        judge: Looks at Spark's JVM as soon as it runs, seconds before there is a session.

    ``spark.sql.ansi.enabled`` is off: under ANSI rules one payload that does not cast in a ``where`` would raise, fail
    its batch for ever and stop the line; without them it is null, and the message counts as filtered.
    """
    if bridge.reads_kafka:
        java_client(bridge.kafka.client())  # its secrets, in the environment the JVM inherits
    # Blocks, artifacts and the sockets of Python workers, in /tmp, hold messages: the JVM and its workers inherit this.
    os.umask(0o077)
    if bridge.spark.master.startswith("local"):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")  # the web page would listen on every address
    conf = _settings(bridge)
    if judge is not None:
        SparkContext._ensure_initialized(  # noqa: SLF001 - as the builder does it
            conf=SparkConf().setMaster(bridge.spark.master).setAll(list(conf.items()))
        )
        judge(SparkContext._jvm)  # noqa: SLF001 - there is no public way
    builder = SparkSession.builder.master(bridge.spark.master).appName(f"towline {bridge.name}")
    spark = builder.config(map={**conf}).getOrCreate()
    towline.register(spark)
    spark.dataSource.register(PackedSource)
    return spark


def _settings(bridge: Bridge) -> dict[str, str]:
    own, master = bridge.spark, bridge.spark.master
    return {
        **towline.spark_conf(),
        **(_LOOPBACK if master.startswith("local") else {}),
        **({"spark.authenticate": "true"} if _ALONE.fullmatch(master) else {}),
        **short_sockets(os.environ.get("SPARK_LOCAL_DIRS")),
        "spark.ui.enabled": str(own.ui).lower(),
        "spark.ui.showConsoleProgress": "false",
        **localfs.settings(),
        **sqlcheck.SESSION_SQL,
        "spark.sql.warehouse.dir": str(bridge.state_dir / "spark-warehouse"),
        **{name: value for line in bridge.lines for name, value in policy(line.guarantee).spark.items()},
        **(_STATEFUL if any(line.within for line in bridge.uplinks) else {}),
        **({"spark.jars": ",".join(map(str, own.kafka_jars))} if own.kafka_jars else {}),
        **{name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in own.conf.items()},
    }
