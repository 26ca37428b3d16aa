"""Spark query of a line in either direction, as the driver starts it."""

from __future__ import annotations

import socket
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Generic, Self, TypeVar

from towline.bridge.config.model import AnyLine, Bridge
from towline.bridge.config.tables import DEFAULT_BATCH_BYTES
from towline.bridge.lines.identity import IDENTITY_FILE, Identity
from towline.bridge.lines.recovery import ResumeStep, reset_command, resume_step
from towline.checkpoint import Checkpoint
from towline.errors import ConfigError
from towline.gateway.access import REMOTE_SCHEME
from towline.gateway.settings import ListenSettings
from towline.spark.session import shares_files

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

_ARROW_BYTES_SETTING: Final = "spark.sql.execution.arrow.maxBytesPerBatch"
#: Addresses for all interfaces.
_WILDCARD_HOSTS: Final = ("0.0.0.0", "[::]")  # noqa: S104 - compared, never bound

LineT = TypeVar("LineT", bound=AnyLine)


class LineQuery(ABC, Generic[LineT]):
    """Query of a line: start, and counts of its batches.

    Args:
        bridge: The bridge.
        line: The line, with the settings of its next batch.
        mapping: Mapping of its batches, to be saved in the identity before the first one; "" if it is saved already.
        finish_only: Whether the query completes the unfinished batch, and ends.
    """

    #: Whether the settings of batches are not needed any more when all are committed.
    _forgets_settings = True
    #: Notes on what weakened the guarantee, or was lost, since `start`.
    remarks: tuple[str, ...] = ()

    def __init__(self, bridge: Bridge, line: LineT, mapping: str = "", *, finish_only: bool = False) -> None:
        self.bridge = bridge
        self.line = line
        self._mapping, self._finish_only = mapping, finish_only

    def start(self, spark: SparkSession) -> StreamingQuery:
        """Start the query, once checkpoint, journal and identity match.

        Raises:
            TowlineError: TL-B22 to TL-B26, they do not; TL-B03, TL-B06, topics of a downlink are missing, recreated, or
                deleted with unread records; TL-C77; others in Spark's wrapping, which
                `towline.bridge.runtime.failures.failure_reason` reads.
            pyspark.errors.AnalysisException: The SQL is invalid over the source's columns.
        """
        line, checkpoint = self.line, self._repaired_checkpoint()
        writer, identity = self._prepare_writer(spark)
        writer = writer.queryName(line.name).option("checkpointLocation", str(line.checkpoint))
        spark.conf.set(_ARROW_BYTES_SETTING, str(self._max_arrow_bytes()))  # a query copies the session's settings
        query = writer.trigger(**self._trigger()).start()
        try:  # a query unknown to its runner would block the next start
            identity.update(line.gateway.state_dir, query=str(query.id))
            checkpoint.sync()  # else a power failure could leave an identity without its checkpoint
        except BaseException:
            query.stop()
            raise
        return query

    def query_to_start(self) -> Self:
        """Return the query to start: with the file's settings, or, until it is committed, with an unfinished batch's.

        Raises:
            ConfigError: TL-C210, this version refuses the settings of the last batches, which are still needed.
        """
        identity, checkpoint = Identity.of_line(self.bridge, self.line), self._repaired_checkpoint()
        former_line = self._line_of_last_batch(identity.mapping) if identity.mapping else None
        if former_line is None and identity.mapping and not (checkpoint.all_committed and self._forgets_settings):
            problem = "a batch was begun, or messages wait, with settings that this version refuses"
            command, file = reset_command(self.line, self.bridge.file), self.line.gateway.state_dir / IDENTITY_FILE
            remedy = f'Finish them with its version; or set "mapping": "" in {file}, and reset the line: {command}.'
            raise ConfigError("TL-C210", f'line "{self.line.name}"', problem, remedy)
        line, mapping = self._line_of_next_batch(identity)
        last_line = former_line or line
        last_line = last_line.model_copy(update={"parallelism": identity.parallelism or last_line.parallelism})
        # With a new checkpoint the batch is rewritten, or dropped.
        if checkpoint.all_committed or resume_step(last_line, identity, checkpoint) is ResumeStep.NEW_CHECKPOINT:
            return type(self)(self.bridge, line, mapping)
        if finish_only := last_line != line:
            sys.stderr.write(f"--- line {line.name}\nthe unfinished batch is completed with the former settings\n")
        return type(self)(self.bridge, last_line, "" if identity.mapping else mapping, finish_only=finish_only)

    @abstractmethod
    def _line_of_last_batch(self, mapping: str) -> LineT | None:
        """Return the line with the settings of its last batches, from its identity; None if they are refused now."""

    @abstractmethod
    def _line_of_next_batch(self, identity: Identity) -> tuple[LineT, str]:
        """Return the line with the settings of its next batches, and the mapping to save in its identity before."""

    def _repaired_checkpoint(self) -> Checkpoint:
        """Return the checkpoint, with files repaired that a power failure damaged."""
        checkpoint = Checkpoint(str(self.line.checkpoint))
        for repair in checkpoint.repair():
            sys.stderr.write(f"--- line {self.line.name}\n{repair}\n")
        return checkpoint

    def _trigger(self) -> dict[str, Any]:
        """Return the arguments of `DataStreamWriter.trigger`."""
        seconds = getattr(self.line, "trigger_interval_s", 0.0)  # the source of an uplink decides
        return {"once": True} if self._finish_only else {"processingTime": f"{seconds:g} seconds"}

    def _max_arrow_bytes(self) -> object:
        """Return the maximum size of an Arrow batch for a Python task of this query, in bytes or as Spark has it."""
        return self.bridge.spark.conf.get(_ARROW_BYTES_SETTING, DEFAULT_BATCH_BYTES)

    @abstractmethod
    def _prepare_writer(self, spark: SparkSession) -> tuple[DataStreamWriter, Identity]:
        """Return the query's writer without name, checkpoint and trigger, and the identity that it starts with."""

    def count_spark(self, progress: Mapping[str, Any]) -> None:
        """Add the counts that only Spark has of a committed batch; by default there are none.

        Raises:
            JournalError: As `towline.bridge.lines.account.add_spark_counts`.
        """

    def _gateway_options(self) -> dict[str, str]:
        """Return the Spark options of the gateway's endpoint: socket, or address for tasks on other machines."""
        gateway = self.line.gateway
        if shares_files(self.bridge.spark.master) or gateway.listen is None:
            return {"gateway": str(gateway.state_dir)}
        location = network_location(gateway.listen, self.bridge.spark.conf.get("spark.driver.host"))
        return {"gateway": location, **self.bridge.gateway.spark_options()}


def network_location(listen: ListenSettings, host: object = None) -> str:
    """Return the location of a gateway of this machine for other machines: by `host`, its full name, or its address."""
    listen_host, _, port = listen.address.rpartition(":")
    if listen_host not in _WILDCARD_HOSTS:
        return listen.location
    return f"{REMOTE_SCHEME}{host or socket.getfqdn()}:{port}"
