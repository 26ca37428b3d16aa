"""What librdkafka is told: names it knows, Java's among them, and secrets that are read only where they are used.

A client configuration is a mapping of librdkafka's property names to text. It may travel (into a Spark plan, a log, a
status), so it never holds a secret [I12]: ``sasl.password.file`` names a file, ``${NAME}`` a variable of the
environment, `PROVIDER` a function that gives tokens, and `resolve` replaces all in the process that opens the
connection. A `PlainSecret`, which a user wrote in the words of Java's client into the options of a query, travels with
them and is shown nowhere.

A program that wrote with ``format("kafka")`` changes the format's name and nothing else (ADR 39): the settings of
Java's producer (Kafka 4.3) that its users write and librdkafka has not are `translated` (ADR 58).
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import time
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TypeVar

from confluent_kafka import KafkaException, Producer

from towline.errors import ConfigError, KafkaError, did_you_mean
from towline.kafka import faults
from towline.providers import check_provider, credential, secret_of
from towline.threads import later

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

T = TypeVar("T")

#: Properties whose value is a secret: plain text is refused, since it would stand in Spark's plans.
SECRETS: Final = frozenset(
    {
        "sasl.password",
        "sasl.oauthbearer.client.credentials.client.secret",
        "sasl.oauthbearer.client.secret",
        "sasl.oauthbearer.assertion.private.key.passphrase",
        "sasl.oauthbearer.assertion.private.key.pem",
        "ssl.key.password",
        "ssl.key.pem",
        "ssl.keystore.password",
    }
)

#: Names a function that gives tokens for OAUTHBEARER, ``module:function``; it is no property of librdkafka's.
PROVIDER: Final = "sasl.oauthbearer.token.provider"

#: What Java's producer has and librdkafka has not; `translated` knows some of it.
JAVAS: Final = re.compile(
    r"buffer\.memory|compression\.\w+\.level|config\.providers|interceptor\.classes|(key|value)\.serializer"
    r"|max\.(block\.ms|request\.size)|metrics?\.(reporters|num|recording|sample).*|partitioner\..+"
    r"|(receive|send)\.buffer\.bytes|sasl\.(jaas|login|client\.callback)\..+|ssl\.(truststore|engine|provider).*"
    r"|ssl\.(enabled\.protocols|protocol|keystore\.(type|key|certificate\.chain)|(key|trust)manager\.algorithm)"
)

#: Ours alone: callbacks of the binding, and a library path, which would run code somebody put into an option.
_OURS: Final = re.compile(r"\w+_cb|on_delivery|delivery\.report\.only\.error|logger|plugin\.library\.paths")

#: Names to guess from when somebody mistypes one; librdkafka itself judges what exists.
COMMON: Final = (
    "acks",
    "batch.num.messages",
    "batch.size",
    "bootstrap.servers",
    "broker.address.family",
    "client.id",
    "compression.level",
    "compression.type",
    "connections.max.idle.ms",
    "enable.idempotence",
    "enable.ssl.certificate.verification",
    "linger.ms",
    "max.in.flight.requests.per.connection",
    "message.max.bytes",
    "metadata.max.age.ms",
    "partitioner",
    "queue.buffering.max.kbytes",
    "queue.buffering.max.messages",
    "reconnect.backoff.max.ms",
    "reconnect.backoff.ms",
    "request.timeout.ms",
    "retries",
    "retry.backoff.ms",
    "sasl.mechanism",
    PROVIDER,
    "sasl.password.file",
    "sasl.username",
    "security.protocol",
    "socket.keepalive.enable",
    "socket.timeout.ms",
    "ssl.ca.location",
    "ssl.certificate.location",
    "ssl.endpoint.identification.algorithm",
    "ssl.key.location",
    "ssl.key.password.file",
)


class PlainSecret(str):
    """A secret of ``sasl.jaas.config``, which travels with the sink's settings: it prints as ``<secret>``."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "<secret>"

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    def reveal(self) -> str:
        """The secret, for the client that opens a connection; the result must never be shown."""
        return "".join([*self])


#: A variable of the environment, whose value is taken where the connection is opened.
REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
#: A password in a URL, as ``https://user:password@host``.
_LOGIN_IN_URL: Final = re.compile(r"://[^/?#@\s]*:[^/?#@\s]+@")
_LISTED: Final = "https://github.com/confluentinc/librdkafka/blob/master/CONFIGURATION.md"


