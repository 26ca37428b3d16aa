"""TLS settings, verification on by default, with one error text for each refusal."""

from __future__ import annotations

import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NoReturn

from annotated_types import Len

from towline.errors import BrokerError, ConfigError, Unreachable
from towline.net.endpoint import error_text, tls_port_hint
from towline.providers import read_secret
from towline.text import printable

_VERSIONS: Final = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}
#: ALPN protocol name (RFC 7301 section 3.1), printable ASCII only.
_ALPN_NAME: Final = re.compile(r"[!-~]{1,255}")
#: OpenSSL's X509_V_ERR_* (x509_vfy.h).
_NOT_YET_VALID, _EXPIRED, _SELF_SIGNED, _HOST_MISMATCH, _ADDRESS_MISMATCH = 9, 10, 18, 62, 64
_UNKNOWN_ISSUER: Final = frozenset({2, 19, 20, 21})
#: Codes of X509_V_FLAG_X509_STRICT only: RFC 5280's rules for extensions, names and curves.
_RFC_5280_ERRORS: Final = range(80, 95)
#: Number of certificate names shown, and their longest shown length.
_SHOWN_NAMES, _MAX_NAME_CHARS = 3, 100
#: TLS alerts about a wrong or missing client certificate (RFC 8446 section 6.2).
_CLIENT_CERTIFICATE_ALERTS: Final = ("CERTIFICATE", "UNKNOWN_CA", "ACCESS_DENIED")
#: OpenSSL's reasons if the peers share no TLS version.
_VERSION_ERRORS: Final = ("PROTOCOL_VERSION", "UNSUPPORTED_PROTOCOL", "VERSION_TOO_LOW", "NO_PROTOCOLS_AVAILABLE")


@dataclass(frozen=True, slots=True)
class Tls:
    """TLS settings: verification of the broker, and the client's certificate.

    Attributes:
        ca_file: Trusted certificates (PEM); default the system's.
        cert_file: Client certificate chain, with ``key_file``, for a broker that asks for one.
        key_file: Private key of the client; default it is in ``cert_file``.
        key_password_file: Holds the password of an encrypted key.
        server_name: Name that the certificate must carry, also sent as SNI; default the host of the URI.
        alpn: Protocols offered (RFC 7301), such as ``mqtt``; default none.
        min_version: Oldest TLS version allowed.
        strict: Refuse certificates that break RFC 5280's rules about extensions (X509_V_FLAG_X509_STRICT), as Python
            does by default from 3.13 on and Towline on every Python. Without it chain, dates and name are verified all
            the same (docs/security.md#certificates-that-break-rfc-5280).
        insecure: Verify nothing; shown in every status.
    """

    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None
    key_password_file: Path | None = None
    server_name: Annotated[str, Len(1, 253)] | None = None
    alpn: tuple[str, ...] = ()
    min_version: Literal["1.2", "1.3"] = "1.2"
    strict: bool = True
    insecure: bool = False

    def problem(self) -> str:
        """Return the reason why these settings are invalid together; "" if they are valid."""
        if self.key_file and not self.cert_file:
            return "key_file needs cert_file, the certificate of the key"
        if self.key_password_file and not self.cert_file:
            return "key_password_file needs cert_file"
        if not all(_ALPN_NAME.fullmatch(name) for name in self.alpn):
            return "a protocol in alpn has 1 to 255 characters of ASCII, and no space among them"
        return ""

    def context(self) -> ssl.SSLContext:
        """Return the OpenSSL context; files are read again at each call, so that a renewed certificate is used.

        Raises:
            ConfigError: A file is missing, or holds no certificate or key, or its password is wrong (TL-C30).
        """
        context = self._trust_context()
        context.minimum_version = _VERSIONS[self.min_version]
        # As create_default_context of Python 3.13 has them.
        context.verify_flags |= ssl.VERIFY_X509_STRICT | ssl.VERIFY_X509_PARTIAL_CHAIN
        if not self.strict:
            context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        if self.alpn:
            context.set_alpn_protocols(list(self.alpn))
        if self.cert_file:
            self._load_client_certificate(context, self.cert_file)
        if self.insecure:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context

    def _trust_context(self) -> ssl.SSLContext:
        try:
            return ssl.create_default_context(cafile=str(self.ca_file) if self.ca_file else None)
        except OSError as error:  # includes ssl.SSLError
            _raise_unusable_file(error, "tls.ca_file", self.ca_file)

    def _load_client_certificate(self, context: ssl.SSLContext, cert_file: Path) -> None:
        password_file = self.key_password_file
        password = read_secret("tls.key_password_file", password_file, bytes) if password_file else None
        password_requested = False

        def key_password() -> bytes:  # otherwise OpenSSL prompts on the terminal
            nonlocal password_requested
            password_requested = True
            return password or b""

        try:
            context.load_cert_chain(cert_file, self.key_file, key_password)
        except (OSError, ValueError) as error:
            if password_requested:
                cause = "the password is wrong" if password else "has no password"
                problem = f"the private key is encrypted, and {cause}"
                location = f"{self.key_file or cert_file}"
                raise ConfigError("TL-C30", location, problem, "Set tls.key_password_file.") from None
            _raise_unusable_file(error, "tls.cert_file and tls.key_file", cert_file, self.key_file)


