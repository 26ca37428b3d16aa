"""``ack_after``: what it costs that a broker is answered after Kafka, not after the journal; a gateway alone, in turns.

A stub broker feeds it, and a reader commits as a query does: a batch every so many milliseconds, or none while Kafka is
away. So the time of a batch is given, and what is measured is what the broker's window makes of it.
"""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from benchmarks.intake import gateway_at
from benchmarks.latency import percentile
from benchmarks.rig import machine, wait
from benchmarks.stub_broker import StubBroker
from towline.gateway.client import Lease

if TYPE_CHECKING:
    from collections.abc import Iterator

    from towline.gateway.client import GatewayClient

#: ``ack_after`` and Receive Maximum.
_WAYS: Final = (("journal", 65_534), ("kafka", 65_534), ("kafka", 2_000), ("kafka", 20))
#: Seconds of a batch.
_BATCH_S: Final = 0.3
#: Pace of the steady part, messages a second.
_RATE: Final = 1_000.0


class _Measured(NamedTuple):
    """One way: messages a second flat out, median seconds to a PUBACK at a pace, and how many come in without Kafka."""

    rate: float
    delay_s: float
    taken: int


class _Reader:
    """Commits all there is, a batch at a time, while Kafka is there."""

    def __init__(self, client: GatewayClient) -> None:
        self._client = client
        self.there, self.stopped = threading.Event(), threading.Event()
        self.there.set()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        lease = Lease("bench")
        status = self._client.acquire(lease)
        end = status["consumers"]["bench"]
        while not self.stopped.is_set():
            if self.there.wait(0.05):
                end = self._client.wait(lease, end, journal=status["journal"], timeout_s=1.0).end
                time.sleep(_BATCH_S)


@contextmanager
def _reading(client: GatewayClient) -> Iterator[_Reader]:
    reader = _Reader(client)
    try:
        yield reader
    finally:
        reader.stopped.set()
        reader.thread.join()
        client.close()


def _measure(directory: Path, ack: str, window: int, seconds: float) -> _Measured:
    directory.mkdir()
    with StubBroker() as stub, gateway_at(stub.port, directory, ack_after=ack, receive_maximum=window) as gateway:
        stub.accept()
        wait(lambda: gateway.client() is not None, "the gateway")
        client = gateway.client()
        assert client is not None
        with _reading(client) as reader:
            stub.push(window)  # warm
            count = min(10 * window, 300_000)
            rate = count / stub.push(count)
            pace = min(_RATE, window / _BATCH_S / 4)
            delay_s = percentile(stub.pace(pace, seconds), 0.5)
            reader.there.clear()
            time.sleep(2 * _BATCH_S)
            before = int(str(client.status()["journaled"]))
            stub.push(200_000, seconds=seconds)
            taken = int(str(client.status()["journaled"])) - before
        gateway.kill()
    return _Measured(rate, delay_s, taken)


def run(rounds: int = 2, seconds: float = 5.0) -> None:
    """All ways in turn, medians, and their ratios to the one that answers after the journal.

    Args:
        rounds: Of each way.
        seconds: Of the steady pace, and for which Kafka is away.
    """
    print(f"ack_after: a gateway alone, QoS 1, 150 B, batches of {_BATCH_S} s\n  {machine()}\n")
    found: dict[tuple[str, int], list[_Measured]] = {way: [] for way in _WAYS}
    with tempfile.TemporaryDirectory(prefix="towline-bench-") as name:
        for turn in range(rounds):
            for ack, window in _WAYS:
                found[ack, window].append(_measure(Path(name) / f"{ack}-{window}-{turn}", ack, window, seconds))
    print("  ack_after  window    msg/s flat out   window / batch   to PUBACK, p50   taken in of 200,000, Kafka away")
    medians = {way: _Measured(*map(statistics.median, zip(*many, strict=True))) for way, many in found.items()}
    for (ack, window), one in medians.items():
        bound = f"{window / _BATCH_S:,.0f}" if ack == "kafka" else ""
        delay = f"{one.delay_s * 1000:,.1f} ms"
        print(f"  {ack:<9} {window:>7,} {one.rate:>17,.0f} {bound:>16} {delay:>16} {one.taken:>20,.0f}")
    first = medians[_WAYS[0]]
    for (ack, window), one in list(medians.items())[1:]:
        ratio = f"{one.rate / first.rate:.5f}   to PUBACK {one.delay_s / first.delay_s:,.0f} x"
        print(f"  ratio {ack} {window:,} : journal   flat out {ratio}")
    print()
