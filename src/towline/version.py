"""Which Towline this is: its version, and the revision of the source that it was built from."""

from __future__ import annotations

import subprocess
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Final

#: Of a checkout.
ROOT: Final = Path(__file__).resolve().parents[2]


@cache
def version() -> str:
    """As `PEP 440 <https://peps.python.org/pep-0440/>`_ writes it; empty where Towline is not installed."""
    try:
        return metadata.version("towline")
    except metadata.PackageNotFoundError:
        return ""


@cache
def revision() -> str:
    """The commit of the source, 10 hex digits: git's answer in a checkout, else the build's note; or ``unknown``."""
    try:
        if not (ROOT / ".git").exists():
            return Path(__file__).with_name("revision.txt").read_text(encoding="ascii").strip()
        command = ["git", "-C", str(ROOT), "rev-parse", "--short=10", "HEAD"]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout.strip()
    except (OSError, ValueError, subprocess.SubprocessError):
        return "unknown"


def release() -> str:
    """Both, for a person: ``0.2.0rc1 (revision 0123456789)``."""
    return f"{version() or 'of an unknown version'} (revision {revision()})"
