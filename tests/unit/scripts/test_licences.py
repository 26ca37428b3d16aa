"""Each package that comes with Towline has a licence that is allowed, and stands in docs/install.md."""

from __future__ import annotations

import re
from importlib.metadata import Distribution
from pathlib import Path

import pytest
from scripts import licences

PAGE = (Path(__file__).parents[3] / "docs" / "install.md").read_text()


def test_every_licence_is_allowed_and_named() -> None:
    listed = dict(re.findall(r"^\| ([\w.-]+) \| ([^|]+) \|$", PAGE, flags=re.MULTILINE))
    for name, package in licences.installed().items():
        licence = licences.licence_of(package)
        assert set(re.split(r" (?:AND|OR) ", licence)) <= licences.ALLOWED, f"{name}: {licence}"
        assert listed.get(name) == licence, "run scripts/licences.py"


class Declaring(Distribution):
    """A package with these metadata."""

    def __init__(self, text: str) -> None:
        self._text = text

    def read_text(self, filename: str) -> str | None:
        return f"Metadata-Version: 2.4\nName: x\n{self._text}\n" if filename == "METADATA" else None

    def locate_file(self, path: object) -> Path:
        raise FileNotFoundError(path)


@pytest.mark.parametrize(
    ("metadata", "licence"),
    [
        ("License-Expression: GPL-3.0-only\nClassifier: License :: OSI Approved :: MIT License", "GPL-3.0-only"),
        ("License: LGPL-2.1-or-later\nClassifier: License :: OSI Approved :: LGPLv2+", "LGPL-2.1-or-later"),
        ("Classifier: License :: OSI Approved :: MIT License", "MIT"),
        ("License: Proprietary", "Proprietary"),
        ("", ""),
    ],
)
def test_a_licence_is_read_where_a_package_says_it(metadata: str, licence: str) -> None:
    read = licences.licence_of(Declaring(metadata))
    assert read == licence
    assert (read in licences.ALLOWED) is (licence in {"MIT", "LGPL-2.1-or-later"})
