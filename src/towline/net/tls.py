"""TLS: its settings, verification on, and a sentence for each refusal."""

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
from towline.net.endpoint import other_port, plain
from towline.providers import secret_of
from towline.text import printable

_VERSIONS: Final = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}
#: A name of ALPN (RFC 7301 section 3.1), as far as people write them.
_PROTOCOL: Final = re.compile(r"[!-~]{1,255}")
#: OpenSSL's X509_V_ERR_* (x509_vfy.h).
_NOT_YET_VALID, _EXPIRED, _SELF_SIGNED, _HOST_MISMATCH, _ADDRESS_MISMATCH = 9, 10, 18, 62, 64
_UNKNOWN_ISSUER: Final = frozenset({2, 19, 20, 21})
#: Those of X509_V_FLAG_X509_STRICT alone: what RFC 5280 asks of extensions, names and curves.
_STRICT: Final = range(80, 95)
#: Names of a certificate that are shown, and how long a shown name may be.
_NAMES_SHOWN, _NAME_LENGTH = 3, 100
#: TLS alerts about the certificate that we showed, or did not show (RFC 8446 section 6.2).
_ABOUT_OURS: Final = ("CERTIFICATE", "UNKNOWN_CA", "ACCESS_DENIED")
#: What both libraries say when the peers share no version of TLS.
_ABOUT_VERSION: Final = ("PROTOCOL_VERSION", "UNSUPPORTED_PROTOCOL", "VERSION_TOO_LOW", "NO_PROTOCOLS_AVAILABLE")


@dataclass(frozen=True, slots=True)
class Tls:
    """How to verify the broker and to show who we are; bounds are what a configuration may say.

    Attributes:
        ca_file: Trusted certificates (PEM); default the system's.
        cert_file: Our certificate chain, with ``key_file``, for a broker that asks for one.
        key_file: Its private key; default it is in ``cert_file``.
        key_password_file: Holds the password of an encrypted key.
        server_name: The name the certificate must carry, and sent as SNI; default the host of the URI.
        alpn: Protocols offered (RFC 7301), such as ``mqtt``; default none.
        min_version: Oldest TLS spoken.
        strict: Refuse certificates that break RFC 5280's rules about extensions (X509_V_FLAG_X509_STRICT), as Python
            does by itself from 3.13 on and here on every Python; without it chain, dates and name are verified all the
            same (docs/transports.md#certificates-that-break-rfc-5280).
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
        """Why these settings can't be meant so; "" where they can."""
        if self.key_file and not self.cert_file:
            return "key_file needs cert_file, the certificate of the key"
        if self.key_password_file and not self.cert_file:
            return "key_password_file needs cert_file"
        if not all(_PROTOCOL.fullmatch(name) for name in self.alpn):
            return "a protocol in alpn has 1 to 255 characters of ASCII, and no space among them"
        return ""

    def context(self) -> ssl.SSLContext:
        """The OpenSSL settings; the files are read anew, so that a renewed certificate is used.

        Raises:
            ConfigError: A file is missing, or holds no certificate or key, or its password is wrong (TL-C30).
        """
        context = self._trusting()
        context.minimum_version = _VERSIONS[self.min_version]
        # As create_default_context of Python 3.13 has them.
        context.verify_flags |= ssl.VERIFY_X509_STRICT | ssl.VERIFY_X509_PARTIAL_CHAIN
        if not self.strict:
            context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        if self.alpn:
            context.set_alpn_protocols(list(self.alpn))
        if self.cert_file:
            self._show(context, self.cert_file)
        if self.insecure:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context

    def _trusting(self) -> ssl.SSLContext:
        try:
            return ssl.create_default_context(cafile=str(self.ca_file) if self.ca_file else None)
        except OSError as error:  # ssl.SSLError is one
            _unusable(error, "tls.ca_file", self.ca_file)

    def _show(self, context: ssl.SSLContext, cert_file: Path) -> None:
        file = self.key_password_file
        password = secret_of("tls.key_password_file", file, bytes) if file else None
        asked = False

        def answer() -> bytes:  # without it OpenSSL would ask on the terminal
            nonlocal asked
            asked = True
            return password or b""

        try:
            context.load_cert_chain(cert_file, self.key_file, answer)
        except (OSError, ValueError) as error:
            if asked:
                what = "the private key is encrypted, and " + (
                    "the password is wrong" if password else "has no password"
                )
                raise ConfigError(
                    "TL-C30", f"{self.key_file or cert_file}", what, "Set tls.key_password_file."
                ) from None
            _unusable(error, "tls.cert_file and tls.key_file", cert_file, self.key_file)


def _unusable(error: BaseException, option: str, *files: Path | None) -> NoReturn:
    names = ", ".join(str(file) for file in files if file) or "the system's certificates"
    what = (
        f"not usable ({plain(error)})" if not isinstance(error, ssl.SSLError) else f"no matching PEM ({plain(error)})"
    )
    raise ConfigError("TL-C30", names, what, f"Check {option}.") from None


