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

    def setting(self, name: str, value: object, source: str, key: str = "") -> Setting:
        """A setting, as the file writes its value; `key` is that of the file, where its name is another."""
        return {"name": name, "value": _text(self.shown(value, key or name)), "source": source}


def effective(bridge: Bridge) -> dict[str, dict[str, list[Setting]]]:
    """Every setting of every line: line → what it is about → settings, as JSON values."""
    origins = Origins(bridge)
    return {line.name: dict(_of_line(bridge, line, origins)) for line in bridge.lines}


def _of_line(bridge: Bridge, line: Line | DownLine, origins: Origins) -> Iterator[tuple[str, list[Setting]]]:
    for gateway in line.each_gateway:
        name = f" of {gateway.name}" if gateway.share else ""
        yield f"MQTT{name}", list(_connection(line, gateway, origins))
    if isinstance(line, Line):
        settings = UplinkQuery(bridge, line).sink_settings()
        yield "Kafka producer", _producer(bridge, settings, origins)
        if policy(settings.guarantee).transactions:
            own = {**_promised(settings), **dict.fromkeys(READER, ALWAYS)}
            yield "Kafka consumer of markers", list(_kafka(bridge, origins, {**settings.client, **READER}, own))
        return
    query = DownlinkQuery(bridge, line)
    java = query.source_settings()
    if "sasl.jaas.config" in java:  # a login has the user's name in it, whoever gave that
        java["sasl.jaas.config"] = java["sasl.jaas.config"].partition(" ")[0]
    isolation = origins.at((*origins.table(line.kind, line.name), "isolation_level"))
    own = {"isolation.level": isolation or f"guarantee = {line.guarantee}"}
    yield "Kafka consumer (Spark's source)", list(_kafka(bridge, origins, java, own, ALWAYS))
    if (dead := query.sink_settings()) is not None:
        yield "Kafka producer of dead letters", _producer(bridge, dead, origins)


# -- MQTT ------------------------------------------------------------------------------------------------------------


def _connection(line: AnyLine, gateway: GatewaySettings, origins: Origins) -> Iterator[Setting]:
    """The settings of one gateway's connection, by their keys in ``[mqtt]``; those without a value are left out."""
    connection = gateway.connection
    config = connection.session_at(connection.levels[0])
    table, promised = origins.table(line.kind, line.name), f"guarantee = {line.guarantee}"
    named = " and ".join(
        filter(None, (origins.at(("mqtt", "client_id_prefix"), ("name",)), origins.at((*table, "name"))))
    )
    session = {key: getattr(config, key) for key in MqttSettings.model_fields if hasattr(config, key)}
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
        source = origins.at((*table, "mqtt", *path), ("mqtt", *path)) or own
        yield origins.setting(".".join(path), value, source)
    packet = connect_packet(config, None, discarding=False)
    yield origins.setting("Clean Start", packet.clean_start, ALWAYS)
    yield origins.setting("Maximum Packet Size", packet.max_packet_size or "not announced", ALWAYS)
    for one in config.filters:
        shown = origins.shown(one.pattern, "filter")
        yield origins.setting(f"filter {shown}", _filter(one), _source_of(one, line, origins, table, promised))
    if config.filters:
        place = origins.at((*table, "ack_after")) or promised
        yield origins.setting("acknowledged after", gateway.acks.value, place)


def _flat(table: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Each value that is there, by its key and those of the tables around it."""
    for key, value in table.items():
        if isinstance(value, Tls | WillSettings):
            yield from _flat({name: getattr(value, name) for name in keys_of(type(value))}, (*path, key))
        elif value not in (None, "", ()):
            yield (*path, key), value


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


# -- Kafka -----------------------------------------------------------------------------------------------------------


def _producer(bridge: Bridge, settings: SinkSettings, origins: Origins) -> list[Setting]:
    more: dict[str, Any] = {}
    if policy(settings.guarantee).transactions and settings.sink_id is not None:
        parts = sorted({0, settings.parallelism - 1})
        more["transactional.id"] = " to ".join(settings.transactional_id(settings.sink_id, part) for part in parts)
    own = {**_promised(settings), **dict.fromkeys(OWN, ALWAYS)}
    return list(_kafka(bridge, origins, {**settings.client, **more, **OWN}, own))


def _promised(settings: SinkSettings) -> dict[str, str]:
    """Settings of librdkafka that the promise sets, with that."""
    return dict.fromkeys({*policy(settings.guarantee).kafka, *_TIMED}, f"guarantee = {settings.guarantee}")


def _kafka(
    bridge: Bridge, origins: Origins, given: Mapping[str, Any], own: Mapping[str, str], otherwise: str = DEFAULT
) -> Iterator[Setting]:
    """The settings that a client is given: always, by ``[kafka]``, or as `own` and `otherwise` say."""
    client = bridge.kafka.client()
    for name, value in sorted(given.items()):
        keys: list[KeyPath] = [("kafka", _NAMED[name])] if name in _NAMED else []
        keys += [("kafka", "settings", name), ("kafka", "settings", *name.split("."))]
        in_file = name in client and own.get(name) != ALWAYS
        source = (origins.at(*keys) or "the file") if in_file else own.get(name, otherwise)
        row = origins.setting(name, value, source)
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
