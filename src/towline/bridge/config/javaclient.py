"""The settings of [kafka] for Spark's own Kafka source, whose client is Java's: one file, two spellings.

Secrets stay out of Spark's options, plans and pages [I12]: an option names a variable of the environment, and Kafka's
client replaces it (``EnvVarConfigProvider``, KIP-887).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Final

from towline.errors import ConfigError

__all__ = ["java_client"]

#: Same name, same meaning.
_SAME: Final = (
    "bootstrap.servers",
    "security.protocol",
    "sasl.mechanism",
    "client.rack",
    "reconnect.backoff.ms",
    "reconnect.backoff.max.ms",
    "metadata.max.age.ms",
    "connections.max.idle.ms",
    "fetch.min.bytes",
    "fetch.max.bytes",
    "max.partition.fetch.bytes",
)
_LOGIN: Final = {
    "PLAIN": "org.apache.kafka.common.security.plain.PlainLoginModule",
    "SCRAM-SHA-256": "org.apache.kafka.common.security.scram.ScramLoginModule",
    "SCRAM-SHA-512": "org.apache.kafka.common.security.scram.ScramLoginModule",
}
#: librdkafka's → Java's, and how the value is read: as it is, or the file's content as a variable.
_FILES: Final = {
    "ssl.ca.location": "ssl.truststore.certificates",
    "ssl.certificate.location": "ssl.keystore.certificate.chain",
    "ssl.key.location": "ssl.keystore.key",
    "ssl.key.password.file": "ssl.key.password",
}
_UNDERSTOOD: Final = ("sasl.username", "sasl.password", "sasl.password.file", "ssl.endpoint.identification.algorithm")


def java_client(client: Mapping[str, str], environ: MutableMapping[str, str] | None = None) -> dict[str, str]:
    """The settings as Kafka's Java client names them.

    Args:
        client: As librdkafka names them; secrets as names of files, or as ``${NAME}``.
        environ: Takes the secrets; the process's own by default, and then Spark's JVM must not run yet.

    Raises:
        ConfigError: TL-C77 for a setting of security that Java's client can't have, or a file that can't be read.
    """
    environ = os.environ if environ is None else environ
    named = {("sasl.mechanism" if key == "sasl.mechanisms" else key): value for key, value in client.items()}
    settings: dict[str, str] = {key: named[key] for key in _SAME if key in named}
    for key in named:
        secure = key.startswith(("sasl.", "ssl.", "enable.ssl."))
        if secure and key not in (*_SAME, *_FILES, *_UNDERSTOOD):
            raise _refused(key, "Spark's Kafka source has no such setting")
    for key, java in _FILES.items():
        if key in named:
            settings[java] = _variable(environ, key, _content(key, named[key]))
    settings |= {store: "PEM" for store, needs in _STORES.items() if needs in settings}
    if (check := named.get("ssl.endpoint.identification.algorithm")) is not None:
        settings["ssl.endpoint.identification.algorithm"] = "" if check == "none" else check
    if "sasl.mechanism" in settings:
        settings["sasl.jaas.config"] = _login(named, environ)
    if any("${env:" in value for value in settings.values()):
        settings["config.providers"] = "env"
        settings["config.providers.env.class"] = "org.apache.kafka.common.config.provider.EnvVarConfigProvider"
    return settings


_STORES: Final = {"ssl.truststore.type": "ssl.truststore.certificates", "ssl.keystore.type": "ssl.keystore.key"}


def _login(named: Mapping[str, str], environ: MutableMapping[str, str]) -> str:
    mechanism = named["sasl.mechanism"].upper()
    if mechanism not in _LOGIN:
        raise _refused("sasl.mechanism", f"a downlink logs in with {', '.join(_LOGIN)}, not with {mechanism}")
    if "sasl.password.file" in named:
        secret = _content("sasl.password.file", named["sasl.password.file"]).strip("\r\n")
    else:
        secret = os.path.expandvars(named.get("sasl.password", ""))
    user = _quoted(named.get("sasl.username", ""))
    return (
        f'{_LOGIN[mechanism]} required username="{user}" password="{_variable(environ, "password", _quoted(secret))}";'
    )


def _quoted(text: str) -> str:
    """Inside the quotes of a JAAS entry."""
    return text.replace("\\", "\\\\").replace('"', '\\"')


def _variable(environ: MutableMapping[str, str], key: str, secret: str) -> str:
    name = "TOWLINE_KAFKA_" + key.upper().replace(".", "_")
    environ[name] = secret
    return f"${{env:{name}}}"


def _content(key: str, file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _refused(key, f"{file} can't be read ({type(error).__name__})") from None


def _refused(key: str, what: str) -> ConfigError:
    return ConfigError("TL-C77", f'[kafka] "{key}"', what, "Change it, or run the downlink with settings of its own.")
