"""The sentences about certificates, and the files they come from."""

from __future__ import annotations

import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import trustme
from cryptography.hazmat.primitives import serialization

from towline.errors import ConfigError
from towline.net.tls import Tls, certificate_problem, tls_error

PAST, FUTURE = "Jan  5 09:34:43 2024 GMT", f"{datetime.now(UTC) + timedelta(days=400):%b %d %H:%M:%S %Y} GMT"
CERTIFICATE: dict[str, Any] = {
    "subject": ((("commonName", "broker"),),),
    "issuer": ((("countryName", "DE"),), (("organizationName", "Works"),), (("commonName", "Works CA"),)),
    "subjectAltName": (("DNS", "broker.local"), ("IP Address", "10.0.0.1"), ("URI", "x:y")),
    "notBefore": PAST,
    "notAfter": FUTURE,
}


@pytest.mark.parametrize(
    ("code", "changes", "expected"),
    [
        (62, {}, 'the server\'s certificate is for "broker.local" or "10.0.0.1", not "b"'),
        (64, {"subjectAltName": (("DNS", "x"),)}, 'the server\'s certificate is for "x", not "b"'),
        (62, {"subjectAltName": ()}, 'the server\'s certificate is for "broker", not "b"'),
        (
            62,
            {"subjectAltName": tuple(("DNS", f"n{n}") for n in range(9))},
            'the server\'s certificate is for "n0", "n1", "n2" or 6 more, not "b"',
        ),
        (62, {"subjectAltName": (("DNS", "a\x1b[31m"),)}, 'the server\'s certificate is for "a\\x1b[31m", not "b"'),
        (10, {"notAfter": PAST}, "expired on 2024-01-05"),
        (10, {}, "has expired in its chain"),
        (9, {"notBefore": FUTURE}, "is valid only from 20"),
        (9, {}, "is not yet valid"),
        (18, {}, "is self-signed and not trusted"),
        (20, {}, 'was issued by "Works CA", which is not trusted'),
        (19, {"issuer": ((("organizationName", "Works"),),)}, 'was issued by "Works", which is not trusted'),
        (92, {}, "or its authority's, breaks the rules of RFC 5280 (certificate revoked)"),
        (23, {}, 'certificate for "broker.local" or "10.0.0.1" is not accepted: certificate revoked'),
    ],
)
def test_why_a_certificate_is_refused(code: int, changes: dict[str, Any], expected: str) -> None:
    what, advice = certificate_problem(code, "certificate revoked.", "b", {**CERTIFICATE, **changes})
    assert expected in what
    assert advice.endswith((".", "?"))


@pytest.mark.parametrize(
    ("reason", "code", "what"),
    [
        ("TLSV13_ALERT_CERTIFICATE_REQUIRED", "TL-M09", "asks for a client certificate (certificate required)"),
        ("SSLV3_ALERT_BAD_CERTIFICATE", "TL-M09", "asks for a client certificate (bad certificate)"),
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
    assert "Check tls.cert_file and tls.key_file." in said(Tls(cert_file=empty))
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
    assert "the private key is encrypted, and has no password. Set tls.key_password_file." in said(
        Tls(cert_file=tmp_path / "cert", key_file=tmp_path / "key")
    )
    secret.write_text("wrong\n")
    tls = Tls(cert_file=tmp_path / "cert", key_file=tmp_path / "key", key_password_file=secret)
    assert "the password is wrong" in said(tls)
    assert "wrong\n" not in said(tls)
    secret.write_text("opensesame\n")
    tls.context()
