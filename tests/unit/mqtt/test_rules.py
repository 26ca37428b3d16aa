"""Topic filters and names, and what a server has said it can't take."""

from __future__ import annotations

import pytest
from mqtt5 import ConnAckPacket

from towline.mqtt.events import Filter
from towline.mqtt.rules import filter_problem, topic_problem, unsupported


@pytest.mark.parametrize("good", ["#", "a/#", "/#", "+", "+/a", "a/+/b", "/+", "a", "/", "a b", "$SYS/#", "+/+/#"])
def test_filters_that_are_well_formed(good: str) -> None:
    assert filter_problem(good) is None


@pytest.mark.parametrize("bad", ["a#", "a/#/b", "#/a", "##", "a/b#", "+#"])
def test_a_multi_level_wildcard_stands_alone_and_last(bad: str) -> None:
    """[MQTT-4.7.1-1], [MQTT-4.7.1-2 of 3.1.1]."""
    assert filter_problem(bad) is not None


@pytest.mark.parametrize("bad", ["a+", "+a", "a/b+/c", "++", "a/+b"])
def test_a_single_level_wildcard_takes_a_whole_level(bad: str) -> None:
    """[MQTT-4.7.1-2], [MQTT-4.7.1-3 of 3.1.1]."""
    assert filter_problem(bad) is not None


@pytest.mark.parametrize("good", ["$share/g/a", "$share/g/#", "$share/g//a", "$share/g/+/b", "$shared"])
def test_shared_filters_that_are_well_formed(good: str) -> None:
    assert filter_problem(good) is None


@pytest.mark.parametrize("bad", ["$share", "$share/", "$share//a"])
def test_a_share_has_a_name(bad: str) -> None:
    """[MQTT-4.8.2-1]."""
    assert filter_problem(bad) is not None


@pytest.mark.parametrize("bad", ["$share/g", "$share/g/", "$share/g+/a", "$share/g#/a", "$share/+/a", "$share/g/a#"])
def test_a_shares_name_has_no_wildcards_and_is_followed_by_a_filter(bad: str) -> None:
    """[MQTT-4.8.2-2]."""
    assert filter_problem(bad) is not None


@pytest.mark.parametrize(("topic", "good"), [("a/b", True), ("", False), ("a/#", False), ("+", False), ("\0", False)])
def test_topic_names(topic: str, good: bool) -> None:
    assert (topic_problem(topic) is None) is good


@pytest.mark.parametrize("length", [65_535, 65_536])
def test_a_topic_is_measured_in_bytes(length: int) -> None:
    assert (topic_problem("ä" * (length // 2) + "a" * (length % 2)) is None) is (length < 65_536)


def test_a_server_without_limits_takes_everything() -> None:
    wanted = [Filter("$share/g/#", identifier=1), Filter("+")]
    assert unsupported(ConnAckPacket(), wanted, "line") is None


def test_a_server_without_wildcards_still_takes_plain_filters() -> None:
    server = ConnAckPacket(wildcard_subscription_available=False)
    assert unsupported(server, [Filter("a/b")], "line") is None
    error = unsupported(server, [Filter("a/b"), Filter("a/#")], "line")
    assert error is not None
    assert 'offers no wildcards in subscriptions, which "a/#" needs' in str(error)
