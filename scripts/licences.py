"""The licences of all that `pip install "towline[spark,proxy]"` installs, as their packages declare them.

``python scripts/licences.py`` prints the table of docs/install.md; a test holds the page, and the list of what is
allowed, against what is installed.
"""

# ruff: noqa: INP001  a script, no package

from __future__ import annotations

import sys
from importlib.metadata import Distribution, PackageNotFoundError, distribution

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

__all__ = ["ALLOWED", "installed", "licence_of", "table"]

#: Licences (SPDX) under which a package may come with Towline: none asks more of who uses it than to keep its notice;
#: of LGPL-2.1, that the library itself stays free and can be exchanged.
ALLOWED = frozenset({
    "Apache-2.0",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "ISC",
    "LGPL-2.1-or-later",
    "MIT",
    "PSF-2.0",
})  # fmt: skip
#: What packages write that name theirs in words of their own, or in a classifier.
_SPDX = {
    "apache software license": "Apache-2.0",
    "bsd license": "BSD-3-Clause",
    "isc license (iscl)": "ISC",
    "mit license": "MIT",
    "python software foundation license": "PSF-2.0",
}


def installed(name: str = "towline", extras: frozenset[str] = frozenset({"spark", "proxy"})) -> dict[str, Distribution]:
    """What a package needs, and what that needs, by name; without the package itself.

    Raises:
        PackageNotFoundError: The package is not installed.
    """
    found: dict[str, Distribution] = {}
    waiting = [(name, extras)]
    while waiting:
        name, extras = waiting.pop()
        for text in distribution(name).requires or ():
            need = Requirement(text)
            wanted = need.marker is None or any(need.marker.evaluate({"extra": one}) for one in extras or {""})
            if wanted and (named := canonicalize_name(need.name)) not in found:
                try:
                    found[named] = distribution(need.name)
                except PackageNotFoundError:
                    continue  # an extra that is not installed here
                waiting.append((need.name, frozenset(need.extras)))
    return found


def licence_of(package: Distribution) -> str:
    """What a package says of its licence: an SPDX expression, else what a classifier or its own words mean."""
    data = package.metadata
    given: list[str] = [(data.get_all(name) or [""])[0].strip() for name in ("License-Expression", "License")]
    expression, words = given
    if expression or words in ALLOWED:
        return expression or words
    said: str = next(
        (one.rpartition(" :: ")[2] for one in data.get_all("Classifier") or () if "License ::" in one), words
    )
    return _SPDX.get(said.lower(), said)


def table() -> str:
    """The rows of the page, by name."""
    rows = [f"| {name} | {licence_of(package)} |" for name, package in sorted(installed().items())]
    return "\n".join(["| package | licence |", "|---|---|", *rows, ""])


if __name__ == "__main__":
    sys.stdout.write(table())
