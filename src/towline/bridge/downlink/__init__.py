"""Downlink: Kafka to MQTT."""
