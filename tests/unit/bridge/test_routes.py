"""Filters, templates and the record a message becomes."""

from __future__ import annotations

import re
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.bridge.oracle import captured, wrong_topic
from towline.bridge.config.rules import route_problems
from towline.bridge.config.subscriptions import covers, shadowed_routes, subscriptions
from towline.bridge.config.tables import RouteSection
from towline.bridge.patterns import Pattern
from towline.bridge.routes import Route
from towline.guarantee import Guarantee
from towline.mqtt.rules import filter_problem

LEVELS = st.sampled_from(["a", "b", "", "$SYS", "ü", "{x}"])
TOPICS = st.lists(LEVELS, min_size=1, max_size=4).map("/".join)
FILTERS = st.builds(
    lambda levels, deep: "/".join([*levels, *(["#"] if deep else [])]),
    st.lists(st.sampled_from(["a", "b", "", "+", "$SYS"]), min_size=1, max_size=4),
    st.booleans(),
).filter(bool)


def route(source: str, topic: str = "t", **more: Any) -> Route:
    return RouteSection.model_validate({"from": source, "topic": topic, **more}).compile(Guarantee.AT_LEAST_ONCE)


PATTERNS = st.builds(
    lambda share, levels, deep: f"{share}{'/'.join([*levels, *deep])}",
    st.sampled_from(["", "$share/g/"]),
    st.lists(st.sampled_from(["a", "", "+", "$SYS", "{x}", "{Y}", "{{x}}"]), min_size=1, max_size=4, unique=True),
    st.sampled_from([[], ["#"]]),
).filter(lambda text: text not in ("", "$share/g/"))


@settings(max_examples=100)
@given(PATTERNS, TOPICS)
def test_a_filter_matches_and_captures(text: str, topic: str) -> None:
    """And is subscribed without the names of its wildcards."""
    pattern, wanted, levels = Pattern.parse(text), captured(text, topic), topic.split("/")
    assert pattern.matches(topic) is (wanted is not None)
    if wanted is not None:
        assert {name: levels[level] for name, level in pattern.wildcards.items()} == wanted
        assert {name: pattern.wildcard_level(name.swapcase()) for name in wanted} == pattern.wildcards
    assert pattern.filter == re.sub("{[xY]}", "+", text.replace("{{x}}", "\0")).replace("\0", "{x}")


@pytest.mark.parametrize(
    "text", ["a/#/b", "a+", "x{y}", "{a}/{a}", "", "{a b}", "$share/g", "$share/{g}/a", "$share/{{g}}/a", "}", "a\0"]
)
def test_what_is_no_filter_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        Pattern.parse(text)


@given(FILTERS, FILTERS, TOPICS)
def test_a_covering_filter_matches_all_the_covered_one_does(wide: str, narrow: str, topic: str) -> None:
    a, b = Pattern.parse(wide), Pattern.parse(narrow)
    if covers(a.filter, b.filter) and b.matches(topic):
        assert a.matches(topic)


@given(st.lists(FILTERS, min_size=1, max_size=5), TOPICS)
def test_the_subscriptions_bring_every_route_its_messages(filters: list[str], topic: str) -> None:
    routes = [route(each) for each in filters]
    subscribed = [Pattern.parse(s.pattern) for s in subscriptions(routes)]
    wanted = any(r.pattern.matches(topic) for r in routes)
    assert wanted == any(p.matches(topic) for p in subscribed)
    assert not any(covers(a.filter, b.filter) for a in subscribed for b in subscribed if a is not b)
    assert all(filter_problem(p.filter) is None for p in subscribed)


def test_a_shadowed_route_is_found() -> None:
    assert shadowed_routes([route("a/#", where="x"), route("b"), route("a/{x}"), route("+")]) == [(2, 0)]


@pytest.mark.parametrize(
    "text",
    ["{", "}", "{nope}", "{}", "{mqtt.user.}", "a{b", "{payload.}", "{payload.a..b}", "{payloads}", "{payload.a[x]}"],
)
def test_what_is_no_template_is_refused(text: str) -> None:
    for wrong in (True, False):
        said = {"from": "a/{device}", "topic": "t", "key": text if wrong else "{device}-{payload.a[0]}-{mqtt.user.k}"}
        problems = [*route_problems(RouteSection.model_validate(said), Guarantee.AT_LEAST_ONCE, None)]
        assert [problem[:2] for problem in problems] == ([("TL-C66", ("key",))] if wrong else [])


#: What a device says, to come to a topic of markers or dead letters, or to one that Kafka has no name for.
SAID = (
    *(None, "", ".", "..", "_consumer_offsets", "__x", "wline.dead", "line.s.markers", "towline.s.markers", "a b"),
    *("towline.dead", "a\n", "x" * 249, "x" * 250, "d1", "s.markers", "ead", "dead", "D-1_", "é", "event", "event.ab"),
)


@pytest.mark.parametrize("template", ["{x}", "t.{x}", "_{x}", "tow{x}", "towline.{x}", "towline.d{x}", "event.{x}"])
def test_a_device_reaches_no_reserved_topic(template: str) -> None:
    dead = ("towline.dead", "event.dead")
    for said, allowed in product(SAID, [[], ["*"], ["event.?", "event.d*", "towline.d1"]]):
        section = {"from": "e/{x}", "topic": template, "allowed_topics": allowed}
        compiled = RouteSection.model_validate(section).compile(Guarantee.AT_LEAST_ONCE, None, dead)
        name = None if said is None else template.replace("{x}", said)
        problem = wrong_topic(name, section, dead)
        outcome = compiled.topic_outcome(name)
        assert (outcome.reason.value if outcome.reason else "") == problem