#: Pass as ``logger`` to every client: ``log_level=0`` alone still prints fatal lines (reference: librdkafka 2.16). What
#: is logged is kept off stderr, and seen by whoever adds a handler.
QUIET: Final = logging.getLogger("towline.librdkafka")
QUIET.addHandler(logging.NullHandler())
QUIET.propagate = False


def file_property(name: str) -> str | None:
    """The secret that ``name`` reads from a file: ``sasl.password`` for ``sasl.password.file``; None for others."""
    secret = name.removesuffix(".file")
    return secret if secret != name and secret in SECRETS else None


def largest_message(client: Mapping[str, str]) -> int:
    """The ``message.max.bytes`` of a client configuration, librdkafka's default where it says none."""
    return int(client.get("message.max.bytes", 1_000_000))


def insecurities(client: Mapping[str, str]) -> list[str]:
    """What a client configuration gives up on the way to Kafka, a line for each setting; usually none.

    It is allowed, and shown as ``insecure`` wherever the sink or the bridge tells how it is.
    """
    said = {name: value.strip().lower() for name, value in client.items()}
    protocol, mechanism = said.get("security.protocol", "plaintext"), _mechanism(said)
    found = []
    if protocol in {"ssl", "sasl_ssl"}:
        if said.get("enable.ssl.certificate.verification") in _FALSE:
            found.append(f"enable.ssl.certificate.verification=false: Kafka's certificate is not verified; {_ANYONE}")
        elif said.get("ssl.endpoint.identification.algorithm") == "none":
            found.append(f"ssl.endpoint.identification.algorithm=none: any trusted name passes for Kafka's; {_ANYONE}")
    if protocol == "sasl_plaintext" and mechanism in {"PLAIN", "OAUTHBEARER"}:
        found.append(f"security.protocol=sasl_plaintext: the secret of {mechanism} crosses the network in clear text.")
    if said.get("enable.sasl.oauthbearer.unsecure.jwt") in _TRUE:
        found.append("enable.sasl.oauthbearer.unsecure.jwt=true: the token is not signed; anyone can make one.")
    if any(isinstance(value, PlainSecret) for value in client.values()):
        found.append("sasl.jaas.config: the secret stands in plain text in the options of the query.")
    return found


_ANYONE: Final = "anyone in between can read and change."
#: librdkafka's words for a flag (rd_kafka_anyconf_set_prop).
_FALSE: Final = frozenset({"false", "f", "0"})
_TRUE: Final = frozenset({"true", "t", "1"})


def _mechanism(said: Mapping[str, str]) -> str:
    return (said.get("sasl.mechanism") or said.get("sasl.mechanisms") or "").upper()


