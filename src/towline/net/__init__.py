"""Transports, the driver of a session, and the Python client."""
