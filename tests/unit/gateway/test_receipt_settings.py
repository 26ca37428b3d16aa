"""What can't go together with receipts is said before anything is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from towline.gateway.settings import GatewaySettings


def settings(**more: Any) -> GatewaySettings:
    given = {"name": "g", "state_dir": Path("g"), "brokers": "mqtt://b", "subscriptions": [{"pattern": "t/#"}]}
    return GatewaySettings.model_validate({**given, "receipts": {"key_file": "k"}, **more})


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ({"guarantee": "at_most_once"}, "receipts need guarantee"),
        ({"protocol": "auto"}, "receipts need protocol"),
        ({"subscriptions": [{"pattern": "$share/g/t/#"}]}, "shares them with others"),
        ({"receipts": {}}, "key_file"),
        ({"receipts": {"key_file": "k", "prefix": "a/#"}}, "pattern"),
        ({"receipts": {"key_file": "k", "prefix": "a/"}}, "pattern"),
        ({"receipts": {"key_file": "k", "prefix": "$SYS"}}, "pattern"),
    ],
)
def test_contradictions_are_refused(more: dict[str, Any], what: str) -> None:
    with pytest.raises(ValidationError, match=what):
        settings(**more)
