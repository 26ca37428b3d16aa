"""Spark's own Kafka source, which the way down reads with: its jars, and the settings of [kafka] for its client.

The jars are named in the file, or brought by Maven once. The client is Java's: one file, two spellings. Secrets stay
out of Spark's options, plans and pages [I12]: an option names a variable of the environment, and Kafka's client
replaces it (``EnvVarConfigProvider``, KIP-887).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from towline.errors import ConfigError, SetupError
from towline.spark.java import SPARK_KAFKA_PACKAGE, known_spark_kafka_jars, spark_kafka_jars
from towline.spark.session import pyspark_version

if TYPE_CHECKING:
    from towline.bridge.config.model import Bridge

_PACKAGES: Final = "spark.jars.packages"
#: What the connector is called among those packages.
_KAFKA: Final = "spark-sql-kafka-0-10"
#: Same name, same meaning.
_SAME: Final = frozenset(
    {
        *("bootstrap.servers", "security.protocol", "sasl.mechanism", "client.rack"),
        *("reconnect.backoff.ms", "reconnect.backoff.max.ms", "metadata.max.age.ms", "connections.max.idle.ms"),
        *("fetch.min.bytes", "fetch.max.bytes", "max.partition.fetch.bytes"),
    }
)
_LOGIN: Final = {
    "PLAIN": "org.apache.kafka.common.security.plain.PlainLoginModule",
    "SCRAM-SHA-256": "org.apache.kafka.common.security.scram.ScramLoginModule",
    "SCRAM-SHA-512": "org.apache.kafka.common.security.scram.ScramLoginModule",
}
#: librdkafka's names of files → Java's of their content, and the type that a store of it has.
_FILES: Final = {
    "ssl.ca.location": ("ssl.truststore.certificates", {"ssl.truststore.type": "PEM"}),
    "ssl.certificate.location": ("ssl.keystore.certificate.chain", {}),
    "ssl.key.location": ("ssl.keystore.key", {"ssl.keystore.type": "PEM"}),
    "ssl.key.password.file": ("ssl.key.password", {}),
}
_CHECK: Final = "ssl.endpoint.identification.algorithm"
_UNDERSTOOD: Final = frozenset({*_SAME, *_FILES, _CHECK, "sasl.username", "sasl.password", "sasl.password.file"})


def equipped(bridge: Bridge) -> Bridge:
    """The bridge with the jars that its lines from Kafka need; as it is when it has none, or the file names them.

    Raises:
        ConfigError: TL-B07 when they can't be had; TL-C77 when their client can't have a setting of [kafka].
    """
    if not bridge.downlinks:
        return bridge
    java_client(bridge.kafka.client(), {})
    if bridge.spark.kafka_jars or _fetched(bridge):
        return bridge
    try:
        jars = spark_kafka_jars(str(pyspark_version()))
    except SetupError as error:
        what = f"a line reads with Spark's Kafka source, whose jars can't be had ({error.what})"
        do = (
            f'{error.do} Or name their directory with kafka_jars = ["DIR"] in [spark], or let Spark '
            f'fetch them: in [spark.conf] "{_PACKAGES}" = "{SPARK_KAFKA_PACKAGE}".'
        )
        raise ConfigError("TL-B07", str(bridge.file), what, do) from error
    return bridge.model_copy(update={"spark": bridge.spark.model_copy(update={"kafka_jars": tuple(jars)})})


def _fetched(bridge: Bridge) -> str:
    """The packages that Spark fetches by itself, if its Kafka source is among them; else ""."""
    packages = str(bridge.spark.conf.get(_PACKAGES, ""))
    return packages if _KAFKA in packages else ""


def source_text(bridge: Bridge) -> str:
    """The pair in use in one line, without a network; "" for a bridge that needs none, or where there is no PySpark."""
    if not bridge.downlinks or not (ours := pyspark_version()):
        return ""
    if packages := _fetched(bridge):
        return f"Spark's Kafka source for PySpark {ours}: Spark fetches {packages}"
    jars: Sequence[Path] | None = bridge.spark.kafka_jars or known_spark_kafka_jars(ours)
    if not jars:
        return f"Spark's Kafka source for PySpark {ours}: Maven brings its jars at the first start"
    connectors = [jar.stem for jar in jars if jar.name.startswith("spark-")] or [jar.stem for jar in jars]
    same = bridge.spark.kafka_jars or all(name.endswith(f"-{ours}") for name in connectors)
    why = "" if same else f" (the tested pair: there is none of {ours})"
    return f"Spark's Kafka source for PySpark {ours}: {' + '.join(connectors)}{why}"


def java_client(client: Mapping[str, str], environ: MutableMapping[str, str] | None = None) -> dict[str, str]:
    """The settings as Kafka's Java client names them.

    Args:
        client: As librdkafka names them; secrets as names of files, or as ``${NAME}``.
        environ: Takes the secrets; the process's own by default, and then Spark's JVM must not run yet.

    Raises:
        ConfigError: TL-C77 for a setting of security that Java's client can't have; TL-C46 for a file that can't be
            read.
    """
    environ = os.environ if environ is None else environ
    named = {("sasl.mechanism" if key == "sasl.mechanisms" else key): value for key, value in client.items()}
    settings = {key: value for key, value in named.items() if key in _SAME}
    if (mechanism := named.get("sasl.mechanism", "PLAIN").upper()) not in _LOGIN:
        what = f"Spark's Kafka source, which a downlink reads with, logs in with {', '.join(_LOGIN)}, not {mechanism}"
        raise _refused("sasl.mechanism", what)
    for key in named:
        if key.startswith(("sasl.", "ssl.", "enable.ssl.")) and key not in _UNDERSTOOD:
            raise _refused(key, "Spark's Kafka source has no such setting")

    def hidden(key: str, secret: str) -> str:
        environ[name := "TOWLINE_KAFKA_" + key.upper().replace(".", "_")] = secret
        return f"${{env:{name}}}"

    for key, (java, store) in _FILES.items():
        if key in named:
            settings |= {java: hidden(key, _content(key, named[key])), **store}
    if _CHECK in named:
        settings[_CHECK] = "" if named[_CHECK] == "none" else named[_CHECK]
    if "sasl.mechanism" in settings:
        user, password = _quoted(named.get("sasl.username", "")), hidden("password", _quoted(_password(named)))
        settings["sasl.jaas.config"] = f'{_LOGIN[mechanism]} required username="{user}" password="{password}";'
    if any("${env:" in value for value in settings.values()):
        settings["config.providers"] = "env"
        settings["config.providers.env.class"] = "org.apache.kafka.common.config.provider.EnvVarConfigProvider"
    return settings


def _password(named: Mapping[str, str]) -> str:
    if (file := named.get("sasl.password.file")) is not None:
        return _content("sasl.password.file", file).strip("\r\n")
    return os.path.expandvars(named.get("sasl.password", ""))


def _quoted(text: str) -> str:
    """Inside the quotes of a JAAS entry."""
    return text.replace("\\", "\\\\").replace('"', '\\"')


def _content(key: str, file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        what = f"{file} can't be read ({type(error).__name__})"
        raise ConfigError("TL-C46", f'[kafka] "{key}"', what, "Check its name and rights.") from None


def _refused(key: str, what: str) -> ConfigError:
    return ConfigError("TL-C77", f'[kafka] "{key}"', what, "Change it, or give the downlink a bridge file of its own.")
