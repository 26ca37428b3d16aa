"""Java's settings in librdkafka's words: every one of Kafka's producer has an answer, and no secret is shown."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import pytest
from confluent_kafka import Producer
from hypothesis import given
from hypothesis import strategies as st

from towline.errors import ConfigError
from towline.kafka import jaas
from towline.kafka.clientconfig import QUIET, insecurities, resolve
from towline.kafka.javanames import IDLE, REFUSED, RULES, translated
from towline.kafka.options import SinkSettings
from towline.kafka.plainsecret import PlainSecret

BASE = {"kafka.bootstrap.servers": "k1:9092", "topic": "t"}
#: ProducerConfig of Kafka 4.3.1 with a value each that its users write; what Spark or the guarantee set is left out.
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
    "metadata.max.idle.ms": "300000",
    "metadata.recovery.rebootstrap.trigger.ms": "300000",
    "metadata.recovery.strategy": "rebootstrap",
    "metrics.num.samples": "2",
    "metrics.recording.level": "INFO",
    "metrics.sample.window.ms": "30000",
    "partitioner.adaptive.partitioning.enable": "true",
    "partitioner.availability.timeout.ms": "0",
    "partitioner.ignore.keys": "false",
    "receive.buffer.bytes": "32768",
    "reconnect.backoff.max.ms": "1000",
    "reconnect.backoff.ms": "50",
    "request.timeout.ms": "30000",
    "retries": "2147483647",
    "retry.backoff.max.ms": "1000",
    "retry.backoff.ms": "100",
    "security.protocol": "PLAINTEXT",
    "send.buffer.bytes": "131072",
    "socket.connection.setup.timeout.max.ms": "30000",
    "socket.connection.setup.timeout.ms": "10000",
    "ssl.enabled.protocols": "TLSv1.2,TLSv1.3",
    "ssl.endpoint.identification.algorithm": "https",
    "ssl.protocol": "TLSv1.3",
    "transaction.timeout.ms": "120000",
    "acks": "all",
    # what asks for nothing: the defaults of switches and lists of classes
    "interceptor.classes": "",
    "metric.reporters": "",
    "transaction.two.phase.commit.enable": "false",
}


def said(name: str, value: str, **more: str) -> dict[str, str]:
    """What librdkafka is told of a setting, and of others that stand with it; `__` stands for a dot."""
    others = {other.replace("__", "."): text for other, text in more.items()}
    return dict(translated({name: value, **others}, "here").client)


def refusal(name: str, value: str, **more: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        said(name, value, **more)
    assert "\n" not in str(caught.value)
    assert caught.value.do.endswith((".", ";", "both)."))
    return caught.value


@pytest.mark.parametrize("name", sorted(JAVA))
def test_what_users_of_sparks_sink_write_is_taken(name: str) -> None:
    settings = SinkSettings.parse({**BASE, "kafka.compression.type": "zstd", f"kafka.{name}": JAVA[name]})
    Producer(resolve(settings.client, "here"), logger=QUIET)


def test_all_of_it_at_once_is_a_client() -> None:
    settings = SinkSettings.parse({**BASE, **{f"kafka.{name}": value for name, value in JAVA.items()}})
    Producer(resolve(settings.client, "here"), logger=QUIET)
    assert settings.timeout_s == 120
    assert len(settings.idle) == len([name for name in JAVA if name in IDLE])


@pytest.mark.parametrize(
    ("name", "value", "made"),
    [
        ("buffer.memory", "33554432", {"queue.buffering.max.kbytes": "32768"}),
        ("buffer.memory", "1500", {"queue.buffering.max.kbytes": "2"}),
        ("max.request.size", "2097152", {"message.max.bytes": "2097152"}),
        ("batch.size", "0", {"batch.num.messages": "1"}),
        ("connections.max.idle.ms", "-1", {"connections.max.idle.ms": "0"}),
        ("send.buffer.bytes", "-1", {"socket.send.buffer.bytes": "0"}),
        ("receive.buffer.bytes", "65536", {"socket.receive.buffer.bytes": "65536"}),
        ("client.dns.lookup", "default", {"client.dns.lookup": "use_all_dns_ips"}),
        ("partitioner.ignore.keys", "true", {"partitioner": "random"}),
        ("ssl.endpoint.identification.algorithm", "", {"ssl.endpoint.identification.algorithm": "none"}),
        ("ssl.endpoint.identification.algorithm", "HTTPS", {"ssl.endpoint.identification.algorithm": "https"}),
        ("ssl.keystore.location", "/k.p12", {"ssl.keystore.location": "/k.p12"}),
        ("ssl.cipher.suites", "TLS_AES_128_GCM_SHA256,X", {"ssl.cipher.suites": "TLS_AES_128_GCM_SHA256:X"}),
        ("acks", "all", {"acks": "all"}),
    ],
)
def test_values_are_translated(name: str, value: str, made: dict[str, str]) -> None:
    assert said(name, value) == made


@pytest.mark.parametrize(
    ("value", "partitioner"),
    [
        ("org.apache.kafka.clients.producer.internals.DefaultPartitioner", "murmur2_random"),
        ("org.apache.kafka.clients.producer.RoundRobinPartitioner", "random"),
        ("org.apache.kafka.clients.producer.UniformStickyPartitioner", "random"),
    ],
)
def test_kafkas_own_partitioners(value: str, partitioner: str) -> None:
    assert said("partitioner.class", value) == {"partitioner": partitioner}


def test_a_level_counts_for_its_codec_alone() -> None:
    assert said("compression.zstd.level", "7", compression__type="zstd")["compression.level"] == "7"
    assert "compression.level" not in said("compression.zstd.level", "7", compression__type="gzip")
    assert "12" in refusal("compression.zstd.level", "19", compression__type="zstd").what


def test_pem_stores() -> None:
    assert said("ssl.truststore.location", "/ca.pem", ssl__truststore__type="PEM") == {"ssl.ca.location": "/ca.pem"}
    both = {"ssl.certificate.location": "/own.pem", "ssl.key.location": "/own.pem"}
    assert said("ssl.keystore.location", "/own.pem", ssl__keystore__type="pem") == both
    texts = said(
        "ssl.keystore.key", "KEY", ssl__keystore__certificate__chain="CHAIN", ssl__truststore__certificates="CA"
    )
    assert texts == {"ssl.key.pem": "KEY", "ssl.certificate.pem": "CHAIN", "ssl.ca.pem": "CA"}
    assert str(texts["ssl.key.pem"]) == "<secret>"


def test_the_one_password_of_a_pkcs12_file() -> None:
    made = said(
        "ssl.keystore.location",
        "/k.p12",
        ssl__keystore__type="PKCS12",
        ssl__keystore__password="p",
        ssl__key__password="p",
    )
    assert made == {"ssl.keystore.location": "/k.p12", "ssl.keystore.password": "p"}


@pytest.mark.parametrize(
    ("name", "value", "more", "says"),
    [
        ("ssl.truststore.location", "/t.jks", {}, "PEM"),
        ("ssl.truststore.location", "/t.p12", {"ssl__truststore__type": "PKCS12"}, "PEM"),
        ("ssl.truststore.password", "hunter2", {}, "PEM"),
        ("ssl.truststore.type", "JKS", {}, "PEM"),
        ("ssl.keystore.location", "/k.jks", {"ssl__keystore__type": "JKS"}, "PKCS12"),
        ("ssl.enabled.protocols", "TLSv1.3", {}, "TLS 1.2 and 1.3 are used"),
        ("ssl.enabled.protocols", "TLSv1,TLSv1.1", {}, "TLS 1.2 and 1.3 are used"),
        ("ssl.cipher.suites", "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256", {}, "OpenSSL's names"),
        ("partitioner.class", "com.example.Mine", {}, "column partition"),
        ("interceptor.classes", "com.example.Mine", {}, "no Java class"),
        ("value.serializer", "org.apache.kafka.common.serialization.StringSerializer", {}, "as they are"),
        ("sasl.login.callback.handler.class", "com.example.Mine", {}, "no Java class"),
        ("sasl.jaas.config", "a.b.Krb5LoginModule required keyTab='/k';", {}, "without Kerberos"),
        ("sasl.jaas.config", "a.b.Mine required;", {}, "no Java class"),
    ],
)
def test_what_has_no_translation_gets_one_line(name: str, value: str, more: dict[str, str], says: str) -> None:
    error = refusal(name, value, **more)
    assert error.code == "TL-C43"
    assert "kafka.ssl" in error.what or "kafka." + name in error.what
    assert says in error.do
    assert "hunter2" not in str(error)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_refusal_says_what_to_do(name: str) -> None:
    assert refusal(name, "true").code == "TL-C43"
    assert said(name, "") == {}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("buffer.memory", "32m"),
        ("max.request.size", "-1"),
        ("partitioner.ignore.keys", "yes"),
        ("sasl.jaas.config", "hunter2"),
        ("sasl.jaas.config", "a.PlainLoginModule required username=u;"),
        ("sasl.jaas.config", 'a.PlainLoginModule required username="u" password="hunter2"'),
        ("sasl.jaas.config", "a.ScramLoginModule required username=u password=hunter2;"),
    ],
)
def test_values_that_java_does_not_take_either(name: str, value: str) -> None:
    error = refusal(name, value)
    assert error.code == "TL-C45"
    assert "hunter2" not in str(error)


def test_one_thing_said_twice() -> None:
    assert "queue.buffering.max.kbytes" in refusal("buffer.memory", "1024", queue__buffering__max__kbytes="7").what
    login = "a.PlainLoginModule required username=u password=p;"
    assert refusal("sasl.jaas.config", login, sasl__username="v").code == "TL-C43"


def test_a_value_is_complained_of_by_the_name_the_user_wrote() -> None:
    with pytest.raises(ConfigError) as caught:
        SinkSettings.parse({**BASE, "kafka.max.request.size": "2000000000"})
    assert 'option "kafka.max.request.size" = 2000000000' in caught.value.what


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
    (line,) = insecurities(travelled.client)
    assert line == "sasl.jaas.config: the secret stands in plain text in the options of the query."
    Producer(resolve(travelled.client, "here"), logger=QUIET)


def test_a_login_that_names_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAFKA_PASSWORD", TOLD)
    made = said("sasl.jaas.config", login("${KAFKA_PASSWORD}"))
    assert made["sasl.password"] == "${KAFKA_PASSWORD}"
    assert not isinstance(made["sasl.password"], PlainSecret)
    assert made["sasl.mechanism"] == "PLAIN"
    assert resolve(made, "here")["sasl.password"] == TOLD


def test_client_credentials() -> None:
    text = 'a.OAuthBearerLoginModule required clientId="me" clientSecret="hunter2" scope="s";'
    handler = "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginCallbackHandler"
    made = said("sasl.jaas.config", text, sasl__mechanism="OAUTHBEARER", sasl__login__callback__handler__class=handler)
    assert made == {
        "sasl.mechanism": "OAUTHBEARER",
        "sasl.oauthbearer.method": "oidc",
        "sasl.oauthbearer.client.id": "me",
        "sasl.oauthbearer.client.secret": "hunter2",
        "sasl.oauthbearer.scope": "s",
    }
    assert "hunter2" not in repr(made)


@given(
    st.text(alphabet="ab; =\n"),
    st.dictionaries(st.from_regex(r"[A-Za-z][A-Za-z0-9_.-]{0,9}", fullmatch=True), st.text(), max_size=4),
)
def test_any_options_of_a_login_are_read_as_they_were_written(comment: str, options: dict[str, str]) -> None:
    def quoted(text: str) -> str:
        return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'

    pairs = " ".join(f"{name} = {quoted(value)}" for name, value in options.items())
    text = f"/*{comment}*/ a.b.Module required {pairs};"
    assert jaas.parse(text) == jaas.Login("Module", options)


def outcome(read: Callable[[], object]) -> str:
    try:
        read()
    except ConfigError as error:
        return f"{error.code} {str(error).count(chr(10))}"
    except ValueError:
        return "refused"
    return "taken"


@given(st.text(alphabet="ab\"'\\=; /*.\n", max_size=40))
def test_any_text_is_a_login_or_a_value_error(text: str) -> None:
    assert outcome(lambda: jaas.parse(text)) in {"taken", "refused"}


@given(st.dictionaries(st.sampled_from(sorted(RULES)), st.text(max_size=12), max_size=4))
def test_any_value_is_translated_or_gets_one_line(settings: dict[str, str]) -> None:
    assert outcome(lambda: translated(settings, "here")) in {"taken", "TL-C43 0", "TL-C45 0"}
