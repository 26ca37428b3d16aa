"""Client configuration: names, values, and secrets that never travel."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path

import pytest

from towline.errors import ConfigError, ConfigErrors, KafkaError
from towline.kafka import clientconfig
from towline.kafka.clientconfig import PROVIDER, SECRETS, check_client, insecure_settings, resolve

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
        ({"enable.idempotence": "true", "message.send.max.retries": "0"}, "TL-C45", "retries"),
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


def test_a_secret_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = rf'/not/here: the file of option "kafka.sasl.password.file" on {socket.gethostname()} can.t be read.*TL-C46'
    with pytest.raises(ConfigError, match=file):
        resolve({"sasl.password.file": "/not/here"}, "here")
    (tmp_path / "password").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"no text in UTF-8.*TL-C46"):
        resolve({"sasl.password.file": str(tmp_path / "password")}, "here")
    monkeypatch.delenv("KAFKA_PASSWORD", raising=False)
    with pytest.raises(ConfigError, match=r"KAFKA_PASSWORD.*TL-C46"):
        resolve({"sasl.password": "${KAFKA_PASSWORD}"}, "here")


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


# -- names that librdkafka has not --


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("sasl.jaas.config", "sasl.password.file"),
        ("ssl.truststore.location", "ssl.ca.location"),
        ("buffer.memory", "queue.buffering.max.kbytes"),
        ("compression.zstd.level", "compression.level"),
        ("interceptor.classes", "CONFIGURATION.md"),
        ("ssl.enabled.protocols", "CONFIGURATION.md"),
        ("lingr.ms", "kafka.linger.ms"),
    ],
)
def test_a_setting_of_javas_client_gets_one_line_with_librdkafkas_name(name: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=rf'unknown option "kafka\.{name}".*{remedy}.*TL-C01') as caught:
        check_client({**SERVERS, "acks": "all", name: "hunter2"}, "here")
    assert "hunter2" not in str(caught.value)
    with pytest.raises(ConfigError, match=rf'unknown option "\[kafka\] {name}".*TL-C01'):
        check_client({**SERVERS, name: "x"}, "bridge.toml:3", "[kafka] ")


def test_all_unknown_names_are_reported_together() -> None:
    with pytest.raises(ConfigErrors) as caught:
        check_client({**SERVERS, "max.block.ms": "1", "ssl.truststore.type": "PEM", "acks": "7000"}, "here")
    assert [error.problem for error in caught.value.errors] == [
        'unknown option "kafka.max.block.ms"',
        'unknown option "kafka.ssl.truststore.type"',
    ]
