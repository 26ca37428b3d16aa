"""What a Mosquitto's configuration says of a bridge file: its connections as lines, or one of its listeners as broker.

A ``connection`` with ``topic ... in`` fetches messages from a remote broker: a line takes them from there. With ``out``
or ``both`` it takes what clients publish here: a line takes that from this broker. Either way they go to Kafka. What
Towline has no word for becomes a note; what the broker's own settings end is doctor's to say.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, count
from pathlib import Path
from typing import Any, Final

from towline.bridge.draft.answers import DraftLine, Known, legal_name
from towline.errors import ConfigError
from towline.mosquitto_conf import BridgeTopic, ConfSection, MosquittoConf

#: Protocols of a connection; without a word Mosquitto takes 3.1.1, which says nothing of what the broker can.
_PROTOCOLS: Final = {"mqttv31": "3.1", "mqttv311": "3.1.1", "mqttv50": None}
#: Settings of a connection that are carried over.
_CARRIED: Final = re.compile(
    "address|topic|keepalive_interval|remote_(username|password)|"
    "bridge_(alpn|cafile|certfile|insecure|keyfile|protocol_version|tls_use_os_certs)"
)
#: What becomes of others, in words; of those that are not here Towline has no such setting.
_LEFT: Final[Mapping[str, str]] = {
    "bridge_capath": "name the authorities in one file of PEM, as tls.ca_file",
    "bridge_identity": "there is no TLS with a pre-shared key: use certificates",
    "bridge_psk": "there is no TLS with a pre-shared key: use certificates",
    "bridge_tls_version": "the newest version that both speak is taken, 1.2 or 1.3: tls.min_version",
    "cleansession": "a line always keeps its session: a clean one loses what comes while it is away",
    "notifications": "Towline's state is seen with towline status and /metrics, not on a topic",
    "remote_clientid": "with it a line and this Mosquitto would end each other's sessions; a line has its own",
    "restart_timeout": "the pauses are reconnect_delay_s and reconnect_max_delay_s in [mqtt]",
    "round_robin": "brokers are tried in the order in which they are named",
    "start_type": "a line always keeps its connection",
}
#: The same of its topics.
_OF_TOPICS: Final[Mapping[str, tuple[Callable[[BridgeTopic], bool], str]]] = {
    "the prefixes": (lambda one: one.local != one.remote, "the header mqtt.topic has the topic as the line reads it"),
    "both ways": (
        lambda one: one.direction == "both",
        "the line reads here, where the messages of either side are; at the remote broker too it would double them",
    ),
    "QoS 0": (lambda one: one.qos == 0, "a line subscribes as its guarantee needs; what is sent with 0 may be lost"),
    "delivery to clients here": (
        lambda one: one.direction == "in",
        "that connection still does it; from Kafka to a broker goes a [[downlink]]: docs/downlink.md",
    ),
}
#: Values with which a connection does what a line does.
_SAME: Final = {"cleansession": ("false", "0"), "round_robin": ("false", "0"), "start_type": ("automatic",)}


def known_of(conf: MosquittoConf, file: Path) -> Known:
    """What a Mosquitto's configuration says of a bridge file: a line for each side of a connection, or the broker.

    Args:
        conf: The configuration.
        file: The bridge file; password files beside it begin with its stem.

    Raises:
        ConfigError: TL-C165, a connection has no address; TL-C156, a value can't be read.
    """
    here, of_here = _of_listener(conf, min(conf.listeners, key=_asks))
    lines: list[DraftLine] = []
    secrets: dict[str, str] = {}
    notes = [f"Made from {conf.file}."]
    for connection in (one for one in conf.connections if one.topics):
        base = legal_name(connection.name, "mosquitto")
        notes += _left(connection)
        if out := _filters(one.local for one in connection.topics if one.direction != "in"):
            lines.append(DraftLine(_apart(f"{base}-out", lines), out, here))
            notes += [f"line {lines[-1].name}: {note}" for note in of_here]
        if came := _filters(one.remote for one in connection.topics if one.direction == "in"):
            (broker, said), name = _remote(connection), _apart(f"{base}-in", lines)
            if connection.get("remote_password"):
                broker["password_file"] = f"{file.stem}.{name}.password"
                secrets[broker["password_file"]] = connection.text("remote_password")
            lines.append(DraftLine(name, came, broker))
            notes += [f"line {name}: {note}" for note in said]
    return Known(broker=here, lines=lines, notes=notes if lines else [*notes, *of_here], secrets=secrets)


def _asks(one: ConfSection) -> tuple[bool, ...]:
    """How much a listener asks of a client on this machine."""
    certificate = one.flag("require_certificate")
    return one.get("psk_hint") is not None, certificate, one.protocol == "websockets", one.secure


def _filters(patterns: Iterable[str]) -> tuple[str, ...]:
    """Each once, with braces as a route writes them."""
    return tuple(dict.fromkeys(one.replace("{", "{{").replace("}", "}}") for one in patterns))


def _literal(text: str) -> str:
    """Text that no variable of the environment is meant by."""
    return text.replace("${", "$${")


def _apart(name: str, lines: list[DraftLine]) -> str:
    """A name that legal letters made like another one's gets a number."""
    taken = [line.name for line in lines]
    return next(one for one in chain([name], (f"{name}-{number}" for number in count(2))) if one not in taken)


