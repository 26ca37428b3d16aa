"""What each line really tells its broker and Kafka, and where each setting comes from: ``towline check -v``.

Nothing is worked out here a second time: the CONNECT is the packet that the gateway sends, the filters are its
session's, and Kafka's settings are those that the query hands to the sink and the sink to librdkafka. A secret is named
by its file, and what came from the environment by its variable.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

from towline.bridge.config.document import Document, KeyPath
from towline.bridge.config.model import AnyLine, Bridge, DownLine, Line
from towline.bridge.downlink.query import DownlinkQuery
from towline.bridge.uplink.query import UplinkQuery
from towline.gateway.settings import GatewaySettings
from towline.guarantee import policy
from towline.kafka.clientconfig import file_property
from towline.kafka.markerstore import READER
from towline.kafka.options import SinkSettings
from towline.kafka.producers import OWN
from towline.mqtt.events import Filter, SessionConfig
from towline.mqtt.handshake import connect_packet
from towline.mqtt.versions import NAMES
from towline.net.settings import BrokerConnection, MqttSettings
from towline.net.tls import Tls

DEFAULT: Final = "default"
#: What no key of the file changes.
ALWAYS: Final = "always"
_FOR_EVER: Final = 0xFFFFFFFF
_RETAINED: Final = ("retained messages always", "retained messages if new", "no retained messages")
#: Settings of librdkafka that the sink makes of its own time-out.
_TIMED: Final = frozenset({"message.timeout.ms", "transaction.timeout.ms"})
#: Keys of [kafka] that stand for a setting.
_NAMED: Final = {
    "bootstrap.servers": "bootstrap_servers",
    "sasl.password.file": "password_file",
    "ssl.key.password.file": "key_password_file",
}
#: Settings of a connection that rows of their own show, as CONNECT and the handshake say them.
_IN_CONNECT: Final = frozenset(
    {
        "brokers", "protocol", "client_id", "username", "password_file", "token_provider", "authenticator", "tls",
        "session_expiry_s", "receive_maximum", "keep_alive_s", "topic_alias_maximum", "max_packet_bytes", "will",
        "retain_handling", "abandon_session",
    }
)  # fmt: skip
#: Longest value, in characters, that the column of the sources waits for.
_WIDEST: Final = 24


#: A setting as its protocol or client calls it (``name``), its ``value`` in text, never a secret, and its ``source``:
#: ``FILE:LINE``, ``guarantee = …``, ``default`` or ``always``.
Setting: TypeAlias = dict[str, str]


def _setting(name: str, value: str, source: str) -> Setting:
    return {"name": name, "value": value or '""', "source": source}


class Origins:
    """Where the keys of a bridge stand in its file.

    Args:
        bridge: Whose; where its file can't be read, no line is named.
    """

    def __init__(self, bridge: Bridge) -> None:
        self._document = Document.again(bridge.file, Path(bridge.file.name))
        self.shown, self.table = self._document.shown, self._document.table

    def at(self, *paths: KeyPath) -> str | None:
        """``FILE:LINE`` of the first of these keys that is there; None for none."""
        found = next((path for path in paths if self._document.value(path) is not None), None)
        return None if found is None else self._document.where(found)


def effective(bridge: Bridge) -> dict[str, dict[str, list[Setting]]]:
    """Every setting of every line: line → what it is about → settings, as JSON values."""
    origins = Origins(bridge)
    return {line.name: dict(_of_line(bridge, line, origins)) for line in bridge.lines}


def _of_line(bridge: Bridge, line: Line | DownLine, origins: Origins) -> Iterator[tuple[str, list[Setting]]]:
    table = origins.table(line.kind, line.name)
    for gateway in line.each_gateway:
        name = f" of {gateway.name}" if gateway.share else ""
        yield f"MQTT{name}", list(_connection(line, gateway, origins, table))
    if isinstance(line, Line):
        settings = UplinkQuery(bridge, line).sink_settings()
        yield "Kafka producer", _producer(bridge, settings, origins)
        if policy(settings.guarantee).transactions:
            yield "Kafka consumer of markers", _client(bridge, settings, origins, {**settings.client, **READER})
        return
    query = DownlinkQuery(bridge, line)
    own = {"isolation.level": origins.at((*table, "isolation_level")) or f"guarantee = {line.guarantee}"}
    yield (
        "Kafka consumer (Spark's source)",
        [
            _setting(
                name,
                # A login has the user's name in it, whoever gave that.
                value.partition(" ")[0] if name == "sasl.jaas.config" else origins.shown(value, name),
                own.get(name) or _of_client(bridge, name, origins) or ALWAYS,
            )
            for name, value in query.source_settings().items()
        ],
    )
    if (dead := query.sink_settings()) is not None:
        yield "Kafka producer of dead letters", _producer(bridge, dead, origins)


def _connection(line: AnyLine, gateway: GatewaySettings, origins: Origins, table: tuple[str, int]) -> Iterator[Setting]:
    """The settings of one gateway's connection; `table` is the kind and number of the line's."""
    connection = gateway.connection
    config = connection.session_at(connection.levels[0])

    def settings(rows: Iterable[tuple[str, object, str]]) -> Iterator[Setting]:
        names = origins.at(("mqtt", "client_id_prefix"), ("name",)), origins.at((*table, "name"))
        for name, value, key in rows:
            keys = key.split(".") if key else ()
            own = DEFAULT if key != "client_id" else " and ".join(filter(None, names))
            source = (origins.at((*table, "mqtt", *keys), ("mqtt", *keys)) or own) if key else ALWAYS
            if value is not None:
                yield _setting(name, _text(origins.shown(value, key)), source)

    yield from settings(_session(gateway, connection, config, origins))
    promised = f"guarantee = {line.guarantee}"
    for one in config.filters:
        shown = origins.shown(one.pattern, "filter")
        yield _setting(f"filter {shown}", _filter(one), _source_of(one, line, origins, table, promised))
    if config.filters:
        place = origins.at((*table, "ack_after")) or promised
        yield _setting("acknowledged after", gateway.acks.value, place)
    yield from settings(_way(gateway, config))


def _session(
    gateway: GatewaySettings, connection: BrokerConnection, config: SessionConfig, origins: Origins
) -> Iterator[tuple[str, object, str]]:
    """Name, value and key of who connects, and what the CONNECT says; nothing where the value is None."""
    packet = connect_packet(config, None, discarding=False)
    announced = packet.max_packet_size
    yield "brokers", ", ".join(map(str, gateway.brokers)), "brokers"
    yield "protocol", ", then ".join(NAMES[level] for level in connection.levels), "protocol"
    yield "client id", config.client_id, "client_id"
    yield "user name", config.username, "username"
    yield "password", _file(gateway.password_file), "password_file"
    yield "password", gateway.token_provider, "token_provider"
    yield "authentication", gateway.authenticator, "authenticator"
    yield "Clean Start", packet.clean_start, ""
    yield "Session Expiry Interval", _seconds(packet.session_expiry_interval), "session_expiry_s"
    yield "Receive Maximum", _text(packet.receive_max), "receive_maximum"
    yield "Keep Alive", _seconds(packet.keep_alive), "keep_alive_s"
    yield "Topic Alias Maximum", _text(packet.topic_alias_max), "topic_alias_maximum"
    yield "Maximum Packet Size", "not announced" if announced is None else f"{announced:,} B", ""
    yield "taken in whole", f"up to {gateway.max_packet_bytes:,} B", "max_packet_bytes"
    if (will := packet.will) is not None:
        retained = ", retained" if will.retain else ""
        yield "will", f"{origins.shown(will.topic, 'topic')}, QoS {int(will.qos)}{retained}", "will"


def _way(gateway: GatewaySettings, config: SessionConfig) -> Iterator[tuple[str, object, str]]:
    """The same of the way to the broker: every setting that no row above says."""
    if any(broker.tls for broker in gateway.brokers):
        yield from _tls(gateway.tls)
    values = {**vars(gateway), "unknown_session": config.unknown_session}
    for name in MqttSettings.model_fields:
        if name not in _IN_CONNECT:
            yield _words(name), _shown(name, values[name]), name


def _words(name: str) -> str:
    return name.removesuffix("_s").removesuffix("_ms").removesuffix("_file").replace("_", " ")


def _shown(name: str, value: object) -> object:
    """A value with its unit; None for none."""
    unit = " ms" if name.endswith("_ms") else " s" if name.endswith("_s") else ""
    if value is None or value == "":
        return None
    return _file(value) if isinstance(value, Path) else f"{value:g}{unit}" if unit else value


def _source_of(one: Filter, line: AnyLine, origins: Origins, table: tuple[str, int], promised: str) -> str:
    """Where a filter's QoS comes from: a route that says it, or the guarantee."""
    for number, route in enumerate(line.routes if isinstance(line, Line) else ()):
        if route.pattern.filter == one.pattern:
            own = (*table, "route", number)
            return origins.at((*own, "qos")) or ", ".join(filter(None, (promised, origins.at((*own, "from")))))
    return promised


