"""The page on the architecture names what is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
STATIONS = sorted(set(re.findall(r"\]\(\.\./(src/[\w/]+\.py)\)", PAGE)))
ROOMS = sorted(path.name for path in (ROOT / "src" / "towline").iterdir() if (path / "__init__.py").exists())


@pytest.mark.parametrize("station", STATIONS)
def test_a_file_that_a_message_passes_opens_with_what_it_does(station: str) -> None:
    """In two lines: the first paragraph of its docstring, which ends with a full stop."""
    opening = (ast.get_docstring(ast.parse((ROOT / station).read_text())) or "").split("\n\n")[0]
    assert opening.endswith((".", ":"))
    assert len(opening.splitlines()) <= 2


def test_each_way_has_eight_files() -> None:
    assert [len(re.findall(r"^\| \d \|", way, re.MULTILINE)) for way in PAGE.split("\n## ")[1:3]] == [8, 8]


@pytest.mark.parametrize("room", ROOMS)
def test_every_room_is_in_the_picture(room: str) -> None:
    assert re.search(rf"^  {room}/ ", PAGE, re.MULTILINE)


def test_what_is_named_in_the_picture_is_there() -> None:
    floor = re.search(r"^  (guarantee .*?)  +the ground floor", PAGE, re.MULTILINE)
    assert floor is not None
    absent = [name for name in floor[1].split() if not (ROOT / "src" / "towline" / f"{name}.py").exists()]
    assert absent == []


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`((?:\w+/)+\w+\.py|src/\w+|tests/)`", PAGE))))
def test_a_place_for_something_new_is_there(path: str) -> None:
    assert (ROOT / "src" / "towline" / path).exists() or (ROOT / path).exists()
