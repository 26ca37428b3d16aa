"""Each package that comes with Towline has a licence that is allowed, and stands in docs/install.md."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from itertools import chain
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from scripts import licences

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "install.md").read_text()


def test_every_licence_is_allowed_and_named() -> None:
    listed = dict(re.findall(r"^\| ([\w.-]+) \| ([^|]+) \|$", PAGE, flags=re.MULTILINE))
    for name, package in licences.installed().items():
        licence = licences.licence_of(package)
        assert set(re.split(r" (?:AND|OR) ", licence)) <= licences.ALLOWED, f"{name}: {licence}"
        assert listed.get(name) == licence, "run scripts/licences.py"


def test_every_package_that_the_source_imports_is_required() -> None:
    """What only a developer has installed ends a command of everybody else."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    texts = (*project["dependencies"], *chain(*project["optional-dependencies"].values()))
    required = {str(canonicalize_name(Requirement(text).name)) for text in texts}
    required |= {name for package in [*required] for name in licences.installed(package, frozenset())}
    nodes = [node for file in (ROOT / "src").rglob("*.py") for node in ast.walk(ast.parse(file.read_text()))]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom) and not node.level}
    own_packages = {package.name for package in (ROOT / "src").iterdir()}
    modules = {name.partition(".")[0] for name in names} - sys.stdlib_module_names - own_packages
    distributions = packages_distributions()
    for module in modules:
        packages = {str(canonicalize_name(name)) for name in distributions.get(module, [module])}
        assert not packages.isdisjoint(required), module
