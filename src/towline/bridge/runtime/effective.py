"""What each line really tells its broker and Kafka, and where each setting comes from: ``towline check -v``.

Nothing is worked out here a second time: the connection's settings are the gateway's, with what its session makes of
them, and Kafka's are those that the query hands to the sink and the sink to librdkafka. A secret is named by its file,
and what came from the environment by its variable.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

from towline.bridge.config.document import Document, KeyPath, keys_of
from towline.bridge.config.model import AnyLine, Bridge, DownLine, Line
from towline.bridge.downlink.query import DownlinkQuery
from towline.bridge.uplink.query import UplinkQuery
from towline.gateway.settings import GatewaySettings
from towline.guarantee import policy
from towline.kafka.clientconfig import file_property
from towline.kafka.markerstore import READER
from towline.kafka.options import SinkSettings
from towline.kafka.producers import OWN
from towline.mqtt.events import Filter
from towline.mqtt.handshake import connect_packet
from towline.net.settings import MqttSettings, WillSettings
from towline.net.tls import Tls

DEFAULT: Final = "default"
#: What no key of the file changes.
ALWAYS: Final = "always"
_FOR_EVER: Final = 0xFFFFFFFF
_RETAINED: Final = ("retained messages always", "retained messages if new", "no retained messages")
#: Settings of librdkafka that the sink makes of its own time-out.
_TIMED: Final = frozenset({"message.timeout.ms", "transaction.timeout.ms", "transactional.id"})
#: Keys of [kafka] that stand for a setting.
_NAMED: Final = {
    "bootstrap.servers": "bootstrap_servers",
    "sasl.password.file": "password_file",
    "ssl.key.password.file": "key_password_file",
}
#: Longest value, in characters, that the column of the sources waits for.
_WIDEST: Final = 24

#: A setting as the bridge file or its client calls it (``name``), its ``value`` in text, never a secret, and its
#: ``source``: ``FILE:LINE``, ``guarantee = …``, ``default`` or ``always``.
Setting: TypeAlias = dict[str, str]


def effective(bridge: Bridge) -> dict[str, dict[str, list[Setting]]]:
    """Every setting of every line: line → what it is about → settings, as JSON values."""
    document = Document.again(bridge.file, Path(bridge.file.name))
    return {line.name: dict(_of_line(bridge, line, document)) for line in bridge.lines}


def _setting(document: Document, name: str, value: object, source: str) -> Setting:
    """A setting, as the file writes its value."""
    key = _NAMED.get(name, name.rpartition(".")[2])
    return {"name": name, "value": _text(document.shown(value, key)), "source": source}


def _of_line(bridge: Bridge, line: Line | DownLine, document: Document) -> Iterator[tuple[str, list[Setting]]]:
    for gateway in line.each_gateway:
        name = f" of {gateway.name}" if gateway.share else ""
        yield f"MQTT{name}", list(_connection(line, gateway, document))
    if isinstance(line, Line):
        settings = UplinkQuery(bridge, line).sink_settings()
        yield "Kafka producer", _producer(bridge, settings, document)
        if policy(settings.guarantee).transactions:
            own = {**_promised(settings), **dict.fromkeys(READER, ALWAYS)}
            yield "Kafka consumer of markers", list(_kafka(bridge, document, {**settings.client, **READER}, own))
        return
    query = DownlinkQuery(bridge, line)
    java = query.source_settings()
    if "sasl.jaas.config" in java:  # a login has the user's name in it, whoever gave that
        java["sasl.jaas.config"] = java["sasl.jaas.config"].partition(" ")[0]
    isolation = document.at((*document.table(line.kind, line.name), "isolation_level"))
    own = {"isolation.level": isolation or f"guarantee = {line.guarantee}"}
    yield "Kafka consumer (Spark's source)", list(_kafka(bridge, document, java, own, ALWAYS))
    if (dead := query.sink_settings()) is not None:
        yield "Kafka producer of dead letters", _producer(bridge, dead, document)


# -- MQTT ------------------------------------------------------------------------------------------------------------


def _connection(line: AnyLine, gateway: GatewaySettings, document: Document) -> Iterator[Setting]:
    """The settings of one gateway's connection, by their keys in ``[mqtt]``; those without a value are left out."""
    connection = gateway.connection
    config = connection.session_at(connection.levels[0])
    table, promised = document.table(line.kind, line.name), f"guarantee = {line.guarantee}"
    named = " and ".join(
        filter(None, (document.at(("mqtt", "client_id_prefix"), ("name",)), document.at((*table, "name"))))
    )
    session = {key: getattr(config, key) for key in MqttSettings.model_fields if hasattr(config, key)}
    whole = {
        "brokers": ", ".join(map(str, gateway.brokers)),
        "will": gateway.will,
        "authenticator": gateway.authenticator,
    }
    left_out = {"retain_handling"} if any(broker.tls for broker in gateway.brokers) else {"retain_handling", "tls"}
    told = {**vars(gateway), **session, **whole}
    told |= {"session_expiry_s": "for ever"} if config.session_expiry_s == _FOR_EVER else {}
    keys = dict.fromkeys(("brokers", "client_id", *MqttSettings.model_fields))
    for path, value in _flat({key: told[key] for key in keys if key not in left_out}):
        own = named if path == ("client_id",) else DEFAULT
        source = document.at((*table, "mqtt", *path), ("mqtt", *path)) or own
        yield _setting(document, ".".join(path), value, source)
    packet = connect_packet(config, None, discarding=False)
    yield _setting(document, "Clean Start", packet.clean_start, ALWAYS)
    yield _setting(document, "Maximum Packet Size", packet.max_packet_size or "not announced", ALWAYS)
    for one in config.filters:
        shown = document.shown(one.pattern, "from")
        yield _setting(document, f"filter {shown}", _filter(one), _source_of(one, line, document, table, promised))
    if config.filters:
        place = document.at((*table, "ack_after")) or promised
        yield _setting(document, "acknowledged after", gateway.acks.value, place)


