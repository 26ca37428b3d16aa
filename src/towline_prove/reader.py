"""Reads a Kafka topic back with foreign code: a plain confluent-kafka consumer, or kcat in another process."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from towline.errors import KafkaError as TowlineKafkaError
from towline.errors import SetupError
from towline.kafka.admin import KafkaAdmin, watermarks
from towline_prove.referee import Arrival

__all__ = ["Tail", "read_topic"]

_CHUNK = 10_000


class Tail:
    """Follows all partitions of a topic from their beginning, read_committed, without a group.

    Args:
        bootstrap: Kafka's bootstrap servers.
        topic: The topic; it must exist.
        timeout: Seconds to wait for Kafka's metadata.
        isolation: ``read_committed`` shows what is committed; the other shows aborted transactions too.
        from_now: Leave out what the topic holds already.

    Raises:
        KafkaError: Kafka does not answer or the topic does not exist (TL-K60).
    """

    def __init__(
        self,
        bootstrap: str,
        topic: str,
        *,
        timeout: float = 10.0,
        isolation: Literal["read_committed", "read_uncommitted"] = "read_committed",
        from_now: bool = False,
    ) -> None:
        self._topic = topic
        self._settings: dict[str, Any] = {
            "bootstrap.servers": bootstrap,
            "group.id": "towline-prove-reader",  # the client demands one; nothing is ever committed to it
            "enable.auto.commit": False,
            "auto.offset.reset": "error",  # the default goes on at the end, and leaves out what lies between
            "isolation.level": isolation,
            "enable.partition.eof": True,
            "fetch.wait.max.ms": 10,
            "log_level": 0,
        }
        self._consumer = Consumer(self._settings)
        try:
            self._ends: dict[int, bool] = dict.fromkeys(self._partitions(timeout), False)
            #: Partition -> the offset that is read next; never descending.
            self._next = {number: self._borders(number)[from_now] for number in self._ends}
        except TowlineKafkaError:
            self.close()
            raise
        #: Partitions that the client stopped reading: Kafka did not know the offset it asked for.
        self._stopped: set[int] = set()
        self._assign()

    def _assign(self) -> None:
        """Read on from where everything so far ends."""
        self._stopped.clear()
        self._consumer.assign([TopicPartition(self._topic, number, offset) for number, offset in self._next.items()])

    def _borders(self, partition: int) -> tuple[int, int]:
        try:
            return watermarks(self._consumer, TopicPartition(self._topic, partition), 10)
        except KafkaException as error:
            raise self._unreadable(error, "Is Kafka running?") from error

    def _unreadable(self, why: object, do: str) -> TowlineKafkaError:
        return TowlineKafkaError("TL-K60", self._topic, f"cannot be read back ({why})", do)

    def _partitions(self, timeout: float) -> list[int]:
        try:
            description = self._consumer.list_topics(self._topic, timeout=timeout).topics[self._topic]
        except KafkaException as error:
            raise self._unreadable(error, "Is Kafka running?") from error
        if description.error is not None:
            raise self._unreadable(description.error, "Create the topic first.")
        return sorted(description.partitions)

    def pull(self, seconds: float) -> list[Arrival]:
        """Read for at most this long, or up to the first moment with every partition at its end.

        Raises:
            KafkaError: Records were deleted before they were read (TL-K60).
        """
        deadline = time.monotonic() + seconds
        arrivals: list[Arrival] = []
        self._ends = dict.fromkeys(self._ends, False)
        self._go_on()
        while not all(self._ends.values()) and (left := deadline - time.monotonic()) > 0:
            for message in self._consumer.consume(_CHUNK, timeout=min(left, 0.1)):
                self._take(message, arrivals)
        return arrivals

    def _go_on(self) -> None:
        """Read on where the client stopped; it stops too when a leader has just changed, and has all there is."""
        if not self._stopped:
            return
        for partition in sorted(self._stopped):
            try:
                first, _ = self._borders(partition)
            except TowlineKafkaError:
                return  # Kafka is away: the next pull asks again
            if self._next[partition] < first:
                what = f"partition {partition}: records {self._next[partition]} to {first - 1} were deleted unread"
                raise TowlineKafkaError("TL-K60", self._topic, what, "Keep records for longer (retention.ms).")
        self._assign()

    def next(self, seconds: float) -> Arrival | None:
        """Wait for one record and hand it out at once; None when there is none in time."""
        self._go_on()
        message = self._consumer.poll(seconds)
        arrivals: list[Arrival] = []
        if message is not None:
            self._take(message, arrivals)
        return arrivals[0] if arrivals else None

    @property
    def at_end(self) -> bool:
        """Whether the last `pull` reached the end of every partition."""
        return all(self._ends.values())

    def _take(self, message: Any, arrivals: list[Arrival]) -> None:
        error = message.error()
        if error is None:
            self._ends[message.partition()] = False
            self._next[message.partition()] = message.offset() + 1
            arrivals.append(
                Arrival(message.partition(), message.offset(), message.key(), message.value(), message.timestamp()[1])
            )
        elif error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001 - the binding's public name for it
            self._ends[message.partition()] = True
        elif error.code() == KafkaError._AUTO_OFFSET_RESET:  # noqa: SLF001
            self._stopped.add(message.partition())

    def until(self, enough: Callable[[list[Arrival]], bool], *, seconds: float) -> list[Arrival]:
        """Read until the condition holds for everything found so far, or time is up."""
        deadline = time.monotonic() + seconds
        arrivals: list[Arrival] = []
        while (left := deadline - time.monotonic()) > 0:
            arrivals += self.pull(min(left, 1.0))
            if enough(arrivals):
                break
            time.sleep(0.05)
        return arrivals

    def reopen(self) -> str:
        """Read on with a new client, for one that may be stuck; says where that is, for the account's notes."""
        self.close()
        self._consumer = Consumer(self._settings)
        self._assign()
        return f"{self._topic} is read on with a new client, from {self._next}"

    def close(self) -> None:
        """Leave Kafka."""
        self._consumer.close()


