"""Writes the table of docs/guarantees.md from the code that keeps the promises.

    python scripts/guarantees.py            write it
    python scripts/guarantees.py --check    exit code 1 if the page says something else

Every row comes from `towline.guarantee`.
"""
# ruff: noqa: INP001  a script, no package

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from written import write_tables

from towline.guarantee import POLICIES, Guarantee, Policy, promise_problem

PAGE = Path(__file__).parents[1] / "docs" / "guarantees.md"


def qos(policy: Policy) -> str:
    """The subscription a line may have."""
    if policy.qos == 0:
        return f"QoS {policy.qos}, any"
    if policy.min_qos_with_dedupe == policy.qos:
        return f"QoS {policy.qos} or more"
    weaker = ", ".join(
        f'{POLICIES[promise].qos} on a route with `promise = "{promise}"`'
        for promise in POLICIES
        if promise_problem(Guarantee.EXACTLY_ONCE, promise) is None
    )
    return f"QoS {policy.qos} ({policy.min_qos_with_dedupe} with a `dedupe` key, {weaker})"


def producer(policy: Policy) -> str:
    """The settings of Kafka's client."""
    client = policy.kafka_settings
    shown = ", ".join(
        f"`{name}={client[name]}`" for name in ("acks", "enable.idempotence", "retries") if name in client
    )
    return shown + (", a transaction per batch and partition, with a marker" if policy.transactions else "")


def replay(policy: Policy) -> str:
    """What the source serves a second time."""
    if not policy.replays_batches:
        return "served empty"
    again = "skipped if the marker says that Kafka has it" if policy.transactions else "the same rows in the same order"
    return f"served again, {'and ' * policy.transactions}{again}"


def spark(policy: Policy) -> str:
    """The settings that may not be changed."""
    return ", ".join(f"`{name}={value}`" for name, value in policy.spark_settings.items()) or "any"


ROWS: dict[str, Callable[[Policy], str]] = {
    "MQTT subscription": qos,
    "MQTT session": lambda policy: "persistent: Clean Start 0, expiry above 0" if policy.persistent_session else "any",
    "acknowledged to the broker after": lambda policy: " or ".join(f"`{word}`" for word in policy.ack_choices),
    "the batch that a crash interrupted is": replay,
    "Kafka producer": producer,
    "Spark": spark,
    "way back: Kafka consumer": lambda _: "`read_committed`",
    "way back: a batch enters the outbox": lambda _: "once",
    "way back: MQTT publish": lambda policy: f"QoS {' or '.join(map(str, policy.publish_qos_choices))}",
    "can be lost": lambda policy: policy.loss_text,
    "can be doubled": lambda policy: policy.duplicates_text,
}


def table() -> str:
    """The table in Markdown."""
    names = [f"`{word}`{' (default)' if word is Guarantee.AT_LEAST_ONCE else ''}" for word in POLICIES]
    lines = [f"| | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for title, cell in ROWS.items():
        lines.append(f"| {title} | {' | '.join(cell(policy) for policy in POLICIES.values())} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(write_tables(PAGE, {"promises": table()}, __file__, __doc__))
