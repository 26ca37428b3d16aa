"""The page on the architecture names what is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
ROOMS = sorted(path.name for path in (ROOT / "src" / "towline").iterdir() if (path / "__init__.py").exists())


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
