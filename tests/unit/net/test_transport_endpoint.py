"""Broker URIs, proxy URIs and TLS: what is read, what is refused, and why a certificate is."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest
import trustme
from cryptography.hazmat.primitives import serialization
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.helpers import gateway_settings
from towline.errors import ConfigError
from towline.gateway.settings import GatewaySettings
from towline.net.endpoint import Endpoint, Proxy, Tls, tls_error


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


# -- TLS --


@pytest.mark.parametrize(
    ("code", "remedy"),
    [
        (10, "is the clock of this machine right?"),
        (18, "set tls.ca_file"),
        (20, "set tls.ca_file"),
        (62, "set tls.server_name"),
        (92, "set tls.strict = false"),
        (23, "Ask who runs the broker."),
    ],
)
def test_why_a_certificate_is_refused(code: int, remedy: str) -> None:
    error = ssl.SSLCertVerificationError(1, "x")
    error.verify_code, error.verify_message = code, "certificate revoked."
    problem = tls_error(error, Tls(), "mqtts://b:8883")
    assert "the server's certificate is not accepted (certificate revoked)." in str(problem)
    assert problem.code == "TL-M07"
    assert remedy in problem.remedy


@pytest.mark.parametrize(
    ("reason", "code", "what"),
    [
        ("TLSV13_ALERT_CERTIFICATE_REQUIRED", "TL-M09", "needs another client certificate (certificate required)"),
        ("SSLV3_ALERT_BAD_CERTIFICATE", "TL-M09", "needs another client certificate (bad certificate)"),
        ("TLSV1_ALERT_PROTOCOL_VERSION", "TL-M02", "speaks no TLS 1.2 or newer"),
        ("UNSUPPORTED_PROTOCOL", "TL-M02", "speaks no TLS 1.2 or newer"),
        ("TLSV1_ALERT_NO_APPLICATION_PROTOCOL", "TL-M02", "none of the ALPN protocols mqtt"),
        ("WRONG_VERSION_NUMBER", "TL-M02", "no TLS (wrong version number)"),
    ],
)
def test_why_tls_fails(reason: str, code: str, what: str) -> None:
    error = ssl.SSLError(1, f"[SSL: {reason}] x (_ssl.c:1)")
    error.reason = reason
    problem = tls_error(error, Tls(alpn=("mqtt",)), "mqtts://b:8883")
    assert problem.code == code
    assert what in problem.problem


def test_verification_is_on_unless_insecure_is_asked_for() -> None:
    context, partial = Tls().context(), ssl.VERIFY_X509_TRUSTED_FIRST | ssl.VERIFY_X509_PARTIAL_CHAIN
    assert context.verify_flags == partial | ssl.VERIFY_X509_STRICT, "on every Python"
    assert Tls(strict=False).context().verify_flags == partial
    assert context.check_hostname
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert context.minimum_version is ssl.TLSVersion.TLSv1_2
    assert Tls(min_version="1.3").context().minimum_version is ssl.TLSVersion.TLSv1_3
    loose = Tls(insecure=True).context()
    assert not loose.check_hostname
    assert loose.verify_mode is ssl.CERT_NONE


def said(tls: Tls) -> str:
    with pytest.raises(ConfigError) as caught:
        tls.context()
    assert caught.value.code in {"TL-C30", "TL-C31"}
    return str(caught.value)


def test_files_that_are_missing_or_hold_nothing(tmp_path: Path) -> None:
    gone, empty = tmp_path / "gone.pem", tmp_path / "empty.pem"
    empty.touch()
    assert f"{gone}: not usable (no such file or directory). Check tls.ca_file." in said(Tls(ca_file=gone))
    assert f"{empty}: no matching PEM" in said(Tls(ca_file=empty))
    assert "Check tls.cert_file, tls.key_file and tls.key_password_file." in said(Tls(cert_file=empty))
    assert "tls.key_password_file can't be read" in said(Tls(cert_file=empty, key_password_file=gone))


def test_an_encrypted_key_needs_its_password_and_never_asks_on_the_terminal(tmp_path: Path) -> None:
    made = trustme.CA().issue_cert("x")
    made.cert_chain_pems[0].write_to_path(tmp_path / "cert")
    key = serialization.load_pem_private_key(made.private_key_pem.bytes(), None)
    encrypted = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"opensesame"),
    )
    (tmp_path / "key").write_bytes(encrypted)
    secret = tmp_path / "secret"
    assert "tls.key_password_file" in said(Tls(cert_file=tmp_path / "cert", key_file=tmp_path / "key"))
    secret.write_text("wrong\n")
    tls = Tls(cert_file=tmp_path / "cert", key_file=tmp_path / "key", key_password_file=secret)
    assert "Check tls.cert_file, tls.key_file and tls.key_password_file." in said(tls)
    assert "wrong\n" not in said(tls)
    secret.write_text("opensesame\n")
    tls.context()
