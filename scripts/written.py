"""Tables of a page in docs/ that a script writes between marks of theirs."""
# ruff: noqa: INP001  beside scripts, no package

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path


def with_tables(page: Path, text: str, tables: Mapping[str, str], script: str) -> str:
    """The text of a page with each table between its marks.

    Raises:
        ValueError: Marks are missing.
    """
    for name, table in tables.items():
        begin, end = f"<!-- table {name}: written by scripts/{script} -->", f"<!-- end {name} -->"
        head, found, rest = text.partition(begin)
        _, ended, tail = rest.partition(end)
        if not found or not ended:
            raise ValueError(f"{page.name} lacks the marks {begin} and {end}")
        text = f"{head}{begin}\n{table}\n{end}{tail}"
    return text


def write_tables(page: Path, tables: Mapping[str, str], script: str, about: str | None) -> int:
    """Write the tables of a page, or compare them with ``--check``; the exit code.

    Args:
        page: The page.
        tables: Markdown, by the names in its marks.
        script: The file of the script that makes them.
        about: What the script does, for ``--help``.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, exit with 1 if the page is old")
    check = parser.parse_args().check
    before, name = page.read_text(encoding="utf-8"), Path(script).name
    after = with_tables(page, before, tables, name)
    if check and before != after:
        sys.stderr.write(f"{page.name} is not what the code says: run python scripts/{name}\n")
        return 1
    if before != after:
        page.write_text(after, encoding="utf-8")
    return 0
