"""Settings of Java's Kafka producer, as users of Spark's own Kafka sink write them, in librdkafka's names and values.

A program that wrote with ``format("kafka")`` changes the format's name and nothing else (ADR 39): what both clients
call alike passes as it is, what users of that sink also write is translated here, and any other setting of Java's is
refused by `check_client` in one line. Names and defaults are those of Kafka 4.3's ProducerConfig.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, TypeAlias

from towline.errors import ConfigError
from towline.kafka.clientconfig import REFERENCE, PlainSecret

Said: TypeAlias = Mapping[str, str]
Rule: TypeAlias = Callable[[str, Said], Mapping[str, str]]
"""Makes librdkafka's settings of a value, with a look at what else is said.

Its ValueError says what is wrong with the value, and after "; " what to do.
"""


def translated(settings: Said, where: str) -> tuple[dict[str, str], dict[str, str]]:
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
        rule = RULES.get(name)
        try:
            made = {name: value} if rule is None else rule(value.strip(), settings)
        except ValueError as problem:
            what, _, do = str(problem).partition("; ")
            raise ConfigError("TL-C45", where, f'option "kafka.{name}" {what}', do) from None
        for target in made:
            if target != name and target in settings:
                what = f'options "kafka.{name}" and "kafka.{target}" say the same thing'
                raise ConfigError("TL-C43", where, what, "Give one of the two.")
            if rule is not None:
                written[target] = name
        client |= made
    return client, written


def _called(target: str) -> Rule:
    return lambda value, _: {target: value}


def _buffer_memory(value: str, _: Said) -> Mapping[str, str]:
    """Bytes become KiB; at least one, librdkafka's least."""
    if not re.fullmatch(r"[0-9]{1,18}", value):
        raise ValueError("must be a whole number of bytes; Change the value.")
    return {"queue.buffering.max.kbytes": str(max(1, -(-int(value) // 1024)))}


def _level(codec: str) -> Rule:
    """The level of one codec; it means nothing where another one is used."""

    def rule(value: str, said: Said) -> Mapping[str, str]:
        return {"compression.level": value} if said.get("compression.type", "").strip().lower() == codec else {}

    return rule


def _host_name(value: str, _: Said) -> Mapping[str, str]:
    """Java's empty text, no check, is librdkafka's none."""
    return {"ssl.endpoint.identification.algorithm": value.lower() or "none"}


def _trust(value: str, said: Said) -> Mapping[str, str]:
    """PEM is what librdkafka reads; Java's default type is JKS."""
    _trust_type(said.get("ssl.truststore.type", "JKS").strip(), said)
    return {"ssl.ca.location": value}


def _trust_type(value: str, _: Said) -> Mapping[str, str]:
    if value.upper() != "PEM":
        raise ValueError(
            "is about a store that is not PEM; Write its certificates into a PEM file (keytool -list -rfc -keystore "
            "FILE) and give kafka.ssl.truststore.type=PEM with that file."
        )
    return {}


#: As Kafka's JaasConfig reads it: one login module, a flag, and options whose values are words or quoted.
_VALUE: Final = r""" (?: "(?:[^"\\\n]|\\.)*" | '(?:[^'\\\n]|\\.)*' | [\w.$-]+ ) """
_ENTRY: Final = re.compile(
    rf"(?P<module>[\w.$]+) \s+ (?:required|requisite|sufficient|optional) "
    rf"(?P<options> (?: \s+ [\w.-]+ \s* = \s* {_VALUE} )* ) \s* ;",
    re.VERBOSE | re.IGNORECASE,
)
_OPTION: Final = re.compile(rf"([\w.-]+) \s* = \s* ({_VALUE})", re.VERBOSE)
_ESCAPE: Final = re.compile(r"\\([0-3]?[0-7]{1,2}|.)")
_ESCAPES: Final = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}
_FORM: Final = 'Write CLASS required username="..." password="...";'
#: The login modules that are translated, and the mechanisms that each is for.
_LOGINS: Final = MappingProxyType(
    {"PlainLoginModule": ("PLAIN",), "ScramLoginModule": ("SCRAM-SHA-256", "SCRAM-SHA-512")}
)


def _login(value: str, said: Said) -> Mapping[str, str]:
    """``sasl.jaas.config`` for PLAIN and SCRAM; the text of its errors quotes nothing of it [I12]."""
    entry = _ENTRY.fullmatch(value)
    if entry is None:
        raise ValueError(f"can not be read; {_FORM}")
    mechanisms = _LOGINS.get(entry["module"].rpartition(".")[2])
    if mechanisms is None:
        do = "PLAIN and SCRAM are; for others give librdkafka's kafka.sasl.* settings."
        raise ValueError(f"has a login module that Towline does not translate; {do}")
    mechanism = said.get("sasl.mechanism", mechanisms[0] if len(mechanisms) == 1 else "").strip().upper()
    if mechanism not in mechanisms:
        raise ValueError(f"is for {mechanisms[0]}; Give kafka.sasl.mechanism={' or '.join(mechanisms)}.")
    options = {name: _unquoted(text) for name, text in _OPTION.findall(entry["options"])}
    user, password = options.get("username"), options.get("password")
    if not user or not password:
        raise ValueError(f"has no {'password' if user else 'username'}; {_FORM}")
    secret = password if REFERENCE.fullmatch(password) else PlainSecret(password)
    return {"sasl.username": user, "sasl.password": secret, **({} if "sasl.mechanism" in said else _PLAIN)}


_PLAIN: Final = {"sasl.mechanism": "PLAIN"}


def _unquoted(text: str) -> str:
    return _ESCAPE.sub(_unescaped, text[1:-1]) if text[0] in "\"'" else text


def _unescaped(match: re.Match[str]) -> str:
    escape = match[1]
    return chr(int(escape, 8)) if escape[0] in "01234567" else _ESCAPES.get(escape, escape)


RULES: Final[Mapping[str, Rule]] = MappingProxyType(
    {
        "buffer.memory": _buffer_memory,
        "compression.gzip.level": _level("gzip"),
        "compression.lz4.level": _level("lz4"),
        "compression.zstd.level": _level("zstd"),
        "max.block.ms": lambda _, __: {},  # deliveryTimeout bounds every wait
        "max.request.size": _called("message.max.bytes"),
        "receive.buffer.bytes": _called("socket.receive.buffer.bytes"),
        "sasl.jaas.config": _login,
        "send.buffer.bytes": _called("socket.send.buffer.bytes"),
        "ssl.endpoint.identification.algorithm": _host_name,
        "ssl.truststore.certificates": _called("ssl.ca.pem"),
        "ssl.truststore.location": _trust,
        "ssl.truststore.type": _trust_type,
    }
)
"""Settings with a translation."""
