"""Settings of Java's Kafka producer, as users of Spark's own Kafka sink write them, in librdkafka's names and values.

A program that wrote with ``format("kafka")`` changes the format's name and nothing else: each of its ``kafka.*``
options is one of both clients, or is translated here, or changes nothing here and is told so once, or gets one line
that says what to do (ADR 39). Names and defaults are those of Kafka 4.3's ProducerConfig; units and ranges on the
other side those of librdkafka's CONFIGURATION.md.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, TypeAlias

from towline.errors import ConfigError
from towline.kafka import jaas
from towline.kafka.clientconfig import REFERENCE
from towline.kafka.plainsecret import PlainSecret

__all__ = ["IDLE", "REFUSED", "RULES", "Translation", "translated"]


@dataclass(frozen=True)
class Translation:
    """What becomes of a user's settings.

    Attributes:
        client: In librdkafka's names and values; a secret in plain text is a `PlainSecret`.
        written: librdkafka's name → the name as the user wrote it, where the two differ.
        idle: A line for each setting that is taken and changes nothing.
    """

    client: Mapping[str, str]
    written: Mapping[str, str]
    idle: tuple[str, ...] = ()


class _NoTranslationError(ValueError):
    """A setting, or a value of it, that this client can't follow; its text is what to do."""


Said: TypeAlias = Mapping[str, str]
Rule: TypeAlias = Callable[[str, Said], Mapping[str, str]]
"""Makes librdkafka's settings of a value, with a look at what else is said.

Its ValueError says what is wrong with the value, and after "; " what to do.
"""


def translated(settings: Mapping[str, str], where: str, prefix: str = "kafka.") -> Translation:
    """Translate what only Java's client has; everything else passes as it is.

    Args:
        settings: Names in lower case, without the prefix.
        where: Whom an error is about.
        prefix: What stands before a name where the user wrote it.

    Raises:
        ConfigError: TL-C43 a setting without a translation, or one that is said in both clients' words; TL-C45 a value
            that Java's client would not take either.
    """
    client: dict[str, str] = {}
    written: dict[str, str] = {}
    idle = []
    for name, value in settings.items():
        if name in IDLE:
            idle.append(f"{prefix}{name} changes nothing here: {IDLE[name]}")
            continue
        rule = _refusal(REFUSED[name]) if name in REFUSED else RULES.get(name)
        made = {name: value} if rule is None else _applied(rule, name, value, settings, where, prefix)
        for target, meant in made.items():
            if target in written or (target != name and target in settings and target not in RULES):
                other = written.get(target, target)
                what = f'options "{prefix}{name}" and "{prefix}{other}" say the same thing'
                raise ConfigError("TL-C43", where, what, "Give one of the two.")
            client[target] = meant
            if rule is not None:
                written[target] = name
    return Translation(client, {target: name for target, name in written.items() if target != name}, tuple(idle))


def _applied(rule: Rule, name: str, value: str, settings: Said, where: str, prefix: str) -> Mapping[str, str]:
    try:
        return rule(value.strip(), settings)
    except _NoTranslationError as problem:
        what = f'option "{prefix}{name}" is a setting of the Java client only'
        raise ConfigError("TL-C43", where, what, _respelt(str(problem), prefix)) from None
    except ValueError as problem:
        what, _, do = str(problem).partition("; ")
        do = _respelt(do, prefix) or "Change the value."
        raise ConfigError("TL-C45", where, f'option "{prefix}{name}" {what}', do) from None


def _respelt(advice: str, prefix: str) -> str:
    return advice.replace("kafka.", prefix)


# -- values ----------------------------------------------------------------------------------------------------------


def _whole(value: str, least: int = 0) -> int:
    if not re.fullmatch(r"-?[0-9]{1,19}", value) or int(value) < least:
        raise ValueError(f"must be a whole number, at least {least}")
    return int(value)


def _flag(value: str) -> bool:
    if value.lower() not in ("true", "false"):
        raise ValueError("must be true or false")
    return value.lower() == "true"


