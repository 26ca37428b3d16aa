"""Settings of Java's Kafka producer, as users of Spark's own Kafka sink write them, in librdkafka's names and values.

A program that wrote with ``format("kafka")`` changes the format's name and nothing else (ADR 39): what both clients
call alike passes as it is, the names that users of that sink also write are translated here (ADR 58), and any other
setting of Java's is refused by `check_client` in one line. Names and defaults are those of Kafka 4.3's ProducerConfig.
"""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from towline.errors import ConfigError
from towline.kafka.clientconfig import REFERENCE, PlainSecret

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Java's name -> librdkafka's. Without one there is nothing to tell: `deliveryTimeout` bounds every wait, the type of a
#: trust store is checked, and a login becomes three settings.
NAMES: Final[Mapping[str, str | None]] = MappingProxyType(
    {
        "buffer.memory": "queue.buffering.max.kbytes",
        "compression.gzip.level": "compression.level",
        "compression.lz4.level": "compression.level",
        "compression.zstd.level": "compression.level",
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
)
#: A login as Kafka's JaasConfig reads it, of one of the two modules whose mechanisms librdkafka has.
_VALUE: Final = r"""(?: "(?:[^"\\\n]|\\["'\\])*" | '(?:[^'\\\n]|\\["'\\])*' | [\w.$-]+ )"""
_LOGIN: Final = re.compile(
    rf"[\w.$]*? (?P<module>Plain|Scram)LoginModule \s+ \w+ (?: \s+ (?: username \s*=\s* (?P<user>{_VALUE}) "
    rf"| password \s*=\s* (?P<password>{_VALUE}) | [\w.-]+ \s*=\s* {_VALUE} ) )*+ \s* ;",
    re.VERBOSE,
)
_MECHANISMS: Final = MappingProxyType({"Plain": ("PLAIN",), "Scram": ("SCRAM-SHA-256", "SCRAM-SHA-512")})


def translated(settings: Mapping[str, str], where: str) -> tuple[dict[str, str], dict[str, str]]:
    """Translate what only Java's client has; everything else passes as it is.

    Args:
        settings: Names in lower case, without ``kafka.``.
        where: Whom an error is about.

    Returns:
        What librdkafka is told, a secret in plain text as a `PlainSecret`; and, of what was translated, librdkafka's
        name -> the name as the user wrote it.

    Raises:
        ConfigError: TL-C43 a setting that is said in both clients' words; TL-C45 a value that can't be translated.
    """
    client: dict[str, str] = {}
    written: dict[str, str] = {}
    for name, value in settings.items():
        if name not in NAMES:
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
        case ["ssl", "endpoint", *_]:
            value = value.lower() or "none"
    target = NAMES[name]
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
