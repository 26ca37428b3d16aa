"""A reader's hold on one gateway: connection and lease, kept over restarts of the gateway; in the runner only."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

from towline.errors import Fenced, GatewayError, GatewayUnreachable, TowlineError
from towline.spark.absence import is_absence

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from towline.gateway.client import GatewayClient, Lease, Window
    from towline.spark.link import GatewayPlace
    from towline.spark.offsets import JournalPlace

__all__ = ["TAKEOVER_S", "GatewayHold", "foreign"]

#: How long a new reader waits for the one before it to end, in seconds: a stopped query's process needs a moment.
TAKEOVER_S = 5.0


class GatewayHold:
    """A lease on a consumer of one gateway.

    Args:
        place: Where the gateway is.
        consumer: Name under which rows are committed.
        met: Called with the gateway's name and the id of its journal before a lease is taken; what it raises keeps the
            lease from being taken.
    """

    def __init__(self, place: GatewayPlace, consumer: str, met: Callable[[str, str], None] | None = None) -> None:
        self.place = place
        self._consumer = consumer
        self._met = met
        self._client: GatewayClient | None = None
        self._lease: Lease | None = None
        #: A second lease would take the first one over: one thread at a time takes one, and none after `release`.
        self._opening = threading.Lock()
        self._released = threading.Event()

    def lease(self) -> Lease:
        """The lease; connects, and starts the gateway where that is ours to do, at the first call.

        Raises:
            Fenced: TL-G03 when another living reader has it.
            GatewayUnreachable: No gateway answers.
        """
        with self._opening:
            if self._released.is_set():
                raise self._gone()
            if self._lease is None:
                client = self._client = self._client or self.place.connect()
                with self._renewed_after(client):
                    if self._met:
                        status = client.status()
                        self._met(str(status["name"]), str(status["journal"]))
                    lease = self._lease = client.open(self._consumer, patience_s=TAKEOVER_S)
                if self._released.is_set():  # while it was being taken
                    self.release()
                    raise self._gone()
                return lease
            return self._lease

    def wait(
        self,
        here: JournalPlace,
        safe: int,
        *,
        timeout_s: float,
        max_rows: int | None,
        max_bytes: int | None,
        several: bool = False,
    ) -> Window:
        """Commit up to ``safe`` and wait for more than ``here``; arguments are those of `GatewayClient.wait`.

        Args:
            here: End of the last batch in the commit log.
            safe: Up to where that is durable.
            timeout_s: Longest wait, in seconds.
            max_rows: Most rows.
            max_bytes: Most bytes.
            several: Whether it is one of several: their windows have a size.

        Raises:
            Fenced: TL-G04 when the gateway serves another journal; as `GatewayClient.wait`.
            GatewayUnreachable: No gateway answers; the next call connects again.
        """
        lease = self.lease()
        if here.journal != lease.journal:
            raise foreign(here, lease.journal)
        client = self._connected()
        try:
            with self._renewed_after(client):
                return client.wait(
                    lease,
                    here.offset,
                    timeout_s=timeout_s,
                    max_rows=max_rows,
                    max_bytes=max_bytes,
                    safe=safe,
                    incarnation=here.incarnation,
                    sized=several,
                )
        except Fenced as error:
            if error.code == "TL-G07" and not _gave(client.status(), lease):
                self.drop(client)  # not taken over: the gateway was started again and knows no leases
                raise GatewayUnreachable(error.code, error.where, error.what, error.do) from error
            raise

    def incarnation(self, offset: int) -> str:
        """Which opening of the journal wrote the row below ``offset``.

        Raises:
            GatewayUnreachable: No gateway answers; the next call connects again.
        """
        self.lease()
        client = self._connected()
        with self._renewed_after(client):
            return client.incarnation(offset)

    def tickets(self, journal: str, ranges: Sequence[tuple[int, int]], incarnations: Sequence[str]) -> list[str]:
        """What lets workers in to read ranges of a gateway on a network; "" for each of a local one.

        Raises:
            GatewayUnreachable: No gateway answers; the next call connects again.
        """
        self.lease()
        client = self._connected()
        with self._renewed_after(client):
            return self.place.tickets(client, journal, ranges, incarnations)

    def status(self) -> dict[str, Any]:
        """The account of the gateway; empty while there is no connection.

        Raises:
            GatewayError: It gave none within a second.
        """
        client = self._client
        return client.status(timeout_s=1.0) if client else {}

    def drop(self, client: GatewayClient | None) -> None:
        """Forget a connection, unless a newer one is there; the next call makes a new one."""
        if client is not None and self._client is client:
            self._client, self._lease = None, None
            client.close()

    def release(self) -> None:
        """Give the lease back and close; never commits anything. No other one is taken."""
        self._released.set()
        client, lease = self._client, self._lease
        with contextlib.suppress(GatewayError):
            if client and lease:
                client.release(lease)
        self.drop(client)

    @contextlib.contextmanager
    def _renewed_after(self, client: GatewayClient) -> Iterator[None]:
        """Forget a connection that may be what is wrong: the next one is made with the files as they are then."""
        try:
            yield
        except TowlineError as error:
            if is_absence(error):
                self.drop(client)
            raise

    def _connected(self) -> GatewayClient:
        client = self._client
        if client is None:  # another thread has found it gone
            raise self._gone()
        return client

    def _gone(self) -> GatewayUnreachable:
        return GatewayUnreachable("TL-G01", self.place.text, "no gateway answers", "It is asked again.")


def _gave(status: Mapping[str, Any], lease: Lease) -> bool:
    """Whether the process that answers is the one that gave a lease."""
    return bool(status["incarnation"] == lease.opening and status["epoch"] == lease.epoch)


def foreign(here: JournalPlace, journal: str) -> Fenced:
    """TL-G04: the checkpoint's journal is not the one that the gateway serves."""
    return Fenced(
        "TL-G04",
        here.gateway,
        f"the checkpoint belongs to journal {here.journal} (offset {here.offset}), this gateway serves journal "
        f"{journal}",
        "Bring back the state directory of that journal, or start the query with a new checkpoint directory and get "
        "what waits here; rows that only the other journal held stay there.",
    )
