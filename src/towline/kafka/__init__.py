"""Kafka without Spark: the transactional writer, its markers, dead letters and look-ups. Thin over confluent-kafka."""
