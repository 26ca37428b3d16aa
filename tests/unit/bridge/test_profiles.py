"""Profiles of a user's own: a copy of Hono's, changed, and one made from nothing."""

# ruff: noqa: E501 - the messages are one line each, and pinned as such

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.bridge.test_config import content, read, told
from tests.unit.bridge.test_hono_file import FILE
from towline.bridge.patterns import sql_literal
from towline.bridge.profiles import shipped_profiles

COPIED = FILE.replace('"hono-errors"', '"my-hono.toml#hono-errors"').replace('"hono"', '"./my-hono.toml"')
HONO = shipped_profiles()[0].document.file.read_text()
SMALL = """
table = "plant"
[parameters]
site = { type = "site", default = "north" }
rooms = { names = "site", type = "value" }
limit = { type = "whole" }
[types.site]
refuse = [['^.*[^a-z].*$', "is no site; write small letters"]]
[derived]
level = { of = "site", replace = [['^', "site-"]] }
[[uplink]]
name = "plant"
[[uplink.route]]
from = "${level}/{room}/#"
topic = "${site}.a"
key = "{room}"
where = "room IN (${site}, 'x') AND qos < ${limit} OR topic = '$${x}'"
fields = { rooms = "from_json(${rooms}, 'MAP<STRING, STRING>')", name = "${bridge}" }
allowed_topics = { each = "${site}.${rooms}", none = ["${site}.*"] }
headers = { site = "${site}" }
"""
OWN = """
name = "b"
state_dir = "state"
[mqtt]
brokers = ["mqtt://h"]
[kafka]
bootstrap_servers = "k:9092"
[plant]
[[uplink]]
name = "up"
profile = "plant.toml"
"""


@pytest.fixture
def plant(tmp_path: Path) -> Path:
    (tmp_path / "plant.toml").write_text(SMALL)
    return tmp_path


def test_a_copy_is_the_profile(tmp_path: Path) -> None:
    (tmp_path / "my-hono.toml").write_text(HONO)
    assert read(COPIED, tmp_path).lines == read(FILE, tmp_path).lines


def test_a_parameter_is_text_in_texts_and_a_constant_in_sql(plant: Path) -> None:
    """Defaults and lists, with and without entries; a table has its own name."""
    (route,) = read(OWN, plant).uplinks[0].routes
    assert (route.pattern.text, route.topic.text) == ("site-north/{room}/#", "north.a")
    assert route.where == "room IN ('north', 'x') AND qos < NULL OR topic = '${x}'"
    assert dict(route.fields) == {"rooms": "from_json('{}', 'MAP<STRING, STRING>')", "name": "'b'"}
    assert route.allowed_topics == ("north.*",)
    said = '[plant]\nsite = "${SITE}"\nlimit = "${LIMIT}"\nrooms = { a = "it\'s", b = 1.5 }'
    (route,) = read(OWN.replace("[plant]", said), plant, {"SITE": "south", "LIMIT": "2"}).uplinks[0].routes
    rooms = sql_literal('{"a": "it\'s", "b": 1.5}')
    assert route.where == "room IN ('south', 'x') AND qos < 2 OR topic = '${x}'"
    assert dict(route.fields)["rooms"] == f"from_json({rooms}, 'MAP<STRING, STRING>')"
    assert route.allowed_topics == ("south.a", "south.b")


#: Old and new text of the profile or of the bridge file, and the line that tells.
MISTAKES = [
    ('"plant.toml"', '"plan.toml"', 'bridge.toml:11  uplink "up": the profile plan.toml can\'t be read. Correct the path.   [TL-C208]'),
    ('"plant.toml"', '"plant.toml#plan"', 'bridge.toml:11  uplink "up": plant.toml has no uplink "plan". Did you mean "plant"?   [TL-C208]'),
    ("[plant]", "[plant]\nrom = 1", 'bridge.toml:9  [plant]: unknown key "rom". Did you mean "rooms"?   [TL-C01]'),
    ("[plant]", '[plant]\nsite = "N"', 'bridge.toml:9  [plant]: "N" is no site. Write small letters.   [TL-C05]'),
    ("${site}.$", "${sight}.$", 'plant.toml:19: the profile has no parameter "sight". Did you mean "site"?   [TL-C209]'),
    ('type = "site", default', 'type = "sit", default', 'plant.toml:4: there is no type "sit". Did you mean "site"?   [TL-C209]'),
    ("from = ", "form = ", 'plant.toml:13  uplink "up" route 1: "from" is missing. Add it.   [TL-C02]'),
    ("'^.*[^a-z].*$'", "'['", 'plant.toml:8  [types]: "refuse" must be a valid regular expression. Correct the value.   [TL-C03]'),
    ("[derived]", "[derived", "plant.toml:9: not TOML: expected ']' at the end of a table declaration. Correct the line.   [TL-C11]"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "expected"), MISTAKES, ids=[str(i) for i in range(len(MISTAKES))])
def test_a_mistake_is_told_where_it_stands(plant: Path, old: str, new: str, expected: str) -> None:
    assert OWN.count(old) + SMALL.count(old) >= 1
    (plant / "plant.toml").write_text(SMALL.replace(old, new))
    lines = told(OWN.replace(old, new), plant)
    assert content(lines[0]) == content(expected), lines
