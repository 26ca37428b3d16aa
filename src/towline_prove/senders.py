"""Publishers of a run in a process of their own: they must not share our interpreter's lock."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Self

from towline.publisher import Publisher
from towline_prove.devstack.process import spawn
from towline_prove.history import HistoryWriter, SenderClaim, encoder
from towline_prove.load import devices_of_publisher

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from towline_prove.load import LoadPlan

#: What a pause left undone is not made up for, beyond so many seconds.
_MAX_CATCH_UP_S = 0.05


class SenderProcess:
    """Process of ``python -m towline_prove load``, restarted after kills; a context manager that ends it.

    Args:
        log: File for its output.
        command: Returns the arguments of the next start, with a new claim file.
    """

    def __init__(self, log: Path, command: Callable[[], list[str]]) -> None:
        self.log = log
        self._command = command
        self.start()

    def start(self) -> None:
        """Start the process again."""
        self._process, _ = spawn([sys.executable, "-m", "towline_prove", *self._command()], self.log)

    @property
    def running(self) -> bool:
        """True while the process runs."""
        return self._process.poll() is None

    def kill(self) -> None:
        """Kill the process with SIGKILL, if it runs."""
        self._process.kill()
        self._process.wait(30)

    def receipt_report(self) -> dict[str, Any]:
        """Return the receipt counts that `publish_with_receipts` printed at its end; empty if it did not end."""
        lines = self.log.read_text(errors="replace").splitlines()
        return dict(json.loads(next((line for line in reversed(lines) if line.startswith("{")), "{}")))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def publish_with_receipts(plan: LoadPlan, history: Path, outbox: Path, key_file: Path) -> int:
    """Publish numbered messages with receipts; a restart continues where the process was killed.

    A message counts as acknowledged when `Publisher.publish` has returned. At the end the receipt counts are printed as
    a JSON object.

    Args:
        plan: Load to publish; `messages` is the total of all starts.
        history: New file for the claims of this start.
        outbox: The publisher's state directory.
        key_file: Receipt key of the line.

    Returns:
        The exit code, 0 when all messages have their receipt.
    """
    devices = devices_of_publisher(0, 1, plan.devices)
    encode = encoder(plan.run, 0, plan.size)
    broker = f"mqtt://{plan.host}:{plan.port}"
    with HistoryWriter(history, asdict(plan)) as claims:
        publisher = Publisher(broker, state_dir=outbox, receipts=True, receipt_key_file=key_file, receipt_patience_s=2)
        number = publisher.status()["accepted"]
        last_check_at, due_messages = time.monotonic(), 0.0
        while publisher.awaiting or number < plan.messages:
            now = time.monotonic()
            due_messages, last_check_at = due_messages + min(now - last_check_at, _MAX_CATCH_UP_S) * plan.rate, now
            while number < plan.messages and due_messages >= 1:
                device = devices[number % len(devices)]
                claims.add_claim(SenderClaim.ATTEMPTED, 0, number)
                claims.flush()  # before it may be on its way
                payload = encode(number, device, time.time_ns())
                publisher.publish(plan.topic.format(device=device), payload, qos=plan.qos)
                claims.add_claim(SenderClaim.ACKED, 0, number)
                number, due_messages = number + 1, due_messages - 1
            claims.flush()
            time.sleep(0.01)
        sys.stdout.write(json.dumps(publisher.status()["receipts"]) + "\n")
        return 1 if publisher.close() else 0
