"""Writes the table of docs/guarantees.md from the code that keeps the promises.

    python scripts/guarantees.py            write it
    python scripts/guarantees.py --check    exit code 1 if the page says something else

The MQTT and Spark rows come from `towline.gateway.guarantees`, the producer's from `towline.kafka.options`.
"""
# ruff: noqa: INP001  a script, no package

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from towline.gateway.guarantees import KNOBS, Knobs
from towline.gateway.settings import Guarantee
from towline.kafka.options import PROMISES

PAGE = Path(__file__).parents[1] / "docs" / "guarantees.md"
BEGIN = "<!-- written by scripts/guarantees.py -->"
END = "<!-- end -->"


def qos(knobs: Knobs) -> str:
    """The subscription a line may have."""
    if knobs.least_qos == 0:
        return f"QoS {knobs.qos}, any"
    more = "" if knobs.least_qos == 2 else " or more"
    keyed = "" if knobs.least_qos_keyed == knobs.least_qos else f" ({knobs.least_qos_keyed} with a `dedupe` key)"
    return f"QoS {knobs.least_qos}{more}{keyed}"


def producer(guarantee: Guarantee, knobs: Knobs) -> str:
    """The settings of Kafka's client."""
    client = PROMISES[guarantee.value].client
    shown = ", ".join(
        f"`{name}={client[name]}`" for name in ("acks", "enable.idempotence", "retries") if name in client
    )
    return shown + (", a transaction per batch and partition, with a marker" if knobs.transactions else "")


def spark(knobs: Knobs) -> str:
    """The settings that may not be changed."""
    return ", ".join(f"`{name}={value}`" for name, value in knobs.spark.items()) or "any"


ROWS: dict[str, Callable[[Guarantee, Knobs], str]] = {
    "MQTT subscription": lambda _, knobs: qos(knobs),
    "MQTT session": lambda _, knobs: "persistent: Clean Start 0, expiry above 0" if knobs.persistent else "any",
    "acknowledged to the broker after": lambda _, knobs: " or ".join(f"`{word}`" for word in knobs.acks),
    "the batch that a crash interrupted is": lambda _, knobs: knobs.replay,
    "Kafka producer": producer,
    "Spark": lambda _, knobs: spark(knobs),
    "way back: Kafka consumer": lambda _, knobs: f"`{knobs.isolation}`",
    "way back: a batch enters the outbox": lambda _, __: "once",
    "way back: MQTT publish": lambda _, knobs: f"QoS {' or '.join(map(str, knobs.publish_levels))}",
    "can be lost": lambda _, knobs: knobs.lost,
    "can be doubled": lambda _, knobs: knobs.doubled,
}


def table() -> str:
    """The table in Markdown."""
    names = [f"`{word}`{' (default)' if word is Guarantee.AT_LEAST_ONCE else ''}" for word in KNOBS]
    lines = [f"| | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for title, cell in ROWS.items():
        lines.append(f"| {title} | {' | '.join(cell(word, knobs) for word, knobs in KNOBS.items())} |")
    return "\n".join(lines)


def with_table(page: str) -> str:
    """The page with the table between the two marks.

    Raises:
        ValueError: The marks are missing.
    """
    head, begin, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE.name} lacks the marks {BEGIN} and {END}")
    return f"{head}{BEGIN}\n{table()}\n{END}{tail}"


def main() -> int:
    """Write the page or compare it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, exit with 1 if the page is old")
    check = parser.parse_args().check
    before = PAGE.read_text(encoding="utf-8")
    after = with_table(before)
    if check and before != after:
        sys.stderr.write(f"{PAGE.name} is not what the code does: run python scripts/guarantees.py\n")
        return 1
    if before != after:
        PAGE.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