def _filter(one: Filter) -> str:
    handling = "retained messages as the journal knows the filter"
    parts = [f"QoS {one.qos}", handling if one.retain_handling is None else _RETAINED[one.retain_handling]]
    parts += ["no local"] if one.no_local else []
    parts += [] if one.retain_as_published else ["RETAIN cleared"]
    parts += [f"identifier {one.identifier}"] if one.identifier is not None else []
    return ", ".join(parts)


def _tls(tls: Tls) -> Iterator[tuple[str, object, str]]:
    yield "TLS", f"{tls.min_version} and newer", "tls.min_version"
    yield "certificate of the broker", "not verified: insecure" if tls.insecure else "verified", "tls.insecure"
    if not tls.strict:
        yield "rules of RFC 5280", "not checked", "tls.strict"
    for name, key in (("authorities", "ca_file"), ("certificate", "cert_file"), ("key", "key_file")):
        if (file := getattr(tls, key)) is not None:
            yield name, file, f"tls.{key}"
    if tls.server_name:
        yield "server name", tls.server_name, "tls.server_name"
    if tls.alpn:
        yield "ALPN", ", ".join(tls.alpn), "tls.alpn"


def _producer(bridge: Bridge, settings: SinkSettings, origins: Origins) -> list[Setting]:
    more: dict[str, Any] = {}
    if policy(settings.guarantee).transactions and settings.sink_id is not None:
        parts = sorted({0, settings.parallelism - 1})
        more["transactional.id"] = " to ".join(settings.transactional_id(settings.sink_id, part) for part in parts)
    return _client(bridge, settings, origins, {**settings.client, **more, **OWN})


