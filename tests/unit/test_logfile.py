"""Logs stay small, and never end whoever writes them."""

from __future__ import annotations

import logging
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from towline.errors import ConfigError
from towline.logfile import LogStream, log_settings

PROGRAM = """
import sys
from towline.logfile import LogStream, stderr_log
log = LogStream(sys.stderr, max_bytes=1000)
for number in range(100):
    print(f"line {number:03} " + "x" * 40, file=log, flush=True)
print(stderr_log())
"""


def test_a_log_that_grows_is_put_aside_while_it_is_written(tmp_path: Path) -> None:
    log = tmp_path / "gateway-telemetry.log"
    with log.open("ab") as file:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM], stderr=file, stdout=subprocess.PIPE, text=True, check=True
        )
    assert done.stdout == f"{log}\n"  # its true name
    assert {path.name for path in tmp_path.iterdir()} == {log.name, f"{log.name}.1", f"{log.name}.2"}
    assert all(path.stat().st_size < 1100 for path in tmp_path.iterdir())
    kept = "".join((tmp_path / f"{log.name}{end}").read_text() for end in (".2", ".1", ""))
    numbers = [int(line.split()[1]) for line in kept.splitlines()]
    assert numbers == list(range(numbers[0], 100))  # the newest lines, none missing
    assert stat.S_IMODE((tmp_path / f"{log.name}.1").stat().st_mode) == 0o600


def test_a_file_that_is_not_appended_to_is_left_alone(tmp_path: Path) -> None:
    """``2> FILE`` of a user's: cut, it would have a gap of zeros."""
    log = tmp_path / "log"
    with log.open("wb") as file:
        subprocess.run([sys.executable, "-c", PROGRAM], stderr=file, stdout=subprocess.PIPE, check=True)
    assert [path.name for path in tmp_path.iterdir()] == ["log"]
    assert len(log.read_text().splitlines()) == 100


def test_a_full_disk_ends_nobody() -> None:
    full = Path("/dev/full").open("w", encoding="utf-8")  # noqa: SIM115 - what its buffer holds can't be written either
    with pytest.raises(OSError, match="No space"):
        print("x", file=full, flush=True)
    print("x", file=LogStream(full), flush=True)
    with pytest.raises(OSError, match="No space"):
        full.close()


def test_level_and_format_come_from_the_environment() -> None:
    assert log_settings({}) == (logging.INFO, "auto")
    assert log_settings({"TOWLINE_LOG_LEVEL": "WARNING", "TOWLINE_LOG_FORMAT": "json"}) == (logging.WARNING, "json")
    with pytest.raises(ConfigError, match=r'TOWLINE_LOG_LEVEL: "loud" is none of debug, info, .*TL-C147'):
        log_settings({"TOWLINE_LOG_LEVEL": "loud"})
    with pytest.raises(ConfigError, match=r'TOWLINE_LOG_FORMAT: "xml" is none of auto, json, text.*TL-C147'):
        log_settings({"TOWLINE_LOG_FORMAT": "xml"})
