"""Towline carries messages between MQTT brokers and Apache Kafka, and keeps its word about each of them."""
