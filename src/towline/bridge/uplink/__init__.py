"""MQTT to Kafka."""
