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
from towline.kafka.options import SinkSettings
from towline.kafka.producers import PRODUCER_CONFIG
from towline.net.endpoint import Tls
from towline.net.settings import MqttSettings, WillSettings

_DEFAULT: Final = "default"
#: Source of a setting that no key of the file changes.
_ALWAYS: Final = "always"
_NEVER_EXPIRES: Final = 0xFFFFFFFF
#: Settings of librdkafka that the sink derives from its own time-out and name.
_DERIVED_SETTINGS: Final = ("message.timeout.ms", "transaction.timeout.ms", "transactional.id")
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


def _setting(document: Document, name: str, value: object, source: str) -> Setting:
    key = _KAFKA_KEYS.get(name, name.rpartition(".")[2])
    return {"name": name, "value": _value_text(document.restore_references(value, key)), "source": source}


def line_settings(bridge: Bridge, line: Uplink | Downlink, document: Document) -> Iterator[tuple[str, list[Setting]]]:
    """Yield the name of each client of a line, and its settings."""
    for gateway in line.all_gateways:
        member_text = f" of {gateway.name}" if gateway.share else ""
        yield f"MQTT{member_text}", list(_mqtt_settings(line, gateway, document))
    if isinstance(line, Uplink):
        yield "Kafka producer", _producer_settings(bridge, UplinkQuery(bridge, line).sink_settings(), document)
        return
    query = DownlinkQuery(bridge, line)
    settings = query.source_settings()
    if "sasl.jaas.config" in settings:  # the login contains the user name
        settings["sasl.jaas.config"] = settings["sasl.jaas.config"].partition(" ")[0]
    sources = dict.fromkeys(settings, _ALWAYS)
    yield "Kafka consumer (Spark's source)", list(_client_settings(bridge, document, settings, sources))
    if (dead_letter_settings := query.sink_settings()) is not None:
        yield "Kafka producer of dead letters", _producer_settings(bridge, dead_letter_settings, document)


def _mqtt_settings(line: AnyLine, gateway: GatewaySettings, document: Document) -> Iterator[Setting]:
    """Yield the MQTT settings of one gateway by their keys in ``[mqtt]``; settings without a value are skipped."""
    session = gateway.connection.session_config_for(gateway.connection.levels[0])
    table = document.table_path(line.kind, line.name)
    values: dict[str, Any] = {"brokers": None, "client_id": None}
    values |= {key: getattr(session, key, getattr(gateway, key)) for key in MqttSettings.model_fields}
    values["brokers"] = ", ".join(map(str, gateway.brokers))
    values |= {"will": gateway.will, "authenticator": gateway.authenticator, "retain_handling": None}
    values |= {"session_expiry_s": "for ever"} if session.session_expiry_s == _NEVER_EXPIRES else {}
    values |= {} if any(broker.tls for broker in gateway.brokers) else {"tls": None}
    for path, value in _flatten(values):
        name_source = document.first_location((*table, "name")) if path == ("client_id",) else None
        source = document.first_location((*table, "mqtt", *path), ("mqtt", *path)) or name_source or _DEFAULT
        yield _setting(document, ".".join(path), value, source)


def _flatten(table: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield each value of nested tables that is set, with its path of keys."""
    for key, value in table.items():
        if isinstance(value, Tls | WillSettings):
            yield from _flatten({name: getattr(value, name) for name in key_types(type(value))}, (*path, key))
        elif value not in (None, "", ()):
            yield (*path, key), value


def _producer_settings(bridge: Bridge, settings: SinkSettings, document: Document) -> list[Setting]:
    client, sink_policy = dict(settings.client), policy(settings.guarantee)
    if sink_policy.transactions and settings.sink_id is not None:
        ids = (settings.transactional_id(settings.sink_id, part) for part in sorted({0, settings.parallelism - 1}))
        client["transactional.id"] = " to ".join(ids)
    names = (*sink_policy.kafka_settings, *_DERIVED_SETTINGS)
    sources = dict.fromkeys(names, f"guarantee = {settings.guarantee}") | dict.fromkeys(PRODUCER_CONFIG, _ALWAYS)
    return list(_client_settings(bridge, document, {**client, **PRODUCER_CONFIG}, sources))


def _client_settings(
    bridge: Bridge, document: Document, settings: Mapping[str, Any], sources: Mapping[str, str]
) -> Iterator[Setting]:
    """Yield the settings of a Kafka client; the source is a key of ``[kafka]`` if the file has one."""
    file_settings = bridge.kafka.client_settings()
    for name, value in sorted(settings.items()):
        keys: list[KeyPath] = [("kafka", _KAFKA_KEYS[name])] if name in _KAFKA_KEYS else []
        keys += [("kafka", "settings", name), ("kafka", "settings", *name.split("."))]
        location = document.first_location(*keys) if name in file_settings else None
        row = _setting(document, name, value, location or sources.get(name, _DEFAULT))
        yield {**row, "value": f"in {row['value']}"} if secret_of_file_property(name) is not None else row


def _value_text(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(_value_text, value))
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value) or '""'


def settings_lines(bridge: Bridge) -> Iterator[str]:
    """Yield the settings of all lines as text, not yet escaped."""
    document = Document.reread(bridge.file, Path(bridge.file.name))
    for line in bridge.lines:
        for client_name, rows in line_settings(bridge, line, document):
            widths = [max((len(row[key]) for row in rows), default=0) for key in ("name", "value")]
            name_width, value_width = widths[0], min(widths[1], _MAX_VALUE_WIDTH)
            yield from ("", f'▸ line "{line.name}"   {client_name}')
            for row in rows:
                yield f"  {row['name']:{name_width}}  {row['value']:{value_width}}   {row['source']}"
