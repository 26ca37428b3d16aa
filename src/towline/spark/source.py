"""``format("mqtt")``: the class that Spark is given."""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource

from towline.errors import ConfigError, one_line
from towline.spark.session import check_pyspark

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from towline.spark.link import ReadPlan
    from towline.spark.reader import MqttBatchReader, MqttStreamReader
    from towline.spark.sink import MqttBatchWriter, MqttStreamWriter


class MqttDataSource(DataSource):
    """Messages from and to an MQTT broker, by way of a gateway's durable inbox and outbox.

    Options are validated here, because only errors of ``__init__`` and ``schema`` come out cleanly at ``load()``;
    docs/options.md has all of them.

    Raises:
        ConfigError: One line for the first mistake in the options, see `towline.spark.options.parse_options`.
    """

    @one_line
    def __init__(self, options: dict[str, str]) -> None:
        super().__init__(options)
        check_pyspark('format("mqtt")')
        if "subscribe" in {name.lower() for name in options}:  # a sink has none, and is not asked for a schema
            _ = self._plan

    @functools.cached_property
    def _plan(self) -> ReadPlan:
        from towline.spark.options import parse_options  # noqa: PLC0415 - discovery imports this module: keep it light

        return parse_options(self.options)

    @classmethod
    def name(cls) -> str:
        """The name of the format."""
        return "mqtt"

    @one_line
    def schema(self) -> str:
        """One row a message; the same columns in the same order as the journal's, and with ``eventTime`` one more.

        Spark asks at ``load()``, before it reads the checkpoint: the place to remove what a power failure tore there.

        Raises:
            ConfigError: TL-C25, the state directory can't be used.
            JournalDamaged: TL-J21, more is torn than a power failure can tear.
        """
        from towline.checkpoint import Checkpoint  # noqa: PLC0415 - see above
        from towline.gateway.launch import usable  # noqa: PLC0415 - see above
        from towline.schema import DESCRIBED_SCHEMA, EVENT_TIME  # noqa: PLC0415 - see above

        plan = self._plan
        if plan.place.settings:  # a gateway that runs has its directory
            usable(Path(plan.place.text))
        for line in Checkpoint(plan.checkpoint).mend():
            logging.getLogger("towline.spark").warning(line)
        timed = f", {EVENT_TIME} timestamp COMMENT 'received_at, and never before the watermark of the query'"
        return DESCRIBED_SCHEMA + (timed if plan.event_time else "")

    @one_line
    def streamReader(self, schema: StructType) -> MqttStreamReader:  # noqa: N802 - Spark's name
        """Make the reader of a stream; called in two processes, so nothing connects."""
        from towline.spark.reader import MqttStreamReader  # noqa: PLC0415 - see above

        return MqttStreamReader(self._fitted(schema))

    @one_line
    def reader(self, schema: StructType) -> MqttBatchReader:
        """Make the reader of a range of offsets."""
        from towline.spark.reader import MqttBatchReader  # noqa: PLC0415 - see above

        return MqttBatchReader(self._fitted(schema))

    @one_line
    def streamWriter(self, schema: StructType, overwrite: bool) -> MqttStreamWriter:  # noqa: ARG002, N802, FBT001 - Spark's signature
        """Make the writer of a stream; complete mode appends. See `towline.spark.sink.stream_writer` for errors."""
        from towline.spark.sink import stream_writer  # noqa: PLC0415 - see above

        return stream_writer(self.options, schema)

    @one_line
    def writer(self, schema: StructType, overwrite: bool) -> MqttBatchWriter:  # noqa: FBT001 - Spark's signature
        """Make the writer of a batch query. See `towline.spark.sink.batch_writer` for errors."""
        from towline.spark.sink import batch_writer  # noqa: PLC0415 - see above

        return batch_writer(self.options, schema, overwrite=overwrite)

    def _fitted(self, schema: StructType) -> ReadPlan:
        """The plan, or why it is refused; of a table Spark makes a source without having asked for its schema."""
        from dataclasses import replace  # noqa: PLC0415 - see above

        from pyspark.sql.pandas.types import to_arrow_schema  # noqa: PLC0415 - see above

        from towline.schema import ROW_SCHEMA, TIMED_SCHEMA  # noqa: PLC0415 - see above
        from towline.spark.link import GatewayPlace, ReadPlan  # noqa: PLC0415 - see above

        try:
            plan = self._plan
        except ConfigError as error:
            return ReadPlan(GatewayPlace(""), refused=error)
        if to_arrow_schema(schema, timezone="UTC").equals(TIMED_SCHEMA if plan.event_time else ROW_SCHEMA):
            return plan
        what, do = "the schema of this source is fixed", "Leave out schema() and select columns."
        return replace(plan, refused=ConfigError("TL-C24", 'format("mqtt")', what, do))
