"""What a Mosquitto's configuration says of a bridge file: its connections as lines, or one of its listeners as broker.

A ``connection`` with ``topic ... in`` fetches messages from a remote broker: a line takes them from there. With ``out``
or ``both`` it takes what clients publish here: a line takes that from this broker. Either way they go to Kafka. What
Towline has no word for, and what of the broker's own settings breaks the promise, becomes a note.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from towline.bridge.draft.answers import InitAnswers, draft_of, legal_name, routes_of
from towline.bridge.draft.document import Draft, DraftBroker, DraftLine
from towline.errors import ConfigError, did_you_mean
from towline.mosquitto_conf import BridgeTopic, Connection, Listener, MosquittoConf, Setting, Settings

__all__ = ["Source", "chosen", "draft_from"]

#: Protocols of a connection; without a word Mosquitto takes 3.1.1, which says nothing of what the broker can.
_PROTOCOLS: Final = {"mqttv31": "3.1", "mqttv311": "3.1.1", "mqttv50": "5"}
#: Seconds between two savings from which on a killed broker loses much.
_SHORT_S: Final = 60
#: Settings of a connection that are carried over, or are the default of a line.
_CARRIED: Final = frozenset(
    {
        "address",
        "bridge_alpn",
        "bridge_cafile",
        "bridge_certfile",
        "bridge_insecure",
        "bridge_keyfile",
        "bridge_protocol_version",
        "bridge_tls_use_os_certs",
        "keepalive_interval",
        "remote_password",
        "remote_username",
        "topic",
    }
)
_OF_MOSQUITTO: Final = "it is about the other end of the connection, this Mosquitto"
_SEEN: Final = "Towline's state is seen with towline status and /metrics, not on a topic"
_LAZY: Final = "a line always keeps its connection"
_UNSAID: Final = "Towline has no such setting"
#: What becomes of the others, in words.
_LEFT: Final[Mapping[str, str]] = {
    "bridge_capath": "name the authorities in one file of PEM, as tls.ca_file",
    "bridge_identity": "there is no TLS with a pre-shared key: use certificates",
    "bridge_psk": "there is no TLS with a pre-shared key: use certificates",
    "bridge_tls_version": "the newest version that both speak is taken, 1.2 or 1.3: tls.min_version",
    "cleansession": "a line always keeps its session: a clean one loses what comes while it is away",
    "idle_timeout": _LAZY,
    "local_cleansession": _OF_MOSQUITTO,
    "local_clientid": _OF_MOSQUITTO,
    "local_password": _OF_MOSQUITTO,
    "local_username": _OF_MOSQUITTO,
    "notification_topic": _SEEN,
    "notifications": _SEEN,
    "notifications_local_only": _SEEN,
    "remote_clientid": "with it a line and this Mosquitto would end each other's sessions; a line has its own",
    "restart_timeout": "the pauses are reconnect_delay_s and reconnect_max_delay_s in [mqtt]",
    "round_robin": "brokers are tried in the order in which they are named",
    "start_type": _LAZY,
    "threshold": _LAZY,
    "try_private": "it is a sign between Mosquittos",
}


#: Values with which a connection does what a line does.
_SAME: Final[Mapping[str, tuple[str, ...]]] = {
    "cleansession": ("false", "0"),
    "round_robin": ("false", "0"),
    "start_type": ("automatic",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What is taken from a configuration.

    Attributes:
        conf: The configuration.
        connections: Those that become lines; none where a listener is the broker.
        listener: The broker, for what clients publish here.
    """

    conf: MosquittoConf
    connections: tuple[Connection, ...]
    listener: Listener

    @property
    def broker(self) -> DraftBroker:
        """The listener as the broker of a line."""
        return _of_listener(self.conf, self.listener)

    @property
    def reads_here(self) -> bool:
        """Whether a line reads at this Mosquitto, whose settings then count."""
        return not self.connections or any(_out(one) for one in self.connections)

    @property
    def answers(self) -> frozenset[str]:
        """Questions that the configuration has answered."""
        return frozenset({"broker", "topics"} if self.connections else {"broker"})

    def notes(self) -> tuple[str, ...]:
        """What could not be carried over, and what breaks the promise."""
        left = [note for one in self.connections for note in _left(one)]
        return (*left, *(_broken(self.conf) if self.reads_here else ()))


