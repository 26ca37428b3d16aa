"""Client configuration: names, values, and secrets that never travel."""

from __future__ import annotations

import pickle
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from confluent_kafka import Producer
from hypothesis import given
from hypothesis import strategies as st

from towline.errors import ConfigError, KafkaError
from towline.kafka import clientconfig
from towline.kafka.clientconfig import (
    JAVA_NAMES,
    PROVIDER,
    QUIET_LOGGER,
    SECRETS,
    PlainSecret,
    check_client,
    insecure_settings,
    resolve,
    translate_java_settings,
)
from towline.kafka.options import SinkSettings

SERVERS = {"bootstrap.servers": "k1:9092"}
BEARER = {"security.protocol": "SASL_SSL", "sasl.mechanism": "OAUTHBEARER"}
PROVIDED = {PROVIDER: "no_such_module:token"}


@pytest.mark.parametrize(
    ("client", "code", "told"),
    [
        ({"error_cb": "x"}, "TL-C43", "Towline uses it itself"),
        ({"on_delivery": "x"}, "TL-C43", "Towline uses it itself"),
        ({"plugin.library.paths": "x"}, "TL-C43", "Towline uses it itself"),
        ({"oauth_cb": "x"}, "TL-C43", PROVIDER),
        ({"linger.ms": "soon"}, "TL-C45", '"kafka.linger.ms" = soon'),
        ({"acks": "7000"}, "TL-C45", '"kafka.acks" = 7000'),
        ({"enable.idempotence": "true", "max.in.flight": "9"}, "TL-C45", "max.in.flight"),
        ({"sasl.password": "x${NAME}"}, "TL-C44", "${NAME}"),  # it is still plain text
        (BEARER, "TL-C180", "needs exactly one source of tokens"),
        ({"sasl.mechanism": "PLAIN", **PROVIDED}, "TL-C180", "no other mechanism has one"),
        ({**BEARER, **PROVIDED, "sasl.oauthbearer.method": "OIDC"}, "TL-C180", "exactly one"),
        ({**BEARER, PROVIDER: "f"}, "TL-C179", "is not module:function"),
    ],
)
def test_settings_that_are_refused(client: dict[str, str], code: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_client({**SERVERS, **client}, "here")
    assert (caught.value.location, caught.value.code) == ("here", code)
    assert told in str(caught.value)


@pytest.mark.parametrize("name", sorted(SECRETS))
def test_plain_secrets_are_refused_without_being_shown(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"kafka\.{name}\.file, or write \$\{{NAME\}}.*TL-C44") as caught:
        check_client({**SERVERS, name: "hunter2"}, "here")
    assert "hunter2" not in str(caught.value)


def test_secrets_come_from_files_and_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    password = tmp_path / "password"
    password.write_text("p w\n")
    monkeypatch.setenv("KAFKA_USER", "u")
    client = {"sasl.password.file": str(password), "sasl.username": "${KAFKA_USER}", "linger.ms": "5"}
    assert resolve(client, "here") == {"sasl.password": "p w", "sasl.username": "u", "linger.ms": "5"}


def test_a_secret_by_reference_passes_the_check_unread() -> None:
    sasl = {"security.protocol": "SASL_SSL", "sasl.mechanism": "SCRAM-SHA-512", "sasl.username": "u"}
    check_client({**SERVERS, **sasl, "sasl.password": "${NOT_SET_HERE}"}, "here")
    check_client({**SERVERS, **sasl, "sasl.password.file": "/not/on/the/driver"}, "here")
    check_client({**SERVERS, **BEARER, **PROVIDED}, "here")
    check_client({**SERVERS, **BEARER, "enable.sasl.oauthbearer.unsecure.jwt": "true"}, "here")
    with pytest.raises(KafkaError, match=r"can't be imported .*TL-K73"):
        resolve({**BEARER, **PROVIDED}, "here")


def test_a_secret_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    file = rf'/not/here: the file of option "kafka.sasl.password.file" on {socket.gethostname()} can.t be read.*TL-C46'
    with pytest.raises(ConfigError, match=file):
        resolve({"sasl.password.file": "/not/here"}, "here")
    monkeypatch.delenv("KAFKA_PASSWORD", raising=False)
    with pytest.raises(ConfigError, match=r"KAFKA_PASSWORD.*TL-C46"):
        resolve({"sasl.password": "${KAFKA_PASSWORD}"}, "here")


@pytest.mark.parametrize(("content", "problem"), [(b"", "is empty"), (b"\xff", "no text in UTF-8")])
def test_files_that_hold_no_secret(tmp_path: Path, content: bytes, problem: str) -> None:
    path = tmp_path / "password"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"{problem}.*TL-C46") as caught:
        resolve({"sasl.password.file": str(path)}, "here")
    assert caught.value.location == str(path)


TLS = {"security.protocol": "SASL_SSL"}


