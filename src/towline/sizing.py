"""What a load needs: gateways, disks, Spark cores and partitions, from figures measured by ``benchmarks``. Pure.

Each constant names the benchmark that measured it; the machine had 2 shared cores (docs/benchmarks.md). A faster one
needs less. The plan leaves half of a gateway, and of a core, for the time after an outage: what waits has to be carried
while as much comes in.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from towline.guarantee import Guarantee, policy

#: Messages a second that one gateway drains, by QoS (``intake``); it is one process with one busy thread.
_DRAINED_PER_S: Final = {0: 308_000, 1: 308_000, 2: 103_000}
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
_TAKEN_IN_US: Final = {0: 10.4, 1: 10.4, 2: 14.0}
_DELIVERED_US: Final = {0: 3.1, 1: 3.1, 2: 9.5}
#: Bytes of topic, payload and properties above which more has to be expected: the figures are of payloads of 150 B.
_SMALL_BYTES: Final = 1000
#: Bytes on disk beside topic, payload and properties: of a row, and of a frame, which holds a chunk (``space``).
_ROW_BYTES: Final = 75
_FRAME_BYTES: Final = 1300
#: Bytes of disk that a journal needs besides: the segment that is written and one that is not removed yet, and the room
#: that is left free (`towline.journal.Limits`).
_BESIDE_BYTES: Final = (2 * 64 + 512) << 20
#: Part of a gateway, of a core and of a writer that the plan uses; the rest carries what waits after an outage.
_USED: Final = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is to be carried.

    Attributes:
        rate: Messages a second, in the busiest minutes.
        property_bytes: Of its user properties, names and values.
        outage_min: Minutes that Kafka or Spark may be away while nothing stops.
        sql: Messages need SQL: a ``where``, fields or a dedupe key. A load with several writers does in any case.
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
        """Topic, payload and properties."""
        return self.payload_bytes + self.topic_bytes + self.property_bytes


@dataclass(frozen=True, slots=True)
class Need:
    """One line of the answer.

    Attributes:
        unit: Of the amount; "" for a count.
    """

    what: str
    amount: float
    unit: str
    because: str


def needs(load: Load) -> list[Need]:
    """What a load needs, in the order in which one would set it up."""
    rate, qos, size = load.rate, policy(load.guarantee).qos, load.message_bytes
    taken, delivered = _TAKEN_IN_US[qos], _DELIVERED_US[qos]
    mosquittos = max(1, math.ceil(rate * (taken + delivered) / 1e6 / _USED))
    drained, written = _DRAINED_PER_S[qos] * _USED, 1e6 / _WRITER_US * _USED
    gateways, writers = max(mosquittos, math.ceil(rate / drained)), max(1, math.ceil(rate / written))
    sql = load.sql or writers > 1
    cores = max(1, math.ceil(rate * _SPARK_US[sql] / 1e6 / _USED))
    how = f"{rate:,.0f} msg/s at {_SPARK_US[sql]:g} us{' with SQL' if sql else ''}, half of each core free"
    served = f"{rate:,.0f} msg/s at {taken:g} + {delivered:g} us in and out of its one thread, half of that free"
    shared = f"one for each Mosquitto; {drained:,.0f} msg/s are half of what one drains with QoS {qos}"
    return [
        Need("Mosquittos", mosquittos, "", served),
        Need("gateways", gateways, "", shared),
        *_of_one_gateway(load, gateways),
        Need("Spark cores", cores, "", how),
        Need("parallelism", writers, "", f"writers of a batch; {written:,.0f} msg/s each, half of their time free"),
        Need("Kafka partitions", 6 * math.ceil(writers / 6), "", "a multiple of 6, at least one for each writer"),
        Need("writes into Kafka", rate * size / 1e6, "MB/s", f"{rate:,.0f} msg/s with {size:,} B, uncompressed"),
    ]


def caution(load: Load) -> str:
    """What `needs` does not know about a load; "" for nothing."""
    size = load.message_bytes
    more = f"The figures are of payloads of 150 B; with {size:,} B a message more than that has to be expected."
    return more if size > _SMALL_BYTES else ""


def journal_bytes_s(rate: float, content_bytes_s: float) -> float:
    """Bytes a second that a gateway's journal grows by while nothing is committed.

    Of so many messages a second, with so many bytes of topics, payloads and properties.
    """
    return content_bytes_s + rate * _ROW_BYTES + min(rate, _CHUNKS_PER_S) * _FRAME_BYTES


def _of_one_gateway(load: Load, gateways: int) -> list[Need]:
    rate, qos = load.rate / gateways, policy(load.guarantee).qos
    chunks = min(rate, _CHUNKS_PER_S)
    cpu = (rate * _GATEWAY_US[qos] + chunks * _CHUNK_US[qos]) / 1e6
    row = load.message_bytes + _ROW_BYTES
    written = journal_bytes_s(rate, rate * load.message_bytes)
    waiting = written * load.outage_min * 60
    return [
        Need("CPU of a gateway", cpu, "cores", f"{rate:,.0f} msg/s at {_GATEWAY_US[qos]:g} us, {chunks:,.0f} chunks/s"),
        Need(
            "disk of a gateway",
            (waiting + _BESIDE_BYTES) / 1e9,
            "GB",
            f"{load.outage_min:g} min of {rate:,.0f} msg/s with {row:,} B; 0.7 GB for segments and reserve",
        ),
        Need("writes of a gateway", written / 1e6, "MB/s", f"and {chunks:,.0f} fdatasync a second"),
    ]