def chosen(conf: MosquittoConf | None, *, connection: str | None = None, port: int | None = None) -> Source | None:
    """Choose what becomes the file.

    Args:
        conf: The configuration; None for none, and then nothing of it may be asked for.
        connection: Only the one of this name.
        port: A listener, in place of connections.

    Raises:
        ConfigError: TL-C165, there is no such connection or listener, or nothing to connect to; TL-C163, both or none
            of the configuration is asked for.
    """
    if (connection is not None or port is not None) and (conf is None or None not in (connection, port)):
        what, do = "--connection and --listener choose one thing of --from FILE", "Give --from, and one of the two."
        raise ConfigError("TL-C163", "towline init", what, do)
    return None if conf is None else _chosen(conf, connection, port)


def _chosen(conf: MosquittoConf, connection: str | None, port: int | None) -> Source:
    found = [one for one in conf.connections if one.topics]
    if connection is not None:
        names = [one.name for one in conf.connections]
        found = [one for one in found if one.name == connection]
        if not found:
            what = f'there is no connection "{connection}" with a topic'
            raise ConfigError("TL-C165", str(conf.file), what, did_you_mean(connection, names) if names else "")
    elif port is not None:
        found = []
    for one in found:
        if not one.addresses:
            where = one.begun.where if one.begun else str(conf.file)
            raise ConfigError("TL-C165", where, f'connection "{one.name}" has no address', "Add it, or leave it out.")
    return Source(conf=conf, connections=tuple(found), listener=_listener(conf, port))


def _listener(conf: MosquittoConf, port: int | None) -> Listener:
    """The one that is named, or the one that asks least of a client on this machine."""
    if port is not None:
        found = next((one for one in conf.listeners if one.port == port), None)
        if found is None:
            ports = ", ".join(str(one.port) for one in conf.listeners)
            raise ConfigError("TL-C165", str(conf.file), f"there is no listener on port {port}", f"There is {ports}.")
        return found

    def asks(one: Listener) -> tuple[bool, ...]:
        return (
            one.get("psk_hint") is not None,
            one.flag("require_certificate", otherwise=False),
            one.protocol == "websockets",
            one.secure,
        )

    return min(conf.listeners, key=asks)


# -- connections -----------------------------------------------------------------------------------------------------


def draft_from(source: Source, answers: InitAnswers, *, name: str, state_dir: str, stem: str) -> Draft:
    """The file that a Mosquitto's configuration and the answers make.

    Args:
        source: What is taken of the configuration.
        answers: Kafka's side, the guarantee, and for a listener the topics.
        name: Of the bridge.
        state_dir: Of the bridge.
        stem: Begins the names of password files.
    """
    if not source.connections:
        draft = draft_of(answers, name=name, state_dir=state_dir, broker=source.broker)
        return replace(draft, origin=str(source.conf.file), notes=source.notes())
    lines: list[DraftLine] = []
    secrets: dict[str, str] = {}
    for connection in source.connections:
        base = legal_name(connection.name, "mosquitto")
        if here := _filters([one.local for one in _out(connection)]):
            lines.append(_line(f"{base}-out", here, answers, source.broker, connection, "out"))
        if there := _filters([one.remote for one in _in(connection)]):
            broker = _remote(connection, f"{stem}.{base}.password")
            if broker.password_file:
                secrets[broker.password_file] = connection.text("remote_password")
            lines.append(_line(f"{base}-in", there, answers, broker, connection, "in"))
    return Draft(
        name=name,
        state_dir=state_dir,
        kafka=answers.kafka,
        guarantee=answers.guarantee,
        lines=_named_apart(lines),
        origin=str(source.conf.file),
        notes=source.notes(),
        secrets=secrets,
    )


def _in(connection: Connection) -> list[BridgeTopic]:
    return [one for one in connection.topics if one.direction == "in"]


def _out(connection: Connection) -> list[BridgeTopic]:
    return [one for one in connection.topics if one.direction != "in"]


def _filters(patterns: list[str]) -> tuple[str, ...]:
    """Each once, with braces as a route writes them."""
    return tuple(dict.fromkeys(_literal(one.replace("{", "{{").replace("}", "}}")) for one in patterns))


def _literal(text: str) -> str:
    """Text that no variable of the environment is meant by."""
    return text.replace("${", "$${")


