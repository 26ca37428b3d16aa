"""Resources for a load: gateways, disks, Spark cores, partitions, calculated from figures of ``benchmarks``. Pure.

Each constant names the benchmark that measured it; the machine had 2 shared cores (docs/benchmarks.md). A faster one
needs less. The plan leaves half of a gateway and of a core free for the time after an outage, when the backlog is
delivered beside the new messages.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from towline.guarantee import Guarantee, policy

#: Messages a second that one gateway drains, by QoS (``intake``); it is one process with one busy thread.
_GATEWAY_RATE: Final = {0: 308_000, 1: 308_000, 2: 103_000}
#: Microseconds of CPU that a message costs a gateway, by QoS, intake and serving to Spark (``profile``) ...
_GATEWAY_US: Final = {0: 2.0, 1: 2.0, 2: 4.0}
#: ... and those that a chunk costs it, which has one message at low rates and hundreds at high ones (``intake``, live:
#: 18 and 27 us a message at 5,000 a second, in chunks of 15).
_CHUNK_US: Final = {0: 240.0, 1: 240.0, 2: 345.0}
#: Chunks a second, at most: a gateway waits 3 ms for more (docs/adr/0028).
_CHUNKS_PER_S: Final = 330
#: Microseconds of a message in Spark: the JVM's and the Python workers' (``profile``), and with SQL for each message.
_SPARK_US: Final = {False: 3.2, True: 6.2}
#: Of which this much falls in the one process that writes a part of a batch (``profile``).
_WRITER_US: Final = 2.2
#: Microseconds of a message in Mosquitto's one thread: to take it in from a device with a connection of its own, and to
#: deliver it to a gateway, by QoS (``intake``).
_BROKER_RECEIVE_US: Final = {0: 10.4, 1: 10.4, 2: 14.0}
_BROKER_SEND_US: Final = {0: 3.1, 1: 3.1, 2: 9.5}
#: Bytes of topic, payload and properties above which more has to be expected: the figures are of payloads of 150 B.
_MEASURED_PAYLOAD_LIMIT: Final = 1000
#: Bytes on disk beside topic, payload and properties: of a row, and of a frame, which holds a chunk (``space``).
_ROW_BYTES: Final = 75
_FRAME_BYTES: Final = 1300
#: Bytes of disk that a journal needs besides: the segment that is written and one that is not removed yet, and the room
#: that is left free (`towline.journal.Limits`).
_RESERVE_BYTES: Final = (2 * 64 + 512) << 20
#: Part of a gateway, of a core and of a writer that the plan uses; the rest carries what waits after an outage.
_TARGET_UTILIZATION: Final = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Message load of a line.

    Attributes:
        rate: Messages per second in the busiest minutes.
        property_bytes: Bytes of user properties, names and values.
        outage_min: Minutes of an outage of Kafka or Spark that the gateways must bridge.
        sql: Messages need SQL: a ``where``, fields or a dedupe key. Several writers need it anyway.
    """

    rate: float
    payload_bytes: int = 150
    topic_bytes: int = 40
    property_bytes: int = 0
    outage_min: float = 60.0
    guarantee: Guarantee = Guarantee.AT_LEAST_ONCE
    sql: bool = False

    @property
    def message_bytes(self) -> int:
        """Bytes of topic, payload and properties."""
        return self.payload_bytes + self.topic_bytes + self.property_bytes


@dataclass(frozen=True, slots=True)
class Requirement:
    """Required amount of one resource.

    Attributes:
        unit: Unit of the amount; "" for a count.
        basis: Figures that it was calculated from, in words.
    """

    resource: str
    amount: float
    unit: str
    basis: str


def requirements(load: Load) -> list[Requirement]:
    """Return the resources that a load requires, in the order of setting them up."""
    rate, qos, size = load.rate, policy(load.guarantee).qos, load.message_bytes
    receive_us, send_us = _BROKER_RECEIVE_US[qos], _BROKER_SEND_US[qos]
    brokers = max(1, math.ceil(rate * (receive_us + send_us) / 1e6 / _TARGET_UTILIZATION))
    gateway_rate, writer_rate = _GATEWAY_RATE[qos] * _TARGET_UTILIZATION, 1e6 / _WRITER_US * _TARGET_UTILIZATION
    gateways, writers = max(brokers, math.ceil(rate / gateway_rate)), max(1, math.ceil(rate / writer_rate))
    sql = load.sql or writers > 1
    cores = max(1, math.ceil(rate * _SPARK_US[sql] / 1e6 / _TARGET_UTILIZATION))
    spark_basis = f"{rate:,.0f} msg/s at {_SPARK_US[sql]:g} us{' with SQL' if sql else ''}, half of each core free"
    costs = f"{receive_us:g} + {send_us:g} us"
    broker_basis = f"{rate:,.0f} msg/s at {costs} in and out of its one thread, half of that free"
    gateway_basis = f"one for each Mosquitto; {gateway_rate:,.0f} msg/s are half of what one drains with QoS {qos}"
    return [
        Requirement("Mosquittos", brokers, "", broker_basis),
        Requirement("gateways", gateways, "", gateway_basis),
        *_gateway_requirements(load, gateways),
        Requirement("Spark cores", cores, "", spark_basis),
        Requirement(
            "parallelism", writers, "", f"writers of a batch; {writer_rate:,.0f} msg/s each, half of their time free"
        ),
        Requirement(
            "Kafka partitions", 6 * math.ceil(writers / 6), "", "a multiple of 6, at least one for each writer"
        ),
        Requirement("writes into Kafka", rate * size / 1e6, "MB/s", f"{rate:,.0f} msg/s with {size:,} B, uncompressed"),
    ]


def large_payload_warning(load: Load) -> str:
    """Return a warning if messages are larger than those measured; "" if not."""
    size = load.message_bytes
    warning = f"The figures are of payloads of 150 B; with {size:,} B a message more than that has to be expected."
    return warning if size > _MEASURED_PAYLOAD_LIMIT else ""


def journal_bytes_per_s(rate: float, content_bytes_per_s: float) -> float:
    """Return the growth of a gateway's journal in bytes per second while nothing is committed.

    Args:
        rate: Messages per second.
        content_bytes_per_s: Bytes of topics, payloads and properties per second.
    """
    return content_bytes_per_s + rate * _ROW_BYTES + min(rate, _CHUNKS_PER_S) * _FRAME_BYTES


def _gateway_requirements(load: Load, gateways: int) -> list[Requirement]:
    rate, qos = load.rate / gateways, policy(load.guarantee).qos
    chunks = min(rate, _CHUNKS_PER_S)
    cpu = (rate * _GATEWAY_US[qos] + chunks * _CHUNK_US[qos]) / 1e6
    row_bytes = load.message_bytes + _ROW_BYTES
    write_bytes_per_s = journal_bytes_per_s(rate, rate * load.message_bytes)
    backlog_bytes = write_bytes_per_s * load.outage_min * 60
    return [
        Requirement(
            "CPU of a gateway", cpu, "cores", f"{rate:,.0f} msg/s at {_GATEWAY_US[qos]:g} us, {chunks:,.0f} chunks/s"
        ),
        Requirement(
            "disk of a gateway",
            (backlog_bytes + _RESERVE_BYTES) / 1e9,
            "GB",
            f"{load.outage_min:g} min of {rate:,.0f} msg/s with {row_bytes:,} B; 0.7 GB for segments and reserve",
        ),
        Requirement("writes of a gateway", write_bytes_per_s / 1e6, "MB/s", f"and {chunks:,.0f} fdatasync a second"),
    ]
