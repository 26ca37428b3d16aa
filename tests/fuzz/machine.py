"""Long random lives of Session and Journal: those of `tests/unit/mqtt/test_machine` without hypothesis, thus faster.

A life is named by the seed and its number; what fails is lived again with fewer and fewer steps, and the shortest
sequence is printed so that it can be pasted into `FINDINGS`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from random import Random
from typing import Final

from tests.unit.mqtt.model_world import Plan, Step, draw_plan, draw_steps, live

__all__ = ["life_of", "run", "shortened"]

_STEPS_A_LIFE: Final = 60
#: Seconds between two lines of progress.
_PROGRESS: Final = 10.0


def run(steps: int, seed: int, life: int = 0) -> int:
    """Live until so many steps are done; return an exit code.

    Args:
        steps: How many in all.
        seed: Names the lives.
        life: The first one's number.
    """
    began = told = time.monotonic()
    done = 0
    while done < steps:
        plan, sequence = life_of(seed, life)
        try:
            story = _failure(plan, sequence)
        except KeyboardInterrupt:
            print(f"stopped after {done:,} steps without a violation; the rest is")
            print(f"python -m tests.fuzz machine --seed {seed} --life {life} --steps {steps - done}")
            return 130
        if story is not None:
            short = shortened(plan, sequence)
            print(f"seed {seed}, life {life}: {story}")
            print(f"  {plan!r}\n  {short!r}\n  {_failure(plan, short)}")
            print(f"again: python -m tests.fuzz machine --seed {seed} --life {life} --steps 1")
            return 1
        done += len(sequence)
        life += 1
        now = time.monotonic()
        if now - told > _PROGRESS:
            told = now
            rate = done / (now - began)
            print(f"{done:,} of {steps:,} steps, {rate:,.0f} a second, {life:,} lives", flush=True)
    print(f"{done:,} steps, {life:,} lives, seed {seed}: no violation in {time.monotonic() - began:,.0f} s")
    return 0


def life_of(seed: int, life: int) -> tuple[Plan, list[Step]]:
    """The plan and the steps of one life."""
    random = Random(f"{seed}/{life}")
    return draw_plan(random.choice), draw_steps(random, _STEPS_A_LIFE)


def _failure(plan: Plan, steps: Sequence[Step]) -> str | None:
    try:
        live(plan, steps)
    except Exception as error:  # noqa: BLE001  # whatever it is, it is the finding
        frame = error.__traceback__
        while frame is not None and frame.tb_next is not None:
            frame = frame.tb_next
        where = f"{frame.tb_frame.f_code.co_filename}:{frame.tb_lineno}" if frame else "?"
        return f"{type(error).__name__}: {error} ({where})"
    return None


def shortened(plan: Plan, steps: Sequence[Step]) -> list[Step]:
    """Fewer steps that fail too: ever smaller pieces are left out as long as it still fails."""
    steps = list(steps)
    piece = len(steps) // 2
    while piece:
        at = 0
        while at < len(steps):
            fewer = steps[:at] + steps[at + piece :]
            if _failure(plan, fewer) is not None:
                steps = fewer
            else:
                at += piece
        print(f"  shortening: {len(steps)} steps", file=sys.stderr)
        piece //= 2
    return steps
