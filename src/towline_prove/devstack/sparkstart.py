"""Every Spark and every Kafka of tests and the demo started quickly: they start again and again."""

from __future__ import annotations

import os
import shlex
from typing import TYPE_CHECKING, Final

from towline.spark.quickstart import QUICK, Tier, archive_of, jvm_options, light_home, sharing
from towline_prove.devstack.kafka import PERFORMANCE

if TYPE_CHECKING:
    from collections.abc import MutableMapping

__all__ = ["start_quickly"]

#: spark-submit adds what this variable holds to its JVM.
_VARIABLE: Final = "SPARK_SUBMIT_OPTS"


def start_quickly(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let every local Spark and every Kafka that is started with this environment start quickly, and run less quickly.

    Args:
        environment: Gets ``SPARK_HOME`` and ``SPARK_SUBMIT_OPTS``; what the latter holds already stays, and wins. And
            ``KAFKA_JVM_PERFORMANCE_OPTS``, where there is none.

    Raises:
        SetupError: There is no Java (TL-S14).
    """
    home = light_home()
    options = jvm_options(Tier.QUICK)
    if home is not None:
        environment["SPARK_HOME"] = str(home)
        options += sharing(archive_of(home))
    environment.setdefault(PERFORMANCE, " ".join(QUICK))
    environment[_VARIABLE] = " ".join([shlex.join(options), environment.get(_VARIABLE, "")]).strip()
