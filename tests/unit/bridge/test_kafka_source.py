"""Spark's own Kafka source: its jars, and the settings of Kafka's Java client."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.unit.bridge.test_downlink_file import GOOD, read
from towline.bridge import kafka_source
from towline.bridge.kafka_source import java_client
from towline.errors import ConfigError, ConfigErrors, SetupError


def test_no_secret_is_in_the_settings(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text('s3"cret\\\n')
    (tmp_path / "ca").write_text("-----CA-----")
    secrets: dict[str, str] = {}
    client = {
        "bootstrap.servers": "a:1",
        "linger.ms": "5",
        "security.protocol": "SASL_SSL",
        "sasl.mechanisms": "SCRAM-SHA-512",
        "sasl.username": "me",
        "sasl.password.file": str(tmp_path / "secret"),
        "ssl.ca.location": str(tmp_path / "ca"),
        "ssl.endpoint.identification.algorithm": "none",
    }
    settings = java_client(client, secrets)
    assert "cret" not in str(settings)
    assert "linger.ms" not in settings
    assert secrets["TOWLINE_KAFKA_PASSWORD"] == 's3\\"cret\\\\'  # noqa: S105 - made up
    assert secrets["TOWLINE_KAFKA_SSL_CA_LOCATION"] == "-----CA-----"
    assert settings["sasl.jaas.config"] == (
        'org.apache.kafka.common.security.scram.ScramLoginModule required username="me" '
        'password="${env:TOWLINE_KAFKA_PASSWORD}";'
    )
    assert (settings["ssl.truststore.type"], settings["ssl.endpoint.identification.algorithm"]) == ("PEM", "")
    assert settings["config.providers"] == "env"


@pytest.mark.parametrize(
    ("client", "said"),
    [
        ({"enable.ssl.certificate.verification": "false"}, "has no such setting"),
        ({"sasl.mechanism": "GSSAPI"}, "not GSSAPI. Change it, or give the downlink a separate bridge file"),
        ({"ssl.ca.location": "/nowhere"}, r"/nowhere can't be read \(FileNotFoundError\).*TL-C46"),
    ],
)
def test_what_java_does_not_have_is_refused(client: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        java_client({"bootstrap.servers": "a:1", **client}, {})
    assert caught.value.code in ("TL-C77", "TL-C46")


def test_check_refuses_a_token_provider_with_a_downlink(tmp_path: Path) -> None:
    bearer = ' "security.protocol" = "SASL_SSL" }, token_provider = "module:function" }'
    with pytest.raises(ConfigErrors) as caught:
        read(GOOD.replace('"k1:9092" }', '"k1:9092", settings = {' + bearer), tmp_path)
    (line,) = str(caught.value).splitlines()
    assert re.search(r"bridge.toml:4  \[kafka\]: Spark's Kafka source, .* not OAUTHBEARER.*\[TL-C77\]", line)


def test_a_directory_or_a_file_names_its_jars_once(tmp_path: Path) -> None:
    jars = [tmp_path / "jars" / name for name in ("kafka-clients-3.9.2.jar", "spark-sql-kafka-0-10_2.13-9.9.9.jar")]
    (tmp_path / "jars" / "nested.jar").mkdir(parents=True)
    for file in (*jars, tmp_path / "jars" / "README"):
        file.touch()
    for names, expected in ((["jars"], jars), (["jars", str(jars[0])], jars), ([f"jars/{jars[0].name}"], jars[:1])):
        bridge = read(f"{GOOD}[spark]\nkafka_jars = {json.dumps(names)}\n", tmp_path)
        assert bridge.spark.kafka_jars == tuple(expected)
        assert kafka_source.with_kafka_jars(bridge) is bridge
    for named in ("jars/x.jar", "none"):
        with pytest.raises(ConfigErrors, match=re.escape(f"no jar file is at {tmp_path}/{named}.")):
            read(f"{GOOD}[spark]\nkafka_jars = [{json.dumps(named)}]\n", tmp_path)


def test_jars_come_from_maven_or_by_spark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_jars() -> list[Path]:
        raise SetupError("TL-S15", "maven", "no jars", "Bring it.")

    monkeypatch.setattr(kafka_source, "spark_kafka_jars", no_jars)
    setting = '"spark.jars.packages" = "org.apache.spark:spark-sql-kafka-0-10_2.13:4.2.0"'
    for more in ("", f"[spark.conf]\n{setting.replace('sql-kafka-0-10', 'avro')}\n"):
        bridge = read(GOOD + more, tmp_path)
        with pytest.raises(ConfigError, match=r"jars can't be fetched .* \[TL-B07\]") as caught:
            kafka_source.with_kafka_jars(bridge)
        assert caught.value.remedy.startswith("Bring it. Or name their directory with kafka_jars")
        assert setting in caught.value.remedy
    packages = read(f"{GOOD}[spark.conf]\n{setting}\n", tmp_path)
    assert kafka_source.with_kafka_jars(packages) is packages
