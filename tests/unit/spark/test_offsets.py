from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from towline.errors import ConfigError, GatewayError
from towline.gateway.identity import JournalPosition
from towline.spark.offsets import SourceOffset, check_distinct
from towline.spark.reader import ranges_between

PLACE = SourceOffset((JournalPosition("plant", "3a330b3ed8c4", 1005, "0badf00d"),), 2)


def test_the_text_never_changes_its_order() -> None:
    """Spark compares offsets as text: another order of keys would be another offset."""
    text = '{"gateways": {"plant": {"journal": "3a330b3ed8c4", "offset": 1005, "incarnation": "0badf00d"}}, "tick": 2}'
    empty = '{"gateways": {"plant": {"journal": "3a330b3ed8c4", "offset": 0}}, "tick": 2}'
    assert json.dumps(PLACE.to_json()) == text
    for offset in (text, empty):
        assert json.dumps(SourceOffset.parse(json.loads(offset)).to_json()) == offset


PLACES = st.builds(
    JournalPosition,
    st.text(min_size=1, max_size=4),
    st.text(min_size=1, max_size=4),
    st.integers(0, 1 << 62),
    st.text(max_size=4),
)


@given(
    st.lists(PLACES, min_size=1, max_size=5, unique_by=lambda place: place.gateway),
    st.integers(0, 1 << 30),
    st.randoms(),
)
def test_any_offset_comes_back_and_gateways_have_one_order(
    places: list[JournalPosition], tick: int, chance: Random
) -> None:
    position = SourceOffset(tuple(places), tick)
    text = json.dumps(position.to_json())
    chance.shuffle(places)
    assert json.dumps(SourceOffset(tuple(places), tick).to_json()) == text
    assert SourceOffset.parse(json.loads(text)) == position
    assert list(position.to_json()["gateways"]) == sorted(place.gateway for place in places)


@pytest.mark.parametrize(
    "offset",
    [
        {},
        {"gateways": {}},
        {"gateways": []},
        {"gateways": {"a": {"journal": "x"}}},
        {"gateways": {"a": {"journal": "x", "offset": None}}},
        {"gateways": {"a": {"journal": "x", "offset": 1}, "b": {"journal": "y"}}},
        {"gateways": {"a": {"journal": "x", "offset": 1}, "b": 7}},
        {"telemetry": {"0": 17}},
        17,
        [17],
        None,
    ],
)
def test_an_offset_of_another_source_is_one_line(offset: Any) -> None:
    with pytest.raises(GatewayError, match=r"the checkpoint has an offset of another source.*TL-G12") as caught:
        SourceOffset.parse(offset)
    assert "checkpoint directory of its own" in caught.value.remedy


def place(name: str, offset: int) -> JournalPosition:
    return JournalPosition(name, f"journal of {name}", offset)


@pytest.mark.parametrize(
    ("second", "problem"),
    [
        (JournalPosition("a", "another", 5), 'have the same name "a"'),
        (JournalPosition("b", "journal of a", 5), "serve one journal, journal of a"),
    ],
)
def test_a_gateway_is_listed_once_by_name_and_journal(second: JournalPosition, problem: str) -> None:
    check_distinct([place("a", 5), place("c", 5)])
    with pytest.raises(ConfigError, match=rf"two gateways {problem}.*TL-G50"):
        check_distinct([place("a", 5), place("c", 5), second])


def test_who_comes_or_goes_has_no_rows_in_that_batch() -> None:
    start = SourceOffset((place("a", 5), place("gone", 7), place("idle", 3)))
    end = SourceOffset((place("new", 100), place("a", 9), place("idle", 3)))
    assert ranges_between(start, end) == [(5, place("a", 9))]
