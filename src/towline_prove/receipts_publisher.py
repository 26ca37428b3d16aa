"""A process to be killed: publishes numbered messages with receipts, and goes on where an earlier life stopped.

    python -m towline_prove.receipts_publisher BROKER STATE_DIR COUNT RATE QOS KEY_FILE

The payload of a message is its number in the outbox, so that what is on disk says what is still to be published. One
JSON object a line says how far it is; ends with 0 when all messages have their receipt.
"""

from __future__ import annotations

import json
import sys
import time

from towline.publisher import Publisher

__all__ = ["main"]

_REPORT_S = 0.2
#: What a pause left undone is not made up for, beyond so many seconds: who stops this process gains time.
_AT_ONCE_S = 0.05


def main(broker: str, state_dir: str, count: int, rate: float, qos: int, key_file: str) -> int:
    """Publish what is missing up to `count`, and wait for the receipts.

    Args:
        broker: Its URI.
        state_dir: Of the publisher.
        count: Messages in all, over all lives.
        rate: Messages a second.
        qos: 1 or 2.
        key_file: Of the line.
    """
    publisher = Publisher(broker, state_dir=state_dir, receipts=True, receipt_key_file=key_file, receipt_patience_s=2)
    number = publisher.status()["accepted"]
    looked_at, due, reported_at = time.monotonic(), 0.0, 0.0
    while publisher.awaiting or number < count:
        now = time.monotonic()
        due, looked_at = due + min(now - looked_at, _AT_ONCE_S) * rate, now
        while number < count and due >= 1:
            publisher.publish(f"telemetry/d{number % 8}/data", str(number), qos=qos)
            number, due = number + 1, due - 1
        if now - reported_at > _REPORT_S:
            reported_at = now
            _report(publisher)
        time.sleep(0.01)
    _report(publisher)
    return 1 if publisher.close() else 0


def _report(publisher: Publisher) -> None:
    now, status = time.monotonic(), publisher.status()
    report = {"at": now, "on_disk": status["accepted"], "at_broker": status["delivered"], **status["receipts"]}
    sys.stdout.write(json.dumps(report) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    place, directory, *numbers, file = sys.argv[1:]
    sys.exit(main(place, directory, int(numbers[0]), float(numbers[1]), int(numbers[2]), file))
