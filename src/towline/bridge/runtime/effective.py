"""Effective settings of each line's MQTT and Kafka clients, with the source of each value: ``towline check -v``.

The values are those that the clients get: the gateway's settings and its session's, and the Kafka settings that the
query passes to the sink and the sink to librdkafka. A secret is shown by its file, a value from the environment by
its variable.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

from towline.bridge.config.document import Document, KeyPath, key_types
from towline.bridge.config.model import AnyLine, Bridge, Downlink, Uplink
from towline.bridge.downlink.query import DownlinkQuery
from towline.bridge.uplink.query import UplinkQuery
from towline.gateway.settings import GatewaySettings
from towline.guarantee import policy
from towline.kafka.clientconfig import secret_of_file_property
from towline.kafka.markerstore import READER_CONFIG
from towline.kafka.options import SinkSettings
from towline.kafka.producers import PRODUCER_CONFIG
from towline.mqtt.events import Filter
from towline.mqtt.handshake import connect_packet
from towline.net.settings import MqttSettings, WillSettings
from towline.net.tls import Tls

DEFAULT: Final = "default"
#: Source of a setting that no key of the file changes.
ALWAYS: Final = "always"
_NEVER_EXPIRES: Final = 0xFFFFFFFF
_RETAIN_HANDLING_TEXTS: Final = ("retained messages always", "retained messages if new", "no retained messages")
#: Settings of librdkafka that the sink derives from its own time-out.
_TIMEOUT_SETTINGS: Final = frozenset({"message.timeout.ms", "transaction.timeout.ms", "transactional.id"})
#: Keys of [kafka] by the setting that they set.
_KAFKA_KEYS: Final = {
    "bootstrap.servers": "bootstrap_servers",
    "sasl.password.file": "password_file",
    "ssl.key.password.file": "key_password_file",
}
#: Largest width of the column of values, in characters; a longer value shifts its source.
_MAX_VALUE_WIDTH: Final = 24

#: ``name`` of a setting in the bridge file or its client, ``value`` as text, never a secret, and
#: ``source``: ``FILE:LINE``, ``guarantee = …``, ``default`` or ``always``.
Setting: TypeAlias = dict[str, str]


def effective_settings(bridge: Bridge) -> dict[str, dict[str, list[Setting]]]:
    """Return all settings of all lines as JSON values: line → client → settings."""
    document = Document.reread(bridge.file, Path(bridge.file.name))
    return {line.name: dict(_line_settings(bridge, line, document)) for line in bridge.lines}


def _setting(document: Document, name: str, value: object, source: str) -> Setting:
    key = _KAFKA_KEYS.get(name, name.rpartition(".")[2])
    return {"name": name, "value": _value_text(document.restore_references(value, key)), "source": source}


def _line_settings(bridge: Bridge, line: Uplink | Downlink, document: Document) -> Iterator[tuple[str, list[Setting]]]:
    for gateway in line.all_gateways:
        member_text = f" of {gateway.name}" if gateway.share else ""
        yield f"MQTT{member_text}", list(_mqtt_settings(line, gateway, document))
    if isinstance(line, Uplink):
        sink_settings = UplinkQuery(bridge, line).sink_settings()
        yield "Kafka producer", _producer_settings(bridge, sink_settings, document)
        if policy(sink_settings.guarantee).transactions:
            sources = {**_guarantee_sources(sink_settings), **dict.fromkeys(READER_CONFIG, ALWAYS)}
            reader_settings = {**sink_settings.client, **READER_CONFIG}
            yield "Kafka consumer of markers", list(_client_settings(bridge, document, reader_settings, sources))
        return
    query = DownlinkQuery(bridge, line)
    consumer_settings = query.source_settings()
    if "sasl.jaas.config" in consumer_settings:  # the login contains the user name
        consumer_settings["sasl.jaas.config"] = consumer_settings["sasl.jaas.config"].partition(" ")[0]
    isolation_source = document.first_location((*document.table_path(line.kind, line.name), "isolation_level"))
    sources = {"isolation.level": isolation_source or f"guarantee = {line.guarantee}"}
    rows = _client_settings(bridge, document, consumer_settings, sources, ALWAYS)
    yield "Kafka consumer (Spark's source)", list(rows)
    if (dead_letter_settings := query.sink_settings()) is not None:
        yield "Kafka producer of dead letters", _producer_settings(bridge, dead_letter_settings, document)


# -- MQTT ------------------------------------------------------------------------------------------------------------


def _mqtt_settings(line: AnyLine, gateway: GatewaySettings, document: Document) -> Iterator[Setting]:
    """Yield the MQTT settings of one gateway by their keys in ``[mqtt]``; settings without a value are skipped."""
    connection = gateway.connection
    session = connection.session_config_for(connection.levels[0])
    table, guarantee_source = document.table_path(line.kind, line.name), f"guarantee = {line.guarantee}"
    prefix_source = document.first_location(("mqtt", "client_id_prefix"), ("name",))
    id_sources = filter(None, (prefix_source, document.first_location((*table, "name"))))
    client_id_source = " and ".join(id_sources)
    values = vars(gateway) | {key: getattr(session, key) for key in MqttSettings.model_fields if hasattr(session, key)}
    values |= {"brokers": ", ".join(map(str, gateway.brokers)), "will": gateway.will}
    values |= {"authenticator": gateway.authenticator}
    values |= {"session_expiry_s": "for ever"} if session.session_expiry_s == _NEVER_EXPIRES else {}
    hidden_keys = {"retain_handling"} if any(broker.tls for broker in gateway.brokers) else {"retain_handling", "tls"}
    keys = dict.fromkeys(("brokers", "client_id", *MqttSettings.model_fields))
    for path, value in _flatten({key: values[key] for key in keys if key not in hidden_keys}):
        default_source = client_id_source if path == ("client_id",) else DEFAULT
        source = document.first_location((*table, "mqtt", *path), ("mqtt", *path)) or default_source
        yield _setting(document, ".".join(path), value, source)
    packet = connect_packet(session, None, discard_session=False)
    yield _setting(document, "Clean Start", packet.clean_start, ALWAYS)
    yield _setting(document, "Maximum Packet Size", packet.max_packet_size or "not announced", ALWAYS)
    for topic_filter in session.filters:
        name = f"filter {document.restore_references(topic_filter.pattern, 'from')}"
        source = _qos_source(topic_filter.pattern, line, document, table) or guarantee_source
        yield _setting(document, name, _filter_text(topic_filter), source)
    if session.filters:
        ack_source = document.first_location((*table, "ack_after")) or guarantee_source
        yield _setting(document, "acknowledged after", gateway.effective_ack_after.value, ack_source)


def _flatten(table: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield each value of nested tables that is set, with its path of keys."""
    for key, value in table.items():
        if isinstance(value, Tls | WillSettings):
            yield from _flatten({name: getattr(value, name) for name in key_types(type(value))}, (*path, key))
        elif value not in (None, "", ()):
            yield (*path, key), value