def _client(bridge: Bridge, settings: SinkSettings, origins: Origins, given: Mapping[str, Any]) -> list[Setting]:
    """The settings that a client of librdkafka is given, and whose word each is."""
    promise, found = policy(settings.guarantee), []
    for name in sorted(given):
        always = any(name in fixed and given[name] == fixed[name] for fixed in (OWN, READER))
        promised = name in promise.kafka or name in _TIMED or name == "transactional.id"
        own = ALWAYS if always else f"guarantee = {settings.guarantee}" if promised else DEFAULT
        source = _of_client(bridge, name, origins) if settings.client.get(name) == given[name] else None
        shown = _text(origins.shown(given[name], name))
        value = f"in {shown}" if file_property(name) is not None else shown
        found.append(_setting(name, value, source or own))
    return found


def _of_client(bridge: Bridge, name: str, origins: Origins) -> str | None:
    """Where [kafka] says a setting of the client; None where it does not."""
    if name not in bridge.kafka.client():
        return None
    own: list[KeyPath] = [("kafka", _NAMED[name])] if name in _NAMED else []
    return origins.at(*own, ("kafka", "settings", name), ("kafka", "settings", *name.split("."))) or "the file"


def _file(path: Path | None) -> str | None:
    return None if path is None else f"in {path}"


def _seconds(value: float | None) -> str:
    return "none" if value is None else "for ever" if value == _FOR_EVER else f"{value:g} s"


def _text(value: object) -> str:
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def render_effective(settings: Mapping[str, Mapping[str, list[Setting]]]) -> list[str]:
    """The settings as lines of text, each still to be escaped."""
    out = []
    for line, parts in settings.items():
        for head, rows in parts.items():
            name, value = (max((len(row[key]) for row in rows), default=0) for key in ("name", "value"))
            out += ["", f'▸ line "{line}"   {head}']
            out += [f"  {row['name']:{name}}  {row['value']:{min(value, _WIDEST)}}   {row['source']}" for row in rows]
    return out
