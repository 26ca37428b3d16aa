"""The Spark query of a line, whichever way it goes: what the driver needs of it."""

from __future__ import annotations

import socket
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Generic, Self, TypeVar

from towline.bridge.config.model import AnyLine, Bridge
from towline.bridge.lines.evidence import read_checkpoint
from towline.bridge.lines.identity import IDENTITY_FILE, Identity
from towline.bridge.lines.recovery import ResumeStep, again_command, step
from towline.checkpoint import Checkpoint
from towline.errors import ConfigError
from towline.gateway.access import REMOTE
from towline.gateway.settings import ListenSettings
from towline.spark.session import shares_files

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

#: Addresses that stand for all of a machine's.
_EVERYWHERE: Final = ("0.0.0.0", "[::]")  # noqa: S104 - compared, never bound

LineT = TypeVar("LineT", bound=AnyLine)


class LineQuery(ABC, Generic[LineT]):
    """Starts the query of a line and says what its batches held."""

    #: What weakens the line's promise since its `start`, or has cost something: a line each.
    remarks: tuple[str, ...] = ()
    #: It finishes the batch that was begun, and ends.
    _finishes = False
    #: What its batches are made by, as the identity has it before there is one; "" where that has it already.
    _mapping = ""

    def __init__(self, bridge: Bridge, line: LineT) -> None:
        self.bridge = bridge
        self.line = line

    def start(self, spark: SparkSession) -> StreamingQuery:
        """Start it, once checkpoint, journal and identity belong together.

        Raises:
            TowlineError: TL-B22 to TL-B26, they do not; TL-C76 to TL-C78; others in Spark's wrapping, which
                `towline.bridge.runtime.failures.reason` reads.
            pyspark.errors.AnalysisException: For SQL that is none over the source's columns.
        """
        line, checkpoint = self.line, self._mended()
        writer, identity = self._prepared(spark)
        writer = writer.queryName(line.name).option("checkpointLocation", str(line.checkpoint))
        with _settings(spark, self._conf()):
            query = writer.trigger(**self._trigger()).start()
        try:  # a query that went on unknown to its runner would keep its successor from starting
            identity.noted(line.gateway.state_dir, query=str(query.id))
            checkpoint.sync()  # else a power failure could leave an identity without its checkpoint
        except BaseException:
            query.stop()
            raise
        return query

    def in_force(self) -> Self:
        """The query to start: by the settings of the file, or those that a batch was begun with until that is done.

        Raises:
            ConfigError: TL-C210, this version refuses the settings that a batch was begun with.
        """
        self._mended()
        identity, seen = Identity.of(self.bridge, self.line), read_checkpoint(self.line.checkpoint)
        former = self._begun(identity.mapping) if identity.mapping else None
        if former is None and identity.mapping and not seen.decided:
            what = "a batch was begun with settings that this version refuses"
            again, file = again_command(self.line, self.bridge.file), self.line.gateway.state_dir / IDENTITY_FILE
            do = f'Finish it with the version before; or set "mapping": "" in {file}, and begin again: {again}.'
            raise ConfigError("TL-C210", f'line "{self.line.name}"', what, do)
        line, mapping = self._next(identity)
        begun = former or line
        begun = begun.model_copy(update={"parallelism": identity.parallelism or begun.parallelism})
        if seen.decided or step(begun, identity, seen) is ResumeStep.CUT:  # the batch is written again, or given up
            return self._by(line, mapping)
        query = self._by(begun, "" if identity.mapping else mapping)
        if begun != line:
            query._finishes = True  # noqa: SLF001 - of its class
            sys.stderr.write(f"--- line {line.name}\nthe batch that was begun is finished by the former settings\n")
        return query

    def _by(self, line: LineT, mapping: str) -> Self:
        query = type(self)(self.bridge, line)
        query._mapping = mapping  # noqa: SLF001 - of its class
        return query

    @abstractmethod
    def _begun(self, mapping: str) -> LineT | None:
        """The line by what its last batches were begun by, as its identity has that; None where it is refused now."""

    def _next(self, identity: Identity) -> tuple[LineT, str]:  # noqa: ARG002 - an uplink's own asks
        """The line by what its next batches are begun by, and what the identity is to have of it before one is."""
        return self.line, ""

    def _mended(self) -> Checkpoint:
        """The checkpoint, without what a power failure tore."""
        checkpoint = Checkpoint(str(self.line.checkpoint))
        for repair in checkpoint.mend():
            sys.stderr.write(f"--- line {self.line.name}\n{repair}\n")
        return checkpoint

    def _trigger(self) -> dict[str, Any]:
        """When a batch begins, as `DataStreamWriter.trigger` takes it."""
        seconds = getattr(self.line, "trigger_interval_s", 0.0)  # the source of an uplink says when one begins
        return {"once": True} if self._finishes else {"processingTime": f"{seconds:g} seconds"}

    def _conf(self) -> dict[str, str]:
        """Settings of Spark for this query alone."""
        return {}

    @abstractmethod
    def _prepared(self, spark: SparkSession) -> tuple[DataStreamWriter, Identity]:
        """The query but for its name, checkpoint and trigger, and the identity that it starts with."""

    def count_spark(self, progress: Mapping[str, Any]) -> None:
        """Count what Spark alone says of a committed batch: nothing of a line where it has nothing to say.

        Raises:
            OSError, JournalError: As `towline.bridge.lines.account.add_spark_counts`.
        """

    def _gateway_options(self) -> dict[str, str]:
        """How Spark finds the line's gateway: by its socket, or over the network where tasks run on other machines."""
        gateway = self.line.gateway
        if shares_files(self.bridge.spark.master) or gateway.listen is None:
            return {"gateway": str(gateway.state_dir)}
        location = reachable(gateway.listen, self.bridge.spark.conf.get("spark.driver.host"))
        return {"gateway": location, **self.bridge.gateway.options()}


def reachable(listen: ListenSettings, host: object = None) -> str:
    """The location of a gateway of this machine, as other machines name it: by `host`, or its full name, or address."""
    place, _, port = listen.address.rpartition(":")
    if place not in _EVERYWHERE:
        return listen.location
    return f"{REMOTE}{host or socket.getfqdn()}:{port}"


@contextmanager
def _settings(spark: SparkSession, settings: Mapping[str, str]) -> Iterator[None]:
    """Settings of a query that is started meanwhile, which takes a copy of the session's; no other line has them."""
    before = {name: spark.conf.get(name, None) for name in settings}
    try:
        for name, value in settings.items():
            spark.conf.set(name, value)
        yield
    finally:
        for name, old in before.items():
            spark.conf.unset(name) if old is None else spark.conf.set(name, old)
