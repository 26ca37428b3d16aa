"""Writes the table of docs/guarantees.md from the code that keeps the promises.

    python scripts/guarantees.py            write it
    python scripts/guarantees.py --check    exit code 1 if the page says something else

Every row comes from `towline.guarantee`.
"""
# ruff: noqa: INP001  a script, no package

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from towline.guarantee import POLICIES, Guarantee, Policy, promise_problem

PAGE = Path(__file__).parents[1] / "docs" / "guarantees.md"
BEGIN = "<!-- written by scripts/guarantees.py -->"
END = "<!-- end -->"


def qos(policy: Policy) -> str:
    """The subscription a line may have."""
    if policy.qos == 0:
        return f"QoS {policy.qos}, any"
    if policy.least_qos_keyed == policy.qos:
        return f"QoS {policy.qos} or more"
    weaker = ", ".join(
        f'{POLICIES[promise].qos} on a route with `promise = "{promise}"`'
        for promise in POLICIES
        if promise_problem(Guarantee.EXACTLY_ONCE, promise) is None
    )
    return f"QoS {policy.qos} ({policy.least_qos_keyed} with a `dedupe` key, {weaker})"


def producer(policy: Policy) -> str:
    """The settings of Kafka's client."""
    client = policy.kafka
    shown = ", ".join(
        f"`{name}={client[name]}`" for name in ("acks", "enable.idempotence", "retries") if name in client
    )
    return shown + (", a transaction per batch and partition, with a marker" if policy.transactions else "")


def spark(policy: Policy) -> str:
    """The settings that may not be changed."""
    return ", ".join(f"`{name}={value}`" for name, value in policy.spark.items()) or "any"


ROWS: dict[str, Callable[[Policy], str]] = {
    "MQTT subscription": qos,
    "MQTT session": lambda policy: "persistent: Clean Start 0, expiry above 0" if policy.persistent else "any",
    "acknowledged to the broker after": lambda policy: " or ".join(f"`{word}`" for word in policy.acks),
    "the batch that a crash interrupted is": lambda policy: policy.replay,
    "Kafka producer": producer,
    "Spark": spark,
    "way back: Kafka consumer": lambda policy: " or ".join(f"`{level}`" for level in policy.isolations),
    "way back: a batch enters the outbox": lambda _: "once",
    "way back: MQTT publish": lambda policy: f"QoS {' or '.join(map(str, policy.publish_levels))}",
    "can be lost": lambda policy: policy.lost,
    "can be doubled": lambda policy: policy.doubled,
}


def table() -> str:
    """The table in Markdown."""
    names = [f"`{word}`{' (default)' if word is Guarantee.AT_LEAST_ONCE else ''}" for word in POLICIES]
    lines = [f"| | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for title, cell in ROWS.items():
        lines.append(f"| {title} | {' | '.join(cell(policy) for policy in POLICIES.values())} |")
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
