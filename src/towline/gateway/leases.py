"""Who reads under which consumer name: one living reader each [I8]; a reader out of sight sends signs of life."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

from towline.errors import Fenced, GatewayError
from towline.processes import ProcessMark
from towline.threads import guarded_thread

#: Seconds between two signs. A batch may take longer than any lease, and Spark asks for nothing meanwhile.
BEAT_S: Final = 10
#: A reader on another host, or in another container, whose pid can't be seen, is taken for dead after so many seconds
#: without a call: three of its signs of life.
FOREIGN_LEASE_S = 3 * BEAT_S


@dataclass(slots=True)
class _Lease:
    token: str = field(repr=False)
    holder: ProcessMark
    since: str
    seen: float


class Leases:
    """The readers of one gateway.

    A lease ends when it is released, when its holder's process is gone, or when its holder on another host has not
    called for `FOREIGN_LEASE_S`. The next reader then gets a new lease and the old one is refused for ever.
    """

    def __init__(self, where: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._where = where
        self._clock = clock
        self._held: dict[str, _Lease] = {}
        self._lock = threading.Lock()

    def open(self, consumer: str, holder: ProcessMark) -> str:
        """Hand out the lease of a consumer.

        Args:
            consumer: Its name.
            holder: Who reads.

        Raises:
            Fenced: TL-G03 while another living process holds it.
        """
        lease = _Lease(secrets.token_hex(8), holder, now_text(), self._clock())
        with self._lock:
            held = self._held.get(consumer)
            if not held or held.holder == holder or self._ended(held):
                self._held[consumer] = lease
                return lease.token
        raise Fenced(
            "TL-G03",
            self._where,
            f'the process with pid {held.holder.pid} on {held.holder.host} reads as consumer "{consumer}" '
            f"since {held.since}",
            'Give each query an option "consumer" of its own, or write both outputs in one foreachBatch, to Kafka '
            'with the option "batchId"; if that query has ended, stop its process.',
        )

    def check(self, consumer: str, token: str) -> None:
        """See that a lease is the newest one.

        Raises:
            Fenced: TL-G07 for a lease that was taken over, or that this gateway never gave.
        """
        held = self._held.get(consumer)
        if held is None or held.token != token:
            raise Fenced(
                "TL-G07",
                self._where,
                f'this reader no longer holds the consumer "{consumer}"',
                "A newer reader took over or the gateway was started again; nothing is lost. Start the query again "
                "if it is still wanted.",
            )
        held.seen = self._clock()

    def release(self, consumer: str, token: str) -> bool:
        """Give a lease back; a stale one is left alone."""
        with self._lock:
            held = self._held.get(consumer)
            if held is None or held.token != token:
                return False
            del self._held[consumer]
            return True

    def readers(self) -> dict[str, dict[str, object]]:
        """Say who reads, by consumer."""
        return {
            name: {"pid": lease.holder.pid, "host": lease.holder.host, "since": lease.since}
            for name, lease in sorted(self._held.copy().items())
            if not self._ended(lease)
        }

    def _ended(self, lease: _Lease) -> bool:
        foreign = lease.holder.host != ProcessMark.of(os.getpid()).host
        return lease.holder.gone() or (foreign and self._clock() - lease.seen > FOREIGN_LEASE_S)


def now_text() -> str:
    """UTC now, ISO 8601 with seconds."""
    return datetime.now(UTC).isoformat(timespec="seconds")


class Heartbeat:
    """Calls on a thread of its own until it is stopped, or the lease is somebody else's.

    Args:
        sign: One sign; a gateway that does not answer is asked again with the next.
    """

    def __init__(self, sign: Callable[[], object]) -> None:
        self._sign = sign
        self._stopped = threading.Event()
        guarded_thread(self._beat, "heartbeat", again_s=BEAT_S).start()

    def stop(self) -> None:
        """Send no more."""
        self._stopped.set()

    def _beat(self) -> None:
        while not self._stopped.wait(BEAT_S):
            try:
                self._sign()
            except Fenced:
                return  # the next call of the reader says so
            except GatewayError:
                continue
