"""What two topic filters take both, against every topic of a small world."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from towline.mqtt.filters import common_filter, matches, overlapping_pairs

LEVELS = ("a", "b", "", "$x")
TOPICS = ["/".join(levels) for depth in (1, 2, 3, 4) for levels in product(LEVELS, repeat=depth)]
TOPICS.remove("")

_levels = st.lists(st.sampled_from(["a", "b", "", "+", "$x"]), max_size=3)
FILTERS = st.builds(lambda levels, deep: "/".join([*levels, *deep]), _levels, st.sampled_from([[], ["#"]])).filter(bool)


def takes(pattern: str, topic: str) -> bool:
    """By the words of MQTT 5 section 4.7, level by level."""
    if topic.startswith("$") and pattern[0] in "+#":
        return False
    wanted, levels = pattern.split("/"), topic.split("/")
    if wanted[-1] == "#":
        wanted, levels = wanted[:-1], levels[: len(wanted) - 1]
    return len(wanted) == len(levels) and all(one in {"+", level} for one, level in zip(wanted, levels, strict=True))


def taken(pattern: str) -> set[str]:
    found = {topic for topic in TOPICS if takes(pattern, topic)}
    assert found == {topic for topic in TOPICS if matches(pattern, topic)}
    return found


@given(FILTERS, FILTERS)
def test_what_two_filters_take_both_is_one_filter_or_nothing(one: str, other: str) -> None:
    """[MQTT-4.7.1-2, MQTT-4.7.2-1]: `#` takes the level above too, and no wildcard at the start takes `$SYS`."""
    both = common_filter(one, other)
    assert both == common_filter(other, one)
    assert taken(one) & taken(other) == (set() if both is None else taken(both))
    assert both is None or taken(both), "a filter of which some topic is known"


def test_pairs_of_subscriptions_that_overlap() -> None:
    assert [*overlapping_pairs(["a/+/c", "k", "a/b/+", "$share/g/a/b/c"])] == [
        ("a/+/c", "a/b/+"),
        ("a/+/c", "$share/g/a/b/c"),
        ("a/b/+", "$share/g/a/b/c"),
    ]
