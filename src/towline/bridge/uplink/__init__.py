"""Uplinks: lines from MQTT to Kafka."""
