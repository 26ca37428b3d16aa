"""Real Mosquitto and real Kafka on this machine, for the demo, the tests and prove."""

from __future__ import annotations

from towline.devstack.kafka import Kafka
from towline.devstack.mosquitto import Mosquitto, MosquittoTooOld
from towline.devstack.ports import free_port
from towline.devstack.server import Server
from towline.devstack.stack import Stack

__all__ = ["Kafka", "Mosquitto", "MosquittoTooOld", "Server", "Stack", "free_port"]
