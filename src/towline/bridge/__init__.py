"""The bridge: one TOML file becomes running lines from MQTT to Kafka."""
