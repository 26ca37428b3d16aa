"""``python -m benchmarks [NAME ...] [--quick] [--json FILE]``: all of them when none is named."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from benchmarks import (
    acknowledging,
    costs,
    downlink,
    exactly_once,
    gateways,
    growth,
    intake,
    latency,
    memory,
    page,
    pipeline,
    publisher,
    ratios,
    restart,
    session,
    space,
    sql,
    start,
    trickle,
    waiting,
)
from towline_prove.evidence import append_record, revision, run_record

#: What runs in full size and, quickly, in a size that shows that it works.
_BENCHMARKS: Final[dict[str, Callable[[int, bool], object]]] = {
    "session": lambda scale, quick: session.run(300_000 // scale, rounds=1 if quick else 5),
    "intake": lambda scale, quick: intake.run(300_000 // scale, rounds=1 if quick else 3),
    "pipeline": lambda scale, quick: pipeline.run(300_000 // scale, rounds=1 if quick else 3),
    "exactly_once": lambda _, quick: exactly_once.run(quick=quick),
    "acks": lambda _, quick: acknowledging.run(rounds=1 if quick else 2, seconds=2.0 if quick else 5.0),
    "profile": lambda scale, quick: costs.run(300_000 // scale, rounds=2 if quick else 6),
    "ratios": lambda scale, quick: ratios.run(300_000 // scale, rounds=2 if quick else 6),
    "start": lambda _, quick: start.run(rounds=1 if quick else 3),
    "latency": lambda _scale, _quick: latency.run(),
    "trickle": lambda _, quick: trickle.run(rounds=1 if quick else 3, seconds=10.0 if quick else 30.0),
    "restart": lambda scale, _: restart.run(1_000_000 // scale),
    "memory": lambda scale, _: memory.run(10_000_000 // scale),
    "sql": lambda scale, quick: sql.run(1_000_000 // scale, rounds=2 if quick else 5),
    "space": lambda scale, _: space.run(5000 // scale),
    "waiting": lambda scale, _: waiting.run(10_000_000 // scale),
    "growth": lambda scale, quick: growth.run(
        200_000 // scale, lines=(1, 10) if quick else (1, 10, 50), rounds=2 if quick else 5
    ),
    "page": lambda _, quick: page.run(lines=10, rounds=1 if quick else 3, seconds=10.0 if quick else 20.0),
    "gateways": lambda scale, quick: gateways.run(300_000 // scale, rounds=2 if quick else 5),
    "publisher": lambda scale, _: publisher.run(100_000 // scale),
    "downlink": lambda scale, _: downlink.run(100_000 // scale),
}
#: Those that return their figures by subject, and what these are.
_UNITS: Final = {
    "page": "% of a core, the process that serves the page",
    "ratios": "µs of CPU a message",
    "publisher": "messages a second",
    "downlink": "messages a second",
}


def main() -> None:
    """Run what is named."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("which", nargs="*", choices=[*_BENCHMARKS, []])
    parser.add_argument("--quick", action="store_true", help="small sizes: shows that it works, not how fast")
    parser.add_argument("--json", type=Path, metavar="FILE", help=f"append the figures of {', '.join(_UNITS)} to it")
    asked = parser.parse_args()
    revision()
    for name, measure in _BENCHMARKS.items():
        if name in asked.which or not asked.which:
            begun = time.monotonic()
            figures = measure(10 if asked.quick else 1, asked.quick)
            if asked.json is not None and name in _UNITS:
                details = {"quick": asked.quick, "cores": os.cpu_count(), "unit": _UNITS[name], "figures": figures}
                took = time.monotonic() - begun
                append_record(run_record(f"benchmark {name}", ok=True, seconds=took, details=details), asked.json)


if __name__ == "__main__":
    main()