def _remote(connection: ConfSection) -> tuple[dict[str, Any], list[str]]:
    """The broker of a connection as keys of ``[mqtt]``, and what to say of it."""
    names = {"ca_file": "bridge_cafile", "cert_file": "bridge_certfile", "key_file": "bridge_keyfile"}
    tls, notes = _tls_files(connection, names)
    if alpn := connection.text("bridge_alpn"):
        tls["alpn"] = _literal(alpn)
    if connection.flag("bridge_insecure"):
        tls["insecure"] = True
        notes.append("The broker's certificate is not verified, as before: anyone in between can read and change.")
    secure = any(connection.get(name) for name in ("bridge_cafile", "bridge_capath", "bridge_psk"))
    secure = secure or connection.flag("bridge_tls_use_os_certs")
    scheme, alive = "mqtts" if secure else "mqtt", connection.get("keepalive_interval")
    places = [_literal(f"{scheme}://{_host(host)}:{port}") for host, port in connection.addresses]
    if not places:
        where = connection.begun.where if connection.begun else connection.name
        raise ConfigError(
            "TL-C165", where, f'connection "{connection.name}" has no address', "Add it, or leave it out."
        )
    made = {
        "brokers": places,
        "username": _literal(connection.text("remote_username")) or None,
        "tls": tls if secure and tls else None,
        "protocol": _PROTOCOLS.get(connection.text("bridge_protocol_version"), "auto"),
        "keep_alive_s": max(5, connection.number("keepalive_interval")) if alive else None,
    }
    return {key: value for key, value in made.items() if value is not None}, notes if secure else []


def _host(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def _tls_files(settings: ConfSection, names: Mapping[str, str]) -> tuple[dict[str, Any], list[str]]:
    """The files of a table ``tls`` that are there, and what to say of the others."""
    found: dict[str, Any] = {}
    notes: list[str] = []
    for key, name in names.items():
        if (one := settings.get(name)) is None:
            continue
        path = one.file.parent.absolute() / one.value
        if path.is_file():
            found[key] = _literal(str(path))
        else:
            notes.append(f"tls.{key} is missing: {path} ({name}, {one.where}) is not there, or this user can't see it.")
    return found, notes


def _left(connection: ConfSection) -> Iterator[str]:
    said = [(one.name, one, _LEFT.get(one.name, "Towline has no such setting")) for one in connection.settings]
    left = [one for one in said if not _CARRIED.fullmatch(one[0]) and one[1].value.lower() not in _SAME.get(one[0], ())]
    for name, (holds, why) in _OF_TOPICS.items():
        left += [(name, one.setting, why) for one in connection.topics if holds(one)][:1]
    for name, setting, why in left:
        yield f'Not carried over: {name} of connection "{connection.name}" ({setting.where}): {why}.'


def _of_listener(conf: MosquittoConf, listener: ConfSection) -> tuple[dict[str, Any], list[str]]:
    """A listener as keys of ``[mqtt]``, and what to say of it."""
    notes: list[str] = []
    everywhere = listener.address in ("", "0.0.0.0", "::", "*")  # noqa: S104 - what a configuration says
    scheme = f"{'ws' if listener.protocol == 'websockets' else 'mqtt'}{'s' * listener.secure}"
    place = f"{scheme}://{'localhost' if everywhere else _host(listener.address)}:{listener.port}"
    made: dict[str, Any] = {"brokers": [_literal(place if listener.port else f"unix://{listener.address}")]}
    if listener.port and everywhere:
        notes.append("The listener is on all addresses: name this machine where Towline runs on another one.")
    if listener.secure:
        tls, missing = _tls_files(listener, {"ca_file": "cafile"})
        made |= {"tls": tls} if tls else {}
        notes += [*missing, "The host has to be the one in the broker's certificate, or set tls.server_name to that."]
    if listener.flag("require_certificate"):
        notes.append("The listener asks for a certificate of ours: set tls.cert_file and tls.key_file.")
    known = next((one for one in (listener, conf) if one.get("allow_anonymous")), None)
    if not (conf.local_only if known is None else known.flag("allow_anonymous")):
        notes.append("The listener lets nobody in without a password: set username and password_file.")
    if point := listener.text("mount_point"):
        notes.append(f'The listener puts "{point}" before all topics of its clients; Towline sees them without it.')
    if listener.flag("use_username_as_clientid"):
        notes.append("The listener takes the user name as client id: give each line a user of its own.")
    if (most := listener.number("max_qos")) < 2:
        notes.append(f"The listener grants QoS {most} at most: exactly_once needs 2, at_least_once 1.")
    return made, notes
