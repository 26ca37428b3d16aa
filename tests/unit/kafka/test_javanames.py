"""Java's settings in librdkafka's words: those that occur are taken, any other gets one line, no secret is shown."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import pytest
from confluent_kafka import Producer
from hypothesis import given
from hypothesis import strategies as st

from towline.errors import ConfigError
from towline.kafka.clientconfig import (
    JAVA_NAMES,
    QUIET_LOGGER,
    PlainSecret,
    check_client,
    insecure_settings,
    resolve,
    translate_java_settings,
)
from towline.kafka.options import SinkSettings

BASE = {"kafka.bootstrap.servers": "k1:9092", "topic": "t"}
#: What users of Spark's sink write of the ProducerConfig of Kafka 4.3.1, with a value each.
JAVA = {
    "batch.size": "16384",
    "buffer.memory": "33554432",
    "client.dns.lookup": "use_all_dns_ips",
    "client.id": "app",
    "compression.gzip.level": "-1",
    "compression.lz4.level": "9",
    "compression.type": "zstd",
    "compression.zstd.level": "3",
    "connections.max.idle.ms": "540000",
    "delivery.timeout.ms": "120000",
    "enable.idempotence": "true",
    "enable.metrics.push": "true",
    "linger.ms": "5",
    "max.block.ms": "60000",
    "max.in.flight.requests.per.connection": "5",
    "max.request.size": "1048576",
    "metadata.max.age.ms": "300000",
    "metadata.recovery.rebootstrap.trigger.ms": "300000",
    "metadata.recovery.strategy": "rebootstrap",
    "receive.buffer.bytes": "32768",
    "reconnect.backoff.max.ms": "1000",
    "reconnect.backoff.ms": "50",
    "request.timeout.ms": "30000",
    "retries": "2147483647",
    "retry.backoff.max.ms": "1000",
    "retry.backoff.ms": "100",
    "security.protocol": "PLAINTEXT",
    "send.buffer.bytes": "131072",
    "socket.connection.setup.timeout.ms": "10000",
    "ssl.endpoint.identification.algorithm": "https",
    "transaction.timeout.ms": "120000",
    "acks": "all",
}


def said(name: str, value: str, **more: str) -> dict[str, str]:
    """What librdkafka is told of a setting, and of others that stand with it; `__` stands for a dot."""
    others = {other.replace("__", "."): text for other, text in more.items()}
    return translate_java_settings({name: value, **others}, "here")[0]


def refusal(name: str, value: str, **more: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        said(name, value, **more)
    assert "\n" not in str(caught.value)
    assert caught.value.remedy.endswith((".", ";"))
    return caught.value


def test_all_of_it_at_once_is_a_client() -> None:
    settings = SinkSettings.parse({**BASE, **{f"kafka.{name}": value for name, value in JAVA.items()}})
    Producer(resolve(settings.client, "here"), logger=QUIET_LOGGER)
    assert settings.timeout_s == 120


@pytest.mark.parametrize(
    ("name", "value", "made"),
    [
        ("buffer.memory", "33554432", {"queue.buffering.max.kbytes": "32768"}),
        ("buffer.memory", "1500", {"queue.buffering.max.kbytes": "2"}),
        ("max.request.size", "2097152", {"message.max.bytes": "2097152"}),
        ("max.block.ms", "60000", {}),
        ("receive.buffer.bytes", "65536", {"socket.receive.buffer.bytes": "65536"}),
        ("ssl.endpoint.identification.algorithm", "", {"ssl.endpoint.identification.algorithm": "none"}),
        ("ssl.endpoint.identification.algorithm", "HTTPS", {"ssl.endpoint.identification.algorithm": "https"}),
        ("ssl.truststore.certificates", "CA", {"ssl.ca.pem": "CA"}),
        ("acks", "all", {"acks": "all"}),
    ],
)
def test_values_are_translated(name: str, value: str, made: dict[str, str]) -> None:
    assert said(name, value) == made


def test_a_level_counts_for_its_codec_alone() -> None:
    assert said("compression.zstd.level", "7", compression__type="zstd")["compression.level"] == "7"
    assert "compression.level" not in said("compression.zstd.level", "7", compression__type="gzip")


def test_a_trust_store_is_pem() -> None:
    assert said("ssl.truststore.location", "/ca.pem", ssl__truststore__type="PEM") == {"ssl.ca.location": "/ca.pem"}
    for name, value, more in (
        ("ssl.truststore.location", "/t.jks", {}),
        ("ssl.truststore.location", "/t.p12", {"ssl__truststore__type": "PKCS12"}),
        ("ssl.truststore.type", "JKS", {}),
    ):
        error = refusal(name, value, **more)
        assert error.code == "TL-C45"
        assert "keytool" in error.remedy


@pytest.mark.parametrize(
    "name",
    [
        "auto.include.jmx.reporter",
        "config.providers",
        "interceptor.classes",
        "key.serializer",
        "metric.reporters",
        "partitioner.class",
        "sasl.login.callback.handler.class",
        "ssl.enabled.protocols",
        "ssl.keystore.key",
        "ssl.keystore.type",
        "ssl.protocol",
        "ssl.truststore.password",
        "transaction.two.phase.commit.enable",
    ],
)
def test_any_other_gets_one_line(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SinkSettings.parse({**BASE, f"kafka.{name}": "hunter2"})
    assert caught.value.code in {"TL-C43", "TL-C01"}
    assert f'"kafka.{name}"' in caught.value.problem
    assert "CONFIGURATION.md" in caught.value.remedy
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("name", sorted(JAVA_NAMES))
def test_librdkafka_has_none_of_the_names_that_are_translated(name: str) -> None:
    """In a bridge file they are not: there settings are librdkafka's, and the line says so."""
    if name in {"delivery.timeout.ms", "ssl.endpoint.identification.algorithm"}:
        return  # an alias there, and one name with two words for "none"
    with pytest.raises(ConfigError, match=r'option "\[kafka\] ' + name + r'" is a Java client\'s.*TL-C43'):
        check_client({"bootstrap.servers": "k1:9092", name: "x"}, "bridge.toml:3", "[kafka] ")


