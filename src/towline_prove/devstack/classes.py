"""Archives of the classes a JVM loads (class data sharing, JEP 350): each later start is some seconds shorter.

An archive belongs to one build of Java and to one class path; with another it is ignored.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

from towline import files
from towline.spark.home import switched_off
from towline.spark.java import describe_java

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["QUIET_JVM", "archive_once", "java_build", "recording", "sharing"]

QUIET_JVM: Final = [
    "-Xshare:auto",
    *("-Xlog:cds=off", "-Xlog:cds+dynamic=off", "-Xlog:class+path=off"),  # another Java's archive is no news
    "-XX:-UsePerfData",
    "-Djava.awt.headless=true",
    "-Dlog4j2.disable.jmx=true",
]


def java_build(java: Path) -> str:
    """Twelve hex digits that name a build of Java, for the name of an archive."""
    return hashlib.sha256(describe_java(str(java)).encode()).hexdigest()[:12]


def archive_once(archive: Path, run: Callable[[Path], None]) -> None:
    """Make an archive if there is none; of several processes one does it, and the others wait.

    Args:
        archive: Where it is to be; the directory exists.
        run: Runs a JVM with what `recording` says of the draft it is given, in a directory that is removed afterwards.
    """
    if switched_off() or not os.access(archive.parent, os.W_OK):
        return
    with files.alone(archive.with_suffix(".lock")):
        if archive.exists():
            return
        with tempfile.TemporaryDirectory(prefix=".classes-", dir=archive.parent) as place:
            draft = Path(place) / archive.name
            run(draft)
            if draft.exists():
                draft.rename(archive)


def recording(draft: Path) -> str:
    """The option that writes an archive when the JVM ends."""
    return f"-XX:ArchiveClassesAtExit={draft}"


def sharing(archive: Path) -> list[str]:
    """The option that uses an archive; none while there is no archive."""
    return [f"-XX:SharedArchiveFile={archive}"] if archive.exists() and not switched_off() else []
