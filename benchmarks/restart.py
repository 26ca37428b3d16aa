"""kill -9 with many messages waiting: how long until the gateway acknowledges again, and how much memory it takes."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from benchmarks.intake import gateway_at
from benchmarks.rig import machine
from benchmarks.stub_broker import StubBroker
from towline_prove import processes


def run(waiting: int = 1_000_000) -> None:
    """Fill the journal, look at the memory, kill, start, time the first acknowledgement."""
    print(f"restart with {waiting:,} messages waiting (150 B)\n  {machine()}\n")
    with (
        tempfile.TemporaryDirectory(prefix="towline-bench-") as name,
        StubBroker() as stub,
        gateway_at(stub.port, Path(name)) as run,
    ):
        stub.accept()
        empty = processes.memory_of(run.pid)
        seconds = stub.push(waiting)
        full = processes.memory_of(run.pid)
        on_disk = sum(file.stat().st_size for file in (Path(name) / "gateway" / "inbox").glob("*.seg"))
        print(f"  filled at {waiting / seconds:,.0f} msg/s, {on_disk / waiting:.0f} B a message on disk")
        print(f"  memory of the gateway: {empty / 1e6:.0f} MB empty, {full / 1e6:.0f} MB full   (aim < 200 MB)")
        run.kill()
        stub.close()
        began = time.monotonic()
        run.start()
        stub.accept()
        connected = time.monotonic() - began
        stub.push(1)
        first = stub.first_ack - began
        print(f"  kill -9 → connected {connected:.2f} s → first message acknowledged {first:.2f} s   (aim < 2 s)\n")
        stub.close()
