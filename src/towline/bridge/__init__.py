"""Bridge of one TOML file: lines between MQTT and Kafka, run as Spark queries."""
