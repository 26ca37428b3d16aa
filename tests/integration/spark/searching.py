"""Where a secret could show: pages, files, command lines and environments."""

from __future__ import annotations

import contextlib
import json
import re
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import urldefrag, urljoin, urlsplit

import psutil

_LINK = re.compile(r"""(?:href|src)=["']([^"'\s]+)["']""")
#: Scripts and pictures that are the same in every Spark, and what would end an application.
_PASSED_OVER = ("/static/", "/kill")
#: Pages that differ in their query alone, as those of each job and stage do: so many of them are read.
_ALIKE = 6
_REST = (
    "sql?details=true&planDescription=true&length=1000",
    "environment",
    "jobs",
    "stages?details=true",
    "allexecutors",
    "storage/rdd",
)


def read(url: str) -> str:
    """What a page of Spark says."""
    with urllib.request.urlopen(url, timeout=60) as answer:  # noqa: S310 - Spark's own page
        return str(answer.read().decode(errors="replace"))


def rest_of(ui: str) -> dict[str, str]:
    """What the REST interface of a driver says, by address."""
    (application,) = json.loads(read(f"{ui}/api/v1/applications"))
    base = f"{ui}/api/v1/applications/{application['id']}"
    return {address: read(address) for address in (f"{base}/{name}" for name in _REST)}


def crawled(*roots: str) -> dict[str, str]:
    """Every page that links lead to from some pages of Spark, on the servers of these; by address."""
    servers = {urlsplit(root).netloc for root in roots}
    found: dict[str, str] = {}
    waiting, alike = list(roots), Counter[str]()
    while waiting:
        address = urldefrag(waiting.pop(0)).url
        parts = urlsplit(address)
        kind = f"{parts.netloc}{parts.path}"
        passed_over = any(one in parts.path for one in _PASSED_OVER)
        if passed_over or address in found or parts.netloc not in servers or alike[kind] == _ALIKE:
            continue
        alike[kind] += 1
        try:
            found[address] = read(address)
        except urllib.error.HTTPError as error:  # a page of what is gone, which shows its error
            found[address] = error.read().decode(errors="replace")
        waiting += [urljoin(address, link.replace("&amp;", "&")) for link in _LINK.findall(found[address])]
    return found


def contents(directory: Path, *leaving_out: Path) -> str:
    """All that is written below a directory."""
    files = [path for path in directory.rglob("*") if path not in leaving_out]
    text = ""
    for path in files:
        with contextlib.suppress(OSError):  # removed meanwhile
            text += path.read_bytes().decode("latin-1") if path.is_file() else ""
    return text


def running(processes: Iterable[psutil.Process], *names: str) -> str:
    """Command lines and environments, as the kernel has them, or one of the two: ``cmdline``, ``environ``."""
    text = ""
    for path in [Path(f"/proc/{one.pid}/{name}") for one in processes for name in names or ("cmdline", "environ")]:
        with contextlib.suppress(OSError):  # one that has just ended
            text += path.read_bytes().decode("latin-1")
    return text