def _flat(table: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Each value that is there, by its key and those of the tables around it."""
    for key, value in table.items():
        if isinstance(value, Tls | WillSettings):
            yield from _flat({name: getattr(value, name) for name in keys_of(type(value))}, (*path, key))
        elif value not in (None, "", ()):
            yield (*path, key), value


def _source_of(one: Filter, line: AnyLine, document: Document, table: tuple[str, int], promised: str) -> str:
    """Where a filter's QoS comes from: a route that says it, or the guarantee."""
    for number, route in enumerate(line.routes if isinstance(line, Line) else ()):
        if route.pattern.filter == one.pattern:
            own = (*table, "route", number)
            return document.at((*own, "qos")) or ", ".join(filter(None, (promised, document.at((*own, "from")))))
    return promised


def _filter(one: Filter) -> str:
    handling = "retained messages as the journal knows the filter"
    parts = [f"QoS {one.qos}", handling if one.retain_handling is None else _RETAINED[one.retain_handling]]
    parts += ["no local"] if one.no_local else []
    parts += [] if one.retain_as_published else ["RETAIN cleared"]
    parts += [f"identifier {one.identifier}"] if one.identifier is not None else []
    return ", ".join(parts)


# -- Kafka -----------------------------------------------------------------------------------------------------------


def _producer(bridge: Bridge, settings: SinkSettings, document: Document) -> list[Setting]:
    more: dict[str, Any] = {}
    if policy(settings.guarantee).transactions and settings.sink_id is not None:
        parts = sorted({0, settings.parallelism - 1})
        more["transactional.id"] = " to ".join(settings.transactional_id(settings.sink_id, part) for part in parts)
    own = {**_promised(settings), **dict.fromkeys(OWN, ALWAYS)}
    return list(_kafka(bridge, document, {**settings.client, **more, **OWN}, own))


def _promised(settings: SinkSettings) -> dict[str, str]:
    """Settings of librdkafka that the promise sets, with that."""
    return dict.fromkeys({*policy(settings.guarantee).kafka, *_TIMED}, f"guarantee = {settings.guarantee}")


def _kafka(
    bridge: Bridge, document: Document, given: Mapping[str, Any], own: Mapping[str, str], otherwise: str = DEFAULT
) -> Iterator[Setting]:
    """The settings that a client is given: always, by ``[kafka]``, or as `own` and `otherwise` say."""
    client = bridge.kafka.client()
    for name, value in sorted(given.items()):
        keys: list[KeyPath] = [("kafka", _NAMED[name])] if name in _NAMED else []
        keys += [("kafka", "settings", name), ("kafka", "settings", *name.split("."))]
        in_file = name in client and own.get(name) != ALWAYS
        source = (document.at(*keys) or "the file") if in_file else own.get(name, otherwise)
        row = _setting(document, name, value, source)
        yield {**row, "value": f"in {row['value']}"} if file_property(name) is not None else row


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(_text, value))
    return (
        str(value).lower()
        if isinstance(value, bool)
        else f"{value:g}"
        if isinstance(value, float)
        else str(value) or '""'
    )


def render_effective(settings: Mapping[str, Mapping[str, list[Setting]]]) -> list[str]:
    """The settings as lines of text, each still to be escaped."""
    out = []
    for line, parts in settings.items():
        for head, rows in parts.items():
            name, value = (max((len(row[key]) for row in rows), default=0) for key in ("name", "value"))
            out += ["", f'▸ line "{line}"   {head}']
            out += [f"  {row['name']:{name}}  {row['value']:{min(value, _WIDEST)}}   {row['source']}" for row in rows]
    return out
