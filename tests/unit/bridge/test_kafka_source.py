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

# -- Kafka's other client --


def test_plain_settings_are_the_same() -> None:
    assert java_client({"bootstrap.servers": "a:1", "linger.ms": "5"}, {}) == {"bootstrap.servers": "a:1"}


def test_no_secret_is_in_the_settings(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text('s3"cret\\\n')
    (tmp_path / "ca").write_text("-----CA-----")
    secrets: dict[str, str] = {}
    client = {
        "bootstrap.servers": "a:1",
        "security.protocol": "SASL_SSL",
        "sasl.mechanisms": "SCRAM-SHA-512",
        "sasl.username": "me",
        "sasl.password.file": str(tmp_path / "secret"),
        "ssl.ca.location": str(tmp_path / "ca"),
        "ssl.endpoint.identification.algorithm": "none",
    }
    settings = java_client(client, secrets)
    assert "cret" not in str(settings)
    assert secrets["TOWLINE_KAFKA_PASSWORD"] == 's3\\"cret\\\\'  # noqa: S105 - made up
    assert secrets["TOWLINE_KAFKA_SSL_CA_LOCATION"] == "-----CA-----"
    assert settings["sasl.jaas.config"] == (
        'org.apache.kafka.common.security.scram.ScramLoginModule required username="me" '
        'password="${env:TOWLINE_KAFKA_PASSWORD}";'
    )
    assert (settings["ssl.truststore.type"], settings["ssl.endpoint.identification.algorithm"]) == ("PEM", "")
    assert settings["config.providers"] == "env"


@pytest.mark.parametrize(
    "client",
    [
        {"enable.ssl.certificate.verification": "false"},
        {"sasl.mechanism": "GSSAPI"},
        {"sasl.mechanism": "OAUTHBEARER", "sasl.oauthbearer.token.provider": "m:f"},
    ],
)
def test_settings_that_java_does_not_have_are_refused(client: dict[str, str]) -> None:
    with pytest.raises(ConfigError) as caught:
        java_client({"bootstrap.servers": "a:1", **client}, {})
    assert caught.value.code == "TL-C77"


def test_check_refuses_a_token_provider_with_a_downlink(tmp_path: Path) -> None:
    bearer = ' "security.protocol" = "SASL_SSL" }, token_provider = "module:function" }'
    text = GOOD.replace('"k1:9092" }', '"k1:9092", settings = {' + bearer)
    with pytest.raises(ConfigErrors) as caught:
        read(text, tmp_path)
    (line,) = str(caught.value).splitlines()
    assert "bridge.toml:4  [kafka]: Spark's Kafka source, which a downlink reads with, logs in with PLAIN, " in line
    assert line.endswith("not OAUTHBEARER. Change it, or give the downlink a separate bridge file.   [TL-C77]")
    uplink = text.replace("downlink", "uplink").replace(
        'from = "commands"\ntopic = "command/{header.tenant}/{key}/req"', ""
    )
    client = read(f'{uplink}[[uplink.route]]\nfrom = "a/#"\ntopic = "t"\n', tmp_path).kafka.client_settings()
    assert (client["sasl.mechanism"], client["sasl.oauthbearer.token.provider"]) == ("OAUTHBEARER", "module:function")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"/nowhere can't be read \(FileNotFoundError\).*TL-C46"):
        java_client({"bootstrap.servers": "a:1", "ssl.ca.location": "/nowhere"}, {})


def test_a_directory_or_a_pattern_names_its_jars_once(tmp_path: Path) -> None:
    jars = [tmp_path / "jars" / name for name in ("kafka-clients-3.9.2.jar", "spark-sql-kafka-0-10_2.13-9.9.9.jar")]
    (tmp_path / "jars" / "nested.jar").mkdir(parents=True)
    for file in (*jars, tmp_path / "jars" / "README", tmp_path / "other[1].jar"):
        file.touch()
    for names, expected in (
        (["jars"], jars),
        (["jars/*.jar", str(jars[0])], jars),
        (["jars/kafka*"], jars[:1]),
        (["other[1].jar"], [tmp_path / "other[1].jar"]),
    ):
        bridge = read(f"{GOOD}[spark]\nkafka_jars = {json.dumps(names)}\n", tmp_path)
        assert bridge.spark.kafka_jars == tuple(expected)
    (tmp_path / "empty").mkdir()
    for named in ("empty", "jars/x*", "none/*.jar", "jars/a**b"):
        with pytest.raises(ConfigErrors, match=re.escape(f"no jar file is at {tmp_path}/{named}.")):
            read(f"{GOOD}[spark]\nkafka_jars = [{json.dumps(named)}]\n", tmp_path)


def test_configured_jars_are_used_and_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("spark-sql-kafka-0-10_2.13-9.9.9.jar", "kafka-clients-3.9.2.jar"):
        (tmp_path / name).touch()
    text = GOOD + '[spark]\nkafka_jars = ["spark-sql-kafka-0-10_2.13-9.9.9.jar", "kafka-clients-3.9.2.jar"]\n'
    bridge = read(text, tmp_path)
    assert kafka_source.with_kafka_jars(bridge) is bridge
    assert kafka_source.source_description(bridge).endswith(": spark-sql-kafka-0-10_2.13-9.9.9")
    with pytest.raises(ConfigErrors, match=r"no jar file is at .*gone\.jar"):
        read(text.replace("kafka-clients-3.9.2.jar", "gone.jar"), tmp_path)

    def no_jars(version: str) -> list[Path]:
        raise SetupError("TL-S15", "maven", f"no {version}", "Bring it.")

    monkeypatch.setattr(kafka_source, "spark_kafka_jars", no_jars)
    monkeypatch.setattr(kafka_source, "cached_spark_kafka_jars", lambda _: [])
    bare = read(GOOD, tmp_path)
    assert "Maven brings its jars at the first start" in kafka_source.source_description(bare)
    with pytest.raises(ConfigError, match=r"Spark's Kafka source, whose jars can't be fetched .* \[TL-B07\]") as caught:
        kafka_source.with_kafka_jars(bare)
    setting = '"spark.jars.packages" = "org.apache.spark:spark-sql-kafka-0-10_2.13:4.2.0"'
    assert setting in caught.value.remedy  # of who has no Maven
    assert caught.value.remedy.startswith("Bring it. Or name their directory with kafka_jars"), (
        "Maven's cause and its cure"
    )
    packages = read(f"{GOOD}[spark.conf]\n{setting}\n", tmp_path)
    assert kafka_source.with_kafka_jars(packages) is packages
    assert kafka_source.source_description(packages).endswith(
        "Spark fetches org.apache.spark:spark-sql-kafka-0-10_2.13:4.2.0"
    )
    others = read(f"{GOOD}[spark.conf]\n{setting.replace('sql-kafka-0-10', 'avro')}\n", tmp_path)
    assert "Maven brings its jars" in kafka_source.source_description(others)
    with pytest.raises(ConfigError, match="TL-B07"):
        kafka_source.with_kafka_jars(others)