def _qos_source(pattern: str, line: AnyLine, document: Document, table: tuple[str, int]) -> str:
    """Return the source of a filter's QoS: the route that sets it, or the guarantee and the route; "" for no route."""
    for number, route in enumerate(line.routes if isinstance(line, Uplink) else ()):
        if route.pattern.filter == pattern:
            path = (*table, "route", number)
            sources = filter(None, (f"guarantee = {line.guarantee}", document.first_location((*path, "from"))))
            return document.first_location((*path, "qos")) or ", ".join(sources)
    return ""


def _filter_text(topic_filter: Filter) -> str:
    handling, retain_text = topic_filter.retain_handling, "retained messages as the journal knows the filter"
    parts = [f"QoS {topic_filter.qos}", retain_text if handling is None else _RETAIN_HANDLING_TEXTS[handling]]
    parts += ["no local"] if topic_filter.no_local else []
    parts += [] if topic_filter.retain_as_published else ["RETAIN cleared"]
    parts += [f"identifier {topic_filter.identifier}"] if topic_filter.identifier is not None else []
    return ", ".join(parts)


# -- Kafka -----------------------------------------------------------------------------------------------------------


def _producer_settings(bridge: Bridge, settings: SinkSettings, document: Document) -> list[Setting]:
    client = dict(settings.client)
    if policy(settings.guarantee).transactions and settings.sink_id is not None:
        ids = (settings.transactional_id(settings.sink_id, part) for part in sorted({0, settings.parallelism - 1}))
        client["transactional.id"] = " to ".join(ids)
    sources = {**_guarantee_sources(settings), **dict.fromkeys(PRODUCER_CONFIG, ALWAYS)}
    return list(_client_settings(bridge, document, {**client, **PRODUCER_CONFIG}, sources))


def _guarantee_sources(settings: SinkSettings) -> dict[str, str]:
    """Return the librdkafka settings that the guarantee sets, with the guarantee as their source."""
    names = {*policy(settings.guarantee).kafka_settings, *_TIMEOUT_SETTINGS}
    return dict.fromkeys(names, f"guarantee = {settings.guarantee}")


def _client_settings(
    bridge: Bridge,
    document: Document,
    settings: Mapping[str, Any],
    sources: Mapping[str, str],
    default_source: str = DEFAULT,
) -> Iterator[Setting]:
    """Yield the settings of a Kafka client with their sources.

    The source is a key of ``[kafka]`` if the file has one and the setting is not `ALWAYS`; else it comes from `sources`
    or is `default_source`.
    """
    file_settings = bridge.kafka.client_settings()
    for name, value in sorted(settings.items()):
        keys: list[KeyPath] = [("kafka", _KAFKA_KEYS[name])] if name in _KAFKA_KEYS else []
        keys += [("kafka", "settings", name), ("kafka", "settings", *name.split("."))]
        in_file = name in file_settings and sources.get(name) != ALWAYS
        source = (document.first_location(*keys) or "the file") if in_file else sources.get(name, default_source)
        row = _setting(document, name, value, source)
        yield {**row, "value": f"in {row['value']}"} if secret_of_file_property(name) is not None else row


def _value_text(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(_value_text, value))
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value) or '""'


def render_effective(settings: Mapping[str, Mapping[str, list[Setting]]]) -> list[str]:
    """Return the settings as lines of text, not yet escaped."""
    text_lines = []
    for line, client_settings in settings.items():
        for client_name, rows in client_settings.items():
            names, values = (max((len(row[key]) for row in rows), default=0) for key in ("name", "value"))
            values = min(values, _MAX_VALUE_WIDTH)
            text_lines += ["", f'▸ line "{line}"   {client_name}']
            text_lines += [f"  {row['name']:{names}}  {row['value']:{values}}   {row['source']}" for row in rows]
    return text_lines
