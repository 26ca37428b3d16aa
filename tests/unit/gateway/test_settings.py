"""Settings of a gateway that contradict each other, before anything is started."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers import gateway_settings
from towline.gateway.settings import ListenSettings

FILES = {"cert_file": "c", "key_file": "k", "token_file": "t"}
RECEIPTS = {"key_file": "k"}


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
        ({"tls": {"key_file": "k"}}, "need cert_file"),
        ({"tls": {"key_password_file": "k"}}, "need cert_file"),
        ({"tls": {"min_version": "1.1"}}, "'1.2' or '1.3'"),
        ({"tls": {"server_name": ""}}, "at least 1 character"),
        ({"tls": {"alpn": ["a b"]}}, "no space"),
        ({"proxy_password_file": "p"}, "needs proxy"),
        ({"proxy": "http://proxy:1", "proxy_password_file": "p"}, "needs a user in the proxy's URI"),
        ({"proxy": "http://proxy:1", "brokers": "unix:///x"}, "not reached through a proxy"),
        ({"password_file": "p", "token_provider": "m:f"}, "password_file and token_provider both give the password"),
    ],
)
def test_contradictions_are_refused(more: dict[str, Any], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        gateway_settings(**more)


def test_a_port_alone_is_one_of_loopback() -> None:
    assert ListenSettings.model_validate(FILES | {"address": "8815"}).location == "grpc+tls://127.0.0.1:8815"


def test_queries_with_different_checkpoints_share_a_gateway() -> None:
    one = gateway_settings()
    assert one.model_copy(update={"checkpoint": "/ck"}).digest() == one.digest()
    assert one.model_copy(update={"client_id": "x"}).digest() != one.digest()