def read_topic(
    bootstrap: str, topic: str, *, seconds: float = 60.0, reader: Literal["confluent", "kcat"] = "confluent"
) -> list[Arrival]:
    """Read everything a topic holds now; waits up to 10 s for transactions that are being decided.

    Raises:
        KafkaError: Kafka does not answer (TL-K01), or it cannot be read to its end within the time (TL-K60).
        SetupError: kcat was asked for and is not installed (TL-S60).
    """
    KafkaAdmin(bootstrap).settled(topic)
    if reader == "kcat":
        return list(_kcat(bootstrap, topic, seconds))
    tail = Tail(bootstrap, topic)
    try:
        arrivals = tail.pull(seconds)
        if not tail.at_end:
            raise TowlineKafkaError(
                "TL-K60", topic, f"its end was not reached in {seconds:g} s", "Is Kafka overloaded?"
            )
        return arrivals
    finally:
        tail.close()


def _kcat(bootstrap: str, topic: str, seconds: float) -> Iterator[Arrival]:
    program = shutil.which("kcat") or shutil.which("kafkacat")
    if program is None:
        raise SetupError("TL-S60", "kcat", "not installed", "apt-get install kcat, or use the reader confluent.")
    command = [program, "-C", "-q", "-e", "-b", bootstrap, "-t", topic, "-o", "beginning"]
    command += ["-X", "isolation.level=read_committed", "-f", "%p %o %T %K %S %k%s\n"]
    done = subprocess.run(command, capture_output=True, timeout=seconds, check=False)
    if done.returncode:
        raise TowlineKafkaError("TL-K60", topic, f"kcat: {done.stderr.decode().strip()[-200:]}", "Is Kafka running?")
    yield from sorted(_split(done.stdout))


def _split(out: bytes) -> Iterator[Arrival]:
    """Cut kcat's output by its announced lengths, so that a payload may hold anything."""
    at = 0
    while at < len(out):
        *numbers, _ = out[at : at + 80].split(b" ", 5)
        partition, offset, timestamp, key_size, value_size = map(int, numbers)
        start = at + sum(len(number) + 1 for number in numbers)
        key_end = start + max(0, key_size)
        end = key_end + max(0, value_size)
        key = out[start:key_end] if key_size >= 0 else None
        yield Arrival(partition, offset, key, out[key_end:end] if value_size >= 0 else None, timestamp)
        at = end + 1
