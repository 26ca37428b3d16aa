"""Kafka without Spark: transactional sink, batch markers, dead letters, admin requests. Thin over confluent-kafka."""