def _secret(value: str, option: str) -> str:
    """A reference to the environment as it is, and anything else as a secret in plain text."""
    return value if REFERENCE.fullmatch(value) else PlainSecret(value, option)


def _refusal(advice: str) -> Rule:
    def refuse(value: str, _: Said) -> Mapping[str, str]:
        if value in ("", "false"):  # Java's defaults: nothing is asked for
            return {}
        raise _NoTranslationError(advice)

    return refuse


# -- rules: what is sent, and when -----------------------------------------------------------------------------------


def _buffer_memory(value: str, _: Said) -> Mapping[str, str]:
    """Bytes become KiB; at least one, librdkafka's least."""
    return {"queue.buffering.max.kbytes": str(max(1, -(-_whole(value) // 1024)))}


def _request_size(value: str, _: Said) -> Mapping[str, str]:
    """The largest record; librdkafka's limits are 1,000 and 1,000,000,000."""
    return {"message.max.bytes": str(max(1_000, _whole(value)))}


def _batch_size(value: str, _: Said) -> Mapping[str, str]:
    """Java's 0 means one record a batch."""
    size = _whole(value)
    return {"batch.size": str(size)} if size else {"batch.num.messages": "1"}


def _idle_connections(value: str, _: Said) -> Mapping[str, str]:
    """Java's -1, never closed, is librdkafka's 0."""
    return {"connections.max.idle.ms": str(max(0, _whole(value, -1)))}


def _buffer(target: str) -> Rule:
    """Java's -1, what the system takes, is librdkafka's 0."""
    return lambda value, _: {target: str(max(0, _whole(value, -1)))}


def _level(codec: str) -> Rule:
    """The level of one codec; it means nothing where another one is used."""

    def rule(value: str, said: Said) -> Mapping[str, str]:
        level = _whole(value, -(1 << 17))
        if said.get("compression.type", "none").strip().lower() != codec:
            return {}
        if level > 12:
            raise ValueError(f"must be at most 12, the highest level that librdkafka takes, not {level}")
        return {"compression.level": str(max(-1, level))}

    return rule


#: By the name of the class: what places records without a key, and with one, where this class would.
_PARTITIONERS: Final = MappingProxyType(
    {
        "DefaultPartitioner": "murmur2_random",
        "UniformStickyPartitioner": "random",
        "RoundRobinPartitioner": "random",
    }
)


def _partitioner_class(value: str, _: Said) -> Mapping[str, str]:
    package, _dot, name = value.rpartition(".")
    if name in _PARTITIONERS and "apache.kafka.clients.producer" in package:
        return {"partitioner": _PARTITIONERS[name]}
    if not value:
        return {}
    raise _NoTranslationError("Leave it out and give a column partition: there is no Java class to call.")


def _ignore_keys(value: str, _: Said) -> Mapping[str, str]:
    return {"partitioner": "random"} if _flag(value) else {}


def _dns_lookup(value: str, _: Said) -> Mapping[str, str]:
    """``default`` was Java's word until Kafka 4 for what is the default of both."""
    return {"client.dns.lookup": "use_all_dns_ips" if value.lower() == "default" else value}


# -- rules: TLS ------------------------------------------------------------------------------------------------------

_PEM_TRUST: Final = (
    "Write its certificates into a PEM file (keytool -list -rfc -keystore FILE) and give kafka.ssl.truststore.type=PEM "
    "with that file."
)
_PKCS12_KEY: Final = (
    "Turn it into PKCS12 (keytool -importkeystore -srckeystore FILE -destkeystore FILE.p12 -deststoretype PKCS12) and "
    "give kafka.ssl.keystore.type=PKCS12 with that file."
)


def _type(said: Said, store: str) -> str:
    return said.get(f"ssl.{store}.type", "").strip().upper()


def _trust(value: str, said: Said) -> Mapping[str, str]:
    """PEM is what librdkafka reads; Java's default type is JKS."""
    if _type(said, "truststore") != "PEM":
        raise _NoTranslationError(_PEM_TRUST)
    return {"ssl.ca.location": value}


def _trust_password(_: str, said: Said) -> Mapping[str, str]:
    if _type(said, "truststore") != "PEM":
        raise _NoTranslationError(_PEM_TRUST)
    raise ValueError("belongs to no PEM file, in Java neither; Leave it out.")


def _trust_type(value: str, _: Said) -> Mapping[str, str]:
    if value.upper() != "PEM":
        raise _NoTranslationError(_PEM_TRUST)
    return {}


def _key_store(value: str, said: Said) -> Mapping[str, str]:
    """PKCS12 as it is, which is what Java makes of a store without a type since Java 9; PEM is chain and key in one."""
    kind = _type(said, "keystore")
    if kind == "PEM":
        return {"ssl.certificate.location": value, "ssl.key.location": value}
    if kind == "JKS":
        raise _NoTranslationError(_PKCS12_KEY)
    return {"ssl.keystore.location": value}


def _key_type(value: str, _: Said) -> Mapping[str, str]:
    if value.upper() not in ("PKCS12", "PEM"):
        raise _NoTranslationError(_PKCS12_KEY)
    return {}


def _key_password(value: str, said: Said) -> Mapping[str, str]:
    """Of a PKCS12 file librdkafka asks for one password, that of the store."""
    pkcs12 = "ssl.keystore.location" in said and _type(said, "keystore") != "PEM"
    if pkcs12 and said.get("ssl.keystore.password", "").strip() == value:
        return {}
    return {"ssl.key.password": _secret(value, "ssl.key.password")}


def _host_name(value: str, _: Said) -> Mapping[str, str]:
    """Java's empty text, no check, is librdkafka's none."""
    return {"ssl.endpoint.identification.algorithm": value.lower() or "none"}


#: What librdkafka speaks: it has no setting for it.
_VERSIONS: Final = frozenset({"TLSv1.2", "TLSv1.3"})


def _versions(value: str, _: Said) -> Mapping[str, str]:
    asked = {one.strip() for one in value.split(",") if one.strip()}
    if "TLSv1.2" in asked or asked == {"TLS"} or not asked:
        return {}
    only = "TLS 1.3 alone can be had by the broker's ssl.enabled.protocols." if asked <= _VERSIONS else ""
    raise _NoTranslationError(f"Leave it out: TLS 1.2 and 1.3 are used. {only}".strip())


def _protocol(value: str, _: Said) -> Mapping[str, str]:
    """In Java it bounds the versions from above; the enabled protocols say which are used."""
    return _versions("TLSv1.2" if value in _VERSIONS else value, {})


def _ciphers(value: str, _: Said) -> Mapping[str, str]:
    if "_WITH_" in value:  # RFC 5246's names, which OpenSSL does not read
        raise _NoTranslationError("Give OpenSSL's names with colons between (openssl ciphers -v -stdname lists both).")
    return {"ssl.cipher.suites": value.replace(",", ":")}


# -- rules: SASL -----------------------------------------------------------------------------------------------------

_JAAS: Final = "sasl.jaas.config"
_KERBEROS: Final = (
    "Use another kafka.sasl.mechanism: librdkafka comes without Kerberos. PLAIN, SCRAM and OAUTHBEARER are there."
)


def _jaas(value: str, said: Said) -> Mapping[str, str]:
    try:
        login = jaas.parse(value)
    except ValueError as problem:
        do = 'Write CLASS required username="..." password="...";'
        raise ValueError(f"{problem}; {do}") from None
    rule = _LOGINS.get(login.module)
    if rule is None:
        raise _NoTranslationError(_KERBEROS if login.module.startswith("Krb5") else _NO_CLASS)
    return rule(login.options, said.get("sasl.mechanism", "").strip().upper())


def _user(options: Said) -> Mapping[str, str]:
    for name in ("username", "password"):
        if not options.get(name):
            raise ValueError(f'has no {name}; Write CLASS required username="..." password="...";')
    return {"sasl.username": options["username"], "sasl.password": _secret(options["password"], _JAAS)}


def _plain(options: Said, mechanism: str) -> Mapping[str, str]:
    if mechanism not in ("", "PLAIN"):
        raise ValueError(f"is for PLAIN, and kafka.sasl.mechanism is {mechanism}; Change one of the two.")
    return {**_user(options), **({} if mechanism else {"sasl.mechanism": "PLAIN"})}


def _scram(options: Said, mechanism: str) -> Mapping[str, str]:
    if not mechanism.startswith("SCRAM-"):
        raise ValueError("is for SCRAM; Give kafka.sasl.mechanism=SCRAM-SHA-256 or SCRAM-SHA-512.")
    if options.get("tokenauth", "").lower() == "true":
        raise _NoTranslationError("Use a user's password: librdkafka has no delegation tokens.")
    return _user(options)


def _bearer(options: Said, mechanism: str) -> Mapping[str, str]:
    """Client credentials (KIP-768); librdkafka calls the flow oidc."""
    if mechanism not in ("", "OAUTHBEARER"):
        raise ValueError(f"is for OAUTHBEARER, and kafka.sasl.mechanism is {mechanism}; Change one of the two.")
    names = {"clientId": "client.id", "clientSecret": "client.secret", "scope": "scope"}
    if not {"clientId", "clientSecret"} <= set(options):
        raise _NoTranslationError("Give clientId and clientSecret: librdkafka takes client credentials.")
    made = {f"sasl.oauthbearer.{name}": options[key] for key, name in names.items() if key in options}
    made["sasl.oauthbearer.client.secret"] = _secret(options["clientSecret"], _JAAS)
    return {**made, "sasl.oauthbearer.method": "oidc", **({} if mechanism else {"sasl.mechanism": "OAUTHBEARER"})}


_LOGINS: Final = MappingProxyType(
    {"PlainLoginModule": _plain, "ScramLoginModule": _scram, "OAuthBearerLoginModule": _bearer}
)


def _login_handler(value: str, _: Said) -> Mapping[str, str]:
    """Kafka's own handler of client credentials does what librdkafka's method oidc does."""
    if not value or value.endswith(".OAuthBearerLoginCallbackHandler"):
        return {}
    raise _NoTranslationError(_NO_CLASS)


_NO_CLASS: Final = "Leave it out: there is no Java class to call."
_SERIALIZER: Final = "Leave it out: the columns key and value are written as they are."

RULES: Final[Mapping[str, Rule]] = MappingProxyType(
    {
        "batch.size": _batch_size,
        "buffer.memory": _buffer_memory,
        "client.dns.lookup": _dns_lookup,
        "compression.gzip.level": _level("gzip"),
        "compression.lz4.level": _level("lz4"),
        "compression.zstd.level": _level("zstd"),
        "connections.max.idle.ms": _idle_connections,
        "max.request.size": _request_size,
        "partitioner.class": _partitioner_class,
        "partitioner.ignore.keys": _ignore_keys,
        "receive.buffer.bytes": _buffer("socket.receive.buffer.bytes"),
        _JAAS: _jaas,
        "sasl.login.callback.handler.class": _login_handler,
        "sasl.oauthbearer.assertion.template.file": lambda value, _: {
            "sasl.oauthbearer.assertion.jwt.template.file": value
        },
        "send.buffer.bytes": _buffer("socket.send.buffer.bytes"),
        "ssl.cipher.suites": _ciphers,
        "ssl.enabled.protocols": _versions,
        "ssl.endpoint.identification.algorithm": _host_name,
        "ssl.key.password": _key_password,
        "ssl.keystore.certificate.chain": lambda value, _: {"ssl.certificate.pem": value},
        "ssl.keystore.key": lambda value, _: {"ssl.key.pem": _secret(value, "ssl.keystore.key")},
        "ssl.keystore.location": _key_store,
        "ssl.keystore.password": lambda value, _: {"ssl.keystore.password": _secret(value, "ssl.keystore.password")},
        "ssl.keystore.type": _key_type,
        "ssl.protocol": _protocol,
        "ssl.truststore.certificates": lambda value, _: {"ssl.ca.pem": value},
        "ssl.truststore.location": _trust,
        "ssl.truststore.password": _trust_password,
        "ssl.truststore.type": _trust_type,
    }
)
"""Settings with a translation."""

REFUSED: Final = MappingProxyType(
    {
        **dict.fromkeys(
            (
                "interceptor.classes",
                "metric.reporters",
                "sasl.client.callback.handler.class",
                "sasl.login.class",
                "sasl.oauthbearer.jwt.retriever.class",
                "sasl.oauthbearer.jwt.validator.class",
                "security.providers",
                "ssl.engine.factory.class",
                "ssl.provider",
            ),
            _NO_CLASS,
        ),
        **dict.fromkeys(("key.serializer", "value.serializer"), _SERIALIZER),
        **dict.fromkeys(
            (
                "sasl.kerberos.kinit.cmd",
                "sasl.kerberos.min.time.before.relogin",
                "sasl.kerberos.service.name",
                "sasl.kerberos.ticket.renew.jitter",
                "sasl.kerberos.ticket.renew.window.factor",
            ),
            _KERBEROS,
        ),
        "config.providers": "Write ${NAME} for an environment variable, or name a secret's file in kafka.NAME.file.",
        "sasl.oauthbearer.header.urlencode": "Leave it out: librdkafka does not encode client id and secret.",
        "transaction.two.phase.commit.enable": "Leave it out: the marker does what a second phase would (KIP-939).",
    }
)
"""Settings without one, and what to do; Java's default for a switch or a list of classes asks for nothing."""

_BROKERS: Final = "a broker looks at it, not a producer."
_RENEWAL: Final = "librdkafka renews a token by itself."
_OPENSSL: Final = "OpenSSL has an implementation of its own."
_METRICS: Final = "it is about metrics of the Java client."
_KEYLESS: Final = "a record without a key goes to a partition at random."

IDLE: Final = MappingProxyType(
    {
        **dict.fromkeys(("metrics.num.samples", "metrics.recording.level", "metrics.sample.window.ms"), _METRICS),
        **dict.fromkeys(("auto.include.jmx.reporter",), _METRICS),
        **dict.fromkeys(("partitioner.adaptive.partitioning.enable", "partitioner.availability.timeout.ms"), _KEYLESS),
        **dict.fromkeys(
            (
                "sasl.login.connect.timeout.ms",
                "sasl.login.read.timeout.ms",
                "sasl.login.refresh.buffer.seconds",
                "sasl.login.refresh.min.period.seconds",
                "sasl.login.refresh.window.factor",
                "sasl.login.refresh.window.jitter",
                "sasl.login.retry.backoff.max.ms",
                "sasl.login.retry.backoff.ms",
            ),
            _RENEWAL,
        ),
        **dict.fromkeys(
            (
                "sasl.oauthbearer.clock.skew.seconds",
                "sasl.oauthbearer.expected.audience",
                "sasl.oauthbearer.expected.issuer",
                "sasl.oauthbearer.jwks.endpoint.refresh.ms",
                "sasl.oauthbearer.jwks.endpoint.retry.backoff.max.ms",
                "sasl.oauthbearer.jwks.endpoint.retry.backoff.ms",
                "sasl.oauthbearer.jwks.endpoint.url",
                "sasl.oauthbearer.scope.claim.name",
                "sasl.oauthbearer.sub.claim.name",
            ),
            _BROKERS,
        ),
        **dict.fromkeys(
            ("ssl.keymanager.algorithm", "ssl.secure.random.implementation", "ssl.trustmanager.algorithm"), _OPENSSL
        ),
        "max.block.ms": "deliveryTimeout bounds every wait.",
        "metadata.max.idle.ms": "librdkafka forgets a topic by metadata.max.age.ms.",
        "socket.connection.setup.timeout.max.ms": "socket.connection.setup.timeout.ms bounds each attempt.",
    }
)
"""Settings that are taken and change nothing, and why."""
