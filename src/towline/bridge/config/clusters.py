"""What a bridge file has to say, and can't say, where its master is a cluster: tasks run on other machines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from towline.bridge.config.kafka_source import java_client
from towline.bridge.config.model import DownLine, KafkaSection, Line, SparkSection
from towline.errors import ConfigError
from towline.gateway.access import is_remote
from towline.spark.masters import is_cluster, shares_files

__all__ = ["ClusterMistake", "cluster_mistakes"]


class ClusterMistake(NamedTuple):
    """A mistake of a line.

    Attributes:
        code: ``TL-C14x``.
        line: Whose.
        what: What is wrong.
        do: What to do.
    """

    code: str
    line: Line | DownLine
    what: str
    do: str


def cluster_mistakes(
    spark: SparkSection, kafka: KafkaSection, lines: Sequence[Line | DownLine]
) -> Iterator[ClusterMistake]:
    """The mistakes of lines that are fine with a local master."""
    if not is_cluster(spark.master):
        return
    secret = _has_secret(kafka)
    for line in lines:
        if not shares_files(spark.master):
            yield from _unreachable(line, spark.master)
        if secret and isinstance(line, DownLine):
            what = f"Spark's Kafka source would need [kafka]'s secrets or certificates on executors of {spark.master}"
            do = "They never travel: run this line with a local master, in a bridge file of its own."
            yield ClusterMistake("TL-C142", line, what, do)


def _unreachable(line: Line | DownLine, master: str) -> Iterator[ClusterMistake]:
    """Why executors don't come to a line's gateways."""
    elsewhere, listen = line.gateways if isinstance(line, Line) else (), line.gateway.listen
    if elsewhere:
        for place in elsewhere:
            if not is_remote(place):
                what = f'its gateway "{place}" is a directory of this machine, which executors of {master} don\'t see'
                yield ClusterMistake("TL-C140", line, what, "Let it listen, and name it grpc+tls://HOST:PORT.")
    elif listen is None:
        what = f"its gateway listens on no network, and executors of {master} have no other way to it"
        yield ClusterMistake("TL-C140", line, what, "Set listen in [gateway], with certificate and token.")


def _has_secret(kafka: KafkaSection) -> bool:
    """Whether Java's client is told secrets, which it takes from the environment of its process."""
    environ: dict[str, str] = {}
    try:
        java_client(kafka.client(), environ)
    except ConfigError:
        return False  # told at the start, in its own words
    return bool(environ)
