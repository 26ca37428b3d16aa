"""Spark integration: data sources ``mqtt`` and ``kafka_transactional``. Import its modules by name."""