def certificate_problem(code: int, message: str, name: str, certificate: Mapping[str, Any]) -> tuple[str, str]:
    """Say why a broker's certificate is refused, and what to do.

    Args:
        code: OpenSSL's verify code (X509_V_ERR_*).
        message: OpenSSL's words for it.
        name: The name it had to carry.
        certificate: As `ssl.SSLSocket.getpeercert` returns it, or empty.
    """
    names = _names(certificate)
    bearer = f"the server's certificate for {names}" if names else "the server's certificate"
    if code in {_HOST_MISMATCH, _ADDRESS_MISMATCH}:
        belongs = f"is for {names}, not" if names else "is not for"
        return f'the server\'s certificate {belongs} "{name}"', "Use that name, or set tls.server_name."
    if code == _EXPIRED:
        when = _day(certificate.get("notAfter"))
        past = f"expired on {when:%Y-%m-%d}" if when and when < datetime.now(UTC) else "has expired in its chain"
        return f"{bearer} {past}", "The broker needs a new one; is the clock of this machine right?"
    if code == _NOT_YET_VALID:
        when = _day(certificate.get("notBefore"))
        future = f"is valid only from {when:%Y-%m-%d}" if when and when > datetime.now(UTC) else "is not yet valid"
        return f"{bearer} {future}", "Is the clock of this machine right?"
    if code == _SELF_SIGNED:
        return f"{bearer} is self-signed and not trusted", "If it is the right one, set tls.ca_file to it."
    if code in _UNKNOWN_ISSUER:
        issuer = _common_name(certificate.get("issuer", ()))
        by = f'"{issuer}"' if issuer else "an authority"
        return f"{bearer} was issued by {by}, which is not trusted", "Set tls.ca_file to that authority's certificate."
    said, do = message.strip().rstrip("."), "Ask who runs the broker."
    why = f" is not accepted: {said}"
    if code in _STRICT:
        why = f", or its authority's, breaks the rules of RFC 5280 ({said})"
        do = "Have it and its authority issued anew by these rules, or set tls.strict = false: the rest is verified."
    return f"{bearer}{why}", do


def _names(certificate: Mapping[str, Any]) -> str:
    """What a certificate is for, in words: ``"a"``, ``"a" or "b"``, ``"a", "b", "c" or 4 more``."""
    found = [str(value) for kind, value in certificate.get("subjectAltName", ()) if kind in {"DNS", "IP Address"}]
    if not found and (common := _common_name(certificate.get("subject", ()))):
        found = [common]
    quoted = [f'"{printable(name, _NAME_LENGTH)}"' for name in dict.fromkeys(found)]
    if len(quoted) > _NAMES_SHOWN:
        quoted[_NAMES_SHOWN:] = [f"{len(quoted) - _NAMES_SHOWN} more"]
    return " or ".join(filter(None, (", ".join(quoted[:-1]), quoted[-1]))) if quoted else ""


def _common_name(parts: object) -> str:
    """The common name of a subject or issuer, else its organisation."""
    named = {key: value for part in parts for key, value in part} if isinstance(parts, tuple) else {}
    return printable(str(named.get("commonName") or named.get("organizationName") or ""), _NAME_LENGTH)


def _day(text: object) -> datetime | None:
    """``Jan  5 09:34:43 2024 GMT`` as a time."""
    try:
        return datetime.fromtimestamp(ssl.cert_time_to_seconds(str(text)), UTC)
    except (ValueError, OverflowError):
        return None


def tls_problem(error: Exception, tls: Tls, where: str) -> BrokerError:
    """Say why TLS failed in the handshake, or after it, where TLS 1.3 tells what it thinks of our certificate."""
    reason = getattr(error, "reason", None) or ""
    if "ALERT" in reason and any(word in reason for word in _ABOUT_OURS):
        said = plain(error).rpartition("alert ")[2]
        if tls.cert_file:
            return Unreachable(
                "TL-M09", where, f"the broker does not accept our certificate ({said})", "Check tls.cert_file."
            )
        what = f"the broker asks for a client certificate ({said})"
        return Unreachable("TL-M09", where, what, "Set tls.cert_file and tls.key_file.")
    if any(word in reason for word in _ABOUT_VERSION):
        advice = "Lower tls.min_version, or mend the broker." if tls.min_version != "1.2" else "Mend the broker."
        return Unreachable("TL-M02", where, f"the broker speaks no TLS {tls.min_version} or newer", advice)
    if "NO_APPLICATION_PROTOCOL" in reason:
        offered = ", ".join(tls.alpn)
        return Unreachable("TL-M02", where, f"the broker takes none of the ALPN protocols {offered}", "Check tls.alpn.")
    return Unreachable("TL-M02", where, f"no TLS ({plain(error)})", other_port(where).strip())