@pytest.mark.parametrize(
    ("value", "more"),
    [
        ("hunter2", {}),
        ("a.PlainLoginModule required username=u;", {}),
        ('a.PlainLoginModule required username="u" password="hunter2"', {}),
        ('a.PlainLoginModule required username="u" password="hunter2";', {"sasl__mechanism": "SCRAM-SHA-512"}),
        ("a.PlainLoginModule required username=u password=hunter2; b.Other required;", {}),
        ("a.ScramLoginModule required username=u password=hunter2;", {}),
        ("a.ScramLoginModule required username=u password=hunter2;", {"sasl__mechanism": "PLAIN"}),
        ("a.b.Krb5LoginModule required keyTab='/hunter2';", {}),
        ('a.OAuthBearerLoginModule required clientId="me" clientSecret="hunter2";', {}),
        (r'a.PlainLoginModule required username="u" password="hunter2\t";', {}),
    ],
)
def test_logins_that_are_refused(value: str, more: dict[str, str]) -> None:
    error = refusal("sasl.jaas.config", value, **more)
    assert error.code == "TL-C45"
    assert "hunter2" not in str(error)


def test_a_size_that_is_no_number() -> None:
    assert refusal("buffer.memory", "32m").code == "TL-C45"


def test_one_setting_given_twice() -> None:
    assert "queue.buffering.max.kbytes" in refusal("buffer.memory", "1024", queue__buffering__max__kbytes="7").problem
    login = "a.PlainLoginModule required username=u password=p;"
    assert refusal("sasl.jaas.config", login, sasl__username="v").code == "TL-C43"


