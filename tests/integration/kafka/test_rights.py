"""A Kafka that asks for rights and takes tokens: a sink names what it refuses, and doctor finds it beforehand."""

from __future__ import annotations

import base64
import itertools
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pytest
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
)

from tests.engines.planting import bridge_case, complaints
from tests.helpers import wait_until
from tests.integration.doctor.test_planted_in_kafka import ALONE, NOT_ASKED, asked_of, put, settles, sound_topics
from tests.integration.kafka.writing import QUERY, delivery, exactly_once
from tests.unit.doctor.recorded import BROKEN, UNKNOWN, WARNS
from towline.doctor.table import Verdict
from towline.errors import KafkaError
from towline.kafka.admin import KafkaAdmin
from towline.sinks import Task
from towline_prove.devstack import Kafka
from towline_prove.devstack.secured import USER, SecuredKafka

pytestmark = pytest.mark.kafka

#: Seconds after which a client wants another token; Kafka ends a connection that often (KIP-368).
LIFE_S = 3
#: Seconds that a token is good for after that: librdkafka looks once a second, and on a busy machine later.
GRACE_S = 5
#: When a token was asked for, and whether the function fails.
asked: list[float] = []
broken = False
_numbers = itertools.count(1)
#: Kind and name of a resource, the operation, and whether the name is a prefix.
Right = tuple[Any, str, Any, Any]


def token(_config: str) -> tuple[str, float]:
    """A token as Kafka's unsecured validator takes it (RFC 7515 with alg none)."""
    if broken:
        raise PermissionError("s3cr3t")
    asked.append(time.time())
    end = time.time() + LIFE_S
    claims = {"sub": USER, "iat": time.time(), "exp": end + GRACE_S}
    parts = [
        base64.urlsafe_b64encode(json.dumps(one).encode()).decode().rstrip("=") for one in ({"alg": "none"}, claims)
    ]
    return f"{'.'.join(parts)}.", end


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory, kafka: Kafka) -> Iterator[SecuredKafka]:
    """With rights for all but the topic ``denied``, and none for groups; `kafka` says whether this machine can."""
    module = "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule"
    settings = {
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": "User:ANONYMOUS",  # on the listener of its own
        "sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-512,OAUTHBEARER",
        "listener.name.sasl_ssl.oauthbearer.sasl.jaas.config": f'{module} required unsecuredLoginStringClaim_sub="x";',
        "listener.name.sasl_ssl.oauthbearer.connections.max.reauth.ms": str(LIFE_S * 1000),
    }
    topic, ids, prefix = ResourceType.TOPIC, ResourceType.TRANSACTIONAL_ID, ResourcePatternType.PREFIXED
    with SecuredKafka(tmp_path_factory.mktemp("guarded"), settings=settings) as started:
        started.create_topics({"healthy": 1, "denied": 1})
        started.create_topics({f"towline.sink.{sink}.markers": 1 for sink in "abcd"}, {"cleanup.policy": "compact"})
        grant(
            started,
            [
                (topic, "healthy", AclOperation.WRITE, prefix),
                (topic, "denied", AclOperation.DESCRIBE, prefix),
                (topic, "towline.sink.", AclOperation.READ, prefix),
                (topic, "towline.sink.", AclOperation.WRITE, prefix),
                (ids, "towline.sink.", AclOperation.WRITE, prefix),
            ],
        )
        wait_until(lambda: set(KafkaAdmin(scram(started)).info().topics) >= {"healthy", "denied"}, 30, "the rights")
        yield started


def grant(broker: SecuredKafka, rights: list[Right]) -> None:
    who, allow = f"User:{USER}", AclPermissionType.ALLOW
    bindings = [AclBinding(kind, name, form, who, "*", right, allow) for kind, name, right, form in rights]
    inside = AdminClient({"bootstrap.servers": broker.internal_bootstrap})
    for future in inside.create_acls(bindings).values():
        future.result(30)


def scram(broker: SecuredKafka) -> dict[str, str]:
    password = {"sasl.password.file": str(broker.password_file)}
    return {"bootstrap.servers": broker.bootstrap, **broker.settings_of(), **password}


def options(client: dict[str, str]) -> dict[str, Any]:
    return {f"kafka__{name.replace('.', '__')}": value for name, value in client.items()}


def rows(*topics: str) -> list[pa.RecordBatch]:
    return [pa.record_batch({"value": pa.array([b"x"] * len(topics)), "topic": pa.array(topics)})]


def test_the_denied_topic_of_a_refused_transaction_is_named(guarded: SecuredKafka) -> None:
    sink = exactly_once(guarded.bootstrap, "value", "topic", sinkId="sink.a", **options(scram(guarded)))
    with pytest.raises(KafkaError, match="TL-K20") as caught:
        sink.deliver(Task(0, batch=0, query=QUERY), rows("healthy", "denied", "healthy"))
    assert caught.value.problem.endswith(' ms) (topic "denied")')
    assert "healthy" not in str(caught.value)


def test_markers_are_read_without_a_right_to_any_group(guarded: SecuredKafka) -> None:
    sink = exactly_once(guarded.bootstrap, "value", "topic", sinkId="sink.b", **options(scram(guarded)))
    tasks = [sink.deliver(Task(0, batch=0, query=QUERY), rows("healthy", "healthy")) for _ in range(2)]
    assert [(one.rows, one.was_skipped) for one in tasks] == [(2, False), (2, True)]


