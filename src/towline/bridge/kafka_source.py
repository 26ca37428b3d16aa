"""Setup of Spark's own Kafka source, which downlinks read with: its jars, and [kafka] as Java client settings.

The jars are named in the file, or fetched from Maven once. The client is Java's: one file, two spellings. Secrets stay
out of Spark's options, plans and pages [I12]: an option names an environment variable, and Kafka's client replaces it
(``EnvVarConfigProvider``, KIP-887).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from towline.errors import ConfigError, SetupError
from towline.spark.java import SPARK_KAFKA_PACKAGE, spark_kafka_jars

if TYPE_CHECKING:
    from towline.bridge.config.model import Bridge

_PACKAGES_KEY: Final = "spark.jars.packages"
#: Name of the connector among those packages.
_CONNECTOR: Final = "spark-sql-kafka-0-10"
#: Settings with the same name and meaning in both clients.
_SAME_NAMES: Final = frozenset(
    {
        *("bootstrap.servers", "security.protocol", "sasl.mechanism", "client.rack"),
        *("reconnect.backoff.ms", "reconnect.backoff.max.ms", "metadata.max.age.ms", "connections.max.idle.ms"),
        *("fetch.min.bytes", "fetch.max.bytes", "max.partition.fetch.bytes"),
    }
)
_LOGINS: Final = {
    "PLAIN": "org.apache.kafka.common.security.plain.PlainLoginModule",
    "SCRAM-SHA-256": "org.apache.kafka.common.security.scram.ScramLoginModule",
    "SCRAM-SHA-512": "org.apache.kafka.common.security.scram.ScramLoginModule",
}
#: librdkafka's file setting → Java's setting for its content, and the store type.
_FILE_SETTINGS: Final = {
    "ssl.ca.location": ("ssl.truststore.certificates", {"ssl.truststore.type": "PEM"}),
    "ssl.certificate.location": ("ssl.keystore.certificate.chain", {}),
    "ssl.key.location": ("ssl.keystore.key", {"ssl.keystore.type": "PEM"}),
    "ssl.key.password.file": ("ssl.key.password", {}),
}
_HOST_CHECK: Final = "ssl.endpoint.identification.algorithm"
_SUPPORTED: Final = frozenset(
    {*_SAME_NAMES, *_FILE_SETTINGS, _HOST_CHECK, "sasl.username", "sasl.password", "sasl.password.file"}
)


def with_kafka_jars(bridge: Bridge) -> Bridge:
    """Return the bridge with the jars of Spark's Kafka source; unchanged without downlinks, or if the file names jars.

    Raises:
        ConfigError: TL-B07 when the jars can't be fetched; TL-C77 when Java's client has no such setting of [kafka].
    """
    if not bridge.downlinks:
        return bridge
    java_client(bridge.kafka.client_settings(), {})
    if bridge.spark.kafka_jars or _CONNECTOR in str(bridge.spark.conf.get(_PACKAGES_KEY, "")):
        return bridge
    try:
        jars = spark_kafka_jars()
    except SetupError as error:
        problem = f"a line reads with Spark's Kafka source, whose jars can't be fetched ({error.problem})"
        remedy = (
            f'{error.remedy} Or name their directory with kafka_jars = ["DIR"] in [spark], or let Spark '
            f'fetch them: in [spark.conf] "{_PACKAGES_KEY}" = "{SPARK_KAFKA_PACKAGE}".'
        )
        raise ConfigError("TL-B07", str(bridge.file), problem, remedy) from error
    return bridge.model_copy(update={"spark": bridge.spark.model_copy(update={"kafka_jars": tuple(jars)})})


def java_client(client: Mapping[str, str], environ: MutableMapping[str, str] | None = None) -> dict[str, str]:
    """Translate librdkafka's settings to the settings of Kafka's Java client.

    Args:
        client: Settings with librdkafka's names; secrets as names of files, or as ``${NAME}``.
        environ: Environment that receives the secrets; by default that of this process, before Spark's JVM starts.

    Raises:
        ConfigError: TL-C77 for a security setting that Java's client does not have; TL-C46 for a file that can't be
            read.
    """
    environ = os.environ if environ is None else environ
    named = {("sasl.mechanism" if key == "sasl.mechanisms" else key): value for key, value in client.items()}
    settings = {key: value for key, value in named.items() if key in _SAME_NAMES}
    if (mechanism := named.get("sasl.mechanism", "PLAIN").upper()) not in _LOGINS:
        problem = (
            f"Spark's Kafka source, which a downlink reads with, logs in with {', '.join(_LOGINS)}, not {mechanism}"
        )
        raise _unsupported_error("sasl.mechanism", problem)
    for key in named:
        if key.startswith(("sasl.", "ssl.", "enable.ssl.")) and key not in _SUPPORTED:
            raise _unsupported_error(key, "Spark's Kafka source has no such setting")

    def store_secret(key: str, secret: str) -> str:
        environ[name := "TOWLINE_KAFKA_" + key.upper().replace(".", "_")] = secret
        return f"${{env:{name}}}"

    for key, (java_name, store_settings) in _FILE_SETTINGS.items():
        if key in named:
            settings |= {java_name: store_secret(key, _read_file(key, named[key])), **store_settings}
    if _HOST_CHECK in named:
        settings[_HOST_CHECK] = "" if named[_HOST_CHECK] == "none" else named[_HOST_CHECK]
    if "sasl.mechanism" in settings:
        user = _escape_jaas(named.get("sasl.username", ""))
        password = store_secret("password", _escape_jaas(_password(named)))
        settings["sasl.jaas.config"] = f'{_LOGINS[mechanism]} required username="{user}" password="{password}";'
    if any("${env:" in value for value in settings.values()):
        settings["config.providers"] = "env"
        settings["config.providers.env.class"] = "org.apache.kafka.common.config.provider.EnvVarConfigProvider"
    return settings


def _password(settings: Mapping[str, str]) -> str:
    if (file := settings.get("sasl.password.file")) is not None:
        return _read_file("sasl.password.file", file).strip("\r\n")
    return os.path.expandvars(settings.get("sasl.password", ""))


def _escape_jaas(text: str) -> str:
    """Escape a text for the quotes of a JAAS entry."""
    return text.replace("\\", "\\\\").replace('"', '\\"')


def _read_file(key: str, file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        problem = f"{file} can't be read ({type(error).__name__})"
        raise ConfigError("TL-C46", f'[kafka] "{key}"', problem, "Check its name and rights.") from None


def _unsupported_error(key: str, problem: str) -> ConfigError:
    return ConfigError("TL-C77", f'[kafka] "{key}"', problem, "Change it, or give the downlink a separate bridge file.")
