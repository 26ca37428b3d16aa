"""Whom Mosquitto's rules let read and write, as ``mosquitto_acl_check_default`` of 2.0 decides it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from towline.doctor.broker.acl import Right, parse_acl, read_acl, right
from towline.errors import ConfigError
from towline.mqtt.filters import matches

RULES = """\
# for whoever gives no name
topic read public/#
user towline
topic readwrite telemetry/#
topic deny telemetry/secret
topic write commands/all
pattern read devices/%c/%u/#
topic everything else/with spaces
"""


def allowed(access: str, pattern: str, user: str | None = "towline", client_id: str = "plant") -> Right:
    return right(tuple(parse_acl(RULES)), access, pattern, user=user, client_id=client_id)


@pytest.mark.parametrize(
    ("access", "pattern", "expected"),
    [
        ("read", "telemetry/a/+", Right.ALL),
        ("read", "telemetry/#", Right.PART),  # but for one topic
        ("read", "telemetry/secret", Right.NONE),
        ("read", "#", Right.PART),
        ("read", "commands/all", Right.NONE),
        ("write", "commands/all", Right.ALL),
        ("write", "commands/one", Right.NONE),
        ("read", "public/x", Right.NONE),  # the rules before the first user are not for users
        ("read", "devices/plant/towline/#", Right.ALL),
        ("read", "devices/other/towline/#", Right.NONE),
        ("write", "everything else/with spaces", Right.ALL),
    ],
)
def test_a_right(access: str, pattern: str, expected: Right) -> None:
    assert allowed(access, pattern) is expected


def test_those_without_a_name_have_the_first_rules() -> None:
    assert allowed("read", "public/#", user=None) is Right.ALL
    assert allowed("read", "telemetry/#", user=None) is Right.NONE
    assert allowed("read", "devices/plant/towline/#", user=None) is Right.NONE


def test_a_file_without_a_rule_lets_nobody_in_and_one_that_is_missing_is_told(tmp_path: Path) -> None:
    file = tmp_path / "acl"
    file.write_text("# nothing\n", encoding="utf-8")
    assert right(read_acl(file), "read", "a", user=None, client_id="c") is Right.NONE
    with pytest.raises(ConfigError, match="no such file") as caught:
        read_acl(tmp_path / "none")
    assert caught.value.code == "TL-C155"


LEVELS = st.sampled_from(["a", "b", "+", "#"])
TOPIC = st.lists(st.sampled_from("ab"), min_size=1, max_size=3).map("/".join)


@st.composite
def filters(draw: st.DrawFn) -> str:
    levels = draw(st.lists(LEVELS, min_size=1, max_size=3))
    return "/".join("+" if level == "#" and at < len(levels) - 1 else level for at, level in enumerate(levels))


@given(st.lists(st.tuples(st.sampled_from(["read", "write", "deny", "readwrite"]), filters()), max_size=5), TOPIC)
def test_of_one_topic_a_denial_wins_and_else_any_rule_that_takes_it(rules: list[tuple[str, str]], topic: str) -> None:
    text = "\n".join(f"topic {access} {pattern}" for access, pattern in rules)
    found = right(tuple(parse_acl(text)), "read", topic, user=None, client_id="c")
    taking = [access for access, pattern in rules if matches(pattern, topic)]
    expected = "deny" not in taking and any(access in {"read", "readwrite"} for access in taking)
    assert found is (Right.ALL if expected else Right.NONE)


@given(st.text(max_size=200))
def test_no_text_does_more_than_be_read(text: str) -> None:
    for rule in parse_acl(text):
        assert rule.pattern
