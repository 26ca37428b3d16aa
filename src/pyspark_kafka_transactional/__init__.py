"""Lets Spark find ``format("kafka_transactional")`` by itself.

Spark imports every top-level package named ``pyspark_*`` and takes its ``DefaultSource``. A package that raises there
disables the discovery of all, silently: so this one never raises. `towline.register` is the robust way.
"""

from __future__ import annotations

import contextlib

__all__ = ["DefaultSource"]

with contextlib.suppress(Exception):
    from towline.spark.kafka_sink import KafkaTransactional as DefaultSource