@pytest.mark.parametrize(
    ("client", "begins"),
    [
        ({}, None),
        ({**TLS, "sasl.mechanism": "PLAIN", "enable.ssl.certificate.verification": "true"}, None),
        ({"enable.ssl.certificate.verification": "false"}, None),  # there is no TLS to weaken
        ({"security.protocol": "sasl_plaintext", "sasl.mechanism": "SCRAM-SHA-512"}, None),
        ({**TLS, "enable.ssl.certificate.verification": " F "}, "enable.ssl.certificate.verification=false: "),
        ({"security.protocol": "ssl", "enable.ssl.certificate.verification": "0"}, "enable.ssl.certificate"),
        ({**TLS, "ssl.endpoint.identification.algorithm": "None"}, "ssl.endpoint.identification.algorithm=none: "),
        ({"security.protocol": "sasl_plaintext", "sasl.mechanisms": "plain"}, "security.protocol=sasl_plaintext: "),
        ({**TLS, "enable.sasl.oauthbearer.unsecure.jwt": "true"}, "enable.sasl.oauthbearer.unsecure.jwt=true: "),
    ],
)
def test_insecure_settings_are_named(client: dict[str, str], begins: str | None) -> None:
    found = insecure_settings({"bootstrap.servers": "k:9092", **client})
    assert len(found) == (begins is not None)
    assert not begins or found[0].startswith(begins)


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        (["t", time.time() + 3600, "me", {"extension": "x"}], True),
        (("t", (time.time() + 3600) * 1000), False),  # milliseconds, as AWS's signer says it
        (("t", time.time() - 1), False),
        (("", time.time() + 3600), False),
        (("t", "soon"), False),
    ],
)
def test_the_return_value_of_a_token_provider(given: object, taken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.unit.kafka.test_clientconfig.RETURNED", given, raising=False)
    client = {**BEARER, PROVIDER: f"{__name__}:returned"}
    if taken:
        assert resolve(client, "here")["oauth_cb"]("")[0] == "t"
    else:
        with pytest.raises(KafkaError, match=r"end in seconds since 1970.*TL-K73"):
            resolve(client, "here")


def test_a_token_provider_that_hangs_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """It held up the main thread of the driver, and so every line."""
    monkeypatch.setattr(clientconfig, "TOKEN_TIMEOUT_S", 0.05)
    with pytest.raises(KafkaError, match=r"gave no token within .*TL-K73"):
        resolve({**BEARER, PROVIDER: f"{__name__}:hanging"}, "here")
    GO_ON.set()


GO_ON = threading.Event()


def hanging(_config: str) -> object:
    return GO_ON.wait(60)


def returned(_config: str) -> object:
    return RETURNED  # type: ignore[name-defined]  # noqa: F821 - set by the test


# -- Java's settings in librdkafka's words --


BASE = {"kafka.bootstrap.servers": "k1:9092", "topic": "t"}
LOGIN = "sasl.jaas.config"
PEM = {"ssl.truststore.type": "PEM"}


def said(settings: dict[str, str]) -> dict[str, str]:
    return translate_java_settings(settings, "here")[0]


@pytest.mark.parametrize(
    ("settings", "made"),
    [
        ({"buffer.memory": "33554432"}, {"queue.buffering.max.kbytes": "32768"}),
        ({"buffer.memory": "1500"}, {"queue.buffering.max.kbytes": "2"}),
        ({"max.request.size": "2097152"}, {"message.max.bytes": "2097152"}),
        ({"max.block.ms": "60000"}, {}),
        ({"send.buffer.bytes": "65536"}, {"socket.send.buffer.bytes": "65536"}),
        ({"ssl.endpoint.identification.algorithm": ""}, {"ssl.endpoint.identification.algorithm": "none"}),
        ({"ssl.endpoint.identification.algorithm": "HTTPS"}, {"ssl.endpoint.identification.algorithm": "https"}),
        ({"ssl.truststore.location": "/ca.pem", **PEM}, {"ssl.ca.location": "/ca.pem"}),
        ({"acks": "all"}, {"acks": "all"}),
        (
            {"compression.zstd.level": "7", "compression.gzip.level": "1", "compression.type": "zstd"},
            {"compression.level": "7", "compression.type": "zstd"},
        ),
    ],
)
def test_values_are_translated(settings: dict[str, str], made: dict[str, str]) -> None:
    assert said(settings) == made


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        *(
            ({LOGIN: login}, "TL-C45")
            for login in (
                "hunter2",
                "a.PlainLoginModule required username=u;",
                'a.PlainLoginModule required username="u" password="hunter2"',
                "a.ScramLoginModule required username=u password=hunter2;",
                r'a.PlainLoginModule required username="u" password="hunter2\t";',
            )
        ),
        ({LOGIN: "a.ScramLoginModule required username=u password=hunter2;", "sasl.mechanism": "PLAIN"}, "TL-C45"),
        ({LOGIN: "a.PlainLoginModule required username=u password=hunter2;", "sasl.username": "v"}, "TL-C43"),
        ({"ssl.truststore.location": "/t.jks"}, "TL-C45"),
        ({"buffer.memory": "32m"}, "TL-C45"),
        ({"buffer.memory": "1024", "queue.buffering.max.kbytes": "7"}, "TL-C43"),
    ],
)
def test_what_can_not_be_translated_is_one_line_without_a_secret(settings: dict[str, str], code: str) -> None:
    with pytest.raises(ConfigError) as caught:
        said(settings)
    assert caught.value.code == code
    assert caught.value.remedy.endswith((".", ";"))
    assert "hunter2" not in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["key.serializer", "partitioner.class", "ssl.keystore.key", "interceptor.classes"])
