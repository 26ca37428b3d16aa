"""Settings of a gateway that contradict each other, before anything is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from towline.gateway.settings import GatewaySettings, ListenSettings

FILES = {"cert_file": "c", "key_file": "k", "token_file": "t"}
RECEIPTS = {"key_file": "k"}


def settings(**more: Any) -> GatewaySettings:
    given = {"name": "g", "state_dir": Path("g"), "brokers": "mqtt://b", "subscriptions": [{"pattern": "t/#"}]}
    return GatewaySettings.model_validate(given | more)


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ({"receipts": RECEIPTS, "guarantee": "at_most_once"}, "receipts need guarantee"),
        ({"receipts": RECEIPTS, "protocol": "auto"}, "receipts need protocol"),
        ({"receipts": RECEIPTS, "subscriptions": [{"pattern": "$share/g/t/#"}]}, "shares them with others"),
        ({"receipts": {}}, "key_file"),
        *(({"receipts": RECEIPTS | {"prefix": prefix}}, "pattern") for prefix in ("a/#", "a/", "$SYS")),
        *(({"listen": {"address": "h:1", **FILES, name: None}}, name) for name in FILES),
        *(({"listen": FILES | {"address": one}}, "it is no address to listen on") for one in ("host", "h:99999")),
    ],
)
def test_contradictions_are_refused(more: dict[str, Any], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        settings(**more)


def test_a_port_alone_is_one_of_loopback() -> None:
    assert ListenSettings.model_validate(FILES | {"address": "8815"}).location == "grpc+tls://127.0.0.1:8815"


def test_queries_with_different_checkpoints_share_a_gateway() -> None:
    one = settings()
    assert one.model_copy(update={"checkpoint": "/ck"}).digest() == one.digest()
    assert one.model_copy(update={"client_id": "x"}).digest() != one.digest()