def _raise_unusable_file(error: BaseException, option: str, *files: Path | None) -> NoReturn:
    names = ", ".join(str(file) for file in files if file) or "the system's certificates"
    problem = f"{'no matching PEM' if isinstance(error, ssl.SSLError) else 'not usable'} ({error_text(error)})"
    raise ConfigError("TL-C30", names, problem, f"Check {option}.") from None


def certificate_problem(code: int, message: str, name: str, certificate: Mapping[str, Any]) -> tuple[str, str]:
    """Return the reason why a broker's certificate is rejected, and the remedy.

    Args:
        code: OpenSSL's verify code (X509_V_ERR_*).
        message: OpenSSL's text for the code.
        name: Required server name.
        certificate: As `ssl.SSLSocket.getpeercert` returns it, or empty.
    """
    names = _certificate_names(certificate)
    subject = f"the server's certificate for {names}" if names else "the server's certificate"
    if code in {_HOST_MISMATCH, _ADDRESS_MISMATCH}:
        relation = f"is for {names}, not" if names else "is not for"
        return f'the server\'s certificate {relation} "{name}"', "Use that name, or set tls.server_name."
    if code == _EXPIRED:
        date = _parse_date(certificate.get("notAfter"))
        state = f"expired on {date:%Y-%m-%d}" if date and date < datetime.now(UTC) else "has expired in its chain"
        return f"{subject} {state}", "The broker needs a new one; is the clock of this machine right?"
    if code == _NOT_YET_VALID:
        date = _parse_date(certificate.get("notBefore"))
        validity = f"is valid only from {date:%Y-%m-%d}" if date and date > datetime.now(UTC) else "is not yet valid"
        return f"{subject} {validity}", "Is the clock of this machine right?"
    if code == _SELF_SIGNED:
        return f"{subject} is self-signed and not trusted", "If it is the right one, set tls.ca_file to it."
    if code in _UNKNOWN_ISSUER:
        issuer = _common_name(certificate.get("issuer", ()))
        authority = f'"{issuer}"' if issuer else "an authority"
        remedy = "Set tls.ca_file to that authority's certificate."
        return f"{subject} was issued by {authority}, which is not trusted", remedy
    detail, remedy = message.strip().rstrip("."), "Ask who runs the broker."
    clause = f" is not accepted: {detail}"
    if code in _RFC_5280_ERRORS:
        clause = f", or its authority's, breaks the rules of RFC 5280 ({detail})"
        remedy = "Reissue it and its authority by these rules, or set tls.strict = false: the rest is verified."
    return f"{subject}{clause}", remedy


def _certificate_names(certificate: Mapping[str, Any]) -> str:
    """Return the names of a certificate as text: ``"a"``, ``"a" or "b"``, ``"a", "b", "c" or 4 more``."""
    alternatives = certificate.get("subjectAltName", ())
    names = [str(value) for name_type, value in alternatives if name_type in {"DNS", "IP Address"}]
    if not names and (common_name := _common_name(certificate.get("subject", ()))):
        names = [common_name]
    quoted = [f'"{printable(name, _MAX_NAME_CHARS)}"' for name in dict.fromkeys(names)]
    if len(quoted) > _SHOWN_NAMES:
        quoted[_SHOWN_NAMES:] = [f"{len(quoted) - _SHOWN_NAMES} more"]
    return " or ".join(filter(None, (", ".join(quoted[:-1]), quoted[-1]))) if quoted else ""


def _common_name(rdns: object) -> str:
    """Return the common name of a subject or issuer; without one the organisation."""
    attributes = {key: value for rdn in rdns for key, value in rdn} if isinstance(rdns, tuple) else {}
    return printable(str(attributes.get("commonName") or attributes.get("organizationName") or ""), _MAX_NAME_CHARS)


def _parse_date(text: object) -> datetime | None:
    """Parse a certificate time such as ``Jan  5 09:34:43 2024 GMT``."""
    try:
        return datetime.fromtimestamp(ssl.cert_time_to_seconds(str(text)), UTC)
    except (ValueError, OverflowError):
        return None


def tls_error(error: Exception, tls: Tls, location: str) -> BrokerError:
    """Return the error for a failed TLS handshake, or a later alert: TLS 1.3 rejects a client certificate after it."""
    reason = getattr(error, "reason", None) or ""
    if "ALERT" in reason and any(word in reason for word in _CLIENT_CERTIFICATE_ALERTS):
        alert = error_text(error).rpartition("alert ")[2]
        if tls.cert_file:
            problem = f"the broker does not accept our certificate ({alert})"
            return Unreachable("TL-M09", location, problem, "Check tls.cert_file.")
        problem = f"the broker asks for a client certificate ({alert})"
        return Unreachable("TL-M09", location, problem, "Set tls.cert_file and tls.key_file.")
    if any(word in reason for word in _VERSION_ERRORS):
        remedy = "Lower tls.min_version, or upgrade the broker." if tls.min_version != "1.2" else "Upgrade the broker."
        return Unreachable("TL-M02", location, f"the broker speaks no TLS {tls.min_version} or newer", remedy)
    if "NO_APPLICATION_PROTOCOL" in reason:
        problem = f"the broker accepts none of the ALPN protocols {', '.join(tls.alpn)}"
        return Unreachable("TL-M02", location, problem, "Check tls.alpn.")
    return Unreachable("TL-M02", location, f"no TLS ({error_text(error)})", tls_port_hint(location).strip())
