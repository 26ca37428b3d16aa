"""Who publishes in a run, in a process of its own: the senders must not share our interpreter's lock."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Self

from towline.publisher import Publisher
from towline_prove.devstack.process import spawn
from towline_prove.history import HistoryWriter, SenderRecord
from towline_prove.load import own_devices
from towline_prove.numbered import encoder

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from towline_prove.load import LoadPlan

#: What a pause left undone is not made up for, beyond so many seconds.
_AT_ONCE_S = 0.05


class Senders:
    """``python -m towline_prove load``, over all its lives; a context manager that ends it.

    Args:
        log: For its output.
        command: Gives the words of its next life, with a claim file of its own.
    """

    def __init__(self, log: Path, command: Callable[[], list[str]]) -> None:
        self.log = log
        self._command = command
        self.start()

    def start(self) -> None:
        """Begin its next life."""
        self._process, _ = spawn([sys.executable, "-m", "towline_prove", *self._command()], self.log)

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def kill(self) -> None:
        """SIGKILL, where it has not ended."""
        self._process.kill()
        self._process.wait(30)

    def report(self) -> dict[str, Any]:
        """What `publish` has said of its receipts at its end; nothing where it did not come there."""
        lines = self.log.read_text(errors="replace").splitlines()
        return dict(json.loads(next((line for line in reversed(lines) if line.startswith("{")), "{}")))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def publish(plan: LoadPlan, history: Path, outbox: Path, key_file: Path) -> int:
    """Publish numbered messages with receipts; a later life goes on where an earlier one was killed.

    A message counts as acknowledged when `Publisher.publish` has returned. At the end a JSON object says how the
    receipts came.

    Args:
        plan: What to send and where; `messages` are those of all lives.
        history: New file for the claims of this life.
        outbox: The publisher's state directory.
        key_file: Of the line.

    Returns:
        The exit code, 0 when all messages have their receipt.
    """
    devices = own_devices(0, 1, plan.devices)
    encode = encoder(plan.run, 0, plan.size)
    broker = f"mqtt://{plan.host}:{plan.port}"
    with HistoryWriter(history, asdict(plan)) as claims:
        publisher = Publisher(broker, state_dir=outbox, receipts=True, receipt_key_file=key_file, receipt_patience_s=2)
        number = publisher.status()["accepted"]
        looked_at, due = time.monotonic(), 0.0
        while publisher.awaiting or number < plan.messages:
            now = time.monotonic()
            due, looked_at = due + min(now - looked_at, _AT_ONCE_S) * plan.rate, now
            while number < plan.messages and due >= 1:
                device = devices[number % len(devices)]
                claims.note(SenderRecord.ATTEMPTED, 0, number)
                claims.flush()  # before it may be on its way
                payload = encode(number, device, time.time_ns())
                publisher.publish(plan.topic.format(device=device), payload, qos=plan.qos)
                claims.note(SenderRecord.ACKED, 0, number)
                number, due = number + 1, due - 1
            claims.flush()
            time.sleep(0.01)
        sys.stdout.write(json.dumps(publisher.status()["receipts"]) + "\n")
        return 1 if publisher.close() else 0