def bearer(broker: SecuredKafka) -> dict[str, str]:
    settings = {name: value for name, value in broker.settings_of().items() if name != "sasl.username"}
    provider = {"sasl.mechanism": "OAUTHBEARER", "sasl.oauthbearer.token.provider": f"{__name__}:token"}
    return {"bootstrap.servers": broker.bootstrap, **settings, **provider}


def test_a_token_provider_without_a_token_is_named_and_called_again(
    guarded: SecuredKafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as planted:
        planted.setattr(f"{__name__}.broken", True)
        with pytest.raises(KafkaError, match="TL-K73") as caught:
            KafkaAdmin(bearer(guarded)).info()
        assert 'test_rights:token" failed (PermissionError, test_rights.py line' in caught.value.problem
        assert "s3cr3t" not in str(caught.value)
    assert "healthy" in KafkaAdmin(bearer(guarded), 20).info().topics


def test_tokens_come_from_the_users_function_as_long_as_a_client_lives(guarded: SecuredKafka) -> None:
    named = {"guarantee": "at_least_once", "topic": "healthy", "deliveryTimeout": "20"}
    sink = delivery(guarded.bootstrap, **named, **options(bearer(guarded)))
    batch = [pa.record_batch({"value": pa.array([b"x"])})]
    assert sink.deliver(Task(0), batch).rows == 1
    once = exactly_once(
        guarded.bootstrap, sinkId="sink.c", topic="healthy", deliveryTimeout="10", **options(bearer(guarded))
    )
    assert once.deliver(Task(0, batch=0, query=QUERY), batch).rows == 1, "producer, admin client and reader of markers"
    until = asked[-1] + LIFE_S + GRACE_S
    wait_until(lambda: time.time() > until, 20, "the end of every client's first token")
    assert sink.deliver(Task(0), batch).rows == 1, "the same producer, with another token"
    assert once.deliver(Task(0, batch=1, query=QUERY), batch).rows == 1, "the same reader of markers"


#: Rights that the lines of a sound bridge need, in Kafka's words.
GRANTED: Final[dict[str, Right]] = {
    "write": (ResourceType.TOPIC, "NAME.records", AclOperation.WRITE, ResourcePatternType.LITERAL),
    "dead letters": (ResourceType.TOPIC, "NAME.dead-letters", AclOperation.WRITE, ResourcePatternType.LITERAL),
    "read": (ResourceType.TOPIC, "NAME.commands", AclOperation.READ, ResourcePatternType.LITERAL),
    "see markers": (ResourceType.TOPIC, "towline.NAME.up.markers", AclOperation.READ, ResourcePatternType.LITERAL),
    "markers": (ResourceType.TOPIC, "towline.NAME.up.markers", AclOperation.WRITE, ResourcePatternType.LITERAL),
    "ids": (ResourceType.TRANSACTIONAL_ID, "towline.NAME.", AclOperation.WRITE, ResourcePatternType.PREFIXED),
    "see ids": (ResourceType.TRANSACTIONAL_ID, "towline.NAME.", AclOperation.DESCRIBE, ResourcePatternType.PREFIXED),
    "settings": (ResourceType.TOPIC, "NAME.", AclOperation.DESCRIBE_CONFIGS, ResourcePatternType.PREFIXED),
    "more settings": (ResourceType.TOPIC, "towline.NAME.", AclOperation.DESCRIBE_CONFIGS, ResourcePatternType.PREFIXED),
    "brokers": (ResourceType.BROKER, "kafka-cluster", AclOperation.DESCRIBE_CONFIGS, ResourcePatternType.LITERAL),
}


def granted(name: str, left_out: str = "") -> list[Right]:
    """To a bridge of that name."""
    rights = [values for right, values in GRANTED.items() if right != left_out]
    return [(kind, text.replace("NAME", name), right, form) for kind, text, right, form in rights]


@pytest.mark.parametrize(
    ("left_out", "expected"),
    [
        ("brokers", {"TL-D39": UNKNOWN}),  # first: what is granted for the whole cluster stays
        ("", {}),
        ("write", {"TL-D39": BROKEN}),
        ("ids", {"TL-D39": WARNS}),
    ],
)
def test_a_missing_acl(guarded: SecuredKafka, tmp_path: Path, left_out: str, expected: dict[str, Verdict]) -> None:
    name = f"b{next(_numbers)}"
    put(guarded.internal_bootstrap, sound_topics(name))
    grant(guarded, granted(name, left_out))
    settles(bridge_case(tmp_path, name, guarded.bootstrap, secured(guarded)), {**ALONE, **expected})


def secured(broker: SecuredKafka, password: Path | None = None) -> Callable[[str], str]:
    lines = ", ".join(f'"{key}" = "{value}"' for key, value in broker.settings_of().items())
    own = f'settings = {{ {lines} }}\npassword_file = "{password or broker.password_file}"\ncreate_topics'
    return lambda text: text.replace("create_topics", own)


def test_a_wrong_password(guarded: SecuredKafka, tmp_path: Path) -> None:
    wrong = tmp_path / "password"
    wrong.write_text("hunter2")
    found = asked_of(replace(bridge_case(tmp_path, "b", guarded.bootstrap, secured(guarded, wrong)), timeout_s=3.0))
    assert complaints(found) == {"TL-D25": BROKEN, **NOT_ASKED}
    assert "authentication failed" in next(one.evidence for one in found if one.code == "TL-D25")
    assert "hunter2" not in str(found)