def test_any_other_gets_one_line(name: str) -> None:
    with pytest.raises(ConfigError, match=rf'"kafka\.{name}".*CONFIGURATION\.md.*TL-C43') as caught:
        SinkSettings.parse({**BASE, f"kafka.{name}": "hunter2"})
    assert "hunter2" not in str(caught.value)
    with pytest.raises(ConfigError, match=rf'option "\[kafka\] {name}" is a Java client\'s.*TL-C43'):
        check_client({"bootstrap.servers": "k1:9092", name: "x"}, "bridge.toml:3", "[kafka] ")


@pytest.mark.parametrize(("name", "value"), [("max.request.size", "2000000000"), ("compression.zstd.level", "19")])
def test_a_value_is_complained_of_by_the_name_the_user_wrote(name: str, value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SinkSettings.parse({**BASE, "kafka.compression.type": "zstd", f"kafka.{name}": value})
    assert f'option "kafka.{name}" = {value}' in caught.value.problem


def test_a_deadline_by_its_java_name() -> None:
    assert SinkSettings.parse({**BASE, "kafka.delivery.timeout.ms": "1500"}).timeout_s == 1.5
    for value, more in (("900001", {}), ("999", {}), ("soon", {}), ("60000", {"deliveryTimeout": "60"})):
        with pytest.raises(ConfigError, match=r"kafka\.delivery\.timeout\.ms"):
            SinkSettings.parse({**BASE, **more, "kafka.delivery.timeout.ms": value})


def test_a_login_in_plain_text_reaches_the_client_and_nobody_else() -> None:
    login = 'a.PlainLoginModule required\n username="$ConnectionString" password="hun\\"ter\\\\2 ${HOME}" ;'
    settings = SinkSettings.parse({**BASE, "kafka.security.protocol": "SASL_SSL", f"kafka.{LOGIN}": login})
    travelled = pickle.loads(pickle.dumps(settings))  # noqa: S301 - our own bytes
    made = resolve(travelled.client, "here")
    assert made["sasl.password"] == 'hun"ter\\2 ${HOME}'
    assert (made["sasl.username"], made["sasl.mechanism"]) == ("$ConnectionString", "PLAIN")
    for text in (repr(settings), str(travelled.client), f"{travelled.client['sasl.password']}"):
        assert "hun" not in text
    (line,) = insecure_settings(travelled.client)
    assert line == "sasl.jaas.config: the secret is in plain text in the options of the query."
    Producer(made, logger=QUIET_LOGGER)


def test_a_login_that_names_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAFKA_PASSWORD", "p")
    made = said({LOGIN: 'a.PlainLoginModule required username="u" password="${KAFKA_PASSWORD}";'})
    assert not isinstance(made["sasl.password"], PlainSecret)
    assert resolve(made, "here")["sasl.password"] == "p"


#: A secret of one line; JAAS has escapes for others, which nobody writes.
LINE = st.text(st.characters(exclude_characters="\n"), min_size=1)


@given(LINE, LINE)
def test_any_login_is_read_as_it_was_written(user: str, password: str) -> None:
    def quoted(text: str) -> str:
        return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'

    text = f"a.b.PlainLoginModule required serviceName=kafka username = {quoted(user)} password={quoted(password)} ;"
    made = said({LOGIN: text})
    secret = made["sasl.password"]
    assert made["sasl.username"] == user
    assert (secret.reveal() if isinstance(secret, PlainSecret) else secret) == password


def outcome(read: Callable[[], object]) -> str:
    try:
        read()
    except ConfigError as error:
        return f"{error.code} {str(error).count(chr(10))}"
    return "taken"


@given(
    st.dictionaries(st.sampled_from(sorted(JAVA_NAMES)), st.text(max_size=12), max_size=4),
    st.text(alphabet="ab\"'\\=; /*.\n", max_size=40),
)
def test_any_value_is_translated_or_gets_one_line(settings: dict[str, str], login: str) -> None:
    assert outcome(lambda: said({LOGIN: f"a.PlainLoginModule required {login};"})) in {"taken", "TL-C45 0"}
    assert outcome(lambda: said(settings)) in {"taken", "TL-C43 0", "TL-C45 0"}