def _line(
    name: str, filters: tuple[str, ...], answers: InitAnswers, broker: DraftBroker, connection: Connection, way: str
) -> DraftLine:
    if way == "out":
        note = f'What clients publish here and connection "{connection.name}" takes to the remote broker.'
    else:
        note = (
            f'What connection "{connection.name}" fetches from the remote broker. Clients of this Mosquitto get it by '
            "that connection still; from Kafka to a broker goes a [[downlink]]: docs/downlink.md."
        )
    return DraftLine(name=name, routes=routes_of(filters, answers.topic), broker=broker, notes=(note,))


def _named_apart(lines: list[DraftLine]) -> tuple[DraftLine, ...]:
    """Names that legal letters made alike get a number."""
    seen: dict[str, int] = {}
    made = []
    for line in lines:
        seen[line.name] = count = seen.get(line.name, 0) + 1
        made.append(line if count == 1 else replace(line, name=f"{line.name}-{count}"))
    return tuple(made)


def _remote(connection: Connection, password_file: str) -> DraftBroker:
    files, notes = _tls_files(
        connection, {"ca_file": "bridge_cafile", "cert_file": "bridge_certfile", "key_file": "bridge_keyfile"}
    )
    tls: dict[str, str | bool] = dict(files)
    if alpn := connection.text("bridge_alpn"):
        tls["alpn"] = _literal(alpn)
    if connection.flag("bridge_insecure", otherwise=False):
        tls["insecure"] = True
        notes.append("The broker's certificate is not verified, as before: anyone in between can read and change.")
    secure = any(connection.get(name) for name in ("bridge_cafile", "bridge_capath"))
    secure = secure or connection.flag("bridge_tls_use_os_certs", otherwise=False)
    scheme = "mqtts" if secure else "mqtt"
    more: dict[str, str | int] = {}
    if (version := _PROTOCOLS.get(connection.text("bridge_protocol_version"), "auto")) != "5":
        more["protocol"] = version
    if connection.get("keepalive_interval"):
        more["keep_alive_s"] = max(5, connection.number("keepalive_interval", 60))
    return DraftBroker(
        uris=tuple(_literal(f"{scheme}://{_host(host)}:{port}") for host, port in connection.addresses),
        username=_literal(connection.text("remote_username")),
        password_file=password_file if connection.get("remote_password") else "",
        tls=tls,
        more=more,
        notes=tuple(notes),
    )


