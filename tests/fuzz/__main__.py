"""Command line of the long random runs.

python -m tests.fuzz machine --steps 10000000 --seed 7      Session and journal against the model broker
python -m tests.fuzz codec5 --minutes 10                    any bytes against a decoder; also codec311, codec31
python -m tests.fuzz all --minutes 10 --steps 10000000      one after the other
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from random import Random, SystemRandom
from typing import Final

from tests.fuzz import codec

_FOLDER: Final = Path(tempfile.gettempdir()) / "towline-fuzz"
_STEPS_A_LIFE: Final = 60


def main() -> int:
    """Run what the command line names and return an exit code: 0 without a finding."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Long random runs.")
    parser.add_argument("target", choices=["machine", *codec.LEVELS, "all"])
    parser.add_argument("--steps", type=int, default=10_000_000, help="of the machine, 10,000,000 by default")
    parser.add_argument("--seed", type=int, default=SystemRandom().randrange(1 << 32), help="random by default")
    parser.add_argument("--life", type=int, default=0, help="number of the first life")
    parser.add_argument("--minutes", type=float, default=10.0, help="for each codec, 10 by default")
    parser.add_argument("--folder", type=Path, default=_FOLDER, help=f"corpus and findings, {_FOLDER} by default")
    asked = parser.parse_args()
    if asked.target == "machine":
        return live_on(asked.steps, asked.seed, asked.life)
    if asked.target != "all":
        codec.run(asked.target, asked.folder, [f"-max_total_time={round(asked.minutes * 60)}"])
        return 0
    common = ["--minutes", str(asked.minutes), "--folder", str(asked.folder), "--steps", str(asked.steps)]
    common += ["--seed", str(asked.seed)]
    failed = False
    for target in (*codec.LEVELS, "machine"):  # libFuzzer ends its process: one for each
        print(f"— {target}", flush=True)
        failed |= subprocess.run([sys.executable, "-m", "tests.fuzz", target, *common], check=False).returncode != 0
    return int(failed)


def live_on(steps: int, seed: int, first: int) -> int:
    """Lead the lives of `tests.unit.mqtt.model_world` until so many steps are done; seed and number name a life."""
    from tests.unit.mqtt.model_world import draw_plan, draw_steps, live  # noqa: PLC0415  # atheris has to be there first

    for life in range(first, first + -(-steps // _STEPS_A_LIFE)):
        random = Random(f"{seed}/{life}")
        plan, sequence = draw_plan(random.choice), draw_steps(random, _STEPS_A_LIFE)
        try:
            live(plan, sequence)
        except BaseException:
            print(
                f"again: python -m tests.fuzz machine --seed {seed} --life {life} --steps 1\n  {plan!r}\n  {sequence!r}"
            )
            raise
        if life % 1000 == 0:
            print(f"life {life:,} of seed {seed}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
