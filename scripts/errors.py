"""Writes docs/errors.md from src/towline/explanations.toml, which `towline explain` shows.

    python scripts/errors.py            write it
    python scripts/errors.py --check    exit code 1 if the page says something else

A code's letter names its section; within one the order is that of the file.
"""
# ruff: noqa: INP001  a script, no package

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "errors.md"
DATA = ROOT / "src" / "towline" / "explanations.toml"

HEAD = """\
# Messages with a code

Every message says where, what is wrong, and what to do; the code names the paragraph here, and `towline explain TL-C12`
shows it without a network. Exit code 2 is for what you wrote (TL-C..) or have to install (TL-S..), 4 for what this user
may not see (TL-B59), 1 for anything else. *At stake* says which promise it touches: what is lost, doubled or shown, or
that nothing is. Written by `scripts/errors.py` from `src/towline/explanations.toml`; don't edit it by hand. A test
keeps both and the code together, and sees that each row has its three parts.
"""
_DOCTOR = """\
What `towline doctor` asks; the row of its table has the figures and the command. [Doctor](doctor.md) says
when each row warns."""
#: Letters of the codes of a section → its title, and what stands above its table.
SECTIONS = {
    "C": ("Configuration (TL-C)", ""),
    "M": ("MQTT (TL-M)", ""),
    "J": ("Journal (TL-J)", ""),
    "G": ("Gateway and Spark (TL-G)", ""),
    "O": ("Publisher (TL-O)", ""),
    "K": ("Kafka (TL-K)", ""),
    "D": ("Doctor (TL-D)", f"{_DOCTOR}\n\n"),
    "BSPX": ("Bridge, set-up, proof", ""),
}
TABLE = "| code | what happened | at stake | what to do |\n|---|---|---|---|\n"


def row(code: str, parts: dict[str, str]) -> str:
    """One row of a table; a bar within a text is none of the table's."""
    cells = (parts[name].replace("|", "\\|") for name in ("happened", "stake", "do"))
    return f"| {' | '.join((code, *cells))} |\n"


def page(explanations: dict[str, Any]) -> str:
    """The page as it has to be."""
    parts = [HEAD]
    for letters, (title, text) in SECTIONS.items():
        rows = (row(code, parts) for code, parts in explanations.items() if code[3] in letters)
        parts.append(f"\n## {title}\n\n{text}{TABLE}{''.join(rows)}")
    return "".join(parts)


def main(arguments: list[str]) -> int:
    """Write the page, or check it."""
    text = page(tomllib.loads(DATA.read_text()))
    if "--check" in arguments:
        if PAGE.read_text() == text:
            return 0
        sys.stderr.write(f"{PAGE.name} is not what {DATA.name} says: run python scripts/errors.py\n")
        return 1
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