def _host(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def _tls_files(settings: Settings, names: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """The files of a table ``tls`` that are there, and what to say of the others."""
    found: dict[str, str] = {}
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


def _left(connection: Connection) -> Iterator[str]:
    """What of a connection is not carried over."""
    for one in connection.settings:
        if one.name in _CARRIED or _is_default(one):
            continue
        why = _LEFT.get(one.name, _UNSAID)
        yield f'Not carried over: {one.name} of connection "{connection.name}" ({one.where}): {why}.'
    prefixed = next((one for one in connection.topics if one.local_prefix or one.remote_prefix), None)
    if prefixed is not None:
        yield (
            f'Not carried over: the prefixes of connection "{connection.name}" ({prefixed.setting.where}): the header '
            "mqtt.topic of a record has the topic as the broker has it that the line reads."
        )
    both = next((one for one in connection.topics if one.direction == "both"), None)
    if both is not None:
        yield (
            f'Not carried over: both ways of connection "{connection.name}" ({both.setting.where}): the line reads '
            "here, where the messages of either side are; at the remote broker too it would double them."
        )
    qos_0 = next((one for one in connection.topics if one.qos == 0), None)
    if qos_0 is not None:
        yield (
            f'Not carried over: QoS 0 of connection "{connection.name}" ({qos_0.setting.where}): a line subscribes '
            "with the QoS that its guarantee needs. What a publisher sends with QoS 0 may be lost all the same."
        )


def _is_default(setting: Setting) -> bool:
    return setting.value.lower() in _SAME.get(setting.name, ())


# -- the broker itself -----------------------------------------------------------------------------------------------


def _of_listener(conf: MosquittoConf, listener: Listener) -> DraftBroker:
    notes: list[str] = []
    tls: dict[str, str | bool] = {}
    if listener.port == 0:
        uri = f"unix://{listener.address}"
    else:
        scheme = {(False, False): "mqtt", (False, True): "mqtts", (True, False): "ws", (True, True): "wss"}[
            listener.protocol == "websockets", listener.secure
        ]
        everywhere = listener.address in ("", "0.0.0.0", "::", "*")  # noqa: S104 - what a configuration says
        uri = f"{scheme}://{'localhost' if everywhere else _host(listener.address)}:{listener.port}"
        if everywhere:
            notes.append("The listener is on all addresses: name this machine where Towline runs on another one.")
    if listener.secure:
        files, missing = _tls_files(listener, {"ca_file": "cafile"})
        tls, notes = dict(files), [*notes, *missing]
        notes.append("The host has to be the one in the broker's certificate, or set tls.server_name to that.")
    if listener.flag("require_certificate", otherwise=False):
        notes.append("The listener asks for a certificate of ours: set tls.cert_file and tls.key_file.")
    if not _anonymous(conf, listener):
        notes.append("The listener lets nobody in without a password: set username and password_file.")
    if point := listener.text("mount_point"):
        notes.append(f'The listener puts "{point}" before all topics of its clients; Towline sees them without it.')
    if listener.flag("use_username_as_clientid", otherwise=False):
        notes.append("The listener takes the user name as client id: give each line a user of its own.")
    most = next((listener.number(name, 2) for name in ("max_qos", "maximum_qos") if listener.get(name)), 2)
    if most < 2:
        notes.append(f"The listener grants QoS {most} at most: exactly_once needs 2, at_least_once 1.")
    return DraftBroker(uris=(_literal(uri),), tls=tls, notes=tuple(notes))


def _anonymous(conf: MosquittoConf, listener: Listener) -> bool:
    """Whether a client without a name is let in."""
    for one in (listener, conf):
        if one.get("allow_anonymous") is not None:
            return one.flag("allow_anonymous", otherwise=False)
    return conf.local_only


#: Settings of the broker that end a promise: name, when, and what is lost then.
_ENDS: Final[tuple[tuple[str, Callable[[Any], bool], str, str], ...]] = (
    ("persistence", lambda on: not on, "sessions and queues are gone when the broker ends", "persistence true"),
    (
        "max_queued_messages",
        lambda most: most != 0,
        "for a line that is away the broker drops what comes beyond, and tells nobody",
        "max_queued_messages 0, or as many as an outage brings",
    ),
    ("max_queued_bytes", lambda most: most != 0, "the same, in bytes", "max_queued_bytes 0"),
    ("memory_limit", lambda most: most != 0, "beyond it the broker drops, and tells nobody", "memory_limit 0"),
    (
        "persistent_client_expiration",
        lambda time: time is not None,
        "a line that is away for longer loses its session, with all that waits in it",
        "no such line, or a time that is longer than any outage",
    ),
    (
        "message_size_limit",
        lambda most: most != 0,
        "a larger message is dropped, and a publisher of MQTT 3.1.1 is not told",
        "message_size_limit 0",
    ),
    (
        "upgrade_outgoing_qos",
        lambda on: on,
        "a message of QoS 0 is shown as one of the subscription's QoS: by_qos can't tell them apart",
        "upgrade_outgoing_qos false",
    ),
)


def _broken(conf: MosquittoConf) -> Iterator[str]:
    """What of the broker's settings ends a promise."""
    for name, ends, lost, better in _ENDS:
        value = conf.value(name)
        if ends(value):
            yield f"Breaks the promise: {_said(conf, name, value)}: {lost}. Better: {better}."
    interval, changes = conf.value("autosave_interval"), conf.value("autosave_on_changes")
    often = interval == 1 if changes else isinstance(interval, int) and 0 < interval <= _SHORT_S
    if conf.value("persistence") and not often:
        said = _said(conf, "autosave_interval", f"{interval} changes" if changes else f"{interval} s")
        yield (
            f"Breaks the promise: {said}: what came since the last saving is lost when the broker is killed. "
            "Better: autosave_on_changes true and autosave_interval 1; or receipts (docs/receipts.md)."
        )


def _said(conf: MosquittoConf, name: str, value: object) -> str:
    found = conf.get(name)
    shown = str(value).lower() if isinstance(value, bool) else str(value)
    return f"{name} is {shown} ({found.where if found else 'by default'})"
