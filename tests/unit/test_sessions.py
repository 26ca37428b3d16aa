"""The rule by which a session of a page is compared with a terminal."""

from __future__ import annotations

import pytest

from tests.integration.bridge.terminal import matches, sessions

PAGE = "text\n```console\n$ ls\na 1\n```\n\n```toml\na = 1\n```\n```console\n$ pwd\n```\n"


def test_sessions_are_taken_from_the_page() -> None:
    assert sessions(PAGE) == ["$ ls\na 1\n", "$ pwd\n"]


@pytest.mark.parametrize(
    ("said", "wanted", "same"),
    [
        ("received 1,000 in 0.7 s", "received 7 in 12 s", True),
        ("received 1,000 in 0.7 s", "got 1,000 in 0.7 s", False),
        ("in /tmp/x/y", "in /home/you/.local", True),
        ("mqtt://127.0.0.1:1883 x", "mqtt://127.0.0.1:29 x", True),
        ("http://127.0.0.1:1883 x", "mqtt://127.0.0.1:29 x", False),
        ("a: \r\nb", "a:\nb", True),
        ("a\nb\nc\nd", "a\n...\nd", True),
        ("a\nd", "a\n...\nd", True),
        ("a\nb\nc\nd", "a\n...\nc", False),
        ("a\nb", "a", False),
        ("a", "a\nb", False),
        ("a b", "a\n...\nb", False),
    ],
)
def test_numbers_paths_and_more_lines_may_differ(said: str, wanted: str, same: bool) -> None:
    assert matches(said, wanted) is same
