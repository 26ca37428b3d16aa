"""Transports, the session driver and the Python client."""
