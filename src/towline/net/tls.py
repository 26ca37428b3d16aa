"""TLS settings, verification on by default, with one error text for each refusal."""

from __future__ import annotations

import re
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal

from annotated_types import Len

from towline.errors import BrokerError, ConfigError, Unreachable
from towline.net.endpoint import error_text, tls_port_hint
from towline.providers import read_secret

_VERSIONS: Final = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}
#: ALPN protocol name (RFC 7301 section 3.1), printable ASCII only.
_ALPN_NAME: Final = re.compile(r"[!-~]{1,255}")
#: OpenSSL's X509_V_ERR_* (x509_vfy.h) → remedy for a rejected certificate. From 80 on they are RFC 5280's rules for
#: extensions, names and curves, which only X509_V_FLAG_X509_STRICT checks.
_CERTIFICATE_REMEDIES: Final = {
    **dict.fromkeys((9, 10), "The broker needs a valid one; is the clock of this machine right?"),
    **dict.fromkeys((2, 18, 19, 20, 21), "If it is the right one, set tls.ca_file to its authority's certificate."),
    **dict.fromkeys((62, 64), "Use the name in the certificate, or set tls.server_name to it."),
    **dict.fromkeys(
        range(80, 95), "Reissue it and its authority by RFC 5280, or set tls.strict = false: the rest is verified."
    ),
}
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
            raise _file_error(error, "tls.ca_file", self.ca_file) from None

    def _load_client_certificate(self, context: ssl.SSLContext, cert_file: Path) -> None:
        password = b""  # without a password OpenSSL prompts on the terminal
        if self.key_password_file:
            password = read_secret("tls.key_password_file", self.key_password_file, bytes)
        try:
            context.load_cert_chain(cert_file, self.key_file, password)
        except (OSError, ValueError) as error:
            options = "tls.cert_file, tls.key_file and tls.key_password_file"
            raise _file_error(error, options, cert_file, self.key_file) from None


def _file_error(error: BaseException, options: str, *files: Path | None) -> ConfigError:
    names = ", ".join(str(file) for file in files if file) or "the system's certificates"
    problem = f"{'no matching PEM' if isinstance(error, ssl.SSLError) else 'not usable'} ({error_text(error)})"
    return ConfigError("TL-C30", names, problem, f"Check {options}.")


def tls_error(error: Exception, tls: Tls, location: str) -> BrokerError:
    """Return the error for a failed TLS handshake, or a later alert: TLS 1.3 rejects a client certificate after it."""
    if isinstance(error, ssl.SSLCertVerificationError):
        problem = f"the server's certificate is not accepted ({error.verify_message.strip().rstrip('.')})"
        remedy = _CERTIFICATE_REMEDIES.get(error.verify_code, "Ask who runs the broker.")
        return Unreachable("TL-M07", location, problem, remedy)
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
