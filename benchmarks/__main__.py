"""``python -m benchmarks [NAME ...] [--quick]``: all but paho when none is named."""

from __future__ import annotations

import argparse

from benchmarks import downlink, exactly_once, intake, latency, pipeline, publisher, restart, session

_ALL = ["session", "intake", "exactly_once", "restart", "publisher", "downlink"]
#: Parts of others, and what costs little to run alone: exactly_once has the whole way and its latency in it.
_MORE = ["paho", "pipeline", "latency"]


def main() -> None:
    """Run what is named."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("which", nargs="*", choices=[*_ALL, *_MORE, []])
    parser.add_argument("--quick", action="store_true", help="small sizes: shows that it works, not how fast")
    asked = parser.parse_args()
    which = asked.which or _ALL
    scale = 10 if asked.quick else 1
    if "session" in which:
        session.run(300_000 // scale, rounds=1 if asked.quick else 5)
    if "intake" in which:
        intake.run(300_000 // scale, rounds=1 if asked.quick else 3)
    if "pipeline" in which or "paho" in which:
        pipeline.run(300_000 // scale, rounds=1 if asked.quick else 3)
    if "exactly_once" in which:
        exactly_once.run(quick=asked.quick)
    if "latency" in which:
        latency.run()
    if "restart" in which:
        restart.run(1_000_000 // scale)
    if "publisher" in which:
        publisher.run(100_000 // scale)
    if "downlink" in which:
        downlink.run(100_000 // scale)


if __name__ == "__main__":
    main()
