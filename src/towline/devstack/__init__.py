"""Real brokers on this machine: Mosquitto and Kafka for the demo, tests and prove, RabbitMQ and ejabberd for tests."""

from __future__ import annotations

from towline.devstack.erlang import Ejabberd, RabbitMQ
from towline.devstack.kafka import Kafka
from towline.devstack.mosquitto import Mosquitto, MosquittoTooOld
from towline.devstack.ports import free_port
from towline.devstack.server import Server
from towline.devstack.stack import Stack

__all__ = ["Ejabberd", "Kafka", "Mosquitto", "MosquittoTooOld", "RabbitMQ", "Server", "Stack", "free_port"]
