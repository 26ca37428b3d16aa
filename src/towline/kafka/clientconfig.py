"""Client configurations of librdkafka: checks, and secrets from files and variables.

A client configuration is a mapping of librdkafka's property names to text. It may travel (into a Spark plan, a log, a
status), so it never holds a secret [I12]: ``sasl.password.file`` names a file, ``${NAME}`` an environment variable,
`PROVIDER` a function that returns tokens. `resolve` replaces all of them in the process that opens the connection.

Of a setting that only Java's client has the error says what librdkafka calls it (foreign.toml, ADR 58).
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from confluent_kafka import KafkaException, Producer

from towline.errors import ConfigError, ConfigErrors, KafkaError, did_you_mean
from towline.kafka import faults
from towline.providers import call_provider, check_provider, read_secret
from towline.threads import call_in_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

T = TypeVar("T")

#: Properties whose value is a secret: plain text is refused, since Spark's plans would show it.
SECRETS: Final = frozenset(
    {
        *("sasl.password", "sasl.oauthbearer.client.credentials.client.secret", "sasl.oauthbearer.client.secret"),
        *("sasl.oauthbearer.assertion.private.key.passphrase", "sasl.oauthbearer.assertion.private.key.pem"),
        *("ssl.key.password", "ssl.key.pem", "ssl.keystore.password"),
    }
)

#: Names a function that returns tokens for OAUTHBEARER, ``module:function``; no property of librdkafka.
PROVIDER: Final = "sasl.oauthbearer.token.provider"

#: Reserved: callbacks of the binding, and a library path, which would run code named in an option.
_RESERVED: Final = re.compile(r"\w+_cb|on_delivery|delivery\.report\.only\.error|logger|plugin\.library\.paths")

_COMMON_NAMES: Final = f"""
    acks batch.num.messages batch.size bootstrap.servers client.id compression.level compression.type
    enable.ssl.certificate.verification linger.ms max.in.flight message.max.bytes partitioner queue.buffering.max.kbytes
    queue.buffering.max.messages retries sasl.mechanism {PROVIDER} sasl.password.file sasl.username security.protocol
    socket.timeout.ms ssl.ca.location ssl.certificate.location ssl.endpoint.identification.algorithm ssl.key.location
    ssl.key.password.file
"""
#: Names to suggest for a mistyped one; librdkafka itself validates names.
COMMON_PROPERTIES: Final = tuple(_COMMON_NAMES.split())

#: An environment variable, whose value is read where the connection is opened.
ENV_REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
#: A password in a URL, as ``https://user:password@host``.
_LOGIN_IN_URL: Final = re.compile(r"://[^/?#@\s]*:[^/?#@\s]+@")
_UNKNOWN_HINT: Final = (
    "Write librdkafka's name, see https://github.com/confluentinc/librdkafka/blob/master/CONFIGURATION.md, or leave it "
    "out."
)


#: Pass as ``logger`` to every client: ``log_level=0`` alone still prints fatal lines (reference: librdkafka 2.16). The
#: log is kept off stderr; add a handler to see it.
QUIET_LOGGER: Final = logging.getLogger("towline.librdkafka")
QUIET_LOGGER.addHandler(logging.NullHandler())
QUIET_LOGGER.propagate = False


def secret_of_file_property(name: str) -> str | None:
    """Return the secret property of a ``*.file`` property: ``sasl.password`` for ``sasl.password.file``; else None."""
    secret = name.removesuffix(".file")
    return secret if secret != name and secret in SECRETS else None


def max_message_bytes(client: Mapping[str, str]) -> int:
    """Return ``message.max.bytes`` of a client configuration; librdkafka's default where it is not set."""
    return int(client.get("message.max.bytes", 1_000_000))


def insecure_settings(client: Mapping[str, str]) -> list[str]:
    """List the insecure settings of a client configuration, one line each; usually none.

    Insecure settings are allowed, and shown as ``insecure`` in the status of the sink and the bridge.
    """
    settings = {name: value.strip().lower() for name, value in client.items()}
    protocol, mechanism = settings.get("security.protocol", "plaintext"), _mechanism(settings)
    warnings = []
    if protocol in {"ssl", "sasl_ssl"}:
        if settings.get("enable.ssl.certificate.verification") in _FALSE:
            warnings.append(f"enable.ssl.certificate.verification=false: Kafka's certificate is not verified; {_RISK}")
        elif settings.get("ssl.endpoint.identification.algorithm") == "none":
            warnings.append(f"ssl.endpoint.identification.algorithm=none: any trusted name passes for Kafka's; {_RISK}")
    if protocol == "sasl_plaintext" and mechanism in {"PLAIN", "OAUTHBEARER"}:
        warnings.append(f"security.protocol=sasl_plaintext: {mechanism} sends the secret in clear text.")
    if settings.get("enable.sasl.oauthbearer.unsecure.jwt") in _TRUE:
        warnings.append("enable.sasl.oauthbearer.unsecure.jwt=true: the token is not signed; anyone can make one.")
    return warnings


