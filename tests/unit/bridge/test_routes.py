"""Filters, templates and the record a message becomes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from towline.bridge.config.rules import route_problems
from towline.bridge.config.subscriptions import SubscribedRoute, covers, shadowed_routes, subscriptions
from towline.bridge.config.tables import RouteSection
from towline.bridge.patterns import Pattern, Template, is_allowed, kafka_name_problem, payload_path
from towline.bridge.routes import RouteTable, RowOutcome
from towline.guarantee import Guarantee
from towline.mqtt.rules import filter_problem

LEVELS = st.sampled_from(["a", "b", "", "$SYS", "ü", "{x}"])
TOPICS = st.lists(LEVELS, min_size=1, max_size=4).map("/".join)
FILTERS = st.builds(
    lambda levels, deep: "/".join([*levels, *(["#"] if deep else [])]),
    st.lists(st.sampled_from(["a", "b", "", "+", "$SYS"]), min_size=1, max_size=4),
    st.booleans(),
).filter(bool)


def route(source: str, topic: str = "t", **more: Any) -> SubscribedRoute:
    return RouteSection.model_validate({"from": source, "topic": topic, **more}).compile(Guarantee.AT_LEAST_ONCE)


@pytest.mark.parametrize(
    ("source", "topic", "captures"),
    [
        ("telemetry/{tenant}/{device}/#", "telemetry/t1/d7/temp/x", {"tenant": "t1", "device": "d7"}),
        ("telemetry/{tenant}/{device}/#", "telemetry/t1/d7", {"tenant": "t1", "device": "d7"}),
        ("telemetry/{tenant}/{device}/#", "telemetry/t1", None),
        ("a/+/{x}", "a/b/", {"x": ""}),
        ("a/{x}", "a/b/c", None),
        ("#", "a/b", {}),
        ("#", "$SYS/x", None),
        ("{x}/y", "$SYS/y", None),
        ("$SYS/{x}", "$SYS/y", {"x": "y"}),
        ("$share/g/a/{x}", "a/b", {"x": "b"}),
        ("{{x}}/{y}", "{x}/1", {"y": "1"}),
        ("/a", "/a", {}),
        ("/a", "a", None),
    ],
)
def test_a_filter_matches_and_captures(source: str, topic: str, captures: dict[str, str] | None) -> None:
    pattern, levels = Pattern.parse(source), topic.split("/")
    assert pattern.matches(topic) is (captures is not None)
    if captures is not None:
        assert {name: levels[level] for name, level in pattern.wildcards.items()} == captures
        assert {name: pattern.wildcard_level(name.upper()) for name in captures} == pattern.wildcards


def test_a_filter_is_subscribed_without_names() -> None:
    assert Pattern.parse("$share/g/t/{a}/+/{b}/#").filter == "$share/g/t/+/+/+/#"
    assert Pattern.parse("#").filter == "#"


@pytest.mark.parametrize(
    "text", ["a/#/b", "a+", "x{y}", "{a}/{a}", "", "{a b}", "$share/g", "$share/{g}/a", "}", "a\0"]
)
def test_what_is_no_filter_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        Pattern.parse(text)


@given(FILTERS, FILTERS, TOPICS)
def test_a_covering_filter_matches_all_the_covered_one_does(wide: str, narrow: str, topic: str) -> None:
    a, b = Pattern.parse(wide), Pattern.parse(narrow)
    if covers(a, b) and b.matches(topic):
        assert a.matches(topic)


@given(st.lists(FILTERS, min_size=1, max_size=5), TOPICS)
def test_the_subscriptions_bring_every_route_its_messages(filters: list[str], topic: str) -> None:
    routes = [route(each) for each in filters]
    subscribed = [Pattern.parse(s.pattern) for s in subscriptions(routes)]
    wanted = any(r.pattern.matches(topic) for r in routes)
    assert wanted == any(p.matches(topic) for p in subscribed)
    assert not any(covers(a, b) for a in subscribed for b in subscribed if a is not b)
    assert all(filter_problem(p.filter) is None for p in subscribed)


def test_a_covered_filter_raises_the_qos_of_the_covering_one() -> None:
    filters = subscriptions([route("a/{x}", qos=2), route("a/#", qos=1), route("a/b")])
    assert [(s.pattern, s.qos) for s in filters] == [("a/#", 2)]


def test_the_first_match_takes_the_message() -> None:
    routes = [route("a/b"), route("a/#"), route("{x}/b")]
    assert RouteTable(routes).match(pa.array(["a/b", "a/c", "c/b", "d", "a/c"])).to_pylist() == [0, 1, 2, None, 1]


def test_a_shadowed_route_is_found() -> None:
    assert shadowed_routes([route("a/#", where="x"), route("b"), route("a/{x}"), route("+")]) == [(2, 0)]


def test_templates_are_text_and_fields() -> None:
    parsed = Template.parse("{{{device}}}-{mqtt.user.k}")
    assert parsed.fields == ("device", "mqtt.user.k")
    assert parsed.parts == ("{", "device", "}-", "mqtt.user.k", "")
    assert Template.parse("plain").constant == "plain"


@pytest.mark.parametrize(
    "text",
    ["{", "}", "{nope}", "{}", "{mqtt.user.}", "a{b", "{payload.}", "{payload.a..b}", "{payloads}", "{payload.a[x]}"],
)
def test_what_is_no_template_is_refused(text: str) -> None:
    for wrong in (True, False):
        said = {"from": "a/{device}", "topic": "t", "key": text if wrong else "{device}-{payload.a[0]}-{mqtt.user.k}"}
        problems = [*route_problems(RouteSection.model_validate(said), Guarantee.AT_LEAST_ONCE, None)]
        assert [problem[:2] for problem in problems] == ([("TL-C66", ("key",))] if wrong else [])


@given(st.text())
def test_any_text_can_be_written_as_a_template(text: str) -> None:
    assert Template.parse(text.replace("{", "{{").replace("}", "}}")).constant == text


@pytest.mark.parametrize(("name", "legal"), [("a.b-c_9", True), ("", False), ("..", False), ("a b", False)])
def test_kafka_names(name: str, legal: bool) -> None:
    assert (kafka_name_problem(name) is None) is legal


def test_kafka_names_have_a_length_and_no_line_ends() -> None:
    assert kafka_name_problem("x" * 249) is None
    assert kafka_name_problem("x" * 250)
    assert kafka_name_problem("x\n")


def test_allowed_topics_are_names_and_globs() -> None:
    assert is_allowed("event.a", ["event.*"])
    assert not is_allowed("event", ["event.?"])
    assert is_allowed("anything", [])


@pytest.mark.parametrize(
    ("template", "level", "topic"),
    [
        ("towline.{x}", "d1", "towline.d1"),
        ("towline.{x}", "plant-7-telemetry.markers", None),
        ("towline.{x}.markers", "s", None),
        ("tow{x}", "line.s.markers", None),
        ("to{x}", "wline.dead", None),
        ("towline.d{x}", "ead", None),
        ("_{x}", "_consumer_offsets", None),
        ("{x}", "__transaction_state", None),
        ("{x}", "a.markers", "a.markers"),
        ("other.{x}", "towline.s.markers", "other.towline.s.markers"),
    ],
)
def test_a_device_reaches_no_reserved_topic(template: str, level: str, topic: str | None) -> None:
    section = {"from": "e/{x}", "topic": template, "allowed_topics": ["*"], "fallback_topic": "other"}
    compiled = RouteSection.model_validate(section).compile(Guarantee.AT_LEAST_ONCE, None, ("towline.dead",))
    name = template.replace("{x}", level)
    assert compiled.destination(name) == ((topic, RowOutcome.RENDERED) if topic else ("other", RowOutcome.FALLBACK))
    assert replace(compiled, fallback_topic=None).destination(name)[0] == topic


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("payload.device.id", ("device", "id")),
        ("payload.readings[0].value", ("readings", 0, "value")),
        ("payload[2]", (2,)),
        ("payload", ()),
        ("payload.a.", ()),
        ("mqtt.topic", ()),
    ],
)
def test_a_field_of_the_payload_is_a_path(name: str, steps: tuple[str | int, ...]) -> None:
    assert payload_path(name) == steps
