"""Version of Towline, and the git revision that it was built from."""

from __future__ import annotations

import subprocess
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Final

#: Of a checkout.
SOURCE_ROOT: Final = Path(__file__).resolve().parents[2]


@cache
def version() -> str:
    """Return the version in `PEP 440 <https://peps.python.org/pep-0440/>`_ form; "" if Towline is not installed."""
    try:
        return metadata.version("towline")
    except metadata.PackageNotFoundError:
        return ""


@cache
def revision() -> str:
    """Return the source's commit, 10 hex digits: from git in a checkout, else of the build; ``unknown`` if neither."""
    try:
        if not (SOURCE_ROOT / ".git").exists():
            return Path(__file__).with_name("revision.txt").read_text(encoding="ascii").strip()
        command = ["git", "-C", str(SOURCE_ROOT), "rev-parse", "--short=10", "HEAD"]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout.strip()
    except (OSError, ValueError, subprocess.SubprocessError):
        return "unknown"


def release() -> str:
    """Return version and revision for people: ``0.2.0 (revision 0123456789)``."""
    return f"{version() or 'of an unknown version'} (revision {revision()})"
