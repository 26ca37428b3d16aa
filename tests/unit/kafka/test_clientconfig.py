"""Client configuration: names, values, and secrets that never travel."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path

import pytest

from towline.errors import ConfigError, KafkaError
from towline.kafka import clientconfig
from towline.kafka.clientconfig import (
    COMMON_PROPERTIES,
    PROVIDER,
    SECRETS,
    check_client,
    insecure_settings,
    resolve,
    secret_of_file_property,
)

SERVERS = {"bootstrap.servers": "k1:9092"}


def refusal(client: dict[str, str]) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        check_client({**SERVERS, **client}, "here")
    assert caught.value.location == "here"
    return caught.value


@pytest.mark.parametrize(
    "name",
    [
        *("dr_cb", "error_cb", "log_cb", "oauth_cb", "partitioner_cb", "stats_cb", "throttle_cb"),
        *("delivery.report.only.error", "logger", "on_delivery", "plugin.library.paths"),
    ],
)
def test_reserved_properties_can_not_be_set(name: str) -> None:
    assert refusal({name: "x"}).code == "TL-C43"


@pytest.mark.parametrize("name", sorted(SECRETS))
def test_plain_secrets_are_refused_without_being_shown(name: str) -> None:
    error = refusal({name: "hunter2"})
    assert error.code == "TL-C44"
    assert "hunter2" not in str(error)
    assert f"kafka.{name}.file" in error.remedy
    assert "${NAME}" in error.remedy


@pytest.mark.parametrize(
    ("name", "value"), [("linger.ms", "soon"), ("compression.type", "rar"), ("partitioner", "mine"), ("acks", "7000")]
)
def test_values_are_validated_by_librdkafka(name: str, value: str) -> None:
    error = refusal({name: value})
    assert error.code == "TL-C45"
    assert f'"kafka.{name}" = {value}' in error.problem


def test_settings_that_only_clash_together() -> None:
    error = refusal({"enable.idempotence": "true", "max.in.flight": "9"})
    assert error.code == "TL-C45"
    assert "max.in.flight" in error.problem


def test_common_names_exist() -> None:
    """A guess must not lead to the next mistake."""
    values = {
        "acks": "all",
        "broker.address.family": "v4",
        "compression.level": "3",
        "compression.type": "lz4",
        "partitioner": "murmur2",
        "security.protocol": "plaintext",
        "sasl.mechanism": "PLAIN",
        "client.id": "x",
    }
    for name in COMMON_PROPERTIES:
        boolean = name.startswith("enable.") or name.endswith(".enable")
        value = values.get(name, "true" if boolean else "2000")
        if not name.startswith(("ssl.", "sasl.")) and name != "bootstrap.servers":
            check_client({**SERVERS, name: value}, "here")


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
    check_client({**SERVERS, **sasl, "ssl.key.password.file": "/not/here", "sasl.password": "${P}"}, "here")


def test_a_half_reference_is_still_plain_text() -> None:
    assert refusal({"sasl.password": "x${NAME}"}).code == "TL-C44"


@pytest.mark.parametrize(
    ("content", "why"), [(None, r"can't be read \(no such file"), (b"", "is empty"), (b"\xff", "no text in UTF-8")]
)
def test_files_that_hold_no_secret(tmp_path: Path, content: bytes | None, why: str) -> None:
    path = tmp_path / "password"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=why) as caught:
        resolve({"sasl.password.file": str(path)}, "here")
    assert caught.value.code == "TL-C46"
    assert caught.value.location == str(path)
    assert f'the file of option "kafka.sasl.password.file" on {socket.gethostname()}' in caught.value.problem


def test_a_variable_that_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KAFKA_PASSWORD", raising=False)
    with pytest.raises(ConfigError, match="KAFKA_PASSWORD") as caught:
        resolve({"sasl.password": "${KAFKA_PASSWORD}"}, "here")
    assert caught.value.code == "TL-C46"


def test_only_secrets_are_read_from_files() -> None:
    assert secret_of_file_property("sasl.password.file") == "sasl.password"
    assert secret_of_file_property("sasl.password") is None
    assert secret_of_file_property("linger.ms.file") is None


TLS = {"security.protocol": "SASL_SSL"}


@pytest.mark.parametrize(
    ("client", "begins"),
    [
        ({}, None),
        ({**TLS, "sasl.mechanism": "PLAIN", "enable.ssl.certificate.verification": "true"}, None),
        ({"enable.ssl.certificate.verification": "false"}, None),  # there is no TLS to weaken
        ({"security.protocol": "sasl_plaintext", "sasl.mechanism": "SCRAM-SHA-512"}, None),
        ({**TLS, "enable.ssl.certificate.verification": "false"}, "enable.ssl.certificate.verification=false: "),
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


BEARER = {"security.protocol": "SASL_SSL", "sasl.mechanism": "OAUTHBEARER"}
PROVIDED = {"sasl.oauthbearer.token.provider": "no_such_module:token"}


@pytest.mark.parametrize(
    ("client", "code"),
    [
        (BEARER, "TL-C180"),
        ({"sasl.mechanism": "PLAIN", **PROVIDED}, "TL-C180"),
        ({**BEARER, **PROVIDED, "sasl.oauthbearer.method": "OIDC"}, "TL-C180"),
        ({**BEARER, "sasl.oauthbearer.token.provider": "f"}, "TL-C179"),
    ],
)
def test_oauthbearer_has_one_source_of_tokens(client: dict[str, str], code: str) -> None:
    assert refusal(client).code == code


def test_a_source_of_tokens_is_not_asked_before_a_connection() -> None:
    check_client({**SERVERS, **BEARER, **PROVIDED}, "here")
    check_client({**SERVERS, **BEARER, "enable.sasl.oauthbearer.unsecure.jwt": "true"}, "here")
    with pytest.raises(KafkaError, match=r"can't be imported .*TL-K73"):
        resolve({**BEARER, **PROVIDED}, "here")
    assert PROVIDER in refusal({"oauth_cb": "x"}).remedy


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        (("t", time.time() + 3600), True),
        (["t", time.time() + 3600, "me", {"extension": "x"}], True),
        (("t", (time.time() + 3600) * 1000), False),  # milliseconds, as AWS's signer says it
        (("t", time.time() - 1), False),
        (("", time.time() + 3600), False),
        ("t", False),
        (("t", "soon"), False),
        (None, False),
    ],
)
def test_the_return_value_of_a_token_provider(given: object, taken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.unit.kafka.test_clientconfig.RETURNED", given, raising=False)
    client = {**BEARER, "sasl.oauthbearer.token.provider": f"{__name__}:returned"}
    if taken:
        assert resolve(client, "here")["oauth_cb"]("")[0] == "t"
    else:
        with pytest.raises(KafkaError, match=r"end in seconds since 1970.*TL-K73"):
            resolve(client, "here")


def test_a_token_provider_that_hangs_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """It held up the main thread of the driver, and so every line."""
    monkeypatch.setattr(clientconfig, "TOKEN_TIMEOUT_S", 0.05)
    with pytest.raises(KafkaError, match=r"gave no token within .*TL-K73"):
        resolve({**BEARER, "sasl.oauthbearer.token.provider": f"{__name__}:hanging"}, "here")
    GO_ON.set()


GO_ON = threading.Event()


def hanging(_config: str) -> object:
    return GO_ON.wait(60)


def returned(_config: str) -> object:
    return RETURNED  # type: ignore[name-defined]  # noqa: F821 - set by the test
