"""Broker URIs and proxy URIs: what is read, what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.helpers import gateway_settings
from towline.gateway.settings import GatewaySettings
from towline.net.endpoint import Endpoint, Proxy


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("broker", "mqtt://broker:1883"),
        ("broker:1884", "mqtt://broker:1884"),
        ("mqtt://broker/", "mqtt://broker:1883"),
        ("mqtts://Broker.Example", "mqtts://broker.example:8883"),
        ("mqtt://[::1]", "mqtt://[::1]:1883"),
        ("mqtts://[fe80::1%eth0]:1", "mqtts://[fe80::1%eth0]:1"),
        ("ws://broker", "ws://broker:80/mqtt"),
        ("ws://broker:9001/", "ws://broker:9001/"),
        ("wss://broker/a/b%20c", "wss://broker:443/a/b%20c"),
        ("wss://[::1]:8084", "wss://[::1]:8084/mqtt"),
        ("unix:///run/mqtt.sock", "unix:///run/mqtt.sock"),
        ("mqtts://[fe80::1%Eth0]", "mqtts://[fe80::1%Eth0]:8883"),
    ],
)
def test_a_uri_is_read_and_shown(uri: str, shown: str) -> None:
    endpoint = Endpoint.parse(uri)
    assert str(endpoint) == shown
    assert Endpoint.parse(shown) == endpoint
    assert endpoint.tls is (endpoint.scheme in {"mqtts", "wss"})
    told = gateway_settings(brokers=uri)
    assert told.proxy_endpoint is None
    assert told.brokers == (endpoint,)
    assert GatewaySettings.model_validate_json(told.model_dump_json()) == told


@pytest.mark.parametrize(
    "uri",
    [
        "http://broker",
        "mqtt://me:secret@broker",
        "wss://me@broker",
        "mqtt://",
        "mqtt://a b",
        "mqtt://a'b",
        "mqtt://b\u00fccher.example",
        "mqtt://broker:0",
        "mqtt://broker:65536",
        "mqtt://broker:x",
        "mqtt://broker/path",
        "mqtt://[::1",
        "mqtts://broker?token=secret",
        "ws://broker/a?token=secret",
        "ws://broker/a#secret",
        "ws://broker/a b",
        "ws://broker/a\x7f",
        "unix://run/mqtt.sock",
        "unix:///",
        "unix:///a\0b",
    ],
)
def test_a_uri_is_refused_without_being_repeated(uri: str) -> None:
    with pytest.raises(ValueError, match=r"a broker is mqtt://HOST.*; use username, password_file") as caught:
        Endpoint.parse(uri)
    assert "secret" not in str(caught.value)
    with pytest.raises(ValidationError, match="a broker is mqtt://HOST") as refused:
        gateway_settings(brokers=uri)
    assert "secret" not in str(refused.value)


@given(st.text())
def test_any_text_is_an_endpoint_or_a_value_error(text: str) -> None:
    try:
        endpoint = Endpoint.parse(text)
    except UnicodeError:
        pytest.fail("a sentence, not the codec's")
    except ValueError:
        return
    else:
        assert Endpoint.parse(str(endpoint)) == endpoint


@pytest.mark.parametrize(
    ("uri", "shown", "username"),
    [
        ("http://proxy:3128", "http://proxy:3128", None),
        ("http://me@proxy:3128/", "http://proxy:3128", "me"),
        ("socks5://m%40e@[::1]:1080", "socks5://[::1]:1080", "m@e"),
    ],
)
def test_a_proxy_is_read_and_shown_without_its_user(uri: str, shown: str, username: str | None) -> None:
    proxy = Proxy.parse(uri)
    assert (str(proxy), proxy.username) == (shown, username)


@pytest.mark.parametrize(
    "uri",
    [
        "http://me:secret@proxy:1",
        "https://proxy:1",
        "proxy:3128",
        "socks4://proxy:1",
        "http://proxy",
        "http://proxy:0",
        "socks5://proxy:1/x",
        "http://proxy:x",
    ],
)
def test_a_proxy_is_refused_without_being_repeated(uri: str) -> None:
    with pytest.raises(ValidationError, match=r"a proxy is http://.*, its password in proxy_password_file") as caught:
        gateway_settings(proxy=uri)
    assert "secret" not in str(caught.value)
