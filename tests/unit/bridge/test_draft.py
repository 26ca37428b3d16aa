"""A first bridge file: whatever is answered, it says that and is right, or the answer is refused."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from towline.bridge.config.file import parse
from towline.bridge.draft.answers import (
    DEFAULTS,
    QUESTIONS,
    default_name,
    draft_text,
    first_error,
    legal_name,
)

FILE = Path("bridge.toml")
HEAD = {"name": "plant-7", "state_dir": "state"}


def made(answers: Mapping[str, str]) -> str:
    return draft_text(answers, FILE, HEAD)


def test_what_is_at_hand_in_comments_is_right_too(tmp_path: Path) -> None:
    """Every comment that begins with a key may be taken out of its comment."""
    text = made(DEFAULTS | {"broker": "mqtts://b.example"})
    assert max(map(len, text.splitlines())) <= 120
    assert "password =" not in text
    ready = re.sub(r"^# (?=[a-z_]+ = )", "", text, flags=re.MULTILINE)
    assert ready.count("password_file") == text.count("password_file") > 1
    for name in ("mqtt.password", "kafka.password", "ca.pem"):
        (tmp_path / name).write_text("secret")
    bridge = parse(ready, tmp_path / "bridge.toml", {})
    assert bridge.lines[0].gateway.tls.ca_file == tmp_path / "ca.pem"
    assert bridge.kafka.password_file == tmp_path / "kafka.password"


@pytest.mark.parametrize(
    ("answers", "key"),
    [
        ({}, "{device}"),
        ({"topics": "a/+/b", "topic": "x"}, "{mqtt.topic}"),
        ({"topics": "a/{t}/{d}, b/{t}/{d}"}, "{t}/{d}"),
    ],
)
def test_the_key_is_what_the_filter_names(answers: dict[str, str], key: str) -> None:
    said = DEFAULTS | answers
    (line,) = parse(made(said), FILE, {}).uplinks
    assert (line.name, line.guarantee.value) == (said["topic"], "at_least_once")
    assert [route.key and route.key.text for route in line.routes] == [key] * len(said["topics"].split(","))


@given(st.text(max_size=12), st.sampled_from([*QUESTIONS]))
def test_any_answer_is_said_or_refused(text: str, key: str) -> None:
    draft = made(DEFAULTS | {key: text})
    mistake = first_error(draft, FILE)
    if mistake is None:
        raw = tomllib.loads(draft)
        said = {"kafka": raw["kafka"]["bootstrap_servers"], "topic": raw["uplink"][0]["route"][0]["topic"]}
        said |= {"broker": ",".join(raw["mqtt"]["brokers"]), "guarantee": raw["uplink"][0]["guarantee"]}
        said |= {"topics": ",".join(one["from"] for one in raw["uplink"][0]["route"])}
        assert re.sub(r"\s*,\s*", ",", text.strip()).strip(",") == said[key].strip() or said[key] == text
    else:
        assert "\n" not in str(mistake)


@given(st.text(max_size=80))
def test_a_name_is_legal(text: str) -> None:
    assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", legal_name(text, "otherwise"))
    assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", default_name())
