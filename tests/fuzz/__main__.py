"""Any bytes against the decoders, one after the other: `python -m tests.fuzz --minutes 10`."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.fuzz import codec

parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Any bytes against the decoders.")
parser.add_argument("target", choices=[*codec.LEVELS, "all"], default="all", nargs="?")
parser.add_argument("--minutes", type=float, default=10.0, help="for each, 10 by default")
parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "towline-fuzz", help="for findings")
asked = parser.parse_args()
if asked.target != "all":
    codec.run(asked.target, asked.folder, [f"-max_total_time={round(asked.minutes * 60)}"])
    sys.exit()
common = ["--minutes", str(asked.minutes), "--folder", str(asked.folder)]
runs = [subprocess.run([sys.executable, "-m", "tests.fuzz", one, *common], check=False) for one in codec.LEVELS]
sys.exit(any(run.returncode for run in runs))  # libFuzzer ends its process: one for each
