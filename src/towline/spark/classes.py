"""Archives of the classes a JVM loads (class data sharing, JEP 350): each later start is some seconds shorter.

An archive belongs to one build of Java and to the very files of one class path, by their sizes and times. Java ignores
it, without a word, beside any other.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

from towline import files
from towline.spark.home import switched_off
from towline.spark.java import describe_java

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["QUIET_JVM", "archive_for", "archive_once", "recording", "sharing"]

QUIET_JVM: Final = [
    "-Xshare:auto",
    *("-Xlog:cds=off", "-Xlog:cds+dynamic=off", "-Xlog:class+path=off"),  # another Java's archive is no news
    "-XX:-UsePerfData",
    "-Djava.awt.headless=true",
    "-Dlog4j2.disable.jmx=true",
]


def archive_for(java: Path, jars: Path, stem: Path) -> Path:
    """Where the archive for a build of Java and a directory of jars is; jars that were installed anew have another.

    Args:
        java: The program.
        jars: The directory.
        stem: What its name begins with, and where: ``STEM-JAVA-JARS.jsa``.
    """
    files = sorted((jar.name, jar.stat().st_size, jar.stat().st_mtime_ns) for jar in jars.glob("*.jar"))
    return stem.with_name(f"{stem.name}-{_digest(describe_java(str(java)))}-{_digest(repr(files))}.jsa")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def archive_once(archive: Path, run: Callable[[Path], None]) -> None:
    """Make an archive if there is none, and remove those of other jars; of several processes one does it.

    Args:
        archive: Where it is to be; the directory exists.
        run: Runs a JVM with what `recording` says of the draft it is given, in a directory that is removed afterwards.
    """
    if switched_off() or not os.access(archive.parent, os.W_OK):
        return
    with files.alone(archive.with_suffix(".lock")):
        if archive.exists():
            return
        prefix = f".{archive.stem}."
        for left in archive.parent.glob(f"{prefix}*"):  # of one that was killed
            shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=prefix, dir=archive.parent) as place:
            draft = Path(place) / archive.name
            run(draft)
            if draft.exists():
                draft.rename(archive)
                _remove_others(archive)


def _remove_others(archive: Path) -> None:
    """The archives of the same build of Java for jars that are there no more: one has up to 160 MB."""
    same_java = archive.stem.rpartition("-")[0]
    for other in archive.parent.glob(f"{same_java}-*.jsa"):
        if other != archive:
            other.unlink(missing_ok=True)


def recording(draft: Path) -> str:
    """The option that writes an archive when the JVM ends."""
    return f"-XX:ArchiveClassesAtExit={draft}"


def sharing(archive: Path) -> list[str]:
    """The option that uses an archive; none while there is no archive."""
    return [f"-XX:SharedArchiveFile={archive}"] if archive.exists() and not switched_off() else []