_RISK: Final = "anyone in between can read and change."
#: librdkafka's values of a boolean (rd_kafka_anyconf_set_prop).
_FALSE: Final = frozenset({"false", "f", "0"})
_TRUE: Final = frozenset({"true", "t", "1"})


def _mechanism(settings: Mapping[str, str]) -> str:
    return (settings.get("sasl.mechanism") or settings.get("sasl.mechanisms") or "").upper()


def check_client(client: Mapping[str, str], location: str, prefix: str = "kafka.") -> None:
    """Check property names and values of a client configuration, without connecting and without reading a secret.

    Args:
        client: librdkafka's names with text values; unresolved.
        location: The option or file that an error names.
        prefix: Prefix of the names as the user wrote them.

    Raises:
        ConfigError: TL-C01 unknown name, TL-C43 a reserved one, TL-C44 a secret in plain text, TL-C45 a value that
            librdkafka rejects, TL-C42 missing or malformed ``bootstrap.servers``, TL-C179 and TL-C180 an invalid token
            provider, or a missing one.
    """
    for name, value in client.items():
        option = f'option "{prefix}{name}"'
        if _RESERVED.fullmatch(name):
            remedy = f"Name the function in {prefix}{PROVIDER}." if name == "oauth_cb" else "Leave it out."
            raise ConfigError("TL-C43", location, f"{option} can not be set, Towline uses it itself", remedy)
        login = _LOGIN_IN_URL.search(ENV_REFERENCE.sub("", value))
        if not ENV_REFERENCE.fullmatch(value) if name in SECRETS else login:
            remedy = f"Name its file in {prefix}{name}.file, or write ${{NAME}} for an environment variable."
            problem = f"{option} holds a secret in plain text, which Spark would show in its plans"
            raise ConfigError("TL-C44", location, problem, remedy)
    servers, option = client.get("bootstrap.servers", ""), f'option "{prefix}bootstrap.servers"'
    for server in map(str.strip, servers.split(",")):
        host, _, port = server.rpartition("://")[2].rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) <= 65535:
            problem = f'"{server}" in {option} is not HOST:PORT' if servers.strip() else f"{option} is missing"
            raise ConfigError("TL-C42", location, problem, "Name one or more HOST:PORT, with commas between.")
    if _lacks_token_source(client):
        provider = f"{prefix}{PROVIDER} = module:function, [kafka] token_provider in a bridge file"
        problem = "OAUTHBEARER needs exactly one source of tokens, and no other mechanism has one"
        remedy = f"Give {prefix}sasl.oauthbearer.method=oidc and its endpoint, or (AWS MSK IAM, Azure) {provider}."
        raise ConfigError("TL-C180", location, f'"{prefix}sasl.mechanism": {problem}', remedy)
    _check_values(client, location, prefix)
    if PROVIDER in client:
        check_provider(client[PROVIDER], location)


def _lacks_token_source(client: Mapping[str, str]) -> bool:
    """Return whether OAUTHBEARER lacks its source of tokens, or has two; librdkafka then waits for ever."""
    settings = {name: value.strip().lower() for name, value in client.items()}
    unsigned = settings.get("enable.sasl.oauthbearer.unsecure.jwt") in _TRUE
    sources = (settings.get("sasl.oauthbearer.method") == "oidc") + unsigned
    return (PROVIDER in client) + sources != 1 if _mechanism(settings) == "OAUTHBEARER" else PROVIDER in client


def _check_values(client: Mapping[str, str], location: str, prefix: str) -> None:
    """Validate names and values with librdkafka: a producer without servers opens no connection and costs 1 ms."""
    config, unknown_names = dict[str, str](), list[str]()
    for name, value in client.items():
        secret = secret_of_file_property(name) or (name if name in SECRETS else None)
        if name not in {"bootstrap.servers", PROVIDER} and _is_unknown(secret or name):
            unknown_names.append(name)
        # Files and keys may exist on executors only, so TLS material is first loaded where it is used.
        is_tls_material = name.startswith("ssl.") or (name.endswith(".pem") and not secret)
        if not is_tls_material and name not in {"bootstrap.servers", PROVIDER}:
            config[secret or name] = "-" if secret or ENV_REFERENCE.search(value) else value
    errors = []
    for name in unknown_names:
        hint = did_you_mean(name, COMMON_PROPERTIES, _UNKNOWN_HINT).replace('n "', f'n "{prefix}')
        errors.append(ConfigError("TL-C01", location, f'unknown option "{prefix}{name}"', hint))
    ConfigErrors.raise_any(errors)
    if error_text := _librdkafka_error(config):
        # Alone, the bad setting causes the same error.
        bad_name = next((name for name, value in config.items() if _librdkafka_error({name: value}) == error_text), "")
        subject = f'option "{prefix}{bad_name}" = {config[bad_name]}' if bad_name else "these options together"
        raise ConfigError("TL-C45", location, f"Kafka's client rejects {subject}: {error_text}", "Change the value.")


def _is_unknown(name: str) -> bool:
    """Return whether librdkafka has no such property; the second one, which it has not, keeps it from going on."""
    error_text = _librdkafka_error({name: "-", "-": "-"})
    return error_text.startswith(("java ", f'no such configuration property: "{name}"'))


