"""Devices at a broker of this machine: clients that are not ours."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from paho.mqtt import client as paho
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties


@contextlib.contextmanager
def device(
    port: int, protocol: MQTTProtocolVersion = paho.MQTTv5, client_id: str = "", in_flight: int = 20
) -> Iterator[paho.Client]:
    """One that is connected while the block runs, and has so many messages unacknowledged at most."""
    client = paho.Client(CallbackAPIVersion.VERSION2, client_id=client_id, protocol=protocol)
    client.max_inflight_messages_set(in_flight)
    client.connect("127.0.0.1", port)
    client.loop_start()
    try:
        yield client
    finally:
        client.disconnect()
        client.loop_stop()


@contextlib.contextmanager
def listening(port: int, *filters: tuple[str, Any]) -> Iterator[tuple[paho.Client, list[paho.MQTTMessage]]]:
    """One with these filters and their QoS or options, and the messages that came to it."""
    heard: list[paho.MQTTMessage] = []
    with device(port) as client:
        client.on_message = lambda _client, _data, message: heard.append(message)
        client.subscribe([*filters])
        yield client, heard


def properties_of(values: dict[str, Any]) -> Properties:
    """Of a PUBLISH."""
    made = Properties(PacketTypes.PUBLISH)  # type: ignore[no-untyped-call]
    for name, value in values.items():
        setattr(made, name, value)
    return made
