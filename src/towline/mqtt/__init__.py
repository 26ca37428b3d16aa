"""Bytes ↔ packets ↔ session. Everything but `transport` is pure: no sockets, threads, disk or clock."""

from towline.mqtt.codec import Decoder, MalformedPacket, PublishRun
from towline.mqtt.events import Filter, SessionConfig, SessionRecord
from towline.mqtt.session import Session, State

__all__ = ["Decoder", "Filter", "MalformedPacket", "PublishRun", "Session", "SessionConfig", "SessionRecord", "State"]