def check_client(
    client: Mapping[str, str], where: str, prefix: str = "kafka.", written: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Check names and values of a client configuration, without a connection and without reading a secret.

    Args:
        client: librdkafka's names with text values; unresolved.
        where: Whom an error is about.
        prefix: What stands before a name where the user wrote it.
        written: The names that the user wrote in other words.

    Raises:
        ConfigError: TL-C01 unknown name, TL-C43 a name of Java's client or one that is ours, TL-C44 a plain secret,
            TL-C45 a value that librdkafka does not take, TL-C42 no or impossible ``bootstrap.servers``, TL-C179 and
            TL-C180 a provider of tokens that is none, or none where one is needed.
    """
    for name, value in client.items():
        option = f'option "{prefix}{name}"'
        if JAVAS.fullmatch(name):
            what = f"{option} is a Java client's setting that Towline does not translate"
            raise ConfigError("TL-C43", where, what, f"Write librdkafka's name, see {_LISTED}; or leave it out.")
        if _OURS.fullmatch(name):
            do = f"Name the function in {prefix}{PROVIDER}." if name == "oauth_cb" else "Leave it out."
            raise ConfigError("TL-C43", where, f"{option} can not be set, Towline uses it itself", do)
        plain = not REFERENCE.fullmatch(value) if name in SECRETS else _LOGIN_IN_URL.search(REFERENCE.sub("", value))
        if plain and not isinstance(value, PlainSecret):
            do = f"Name a file that holds it in {prefix}{name}.file, or write ${{NAME}} for an environment variable."
            what = f"{option} holds a secret in plain text, which Spark would show in its plans"
            raise ConfigError("TL-C44", where, what, do)
    servers, option = client.get("bootstrap.servers", ""), f'option "{prefix}bootstrap.servers"'
    for server in map(str.strip, servers.split(",")):
        host, _, port = server.rpartition("://")[2].rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) <= 65535:
            what = f'"{server}" in {option} is not HOST:PORT' if servers.strip() else f"{option} is missing"
            raise ConfigError("TL-C42", where, what, "Name one or more HOST:PORT, with commas between.")
    if _without_tokens(client):
        provider = f"{prefix}{PROVIDER} = module:function, [kafka] token_provider in a bridge file"
        what = "OAUTHBEARER needs exactly one source of tokens, and no other mechanism has one"
        do = f"Give {prefix}sasl.oauthbearer.method=oidc and its endpoint, or (AWS MSK IAM, Azure) {provider}."
        raise ConfigError("TL-C180", where, f'"{prefix}sasl.mechanism": {what}', do)
    _check_words(client, where, prefix, written)
    if PROVIDER in client:
        check_provider(client[PROVIDER], where)


def _without_tokens(client: Mapping[str, str]) -> bool:
    """Whether OAUTHBEARER has not one source of tokens: librdkafka starts without, and waits for one for ever."""
    said = {name: value.strip().lower() for name, value in client.items()}
    others = said.get("sasl.oauthbearer.method") == "oidc", said.get("enable.sasl.oauthbearer.unsecure.jwt") in _TRUE
    return (PROVIDER in client) + sum(others) != 1 if _mechanism(said) == "OAUTHBEARER" else PROVIDER in client


def _check_words(client: Mapping[str, str], where: str, prefix: str, written: Mapping[str, str]) -> None:
    """Let librdkafka judge names and values: a producer without servers opens no connection and costs 1 ms.

    Files and keys may exist on executors only, so TLS material is first loaded where it is used.
    """
    offered = {}
    for name, value in client.items():
        secret = file_property(name) or (name if name in SECRETS else None)
        of_tls = name.startswith("ssl.") or (name.endswith(".pem") and not secret)
        if not of_tls and name not in {"bootstrap.servers", PROVIDER}:
            offered[secret or name] = "-" if secret or REFERENCE.search(value) else value
    what = _complaint(offered)
    if not what:
        return
    # Alone, the culprit makes the same complaint, and is named as the user wrote it.
    culprit = next((name for name, value in offered.items() if _complaint({name: value}) == what), "")
    if what.startswith("no such configuration property"):
        hint = did_you_mean(culprit, COMMON, f"See {_LISTED}.")
        hint = hint.replace('n "', f'n "{prefix}')
        raise ConfigError("TL-C01", where, f'unknown option "{prefix}{culprit}"', hint)
    option = f'option "{prefix}{written.get(culprit, culprit)}" = {offered.get(culprit)}'
    subject = option if culprit else "these options together"
    raise ConfigError("TL-C45", where, f"Kafka's client does not take {subject}: {what}", "Change the value.")


def _complaint(offered: Mapping[str, str]) -> str:
    try:
        Producer(dict(offered), logger=QUIET)
    except KafkaException as problem:
        return faults.reason(problem)
    return ""


def resolve(client: Mapping[str, str], where: str = "kafka") -> dict[str, Any]:
    """Replace ``${NAME}``, ``*.file`` and `PROVIDER` by what they stand for; the result must never be shown.

    Raises:
        ConfigError: TL-C46 for a variable that is not set, or a file that can't be read or is empty.
        KafkaError: TL-K73, the provider gives no token; another try may get one.
    """
    resolved: dict[str, Any] = {}
    for name, value in client.items():
        if name == PROVIDER:
            resolved["oauth_cb"] = _tokens(value, where, client.get("sasl.oauthbearer.config", ""))
        elif isinstance(value, PlainSecret):  # as it is: a dollar sign may be a part of it
            resolved[name] = value.reveal()
        else:
            text = REFERENCE.sub(partial(_variable, name, where), value)
            if (secret := file_property(name)) is not None:
                key = f'the file of option "kafka.{name}" on {socket.gethostname()}'
                text = secret_of(key, text, bytes.decode, "TL-C46", _MEND)
            resolved[secret or name] = text
    return resolved


def _variable(name: str, where: str, reference: re.Match[str]) -> str:
    value = os.environ.get(reference[1])
    if value is None:
        what = f'option "kafka.{name}" refers to the environment variable {reference[1]}, which is not set on '
        do = "Set it for Spark's workers (on a cluster: spark.executorEnv), or use a file."
        raise ConfigError("TL-C46", where, f"{what}{socket.gethostname()}", do)
    return value


def connect(kind: Callable[..., T], client: Mapping[str, str], more: Mapping[str, Any], where: str = "kafka") -> T:
    """A client of librdkafka's: its class, its configuration, unresolved, and what it is told beside that.

    Raises:
        ConfigError, KafkaError: As `resolve`; TL-C45, it can't be made of this here, mostly for TLS files.
    """
    try:
        return kind({**resolve(client, where), **more}, logger=QUIET)
    except faults.FOREIGN as problem:
        what = f"Kafka's client can not be set up: {faults.reason(problem)}"
        raise ConfigError("TL-C45", where, what, "Correct the options.") from None


@contextlib.contextmanager
def lent(
    clients: dict[Any, Any], key: object, make: Callable[[], Any], healthy: Callable[[Any], bool] = lambda _: True
) -> Iterator[Any]:
    """A client that belongs to the process, made when there is none to lend.

    One that is not healthy at the end, or whose block ends in an error, a KeyboardInterrupt and a stopped query too, is
    closed: what it has left must not meet the next task. The process id keeps a forked child off its parent's sockets.
    """
    place, keep = (os.getpid(), key), False
    client = clients.pop(place) if place in clients else make()
    try:
        yield client
        keep = healthy(client)
    finally:
        if keep:
            clients[place] = client
        else:
            with contextlib.suppress(KafkaException, SystemError, RuntimeError):  # it failed already
                client.close()


#: Seconds that a provider of tokens has; other lines may wait as long.
TOKEN_S: Final = 15.0
#: As confluent-kafka's ``oauth_cb`` returns it; extensions are KIP-342's.
_FORM: Final = "(token, end in seconds since 1970), and perhaps principal and extensions, the end to come"
#: The end of a token in milliseconds, as AWS's signer says it, would never come: that is the year 5138.
_NOT_SECONDS: Final = 1e11


def _tokens(provider: str, where: str, config: str) -> Callable[[str], tuple[Any, ...]]:
    """The ``oauth_cb`` of a client: a token asked for now, so that what is wrong is told, and anew at each request."""
    who = f"{where} token provider"

    def ask(config: str) -> tuple[Any, ...]:
        try:
            return later(partial(credential, provider, who, _token, _FORM, config), "token-provider").result(TOKEN_S)
        except TimeoutError:
            what = f'"{provider}" gave no token within {TOKEN_S:g} s'
            raise ConfigError("TL-C179", who, what, "Call it by hand, as the same user.") from None

    try:
        asked = [ask(config)]
    except ConfigError as error:
        raise KafkaError("TL-K73", error.where, error.what, error.do) from None
    return lambda config: asked.pop() if asked else ask(config)


def _token(given: Any) -> tuple[Any, ...]:
    token, end, *more = given
    if not isinstance(token, str) or not token or not time.time() < end < _NOT_SECONDS:
        raise ValueError
    return (token, float(end), *more)


#: A secret does not travel with a plan: each machine that connects has its own file.
_MEND: Final = "Mend the file there; on a cluster each executor's machine needs it."


# -- Java's words --

#: Java's name -> librdkafka's. Without one there is nothing to tell: `deliveryTimeout` bounds every wait, the type of a
#: trust store is checked, and a login becomes three settings.
JAVA_NAMES: Final[Mapping[str, str | None]] = {
    "buffer.memory": "queue.buffering.max.kbytes",
    "compression.gzip.level": "compression.level",
    "compression.lz4.level": "compression.level",
    "compression.zstd.level": "compression.level",
    "delivery.timeout.ms": "message.timeout.ms",
    "max.block.ms": None,
    "max.request.size": "message.max.bytes",
    "receive.buffer.bytes": "socket.receive.buffer.bytes",
    "sasl.jaas.config": None,
    "send.buffer.bytes": "socket.send.buffer.bytes",
    "ssl.endpoint.identification.algorithm": "ssl.endpoint.identification.algorithm",
    "ssl.truststore.certificates": "ssl.ca.pem",
    "ssl.truststore.location": "ssl.ca.location",
    "ssl.truststore.type": None,
}
#: A login as Kafka's JaasConfig reads it, of one of the two modules whose mechanisms librdkafka has.
_VALUE: Final = r"""(?: "(?:[^"\\\n]|\\["'\\])*" | '(?:[^'\\\n]|\\["'\\])*' | [\w.$-]+ )"""
_LOGIN: Final = re.compile(
    rf"[\w.$]*? (?P<module>Plain|Scram)LoginModule \s+ \w+ (?: \s+ (?: username \s*=\s* (?P<user>{_VALUE}) "
    rf"| password \s*=\s* (?P<password>{_VALUE}) | [\w.-]+ \s*=\s* {_VALUE} ) )*+ \s* ;",
    re.VERBOSE,
)
_MECHANISMS: Final = {"Plain": ("PLAIN",), "Scram": ("SCRAM-SHA-256", "SCRAM-SHA-512")}


def translated(settings: Mapping[str, str], where: str) -> tuple[dict[str, str], dict[str, str]]:
    """Translate what only Java's client has, by names in lower case without ``kafka.``; all else passes as it is.

    Returns:
        What librdkafka is told, a secret in plain text as a `PlainSecret`; and, of what was translated, librdkafka's
        name -> the name as the user wrote it.

    Raises:
        ConfigError: TL-C43 a setting that is said in both clients' words; TL-C45 a value that can't be translated.
    """
    client: dict[str, str] = {}
    written: dict[str, str] = {}
    for name, value in settings.items():
        if name not in JAVA_NAMES:
            client[name] = value
            continue
        try:
            own = _translated(name, value.strip(), settings)
        except ValueError as problem:
            what, _, do = str(problem).partition("; ")
            raise ConfigError("TL-C45", where, f'option "kafka.{name}" {what}', do) from None
        if twice := next((target for target in own if target != name and target in settings), None):
            what = f'options "kafka.{name}" and "kafka.{twice}" say the same thing'
            raise ConfigError("TL-C43", where, what, "Give one of the two.")
        client |= own
        written |= dict.fromkeys(own, name)
    return client, written


def _translated(name: str, value: str, settings: Mapping[str, str]) -> dict[str, str]:
    """Librdkafka's settings for one of Java's; a ValueError says what is wrong and, behind "; ", what to do."""
    match name.split("."):
        case ["sasl", *_]:
            return _login(value, settings)
        case ["compression", codec, _] if settings.get("compression.type", "").strip().lower() != codec:
            return {}  # the level of a codec that is not used
        case ["ssl", "truststore", "location" | "type"]:
            kind = value if name.endswith("type") else settings.get("ssl.truststore.type", "JKS").strip()
            if kind.upper() != "PEM":  # all that librdkafka reads; Java's default is JKS
                raise ValueError(
                    "is about a store that is not PEM; Write its certificates into a PEM file (keytool -list -rfc "
                    "-keystore FILE) and give kafka.ssl.truststore.type=PEM with that file."
                )
        case ["buffer", _]:
            if not re.fullmatch(r"[0-9]{1,18}", value):
                raise ValueError("must be a whole number of bytes; Change the value.")
            value = str(max(1, -(-int(value) // 1024)))
        case ["delivery", *_]:
            if not re.fullmatch(r"[0-9]{4,6}", value) or not 1000 <= int(value) <= 900_000:
                raise ValueError(
                    "must be 1000 to 900000 milliseconds; Change it: Kafka ends a transaction after 15 minutes at most."
                )
        case ["ssl", "endpoint", *_]:
            value = value.lower() or "none"
    target = JAVA_NAMES[name]
    return {} if target is None else {target: value}


def _login(value: str, settings: Mapping[str, str]) -> dict[str, str]:
    """``sasl.jaas.config`` of PLAIN and SCRAM; the text of its errors quotes nothing of it [I12]."""
    login = _LOGIN.fullmatch(value)
    if login is None or not login["user"] or not login["password"]:
        raise ValueError(
            'can not be read; Write CLASS required username="..." password="..."; with the PlainLoginModule or the '
            "ScramLoginModule. For another mechanism give librdkafka's kafka.sasl.* settings."
        )
    mechanisms = _MECHANISMS[login["module"]]
    mechanism = settings.get("sasl.mechanism", mechanisms[0] if len(mechanisms) == 1 else "").strip().upper()
    if mechanism not in mechanisms:
        raise ValueError(f"is for {mechanisms[0]}; Give kafka.sasl.mechanism={' or '.join(mechanisms)}.")
    user, password = (_unquoted(login[name]) for name in ("user", "password"))
    secret = password if REFERENCE.fullmatch(password) else PlainSecret(password)
    chosen = {} if "sasl.mechanism" in settings else {"sasl.mechanism": mechanism}
    return {"sasl.username": user, "sasl.password": secret, **chosen}


def _unquoted(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text[1:-1]) if text[0] in "\"'" else text
