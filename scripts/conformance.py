"""Write docs/conformance.md: every normative statement of MQTT 5.0 and 3.1.1, and the tests that carry its label.

    python scripts/conformance.py            writes the page
    python scripts/conformance.py --check    exit code 1 when the page is not what it would write
    python scripts/conformance.py --missing  the statements that bind a client and have no test

A label is written `[MQTT-4.3.3-10]`, several `[MQTT-4.6.0-2, -3]`, one of 3.1.1 `[MQTT-3.1.3-7 of 3.1.1]`. A module
whose docstring says that its labels are those of MQTT 3.1.1 needs no suffix. A label in a test or right above it counts
for that test, one in the docstring of a test module for the module, one elsewhere (a reason, a helper) for nothing. The
client vectors carry labels in their names.
"""
# ruff: noqa: INP001, T201  a script that talks to a person

from __future__ import annotations

import ast
import json
import re
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "conformance.md"
DATA = Path(__file__).with_suffix(".toml")
VECTORS = ROOT.parent / "shared" / "vectors" / "mqtt_client"

_HEAD = """\
# Conformance

Every normative statement of MQTT 5.0 and 3.1.1 and the tests that prove that Towline's client obeys it, or why it asks
nothing of a client. Written by `scripts/conformance.py` from the labels in the tests; don't edit it by hand.
A test is named by its module under `tests/`; "vectors" are the client vectors of Eclipse Mosquitto, played by
`unit/mqtt/test_vectors`.
"""
_BRACKET = re.compile(r"\[(MQTT-\d[^\]]*)\]")
_NUMBER = re.compile(r"MQTT-(\d[\d.-]*\d)|(?<=,) ?-(\d+)\b")
_MODULE_OF_3 = "are those of MQTT 3.1.1"
#: Its labels are examples.
_OWN_TEST = ROOT / "tests" / "unit" / "scripts" / "test_conformance.py"
#: Vectors of packets that only clients send: the labels are about the sender, and here that is the script.
_NEVER_FROM_A_SERVER = frozenset({"CONNECT", "SUBSCRIBE", "UNSUBSCRIBE", "PINGREQ"})
#: Tests named for one statement before "and n more".
_SHOWN = 4


@dataclass
class Version:
    """The statements of one standard."""

    name: str
    statements: list[str]
    reasons: dict[str, str] = field(default_factory=dict)
    tests: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    vectors: Counter[str] = field(default_factory=Counter)

    def proven(self, statement: str) -> bool:
        """Whether a test carries the label."""
        return bool(self.tests.get(statement) or self.vectors[statement])

    @property
    def missing(self) -> list[str]:
        """Statements that bind a client and have no test."""
        return [s for s in self.statements if s not in self.reasons and not self.proven(s)]

    @property
    def unknown(self) -> dict[str, set[str]]:
        """Labels that the standard does not have → where they stand."""
        return {label: where for label, where in self.tests.items() if label not in self.statements}


def labels(text: str, default: str = "5.0") -> Iterator[tuple[str, str]]:
    """(version, number) of every label in a text."""
    for bracket in _BRACKET.findall(text):
        version = "3.1.1" if "of 3.1.1" in bracket else default
        stem = ""
        for whole, last in _NUMBER.findall(bracket):
            stem = whole or f"{stem.rpartition('-')[0]}-{last}"
            yield version, stem


def harvest(path: Path) -> Iterator[tuple[str, str, str]]:
    """(version, number, test) of every label in a test module."""
    source = path.read_text()
    tree = ast.parse(source)
    default = "3.1.1" if _MODULE_OF_3 in (ast.get_docstring(tree) or "").replace("\n", " ") else "5.0"
    owners = _owners(tree, source.splitlines())
    place = path.relative_to(ROOT / "tests").with_suffix("").as_posix()
    for index, line in enumerate(source.splitlines()):
        owner = owners.get(index)
        for version, number in labels(line, default) if owner is not None else ():
            yield version, number, f"{place}::{owner}" if owner else place


def _owners(tree: ast.Module, lines: list[str]) -> dict[int, str]:
    """Line → the test it belongs to, with its decorators and the comment right above; "" in the module's docstring."""
    first_node = tree.body[0] if ast.get_docstring(tree) else None
    owners = dict.fromkeys(range(first_node.end_lineno or 0), "") if first_node else {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or not node.name.startswith("test"):
            continue
        first = min([node.lineno, *(d.lineno for d in node.decorator_list)]) - 1
        while first and lines[first - 1].lstrip().startswith("#"):
            first -= 1
        owners.update(dict.fromkeys(range(first, node.end_lineno or node.lineno), node.name))
    return owners


def harvest_vectors(versions: dict[str, Version]) -> None:
    """Count the client vectors that carry a label in their names."""
    for file in sorted(VECTORS.glob("*.json")):
        if file.stem in _NEVER_FROM_A_SERVER:
            continue
        for group in json.loads(file.read_text()):
            for test in group["tests"]:
                level = test.get("ver", group.get("ver", 4))
                for _, number in labels(test["name"]):
                    versions["5.0" if level == 5 else "3.1.1"].vectors[number] += 1


def collect() -> dict[str, Version]:
    """Both standards with everything that is known about them."""
    data = tomllib.loads(DATA.read_text())
    versions = {name: Version(name, statements) for name, statements in data["statements"].items()}
    for entry in data["not_applicable"]:
        versions[entry["version"]].reasons.update(dict.fromkeys(entry["statements"], entry["because"]))
    for path in sorted(set((ROOT / "tests").rglob("test_*.py")) - {_OWN_TEST}):
        for version, number, test in harvest(path):
            versions[version].tests[number].add(test)
    harvest_vectors(versions)
    return versions


def page(versions: dict[str, Version]) -> str:
    """The page as it has to be."""
    parts = [_HEAD]
    for version in versions.values():
        parts += [_summary(version), _table(version)]
    return "\n".join(parts)


def _summary(version: Version) -> str:
    binding = [s for s in version.statements if s not in version.reasons]
    proven = len(binding) - len(version.missing)
    return (
        f"## MQTT {version.name}\n\n"
        f"{len(version.statements)} statements, {len(binding)} of them bind a client: {proven} with a test,"
        f" {len(version.missing)} without.\n"
    )


def _table(version: Version) -> str:
    rows = ["| statement | proven by |", "|---|---|"]
    rows += [f"| {statement} | {_proof(version, statement)} |" for statement in version.statements]
    return "\n".join(rows) + "\n"


def _proof(version: Version, statement: str) -> str:
    tests = sorted(version.tests.get(statement, ()))
    shown = [f"`{test}`" for test in tests[:_SHOWN]]
    if len(tests) > _SHOWN:
        shown.append(f"and {len(tests) - _SHOWN} more")
    if version.vectors[statement]:
        shown.append(f"{version.vectors[statement]} vectors")
    if not shown and statement in version.reasons:
        return f"not applicable: {version.reasons[statement]}"
    return ", ".join(shown) or "**no test yet**"


def main(arguments: list[str]) -> int:
    """Write, check or list; the exit code."""
    versions = collect()
    if "--missing" in arguments:
        for version in versions.values():
            print(f"{version.name}: {len(version.missing)}: {' '.join(version.missing)}")
        return 0
    text = page(versions)
    if "--check" in arguments:
        return 0 if PAGE.exists() and PAGE.read_text() == text else 1
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