@pytest.mark.parametrize(("name", "value"), [("max.request.size", "2000000000"), ("compression.zstd.level", "19")])
def test_a_value_is_complained_of_by_the_name_the_user_wrote(name: str, value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SinkSettings.parse({**BASE, "kafka.compression.type": "zstd", f"kafka.{name}": value})
    assert f'option "kafka.{name}" = {value}' in caught.value.problem


def test_a_deadline_by_its_java_name() -> None:
    assert SinkSettings.parse({**BASE, "kafka.delivery.timeout.ms": "1500"}).timeout_s == 1.5
    for value, more in (("2147483647", {}), ("10", {}), ("soon", {}), ("60000", {"deliveryTimeout": "60"})):
        with pytest.raises(ConfigError, match=r"kafka\.delivery\.timeout\.ms"):
            SinkSettings.parse({**BASE, **more, "kafka.delivery.timeout.ms": value})


# -- logins and secrets ------------------------------------------------------------------------------------------------

TOLD = 'hun"ter\\2 ${HOME}'
LOGIN = (
    'org.apache.kafka.common.security.plain.PlainLoginModule required\n username="$ConnectionString" password="{}" ;'
)


def login(password: str = TOLD) -> str:
    return LOGIN.replace("{}", password.replace("\\", "\\\\").replace('"', '\\"'))


def test_a_login_in_plain_text_reaches_the_client_and_nobody_else() -> None:
    options = {**BASE, "kafka.security.protocol": "SASL_SSL", "kafka.sasl.mechanism": "PLAIN"}
    settings = SinkSettings.parse({**options, "kafka.sasl.jaas.config": login()})
    travelled = pickle.loads(pickle.dumps(settings))  # noqa: S301 - our own bytes
    assert resolve(travelled.client, "here")["sasl.password"] == TOLD
    assert travelled.client["sasl.username"] == "$ConnectionString"
    for text in (repr(settings), str(travelled.client), f"{travelled.client['sasl.password']}"):
        assert "hun" not in text
    (line,) = insecure_settings(travelled.client)
    assert line == "sasl.jaas.config: the secret is in plain text in the options of the query."
    Producer(resolve(travelled.client, "here"), logger=QUIET_LOGGER)


def test_a_login_that_names_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAFKA_PASSWORD", TOLD)
    made = said("sasl.jaas.config", login("${KAFKA_PASSWORD}"))
    assert made["sasl.password"] == "${KAFKA_PASSWORD}"
    assert not isinstance(made["sasl.password"], PlainSecret)
    assert made["sasl.mechanism"] == "PLAIN"
    assert resolve(made, "here")["sasl.password"] == TOLD


#: A secret of one line; JAAS has escapes for others, which nobody writes.
LINE = st.text(st.characters(exclude_characters="\n"), min_size=1)


@given(LINE, LINE)
def test_any_login_is_read_as_it_was_written(user: str, password: str) -> None:
    def quoted(text: str) -> str:
        return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'

    text = f"a.b.PlainLoginModule required serviceName=kafka username = {quoted(user)} password={quoted(password)} ;"
    made = said("sasl.jaas.config", text)
    secret = made["sasl.password"]
    assert made["sasl.username"] == user
    assert (secret.reveal() if isinstance(secret, PlainSecret) else secret) == password


def outcome(read: Callable[[], object]) -> str:
    try:
        read()
    except ConfigError as error:
        return f"{error.code} {str(error).count(chr(10))}"
    return "taken"


@given(st.text(alphabet="ab\"'\\=; /*.\n", max_size=40))
def test_any_text_is_a_login_or_one_line(text: str) -> None:
    assert outcome(lambda: said("sasl.jaas.config", f"a.PlainLoginModule required {text};")) in {"taken", "TL-C45 0"}


@given(st.dictionaries(st.sampled_from(sorted(JAVA_NAMES)), st.text(max_size=12), max_size=4))
def test_any_value_is_translated_or_gets_one_line(settings: dict[str, str]) -> None:
    assert outcome(lambda: translate_java_settings(settings, "here")) in {"taken", "TL-C43 0", "TL-C45 0"}
