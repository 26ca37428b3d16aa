"""A journal in Kafka: rows in a landing topic, state beside them, both in one transaction (docs/kafka-inbox.md)."""