def _librdkafka_error(config: Mapping[str, str]) -> str:
    try:
        Producer(dict(config), logger=QUIET_LOGGER)
    except KafkaException as error:
        return faults.error_text(error)
    return ""


def resolve(client: Mapping[str, str], location: str = "kafka") -> dict[str, Any]:
    """Replace ``${NAME}``, ``*.file`` and `PROVIDER` by their values; the result must never be shown.

    Raises:
        ConfigError: TL-C46 for an environment variable that is not set, or a file that is empty or can't be read.
        KafkaError: TL-K73, the token provider returned no token; a retry may get one.
    """
    config: dict[str, Any] = {}
    for name, value in client.items():
        if name == PROVIDER:
            config["oauth_cb"] = _token_callback(value, location, client.get("sasl.oauthbearer.config", ""))
        else:
            text = ENV_REFERENCE.sub(partial(_environment_value, name, location), value)
            if (secret := secret_of_file_property(name)) is not None:
                key = f'the file of option "kafka.{name}" on {socket.gethostname()}'
                text = read_secret(key, text, bytes.decode, "TL-C46", _FILE_REMEDY)
            config[secret or name] = text
    return config


def _environment_value(name: str, location: str, reference: re.Match[str]) -> str:
    value = os.environ.get(reference[1])
    if value is None:
        problem = f'option "kafka.{name}" refers to the environment variable {reference[1]}, which is not set on '
        remedy = "Set it for Spark's workers (on a cluster: spark.executorEnv), or use a file."
        raise ConfigError("TL-C46", location, f"{problem}{socket.gethostname()}", remedy)
    return value


def connect(
    client_class: Callable[..., T], client: Mapping[str, str], extra: Mapping[str, Any], location: str = "kafka"
) -> T:
    """Create a client of librdkafka by its class and unresolved configuration; `extra` settings override that.

    Raises:
        ConfigError, KafkaError: As `resolve`; TL-C45, librdkafka rejects the configuration, mostly because of TLS
        files.
    """
    try:
        return client_class({**resolve(client, location), **extra}, logger=QUIET_LOGGER)
    except faults.CLIENT_ERRORS as error:
        problem = f"Kafka's client can not be set up: {faults.error_text(error)}"
        raise ConfigError("TL-C45", location, problem, "Correct the options.") from None


@contextlib.contextmanager
def pooled_client(
    pool: dict[Any, Any], key: object, create: Callable[[], Any], is_healthy: Callable[[Any], bool] = lambda _: True
) -> Iterator[Any]:
    """Lend a client from the pool of this process; creates it if there is none.

    The client is closed, not returned to the pool, when it is not healthy at the end or the block raises, also
    KeyboardInterrupt and for a stopped query: its pending records must not meet the next task. The key has the process
    id, so that a forked child does not use its parent's sockets.
    """
    pool_key, is_reusable = (os.getpid(), key), False
    client = pool.pop(pool_key) if pool_key in pool else create()
    try:
        yield client
        is_reusable = is_healthy(client)
    finally:
        if is_reusable:
            pool[pool_key] = client
        else:
            with contextlib.suppress(KafkaException, SystemError, RuntimeError):  # it failed already
                client.close()


TOKEN_TIMEOUT_S: Final = 15.0  #: Seconds that a token provider may take; other lines may wait as long.
#: As confluent-kafka's ``oauth_cb`` returns it; extensions are KIP-342's.
_REPLY_FORMAT: Final = "(token, end in seconds since 1970), and perhaps principal and extensions, the end to come"
_MAX_EXPIRY_S: Final = 1e11  #: An expiry in milliseconds, as AWS's signer returns it, would be after the year 5138.


def _token_callback(provider: str, location: str, config: str) -> Callable[[str], tuple[Any, ...]]:
    """Return the ``oauth_cb`` of a client; requests the first token now, so that errors show early."""
    provider_location = f"{location} token provider"

    def request_token(config: str) -> tuple[Any, ...]:
        try:
            return call_in_thread(
                partial(call_provider, provider, provider_location, _validated_token, _REPLY_FORMAT, config),
                "token-provider",
            ).result(TOKEN_TIMEOUT_S)
        except TimeoutError:
            problem = f'"{provider}" gave no token within {TOKEN_TIMEOUT_S:g} s'
            raise ConfigError("TL-C179", provider_location, problem, "Call it by hand, as the same user.") from None

    try:
        unused_tokens = [request_token(config)]
    except ConfigError as error:
        raise KafkaError("TL-K73", error.location, error.problem, error.remedy) from None
    return lambda config: unused_tokens.pop() if unused_tokens else request_token(config)


def _validated_token(reply: Any) -> tuple[Any, ...]:
    token, expires_at, *extras = reply
    if not isinstance(token, str) or not token or not time.time() < expires_at < _MAX_EXPIRY_S:
        raise ValueError
    return (token, float(expires_at), *extras)


#: A secret does not travel with a plan: each machine that connects has its own file.
_FILE_REMEDY: Final = "Fix the file there; on a cluster each executor's machine needs it."
