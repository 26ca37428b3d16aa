"""Generated messages and headers for a round trip, and an MQTT client that knows nothing of Towline."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from paho.mqtt import client as paho
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.subscribeoptions import SubscribeOptions

from tests.helpers import wait_until
from towline_prove.devstack import Mosquitto

__all__ = [
    "Foreign",
    "Header",
    "Said",
    "generated_headers",
    "generated_messages",
    "headers_of",
    "message_of",
    "properties_of",
]

T = TypeVar("T")
Header = tuple[str, bytes | None]


def _allowed(character: str) -> bool:
    code = ord(character)
    control, without = code < 0x20 or 0x7F <= code <= 0x9F, 0xFDD0 <= code <= 0xFDEF or code & 0xFFFE == 0xFFFE
    return not (control or without)


#: What MQTT allows in a string and Mosquitto takes: no U+0000, no control and no non-characters (MQTT 5, 1.5.4).
_CHARACTERS = st.characters(codec="utf-8").filter(_allowed)
_TEXT = st.text(_CHARACTERS, max_size=20)
_LEVELS = st.text(_CHARACTERS.filter(lambda c: c not in "+#"), max_size=20)


class Said(NamedTuple):
    """A message, or what of it came back; `expiry` runs down on its way.

    Attributes:
        topic: Behind the tree it is in.
    """

    topic: str
    payload: bytes
    qos: int
    retain: bool
    payload_format: int | None
    content_type: str | None
    response_topic: str | None
    correlation_data: bytes | None
    user_properties: tuple[tuple[str, str], ...]
    expiry: int | None


_TRACE = ("traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")
_MESSAGE = st.builds(
    Said,
    topic=_LEVELS,
    payload=st.binary(max_size=60),
    qos=st.integers(0, 2),
    retain=st.booleans(),
    payload_format=st.sampled_from([None, 0, 1]),
    content_type=st.none() | _TEXT,
    response_topic=st.none() | _LEVELS.filter(bool),
    correlation_data=st.none() | st.binary(max_size=40),
    user_properties=st.lists(st.tuples(_TEXT, _TEXT) | st.sampled_from([("again", ""), _TRACE]), max_size=5).map(tuple),
    expiry=st.none() | st.integers(7200, 0xFFFFFFFF),
)
_HEADERS = st.lists(
    st.tuples(_TEXT | st.just("again"), st.none() | _TEXT.map(str.encode) | st.binary(max_size=20)), max_size=5
)


def _generated(what: st.SearchStrategy[T], count: int, number: int) -> list[T]:
    made: list[T] = []

    @seed(number)
    @settings(max_examples=count, phases=[Phase.generate], database=None, suppress_health_check=list(HealthCheck))
    @given(what)
    def collect(one: T) -> None:
        made.append(one)

    collect()
    return made


def generated_messages(count: int, number: int) -> list[Said]:
    """Messages with every property of a PUBLISH; each topic begins with a number of its own."""
    made = _generated(_MESSAGE, count, number)
    return [one._replace(topic=f"{n}/{one.topic}") for n, one in enumerate(made)]


def generated_headers(count: int, number: int) -> list[list[Header]]:
    """Headers that anybody may have given a record: repeated, without value, empty, no text."""
    return _generated(_HEADERS, count, number)


def headers_of(said: Said, tree: str) -> list[Header]:
    """The headers of its Kafka record but those that hang on the time."""
    texts = {
        "mqtt.topic": f"{tree}{said.topic}",
        "mqtt.qos": str(said.qos),
        "mqtt.retain": "true" if said.retain else None,
        "mqtt.payload-format": "1" if said.payload_format else None,  # 0 says the same as none does
        "mqtt.content-type": said.content_type,
        "mqtt.response-topic": said.response_topic,
    }
    made: list[Header] = [(name, text.encode()) for name, text in texts.items() if text is not None]
    made += [("mqtt.correlation-data", said.correlation_data)] if said.correlation_data is not None else []
    users = [(name if name == _TRACE[0] else f"mqtt.user.{name}", value) for name, value in said.user_properties]
    return made + [(name, value.encode()) for name, value in users]


def properties_of(headers: list[Header]) -> tuple[tuple[str, str], ...] | None:
    """The user properties that headers of Kafka become; None where MQTT has no place for one of them."""
    try:
        pairs = tuple((name, (value or b"").decode()) for name, value in headers)
    except UnicodeDecodeError:
        return None
    text = "".join(value for _, value in pairs)
    return pairs if all(map(_allowed, text)) else None


def message_of(message: Any, tree: str) -> Said:
    """What a foreign client was given."""
    said = message.properties

    def has(name: str) -> Any:
        return getattr(said, name, None)

    return Said(
        message.topic.removeprefix(tree),
        message.payload,
        message.qos,
        message.retain,
        has("PayloadFormatIndicator"),
        has("ContentType"),
        has("ResponseTopic"),
        has("CorrelationData"),
        tuple(map(tuple, has("UserProperty") or ())),
        has("MessageExpiryInterval"),
    )


class Foreign:
    """A client of its own that publishes what is said, and keeps what comes below `tree`."""

    def __init__(self, broker: Mosquitto, tree: str) -> None:
        self.messages: list[Any] = []
        self._client = paho.Client(CallbackAPIVersion.VERSION2, client_id="foreign", protocol=paho.MQTTv5)
        self._client.on_message = lambda _client, _data, message: self.messages.append(message)
        self._client.max_inflight_messages_set(20)  # Mosquitto takes no more
        self._client.connect("127.0.0.1", broker.port)
        subscribed: list[Any] = []
        self._client.on_subscribe = lambda *_: subscribed.append(True)
        self._client.subscribe(f"{tree}#", options=SubscribeOptions(qos=2, retainAsPublished=True))
        self._client.loop_start()
        wait_until(lambda: bool(subscribed), what="the subscription")

    def publish(self, messages: list[Said], tree: str) -> None:
        """Return when the broker has all of them."""
        sent = [
            self._client.publish(tree + one.topic, one.payload, one.qos, one.retain, _properties(one))
            for one in messages
        ]
        for result in sent:
            result.wait_for_publish(60)

    def close(self) -> None:
        self._client.disconnect()
        self._client.loop_stop()


def _properties(said: Said) -> Properties:
    made = Properties(PacketTypes.PUBLISH)  # type: ignore[no-untyped-call]
    values = {
        "PayloadFormatIndicator": said.payload_format,
        "ContentType": said.content_type,
        "ResponseTopic": said.response_topic,
        "CorrelationData": said.correlation_data,
        "UserProperty": list(said.user_properties) or None,
        "MessageExpiryInterval": said.expiry,
    }
    for name, value in values.items():
        if value is not None:
            setattr(made, name, value)
    return made
