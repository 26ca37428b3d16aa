"""Each package that comes with Towline has a licence that is allowed, and stands in docs/install.md."""

from __future__ import annotations

import re
from pathlib import Path

from scripts import licences

PAGE = (Path(__file__).parents[3] / "docs" / "install.md").read_text()


def test_every_licence_is_allowed_and_named() -> None:
    listed = dict(re.findall(r"^\| ([\w.-]+) \| ([^|]+) \|$", PAGE, flags=re.MULTILINE))
    for name, package in licences.installed().items():
        licence = licences.licence_of(package)
        assert set(re.split(r" (?:AND|OR) ", licence)) <= licences.ALLOWED, f"{name}: {licence}"
        assert listed.get(name) == licence, "run scripts/licences.py"
