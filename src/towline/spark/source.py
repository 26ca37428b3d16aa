"""``format("mqtt")``: Spark's data source of messages."""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource

from towline.errors import ConfigError, without_traceback
from towline.spark.session import check_pyspark

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from towline.spark.link import ReadPlan
    from towline.spark.reader import MqttBatchReader, MqttStreamReader
    from towline.spark.sink import MqttBatchWriter, MqttStreamWriter


class MqttDataSource(DataSource):
    """Data source of messages from and to an MQTT broker, through a gateway's durable inbox and outbox.

    Options are validated here: Spark shows only errors of ``__init__`` and ``schema`` unchanged at ``load()``. All
    options are in docs/options.md.

    Raises:
        ConfigError: One line for the first error in the options, see `towline.spark.options.parse_options`.
    """

    @without_traceback
    def __init__(self, options: dict[str, str]) -> None:
        super().__init__(options)
        check_pyspark('format("mqtt")')
        if "subscribe" in {name.lower() for name in options}:  # a sink has no such option, and no call of schema()
            _ = self._plan

    @functools.cached_property
    def _plan(self) -> ReadPlan:
        from towline.spark.options import parse_options  # noqa: PLC0415 - Spark imports this module at discovery

        return parse_options(self.options)

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return "mqtt"

    @without_traceback
    def schema(self) -> str:
        """Return the columns of a message row, in the journal's order, with ``event_time`` last if it was chosen.

        Spark calls this at ``load()``, before it reads the checkpoint. So entries torn by a power failure are removed
        here.

        Raises:
            ConfigError: TL-C25, the state directory can't be used.
            JournalDamaged: TL-J21, more is torn than a power failure can tear.
        """
        from towline.checkpoint import Checkpoint  # noqa: PLC0415 - see above
        from towline.gateway.launch import prepare_state_dir  # noqa: PLC0415 - see above
        from towline.schema import DESCRIBED_SCHEMA, EVENT_TIME  # noqa: PLC0415 - see above

        plan = self._plan
        if plan.address.settings:  # a running gateway has created its directory
            prepare_state_dir(Path(plan.address.location))
        for repair in Checkpoint(plan.checkpoint).repair():
            logging.getLogger("towline.spark").warning(repair)
        event_time_column = f", {EVENT_TIME} timestamp COMMENT 'received_at, but after the watermark of the query'"
        return DESCRIBED_SCHEMA + (event_time_column if plan.event_time else "")

    @without_traceback
    def streamReader(self, schema: StructType) -> MqttStreamReader:  # noqa: N802 - Spark's name
        """Create the reader of a stream; called in two processes, so it opens no connection."""
        from towline.spark.reader import MqttStreamReader  # noqa: PLC0415 - see above

        return MqttStreamReader(self._checked_plan(schema))

    @without_traceback
    def reader(self, schema: StructType) -> MqttBatchReader:
        """Create the reader of a range of offsets."""
        from towline.spark.reader import MqttBatchReader  # noqa: PLC0415 - see above

        return MqttBatchReader(self._checked_plan(schema))

    @without_traceback
    def streamWriter(self, schema: StructType, overwrite: bool) -> MqttStreamWriter:  # noqa: ARG002, N802, FBT001 - Spark's signature
        """Create the writer of a stream; complete mode appends. See `towline.spark.sink.stream_writer` for errors."""
        from towline.spark.sink import stream_writer  # noqa: PLC0415 - see above

        return stream_writer(self.options, schema)

    @without_traceback
    def writer(self, schema: StructType, overwrite: bool) -> MqttBatchWriter:  # noqa: FBT001 - Spark's signature
        """Create the writer of a batch query. See `towline.spark.sink.batch_writer` for errors."""
        from towline.spark.sink import batch_writer  # noqa: PLC0415 - see above

        return batch_writer(self.options, schema, overwrite=overwrite)

    def _checked_plan(self, schema: StructType) -> ReadPlan:
        """Return the plan, with an error if the schema is not the source's; for a table Spark never calls `schema`."""
        from dataclasses import replace  # noqa: PLC0415 - see above

        from pyspark.sql.pandas.types import to_arrow_schema  # noqa: PLC0415 - see above

        from towline.schema import ROW_SCHEMA, TIMED_SCHEMA  # noqa: PLC0415 - see above
        from towline.spark.link import GatewayAddress, ReadPlan  # noqa: PLC0415 - see above

        try:
            plan = self._plan
        except ConfigError as error:
            return ReadPlan(GatewayAddress(""), options_error=error)
        if to_arrow_schema(schema, timezone="UTC").equals(TIMED_SCHEMA if plan.event_time else ROW_SCHEMA):
            return plan
        problem, remedy = "the schema of this source is fixed", "Remove schema() and select columns."
        return replace(plan, options_error=ConfigError("TL-C24", 'format("mqtt")', problem, remedy))
