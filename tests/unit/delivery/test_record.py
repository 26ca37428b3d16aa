"""The record of the broker's session: as it was made durable, or given up, never another client's by mistake."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest

from towline.delivery.outbound import load_session_record
from towline.errors import ConfigError
from towline.mqtt.events import SessionConfig, SessionRecord

CONFIG = SessionConfig("me", "line", session_expiry_s=600)
RECORD = SessionRecord("me", established=True, subscriptions={"a/#": 9, "b": -1}, servers=("one", "two"))


def test_a_record_comes_back_as_it_was_stored() -> None:
    for record in (RECORD, SessionRecord("me")):
        assert load_session_record(asdict(record), "here", CONFIG) == record
    assert load_session_record({}, "here", CONFIG) is None


@pytest.mark.parametrize(
    ("established", "expiry_s", "abandoned", "refused"),
    [
        (True, 600, "", True),
        (True, 600, "another", True),
        (True, 600, "before", False),
        (False, 600, "", False),  # the broker holds nothing for it
        (True, 0, "", False),
    ],
)
def test_the_session_of_another_client_id_is_given_up_only_where_nothing_waits_in_it_or_a_user_says_so(
    established: bool, expiry_s: int, abandoned: str, refused: bool
) -> None:
    stored: dict[str, Any] = asdict(replace(RECORD, client_id="before", established=established))
    config = replace(CONFIG, session_expiry_s=expiry_s)
    if not refused:
        assert load_session_record(stored, "here", config, abandoned) is None
        return
    with pytest.raises(ConfigError, match=r'here.*"before".*"me".*TL-M23'):
        load_session_record(stored, "here", config, abandoned)
