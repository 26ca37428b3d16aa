"""A house rule that no other tool checks: a class name means one thing."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src").rglob("*.py"))


def test_a_public_class_name_means_one_thing() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in SOURCES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(path.relative_to(ROOT / "src").as_posix())
    assert {name: where for name, where in places.items() if len(where) > 1} == {}
