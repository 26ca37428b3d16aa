"""The gateway process: MQTT session, journals on disk and Arrow Flight service."""
