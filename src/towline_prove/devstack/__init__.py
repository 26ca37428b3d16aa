"""Real brokers on this machine: Mosquitto and Kafka for the demo, tests and proof runs."""

from __future__ import annotations

from towline_prove.devstack.kafka import Kafka
from towline_prove.devstack.mosquitto import Mosquitto, MosquittoTooOld
from towline_prove.devstack.process import free_port
from towline_prove.devstack.server import Server
from towline_prove.devstack.stack import Stack

__all__ = ["Kafka", "Mosquitto", "MosquittoTooOld", "Server", "Stack", "free_port"]
