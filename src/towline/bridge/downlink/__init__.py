"""Kafka to MQTT."""
